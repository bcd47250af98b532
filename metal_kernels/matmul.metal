// Products of weights with five and more rows of activations, in tiles of simdgroup matrices.
//
// A threadgroup of four simdgroups computes 64 rows of the matrix times TOKENS rows of activations. For each 32
// columns it decodes the weights into threadgroup memory, beside the activations, and multiplies 8×8 pieces.
// Each result is summed in the order of the columns, whatever TOKENS is.
//
// For a gated feed-forward network the 64 rows are 32 of the gate and the same 32 of the other matrix.

#include "formats.h"

struct MatmulArgs {
    uint num_units;   // of 16 columns of the matrices
    uint num_tokens;
    uint x_stride;
    uint out_stride;
    float eps;
    MatrixArgs matrices[3];
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];

constant constexpr int NUM_THREADS = 4 * LANES;
constant constexpr int TILE_ROWS = 64;
constant constexpr int STEP = 32;
// Rows in threadgroup memory are longer than they need to be, so that the rows of an 8×8 piece lie in different
// banks.
constant constexpr int STRIDE = STEP + 8;
constant constexpr int OUT_STRIDE = TILE_ROWS + 4;

// Weights wait in half precision unless their format has a wider range.
template <typename F>
struct Staged {
    typedef conditional_t<F::IS_WIDE, float, half> type;
};

// Thread `t` decodes unit `t % 2` of the step for row `t / 2` of the tile.
template <typename F, typename T>
inline void stage_weights(
    device const uchar* weights,
    Planes planes,
    uint num_units,
    uint row,
    uint unit,
    threadgroup T* target
) {
    if (unit >= num_units) {
        for (int i = 0; i < 16; ++i) {
            target[i] = T(0.0f);
        }
        return;
    }
    const Unit decoded = F::decode(F::load(weights, planes, row * num_units + unit));
    for (int i = 0; i < 16; ++i) {
        const float value = (decoded.code[i] * F::prescale(i) - F::ZERO) * decoded.scale;
        target[i] = T(F::HAS_MINIMUM ? value - decoded.minimum : value);
    }
}

// ALONG_TOKENS · ALONG_ROWS simdgroups share the tile; each has TOKEN_PIECES × ROW_PIECES pieces of 8×8.
template <typename F, int TOKENS, int ALONG_TOKENS, bool GATED>
inline void multiply(
    constant MatmulArgs& a,
    constant MatrixArgs& matrix,
    constant Planes& up_planes,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const float* x,
    device const float* norm,
    device float* out,
    threadgroup char* memory,
    uint2 tile,
    uint thread_index,
    uint group
) {
    typedef typename Staged<F>::type T;
    constexpr int ALONG_ROWS = 4 / ALONG_TOKENS;
    constexpr int TOKEN_PIECES = TOKENS / 8 / ALONG_TOKENS;
    constexpr int ROW_PIECES = TILE_ROWS / 8 / ALONG_ROWS;
    // Each slot is four activations of a token; a token has eight slots in a step.
    constexpr int SLOTS = TOKENS * 8;
    constexpr int SLOTS_PER_THREAD = (SLOTS + NUM_THREADS - 1) / NUM_THREADS;
    threadgroup T* staged_weights = (threadgroup T*)memory;
    threadgroup float* staged_x = (threadgroup float*)(memory + TILE_ROWS * STRIDE * sizeof(T));

    const uint rows_per_tile = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const uint first_row = (tile.y - matrix.first_group) * rows_per_tile;
    const uint first_token = tile.x * TOKENS;
    const uint tile_row = thread_index / 2;
    const bool is_up = GATED && tile_row >= rows_per_tile;
    const uint row = min(first_row + tile_row % rows_per_tile, matrix.num_rows - 1);

    simdgroup_float8x8 sums[TOKEN_PIECES][ROW_PIECES];
    for (int t = 0; t < TOKEN_PIECES; ++t) {
        for (int r = 0; r < ROW_PIECES; ++r) {
            sums[t][r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }
    float squares[SLOTS_PER_THREAD] = {};
    const int first_piece_token = int(group) / ALONG_ROWS * TOKEN_PIECES * 8;
    const int first_piece_row = int(group) % ALONG_ROWS * ROW_PIECES * 8;

    for (uint step = 0; step < a.num_units; step += 2) {
        const uint unit = step + thread_index % 2;
        threadgroup T* target = staged_weights + tile_row * STRIDE + thread_index % 2 * 16;
        if (is_up) {
            stage_weights<F, T>(up_weights, in_registers(up_planes), a.num_units, row, unit, target);
        } else {
            stage_weights<F, T>(weights, in_registers(matrix.planes), a.num_units, row, unit, target);
        }
        for (int s = 0; s < SLOTS_PER_THREAD; ++s) {
            const uint slot = thread_index + s * NUM_THREADS;
            if (slot < uint(SLOTS)) {
                const uint token = slot / 8;
                const uint column = step * 16 + slot % 8 * 4;
                float4 values = float4(0.0f);
                if (column < a.num_units * 16 && first_token + token < a.num_tokens) {
                    values = *(device const float4*)(x + (first_token + token) * a.x_stride + column);
                    if (HAS_NORM) {
                        squares[s] += dot(values, values);
                        values *= *(device const float4*)(norm + column);
                    }
                }
                *(threadgroup float4*)(staged_x + token * STRIDE + slot % 8 * 4) = values;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < STEP; k += 8) {
            simdgroup_float8x8 token_pieces[TOKEN_PIECES];
            simdgroup_matrix<T, 8, 8> row_pieces[ROW_PIECES];
            for (int t = 0; t < TOKEN_PIECES; ++t) {
                simdgroup_load(token_pieces[t], staged_x + (first_piece_token + 8 * t) * STRIDE + k, STRIDE);
            }
            for (int r = 0; r < ROW_PIECES; ++r) {
                threadgroup T* piece = staged_weights + (first_piece_row + 8 * r) * STRIDE + k;
                simdgroup_load(row_pieces[r], piece, STRIDE, ulong2(0, 0), true);
            }
            for (int t = 0; t < TOKEN_PIECES; ++t) {
                for (int r = 0; r < ROW_PIECES; ++r) {
                    simdgroup_multiply_accumulate(sums[t][r], token_pieces[t], row_pieces[r], sums[t][r]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // The results take the place of the operands, and behind them lie the factors of the norm.
    threadgroup float* results = (threadgroup float*)memory;
    threadgroup float* factors = results + TOKENS * OUT_STRIDE;
    for (int t = 0; t < TOKEN_PIECES; ++t) {
        for (int r = 0; r < ROW_PIECES; ++r) {
            threadgroup float* target =
                results + (first_piece_token + 8 * t) * OUT_STRIDE + first_piece_row + 8 * r;
            simdgroup_store(sums[t][r], target, OUT_STRIDE);
        }
    }
    if (HAS_NORM) {
        for (int s = 0; s < SLOTS_PER_THREAD; ++s) {
            const float sum = sum_of_lanes(squares[s], 8);
            const uint slot = thread_index + s * NUM_THREADS;
            if (slot < uint(SLOTS) && slot % 8 == 0) {
                factors[slot / 8] = rsqrt(sum / float(16 * a.num_units) + a.eps);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < TOKENS * rows_per_tile; i += NUM_THREADS) {
        const uint token = i / rows_per_tile;
        const uint result_row = i % rows_per_tile;
        if (first_token + token >= a.num_tokens || first_row + result_row >= matrix.num_rows) {
            continue;
        }
        const float factor = HAS_NORM ? factors[token] : 1.0f;
        float result = results[token * OUT_STRIDE + result_row] * factor;
        if (GATED) {
            const float up = results[token * OUT_STRIDE + rows_per_tile + result_row] * factor;
            result = result / (1.0f + exp(-result)) * up;
        }
        if (HAS_BIAS) {
            result += bias[first_row + result_row];
        }
        device float* target =
            out + (first_token + token) * a.out_stride + matrix.out_offset + first_row + result_row;
        *target = ADDS ? *target + result : result;
    }
}

// out = x · weightsᵀ (+ bias) (+ out), with the norm of x before it if there is one. Up to three matrices of one
// format, whose results lie side by side.
template <typename F, int TOKENS, int ALONG_TOKENS>
[[kernel]] void matmul(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const float* x [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device float* out [[buffer(9)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint2 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    const uint m = tile.y < a.matrices[1].first_group ? 0 : tile.y < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, TOKENS, ALONG_TOKENS, false>(
        a, a.matrices[m], a.matrices[m].planes, weights, weights, bias, x, norm, out, memory, tile, thread_index,
        group
    );
}

// The same if the last matrix has another format, as the values of many Q4_K files have.
template <typename F, typename LAST, int TOKENS, int ALONG_TOKENS>
[[kernel]] void matmul_mixed(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const float* x [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device float* out [[buffer(9)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint2 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    if (tile.y < a.matrices[2].first_group) {
        const uint m = tile.y < a.matrices[1].first_group ? 0 : 1;
        device const uchar* weights = m == 0 ? weights0 : weights1;
        multiply<F, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[m], a.matrices[m].planes, weights, weights, m == 0 ? bias0 : bias1, x, norm, out, memory,
            tile, thread_index, group
        );
    } else {
        multiply<LAST, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[2], a.matrices[2].planes, weights2, weights2, bias2, x, norm, out, memory, tile,
            thread_index, group
        );
    }
}

// out = silu(gate · x) · (up · x), with the norm of x before it.
template <typename F, int TOKENS, int ALONG_TOKENS>
[[kernel]] void matmul_swiglu(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* gate_weights [[buffer(1)]],
    device const uchar* up_weights [[buffer(2)]],
    device const float* x [[buffer(3)]],
    device const float* norm [[buffer(4)]],
    device float* out [[buffer(5)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint2 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    multiply<F, TOKENS, ALONG_TOKENS, true>(
        a, a.matrices[0], a.matrices[1].planes, gate_weights, up_weights, x, x, norm, out, memory, tile,
        thread_index, group
    );
}

#define MATMUL(F, TOKENS, ALONG_TOKENS)                                                          \
    template [[host_name("matmul_" #F "_" #TOKENS)]] [[kernel]] decltype(                        \
        matmul<F, TOKENS, ALONG_TOKENS>) matmul<F, TOKENS, ALONG_TOKENS>;                        \
    template [[host_name("matmul_swiglu_" #F "_" #TOKENS)]] [[kernel]] decltype(                 \
        matmul_swiglu<F, TOKENS, ALONG_TOKENS>) matmul_swiglu<F, TOKENS, ALONG_TOKENS>;
#define FORMAT(F) MATMUL(F, 8, 1) MATMUL(F, 16, 1) MATMUL(F, 32, 2)

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
FORMAT(F32)

#define MIXED(F, LAST, TOKENS, ALONG_TOKENS)                                              \
    template [[host_name("matmul_" #F "_" #LAST "_" #TOKENS)]] [[kernel]] decltype(       \
        matmul_mixed<F, LAST, TOKENS, ALONG_TOKENS>) matmul_mixed<F, LAST, TOKENS, ALONG_TOKENS>;
MIXED(Q4_K, Q6_K, 8, 1)
MIXED(Q4_K, Q6_K, 16, 1)
MIXED(Q4_K, Q6_K, 32, 2)
MIXED(Q5_K, Q6_K, 8, 1)
MIXED(Q5_K, Q6_K, 16, 1)
MIXED(Q5_K, Q6_K, 32, 2)
