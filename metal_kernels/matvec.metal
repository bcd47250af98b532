// Products of weights with one to four rows of activations: the whole of a decode step at small batches.
//
// A threadgroup computes ROW_GROUPS times ROWS rows of the matrix, ROWS in each simdgroup. Activations come by in
// chunks of 512 columns through threadgroup memory, in the order in which lanes take them out: a lane has a unit of 16
// columns, and reads each weight once for all columns of the result. Up to two slices of simdgroups share the chunks.
// The sums of the lanes are added, then those of the slices, in a fixed order that depends neither on ROWS nor on
// COLUMNS.
//
// The norm before a product is part of it: activations are multiplied with the norm's weights on their way in, their
// squares are summed, and the result is divided by their root mean square.

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

// Simdgroups that share activations.
constant constexpr int ROW_GROUPS = 4;
constant constexpr int CHUNK_UNITS = LANES;
// Activations come in fours.
constant constexpr int CHUNK_FOURS = 4 * CHUNK_UNITS;
constant constexpr int SLICE_THREADS = ROW_GROUPS * LANES;

// The activations of a chunk: four `i` of unit `u` lie at `i * LANES + u`, so that neighbouring lanes read neighbours.
// Behind them, if the format has minima, the sum of each four.
template <typename F, int COLUMNS>
inline void stage_activations(
    constant MatvecArgs& a,
    device const float* x,
    device const float* norm,
    uint chunk,
    uint thread_index,
    threadgroup float4* staged,
    threadgroup float* staged_sums,
    thread float (&squares)[COLUMNS]
) {
    for (uint p = thread_index; p < CHUNK_FOURS; p += SLICE_THREADS) {
        const uint four = chunk * CHUNK_FOURS + p;
        const uint target = p % 4 * LANES + p / 4;
        const bool exists = four < 4 * a.num_units;
        float4 factors = float4(1.0f);
        if (HAS_NORM && exists) {
            factors = ((device const float4*)norm)[four];
        }
        for (int c = 0; c < COLUMNS; ++c) {
            const uint column = min(uint(c), a.num_columns - 1);
            float4 values = float4(0.0f);
            if (exists) {
                values = ((device const float4*)(x + column * a.x_stride))[four];
            }
            if (HAS_NORM) {
                squares[c] += dot(values, values);
                values *= factors;
            }
            if (F::HAS_MINIMUM) {
                staged_sums[c * CHUNK_FOURS + target] = values.x + values.y + values.z + values.w;
            }
            // The factors of four neighbours are the same for each four.
            values *= float4(F::prescale(0), F::prescale(1), F::prescale(2), F::prescale(3));
            staged[c * CHUNK_FOURS + target] = values;
        }
    }
}

// A lane's unit of a chunk for each column.
template <typename F, int COLUMNS>
inline void take_activations(
    threadgroup const float4* staged,
    threadgroup const float* staged_sums,
    uint lane,
    thread float (&y)[COLUMNS][16],
    thread float (&sums)[COLUMNS]
) {
    for (int c = 0; c < COLUMNS; ++c) {
        sums[c] = 0.0f;
        for (int part = 0; part < 4; ++part) {
            const uint source = c * CHUNK_FOURS + part * LANES + lane;
            const float4 values = staged[source];
            for (int i = 0; i < 4; ++i) {
                y[c][4 * part + i] = values[i];
            }
            if (F::HAS_MINIMUM) {
                sums[c] += staged_sums[source];
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

// Where a thread is: in a slice, with other simdgroups of other rows.
struct Place {
    uint lane;
    uint group;      // simdgroup
    uint num_slices;
};

// Bytes of threadgroup memory of a slice, in floats: activations and their sums.
template <int COLUMNS>
inline threadgroup float* slice_memory(threadgroup float* memory, uint slice) {
    return memory + slice * COLUMNS * CHUNK_FOURS * 5;
}

// Adds up the values of lanes, then of slices. Lane `i` below N of the first slice has the sum of value `i`
// afterwards, and `sum_of_squares` of column `i % COLUMNS`.
template <int N, int COLUMNS>
inline float reduce(
    thread const float (&values)[N],
    thread const float (&squares)[COLUMNS],
    threadgroup float* scratch,
    Place place,
    thread float& sum_of_squares
) {
    constexpr int RECORD = N + COLUMNS;
    // The activations before are no longer needed.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < N; ++i) {
        const float sum = simd_sum(values[i]);
        if (place.lane == 0) {
            scratch[place.group * RECORD + i] = sum;
        }
    }
    if (HAS_NORM) {
        for (int c = 0; c < COLUMNS; ++c) {
            const float sum = simd_sum(squares[c]);
            if (place.lane == 0) {
                scratch[place.group * RECORD + N + c] = sum;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float result = 0.0f;
    sum_of_squares = 0.0f;
    if (place.group < ROW_GROUPS && place.lane < uint(N)) {
        for (uint slice = 0; slice < place.num_slices; ++slice) {
            result += scratch[(slice * ROW_GROUPS + place.group) * RECORD + place.lane];
        }
        if (HAS_NORM) {
            for (uint g = 0; g < place.num_slices * ROW_GROUPS; ++g) {
                sum_of_squares += scratch[g * RECORD + N + place.lane % COLUMNS];
            }
        }
    }
    return result;
}

// The part of a kernel that computes one matrix. Threads below ROWS·COLUMNS of a simdgroup write the results.
template <typename F, int ROWS, int COLUMNS>
inline void multiply(
    constant MatvecArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const float* x,
    device const float* norm,
    device const float* bias,
    device float* out,
    threadgroup float* memory,
    uint threadgroup_index,
    Place place
) {
    const uint slice = place.group / ROW_GROUPS;
    const uint row_group = place.group % ROW_GROUPS;
    const uint first_row = ((threadgroup_index - matrix.first_group) * ROW_GROUPS + row_group) * ROWS;
    threadgroup float* own_memory = slice_memory<COLUMNS>(memory, slice);
    threadgroup float4* staged = (threadgroup float4*)own_memory;
    threadgroup float* staged_sums = own_memory + 4 * COLUMNS * CHUNK_FOURS;
    float total[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    // The weights of the next unit are under way while those of one are multiplied.
    typename F::Raw raw[ROWS];
    load_rows<F, ROWS>(weights, matrix, a.num_units, first_row, slice * CHUNK_UNITS + place.lane, raw);
    for (uint first = 0; first * CHUNK_UNITS < a.num_units; first += place.num_slices) {
        const uint chunk = first + slice;
        const uint unit = chunk * CHUNK_UNITS + place.lane;
        typename F::Raw following[ROWS];
        const uint next = unit + place.num_slices * CHUNK_UNITS;
        load_rows<F, ROWS>(weights, matrix, a.num_units, first_row, next, following);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint thread_index = row_group * LANES + place.lane;
        stage_activations<F, COLUMNS>(a, x, norm, chunk, thread_index, staged, staged_sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float y[COLUMNS][16];
        float sums[COLUMNS];
        take_activations<F, COLUMNS>(staged, staged_sums, place.lane, y, sums);
        // Past the last unit there are zeros to multiply with.
        multiply_unit<F, ROWS, COLUMNS>(raw, y, sums, total);
        for (int r = 0; r < ROWS; ++r) {
            raw[r] = following[r];
        }
    }
    float values[ROWS * COLUMNS];
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        values[i] = total[i / COLUMNS][i % COLUMNS];
    }
    float sum_of_squares;
    const float sum = reduce<ROWS * COLUMNS, COLUMNS>(values, squares, memory, place, sum_of_squares);
    const uint column = place.lane % COLUMNS;
    const uint row = first_row + place.lane / COLUMNS;
    if (slice != 0 || place.lane >= uint(ROWS * COLUMNS) || row >= matrix.num_rows || column >= a.num_columns) {
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
    threadgroup float* memory [[threadgroup(0)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const Place place = { lane, group, num_groups / ROW_GROUPS };
    const uint m = index < a.matrices[1].first_group ? 0 : index < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, ROWS, COLUMNS>(
        a, a.matrices[m], weights, x, norm, bias, out, memory, index, place
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
    threadgroup float* memory [[threadgroup(0)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const Place place = { lane, group, num_groups / ROW_GROUPS };
    if (index < a.matrices[2].first_group) {
        const uint m = index < a.matrices[1].first_group ? 0 : 1;
        multiply<F, ROWS, COLUMNS>(
            a, a.matrices[m], m == 0 ? weights0 : weights1, x, norm, m == 0 ? bias0 : bias1, out, memory, index, place
        );
    } else {
        multiply<LAST, ROWS, COLUMNS>(
            a, a.matrices[2], weights2, x, norm, bias2, out, memory, index, place
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
    threadgroup float* memory [[threadgroup(0)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const Place place = { lane, group, num_groups / ROW_GROUPS };
    const uint slice = group / ROW_GROUPS;
    const uint first_row = (index * ROW_GROUPS + group % ROW_GROUPS) * ROWS;
    threadgroup float* own_memory = slice_memory<COLUMNS>(memory, slice);
    threadgroup float4* staged = (threadgroup float4*)own_memory;
    threadgroup float* staged_sums = own_memory + 4 * COLUMNS * CHUNK_FOURS;
    float gate[ROWS][COLUMNS] = {};
    float up[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    typename F::Raw gate_raw[ROWS];
    typename F::Raw up_raw[ROWS];
    const uint first_unit = slice * CHUNK_UNITS + lane;
    load_rows<F, ROWS>(gate_weights, a.matrices[0], a.num_units, first_row, first_unit, gate_raw);
    load_rows<F, ROWS>(up_weights, a.matrices[1], a.num_units, first_row, first_unit, up_raw);
    for (uint first = 0; first * CHUNK_UNITS < a.num_units; first += place.num_slices) {
        const uint chunk = first + slice;
        const uint next = (chunk + place.num_slices) * CHUNK_UNITS + lane;
        typename F::Raw next_gate[ROWS];
        typename F::Raw next_up[ROWS];
        load_rows<F, ROWS>(gate_weights, a.matrices[0], a.num_units, first_row, next, next_gate);
        load_rows<F, ROWS>(up_weights, a.matrices[1], a.num_units, first_row, next, next_up);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint thread_index = group % ROW_GROUPS * LANES + lane;
        stage_activations<F, COLUMNS>(a, x, norm, chunk, thread_index, staged, staged_sums, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float y[COLUMNS][16];
        float sums[COLUMNS];
        take_activations<F, COLUMNS>(staged, staged_sums, lane, y, sums);
        multiply_unit<F, ROWS, COLUMNS>(gate_raw, y, sums, gate);
        multiply_unit<F, ROWS, COLUMNS>(up_raw, y, sums, up);
        for (int r = 0; r < ROWS; ++r) {
            gate_raw[r] = next_gate[r];
            up_raw[r] = next_up[r];
        }
    }
    constexpr int SIZE = ROWS * COLUMNS;
    float values[2 * SIZE];
    for (int i = 0; i < SIZE; ++i) {
        values[i] = gate[i / COLUMNS][i % COLUMNS];
        values[SIZE + i] = up[i / COLUMNS][i % COLUMNS];
    }
    float sum_of_squares;
    const float sum = reduce<2 * SIZE, COLUMNS>(values, squares, memory, place, sum_of_squares);
    const float up_sum = simd_shuffle(sum, ushort((lane + SIZE) % LANES));
    const uint column = lane % COLUMNS;
    const uint row = first_row + lane / COLUMNS;
    if (slice != 0 || lane >= uint(SIZE) || row >= a.matrices[0].num_rows || column >= a.num_columns) {
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
