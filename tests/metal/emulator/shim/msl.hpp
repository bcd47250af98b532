// The kernels' language and its library, as far as the kernels use them, for clang.
//
// Freestanding, because the same headers serve two compilations: C++ that runs on this machine, and OpenCL C++ that
// checks the address spaces. What is ambiguous or an error for Apple's compiler should be one here: an overload for
// each type, no implicit conversion between vectors. Those that are not in this folder are in `src/ops/gpu/device/msl`,
// for NVIDIA GPUs too.
#pragma once
#include "platform.hpp"
#include "traits.hpp"
#if defined(MSL_ADDRESS_SPACES)
#include "vectors_declared.hpp"
#else
#include "vectors.hpp"
#endif
#include "packed.hpp"
#include "math.hpp"
#include "synchronisation.hpp"
#if defined(MSL_ADDRESS_SPACES)
#include "simdgroup_declared.hpp"
#else
#include "simdgroup.hpp"
#include "simdgroup_matrix.hpp"
#include "tensor_cores.hpp"
#include "atomics.hpp"
#include "entry.hpp"
#endif
