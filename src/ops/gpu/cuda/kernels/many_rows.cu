// Products of weights with many rows of activations, those of prompts, on tensor cores, with the norm in front and the
// residual behind: tiles of both go through threadgroup memory. The sums are added in the order of columns.

#define FOR_NVIDIA
#include "products.h"

// Tiles of so many rows of weights and of activations, and the columns that are in threadgroup memory at a time, twice: the
// next ones are written while these are multiplied.
constant constexpr int TILE = 128;
constant constexpr int STEP = 32;
// Eight rows of eight halves lie in different banks.
constant constexpr int STRIDE = STEP + 8;

// Eight warps share a tile: each has 64 rows of weights and 32 of activations.
template <typename F, bool GATED>
inline void many(
    constant ProductArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const float* x,
    device const float* norm,
    device float* out,
    device const uint* rows,
    threadgroup char* memory,
    uint tile,
    uint first_token,
    Part part,
    uint thread_index
) {
    constexpr uint RESULTS = GATED ? TILE / 2 : TILE;
    const uint first_row = (tile - matrix.first_group) * RESULTS;
    threadgroup ushort* staged_weights = (threadgroup ushort*)memory;
    threadgroup ushort* staged_x = staged_weights + 2 * TILE * STRIDE;
    threadgroup float* factors = (threadgroup float*)(staged_x + 2 * TILE * STRIDE);

    // A thread brings a unit of a row of weights and sixteen columns of a row of activations.
    const uint own = thread_index / 2;
    const uint own_unit = thread_index % 2;
    const Planes planes = in_registers(matrix.planes);
    const bool is_up = GATED && own % 16 >= 8;
    const uint row = row_of_tile<GATED>(first_row + own / 16 * (GATED ? 8 : 16), own % 16);
    const uint weight_row = (part.matrix * matrix.num_rows + min(row, matrix.num_rows - 1)) * a.num_units;
    device const uchar* own_weights = is_up ? up_weights : weights;
    const uint token = min(first_token + own, part.num_rows - 1);
    const uint x_row = IS_GROUPED ? row_at(rows, a.gathers, part.first_place + token) : token;
    device const float* own_x = x + part.x_offset + ulong(x_row) * a.x_stride;

    Raw<F> raw;
    float4 values[4];
    float squares = 0.0f;
    const uint last_unit = a.num_units - 1;
    const auto fetch_weights = [&](uint unit) {
        raw = load_unit<F>(own_weights, planes, weight_row, min(unit + own_unit, last_unit));
    };
    const auto fetch_x = [&](uint unit) {
        const uint column = min(unit + own_unit, last_unit) * 16;
        const bool exists = unit + own_unit <= last_unit;
#pragma clang loop unroll(full)
        for (int four = 0; four < 4; ++four) {
            const float4 read = *(device const float4*)(own_x + column + 4 * four);
            values[four] = exists ? read : float4(0.0f);
        }
    };
    const auto store = [&](uint unit, uint buffer) {
        uint words[8];
        Decoder<F>::words(raw, words);
        threadgroup uint4* target =
            (threadgroup uint4*)(staged_weights + (buffer * TILE + own) * STRIDE + own_unit * 16);
        target[0] = uint4(words[0], words[1], words[2], words[3]);
        target[1] = uint4(words[4], words[5], words[6], words[7]);
        const uint column = min(unit + own_unit, last_unit) * 16;
        target = (threadgroup uint4*)(staged_x + (buffer * TILE + own) * STRIDE + own_unit * 16);
#pragma clang loop unroll(full)
        for (int eight = 0; eight < 2; ++eight) {
            float scaled[8];
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                scaled[v] = values[2 * eight + v / 4][v % 4];
                if (HAS_NORM) {
                    squares = fma(scaled[v], scaled[v], squares);
                    scaled[v] *= norm[column + 8 * eight + v];
                }
            }
            target[eight] = paired<Decoder<F>::PAIRS>(scaled);
        }
    };

    float sums[4][4][4] = {};
    const uint lane = thread_index % LANES;
    const uint warp_row = thread_index / LANES / 4 * 64;
    const uint warp_token = thread_index / LANES % 4 * 32;
    const uint weights_place = (warp_row + lane % 16) * STRIDE + lane / 16 * 8;
    const uint x_place = (warp_token + lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;

    fetch_weights(0);
    msl_wait_for_inputs();
    fetch_x(0);
    store(0, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint buffer = 0;
    for (uint unit = 0; unit < a.num_units; unit += 2) {
        const bool is_last = unit + 2 >= a.num_units;
        if (!is_last) {
            fetch_weights(unit + 2);
            fetch_x(unit + 2);
        }
#pragma clang loop unroll(full)
        for (int k = 0; k < STEP; k += 16) {
            uint from_weights[4][4];
            uint from_x[2][4];
#pragma clang loop unroll(full)
            for (int r = 0; r < 4; ++r) {
                msl_load_matrices(
                    staged_weights + buffer * TILE * STRIDE + weights_place + r * 16 * STRIDE + k, from_weights[r]
                );
            }
#pragma clang loop unroll(full)
            for (int n = 0; n < 2; ++n) {
                msl_load_matrices(staged_x + buffer * TILE * STRIDE + x_place + n * 16 * STRIDE + k, from_x[n]);
            }
#pragma clang loop unroll(full)
            for (int r = 0; r < 4; ++r) {
#pragma clang loop unroll(full)
                for (int n = 0; n < 4; ++n) {
                    msl_multiply_tile(
                        sums[r][n], from_weights[r][0], from_weights[r][1], from_weights[r][2], from_weights[r][3],
                        from_x[n / 2][n % 2 * 2], from_x[n / 2][n % 2 * 2 + 1]
                    );
                }
            }
        }
        if (!is_last) {
            store(unit + 2, 1 - buffer);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        buffer = 1 - buffer;
    }

    const float sum_of_squares = sum_of_lanes(squares, 2);
    if (own_unit == 0) {
        factors[own] = HAS_NORM ? rsqrt(sum_of_squares / float(16 * a.num_units) + a.eps) / X_SCALE : 1.0f / X_SCALE;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (int n = 0; n < 4; ++n) {
#pragma clang loop unroll(full)
        for (int odd = 0; odd < 2; ++odd) {
            const uint own_token = warp_token + 8 * n + lane % 4 * 2 + odd;
            if (first_token + own_token >= part.num_rows) {
                continue;
            }
            const float factor = factors[own_token];
            const ulong place =
                part.out_offset + ulong(first_token + own_token) * a.out_stride + matrix.out_offset;
#pragma clang loop unroll(full)
            for (int r = 0; r < 4; ++r) {
                const uint own_row = first_row + (warp_row / 16 + r) * (GATED ? 8 : 16) + lane / 4;
                if (GATED) {
                    if (own_row < matrix.num_rows) {
                        put(out, place + own_row, gated(sums[r][n][odd] * factor, sums[r][n][2 + odd] * factor));
                    }
                } else {
#pragma clang loop unroll(full)
                    for (int h = 0; h < 2; ++h) {
                        const uint result_row = own_row + 8 * h;
                        if (result_row < matrix.num_rows) {
                            const float other = HAS_BIAS ? bias[result_row] : 0.0f;
                            put(out, place + result_row, fma(sums[r][n][2 * h + odd], factor, other));
                        }
                    }
                }
            }
        }
    }
}

template <typename F, typename LAST>
[[kernel]] void many_rows(
    constant ProductArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const float* x [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device float* out [[buffer(9)]],
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.y * TILE;
    if (first_token >= part.num_rows) {
        return;
    }
    const uint m = index.x < a.matrices[1].first_group ? 0 : index.x < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    if (is_same_v<F, LAST> || m < 2) {
        many<F, false>(
            a, a.matrices[m], weights, weights, bias, x, norm, out, rows, memory, index.x, first_token, part, thread_index
        );
    } else {
        many<LAST, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, norm, out, rows, memory, index.x, first_token, part,
            thread_index
        );
    }
}

template <typename F>
[[kernel]] void many_rows_swiglu(
    constant ProductArgs& a [[buffer(0)]],
    device const uchar* gate_weights [[buffer(1)]],
    device const uchar* up_weights [[buffer(2)]],
    device const float* x [[buffer(3)]],
    device const float* norm [[buffer(4)]],
    device float* out [[buffer(5)]],
    device const RowGroup* groups [[buffer(6)]],
    device const uint* rows [[buffer(7)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.y * TILE;
    if (first_token >= part.num_rows) {
        return;
    }
    many<F, true>(
        a, a.matrices[0], gate_weights, up_weights, x, x, norm, out, rows, memory, index.x, first_token, part,
        thread_index
    );
}

#define FORMAT(F)                            \
    INSTANCE(many_rows_##F, many_rows, F, F) \
    INSTANCE(many_rows_swiglu_##F, many_rows_swiglu, F)
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
FORMAT(F16)
FORMAT(BF16)
INSTANCE(many_rows_Q4_K_Q6_K, many_rows, Q4_K, Q6_K)
INSTANCE(many_rows_Q5_K_Q6_K, many_rows, Q5_K, Q6_K)
