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
#include "products.h"
#include "rounded.h"

// The compiler is told that one threadgroup of a core is enough: it would save registers for more, and pay with time.
#define MAX_THREADS 512
#define MIN_THREADGROUPS 1

constant bool IS_WHOLE [[function_constant(5)]];  // all activations are in threadgroup memory at once
constant ushort STAGES [[function_constant(6)]];  // chunks that are in the ring or on their way to it: two or three

// Slices of a row, each a warp's: a piece of every sixteen, which are a chunk.
constant constexpr int SLICES = 16;
constant constexpr uint NUM_THREADS = MAX_THREADS;

// Activations are rounded as they are for products of more rows where these have no norm.
constant constexpr float X_SCALE = 1.0f / FIXED_FACTOR;

// One of up to three matrices, as a launch has them.
struct Operand {
    device const uchar* weights;
    device const uchar* up_weights;
    device const float* bias;
};

// sums += the products of pieces, of the first and the second eight rows of a tile, with the activations that
// `activations_of(n, eight)` gives, of token tile n and eight columns.
template <typename F, int TOKEN_TILES, typename ACTIVATIONS>
inline void multiply_pieces(
    thread const Piece<F> (&pieces)[2],
    uint place,
    uint t,
    ACTIVATIONS activations_of,
    thread float (&sums)[TOKEN_TILES][4]
) {
    const ScalesOf<F> scales[2] = { ScalesOf<F>(pieces[0], place), ScalesOf<F>(pieces[1], place) };
#pragma clang loop unroll(full)
    for (int eight = 0; eight < num_eights<F>(); ++eight) {
        uint low[4];
        uint high[4];
        decode_eight<F>(pieces[0], scales[0], eight, t, low);
        decode_eight<F>(pieces[1], scales[1], eight, t, high);
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 x = activations_of(n, eight);
            msl_multiply_tile(sums[n], low[0], high[0], low[1], high[1], x.x, x.y);
            msl_multiply_tile(sums[n], low[2], high[2], low[3], high[3], x.z, x.w);
        }
    }
}

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
    const Ring<F, NUM_THREADS> ring(memory, 2 * STAGES, thread_index);
    device const uchar* own_weights[2];
    Planes planes;
    uint first_places[2];
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
    uint next_stage = 0;
    const auto turn_to_tile = [&](uint stacked, uint tile) {
        const int m = matrix_of_tile(tile);
        const Operand operand = m == 0 ? operand0 : m == 1 ? operand1 : operand2;
        own_weights[0] = operand.weights;
        own_weights[1] = GATED ? operand.up_weights : operand.weights;
        planes = in_registers(a.matrices[m].planes);
        // Rows that do not exist have the weights of some that do; nobody reads their sums.
        const uint num_eights = (a.matrices[m].num_rows + 7) / 8;
        const uint first_eight = (tile - a.matrices[m].first_group) * (RESULTS / 8);
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            const uint eight = min(GATED ? first_eight : first_eight + h, num_eights - 1);
            first_places[h] = (stacked * num_eights + eight) * num_pieces;
        }
    };
    const auto bring_weights = [&]() {
        if (next.left > 0) {
            if (next_chunk == 0) {
                turn_to_tile(IS_GROUPED ? groups[next.matrix].matrix : next.matrix, next.tile);
            }
            // Columns that do not exist have the weights of some that do; their activations are zeros.
            const uint piece = min(next_chunk * SLICES + slice, num_pieces - 1);
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                ring.bring(2 * next_stage + h, own_weights[h], planes, first_places[h] + piece, lane);
            }
            next_chunk += 1;
            if (next_chunk == num_chunks) {
                next_chunk = 0;
                advance(next);
            }
            next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
        }
        msl_end_group();
    };
#pragma clang loop unroll(full)
    for (uint stage = 0; stage + 1 < STAGES; ++stage) {
        bring_weights();
    }

    // Behind the ring: sums of slices, squares, factors, activations. Sums of few rows take turns between two places, so that
    // there is one barrier for a tile; more rows need the room.
    constexpr uint PARTS = SLICES * TOKEN_TILES * 4 * LANES;
    constexpr uint TURNS = TOKEN_TILES == 1 ? 2 : 1;
    threadgroup float* parts = (threadgroup float*)(memory + ring.num_bytes());
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
    const auto weigh = [&](uint column, thread float (&values)[8]) {
        if (HAS_NORM) {
            float weights[8];
            read_eight(norm + column, weights);
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                values[v] *= weights[v];
            }
        }
    };
    // Each thread has the same columns of every row of activations: the order in which squares are added is that of all
    // batches. Four times eight columns are on their way at a time, of as many rows as there are.
    const auto bring = [&](auto rows_together) {
        constexpr uint ROWS = decltype(rows_together)::value;
        constexpr uint PLACES = 4 / ROWS;
#pragma clang loop unroll(disable)
        for (uint first = 0; first < num_tokens; first += ROWS) {
            float own_squares[ROWS] = {};
#pragma clang loop unroll(disable)
            for (uint first_place = thread_index; 8 * first_place < num_chunks * CHUNK; first_place += PLACES * NUM_THREADS) {
                float values[PLACES][ROWS][8];
#pragma clang loop unroll(full)
                for (uint p = 0; p < PLACES; ++p) {
                    const uint column = min(8 * (first_place + p * NUM_THREADS), num_columns - 8);
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (first + i < num_tokens) {
                            read_eight(row_of_x(first + i) + column, values[p][i]);
                        }
                    }
                }
#pragma clang loop unroll(full)
                for (uint p = 0; p < PLACES; ++p) {
                    const uint place = first_place + p * NUM_THREADS;
                    const bool exists = 8 * place < num_columns;
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (first + i < num_tokens) {
#pragma clang loop unroll(full)
                            for (int v = 0; v < 8; ++v) {
                                values[p][i][v] = exists ? values[p][i][v] : 0.0f;
                                own_squares[i] = fma(values[p][i][v], values[p][i][v], own_squares[i]);
                            }
                            if (IS_WHOLE && 8 * place < num_chunks * CHUNK) {
                                weigh(min(8 * place, num_columns - 8), values[p][i]);
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
    if (HAS_NORM && 32 * thread_index < num_columns) {
        msl_fetch(norm + 32 * thread_index);
    }
    msl_wait_for_inputs();
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
    };
    // Rows that do not exist have the numbers of one that does; nobody reads their sums.
    const auto activations_of = [&](int n, uint chunk, int eight) {
        const uint token = min(8 * n + g, num_tokens - 1);
        const uint column = (chunk * SLICES + slice) * COLUMNS + column_of_eight<F>(eight, t);
        if (IS_WHOLE) {
            return *(threadgroup const uint4*)(staged + token * x_stride + column / 2);
        }
        const uint existing = min(column, num_columns - 8);
        float values[8];
        read_eight(row_of_x(token) + existing, values);
        weigh(existing, values);
#pragma clang loop unroll(full)
        for (int v = 0; v < 8; ++v) {
            values[v] = column < num_columns ? values[v] : 0.0f;
        }
        return paired<PAIRS>(values, X_SCALE);
    };

    // Of a tile's results a thread adds up those of one token and of rows g and g + 8; the last threads have none.
    const uint own_odd = thread_index / LANES % 2;
    const uint own_n = thread_index / (2 * LANES);
    const uint own_token = 8 * own_n + 2 * t + own_odd;
    uint own_matrix = ~0u;
    if (!IS_GROUPED) {
        own_matrix = todo.matrix;
        turn_to_rows(own_matrix);
    }
    uint turn = 0;
    uint stage = 0;
    for (; todo.left > 0; advance(todo)) {
        if (IS_GROUPED && todo.matrix != own_matrix) {
            own_matrix = todo.matrix;
            turn_to_rows(own_matrix);
        }
        const uint tile = todo.tile;
        const int m = matrix_of_tile(tile);
        const Operand operand = m == 0 ? operand0 : m == 1 ? operand1 : operand2;
        const uint num_rows = a.matrices[m].num_rows;
        const uint first_row = (tile - a.matrices[m].first_group) * RESULTS;
        const ulong own_results =
            part.out_offset + ulong(first_token + own_token) * a.out_stride + a.matrices[m].out_offset;
        // What results are added to is on its way while they are computed.
        float before[2] = {};
        float bias[2] = {};
        if (!GATED && (ADDS || HAS_BIAS) && own_token < num_tokens) {
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                const uint row = first_row + g + 8 * h;
                if (row < num_rows) {
                    before[h] = ADDS ? out[own_results + row] : 0.0f;
                    bias[h] = HAS_BIAS ? operand.bias[row] : 0.0f;
                }
            }
        }
        float sums[TOKEN_TILES][4] = {};
        for (uint chunk = 0; chunk < num_chunks; ++chunk) {
            if (STAGES == 3) {
                msl_wait_for_groups<1>();
            } else {
                msl_wait_for_groups<0>();
            }
            const Piece<F> pieces[2] = { ring.take(2 * stage), ring.take(2 * stage + 1) };
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            bring_weights();
            multiply_pieces<F, TOKEN_TILES>(
                pieces, min(chunk * SLICES + slice, num_pieces - 1), t,
                [&](int n, int eight) { return activations_of(n, chunk, eight); },
                sums
            );
        }

        threadgroup float* own_parts = parts + turn * PARTS;
        turn = (turn + 1) % TURNS;
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                own_parts[((slice * TOKEN_TILES + n) * 4 + i) * LANES + lane] = sums[n][i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (own_token < num_tokens) {
            float results[2] = {};
#pragma clang loop unroll(full)
            for (int s = 0; s < SLICES; ++s) {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    results[h] += own_parts[((s * TOKEN_TILES + own_n) * 4 + 2 * h + own_odd) * LANES + lane];
                }
            }
            const float factor = HAS_NORM ? factors[own_token] : 1.0f / X_SCALE;
            const uint row = first_row + g;
            if (GATED) {
                if (row < num_rows) {
                    store(out, own_results + row, gated(results[0] * factor, results[1] * factor));
                }
            } else {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    if (row + 8 * h < num_rows) {
                        store(out, own_results + row + 8 * h, before[h] + fma(results[h], factor, bias[h]));
                    }
                }
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
FORMAT(F16)
FORMAT(BF16)

#define MIXED(F, LAST)                                        \
    INSTANCE(few_rows_##F##_##LAST##_1, few_rows, F, LAST, 1) \
    INSTANCE(few_rows_##F##_##LAST##_2, few_rows, F, LAST, 2)
MIXED(Q4_K, Q6_K)
MIXED(Q5_K, Q6_K)
