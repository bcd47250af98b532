// Products of weights with up to 64 rows of activations on tensor cores, with the norm in front and the residual behind.
//
// The instruction multiplies 16 rows of weights with 8 rows of activations over 16 columns. Weights lie in memory as its lanes
// want them (`pieces.h`), and come through a ring in threadgroup memory in which each thread has places of its own. A thread
// takes few registers so, and what it waits for is under way long before: also weights of the next kernel while this one
// ends.
//
// The slices of a row and the order in which they are added depend on the matrix only, so a row of activations has the
// same bits in every batch.

#define FOR_NVIDIA
#include "slices.h"

// The compiler is told that one threadgroup of a core is enough: it would save registers for more, and pay with time.
#define MAX_THREADS 512
#define MIN_THREADGROUPS 1

constant bool IS_WHOLE [[function_constant(5)]];  // all activations are in threadgroup memory at once
constant ushort STAGES [[function_constant(6)]];  // chunks that are in the ring or on their way to it: two or three
// Times eight columns of a row of activations that a thread has, up to four; of longer rows it has more, four at a time.
constant ushort OWN_EIGHTS [[function_constant(7)]];

constant constexpr uint NUM_THREADS = MAX_THREADS;

// One of up to three matrices, as a launch has them.
struct Operand {
    device const uchar* weights;
    device const uchar* up_weights;
    device const float* bias;
};

// The tiles that a threadgroup still has to compute: every `step`-th one of a matrix of the stack; or, of groups, a run of
// the tiles of all of them, where those of a group lie behind those of the one before.
struct Tiles {
    uint matrix;  // of the stack, or the group
    uint tile;    // of the matrix
    uint left;    // to the end of the matrix or of the run, with this one
    uint step;
};

// Leaves out the tiles of groups that have no rows from `first_token` on.
inline void leave_out_short_groups(device const RowGroup* groups, uint num_tiles, uint first_token, thread Tiles& tiles) {
    while (tiles.left > 0 && groups[tiles.matrix].num_rows <= first_token) {
        tiles.left -= min(tiles.left, num_tiles - tiles.tile);
        tiles.tile = 0;
        tiles.matrix += 1;
    }
}

// Those of threadgroup `index` of a launch. If the last matrix has another format, some threadgroups have its tiles, and the
// others those in front of it. Runs are equally long, and groups that do not exist, the last ones of the list, have no part
// in them.
template <bool IS_MIXED>
inline Tiles tiles_of(
    constant ProductArgs& a,
    device const RowGroup* groups,
    uint3 index,
    uint num_threadgroups,
    uint first_token,
    uint lane
) {
    Tiles tiles = { index.z, index.x, a.num_tiles - index.x, num_threadgroups };
    if (IS_MIXED) {
        const bool is_last = index.x >= a.num_first;
        const uint begin_of_last = a.matrices[2].first_group;
        tiles.tile = is_last ? begin_of_last + index.x - a.num_first : index.x;
        tiles.left = (is_last ? a.num_tiles : begin_of_last) - tiles.tile;
        tiles.step = is_last ? num_threadgroups - a.num_first : a.num_first;
    }
    if (IS_GROUPED) {
        uint num_existing = 0;
        for (uint group = lane; group < a.num_groups; group += LANES) {
            num_existing += groups[group].num_rows > 0 ? 1 : 0;
        }
        const uint num_all = simd_sum(num_existing) * a.num_tiles;
        const uint len = num_all / num_threadgroups;
        const uint num_longer = num_all % num_threadgroups;
        const uint begin = index.x * len + min(index.x, num_longer);
        tiles.matrix = begin / a.num_tiles;
        tiles.tile = begin % a.num_tiles;
        tiles.left = len + (index.x < num_longer ? 1 : 0);
        tiles.step = 1;
        leave_out_short_groups(groups, a.num_tiles, first_token, tiles);
    }
    return tiles;
}

// Where the sum of a slice for a token and a row of a tile is: so that those that a warp writes together lie in different
// banks, and those that it reads of a token and of slices whose numbers differ by eight, with two words between slices.
inline uint place_of_sum(uint token, uint row) {
    return (token / 8 * 8 + token % 2 * 4 + token / 2 % 4) * 16 + (row ^ (token & 4) * 2);
}

// A threadgroup has 16 rows of weights (half as many results if GATED) at a time, those of the tiles that it has to do, and up
// to TOKEN_TILES · 8 rows of activations, from `first_token` of the matrix or the group on.
//
// Where there is room (IS_WHOLE), activations are in threadgroup memory from the begin to the end; else each warp reads what
// it multiplies.
template <typename F, int TOKEN_TILES, bool GATED>
inline void few(
    constant ProductArgs& a,
    Operand operand0,
    Operand operand1,
    Operand operand2,
    device const float* x,
    device const float* norm,
    device float* out,
    device const RowGroup* groups,
    device const uint* rows,
    threadgroup char* memory,
    Tiles todo,
    uint first_token,
    uint lane,
    uint slice
) {
    constexpr uint RESULTS = GATED ? 8 : 16;
    constexpr uint TOKENS = TOKEN_TILES * 8;
    constexpr uint COLUMNS = Piece<F>::COLUMNS;
    constexpr uint CHUNK = COLUMNS * SLICES;
    constexpr Pairs PAIRS = Decoder<F>::PAIRS;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint thread_index = slice * LANES + lane;
    const uint num_columns = 16 * a.num_units;
    const uint num_pieces = (num_columns + COLUMNS - 1) / COLUMNS;
    const uint num_chunks = (num_pieces + SLICES - 1) / SLICES;
    // A gated product has one list of tiles for both matrices.
    const auto matrix_of_tile = [&](uint tile) {
        return GATED || tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    };

    // Where the next weights of the slice come from and go to.
    const Ring<F, NUM_THREADS, 2> ring(memory, thread_index);
    Source<F> sources[2];
    const auto advance = [&](thread Tiles& tiles) {
        tiles.left -= min(tiles.left, tiles.step);
        tiles.tile += tiles.step;
        if (IS_GROUPED && tiles.tile == a.num_tiles) {
            tiles.tile = 0;
            tiles.matrix += 1;
            leave_out_short_groups(groups, a.num_tiles, first_token, tiles);
        }
    };
    Tiles next = todo;
    uint next_chunk = 0;
    const auto turn_to_tile = [&](uint stacked, uint tile) {
        const int m = matrix_of_tile(tile);
        const Operand operand = m == 0 ? operand0 : m == 1 ? operand1 : operand2;
        const Planes planes = in_registers(a.matrices[m].planes);
        // Rows that do not exist have the weights of some that do; nobody reads their sums.
        const uint num_eights = (a.matrices[m].num_rows + 7) / 8;
        const uint first_eight = (tile - a.matrices[m].first_group) * (RESULTS / 8);
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            const uint eight = min(GATED ? first_eight : first_eight + h, num_eights - 1);
            device const uchar* weights = GATED && h == 1 ? operand.up_weights : operand.weights;
            sources[h] = Source<F>(weights, planes, (stacked * num_eights + eight) * num_pieces, lane);
        }
    };
    const auto bring_weights = [&](uint stage) {
        if (next.left > 0) {
            if (next_chunk == 0) {
                turn_to_tile(IS_GROUPED ? groups[next.matrix].matrix : next.matrix, next.tile);
            }
            // Columns that do not exist have the weights of some that do; their activations are zeros.
            const uint piece = min(next_chunk * SLICES + slice, num_pieces - 1);
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                ring.bring(stage, h, sources[h], piece);
            }
            next_chunk += 1;
            if (next_chunk == num_chunks) {
                next_chunk = 0;
                advance(next);
            }
        }
        msl_end_group();
    };
#pragma clang loop unroll(full)
    for (uint stage = 0; stage + 1 < STAGES; ++stage) {
        bring_weights(stage);
    }

    // Behind the ring: sums of slices, squares, factors, activations. Sums of few rows take turns between two places, so that
    // there is one barrier for a tile; more rows need the room.
    constexpr uint SLICE_STRIDE = TOKENS * 16 + 2;
    constexpr uint PARTS = SLICES * SLICE_STRIDE;
    constexpr uint TURNS = TOKEN_TILES == 1 ? 2 : 1;
    threadgroup float* parts = (threadgroup float*)(memory + STAGES * ring.STAGE_BYTES);
    threadgroup float* squares = parts + TURNS * PARTS;
    threadgroup float* factors = squares + SLICES * TOKENS;
    threadgroup uint* staged = (threadgroup uint*)(factors + TOKENS);
    // Words from one row to the next: rows that are read together lie in different banks.
    const uint x_stride = num_chunks * (CHUNK / 2) + (COLUMNS == 64 ? 4 : 16);
    // What the tile belongs to, and the rows of activations that it is multiplied with.
    Part part;
    uint num_tokens;
    const auto row_of_x = [&](uint token) {
        const uint row = IS_GROUPED ? row_at(rows, a.gathers, part.first_place + first_token + token) : first_token + token;
        return x + part.x_offset + ulong(row) * a.x_stride;
    };
    const auto read_eight = [&](device const float* from, thread float (&values)[8]) {
        const float4 low = *(device const float4*)from;
        const float4 high = *(device const float4*)(from + 4);
#pragma clang loop unroll(full)
        for (int v = 0; v < 4; ++v) {
            values[v] = low[v];
            values[4 + v] = high[v];
        }
    };
    const auto weigh = [&](thread const float (&weights)[8], thread float (&values)[8]) {
#pragma clang loop unroll(full)
        for (int v = 0; v < 8 && HAS_NORM; ++v) {
            values[v] *= weights[v];
        }
    };
    // The norm's weights of the eight columns of a thread that are brought next.
    float norm_weights[4][8] = {};
    const auto read_norm_weights = [&](uint first_place) {
#pragma clang loop unroll(full)
        for (uint p = 0; p < 4; ++p) {
            if (HAS_NORM && p < OWN_EIGHTS) {
                read_eight(norm + min(8 * (first_place + p * NUM_THREADS), num_columns - 8), norm_weights[p]);
            }
        }
    };
    // Each thread has the same columns of every row of activations: the order in which squares are added is that of all
    // batches. Up to four times eight columns are on their way at a time, of as many rows as there are.
    const auto bring = [&](auto rows_together) {
        constexpr uint ROWS = decltype(rows_together)::value;
        constexpr uint MAX_PLACES = 4 / ROWS;
        const uint num_places = OWN_EIGHTS < MAX_PLACES ? uint(OWN_EIGHTS) : MAX_PLACES;
#pragma clang loop unroll(disable)
        for (uint first = 0; first < num_tokens; first += ROWS) {
            float own_squares[ROWS] = {};
#pragma clang loop unroll(disable)
            for (uint first_place = thread_index; 8 * first_place < num_chunks * CHUNK; first_place += num_places * NUM_THREADS) {
                float values[MAX_PLACES][ROWS][8];
#pragma clang loop unroll(full)
                for (uint p = 0; p < MAX_PLACES; ++p) {
                    const uint column = min(8 * (first_place + p * NUM_THREADS), num_columns - 8);
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (p < num_places && first + i < num_tokens) {
                            read_eight(row_of_x(first + i) + column, values[p][i]);
                        }
                    }
                }
                if (IS_WHOLE && 8 * num_places * NUM_THREADS < num_chunks * CHUNK) {
                    read_norm_weights(first_place);
                }
#pragma clang loop unroll(full)
                for (uint p = 0; p < MAX_PLACES; ++p) {
                    const uint place = first_place + p * NUM_THREADS;
                    const bool exists = 8 * place < num_columns;
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (p < num_places && first + i < num_tokens) {
#pragma clang loop unroll(full)
                            for (int v = 0; v < 8; ++v) {
                                values[p][i][v] = exists ? values[p][i][v] : 0.0f;
                                own_squares[i] = fma(values[p][i][v], values[p][i][v], own_squares[i]);
                            }
                            if (IS_WHOLE && 8 * place < num_chunks * CHUNK) {
                                weigh(norm_weights[p], values[p][i]);
                                *(threadgroup uint4*)(staged + (first + i) * x_stride + 4 * place) =
                                    paired<PAIRS>(values[p][i], X_SCALE);
                            }
                        }
                    }
                }
            }
#pragma clang loop unroll(full)
            for (uint i = 0; i < ROWS && HAS_NORM; ++i) {
                const float sum = simd_sum(own_squares[i]);
                if (lane == 0) {
                    squares[slice * TOKENS + first + i] = sum;
                }
            }
        }
    };
    // The weights of the norm are not waited for, and are there when they are wanted.
    if (IS_WHOLE) {
        read_norm_weights(thread_index);
    }
    msl_wait_for_inputs();
    // Where the columns of the slice begin, and those of a token of each tile of them. Rows that do not exist have the numbers
    // of one that does; nobody reads their sums.
    const uint own_column = slice * COLUMNS + column_of_eight<F>(0, t);
    threadgroup const uint* own_x[TOKEN_TILES];
    // Behind a tile's barrier nobody reads its activations any more, and behind the barrier in here nobody its factors.
    const auto turn_to_rows = [&](uint matrix) {
        part = part_of(a, groups, matrix);
        num_tokens = min(part.num_rows - first_token, TOKENS);
        if (IS_WHOLE || HAS_NORM) {
            // The squares, and where there is room the activations.
            if (num_tokens == 1) {
                bring(integral_constant<uint, 1>());
            } else if (num_tokens == 2) {
                bring(integral_constant<uint, 2>());
            } else {
                bring(integral_constant<uint, 4>());
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (HAS_NORM && thread_index < num_tokens) {
                float square = 0.0f;
#pragma clang loop unroll(full)
                for (int s = 0; s < SLICES; ++s) {
                    square += squares[s * TOKENS + thread_index];
                }
                factors[thread_index] = rsqrt(square / float(num_columns) + a.eps) / X_SCALE;
            }
        }
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
            own_x[n] = staged + min(8 * n + g, num_tokens - 1) * x_stride + own_column / 2;
        }
    };
    const auto activations_of = [&](int n, uint chunk, int eight) {
        if (IS_WHOLE) {
            return *(threadgroup const uint4*)(own_x[n] + chunk * (CHUNK / 2) + column_of_eight<F>(eight, 0) / 2);
        }
        const uint column = chunk * CHUNK + own_column + column_of_eight<F>(eight, 0);
        const uint existing = min(column, num_columns - 8);
        float values[8];
        float weights[8] = {};
        read_eight(row_of_x(min(8 * n + g, num_tokens - 1)) + existing, values);
        if (HAS_NORM) {
            read_eight(norm + existing, weights);
        }
        weigh(weights, values);
#pragma clang loop unroll(full)
        for (int v = 0; v < 8; ++v) {
            values[v] = column < num_columns ? values[v] : 0.0f;
        }
        return paired<PAIRS>(values, X_SCALE);
    };

    // Two neighbouring threads add up a result of a tile, each the sums of half of the slices, quarter by quarter: those of row
    // `own_row` and of the token that the warp has, if there are so many.
    const uint own_token = slice;
    const uint own_row = lane / 2;
    const uint own_half = lane % 2;
    uint own_matrix = ~0u;
    if (!IS_GROUPED) {
        own_matrix = todo.matrix;
        turn_to_rows(own_matrix);
    }
    uint turn = 0;
    uint stage = 0;
    uint free_stage = STAGES - 1;
    for (; todo.left > 0; advance(todo)) {
        if (IS_GROUPED && todo.matrix != own_matrix) {
            own_matrix = todo.matrix;
            turn_to_rows(own_matrix);
        }
        const int m = matrix_of_tile(todo.tile);
        const uint row = (todo.tile - a.matrices[m].first_group) * RESULTS + own_row;
        const bool has_result =
            own_token < num_tokens && own_half == 0 && own_row < RESULTS && row < a.matrices[m].num_rows;
        // What a result is added to is on its way while it is computed.
        ulong place = 0;
        float before = 0.0f;
        float bias = 0.0f;
        if (has_result) {
            place = part.out_offset + ulong(first_token + own_token) * a.out_stride + a.matrices[m].out_offset + row;
            before = !GATED && ADDS ? out[place] : 0.0f;
            bias = !GATED && HAS_BIAS ? (m == 0 ? operand0.bias : m == 1 ? operand1.bias : operand2.bias)[row] : 0.0f;
        }
        float sums[TOKEN_TILES][4] = {};
        for (uint chunk = 0; chunk < num_chunks; ++chunk) {
            if (STAGES == 3) {
                msl_wait_for_groups<1>();
            } else {
                msl_wait_for_groups<0>();
            }
            const Piece<F> pieces[2] = { ring.take(stage, 0), ring.take(stage, 1) };
            bring_weights(free_stage);
            free_stage = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            multiply_pieces<F, TOKEN_TILES>(
                pieces, [&](int n, int eight) { return activations_of(n, chunk, eight); }, sums
            );
        }

        threadgroup float* own_parts = parts + turn * PARTS;
        turn = (turn + 1) % TURNS;
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                const uint token = 8 * n + 2 * t + i % 2;
                own_parts[slice * SLICE_STRIDE + place_of_sum(token, g + i / 2 * 8)] = sums[n][i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (own_token < num_tokens) {
            threadgroup const float* from =
                own_parts + own_half * (SLICES / 2 * SLICE_STRIDE) + place_of_sum(own_token, own_row);
            float quarters[2] = {};
#pragma clang loop unroll(full)
            for (int s = 0; s < SLICES / 2; ++s) {
                quarters[s / (SLICES / 4)] += from[s * SLICE_STRIDE];
            }
            float result = quarters[0] + quarters[1];
            result += simd_shuffle_xor(result, ushort(1));
            const float factor = HAS_NORM ? factors[own_token] : 1.0f / X_SCALE;
            if (GATED) {
                // The other eight rows are those of the second matrix.
                const float up = simd_shuffle_xor(result, ushort(16));
                result = gated(result * factor, up * factor);
            } else {
                result = before + fma(result, factor, bias);
            }
            if (has_result) {
                store(out, place, result);
            }
        }
        if (TURNS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

template <typename F, typename LAST, int TOKEN_TILES>
[[kernel]] void few_rows(
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
    uint3 grid [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint slice [[simdgroup_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const uint first_token = index.y * TOKEN_TILES * 8;
    const Operand operand0 = { weights0, weights0, bias0 };
    const Operand operand1 = { weights1, weights1, bias1 };
    const Operand operand2 = { weights2, weights2, bias2 };
    const Tiles tiles = tiles_of<!is_same_v<F, LAST>>(a, groups, index, grid.x, first_token, lane);
    if (is_same_v<F, LAST> || tiles.tile < a.matrices[2].first_group) {
        few<F, TOKEN_TILES, false>(
            a, operand0, operand1, operand2, x, norm, out, groups, rows, memory, tiles, first_token, lane, slice
        );
    } else {
        few<LAST, TOKEN_TILES, false>(
            a, operand0, operand1, operand2, x, norm, out, groups, rows, memory, tiles, first_token, lane, slice
        );
    }
}

// out = silu(gate · x) · (up · x), with the norm of x before it.
template <typename F, int TOKEN_TILES>
[[kernel]] void few_rows_swiglu(
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
    uint3 grid [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint slice [[simdgroup_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const uint first_token = index.y * TOKEN_TILES * 8;
    const Operand operand = { gate_weights, up_weights, x };
    const Tiles tiles = tiles_of<false>(a, groups, index, grid.x, first_token, lane);
    few<F, TOKEN_TILES, true>(
        a, operand, operand, operand, x, norm, out, groups, rows, memory, tiles, first_token, lane, slice
    );
}

struct OrderedArgs {
    uint num_units;  // of 16 columns
    uint stride;     // of rounded rows, which are filled up with zeros
    uint x_stride;
    float eps;
};

// Rounds a row of activations as the products above do, for `several_rows.cu`: each thread has the same columns.
template <Pairs PAIRS>
[[kernel]] void round_in_order(
    constant OrderedArgs& a [[buffer(0)]],
    device const float* x [[buffer(1)]],
    device const float* norm [[buffer(2)]],
    device uint4* rounded [[buffer(3)]],  // [row, stride] halves
    device float* factors [[buffer(4)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    threadgroup float squares[SLICES];
    const uint num_columns = 16 * a.num_units;
    device const float* own = x + ulong(index.x) * a.x_stride;
    msl_wait_for_inputs();
    float own_squares = 0.0f;
    for (uint place = thread_index; 8 * place < a.stride; place += NUM_THREADS) {
        const bool exists = 8 * place < num_columns;
        float values[8];
#pragma clang loop unroll(full)
        for (int four = 0; four < 2; ++four) {
            const uint column = min(8 * place, num_columns - 8) + 4 * four;
            const float4 read = *(device const float4*)(own + column);
            const float4 weights = HAS_NORM ? *(device const float4*)(norm + column) : float4(1.0f);
#pragma clang loop unroll(full)
            for (int v = 0; v < 4; ++v) {
                const float value = exists ? read[v] : 0.0f;
                own_squares = fma(value, value, own_squares);
                values[4 * four + v] = value * weights[v];
            }
        }
        rounded[ulong(index.x) * (a.stride / 8) + place] = paired<PAIRS>(values, X_SCALE);
    }
    if (HAS_NORM) {
        const float sum = simd_sum(own_squares);
        if (thread_index % LANES == 0) {
            squares[thread_index / LANES] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index == 0) {
            float square = 0.0f;
#pragma clang loop unroll(full)
            for (int s = 0; s < SLICES; ++s) {
                square += squares[s];
            }
            factors[index.x] = rsqrt(square / float(num_columns) + a.eps) / X_SCALE;
        }
    }
}

INSTANCE(round_in_order_neighbours, round_in_order, Pairs::NEIGHBOURS)
INSTANCE(round_in_order_four_apart, round_in_order, Pairs::FOUR_APART)
INSTANCE(round_in_order_two_apart, round_in_order, Pairs::TWO_APART)

#define FEW(F, TOKEN_TILES)                                             \
    INSTANCE(few_rows_##F##_##TOKEN_TILES, few_rows, F, F, TOKEN_TILES) \
    INSTANCE(few_rows_swiglu_##F##_##TOKEN_TILES, few_rows_swiglu, F, TOKEN_TILES)
#define FORMAT(F) FEW(F, 1) FEW(F, 2)
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

#define MIXED(F, LAST)                                        \
    INSTANCE(few_rows_##F##_##LAST##_1, few_rows, F, LAST, 1) \
    INSTANCE(few_rows_##F##_##LAST##_2, few_rows, F, LAST, 2)
MIXED(Q4_K, Q6_K)
MIXED(Q5_K, Q6_K)
