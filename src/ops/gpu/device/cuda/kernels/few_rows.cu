// Matmuls of weights with up to 64 rows of activations on tensor cores, with the norm before and the residual after.
//
// The instruction multiplies 16 rows of weights by 8 rows of activations over 16 columns. Weights are stored in the
// layout of its lanes (`fragments.h`). They pass through a ring in shared memory in which each thread has slots of its
// own. So a thread takes few registers, and loads are issued long before their use; the next kernel's weights are
// loaded while this kernel ends.
//
// The slices of a row and the order of their additions depend on the matrix only, so a row of activations has the same
// bits in every batch.

#define FOR_NVIDIA
#include "slices.h"

// One thread block per SM: for more, the compiler would save registers at the cost of time.
#define MAX_THREADS 512
#define MIN_THREADGROUPS 1

constant bool IS_WHOLE [[function_constant(5)]];  // all activations are in shared memory at once
constant ushort STAGES [[function_constant(6)]];  // chunks in the ring, in use or loading: two or three
// Groups of eight columns of a row of activations that a thread loads at once, up to four; longer rows take several
// rounds.
constant ushort OWN_EIGHTS [[function_constant(7)]];

constant constexpr uint NUM_THREADS = MAX_THREADS;

// One of up to three matrices of a launch.
struct Operand {
    device const uchar* weights;
    device const uchar* up_weights;
    device const float* bias;
};

// The tiles that a thread block still has to compute: every `step`-th one of a matrix of the stack; or, with groups, a
// run of the tiles of all groups in sequence.
struct Tiles {
    uint matrix;  // of the stack, or the group
    uint tile;    // of the matrix
    uint left;    // to the end of the matrix or of the run, including this one
    uint step;
};

// Skips the tiles of groups that have no rows from `first_token` on.
inline void leave_out_short_groups(device const RowGroup* groups, uint num_tiles, uint first_token, thread Tiles& tiles) {
    while (tiles.left > 0 && groups[tiles.matrix].num_rows <= first_token) {
        tiles.left -= min(tiles.left, num_tiles - tiles.tile);
        tiles.tile = 0;
        tiles.matrix += 1;
    }
}

// The tiles of thread block `index` of a launch. If the last matrix has another format, some thread blocks have its
// tiles, and the rest have those of the others. Runs are equally long; missing groups, at the end of the list, have no
// tiles.
template <bool IS_MIXED>
inline Tiles tiles_of(
    constant MatmulArgs& a,
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

// The index of a slice's sum for a token and a row of a tile, without bank conflicts: sums that a warp writes together
// lie in different banks, and so do those that it reads for a token from slices whose numbers differ by eight. Slices
// are padded by two words.
inline uint index_of_sum(uint token, uint row) {
    return (token / 8 * 8 + token % 2 * 4 + token / 2 % 4) * 16 + (row ^ (token & 4) * 2);
}

// A thread block has 16 rows of weights (half as many results if GATED) at a time, one of its tiles, and up to
// TOKEN_TILES · 8 rows of activations, from `first_token` of the matrix or the group on.
//
// Where there is space (IS_WHOLE), all activations stay in shared memory; otherwise each warp loads its operands.
template <typename F, int TOKEN_TILES, bool GATED>
inline void few(
    constant MatmulArgs& a,
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
    constexpr uint COLUMNS = Fragment<F>::COLUMNS;
    constexpr uint CHUNK = COLUMNS * SLICES;
    constexpr Pairs PAIRS = Decoder<F>::PAIRS;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint thread_index = slice * LANES + lane;
    const uint num_columns = 16 * a.num_units;
    const uint num_k_tiles = (num_columns + COLUMNS - 1) / COLUMNS;
    const uint num_chunks = (num_k_tiles + SLICES - 1) / SLICES;
    // A gated matmul has one list of tiles for both matrices.
    const auto matrix_of_tile = [&](uint tile) {
        return GATED || tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    };

    // The source of the slice's next weights, and their slots in the ring.
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
        // Missing rows repeat the weights of existing ones; their sums are not used.
        const uint num_eights = (a.matrices[m].num_rows + 7) / 8;
        const uint first_eight = (tile - a.matrices[m].first_group) * (RESULTS / 8);
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            const uint eight = min(GATED ? first_eight : first_eight + h, num_eights - 1);
            device const uchar* weights = GATED && h == 1 ? operand.up_weights : operand.weights;
            sources[h] = Source<F>(weights, planes, (stacked * num_eights + eight) * num_k_tiles, lane);
        }
    };
    const auto bring_weights = [&](uint stage) {
        if (next.left > 0) {
            if (next_chunk == 0) {
                turn_to_tile(IS_GROUPED ? groups[next.matrix].matrix : next.matrix, next.tile);
            }
            // Missing columns repeat the weights of existing ones; their activations are zeros.
            const uint k_tile = min(next_chunk * SLICES + slice, num_k_tiles - 1);
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                ring.bring(stage, h, sources[h], k_tile);
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

    // After the ring: sums of slices, squares, factors, activations. With few rows, sums alternate between two buffers,
    // which saves a barrier per tile; more rows need the space.
    constexpr uint SLICE_STRIDE = TOKENS * 16 + 2;
    constexpr uint SUMS_LEN = SLICES * SLICE_STRIDE;
    constexpr uint TURNS = TOKEN_TILES == 1 ? 2 : 1;
    threadgroup float* sums_of_slices = (threadgroup float*)(memory + STAGES * ring.STAGE_BYTES);
    threadgroup float* squares = sums_of_slices + TURNS * SUMS_LEN;
    threadgroup float* factors = squares + SLICES * TOKENS;
    threadgroup uint* staged = (threadgroup uint*)(factors + TOKENS);
    // Stride of rows in words: rows that are read together lie in different banks.
    const uint x_stride = num_chunks * (CHUNK / 2) + (COLUMNS == 64 ? 4 : 16);
    // The tile's matrix or group, and the rows of activations that it is multiplied by.
    Problem problem;
    uint num_tokens;
    const auto row_of_x = [&](uint token) {
        const uint row = IS_GROUPED ? row_at(rows, a.gathers, problem.first_slot + first_token + token) : first_token + token;
        return x + problem.x_offset + ulong(row) * a.x_stride;
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
    // The norm's weights of the eight columns that the thread loads next.
    float norm_weights[4][8] = {};
    const auto read_norm_weights = [&](uint first_eight) {
#pragma clang loop unroll(full)
        for (uint p = 0; p < 4; ++p) {
            if (HAS_NORM && p < OWN_EIGHTS) {
                read_eight(norm + min(8 * (first_eight + p * NUM_THREADS), num_columns - 8), norm_weights[p]);
            }
        }
    };
    // Each thread has the same columns of every row of activations: the order in which squares are added is the same in
    // every batch. Up to four groups of eight columns are in flight at a time, divided among the rows.
    const auto bring = [&](auto rows_together) {
        constexpr uint ROWS = decltype(rows_together)::value;
        constexpr uint MAX_OWN_EIGHTS = 4 / ROWS;
        const uint num_own_eights = OWN_EIGHTS < MAX_OWN_EIGHTS ? uint(OWN_EIGHTS) : MAX_OWN_EIGHTS;
#pragma clang loop unroll(disable)
        for (uint first = 0; first < num_tokens; first += ROWS) {
            float own_squares[ROWS] = {};
#pragma clang loop unroll(disable)
            for (uint first_eight = thread_index; 8 * first_eight < num_chunks * CHUNK; first_eight += num_own_eights * NUM_THREADS) {
                float values[MAX_OWN_EIGHTS][ROWS][8];
#pragma clang loop unroll(full)
                for (uint p = 0; p < MAX_OWN_EIGHTS; ++p) {
                    const uint column = min(8 * (first_eight + p * NUM_THREADS), num_columns - 8);
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (p < num_own_eights && first + i < num_tokens) {
                            read_eight(row_of_x(first + i) + column, values[p][i]);
                        }
                    }
                }
                if (IS_WHOLE && 8 * num_own_eights * NUM_THREADS < num_chunks * CHUNK) {
                    read_norm_weights(first_eight);
                }
#pragma clang loop unroll(full)
                for (uint p = 0; p < MAX_OWN_EIGHTS; ++p) {
                    const uint own_eight = first_eight + p * NUM_THREADS;
                    const bool exists = 8 * own_eight < num_columns;
#pragma clang loop unroll(full)
                    for (uint i = 0; i < ROWS; ++i) {
                        if (p < num_own_eights && first + i < num_tokens) {
#pragma clang loop unroll(full)
                            for (int v = 0; v < 8; ++v) {
                                values[p][i][v] = exists ? values[p][i][v] : 0.0f;
                                own_squares[i] = fma(values[p][i][v], values[p][i][v], own_squares[i]);
                            }
                            if (IS_WHOLE && 8 * own_eight < num_chunks * CHUNK) {
                                weigh(norm_weights[p], values[p][i]);
                                *(threadgroup uint4*)(staged + (first + i) * x_stride + 4 * own_eight) =
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
    // The norm's weights are loaded without a wait; they arrive before their use.
    if (IS_WHOLE) {
        read_norm_weights(thread_index);
    }
    msl_wait_for_inputs();
    // The first columns of the slice, and those of a token of each of its tiles. Missing rows repeat an existing one;
    // their sums are not used.
    const uint own_column = slice * COLUMNS + column_of_eight<F>(0, t);
    threadgroup const uint* own_x[TOKEN_TILES];
    // After a tile's barrier no thread reads its activations, and after the barrier in here no thread reads its
    // factors.
    const auto turn_to_rows = [&](uint matrix) {
        problem = problem_of(a, groups, matrix);
        num_tokens = min(problem.num_rows - first_token, TOKENS);
        if (IS_WHOLE || HAS_NORM) {
            // The squares, and with IS_WHOLE the activations.
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

    // Two neighbouring threads reduce a result of a tile, each the sums of half of the slices, quarter by quarter.
    // Their result is that of row `own_row` and of the warp's token, if it exists.
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
        // Loads the previous value of the result while the matmul runs.
        ulong out_index = 0;
        float before = 0.0f;
        float bias = 0.0f;
        if (has_result) {
            out_index = problem.out_offset + ulong(first_token + own_token) * a.out_stride + a.matrices[m].out_offset + row;
            before = !GATED && ADDS ? out[out_index] : 0.0f;
            bias = !GATED && HAS_BIAS ? (m == 0 ? operand0.bias : m == 1 ? operand1.bias : operand2.bias)[row] : 0.0f;
        }
        float sums[TOKEN_TILES][4] = {};
        for (uint chunk = 0; chunk < num_chunks; ++chunk) {
            if (STAGES == 3) {
                msl_wait_for_groups<1>();
            } else {
                msl_wait_for_groups<0>();
            }
            const Fragment<F> fragments[2] = { ring.take(stage, 0), ring.take(stage, 1) };
            bring_weights(free_stage);
            free_stage = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            multiply_fragments<F, TOKEN_TILES>(
                fragments, [&](int n, int eight) { return activations_of(n, chunk, eight); }, sums
            );
        }

        threadgroup float* own_sums = sums_of_slices + turn * SUMS_LEN;
        turn = (turn + 1) % TURNS;
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                const uint token = 8 * n + 2 * t + i % 2;
                own_sums[slice * SLICE_STRIDE + index_of_sum(token, g + i / 2 * 8)] = sums[n][i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (own_token < num_tokens) {
            threadgroup const float* from =
                own_sums + own_half * (SLICES / 2 * SLICE_STRIDE) + index_of_sum(own_token, own_row);
            float quarters[2] = {};
#pragma clang loop unroll(full)
            for (int s = 0; s < SLICES / 2; ++s) {
                quarters[s / (SLICES / 4)] += from[s * SLICE_STRIDE];
            }
            float result = quarters[0] + quarters[1];
            result += simd_shuffle_xor(result, ushort(1));
            const float factor = HAS_NORM ? factors[own_token] : 1.0f / X_SCALE;
            if (GATED) {
                // The other eight rows belong to the second matrix.
                const float up = simd_shuffle_xor(result, ushort(16));
                result = gated(result * factor, up * factor);
            } else {
                result = before + fma(result, factor, bias);
            }
            if (has_result) {
                store(out, out_index, result);
            }
        }
        if (TURNS == 1) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

template <typename F, typename LAST, int TOKEN_TILES>
[[kernel]] void few_rows(
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

// out = silu(gate · x) · (up · x), with the norm of x first.
template <typename F, int TOKEN_TILES>
[[kernel]] void few_rows_swiglu(
    constant MatmulArgs& a [[buffer(0)]],
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
    uint stride;     // of packed rows, which are padded with zeros
    uint x_stride;
    float eps;
};

// Packs a row of activations for `several_rows.cu`, rounded as in the matmuls above: each thread has the same columns.
template <Pairs PAIRS>
[[kernel]] void pack_in_order(
    constant OrderedArgs& a [[buffer(0)]],
    device const float* x [[buffer(1)]],
    device const float* norm [[buffer(2)]],
    device uint4* packed [[buffer(3)]],  // [row, stride] halves
    device float* factors [[buffer(4)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    threadgroup float squares[SLICES];
    const uint num_columns = 16 * a.num_units;
    device const float* own = x + ulong(index.x) * a.x_stride;
    msl_wait_for_inputs();
    float own_squares = 0.0f;
    for (uint own_eight = thread_index; 8 * own_eight < a.stride; own_eight += NUM_THREADS) {
        const bool exists = 8 * own_eight < num_columns;
        float values[8];
#pragma clang loop unroll(full)
        for (int four = 0; four < 2; ++four) {
            const uint column = min(8 * own_eight, num_columns - 8) + 4 * four;
            const float4 read = *(device const float4*)(own + column);
            const float4 weights = HAS_NORM ? *(device const float4*)(norm + column) : float4(1.0f);
#pragma clang loop unroll(full)
            for (int v = 0; v < 4; ++v) {
                const float value = exists ? read[v] : 0.0f;
                own_squares = fma(value, value, own_squares);
                values[4 * four + v] = value * weights[v];
            }
        }
        packed[ulong(index.x) * (a.stride / 8) + own_eight] = paired<PAIRS>(values, X_SCALE);
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

INSTANCE(pack_in_order_neighbours, pack_in_order, Pairs::NEIGHBOURS)
INSTANCE(pack_in_order_four_apart, pack_in_order, Pairs::FOUR_APART)
INSTANCE(pack_in_order_two_apart, pack_in_order, Pairs::TWO_APART)

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
