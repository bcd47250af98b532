// Matmuls of weights with 17 to 64 rows of activations on tensor cores.
//
// Multiplications and additions have the order of `few_rows.cu`, so that a row has the same bits in both. But a thread
// block has 128 rows of weights, 16 for each warp, and all rows of activations. These are packed beforehand, and are
// loaded to shared memory for all warps, K tile by K tile, one slice after the other. A matrix with few rows has
// several thread blocks for each 128, which divide the slices among them; another kernel adds their sums.

#define FOR_NVIDIA
#include "slices.h"

// Sums take most of a thread's registers.
#define MAX_THREADS 256
#define MIN_THREADGROUPS 1

constant ushort K_SPLITS [[function_constant(5)]];   // thread blocks that divide the slices of a row among them
constant ushort STAGES [[function_constant(6)]];  // fragments in shared memory, in use or loading

constant constexpr uint WARPS = MAX_THREADS / LANES;
constant constexpr uint NUM_THREADS = MAX_THREADS;
constant constexpr uint QUARTER = SLICES / 4;

template <typename F, int TOKEN_TILES, bool GATED>
inline void several(
    constant MatmulArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const uint4* x,
    device const float* x_factors,
    device float* out,
    device float* partials,
    threadgroup char* memory,
    uint tile,
    uint k_split,
    uint lane,
    uint warp
) {
    constexpr uint RESULTS = GATED ? 8 : 16;
    constexpr uint TOKENS = TOKEN_TILES * 8;
    constexpr uint COLUMNS = Fragment<F>::COLUMNS;
    constexpr uint EIGHTHS = COLUMNS / 8;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint thread_index = warp * LANES + lane;
    const uint num_k_tiles = (16 * a.num_units + COLUMNS - 1) / COLUMNS;
    const uint first_row = ((tile - matrix.first_group) * WARPS + warp) * RESULTS;
    const uint first_slice = k_split * (SLICES / K_SPLITS);
    const uint end_slice = min(first_slice + SLICES / K_SPLITS, num_k_tiles);

    // Missing rows repeat the weights of existing ones; their sums are not used.
    const Planes planes = in_registers(matrix.planes);
    Source<F> sources[2];
#pragma clang loop unroll(full)
    for (int h = 0; h < 2; ++h) {
        const uint num_eights = (matrix.num_rows + 7) / 8;
        const uint eight = min(GATED ? first_row / 8 : first_row / 8 + h, num_eights - 1);
        sources[h] = Source<F>(GATED && h == 1 ? up_weights : weights, planes, eight * num_k_tiles, lane);
    }

    // A stage has a K tile of all rows of activations, and then the warps' weights. In odd rows, groups of eight
    // columns are swapped, so that those that a warp reads together lie in different banks.
    const auto index_of_x = [](uint token, uint eighth) {
        return token * EIGHTHS + (eighth ^ token % 2 * (COLUMNS == 64 ? 1 : 4));
    };
    threadgroup uint4* staged = (threadgroup uint4*)memory;
    const Ring<F, NUM_THREADS, 2> ring(memory + STAGES * (TOKENS * COLUMNS * 2), thread_index);
    constexpr uint TURNS = (TOKENS * EIGHTHS + NUM_THREADS - 1) / NUM_THREADS;
    const auto bring_x = [&](uint stage, uint k_tile) {
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < TURNS; ++turn) {
            const uint token = thread_index / EIGHTHS + turn * (NUM_THREADS / EIGHTHS);
            const uint eighth = thread_index % EIGHTHS;
            // Missing rows repeat an existing one; their sums are not used.
            msl_copy(
                staged + stage * (TOKENS * EIGHTHS) + index_of_x(token, eighth),
                x + ulong(min(token, a.num_tokens - 1)) * (a.x_stride / 8) + k_tile * EIGHTHS + eighth
            );
        }
    };
    const auto bring_weights = [&](uint stage, uint k_tile) {
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            ring.bring(stage, h, sources[h], k_tile);
        }
    };
    // The K tile that is loaded next, slice by slice.
    struct Next {
        uint slice;
        uint k_tile;
    };
    const auto advance = [&](thread Next& next) {
        next.k_tile += SLICES;
        if (next.k_tile >= num_k_tiles) {
            next.slice += 1;
            next.k_tile = next.slice;
        }
    };
    // Weights are not waited for.
    Next next = { first_slice, first_slice };
    Next next_of_x = next;
#pragma clang loop unroll(full)
    for (uint stage = 0; stage + 1 < STAGES; ++stage) {
        if (next.slice < end_slice) {
            bring_weights(stage, next.k_tile);
            advance(next);
        }
    }
    msl_wait_for_inputs();
#pragma clang loop unroll(full)
    for (uint stage = 0; stage + 1 < STAGES; ++stage) {
        if (next_of_x.slice < end_slice) {
            bring_x(stage, next_of_x.k_tile);
            advance(next_of_x);
        }
        msl_end_group();
    }

    // Sums of a quarter of the slices, of two quarters, of all: the levels that the thread block's slices need.
    float quarter[TOKEN_TILES][4] = {};
    float half_of_all[TOKEN_TILES][4] = {};
    float all[TOKEN_TILES][4] = {};
    uint stage = 0;
    uint free_stage = STAGES - 1;
#pragma clang loop unroll(disable)
    for (uint slice = first_slice; slice < first_slice + SLICES / K_SPLITS; ++slice) {
        float sums[TOKEN_TILES][4] = {};
#pragma clang loop unroll(disable)
        for (uint k_tile = slice; k_tile < num_k_tiles; k_tile += SLICES) {
            if (STAGES == 4) {
                msl_wait_for_groups<2>();
            } else {
                msl_wait_for_groups<1>();
            }
            // After this barrier all threads see the loaded stage, and the previous one is free.
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (next.slice < end_slice) {
                bring_weights(free_stage, next.k_tile);
                bring_x(free_stage, next.k_tile);
                advance(next);
            }
            msl_end_group();
            const Fragment<F> fragments[2] = { ring.take(stage, 0), ring.take(stage, 1) };
            threadgroup const uint4* own_x = staged + stage * (TOKENS * EIGHTHS);
            free_stage = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            multiply_fragments<F, TOKEN_TILES>(
                fragments, [&](int n, int eight) { return own_x[index_of_x(8 * n + g, column_of_eight<F>(eight, t) / 8)]; },
                sums
            );
        }
        const bool ends_quarter = slice % QUARTER == QUARTER - 1;
        const bool ends_half = slice % (2 * QUARTER) == 2 * QUARTER - 1;
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                quarter[n][i] += sums[n][i];
                if (K_SPLITS < 4 && ends_quarter) {
                    half_of_all[n][i] += quarter[n][i];
                    quarter[n][i] = 0.0f;
                }
                if (K_SPLITS < 2 && ends_half) {
                    all[n][i] += half_of_all[n][i];
                    half_of_all[n][i] = 0.0f;
                }
            }
        }
    }

    const auto total = [&](int n, int i) { return K_SPLITS == 4 ? quarter[n][i] : K_SPLITS == 2 ? half_of_all[n][i] : all[n][i]; };
#pragma clang loop unroll(full)
    for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
        for (int odd = 0; odd < 2; ++odd) {
            const uint token = 8 * n + 2 * t + odd;
            if (token >= a.num_tokens) {
                continue;
            }
            const float factor = HAS_NORM && K_SPLITS == 1 ? x_factors[token] : 1.0f / X_SCALE;
            const ulong out_index = ulong(token) * a.out_stride + matrix.out_offset + first_row + g;
#pragma clang loop unroll(full)
            for (uint h = 0; h < (GATED ? 1 : 2); ++h) {
                if (first_row + g + 8 * h >= matrix.num_rows) {
                    continue;
                }
                const float sum = total(n, 2 * h + odd);
                if (K_SPLITS > 1) {
                    partials[ulong(k_split) * a.num_tokens * a.out_stride + out_index + 8 * h] = sum;
                } else if (GATED) {
                    store(out, out_index, gated(sum * factor, total(n, 2 + odd) * factor));
                } else {
                    const float before = ADDS ? out[out_index + 8 * h] : 0.0f;
                    const float own_bias = HAS_BIAS ? bias[first_row + g + 8 * h] : 0.0f;
                    store(out, out_index + 8 * h, before + fma(sum, factor, own_bias));
                }
            }
        }
    }
}

template <typename F, typename LAST, int TOKEN_TILES>
[[kernel]] void several_rows(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const uint4* x [[buffer(7)]],          // packed: [row, stride]
    device const float* x_factors [[buffer(8)]],  // [row]
    device float* out [[buffer(9)]],
    device float* partials [[buffer(10)]],  // [split, row, as results]
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint warp [[simdgroup_index_in_threadgroup]]
) {
    const uint tile = index.x;
    const uint m = tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    if (is_same_v<F, LAST> || m < 2) {
        several<F, TOKEN_TILES, false>(
            a, a.matrices[m], weights, weights, bias, x, x_factors, out, partials, memory, tile, index.y, lane, warp
        );
    } else {
        several<LAST, TOKEN_TILES, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, x_factors, out, partials, memory, tile, index.y, lane, warp
        );
    }
}

// out = silu(gate · x) · (up · x), with the norm of x first.
template <typename F, int TOKEN_TILES>
[[kernel]] void several_rows_swiglu(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* gate_weights [[buffer(1)]],
    device const uchar* up_weights [[buffer(2)]],
    device const uint4* x [[buffer(3)]],
    device const float* x_factors [[buffer(4)]],
    device float* out [[buffer(5)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint warp [[simdgroup_index_in_threadgroup]]
) {
    several<F, TOKEN_TILES, true>(
        a, a.matrices[0], gate_weights, up_weights, x_factors, x, x_factors, out, out, memory, index.x, 0, lane, warp
    );
}

// Reduces the partial sums of the thread blocks that share slices.
[[kernel]] void reduce_splits(
    constant MatmulArgs& a [[buffer(0)]],
    device const float* bias0 [[buffer(1)]],
    device const float* bias1 [[buffer(2)]],
    device const float* bias2 [[buffer(3)]],
    device const float* x_factors [[buffer(4)]],
    device const float* partials [[buffer(5)]],
    device float* out [[buffer(6)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    constexpr uint TURNS = 4;
    const uint token = index.y;
    const uint m = index.z;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    const ulong split_len = ulong(a.num_tokens) * a.out_stride;
    const ulong out_index = ulong(token) * a.out_stride + a.matrices[m].out_offset;
    const uint first_row = index.x * (TURNS * NUM_THREADS) + thread_index;
    msl_wait_for_inputs();
    const float factor = HAS_NORM ? x_factors[token] : 1.0f / X_SCALE;
#pragma clang loop unroll(full)
    for (uint turn = 0; turn < TURNS; ++turn) {
        const uint row = first_row + turn * NUM_THREADS;
        if (row < a.matrices[m].num_rows) {
            device const float* own = partials + out_index + row;
            float sum = own[0] + own[split_len];
            if (K_SPLITS == 4) {
                sum += own[2 * split_len] + own[3 * split_len];
            }
            const float before = ADDS ? out[out_index + row] : 0.0f;
            const float own_bias = HAS_BIAS ? bias[row] : 0.0f;
            store(out, out_index + row, before + fma(sum, factor, own_bias));
        }
    }
}

#define SEVERAL(F, TOKEN_TILES)                                               \
    INSTANCE(several_rows_##F##_##TOKEN_TILES, several_rows, F, F, TOKEN_TILES) \
    INSTANCE(several_rows_swiglu_##F##_##TOKEN_TILES, several_rows_swiglu, F, TOKEN_TILES)
#define FORMAT(F) SEVERAL(F, 4) SEVERAL(F, 8)
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
FORMAT(Q2_K)
FORMAT(Q3_K)
FORMAT(IQ4_NL)
FORMAT(MXFP4)
FORMAT(Q8_S)
FORMAT(F16)

#define MIXED(F, LAST)                                              \
    INSTANCE(several_rows_##F##_##LAST##_4, several_rows, F, LAST, 4) \
    INSTANCE(several_rows_##F##_##LAST##_8, several_rows, F, LAST, 8)
MIXED(Q4_K, Q6_K)
MIXED(Q5_K, Q6_K)
