// Kernels that take more registers than a thread of an Apple GPU has, or memory instead of registers.
#include <metal_stdlib>
using namespace metal;

struct Args {
    uint stride;
};

// All values are read before any is used.
[[kernel]] void values_of_many_reads(
    constant Args& a [[buffer(0)]],
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]
) {
    float values[160];
#pragma clang loop unroll(full)
    for (int i = 0; i < 160; ++i) {
        values[i] = x[i * a.stride + t];
    }
    threadgroup_barrier(mem_flags::mem_device);
#pragma clang loop unroll(full)
    for (int i = 0; i < 160; ++i) {
        x[(159 - i) * a.stride + t] = values[i];
    }
}

// Which value is read is not known before the kernel runs.
[[kernel]] void place_known_late(
    constant Args& a [[buffer(0)]],
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]
) {
    float values[16];
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; ++i) {
        values[i] = x[i * a.stride + t] * x[i];
    }
    // Until now all of them are needed.
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = 0; i < uint(x[1]); ++i) {
        values[uint(x[i]) % 16] += 1.0f;
    }
    x[t] = values[uint(x[0]) % 16];
}

// These fit.
[[kernel]] void values_of_a_few_reads(
    constant Args& a [[buffer(0)]],
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]
) {
    float values[48];
#pragma clang loop unroll(full)
    for (int i = 0; i < 48; ++i) {
        values[i] = exp(x[i * a.stride + t] * x[i]);
    }
    threadgroup_barrier(mem_flags::mem_device);
#pragma clang loop unroll(full)
    for (int i = 0; i < 48; ++i) {
        x[(47 - i) * a.stride + t] = values[i] * values[47 - i];
    }
}
