// What all kernels share.

#include <metal_stdlib>
using namespace metal;

// Lanes of a simdgroup, on every Apple GPU.
constant constexpr int LANES = 32;

// The sum over the lanes of a group of `width` neighbours (a power of two), in each of them.
inline float sum_of_lanes(float value, int width) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
        value += simd_shuffle_xor(value, ushort(distance));
    }
    return value;
}
