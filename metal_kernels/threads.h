// What all kernels share.

#include <metal_stdlib>
using namespace metal;

// Lanes of a simdgroup, on every Apple GPU.
constant constexpr int LANES = 32;
