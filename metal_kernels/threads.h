// Shared by all kernels.

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

// `sum` + a · b. All accumulations use an explicit `fma`: a compiler would contract some multiplications and not
// others, differently in the kernels for other numbers of rows, and a row would have other bits there.
inline float add_dot(float4 a, float4 b, float sum) {
    return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, fma(a.w, b.w, sum))));
}

// Instantiates the template KERNEL with these arguments as the host's kernel NAME.
#ifndef INSTANCE
#define INSTANCE(NAME, KERNEL, ...) \
    template [[host_name(#NAME)]] [[kernel]] decltype(KERNEL<__VA_ARGS__>) KERNEL<__VA_ARGS__>;
#endif
