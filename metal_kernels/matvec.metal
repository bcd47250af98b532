// Matmuls of weights with one to four rows of activations: the whole of a decode step at small batches.
//
// A threadgroup computes ROW_GROUPS times ROWS rows of the matrix, ROWS in each simdgroup. Activations pass through
// threadgroup memory in chunks of 512 columns, in the order in which lanes read them. A lane has a unit of 16 columns,
// and reads each weight once for all columns of the result. The weights and activations of a chunk are loaded while the
// previous chunk is multiplied. Up to three slices of simdgroups divide the chunks among them. The sums of the lanes
// are reduced, then those of the slices, in a fixed order that depends neither on ROWS nor on COLUMNS.
//
// The norm before a matmul is fused: activations are multiplied by the norm's weights while they are loaded, their
// squares are summed, and the result is divided by their root mean square.

// A matrix may be one of a stack of adjacent matrices: one of each head, with a segment of every row of activations, or
// one of each expert, with the rows of a group.

#include "formats.h"
#include "groups.h"

struct MatvecArgs {
    uint num_units;    // of 16 columns of the matrix
    uint num_columns;  // rows of activations, at most COLUMNS
    uint x_stride;
    uint out_stride;
    uint x_next;       // stride of activations between matrices of a stack
    uint out_next;     // stride of results between matrices of a stack
    uint gathers;      // whether groups list their rows
    float eps;
    MatrixArgs matrices[3];
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];  // to the previous result
constant bool IS_GROUPED [[function_constant(3)]];  // matrices and rows are those of groups

// Simdgroups that share activations.
constant constexpr int ROW_GROUPS = 4;
constant constexpr int SLICE_THREADS = ROW_GROUPS * LANES;
constant constexpr int CHUNK_UNITS = LANES;
// Activations are loaded as float4, one by each thread of a slice.
constant constexpr int CHUNK_FOURS = 4 * CHUNK_UNITS;
static_assert(CHUNK_FOURS == SLICE_THREADS, "a thread brings one four");

// Lanes that read the scales of a chunk of one row, if lanes share scales.
constant constexpr int WORDS_OF_ROW = 8;

// A chunk of one column of the result in threadgroup memory: its float4s, then the sum of each unit.
constant constexpr int CHUNK_FLOATS = 4 * CHUNK_FOURS + CHUNK_UNITS;

// Chunks that a slice buffers: two where there is space, so that one is written while the other is read.
template <int COLUMNS>
constexpr int num_buffers() {
    return COLUMNS == 1 ? 2 : 1;
}

// The matrix of a stack that a threadgroup computes, and its rows of activations.
inline Problem problem_of(constant MatvecArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return problem_of_group(groups[index], a.out_stride);
    }
    Problem problem;
    problem.matrix = index;
    problem.num_rows = a.num_columns;
    problem.first_slot = 0;
    problem.x_offset = index * a.x_next;
    problem.out_offset = index * a.out_next;
    return problem;
}

// The rows of a simdgroup: ROWS in all, evenly from MATRICES that differ in their values only.
template <int ROWS, int MATRICES>
struct Source {
    device const uchar* weights[MATRICES];
    Planes planes;
    uint num_units;
    uint first_units[ROWS / MATRICES];  // of each row; rows past the end repeat the last one
    // Of the row whose scales the lane reads for others.
    device const uchar* shared_weights;
    uint shared_row;
};

template <int ROWS, int MATRICES>
inline Source<ROWS, MATRICES> source(
    constant MatvecArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* second_weights,
    uint index,
    uint first_row,
    uint lane
) {
    constexpr uint EACH = ROWS / MATRICES;
    Source<ROWS, MATRICES> from;
    from.weights[0] = weights;
    from.weights[MATRICES - 1] = second_weights;
    from.planes = in_registers(matrix.planes);
    from.num_units = a.num_units;
    const uint begin = index * matrix.num_rows;
#pragma clang loop unroll(full)
    for (uint r = 0; r < EACH; ++r) {
        from.first_units[r] = (begin + min(first_row + r, matrix.num_rows - 1)) * a.num_units;
    }
    const uint row = lane / WORDS_OF_ROW % ROWS;
    from.shared_weights = row < EACH ? weights : second_weights;
    from.shared_row = (begin + min(first_row + row % EACH, matrix.num_rows - 1)) * a.num_units;
    return from;
}

// The scales of the lane's units, one of each row, or the lane's word of those that lanes share.
template <typename F, int ROWS, bool ARE_SHARED>
struct Scales {
    typename F::Scale own[ROWS];
};
template <typename F, int ROWS>
struct Scales<F, ROWS, true> {
    typename F::Shared shared;
};

template <typename F, int ROWS, int MATRICES>
inline void load_scales(
    thread const Source<ROWS, MATRICES>& from, uint first, uint lane, thread Scales<F, ROWS, false>& scales
) {
    constexpr int EACH = ROWS / MATRICES;
    const uint unit = min(first + lane, from.num_units - 1);
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
        scales.own[r] = F::load_scale(from.weights[r / EACH], from.planes, from.first_units[r % EACH], unit);
    }
}

template <typename F, int ROWS, int MATRICES>
inline void load_scales(
    thread const Source<ROWS, MATRICES>& from, uint first, uint lane, thread Scales<F, ROWS, true>& scales
) {
    static_assert(ROWS * WORDS_OF_ROW <= LANES, "a lane for each word");
    scales.shared = F::load_shared(
        from.shared_weights, from.planes, from.shared_row, lane % WORDS_OF_ROW, first, from.num_units - 1
    );
}

template <typename F, int ROWS>
inline typename F::Scale scale_of(thread const Scales<F, ROWS, false>& scales, int row, uint) {
    return scales.own[row];
}

template <typename F, int ROWS>
inline typename F::Scale scale_of(thread const Scales<F, ROWS, true>& scales, int row, uint lane) {
    return F::take_scale(scales.shared, row * WORDS_OF_ROW, lane);
}

// The codes of a lane's unit. Past the last unit of a row, the last one is read, which costs nothing.
template <typename F, typename C>
inline void load_codes(
    device const uchar* weights, Planes planes, uint row, uint first, uint lane, uint num_units, thread C& codes
) {
    codes = F::load_codes(weights, planes, row, min(first + lane, num_units - 1));
}

// Unquantized words have no scales, so a lane takes every LANES-th one, and all lanes read neighbours together.
template <typename F, int N>
inline void load_codes(
    device const uchar* weights, Planes, uint row, uint first, uint lane, uint num_units, thread Words<N>& codes
) {
    device const uint4* words = (device const uint4*)weights + N * row;
#pragma clang loop unroll(full)
    for (int i = 0; i < N; ++i) {
        codes.word[i] = words[min(N * first + i * LANES + lane, N * num_units - 1)];
    }
}

// A lane's operands: CHUNK_UNITS units of each row.
template <typename F, int ROWS>
struct Chunk {
    typename F::Codes codes[ROWS];
    Scales<F, ROWS, F::SHARES_SCALES> scales;
};

template <typename F, int ROWS, int MATRICES>
inline void load_chunk(
    thread const Source<ROWS, MATRICES>& from, uint first, uint lane, thread Chunk<F, ROWS>& chunk
) {
    constexpr int EACH = ROWS / MATRICES;
#pragma clang loop unroll(full)
    for (int r = 0; r < ROWS; ++r) {
        load_codes<F>(
            from.weights[r / EACH], from.planes, from.first_units[r % EACH], first, lane, from.num_units,
            chunk.codes[r]
        );
    }
    load_scales(from, first, lane, chunk.scales);
}

// A thread's activations on their way to threadgroup memory: a float4 of each column of the result.
template <int COLUMNS>
struct Fours {
    float4 values[COLUMNS];
    float4 norm;
};

template <int COLUMNS>
struct Activations {
    device const float* x;
    device const float* norm;
    uint num_fours;
    uint begins[COLUMNS];  // of each row; rows past the last one repeat it
};

// Past the last column there are zeros.
template <int COLUMNS>
inline void fetch(thread const Activations<COLUMNS>& from, uint four, thread Fours<COLUMNS>& fours) {
    const bool exists = four < from.num_fours;
    fours.norm = float4(1.0f);
    if (HAS_NORM && exists) {
        fours.norm = ((device const float4*)from.norm)[four];
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < COLUMNS; ++c) {
        fours.values[c] = float4(0.0f);
        if (exists) {
            fours.values[c] = ((device const float4*)(from.x + from.begins[c]))[four];
        }
    }
}

// Float4 `i` of lane `l` is stored at `i * LANES + l`, so that neighbouring lanes read neighbours. A lane's sum starts
// with the codes' offset.
template <typename F, int COLUMNS>
inline void put(
    thread const Fours<COLUMNS>& fours,
    uint thread_index,
    threadgroup float* chunk,
    thread float (&squares)[COLUMNS]
) {
    // Of each word of the lane.
    constexpr int FOURS = 4 / F::WORDS;
    const uint word = F::WORDS == 1 ? 0 : thread_index / (FOURS * LANES);
    const uint four = (word * FOURS + thread_index % FOURS) * LANES + (thread_index - word * FOURS * LANES) / FOURS;
#pragma clang loop unroll(full)
    for (int c = 0; c < COLUMNS; ++c) {
        threadgroup float* column = chunk + c * CHUNK_FLOATS;
        const float4 values = fours.values[c];
        if (HAS_NORM) {
            squares[c] = add_dot(values, values, squares[c]);
        }
        if (F::HAS_MINIMUM || F::ZERO != 0.0f) {
            const float sum = sum_of_lanes(add_dot(values, fours.norm, 0.0f), 4);
            if (thread_index % 4 == 0) {
                column[4 * CHUNK_FOURS + thread_index / 4] = sum;
            }
        }
        // Each float4 has the same four prescale factors.
        const float4 prescale = float4(F::prescale(0), F::prescale(1), F::prescale(2), F::prescale(3));
        ((threadgroup float4*)column)[four] = values * fours.norm * prescale;
    }
}

// The operands of a lane in a chunk of one column, and their sum.
struct LaneInput {
    float values[16];
    float sum;
};

template <typename F>
inline LaneInput take(threadgroup const float* column, uint lane) {
    LaneInput input;
#pragma clang loop unroll(full)
    for (int part = 0; part < 4; ++part) {
        const float4 values = ((threadgroup const float4*)column)[part * LANES + lane];
#pragma clang loop unroll(full)
        for (int i = 0; i < 4; ++i) {
            input.values[4 * part + i] = values[i];
        }
    }
    input.sum = F::HAS_MINIMUM || F::ZERO != 0.0f ? column[4 * CHUNK_FOURS + lane] : 0.0f;
    return input;
}

template <typename F>
inline void add_dot_product(thread const Unit& unit, thread const LaneInput& input, thread float& total) {
    float sum = -F::ZERO * input.sum;
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; ++i) {
        sum = fma(unit.code[i], input.values[i], sum);
    }
    total = fma(sum, unit.scale, total);
    if (F::HAS_MINIMUM) {
        total = fma(-unit.minimum, input.sum, total);
    }
}

// `total[r][c]` += the lane's partial sum of row `r` times column `c`. The smaller set of operands, decoded rows or
// columns, is kept in registers while the other is looped over.
template <typename F, int ROWS, int COLUMNS>
inline void multiply_chunk(
    thread const Chunk<F, ROWS>& weights,
    threadgroup const float* x,
    uint lane,
    thread float (&total)[ROWS][COLUMNS]
) {
    if (COLUMNS > ROWS) {
        Unit units[ROWS];
#pragma clang loop unroll(full)
        for (int r = 0; r < ROWS; ++r) {
            units[r] = F::decode(weights.codes[r], scale_of(weights.scales, r, lane));
        }
#pragma clang loop unroll(full)
        for (int c = 0; c < COLUMNS; ++c) {
            const LaneInput input = take<F>(x + c * CHUNK_FLOATS, lane);
#pragma clang loop unroll(full)
            for (int r = 0; r < ROWS; ++r) {
                add_dot_product<F>(units[r], input, total[r][c]);
            }
        }
    } else {
        LaneInput inputs[COLUMNS];
#pragma clang loop unroll(full)
        for (int c = 0; c < COLUMNS; ++c) {
            inputs[c] = take<F>(x + c * CHUNK_FLOATS, lane);
        }
#pragma clang loop unroll(full)
        for (int r = 0; r < ROWS; ++r) {
            const Unit unit = F::decode(weights.codes[r], scale_of(weights.scales, r, lane));
#pragma clang loop unroll(full)
            for (int c = 0; c < COLUMNS; ++c) {
                add_dot_product<F>(unit, inputs[c], total[r][c]);
            }
        }
    }
}

// The thread's slice, and its simdgroup in it; simdgroups of a slice have different rows.
struct SimdgroupPosition {
    uint lane;
    uint group;      // simdgroup
    uint num_slices;
};

// Reduces each of N values over the lanes, for a power of two N: lane `l` gets the sum of value `l / (LANES / N)`.
// While several values remain, a lane exchanges half of its own for its partner's other half. The order of additions is
// the same for every N.
template <int N>
inline float sums_of_lanes(thread float (&values)[N], uint lane) {
#pragma clang loop unroll(full)
    for (int step = 0; step < 5; ++step) {
        const ushort distance = ushort(LANES / 2 >> step);
        const int left = N / 2 >> step;
        const bool is_upper = (lane & distance) != 0;
#pragma clang loop unroll(full)
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

// Reduces values over lanes, then over slices. Afterwards, lane `i` below N of the first slice has the sum of value
// `i`, and `sum_of_squares` of column `i % COLUMNS`.
template <int N, int COLUMNS>
inline float reduce(
    thread float (&values)[N],
    thread float (&squares)[COLUMNS],
    threadgroup float* scratch,
    SimdgroupPosition position,
    thread float& sum_of_squares
) {
    constexpr int RECORD = N + COLUMNS;
    const float sum = sums_of_lanes<N>(values, position.lane);
    if (position.lane % (LANES / N) == 0) {
        scratch[position.group * RECORD + position.lane / (LANES / N)] = sum;
    }
    if (HAS_NORM) {
        const float own_squares = sums_of_lanes<COLUMNS>(squares, position.lane);
        if (position.lane % (LANES / COLUMNS) == 0) {
            scratch[position.group * RECORD + N + position.lane / (LANES / COLUMNS)] = own_squares;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float result = 0.0f;
    sum_of_squares = 0.0f;
    if (position.group < ROW_GROUPS && position.lane < uint(N)) {
        for (uint slice = 0; slice < position.num_slices; ++slice) {
            result += scratch[(slice * ROW_GROUPS + position.group) * RECORD + position.lane];
        }
        if (HAS_NORM) {
            for (uint g = 0; g < position.num_slices * ROW_GROUPS; ++g) {
                sum_of_squares += scratch[g * RECORD + N + position.lane % COLUMNS];
            }
        }
    }
    return result;
}

// The activations that a slice reads.
template <int COLUMNS>
inline Activations<COLUMNS> activations(
    constant MatvecArgs& a,
    Problem problem,
    device const float* x,
    device const float* norm,
    device const uint* rows
) {
    Activations<COLUMNS> from;
    from.x = x;
    from.norm = norm;
    from.num_fours = 4 * a.num_units;
#pragma clang loop unroll(full)
    for (int c = 0; c < COLUMNS; ++c) {
        const uint column = min(uint(c), problem.num_rows - 1);
        const uint row = IS_GROUPED ? row_at(rows, a.gathers, problem.first_slot + column) : column;
        from.begins[c] = problem.x_offset + row * a.x_stride;
    }
    return from;
}

// The first chunk buffer of a slice in threadgroup memory.
template <typename F, int COLUMNS>
inline void stage_first(
    thread const Activations<COLUMNS>& from,
    SimdgroupPosition position,
    threadgroup float* own_memory,
    thread float (&squares)[COLUMNS]
) {
    const uint thread_index = position.group % ROW_GROUPS * LANES + position.lane;
    Fours<COLUMNS> fours;
    fetch(from, position.group / ROW_GROUPS * CHUNK_FOURS + thread_index, fours);
    put<F, COLUMNS>(fours, thread_index, own_memory, squares);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Dot products of a simdgroup's rows with each column, as the lane's partial sums over all chunks of its slice: row `r`
// is at `r * COLUMNS`.
template <typename F, int ROWS, int MATRICES, int COLUMNS>
inline void accumulate(
    thread const Source<ROWS, MATRICES>& from,
    thread const Activations<COLUMNS>& x_from,
    threadgroup float* memory,
    SimdgroupPosition position,
    thread float (&values)[ROWS * COLUMNS],
    thread float (&squares)[COLUMNS]
) {
    constexpr uint BUFFERS = num_buffers<COLUMNS>();
    const uint slice = position.group / ROW_GROUPS;
    const uint thread_index = position.group % ROW_GROUPS * LANES + position.lane;
    threadgroup float* own_memory = memory + slice * BUFFERS * COLUMNS * CHUNK_FLOATS;
    float total[ROWS][COLUMNS] = {};
    Chunk<F, ROWS> weights;
    load_chunk(from, slice * CHUNK_UNITS, position.lane, weights);
    stage_first<F, COLUMNS>(x_from, position, own_memory, squares);
    uint buffer = 0;
    for (uint first = 0; first * CHUNK_UNITS < from.num_units; first += position.num_slices) {
        const uint next = first + slice + position.num_slices;
        Chunk<F, ROWS> following;
        load_chunk(from, next * CHUNK_UNITS, position.lane, following);
        Fours<COLUMNS> fours;
        fetch(x_from, next * CHUNK_FOURS + thread_index, fours);
        // The last chunk may be incomplete. Zeros are multiplied past its last unit.
        if ((first + slice) * CHUNK_UNITS < from.num_units) {
            multiply_chunk(weights, own_memory + buffer * COLUMNS * CHUNK_FLOATS, position.lane, total);
        }
        weights = following;
        buffer = BUFFERS - 1 - buffer;
        if (BUFFERS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        put<F, COLUMNS>(fours, thread_index, own_memory + buffer * COLUMNS * CHUNK_FLOATS, squares);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        values[i] = total[i / COLUMNS][i % COLUMNS];
    }
}

// Computes one matrix. Threads below ROWS·COLUMNS of a simdgroup write the results.
template <typename F, int ROWS, int COLUMNS>
inline void multiply(
    constant MatvecArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const float* x,
    device const float* norm,
    device const float* bias,
    device float* out,
    device const uint* rows,
    threadgroup float* memory,
    uint threadgroup_index,
    Problem problem,
    SimdgroupPosition position
) {
    const uint row_group = position.group % ROW_GROUPS;
    const uint first_row = ((threadgroup_index - matrix.first_group) * ROW_GROUPS + row_group) * ROWS;
    const Source<ROWS, 1> from = source<ROWS, 1>(a, matrix, weights, weights, problem.matrix, first_row, position.lane);
    float values[ROWS * COLUMNS];
    float squares[COLUMNS] = {};
    const Activations<COLUMNS> x_from = activations<COLUMNS>(a, problem, x, norm, rows);
    accumulate<F, ROWS, 1, COLUMNS>(from, x_from, memory, position, values, squares);
    float sum_of_squares;
    const float sum = reduce<ROWS * COLUMNS, COLUMNS>(values, squares, memory, position, sum_of_squares);
    const uint column = position.lane % COLUMNS;
    const uint row = first_row + position.lane / COLUMNS;
    const bool is_first_slice = position.group < ROW_GROUPS;
    if (!is_first_slice || position.lane >= uint(ROWS * COLUMNS) || row >= matrix.num_rows || column >= problem.num_rows) {
        return;
    }
    device float* target = out + problem.out_offset + column * a.out_stride + matrix.out_offset + row;
    const float factor = HAS_NORM ? rsqrt(sum_of_squares / float(16 * a.num_units) + a.eps) : 1.0f;
    const float others = (HAS_BIAS ? bias[row] : 0.0f) + (ADDS ? *target : 0.0f);
    *target = fma(sum, factor, others);
}

// Up to three matrices of one format, whose results are adjacent.
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
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint2 grid_index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const SimdgroupPosition position = { lane, group, num_groups / ROW_GROUPS };
    const Problem problem = problem_of(a, groups, grid_index.y);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    const uint index = grid_index.x;
    const uint m = index < a.matrices[1].first_group ? 0 : index < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    multiply<F, ROWS, COLUMNS>(
        a, a.matrices[m], weights, x, norm, bias, out, rows, memory, index, problem, position
    );
}

// The same if the last matrix has another format, as V has in many Q4_K files.
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
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint2 grid_index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const SimdgroupPosition position = { lane, group, num_groups / ROW_GROUPS };
    const Problem problem = problem_of(a, groups, grid_index.y);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    const uint index = grid_index.x;
    if (index < a.matrices[2].first_group) {
        const uint m = index < a.matrices[1].first_group ? 0 : 1;
        multiply<F, ROWS, COLUMNS>(
            a, a.matrices[m], m == 0 ? weights0 : weights1, x, norm, m == 0 ? bias0 : bias1, out, rows, memory, index,
            problem, position
        );
    } else {
        multiply<LAST, ROWS, COLUMNS>(
            a, a.matrices[2], weights2, x, norm, bias2, out, rows, memory, index, problem, position
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
    device const RowGroup* groups [[buffer(6)]],
    device const uint* rows [[buffer(7)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint2 grid_index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const SimdgroupPosition position = { lane, group, num_groups / ROW_GROUPS };
    const Problem problem = problem_of(a, groups, grid_index.y);
    if (IS_GROUPED && problem.num_rows == 0) {
        return;
    }
    const uint index = grid_index.x;
    const uint first_row = (index * ROW_GROUPS + group % ROW_GROUPS) * ROWS;
    const Source<2 * ROWS, 2> from =
        source<2 * ROWS, 2>(a, a.matrices[0], gate_weights, up_weights, problem.matrix, first_row, lane);
    constexpr int SIZE = ROWS * COLUMNS;
    float values[2 * SIZE];
    float squares[COLUMNS] = {};
    const Activations<COLUMNS> x_from = activations<COLUMNS>(a, problem, x, norm, rows);
    accumulate<F, 2 * ROWS, 2, COLUMNS>(from, x_from, memory, position, values, squares);
    float sum_of_squares;
    const float sum = reduce<2 * SIZE, COLUMNS>(values, squares, memory, position, sum_of_squares);
    const float up_sum = simd_shuffle(sum, ushort((lane + SIZE) % LANES));
    const uint column = lane % COLUMNS;
    const uint row = first_row + lane / COLUMNS;
    if (group >= ROW_GROUPS || lane >= uint(SIZE) || row >= a.matrices[0].num_rows || column >= problem.num_rows) {
        return;
    }
    const float factor = rsqrt(sum_of_squares / float(16 * a.num_units) + a.eps);
    const float gated = sum * factor;
    out[problem.out_offset + column * a.out_stride + row] = gated / (1.0f + exp(-gated)) * (up_sum * factor);
}

#define MATVEC(F, ROWS, COLUMNS) INSTANCE(matvec_##F##_##COLUMNS, matvec, F, ROWS, COLUMNS)
#define MIXED(F, LAST, ROWS, COLUMNS) \
    INSTANCE(matvec_##F##_##LAST##_##COLUMNS, matvec_mixed, F, LAST, ROWS, COLUMNS)
#define SWIGLU(F, ROWS, COLUMNS) INSTANCE(matvec_swiglu_##F##_##COLUMNS, matvec_swiglu, F, ROWS, COLUMNS)

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
QUANTIZED(Q2_K)
QUANTIZED(Q3_K)
QUANTIZED(IQ4_NL)
QUANTIZED(IQ4_XS)
QUANTIZED(MXFP4)
QUANTIZED(Q8_S)
DENSE(F16)
DENSE(BF16)
DENSE(F32)
MIXED(Q4_K, Q6_K, 4, 1)
MIXED(Q4_K, Q6_K, 4, 2)
MIXED(Q4_K, Q6_K, 2, 4)
MIXED(Q5_K, Q6_K, 4, 1)
MIXED(Q5_K, Q6_K, 4, 2)
MIXED(Q5_K, Q6_K, 2, 4)
