// Checks the kernels' assumptions about the GPU and its compiler one by one, so that a different device is
// distinguished from a wrong kernel. Each thread computes one value from bits in memory, which no compiler can fold.

#include "matrices.h"

struct ProbeArgs {
    uint count;
};

// A word as a half, in its low bits, and as a float.
inline half low(uint bits) {
    return as_type<half2>(bits).x;
}
inline float number(uint bits) {
    return as_type<float>(bits);
}

template <class P>
[[kernel]] void probe(
    constant ProbeArgs& a [[buffer(0)]],
    device const uint* in [[buffer(1)]],
    device uint* out [[buffer(2)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = index * LANES + lane;
    if (i < a.count) {
        out[i] = P::of(in[i]);
    }
}

#define PROBE(NAME, RESULT)                              \
    struct NAME##_probe {                                \
        static uint of(uint bits) { return RESULT; }     \
    };                                                   \
    INSTANCE(probe_##NAME, probe, NAME##_probe)

// A half as a float: codes of weights are halves below the normal ones.
PROBE(half_to_float, as_type<uint>(float(low(bits))))
// A float as a half: weights and cached values may be as small.
PROBE(float_to_half, uint(as_type<ushort>(half(number(bits)))))
// Of masked scores, of logits far below the highest, and of gates.
PROBE(exp2, as_type<uint>(fast::exp2(number(bits))))
PROBE(exp, as_type<uint>(exp(number(bits))))
PROBE(silu, as_type<uint>(number(bits) / (1.0f + exp(-number(bits)))))

// out = 1024 · in, computed as a matmul of half and float matrices: eight rows of eight halves, in the low bits of
// words.
[[kernel]] void probe_matrices(
    constant ProbeArgs& a [[buffer(0)]],
    device const uint* in [[buffer(1)]],
    device uint* out [[buffer(2)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    threadgroup half halves[64];
    threadgroup float diagonal[64];
    threadgroup float results[64];
    for (uint i = lane; i < 64; i += LANES) {
        const uint at = index * 64 + i;
        halves[i] = low(at < a.count ? in[at] : 0u);
        diagonal[i] = i / 8 == i % 8 ? 1024.0f : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 left;
    simdgroup_half8x8 right;
    simdgroup_float8x8 product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(left, diagonal, 8);
    simdgroup_load(right, halves, 8);
    simdgroup_multiply_accumulate(product, left, right, product);
    simdgroup_store(product, results, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = lane; i < 64; i += LANES) {
        const uint at = index * 64 + i;
        if (at < a.count) {
            out[at] = as_type<uint>(results[i]);
        }
    }
}

// out = in, by matrices whose lanes read their own values back: eight rows of eight floats; every other matrix is of
// halves.
[[kernel]] void probe_cells(
    constant ProbeArgs& a [[buffer(0)]],
    device const uint* in [[buffer(1)]],
    device uint* out [[buffer(2)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    threadgroup float floats[64];
    threadgroup half halves[64];
    for (uint i = lane; i < 64; i += LANES) {
        const uint at = index * 64 + i;
        floats[i] = at < a.count ? number(in[at]) : 0.0f;
        halves[i] = half(floats[i]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 of_floats;
    simdgroup_half8x8 of_halves;
    simdgroup_load(of_floats, floats, 8);
    simdgroup_load(of_halves, halves, 8);
    const Cell cell = cell_of(lane);
#pragma clang loop unroll(full)
    for (uint i = 0; i < 2; ++i) {
        const uint at = index * 64 + cell.row * 8 + cell.column + i;
        const float value = index % 2 == 0 ? of_floats.thread_elements()[i] : float(of_halves.thread_elements()[i]);
        if (at < a.count) {
            out[at] = as_type<uint>(value);
        }
    }
}
