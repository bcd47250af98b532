// Products of weights with five and more rows of activations, in tiles of simdgroup matrices.
//
// A threadgroup of four simdgroups computes 64 rows of the matrix times TOKENS rows of activations. For each 32
// columns it decodes the weights into threadgroup memory, beside the activations, and multiplies 8×8 pieces, while
// those of the next 32 columns are under way to its registers. Each result is summed in the order of the columns,
// whatever TOKENS is.
//
// For a gated feed-forward network the 64 rows are 32 of the gate and the same 32 of the other matrix, eight of each in
// turns, so that both values of a result are in one lane.
//
// A matrix may be one of a stack, as in `matvec.metal`.

#include "formats.h"
#include "groups.h"
#include "matrices.h"

struct MatmulArgs {
    uint num_units;   // of 16 columns of the matrices
    uint num_tokens;
    uint x_stride;
    uint out_stride;
    uint x_next;    // from the activations of one matrix of a stack to those of the next one
    uint out_next;  // likewise results
    uint gathers;     // whether the rows of groups are listed
    float eps;
    MatrixArgs matrices[3];
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];
constant bool IS_GROUPED [[function_constant(3)]];  // matrices and rows are those of groups
constant bool IS_HALF [[function_constant(4)]];     // results are in half precision, which are not added to anything

constant constexpr int NUM_THREADS = 4 * LANES;
constant constexpr int TILE_ROWS = 64;
constant constexpr int STEP = 32;
// Rows in threadgroup memory are longer than they need to be, so that the rows of an 8×8 piece lie in different
// banks.
constant constexpr int STRIDE = STEP + 8;

// Weights wait in half precision unless their format has a wider range.
template <typename F>
struct Staged {
    typedef conditional_t<F::IS_WIDE, float, half> type;
};

// The matrix of a stack that a threadgroup computes, and its rows of activations: of a group all, or those from the
// tile's first one on.
inline Part part_of(constant MatmulArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return part_of_group(groups[index], a.out_stride);
    }
    Part part;
    part.matrix = index;
    part.num_rows = a.num_tokens;
    part.first_place = 0;
    part.x_offset = index * a.x_next;
    part.out_offset = index * a.out_next;
    return part;
}

// What a thread brings in each step: a unit of a row of the tile, and a four of the activations of some tokens. In
// registers, as what is in `constant` memory may be read anew behind every barrier.
template <int SLOTS>
struct Share {
    device const uchar* weights;
    Planes planes;
    uint row;
    device const float* x;
    uint tokens[SLOTS];
    device const float* norm;
    uint num_units;
    uint unit;    // the first one
    uint column;  // likewise
};

template <typename F, int SLOTS>
struct Load {
    Raw<F> raw;
    float4 x[SLOTS];
    float4 norm;
    bool exists;  // or there are zeros to multiply with
};

// Reads a share of the step from unit `step` on. Past the last unit or column it is the last one: reads that depend on
// nothing can be under way together.
template <typename F, int SLOTS>
inline void fetch(thread const Share<SLOTS>& share, uint step, thread Load<F, SLOTS>& load) {
    const uint unit = min(step + share.unit, share.num_units - 1);
    load.raw = load_unit<F>(share.weights, share.planes, share.row, unit);
    const uint column = step * 16 + share.column;
    const uint existing = min(column, share.num_units * 16 - 4);
    load.exists = column == existing;
    load.norm = HAS_NORM ? *(device const float4*)(share.norm + existing) : float4(1.0f);
#pragma clang loop unroll(full)
    for (int s = 0; s < SLOTS; ++s) {
        load.x[s] = *(device const float4*)(share.x + share.tokens[s] + existing);
    }
}

template <typename F, typename T>
inline void put_weights(Raw<F> raw, threadgroup T* target) {
    const Unit decoded = F::decode(raw.codes, raw.scale);
#pragma clang loop unroll(full)
    for (int four = 0; four < 4; ++four) {
        float4 values;
#pragma clang loop unroll(full)
        for (int i = 0; i < 4; ++i) {
            const float code = decoded.code[4 * four + i] * F::prescale(i) - F::ZERO;
            values[i] = fma(code, decoded.scale, F::HAS_MINIMUM ? -decoded.minimum : 0.0f);
        }
        ((threadgroup vec<T, 4>*)target)[four] = vec<T, 4>(values);
    }
}

// ALONG_TOKENS · ALONG_ROWS simdgroups share the tile; each has TOKEN_PIECES × ROW_PIECES pieces of 8×8.
template <typename F, int TOKENS, int ALONG_TOKENS, bool GATED>
inline void multiply(
    constant MatmulArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const float* x,
    device const float* norm,
    device float* out,
    device const uint* rows,
    threadgroup char* memory,
    uint3 tile,
    Part part,
    uint thread_index,
    uint group
) {
    typedef typename Staged<F>::type T;
    constexpr int ALONG_ROWS = 4 / ALONG_TOKENS;
    constexpr int TOKEN_PIECES = TOKENS / 8 / ALONG_TOKENS;
    constexpr int ROW_PIECES = TILE_ROWS / 8 / ALONG_ROWS;
    // A token has eight fours in a step. Thread `t` brings four `t % 8` of token `t / 8` and of every SLOT_TOKENS-th
    // one from there on.
    constexpr int SLOT_TOKENS = NUM_THREADS / 8;
    constexpr int SLOTS = (TOKENS + SLOT_TOKENS - 1) / SLOT_TOKENS;
    threadgroup T* staged_weights = (threadgroup T*)memory;
    threadgroup float* staged_x = (threadgroup float*)(memory + TILE_ROWS * STRIDE * sizeof(T));

    constexpr uint ROWS_PER_TILE = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const uint first_row = (tile.y - matrix.first_group) * ROWS_PER_TILE;
    const uint first_token = tile.x * TOKENS;

    const uint tile_row = thread_index / 2;
    const uint own_token = thread_index / 8;
    const bool is_up = GATED && tile_row / 8 % 2 == 1;
    const uint row_of_matrix = first_row + (GATED ? tile_row / 16 * 8 + tile_row % 8 : tile_row);
    Share<SLOTS> share;
    share.weights = is_up ? up_weights : weights;
    share.planes = in_registers(matrix.planes);
    share.row = (part.matrix * matrix.num_rows + min(row_of_matrix, matrix.num_rows - 1)) * a.num_units;
    share.x = x + part.x_offset;
    share.norm = norm;
    share.num_units = a.num_units;
    share.unit = thread_index % 2;
    share.column = thread_index % 8 * 4;
#pragma clang loop unroll(full)
    for (int s = 0; s < SLOTS; ++s) {
        const uint token = min(first_token + own_token + s * SLOT_TOKENS, part.num_rows - 1);
        share.tokens[s] = (IS_GROUPED ? row_at(rows, a.gathers, part.first_place + token) : token) * a.x_stride;
    }
    threadgroup T* own_staged_weights = staged_weights + tile_row * STRIDE + share.unit * 16;
    threadgroup float* own_staged_x = staged_x + own_token * STRIDE + share.column;

    Load<F, SLOTS> load;
    float squares[SLOTS] = {};
    simdgroup_float8x8 sums[TOKEN_PIECES][ROW_PIECES];
#pragma clang loop unroll(full)
    for (int i = 0; i < TOKEN_PIECES * ROW_PIECES; ++i) {
        sums[i / ROW_PIECES][i % ROW_PIECES] = matrix_of<float>(0.0f, 0.0f);
    }
    const uint lane = thread_index % LANES;
    const Cell cell = cell_of(lane);
    const uint first_piece_token = group / ALONG_ROWS * TOKEN_PIECES * 8;
    const uint first_piece_row = group % ALONG_ROWS * ROW_PIECES * 8;

    fetch<F, SLOTS>(share, 0, load);
    for (uint step = 0; step < share.num_units; step += 2) {
        put_weights<F, T>(load.raw, own_staged_weights);
#pragma clang loop unroll(full)
        for (int s = 0; s < SLOTS; ++s) {
            if (own_token + s * SLOT_TOKENS < TOKENS) {
                float4 values = load.exists ? load.x[s] : float4(0.0f);
                if (HAS_NORM) {
                    squares[s] = add_dot(values, values, squares[s]);
                    values *= load.norm;
                }
                *(threadgroup float4*)(own_staged_x + s * SLOT_TOKENS * STRIDE) = values;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        fetch<F, SLOTS>(share, step + 2, load);
#pragma clang loop unroll(full)
        for (int k = 0; k < STEP; k += 8) {
            simdgroup_float8x8 token_pieces[TOKEN_PIECES];
#pragma clang loop unroll(full)
            for (int t = 0; t < TOKEN_PIECES; ++t) {
                threadgroup const float* piece = staged_x + (first_piece_token + 8 * t) * STRIDE + k;
                token_pieces[t] = load_matrix<float>(piece, STRIDE, cell);
            }
#pragma clang loop unroll(full)
            for (int r = 0; r < ROW_PIECES; ++r) {
                threadgroup const T* piece = staged_weights + (first_piece_row + 8 * r) * STRIDE + k;
                const simdgroup_matrix<T, 8, 8> row_piece = load_transposed<T>(piece, STRIDE, cell);
#pragma clang loop unroll(full)
                for (int t = 0; t < TOKEN_PIECES; ++t) {
                    simdgroup_multiply_accumulate(sums[t][r], token_pieces[t], row_piece, sums[t][r]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // The factors of the norm take the place of the activations.
    if (HAS_NORM) {
#pragma clang loop unroll(full)
        for (int s = 0; s < SLOTS; ++s) {
            const float sum = sum_of_lanes(squares[s], 8);
            if (own_token + s * SLOT_TOKENS < TOKENS && thread_index % 8 == 0) {
                staged_x[own_token + s * SLOT_TOKENS] = rsqrt(sum / float(16 * a.num_units) + a.eps);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // The two pieces of a gated result are neighbours.
    constexpr int RESULTS = GATED ? ROW_PIECES : 2 * ROW_PIECES;
    const uint piece_row = first_row + (GATED ? first_piece_row / 2 : first_piece_row) + cell.column;
#pragma clang loop unroll(full)
    for (int t = 0; t < TOKEN_PIECES; ++t) {
        const uint token = first_piece_token + 8 * t + cell.row;
        if (first_token + token >= part.num_rows) {
            continue;
        }
        const float factor = HAS_NORM ? staged_x[token] : 1.0f;
        const uint first_out = part.out_offset + (first_token + token) * a.out_stride + matrix.out_offset;
        device float* own_out = out + first_out;
        // All reads before all writes, so that they do not wait for each other.
        float others[RESULTS] = {};
        if (HAS_BIAS || ADDS) {
#pragma clang loop unroll(full)
            for (int i = 0; i < RESULTS; ++i) {
                const uint row = piece_row + i / 2 * 8 + i % 2;
                if (row < matrix.num_rows) {
                    others[i] = (HAS_BIAS ? bias[row] : 0.0f) + (ADDS ? own_out[row] : 0.0f);
                }
            }
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < RESULTS; ++i) {
            const int r = GATED ? i / 2 * 2 : i / 2;
            float result = fma(sums[t][r].thread_elements()[i % 2], factor, others[i]);
            if (GATED) {
                const float up = sums[t][(r + 1) % ROW_PIECES].thread_elements()[i % 2] * factor;
                result = result / (1.0f + exp(-result)) * up;
            }
            const uint row = piece_row + i / 2 * 8 + i % 2;
            if (row < matrix.num_rows) {
                if (IS_HALF) {
                    ((device half*)out)[first_out + row] = half(result);
                } else {
                    own_out[row] = result;
                }
            }
        }
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
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    const Part part = part_of(a, groups, tile.z);
    if (IS_GROUPED && part.num_rows == 0) {
        return;
    }
    const uint m = tile.y < a.matrices[1].first_group ? 0 : tile.y < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, TOKENS, ALONG_TOKENS, false>(
        a, a.matrices[m], weights, weights, bias, x, norm, out, rows, memory, tile, part, thread_index, group
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
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    const Part part = part_of(a, groups, tile.z);
    if (IS_GROUPED && part.num_rows == 0) {
        return;
    }
    if (tile.y < a.matrices[2].first_group) {
        const uint m = tile.y < a.matrices[1].first_group ? 0 : 1;
        device const uchar* weights = m == 0 ? weights0 : weights1;
        multiply<F, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[m], weights, weights, m == 0 ? bias0 : bias1, x, norm, out, rows, memory, tile, part,
            thread_index, group
        );
    } else {
        multiply<LAST, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, norm, out, rows, memory, tile, part, thread_index, group
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
    device const RowGroup* groups [[buffer(6)]],
    device const uint* rows [[buffer(7)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 tile [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    const Part part = part_of(a, groups, tile.z);
    if (IS_GROUPED && part.num_rows == 0) {
        return;
    }
    multiply<F, TOKENS, ALONG_TOKENS, true>(
        a, a.matrices[0], gate_weights, up_weights, x, x, norm, out, rows, memory, tile, part, thread_index, group
    );
}

#define MATMUL(F, TOKENS, ALONG_TOKENS)                                  \
    INSTANCE(matmul_##F##_##TOKENS, matmul, F, TOKENS, ALONG_TOKENS)     \
    INSTANCE(matmul_swiglu_##F##_##TOKENS, matmul_swiglu, F, TOKENS, ALONG_TOKENS)
#define FORMAT(F) MATMUL(F, 8, 1) MATMUL(F, 16, 1) MATMUL(F, 32, 2)

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
FORMAT(IQ4_XS)
FORMAT(MXFP4)
FORMAT(Q8_S)
FORMAT(F16)
FORMAT(BF16)
FORMAT(F32)

#define MIXED(F, LAST, TOKENS, ALONG_TOKENS) \
    INSTANCE(matmul_##F##_##LAST##_##TOKENS, matmul_mixed, F, LAST, TOKENS, ALONG_TOKENS)
MIXED(Q4_K, Q6_K, 8, 1)
MIXED(Q4_K, Q6_K, 16, 1)
MIXED(Q4_K, Q6_K, 32, 2)
MIXED(Q5_K, Q6_K, 8, 1)
MIXED(Q5_K, Q6_K, 16, 1)
MIXED(Q5_K, Q6_K, 32, 2)
