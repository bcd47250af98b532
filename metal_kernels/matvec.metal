// Products of weights with one to four rows of activations: the whole of a decode step at small batches.
//
// A threadgroup computes ROW_GROUPS times ROWS rows of the matrix, ROWS in each simdgroup. Activations come by in
// chunks of 512 columns through threadgroup memory, in the order in which lanes take them out: a lane has a unit of 16
// columns, and reads each weight once for all columns of the result. The weights and the activations of a chunk are
// under way while those of the one before are multiplied. Up to three slices of simdgroups share the chunks. The sums of
// the lanes are added, then those of the slices, in a fixed order that depends neither on ROWS nor on COLUMNS.
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
constant constexpr int SLICE_THREADS = ROW_GROUPS * LANES;
constant constexpr int CHUNK_UNITS = LANES;
// Activations come in fours, one for each thread of a slice.
constant constexpr int CHUNK_FOURS = 4 * CHUNK_UNITS;
static_assert(CHUNK_FOURS == SLICE_THREADS, "a thread brings one four");

// A chunk of one column of the result in threadgroup memory: its fours, then the sum of each unit.
constant constexpr int CHUNK_FLOATS = 4 * CHUNK_FOURS + CHUNK_UNITS;

// Chunks that a slice keeps: the next one can be written while one is read, where there is room for both.
template <int COLUMNS>
constexpr int num_buffers() {
    return COLUMNS == 1 ? 2 : 1;
}

// One of the matrices with what a simdgroup needs to read it.
template <int ROWS>
struct Source {
    device const uchar* weights;
    Planes planes;
    uint num_units;
    uint first_units[ROWS];  // of each row; a row past the end is the last one
};

template <int ROWS>
inline Source<ROWS> source(
    constant MatvecArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    uint first_row
) {
    Source<ROWS> from;
    from.weights = weights;
    from.planes = in_registers(matrix.planes);
    from.num_units = a.num_units;
    for (int r = 0; r < ROWS; ++r) {
        from.first_units[r] = min(first_row + r, matrix.num_rows - 1) * a.num_units;
    }
    return from;
}

// Reads a unit of each row. Past the last unit it is the last one, which costs nothing.
template <typename F, int ROWS>
inline void load_rows(thread const Source<ROWS>& from, uint unit, thread typename F::Raw (&raw)[ROWS]) {
    const uint existing = min(unit, from.num_units - 1);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
        raw[r] = F::load(from.weights, from.planes, from.first_units[r] + existing);
    }
}

// The activations of a thread on their way to threadgroup memory: a four of each column of the result.
template <int COLUMNS>
struct Fours {
    float4 values[COLUMNS];
    float4 norm;
};

struct Activations {
    device const float* x;
    device const float* norm;
    uint num_fours;
    uint num_columns;
    uint stride;
};

// Past the last column there are zeros.
template <int COLUMNS>
inline void fetch(thread const Activations& from, uint four, thread Fours<COLUMNS>& fours) {
    const bool exists = four < from.num_fours;
    fours.norm = float4(1.0f);
    if (HAS_NORM && exists) {
        fours.norm = ((device const float4*)from.norm)[four];
    }
    for (int c = 0; c < COLUMNS; ++c) {
        const uint column = min(uint(c), from.num_columns - 1);
        fours.values[c] = float4(0.0f);
        if (exists) {
            fours.values[c] = ((device const float4*)(from.x + column * from.stride))[four];
        }
    }
}

// Four `i` of unit `u` goes to `i * LANES + u`, so that neighbouring lanes read neighbours. The offset of the codes is
// part of the sum that a lane starts with.
template <typename F, int COLUMNS>
inline void put(
    thread const Fours<COLUMNS>& fours,
    uint thread_index,
    threadgroup float* chunk,
    thread float (&squares)[COLUMNS]
) {
    for (int c = 0; c < COLUMNS; ++c) {
        threadgroup float* column = chunk + c * CHUNK_FLOATS;
        float4 values = fours.values[c];
        if (HAS_NORM) {
            squares[c] += dot(values, values);
            values *= fours.norm;
        }
        if (F::HAS_MINIMUM || F::ZERO != 0.0f) {
            const float sum = sum_of_lanes(values.x + values.y + values.z + values.w, 4);
            if (thread_index % 4 == 0) {
                column[4 * CHUNK_FOURS + thread_index / 4] = sum;
            }
        }
        // The factors of four neighbours are the same for each four.
        values *= float4(F::prescale(0), F::prescale(1), F::prescale(2), F::prescale(3));
        ((threadgroup float4*)column)[thread_index % 4 * LANES + thread_index / 4] = values;
    }
}

// A lane's unit of a chunk for each column, and its sum.
template <typename F, int COLUMNS>
inline void take(
    threadgroup const float* chunk,
    uint lane,
    thread float (&y)[COLUMNS][16],
    thread float (&sums)[COLUMNS]
) {
    for (int c = 0; c < COLUMNS; ++c) {
        threadgroup const float* column = chunk + c * CHUNK_FLOATS;
        for (int part = 0; part < 4; ++part) {
            const float4 values = ((threadgroup const float4*)column)[part * LANES + lane];
            for (int i = 0; i < 4; ++i) {
                y[c][4 * part + i] = values[i];
            }
        }
        sums[c] = F::HAS_MINIMUM || F::ZERO != 0.0f ? column[4 * CHUNK_FOURS + lane] : 0.0f;
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
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
        const Unit decoded = F::decode(raw[r]);
        for (int c = 0; c < COLUMNS; ++c) {
            float sum = -F::ZERO * sums[c];
            for (int i = 0; i < 16; ++i) {
                sum = fma(decoded.code[i], y[c][i], sum);
            }
            total[r][c] = fma(sum, decoded.scale, total[r][c]);
            if (F::HAS_MINIMUM) {
                total[r][c] = fma(-decoded.minimum, sums[c], total[r][c]);
            }
        }
    }
}

// Where a thread is: in a slice, with other simdgroups of other rows.
struct Place {
    uint lane;
    uint group;      // simdgroup
    uint num_slices;
};

// The sums over the lanes of each of N values, a power of two: lane `l` has that of value `l / (LANES / N)`. While there
// are values to share out, a lane gives half of its own away and goes on with the other half. What is added to what is
// the same for every N.
template <int N>
inline float sums_of_lanes(thread float (&values)[N], uint lane) {
    for (int step = 0; step < 5; ++step) {
        const ushort distance = ushort(LANES / 2 >> step);
        const int left = N / 2 >> step;
        const bool is_upper = (lane & distance) != 0;
        for (int i = 0; i < N / 2; ++i) {
            if (i < left) {
                const float lower = values[i];
                const float upper = values[left + i];
                values[i] = (is_upper ? upper : lower) + simd_shuffle_xor(is_upper ? lower : upper, distance);
            }
        }
        if (left == 0) {
            values[0] += simd_shuffle_xor(values[0], distance);
        }
    }
    return values[0];
}

// Adds up the values of lanes, then of slices. Lane `i` below N of the first slice has the sum of value `i`
// afterwards, and `sum_of_squares` of column `i % COLUMNS`.
template <int N, int COLUMNS>
inline float reduce(
    thread float (&values)[N],
    thread float (&squares)[COLUMNS],
    threadgroup float* scratch,
    Place place,
    thread float& sum_of_squares
) {
    constexpr int RECORD = N + COLUMNS;
    const float sum = sums_of_lanes<N>(values, place.lane);
    if (place.lane % (LANES / N) == 0) {
        scratch[place.group * RECORD + place.lane / (LANES / N)] = sum;
    }
    if (HAS_NORM) {
        const float own_squares = sums_of_lanes<COLUMNS>(squares, place.lane);
        if (place.lane % (LANES / COLUMNS) == 0) {
            scratch[place.group * RECORD + N + place.lane / (LANES / COLUMNS)] = own_squares;
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

// The activations that a slice goes through.
inline Activations activations(constant MatvecArgs& a, device const float* x, device const float* norm) {
    Activations from;
    from.x = x;
    from.norm = norm;
    from.num_fours = 4 * a.num_units;
    from.num_columns = a.num_columns;
    from.stride = a.x_stride;
    return from;
}

// The first of the chunks of a slice in threadgroup memory.
template <typename F, int COLUMNS>
inline void stage_first(
    thread const Activations& from,
    Place place,
    threadgroup float* own_memory,
    thread float (&squares)[COLUMNS]
) {
    const uint thread_index = place.group % ROW_GROUPS * LANES + place.lane;
    Fours<COLUMNS> fours;
    fetch(from, place.group / ROW_GROUPS * CHUNK_FOURS + thread_index, fours);
    put<F, COLUMNS>(fours, thread_index, own_memory, squares);
    threadgroup_barrier(mem_flags::mem_threadgroup);
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
    constexpr uint BUFFERS = num_buffers<COLUMNS>();
    const uint slice = place.group / ROW_GROUPS;
    const uint row_group = place.group % ROW_GROUPS;
    const uint thread_index = row_group * LANES + place.lane;
    const uint first_row = ((threadgroup_index - matrix.first_group) * ROW_GROUPS + row_group) * ROWS;
    threadgroup float* own_memory = memory + slice * BUFFERS * COLUMNS * CHUNK_FLOATS;
    const Source<ROWS> from = source<ROWS>(a, matrix, weights, first_row);
    const Activations x_from = activations(a, x, norm);
    float total[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    typename F::Raw raw[ROWS];
    load_rows<F, ROWS>(from, slice * CHUNK_UNITS + place.lane, raw);
    stage_first<F, COLUMNS>(x_from, place, own_memory, squares);
    uint buffer = 0;
    for (uint first = 0; first * CHUNK_UNITS < from.num_units; first += place.num_slices) {
        const uint next = first + slice + place.num_slices;
        typename F::Raw following[ROWS];
        load_rows<F, ROWS>(from, next * CHUNK_UNITS + place.lane, following);
        Fours<COLUMNS> fours;
        fetch(x_from, next * CHUNK_FOURS + thread_index, fours);
        // The chunks may not go up evenly. Past the last unit of the last one there are zeros to multiply with.
        if ((first + slice) * CHUNK_UNITS < from.num_units) {
            float y[COLUMNS][16];
            float sums[COLUMNS];
            take<F, COLUMNS>(own_memory + buffer * COLUMNS * CHUNK_FLOATS, place.lane, y, sums);
            multiply_unit<F, ROWS, COLUMNS>(raw, y, sums, total);
        }
#pragma clang loop unroll(full)
        for (int r = 0; r < ROWS; ++r) {
            raw[r] = following[r];
        }
        buffer = BUFFERS - 1 - buffer;
        if (BUFFERS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        put<F, COLUMNS>(fours, thread_index, own_memory + buffer * COLUMNS * CHUNK_FLOATS, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
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
    constexpr uint BUFFERS = num_buffers<COLUMNS>();
    const uint slice = group / ROW_GROUPS;
    const uint thread_index = group % ROW_GROUPS * LANES + lane;
    const uint first_row = (index * ROW_GROUPS + group % ROW_GROUPS) * ROWS;
    threadgroup float* own_memory = memory + slice * BUFFERS * COLUMNS * CHUNK_FLOATS;
    const Source<ROWS> gate_from = source<ROWS>(a, a.matrices[0], gate_weights, first_row);
    const Source<ROWS> up_from = source<ROWS>(a, a.matrices[1], up_weights, first_row);
    const Activations x_from = activations(a, x, norm);
    float gate[ROWS][COLUMNS] = {};
    float up[ROWS][COLUMNS] = {};
    float squares[COLUMNS] = {};
    typename F::Raw gate_raw[ROWS];
    typename F::Raw up_raw[ROWS];
    load_rows<F, ROWS>(gate_from, slice * CHUNK_UNITS + lane, gate_raw);
    load_rows<F, ROWS>(up_from, slice * CHUNK_UNITS + lane, up_raw);
    stage_first<F, COLUMNS>(x_from, place, own_memory, squares);
    uint buffer = 0;
    for (uint first = 0; first * CHUNK_UNITS < gate_from.num_units; first += place.num_slices) {
        const uint next = first + slice + place.num_slices;
        typename F::Raw next_gate[ROWS];
        typename F::Raw next_up[ROWS];
        load_rows<F, ROWS>(gate_from, next * CHUNK_UNITS + lane, next_gate);
        load_rows<F, ROWS>(up_from, next * CHUNK_UNITS + lane, next_up);
        Fours<COLUMNS> fours;
        fetch(x_from, next * CHUNK_FOURS + thread_index, fours);
        if ((first + slice) * CHUNK_UNITS < gate_from.num_units) {
            float y[COLUMNS][16];
            float sums[COLUMNS];
            take<F, COLUMNS>(own_memory + buffer * COLUMNS * CHUNK_FLOATS, lane, y, sums);
            multiply_unit<F, ROWS, COLUMNS>(gate_raw, y, sums, gate);
            multiply_unit<F, ROWS, COLUMNS>(up_raw, y, sums, up);
        }
#pragma clang loop unroll(full)
        for (int r = 0; r < ROWS; ++r) {
            gate_raw[r] = next_gate[r];
            up_raw[r] = next_up[r];
        }
        buffer = BUFFERS - 1 - buffer;
        if (BUFFERS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        put<F, COLUMNS>(fours, thread_index, own_memory + buffer * COLUMNS * CHUNK_FLOATS, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
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
