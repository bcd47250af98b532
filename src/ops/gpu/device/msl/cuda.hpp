// Metal's language and library for NVIDIA's run-time compiler, as far as the kernels use them.
#pragma once
#define MSL_CUDA
#include "platform_cuda.hpp"
#include "traits.hpp"
#include "vectors.hpp"
#include "packed.hpp"
#include "math.hpp"
#include "synchronisation.hpp"
#include "simdgroup_cuda.hpp"
#include "simdgroup_matrix.hpp"
#include "tensor_cores_cuda.hpp"
#include "stages_cuda.hpp"
#include "atomics_cuda.hpp"
#include "entry_cuda.hpp"
