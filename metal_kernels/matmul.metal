// Matmuls of weights with five and more rows of activations, in tiles of simdgroup matrices.
//
// A threadgroup of four simdgroups computes 64 rows of the matrix times TOKENS rows of activations. For each 32 columns
// it decodes the weights into threadgroup memory, next to the activations, and multiplies 8×8 fragments, while the next
// 32 columns are loaded to registers. Each result is summed in the order of the columns, for every TOKENS.
//
// For a gated feed-forward network the 64 rows are 32 of the gate and the same 32 of the other matrix, alternating
// eight by eight, so that both values of a result are in one lane.
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
    uint x_next;    // stride of activations between matrices of a stack
    uint out_next;  // stride of results between matrices of a stack
    uint gathers;     // whether groups list their rows
    float eps;
    MatrixArgs matrices[3];
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];
constant bool IS_GROUPED [[function_constant(3)]];  // matrices and rows are those of groups
constant bool IS_HALF [[function_constant(4)]];     // results are in half precision and are not added to the output

constant constexpr int NUM_THREADS = 4 * LANES;
constant constexpr int TILE_ROWS = 64;
constant constexpr int STEP = 32;
// Rows in threadgroup memory are padded, so that the rows of an 8×8 fragment lie in different banks.
constant constexpr int STRIDE = STEP + 8;

// Threadgroup memory has weights in half precision unless their format has a wider range.
template <typename F>
struct Staged {
    typedef conditional_t<F::IS_WIDE, float, half> type;
};

// The matrix of a stack that a threadgroup computes, and its rows of activations: all rows of a group, or the rows from
// the tile's first one on.
inline Problem problem_of(constant MatmulArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return problem_of_group(groups[index], a.out_stride);
    }
    Problem problem;
    problem.matrix = index;
    problem.num_rows = a.num_tokens;
    problem.first_slot = 0;
    problem.x_offset = index * a.x_next;
    problem.out_offset = index * a.out_next;
    return problem;
}

// What a thread loads in each step: a unit of a row of the tile, and four activations of some tokens. They are in
// registers, since values in `constant` memory may be read again after every barrier.
template <int SLOTS>
struct LoadSource {
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
    bool exists;  // if not, zeros are multiplied
};

// Loads the thread's values of the step that begins at unit `step`. Past the end, the last unit or column is read:
// loads without branches are issued together.
template <typename F, int SLOTS>
inline void fetch(thread const LoadSource<SLOTS>& source, uint step, thread Load<F, SLOTS>& load) {
    const uint unit = min(step + source.unit, source.num_units - 1);
    load.raw = load_unit<F>(source.weights, source.planes, source.row, unit);
    const uint column = step * 16 + source.column;
    const uint existing = min(column, source.num_units * 16 - 4);
    load.exists = column == existing;
    load.norm = HAS_NORM ? *(device const float4*)(source.norm + existing) : float4(1.0f);
#pragma clang loop unroll(full)
    for (int s = 0; s < SLOTS; ++s) {
        load.x[s] = *(device const float4*)(source.x + source.tokens[s] + existing);
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

// ALONG_TOKENS · ALONG_ROWS simdgroups share the tile; each has TOKEN_FRAGMENTS × ROW_FRAGMENTS fragments of 8×8.
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
    Problem problem,
    uint thread_index,
    uint group
) {
    typedef typename Staged<F>::type T;
    constexpr int ALONG_ROWS = 4 / ALONG_TOKENS;
    constexpr int TOKEN_FRAGMENTS = TOKENS / 8 / ALONG_TOKENS;
    constexpr int ROW_FRAGMENTS = TILE_ROWS / 8 / ALONG_ROWS;
    // A token has eight float4 in a step. Thread `t` loads float4 `t % 8` of token `t / 8` and of every SLOT_TOKENS-th
    // token after it.
    constexpr int SLOT_TOKENS = NUM_THREADS / 8;
    constexpr int SLOTS = (TOKENS + SLOT_TOKENS - 1) / SLOT_TOKENS;
    threadgroup T* staged_weights = (threadgroup T*)memory;
    threadgroup float* staged_x = (threadgroup float*)(memory + TILE_ROWS * STRIDE * sizeof(T));

    constexpr uint ROWS_PER_TILE = GATED ? TILE_ROWS / 2 : uint(TILE_ROWS);
    const uint first_row = (tile.y - matrix.first_group) * ROWS_PER_TILE;
    const uint first_token = tile.x * TOKENS;

    const uint tile_row = thread_index / 2;
    const uint own_token = thread_index / 8;
    const bool is_up = GATED && tile_row / 8 % 2 == 1;
    const uint row_of_matrix = first_row + (GATED ? tile_row / 16 * 8 + tile_row % 8 : tile_row);
    LoadSource<SLOTS> source;
    source.weights = is_up ? up_weights : weights;
    source.planes = in_registers(matrix.planes);
    source.row = (problem.matrix * matrix.num_rows + min(row_of_matrix, matrix.num_rows - 1)) * a.num_units;
    source.x = x + problem.x_offset;
    source.norm = norm;
    source.num_units = a.num_units;
    source.unit = thread_index % 2;
    source.column = thread_index % 8 * 4;
#pragma clang loop unroll(full)
    for (int s = 0; s < SLOTS; ++s) {
        const uint token = min(first_token + own_token + s * SLOT_TOKENS, problem.num_rows - 1);
        source.tokens[s] = (IS_GROUPED ? row_at(rows, a.gathers, problem.first_slot + token) : token) * a.x_stride;
    }
    threadgroup T* own_staged_weights = staged_weights + tile_row * STRIDE + source.unit * 16;
    threadgroup float* own_staged_x = staged_x + own_token * STRIDE + source.column;

    Load<F, SLOTS> load;
    float squares[SLOTS] = {};
    simdgroup_float8x8 sums[TOKEN_FRAGMENTS][ROW_FRAGMENTS];
#pragma clang loop unroll(full)
    for (int i = 0; i < TOKEN_FRAGMENTS * ROW_FRAGMENTS; ++i) {
        sums[i / ROW_FRAGMENTS][i % ROW_FRAGMENTS] = matrix_of<float>(0.0f, 0.0f);
    }
    const uint lane = thread_index % LANES;
    const Cell cell = cell_of(lane);
    const uint first_fragment_token = group / ALONG_ROWS * TOKEN_FRAGMENTS * 8;
    const uint first_fragment_row = group % ALONG_ROWS * ROW_FRAGMENTS * 8;

    fetch<F, SLOTS>(source, 0, load);
    for (uint step = 0; step < source.num_units; step += 2) {
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
        fetch<F, SLOTS>(source, step + 2, load);
#pragma clang loop unroll(full)
        for (int k = 0; k < STEP; k += 8) {
            simdgroup_float8x8 token_fragments[TOKEN_FRAGMENTS];
#pragma clang loop unroll(full)
            for (int t = 0; t < TOKEN_FRAGMENTS; ++t) {
                threadgroup const float* fragment = staged_x + (first_fragment_token + 8 * t) * STRIDE + k;
                token_fragments[t] = load_matrix<float>(fragment, STRIDE, cell);
            }
#pragma clang loop unroll(full)
            for (int r = 0; r < ROW_FRAGMENTS; ++r) {
                threadgroup const T* fragment = staged_weights + (first_fragment_row + 8 * r) * STRIDE + k;
                const simdgroup_matrix<T, 8, 8> row_fragment = load_transposed<T>(fragment, STRIDE, cell);
#pragma clang loop unroll(full)
                for (int t = 0; t < TOKEN_FRAGMENTS; ++t) {
                    simdgroup_multiply_accumulate(sums[t][r], token_fragments[t], row_fragment, sums[t][r]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // The factors of the norm overwrite the activations.
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
    // Gate and up of a result are in adjacent fragments.
    constexpr int RESULTS = GATED ? ROW_FRAGMENTS : 2 * ROW_FRAGMENTS;
    const uint fragment_row = first_row + (GATED ? first_fragment_row / 2 : first_fragment_row) + cell.column;
#pragma clang loop unroll(full)
    for (int t = 0; t < TOKEN_FRAGMENTS; ++t) {
        const uint token = first_fragment_token + 8 * t + cell.row;
        if (first_token + token >= problem.num_rows) {
            continue;
        }
        const float factor = HAS_NORM ? staged_x[token] : 1.0f;
        const uint first_out = problem.out_offset + (first_token + token) * a.out_stride + matrix.out_offset;
        device float* own_out = out + first_out;
        // All reads before all writes: the reads are issued together.
        float others[RESULTS] = {};
        if (HAS_BIAS || ADDS) {
#pragma clang loop unroll(full)
            for (int i = 0; i < RESULTS; ++i) {
                const uint row = fragment_row + i / 2 * 8 + i % 2;
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
                const float up = sums[t][(r + 1) % ROW_FRAGMENTS].thread_elements()[i % 2] * factor;
                result = result / (1.0f + exp(-result)) * up;
            }
            const uint row = fragment_row + i / 2 * 8 + i % 2;
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

// out = x · weightsᵀ (+ bias) (+ out), optionally with the norm of x first. Up to three matrices of one format, whose
// results are adjacent.
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
    const Problem problem = problem_of(a, groups, tile.z);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    const uint m = tile.y < a.matrices[1].first_group ? 0 : tile.y < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, TOKENS, ALONG_TOKENS, false>(
        a, a.matrices[m], weights, weights, bias, x, norm, out, rows, memory, tile, problem, thread_index, group
    );
}

// The same if the last matrix has another format, as V has in many Q4_K files.
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
    const Problem problem = problem_of(a, groups, tile.z);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    if (tile.y < a.matrices[2].first_group) {
        const uint m = tile.y < a.matrices[1].first_group ? 0 : 1;
        device const uchar* weights = m == 0 ? weights0 : weights1;
        multiply<F, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[m], weights, weights, m == 0 ? bias0 : bias1, x, norm, out, rows, memory, tile, problem,
            thread_index, group
        );
    } else {
        multiply<LAST, TOKENS, ALONG_TOKENS, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, norm, out, rows, memory, tile, problem, thread_index, group
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
    const Problem problem = problem_of(a, groups, tile.z);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    multiply<F, TOKENS, ALONG_TOKENS, true>(
        a, a.matrices[0], gate_weights, up_weights, x, x, norm, out, rows, memory, tile, problem, thread_index, group
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
