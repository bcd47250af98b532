// Products of weights with up to 64 rows of activations on tensor cores, with the norm in front and the residual behind.
//
// The instruction multiplies 16 rows of weights with 8 rows of activations over 16 columns. Which columns those are is
// free if both operands agree, so a lane brings whole units: of 64 columns, lane t of four has unit t of its rows, as they
// lie in memory, and no weight goes through threadgroup memory.
//
// The slices of a row and the order in which they are added depend on the matrix only, so a row of activations has the
// same bits in every batch.

#define FOR_NVIDIA
#include "cursors.h"
#include "products.h"

constant bool IS_WHOLE [[function_constant(5)]];  // all activations are in threadgroup memory at once
constant bool HAS_TAIL [[function_constant(6)]];  // the last chunk is not a whole one

// Slices of a row, each a warp's: 64 columns of every 64 · SLICES, which are a chunk.
constant constexpr int SLICES = 8;
constant constexpr uint CHUNK = 64 * SLICES;
constant constexpr uint NUM_THREADS = SLICES * LANES;

// Activations are divided by 16, so that what is below a million does not become infinite; larger ones are cut off. Those
// that are below a thousandth without the norm's factor have fewer bits than a half has otherwise.
constant constexpr float X_SCALE = 1.0f / 16.0f;

// One of up to three matrices, as a launch has them.
struct Operand {
    device const uchar* weights;
    device const uchar* up_weights;
    device const float* bias;
};

// A threadgroup has ROW_TILES · 16 rows of weights (half as many results if GATED) at a time, those of tiles `first_tile`,
// `first_tile` + `step` and so on before `end_tile`, and up to TOKEN_TILES · 8 rows of activations.
//
// Weights of the next tile are under way while the last one's are multiplied. Where there is room (IS_WHOLE), activations
// are in threadgroup memory from the begin to the end; else each warp reads what it multiplies.
template <typename F, int ROW_TILES, int TOKEN_TILES, bool GATED>
inline void few(
    constant ProductArgs& a,
    Operand operand0,
    Operand operand1,
    Operand operand2,
    device const float* x,
    device const float* norm,
    device float* out,
    device const uint* rows,
    threadgroup char* memory,
    uint first_tile,
    uint end_tile,
    uint step,
    uint first_token,
    Part part,
    uint lane,
    uint slice
) {
    constexpr uint RESULTS = GATED ? 8 : 16;
    constexpr uint TOKENS = TOKEN_TILES * 8;
    constexpr Pairs PAIRS = Decoder<F>::PAIRS;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint thread_index = slice * LANES + lane;
    const uint last_unit = a.num_units - 1;
    const uint num_columns = 16 * a.num_units;
    const uint num_chunks = (num_columns + CHUNK - 1) / CHUNK;
    const uint num_tokens = min(part.num_rows - first_token, TOKENS);
    const auto matrix_of_tile = [&](uint tile) {
        return tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    };

    // Weights on their way: chunks of the slice from `next_chunk` on, of the tile that the cursors are in.
    constexpr int DEPTH = TOKEN_TILES == 1 ? 4 : 1;
    const uint first_unit = 4 * slice + t;
    Raw<F> raw[DEPTH][ROW_TILES][2];
    Cursor<F> cursors[ROW_TILES][2];
    device const uchar* own_weights[2];
    Planes planes;
    uint own_rows[ROW_TILES][2];
    uint next_chunk = 0;
    const auto turn_to_tile = [&](uint tile) {
        const int m = matrix_of_tile(tile);
        const Operand operand = m == 0 ? operand0 : m == 1 ? operand1 : operand2;
        own_weights[0] = operand.weights;
        own_weights[1] = GATED ? operand.up_weights : operand.weights;
        planes = in_registers(a.matrices[m].planes);
        const uint num_rows = a.matrices[m].num_rows;
        const uint first_row = (tile - a.matrices[m].first_group) * ROW_TILES * RESULTS;
#pragma clang loop unroll(full)
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                const uint row = min(row_of_tile<GATED>(first_row + r * RESULTS, g + 8 * h), num_rows - 1);
                own_rows[r][h] = (part.matrix * num_rows + row) * a.num_units;
                cursors[r][h].begin(own_weights[h], planes, own_rows[r][h] + first_unit);
            }
        }
        next_chunk = 0;
    };
    const auto fetch_weights = [&](int d) {
        const uint chunk = next_chunk + d;
        if (chunk >= num_chunks) {
            return;
        }
        // Where many sums are in registers, there are none for addresses.
        const bool is_by_number = DEPTH == 1 || (HAS_TAIL && chunk + 1 == num_chunks);
#pragma clang loop unroll(full)
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                // Columns that do not exist have the weights of some that do; their activations are zeros.
                raw[d][r][h] = is_by_number
                    ? load_unit<F>(own_weights[h], planes, own_rows[r][h], min(first_unit + chunk * UNITS, last_unit))
                    : cursors[r][h].load(d);
            }
        }
    };
    turn_to_tile(first_tile);
#pragma clang loop unroll(full)
    for (int d = 0; d < DEPTH; ++d) {
        fetch_weights(d);
    }

    // Threadgroup memory: sums of slices twice, squares, factors, activations.
    constexpr uint PARTS = SLICES * TOKEN_TILES * 4 * LANES;
    threadgroup float* parts = (threadgroup float*)memory;
    threadgroup float* squares = parts + 2 * PARTS;
    threadgroup float* factors = squares + SLICES * TOKENS;
    threadgroup uint* staged = (threadgroup uint*)(factors + TOKENS);
    // Words from one row to the next: eight rows of four words lie in different banks.
    const uint x_stride = num_chunks * (CHUNK / 2) + 4;
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
    const auto in_halves = [&](uint column, thread float (&values)[8]) {
        if (HAS_NORM) {
            float weights[8];
            read_eight(norm + column, weights);
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                values[v] *= weights[v];
            }
        }
        return paired<PAIRS>(values, X_SCALE);
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
                                *(threadgroup uint4*)(staged + (first + i) * x_stride + 4 * place) =
                                    in_halves(min(8 * place, num_columns - 8), values[p][i]);
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

    // Of a tile's results a thread adds up those of one token and of rows g and g + 8; the last threads have none.
    const uint own_odd = thread_index / LANES % 2;
    const uint own_n = thread_index / (2 * LANES);
    const uint own_token = 8 * own_n + 2 * t + own_odd;
    const ulong own_out = part.out_offset + ulong(first_token + own_token) * a.out_stride;
    uint parity = 0;
    for (uint tile = first_tile; tile < end_tile; tile += step) {
        const int m = matrix_of_tile(tile);
        const Operand operand = m == 0 ? operand0 : m == 1 ? operand1 : operand2;
        const uint num_rows = a.matrices[m].num_rows;
        const uint first_row = (tile - a.matrices[m].first_group) * ROW_TILES * RESULTS;
        const ulong own_results = own_out + a.matrices[m].out_offset;
        // What results are added to is on its way while they are computed.
        float before[ROW_TILES][2] = {};
        float bias[ROW_TILES][2] = {};
        if (!GATED && (ADDS || HAS_BIAS) && own_token < num_tokens) {
#pragma clang loop unroll(full)
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    const uint row = first_row + r * RESULTS + g + 8 * h;
                    if (row < num_rows) {
                        before[r][h] = ADDS ? out[own_results + row] : 0.0f;
                        bias[r][h] = HAS_BIAS ? operand.bias[row] : 0.0f;
                    }
                }
            }
        }
        float sums[ROW_TILES][TOKEN_TILES][4] = {};
        const auto multiply_chunk = [&](uint chunk, int d) {
            uint words[ROW_TILES][2][8];
#pragma clang loop unroll(full)
            for (int r = 0; r < ROW_TILES; ++r) {
                Decoder<F>::words(raw[d][r][0], words[r][0]);
                Decoder<F>::words(raw[d][r][1], words[r][1]);
            }
            fetch_weights(d);
#pragma clang loop unroll(full)
            for (int n = 0; n < TOKEN_TILES; ++n) {
                // Rows that do not exist have the numbers of one that does; nobody reads their sums.
                const uint token = min(8 * n + g, num_tokens - 1);
                uint4 activations[2];
                if (IS_WHOLE) {
                    threadgroup const uint4* own = (threadgroup const uint4*)(
                        staged + token * x_stride + chunk * (CHUNK / 2) + 32 * slice + 8 * t
                    );
                    activations[0] = own[0];
                    activations[1] = own[1];
                } else {
                    const uint unit = 4 * (slice + chunk * SLICES) + t;
                    const uint column = 16 * min(unit, last_unit);
                    device const float* own = row_of_x(token) + column;
#pragma clang loop unroll(full)
                    for (int eight = 0; eight < 2; ++eight) {
                        float values[8];
                        read_eight(own + 8 * eight, values);
#pragma clang loop unroll(full)
                        for (int v = 0; v < 8; ++v) {
                            values[v] = unit <= last_unit ? values[v] : 0.0f;
                        }
                        activations[eight] = in_halves(column + 8 * eight, values);
                    }
                }
#pragma clang loop unroll(full)
                for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                    for (int w = 0; w < 8; w += 2) {
                        msl_multiply_tile(
                            sums[r][n], words[r][0][w], words[r][1][w], words[r][0][w + 1], words[r][1][w + 1],
                            activations[w / 4][w % 4], activations[w / 4][w % 4 + 1]
                        );
                    }
                }
            }
        };
        for (uint chunk = 0; chunk < num_chunks; chunk += DEPTH) {
            // Where a chunk is multiplied, the one that takes its registers is fetched: of this tile, or of the next.
            if (chunk + DEPTH < num_chunks) {
                next_chunk = chunk + DEPTH;
#pragma clang loop unroll(full)
                for (int r = 0; r < ROW_TILES; ++r) {
                    cursors[r][0].advance(DEPTH);
                    cursors[r][1].advance(DEPTH);
                }
            } else if (tile + step < end_tile) {
                turn_to_tile(tile + step);
            } else {
                next_chunk = num_chunks;
            }
#pragma clang loop unroll(full)
            for (int d = 0; d < DEPTH; ++d) {
                if (chunk + d < num_chunks) {
                    multiply_chunk(chunk + d, d);
                } else {
                    fetch_weights(d);
                }
            }
        }

#pragma clang loop unroll(full)
        for (int r = 0; r < ROW_TILES; ++r) {
            threadgroup float* own_parts = parts + parity * PARTS;
            parity = 1 - parity;
#pragma clang loop unroll(full)
            for (int n = 0; n < TOKEN_TILES; ++n) {
#pragma clang loop unroll(full)
                for (int i = 0; i < 4; ++i) {
                    own_parts[((slice * TOKEN_TILES + n) * 4 + i) * LANES + lane] = sums[r][n][i];
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (own_token >= num_tokens) {
                continue;
            }
            float results[2] = {};
#pragma clang loop unroll(full)
            for (int s = 0; s < SLICES; ++s) {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    results[h] += own_parts[((s * TOKEN_TILES + own_n) * 4 + 2 * h + own_odd) * LANES + lane];
                }
            }
            const float factor = HAS_NORM ? factors[own_token] : 1.0f / X_SCALE;
            const uint row = first_row + r * RESULTS + g;
            if (GATED) {
                if (row < num_rows) {
                    store(out, own_results + row, gated(results[0] * factor, results[1] * factor));
                }
            } else {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    if (row + 8 * h < num_rows) {
                        store(out, own_results + row + 8 * h, before[r][h] + fma(results[h], factor, bias[r][h]));
                    }
                }
            }
        }
    }
}

template <typename F, typename LAST, int ROW_TILES, int TOKEN_TILES>
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
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.y * TOKEN_TILES * 8;
    if (first_token >= part.num_rows) {
        return;
    }
    const uint num_tiles = a.num_tiles;
    const Operand operand0 = { weights0, weights0, bias0 };
    const Operand operand1 = { weights1, weights1, bias1 };
    const Operand operand2 = { weights2, weights2, bias2 };
    if (is_same_v<F, LAST>) {
        few<F, ROW_TILES, TOKEN_TILES, false>(
            a, operand0, operand1, operand2, x, norm, out, rows, memory, index.x, num_tiles, grid.x, first_token, part,
            lane, slice
        );
    } else if (index.x < a.matrices[2].first_group) {
        few<F, ROW_TILES, TOKEN_TILES, false>(
            a, operand0, operand1, operand2, x, norm, out, rows, memory, index.x, a.matrices[2].first_group, num_tiles,
            first_token, part, lane, slice
        );
    } else {
        few<LAST, ROW_TILES, TOKEN_TILES, false>(
            a, operand0, operand1, operand2, x, norm, out, rows, memory, index.x, num_tiles, num_tiles, first_token, part,
            lane, slice
        );
    }
}

// out = silu(gate · x) · (up · x), with the norm of x before it.
template <typename F, int ROW_TILES, int TOKEN_TILES>
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
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.y * TOKEN_TILES * 8;
    if (first_token >= part.num_rows) {
        return;
    }
    const uint num_tiles = a.num_tiles;
    const Operand operand = { gate_weights, up_weights, x };
    few<F, ROW_TILES, TOKEN_TILES, true>(
        a, operand, operand, operand, x, norm, out, rows, memory, index.x, num_tiles, grid.x, first_token, part, lane, slice
    );
}

#define FEW(F, ROW_TILES, TOKEN_TILES)                                                 \
    INSTANCE(few_rows_##F##_##TOKEN_TILES, few_rows, F, F, ROW_TILES, TOKEN_TILES)     \
    INSTANCE(few_rows_swiglu_##F##_##TOKEN_TILES, few_rows_swiglu, F, ROW_TILES, TOKEN_TILES)
#define FORMAT(F) FEW(F, 1, 1) FEW(F, 2, 2) FEW(F, 2, 4)
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

#define MIXED(F, LAST, ROW_TILES, TOKEN_TILES) \
    INSTANCE(few_rows_##F##_##LAST##_##TOKEN_TILES, few_rows, F, LAST, ROW_TILES, TOKEN_TILES)
MIXED(Q4_K, Q6_K, 1, 1)
MIXED(Q4_K, Q6_K, 2, 2)
MIXED(Q4_K, Q6_K, 2, 4)
MIXED(Q5_K, Q6_K, 1, 1)
MIXED(Q5_K, Q6_K, 2, 2)
MIXED(Q5_K, Q6_K, 2, 4)
