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

// Instantiates the template KERNEL with these arguments as the host's kernel NAME. With SELECTS only where
// `WANTED_<NAME>` is defined as `0, 1`: compiling all instances takes many times as long.
#ifndef INSTANCE
#define INSTANCE_0(...)
#define INSTANCE_1(NAME, KERNEL, ...) \
    template [[host_name(#NAME)]] [[kernel]] decltype(KERNEL<__VA_ARGS__>) KERNEL<__VA_ARGS__>;
#ifdef SELECTS
#define SECOND_OF(FIRST, SECOND, ...) SECOND
#define IS_WANTED(...) SECOND_OF(__VA_ARGS__, 0, 0)
#define JOINED(A, B) A##B
#define JOIN(A, B) JOINED(A, B)
#define INSTANCE(NAME, KERNEL, ...) JOIN(INSTANCE_, IS_WANTED(WANTED_##NAME))(NAME, KERNEL, __VA_ARGS__)
#else
#define INSTANCE(NAME, KERNEL, ...) INSTANCE_1(NAME, KERNEL, __VA_ARGS__)
#endif
#endif
