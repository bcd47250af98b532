// Products of weights with one to four rows of activations: the whole of a decode step at small batches.
//
// A threadgroup computes ROWS rows of the matrix. Its simdgroups share the columns in turns of 512 (a unit of
// 16 for each lane); a lane holds the activations of its unit in registers and reads each weight once for all
// columns of the result. The sums of the lanes are added, then those of the simdgroups, in a fixed order that
// depends neither on ROWS nor on COLUMNS.
//
// The norm before a product is part of it: activations are multiplied with the norm's weights as they are read,
// their squares are summed on the way, and the result is divided by their root mean square.

#include "formats.h"

struct MatvecArgs {
    uint num_units;    // of 16 columns of the matrix
    uint num_columns;  // rows of activations that exist, at most COLUMNS
    uint x_stride;
    uint out_stride;
    float eps;
    MatrixArgs matrices[3];
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];  // to what is in the result

// Reads a unit of activations for each column. Squares go to `squares`, sums to `sums` (if there are minima).
template <typename F, int COLUMNS>
inline void load_activations(
    constant MatvecArgs& a,
    device const float* x,
    device const float* norm,
    uint unit,
    thread float (&y)[COLUMNS][16],
    thread float (&sums)[COLUMNS],
    thread float (&squares)[COLUMNS]
) {
    for (int c = 0; c < COLUMNS; ++c) {
        const uint column = min(uint(c), a.num_columns - 1);
        device const float4* source = (device const float4*)(x + column * a.x_stride) + 4 * unit;
        sums[c] = 0.0f;
        for (int part = 0; part < 4; ++part) {
            float4 values = source[part];
            if (HAS_NORM) {
                squares[c] += dot(values, values);
                values *= ((device const float4*)norm)[4 * unit + part];
            }
            if (F::HAS_MINIMUM) {
                sums[c] += values.x + values.y + values.z + values.w;
            }
            for (int i = 0; i < 4; ++i) {
                y[c][4 * part + i] = values[i] * F::prescale(4 * part + i);
            }
        }
    }
}

// Reads a unit of each row. Past the last unit it is the last one, which costs nothing.
template <typename F, int ROWS>
inline void load_rows(
    device const uchar* weights,
    constant MatrixArgs& matrix,
    uint num_units,
    uint first_row,
    uint unit,
    thread typename F::Raw (&raw)[ROWS]
) {
    for (int r = 0; r < ROWS; ++r) {
        const uint row = min(first_row + r, matrix.num_rows - 1);
        raw[r] = F::load(weights, matrix.planes, row * num_units + min(unit, num_units - 1));
    }
}

// `total[r][c]` += this lane's share of row `r` times column `c`.
template <typename F, int ROWS, int COLUMNS>
inline void multiply_unit(
    thread const typename F::Raw (&raw)[ROWS],
    thread const float (&y)[COLUMNS][16],
    thread const float (&sums)[COLUMNS],
    thread float (&total)[ROWS][COLUMNS]
) {
    for (int r = 0; r < ROWS; ++r) {
        const Unit decoded = F::decode(raw[r]);
        for (int c = 0; c < COLUMNS; ++c) {
            float sum = 0.0f;
            for (int i = 0; i < 16; ++i) {
                sum = fma(decoded.code[i], y[c][i], sum);
            }
            sum *= decoded.scale;
            if (F::HAS_MINIMUM) {
                sum = fma(-decoded.minimum, sums[c], sum);
            }
            total[r][c] += sum;
        }
    }
}

// Adds up what lanes and simdgroups have. Thread `i` of the first N has the sum of value `i` afterwards.
template <int N>
inline float reduce(
    thread const float (&values)[N], threadgroup float* scratch, uint lane, uint group, uint num_groups
) {
    for (int i = 0; i < N; ++i) {
        const float sum = simd_sum(values[i]);
        if (lane == 0) {
            scratch[group * N + i] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float result = 0.0f;
    if (group == 0 && lane < uint(N)) {
        for (uint g = 0; g < num_groups; ++g) {
            result += scratch[g * N + lane];
        }
    }
    return result;
}

// The part of a kernel that computes one matrix. Threads below ROWS·COLUMNS write the results.
template <typename F, int ROWS, int COLUMNS>
inline void multiply(
    constant MatvecArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const float* x,
    device const float* norm,
    device const float* bias,
    device float* out,
    threadgroup float* scratch,
    uint threadgroup_index,
    uint lane,
    uint group,
    uint num_groups
) {
    const uint first_row = (threadgroup_index - matrix.first_group) * ROWS;
    // The sums of products, and behind them the sums of squares.
    float total[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    // The weights of the next unit are under way while those of one are multiplied.
    typename F::Raw raw[ROWS];
    uint unit = group * LANES + lane;
    load_rows<F, ROWS>(weights, matrix, a.num_units, first_row, unit, raw);
    while (unit < a.num_units) {
        const uint next = unit + num_groups * LANES;
        typename F::Raw following[ROWS];
        load_rows<F, ROWS>(weights, matrix, a.num_units, first_row, next, following);
        float y[COLUMNS][16];
        float sums[COLUMNS];
        load_activations<F, COLUMNS>(a, x, norm, unit, y, sums, squares);
        multiply_unit<F, ROWS, COLUMNS>(raw, y, sums, total);
        for (int r = 0; r < ROWS; ++r) {
            raw[r] = following[r];
        }
        unit = next;
    }
    constexpr int N = ROWS * COLUMNS + COLUMNS;
    float values[N];
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        values[i] = total[i / COLUMNS][i % COLUMNS];
    }
    for (int c = 0; c < COLUMNS; ++c) {
        values[ROWS * COLUMNS + c] = squares[c];
    }
    const float sum = reduce<N>(values, scratch, lane, group, num_groups);
    if (group != 0) {
        return;
    }
    const uint column = lane % COLUMNS;
    const float sum_of_squares = simd_shuffle(sum, ushort(ROWS * COLUMNS + column));
    const uint row = first_row + lane / COLUMNS;
    if (lane >= uint(ROWS * COLUMNS) || row >= matrix.num_rows || column >= a.num_columns) {
        return;
    }
    float result = sum;
    if (HAS_NORM) {
        result *= rsqrt(sum_of_squares / float(16 * a.num_units) + a.eps);
    }
    if (HAS_BIAS) {
        result += bias[row];
    }
    device float* target = out + column * a.out_stride + matrix.out_offset + row;
    *target = ADDS ? *target + result : result;
}

// Up to three matrices of one format, whose results lie side by side.
template <typename F, int ROWS, int COLUMNS>
[[kernel]] void matvec(
    constant MatvecArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const float* x [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device float* out [[buffer(9)]],
    threadgroup float* scratch [[threadgroup(0)]],  // simdgroups · (ROWS + 1) · COLUMNS
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const uint m = index < a.matrices[1].first_group ? 0 : index < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, ROWS, COLUMNS>(
        a, a.matrices[m], weights, x, norm, bias, out, scratch, index, lane, group, num_groups
    );
}

// The same if the last matrix has another format, as the values of many Q4_K files have.
template <typename F, typename LAST, int ROWS, int COLUMNS>
[[kernel]] void matvec_mixed(
    constant MatvecArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const float* x [[buffer(7)]],
    device const float* norm [[buffer(8)]],
    device float* out [[buffer(9)]],
    threadgroup float* scratch [[threadgroup(0)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    if (index < a.matrices[2].first_group) {
        const uint m = index < a.matrices[1].first_group ? 0 : 1;
        multiply<F, ROWS, COLUMNS>(
            a, a.matrices[m], m == 0 ? weights0 : weights1, x, norm, m == 0 ? bias0 : bias1, out, scratch, index,
            lane, group, num_groups
        );
    } else {
        multiply<LAST, ROWS, COLUMNS>(
            a, a.matrices[2], weights2, x, norm, bias2, out, scratch, index, lane, group, num_groups
        );
    }
}

// silu(gate · x) · (up · x), after the norm. ROWS rows of each of the two matrices.
template <typename F, int ROWS, int COLUMNS>
[[kernel]] void matvec_swiglu(
    constant MatvecArgs& a [[buffer(0)]],
    device const uchar* gate_weights [[buffer(1)]],
    device const uchar* up_weights [[buffer(2)]],
    device const float* x [[buffer(3)]],
    device const float* norm [[buffer(4)]],
    device float* out [[buffer(5)]],
    threadgroup float* scratch [[threadgroup(0)]],  // simdgroups · (2 · ROWS + 1) · COLUMNS
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const uint first_row = index * ROWS;
    float gate[ROWS][COLUMNS] = {};
    float up[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    typename F::Raw gate_raw[ROWS];
    typename F::Raw up_raw[ROWS];
    uint unit = group * LANES + lane;
    load_rows<F, ROWS>(gate_weights, a.matrices[0], a.num_units, first_row, unit, gate_raw);
    load_rows<F, ROWS>(up_weights, a.matrices[1], a.num_units, first_row, unit, up_raw);
    while (unit < a.num_units) {
        const uint next = unit + num_groups * LANES;
        typename F::Raw next_gate[ROWS];
        typename F::Raw next_up[ROWS];
        load_rows<F, ROWS>(gate_weights, a.matrices[0], a.num_units, first_row, next, next_gate);
        load_rows<F, ROWS>(up_weights, a.matrices[1], a.num_units, first_row, next, next_up);
        float y[COLUMNS][16];
        float sums[COLUMNS];
        load_activations<F, COLUMNS>(a, x, norm, unit, y, sums, squares);
        multiply_unit<F, ROWS, COLUMNS>(gate_raw, y, sums, gate);
        multiply_unit<F, ROWS, COLUMNS>(up_raw, y, sums, up);
        for (int r = 0; r < ROWS; ++r) {
            gate_raw[r] = next_gate[r];
            up_raw[r] = next_up[r];
        }
        unit = next;
    }
    constexpr int SIZE = ROWS * COLUMNS;
    float values[2 * SIZE + COLUMNS];
    for (int i = 0; i < SIZE; ++i) {
        values[i] = gate[i / COLUMNS][i % COLUMNS];
        values[SIZE + i] = up[i / COLUMNS][i % COLUMNS];
    }
    for (int c = 0; c < COLUMNS; ++c) {
        values[2 * SIZE + c] = squares[c];
    }
    const float sum = reduce<2 * SIZE + COLUMNS>(values, scratch, lane, group, num_groups);
    if (group != 0) {
        return;
    }
    const uint column = lane % COLUMNS;
    const float up_sum = simd_shuffle(sum, ushort((lane + SIZE) % LANES));
    const float sum_of_squares = simd_shuffle(sum, ushort(2 * SIZE + column));
    const uint row = first_row + lane / COLUMNS;
    if (lane >= uint(SIZE) || row >= a.matrices[0].num_rows || column >= a.num_columns) {
        return;
    }
    const float factor = rsqrt(sum_of_squares / float(16 * a.num_units) + a.eps);
    const float gated = sum * factor;
    out[column * a.out_stride + row] = gated / (1.0f + exp(-gated)) * (up_sum * factor);
}

#define MATVEC(F, ROWS, COLUMNS)                                                                    \
    template [[host_name("matvec_" #F "_" #COLUMNS)]] [[kernel]] decltype(matvec<F, ROWS, COLUMNS>) \
        matvec<F, ROWS, COLUMNS>;
#define MIXED(F, LAST, ROWS, COLUMNS)                                              \
    template [[host_name("matvec_" #F "_" #LAST "_" #COLUMNS)]] [[kernel]] decltype( \
        matvec_mixed<F, LAST, ROWS, COLUMNS>)                                      \
        matvec_mixed<F, LAST, ROWS, COLUMNS>;
#define SWIGLU(F, ROWS, COLUMNS)                                                  \
    template [[host_name("matvec_swiglu_" #F "_" #COLUMNS)]] [[kernel]] decltype( \
        matvec_swiglu<F, ROWS, COLUMNS>)                                          \
        matvec_swiglu<F, ROWS, COLUMNS>;

#define QUANTIZED(F)                                      \
    MATVEC(F, 4, 1) MATVEC(F, 4, 2) MATVEC(F, 2, 4)       \
    SWIGLU(F, 2, 1) SWIGLU(F, 2, 2) SWIGLU(F, 1, 4)
#define DENSE(F)                                          \
    MATVEC(F, 2, 1) MATVEC(F, 2, 2) MATVEC(F, 2, 4)       \
    SWIGLU(F, 1, 1) SWIGLU(F, 1, 2) SWIGLU(F, 1, 4)

QUANTIZED(Q4_0)
QUANTIZED(Q4_1)
QUANTIZED(Q5_0)
QUANTIZED(Q5_1)
QUANTIZED(Q8_0)
QUANTIZED(Q4_K)
QUANTIZED(Q5_K)
QUANTIZED(Q6_K)
DENSE(F16)
DENSE(BF16)
DENSE(F32)
MIXED(Q4_K, Q6_K, 4, 1)
MIXED(Q4_K, Q6_K, 4, 2)
MIXED(Q4_K, Q6_K, 2, 4)
MIXED(Q5_K, Q6_K, 4, 1)
MIXED(Q5_K, Q6_K, 4, 2)
MIXED(Q5_K, Q6_K, 2, 4)
