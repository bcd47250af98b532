// Attention of several tokens of a sequence over the paged cache on tensor cores: `flash_attention.metal` for tiles of
// 128 rows.
//
// Each of four warps has 16 or 32 rows, with their scores and results in registers: the results of the first matmul are
// the operand of the second. Keys and values of the context are loaded in tiles, which begin at multiples of their
// size. The tile's values are loaded while scores are computed, and the next tile's keys while the values are weighted.
//
// Queries, keys, values and weights are halves, scores and results floats. From a cache of bfloats, values from 6.1e-5
// to 65,504 become halves without loss; larger ones are clamped, and smaller ones lose bits. Weights would have three
// bits less as bfloats.

#define FOR_NVIDIA
#define MAX_THREADS 128
#include "cached.h"
#include "prefill.h"
#include "packed.h"

// Distance of the two columns in a word of the next matmul, if results are packed for it; otherwise 0.
constant ushort NEXT_APART [[function_constant(5)]];

constant constexpr int NUM_WARPS = MAX_THREADS / LANES;

// Lower than any score. Masked scores are so much lower that their weight is zero, even in a row without others.
constant constexpr float FLOOR = LOWEST / 2.0f;

// Stride of rows in shared memory, in halves: an odd number of chunks of eight, so that those of eight neighbouring
// rows lie in different banks.
inline uint stride_of(uint dim) {
    return (dim / 8 | 1) * 8;
}

// A thread's chunks of KEYS rows in shared memory: calls `visit` with the row, its value and the address of each chunk
// of eight values. All but the first are compile-time constants.
template <int KEYS, int MAX_DIM, typename Visit>
inline void visit_own_chunks(threadgroup ushort* rows, uint dim, uint thread_index, Visit visit) {
    // Threads per row: the largest power of two that divides the number of its chunks.
    const uint width = dim / 8 & (0 - dim / 8);
    const uint num_columns = dim / 8 / width;
    const uint num_rows = MAX_THREADS / width;
    const uint num_turns = (KEYS + num_rows - 1) / num_rows * num_columns;
    const uint own_row = thread_index / width;
    const uint own_value = thread_index % width * 8;
    threadgroup ushort* own = rows + own_row * stride_of(dim) + own_value;
    if (num_rows > KEYS && own_row >= KEYS) {
        return;
    }
#pragma clang loop unroll(full)
    for (int turn = 0; turn < MAX_DIM / 8; ++turn) {
        if (turn < num_turns) {
            const uint row = turn / num_columns * num_rows;
            const uint value = turn % num_columns * width * 8;
            visit(own_row + row, own_value + value, own + (row * stride_of(dim) + value));
        }
    }
}

// Starts an asynchronous copy of rows of the cache.
template <int KEYS, int MAX_DIM, typename KV>
inline void begin_copy(
    constant Pages& pages,
    device const KV* cache,
    threadgroup const uint* cache_rows,
    threadgroup ushort* target,
    uint dim,
    uint thread_index
) {
    visit_own_chunks<KEYS, MAX_DIM>(target, dim, thread_index, [&](uint row, uint value, threadgroup ushort* target) {
        begin_eight(pages, cache, cache_rows[row], dim, value, target);
    });
    msl_end_group();
}

// Waits for the thread's copies. Other threads need a barrier as well.
template <int KEYS, int MAX_DIM, typename KV>
inline void end_copy(threadgroup ushort* target, uint dim, uint thread_index) {
    msl_wait_for_groups<0>();
    if (is_converted<KV>()) {
        visit_own_chunks<KEYS, MAX_DIM>(target, dim, thread_index, [&](uint, uint value, threadgroup ushort* target) {
            end_eight<KV>(target, value);
        });
    }
}

// A row of a tile.
struct Row {
    uint token;  // of the step
    uint head;
    uint position;
    uint exists;
};

// The maximum over four neighbouring lanes, which have a row of a matmul.
inline float maximum_of_four(float value) {
    value = max(value, simd_shuffle_xor(value, ushort(1)));
    return max(value, simd_shuffle_xor(value, ushort(2)));
}

template <typename KV, int MAX_HEAD_DIM, int MAX_VALUE_DIM, int ROW_TILES, int KEYS>
[[kernel]] void prefill_attention(
    constant FlashAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],
    device const KV* k_cache [[buffer(2)]],
    device const KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const PrefillTile* tiles [[buffer(5)]],
    device float* out [[buffer(6)]],            // [token, head, value]
    device const float* rotated [[buffer(7)]],  // [token, head, rotated_width]
    device float* totals [[buffer(8)]],         // [token, head]: maximum and sum
    device const float* sinks [[buffer(9)]],    // [head]
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint3 grid [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint warp [[simdgroup_index_in_threadgroup]]
) {
    constexpr int STEPS = MAX_HEAD_DIM / 16;
    constexpr int FRAGMENTS = MAX_VALUE_DIM / 8;
    constexpr uint WARP_ROWS = 16 * ROW_TILES;
    constexpr uint ROWS = NUM_WARPS * WARP_ROWS;
    // Otherwise they are in shared memory, each lane's own.
    constexpr bool HAS_QUERIES_IN_REGISTERS = MAX_HEAD_DIM <= 64;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint k_stride = stride_of(HEAD_DIM);
    const uint v_stride = stride_of(VALUE_DIM);
    const uint num_steps = (HEAD_DIM + 15) / 16;
    threadgroup ushort* keys = (threadgroup ushort*)memory;
    threadgroup ushort* values = keys + KEYS * k_stride;
    threadgroup uint* cache_rows = (threadgroup uint*)(values + KEYS * v_stride);
    threadgroup Row* rows = (threadgroup Row*)(cache_rows + 2 * KEYS);
    threadgroup uint4* own_queries = (threadgroup uint4*)(rows + ROWS) + warp * ROW_TILES * num_steps * LANES + lane;

    // Earlier kernels, or the previous step, have written everything.
    msl_wait_for_inputs();
    const uint kv_head = index.x;
    // The last tokens of a sequence have the longest contexts and start first.
    const PrefillTile tile = tiles[grid.y - 1 - index.y];
    device const uint* block_table = block_tables + tile.table_start;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint num_rows = tile.num_tokens * heads_per_kv_head;
    const uint first_row = index.z * ROWS;
    if (first_row >= num_rows) {
        return;
    }
    const uint first_position = tile.first_position + first_row / heads_per_kv_head;
    const uint last = tile.first_position + (min(first_row + ROWS, num_rows) - 1) / heads_per_kv_head + 1;
    const uint end = HAS_SPANS ? min(last, a.span.end) : last;
    const uint window_begin = first_position + 1 > a.window ? first_position + 1 - a.window : 0;
    const uint begin = HAS_SPANS ? a.span.begin : window_begin / KEYS * KEYS;
    if (begin >= end) {
        return;
    }

    // The first keys are loaded while queries are read. Only cache rows that some token attends to are read.
    const auto row_of_position = [&](uint position) {
        return row_of_key(a, block_table, kv_head, clamp(position, HAS_SPANS ? begin : window_begin, end - 1));
    };
    if (thread_index < KEYS) {
        cache_rows[thread_index] = row_of_position(begin + thread_index);
    }
    if (thread_index < ROWS) {
        // Missing rows repeat an existing one.
        const uint row = min(first_row + thread_index, num_rows - 1);
        rows[thread_index].token = tile.first_token + row / heads_per_kv_head;
        rows[thread_index].head = kv_head * heads_per_kv_head + row % heads_per_kv_head;
        rows[thread_index].position = tile.first_position + row / heads_per_kv_head;
        rows[thread_index].exists = first_row + thread_index < num_rows;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    begin_copy<KEYS, MAX_HEAD_DIM>(a.pages, k_cache, cache_rows, keys, HEAD_DIM, thread_index);

    // A lane has rows g and g + 8 of each 16.
    threadgroup const Row* own_rows = rows + warp * WARP_ROWS + g;
    const uint warp_row = first_row + warp * WARP_ROWS;
    const bool has_rows = warp_row < num_rows;
    const uint warp_first = tile.first_position + min(warp_row, num_rows - 1) / heads_per_kv_head;
    const uint warp_last = tile.first_position + (min(warp_row + WARP_ROWS, num_rows) - 1) / heads_per_kv_head;
    uint queries[HAS_QUERIES_IN_REGISTERS ? ROW_TILES : 1][HAS_QUERIES_IN_REGISTERS ? STEPS : 1][4];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            const uint token = own_rows[16 * r + 8 * h].token;
            const uint head = own_rows[16 * r + 8 * h].head;
            device const float* row_of_q = q + ulong(token) * a.q_stride + head * HEAD_DIM;
            device const float* rotated_end = rotated + (row_of_result(a, token, head) + 1) * a.span.rotated_width;
#pragma clang loop unroll(full)
            for (int step = 0; step < STEPS; ++step) {
#pragma clang loop unroll(full)
                for (int half_step = 0; half_step < 2 && 16 * step < HEAD_DIM; ++half_step) {
                    const uint first = 16 * step + 8 * half_step;
                    float2 pair = float2(0.0f);
                    if (first < HEAD_DIM) {
                        const uint value = first + 2 * t;
                        device const float* own = row_of_q + value;
                        if (HAS_SPANS && value >= a.span.num_plain) {
                            own = rotated_end - (HEAD_DIM - value);
                        }
                        pair = *(device const float2*)own * a.scale;
                    }
                    const uint word = msl_halves(pair.x, pair.y);
                    if (HAS_QUERIES_IN_REGISTERS) {
                        queries[r][step][2 * half_step + h] = word;
                    } else {
                        ((threadgroup uint*)(own_queries + (r * num_steps + step) * LANES))[2 * half_step + h] = word;
                    }
                }
            }
        }
    }
    float results[ROW_TILES][FRAGMENTS][4] = {};
    float maxima[ROW_TILES][2];
    float sums[ROW_TILES][2];  // of the lane's keys only
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            maxima[r][h] = FLOOR;
            sums[r][h] = 0.0f;
            if (HAS_SPANS && begin > 0) {
                const bool exists = own_rows[16 * r + 8 * h].exists;
                const uint token = own_rows[16 * r + 8 * h].token;
                const uint head = own_rows[16 * r + 8 * h].head;
                device const float* total = totals + 2 * row_of_result(a, token, head);
                // Read by the lane that writes them.
                maxima[r][h] = maximum_of_four(exists && t == 0 ? total[0] : FLOOR);
                sums[r][h] = exists && t == 0 ? total[1] : 0.0f;
                device const float* so_far = out + row_of_result(a, token, head) * VALUE_DIM;
#pragma clang loop unroll(full)
                for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
                    if (exists && 8 * fragment < VALUE_DIM) {
                        const float2 pair = *(device const float2*)(so_far + 8 * fragment + 2 * t);
                        results[r][fragment][2 * h] = pair.x;
                        results[r][fragment][2 * h + 1] = pair.y;
                    }
                }
            }
        }
    }

    // The lane's address in 16 keys by 16 values; past the last eight values of a row, these again.
    threadgroup const ushort* own_keys = keys + (lane / 16 * 8 + lane % 8) * k_stride + lane / 8 % 2 * 8;
    threadgroup const ushort* own_values = values + lane % 16 * v_stride + lane / 16 * 8;
    for (uint first_key = begin; first_key < end; first_key += KEYS) {
        const uint parity = (first_key - begin) / KEYS % 2;
        const uint next_row = thread_index < KEYS ? row_of_position(first_key + KEYS + thread_index) : 0;
        end_copy<KEYS, MAX_HEAD_DIM, KV>(keys, HEAD_DIM, thread_index);
        // From here on all threads see the keys, and none uses the previous tile's values.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        begin_copy<KEYS, MAX_VALUE_DIM>(a.pages, v_cache, cache_rows + parity * KEYS, values, VALUE_DIM, thread_index);

        // Whether some row of the warp attends to some key of the tile, and whether all rows attend to all keys.
        const uint last_key = first_key + KEYS - 1;
        const bool counts =
            has_rows && first_key <= warp_last && (last_key > warp_first || warp_first - last_key < a.window);
        const bool is_cut = last_key > warp_first || warp_last - first_key >= a.window;
        float scores[ROW_TILES][KEYS / 8][4] = {};
        if (counts) {
            threadgroup const ushort* keys_of_step = own_keys;
            threadgroup const uint4* queries_of_step = own_queries;
#pragma clang loop unroll_count(4)
            for (uint step = 0; step < num_steps; ++step) {
                uint of_queries[ROW_TILES][4];
#pragma clang loop unroll(full)
                for (int r = 0; r < ROW_TILES; ++r) {
                    if (HAS_QUERIES_IN_REGISTERS) {
#pragma clang loop unroll(full)
                        for (int i = 0; i < 4; ++i) {
                            of_queries[r][i] = queries[r][step][i];
                        }
                    } else {
                        const uint4 words = queries_of_step[r * num_steps * LANES];
#pragma clang loop unroll(full)
                        for (int i = 0; i < 4; ++i) {
                            of_queries[r][i] = words[i];
                        }
                    }
                }
#pragma clang loop unroll(full)
                for (int pair = 0; pair < KEYS / 16; ++pair) {
                    uint of_keys[4];
                    threadgroup const ushort* own = keys_of_step + 16 * pair * k_stride;
                    const bool is_whole = HEAD_DIM % 16 == 0 || 16 * step + 8 < HEAD_DIM;
                    msl_load_matrices(is_whole ? own : own - lane / 8 % 2 * 8, of_keys);
#pragma clang loop unroll(full)
                    for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                        for (int n = 0; n < 2; ++n) {
                            msl_multiply_tile(
                                scores[r][2 * pair + n], of_queries[r][0], of_queries[r][1], of_queries[r][2],
                                of_queries[r][3], of_keys[2 * n], of_keys[2 * n + 1]
                            );
                        }
                    }
                }
                keys_of_step += 16;
                queries_of_step += LANES;
            }
        }
        if (thread_index < KEYS) {
            cache_rows[(1 - parity) * KEYS + thread_index] = next_row;
        }
        end_copy<KEYS, MAX_VALUE_DIM, KV>(values, VALUE_DIM, thread_index);
        // From here on all threads see the values and the next tile's rows, and none uses the keys.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint weights[ROW_TILES][KEYS / 16][4] = {};
        if (counts) {
            if (HAS_SOFT_CAP) {
#pragma clang loop unroll(full)
                for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                    for (int key = 0; key < KEYS / 8; ++key) {
#pragma clang loop unroll(full)
                        for (int i = 0; i < 4; ++i) {
                            scores[r][key][i] = capped(scores[r][key][i], a.soft_cap);
                        }
                    }
                }
            }
            if (is_cut) {
#pragma clang loop unroll(full)
                for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                    for (int h = 0; h < 2; ++h) {
                        const uint own_position = own_rows[16 * r + 8 * h].position;
#pragma clang loop unroll(full)
                        for (int key = 0; key < KEYS / 8; ++key) {
#pragma clang loop unroll(full)
                            for (int i = 0; i < 2; ++i) {
                                const uint position = first_key + 8 * key + 2 * t + i;
                                // The difference is unsigned: keys after the token are farther away than any window.
                            if (own_position - position >= a.window) {
                                    scores[r][key][2 * h + i] = LOWEST;
                                }
                            }
                        }
                    }
                }
            }
#pragma clang loop unroll(full)
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    float maximum = maxima[r][h];
#pragma clang loop unroll(full)
                    for (int key = 0; key < KEYS / 8; ++key) {
                        maximum = max(maximum, max(scores[r][key][2 * h], scores[r][key][2 * h + 1]));
                    }
                    maximum = maximum_of_four(maximum);
                    const float factor = msl_exp2(maxima[r][h] - maximum);
                    maxima[r][h] = maximum;
                    float tile_sum = 0.0f;
#pragma clang loop unroll(full)
                    for (int key = 0; key < KEYS / 8; ++key) {
                        const float first = msl_exp2(scores[r][key][2 * h] - maximum);
                        const float second = msl_exp2(scores[r][key][2 * h + 1] - maximum);
                        tile_sum += first + second;
                        weights[r][key / 2][key % 2 * 2 + h] = msl_halves(first, second);
                    }
                    sums[r][h] = fma(sums[r][h], factor, tile_sum);
#pragma clang loop unroll(full)
                    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
                        if (8 * fragment < VALUE_DIM) {
                            results[r][fragment][2 * h] *= factor;
                            results[r][fragment][2 * h + 1] *= factor;
                        }
                    }
                }
            }
        }
        if (first_key + KEYS < end) {
            begin_copy<KEYS, MAX_HEAD_DIM>(a.pages, k_cache, cache_rows + (1 - parity) * KEYS, keys, HEAD_DIM, thread_index);
        }
        if (counts) {
#pragma clang loop unroll(full)
            for (int step = 0; step < KEYS / 16; ++step) {
#pragma clang loop unroll(full)
                for (int fragment = 0; fragment < FRAGMENTS; fragment += 2) {
                    if (8 * fragment < VALUE_DIM) {
                        const bool is_whole = 8 * fragment + 8 < VALUE_DIM;
                        uint of_values[4];
                        threadgroup const ushort* own = own_values + (16 * step * v_stride + 8 * fragment);
                        msl_load_transposed(is_whole ? own : own - lane / 16 * 8, of_values);
#pragma clang loop unroll(full)
                        for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
                            for (int n = 0; n < 2; ++n) {
                                if (n == 0 || is_whole) {
                                    msl_multiply_tile(
                                        results[r][fragment + n], weights[r][step][0], weights[r][step][1],
                                        weights[r][step][2], weights[r][step][3], of_values[2 * n], of_values[2 * n + 1]
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    const bool goes_on = HAS_SPANS && end < last;
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            float sum = sum_of_lanes(sums[r][h], 4);
            const bool exists = own_rows[16 * r + 8 * h].exists;
            const uint token = own_rows[16 * r + 8 * h].token;
            const uint head = own_rows[16 * r + 8 * h].head;
            if (HAS_SINKS && !goes_on) {
                sum = with_sink(sum, maxima[r][h], sinks[head]);
            }
            const float inverse = goes_on ? 1.0f : sum > 0.0f ? 1.0f / sum : 0.0f;
            if (NEXT_APART > 0) {
                // The lane has columns 2t and 2t + 1 of all eight. If these are no word, it exchanges one with the lane
                // that has the other column of its word. Then it has the same word of every eight columns, and words of
                // four groups are adjacent.
                const uint distance = NEXT_APART / 2;
                const bool is_second = (t & distance) != 0;
                const uint first_eighth =
                    head * (VALUE_DIM / 8) + word_of_column(2 * t + (is_second ? 1 : 0), NEXT_APART);
#pragma clang loop unroll(full)
                for (int eighth = 0; eighth < FRAGMENTS / 4; ++eighth) {
                    uint4 words;
#pragma clang loop unroll(full)
                    for (int unit = 0; unit < 4; ++unit) {
                        // The eight columns that have half `eighth` % 2 of their step, and lane `unit`.
                        const int of_step = NEXT_APART == 1 ? unit * 2 + eighth % 2 : eighth % 2 * 4 + unit;
                        const int fragment = eighth / 2 * 8 + of_step;
                        const float scale = inverse * (1.0f / FIXED_FACTOR);
                        float first = results[r][fragment][2 * h] * scale;
                        float second = results[r][fragment][2 * h + 1] * scale;
                        if (NEXT_APART > 1) {
                            const float got = simd_shuffle_xor(is_second ? first : second, ushort(distance));
                            first = is_second ? got : first;
                            second = is_second ? second : got;
                        }
                        words[unit] = msl_halves(first, second);
                    }
                    if (exists && eighth * 32 < VALUE_DIM) {
                        ((device uint4*)out)[index_of_eighth(token, first_eighth + 4 * eighth, a.num_tokens)] = words;
                    }
                }
                continue;
            }
            if (!exists) {
                continue;
            }
            if (goes_on && t == 0) {
                device float* total = totals + 2 * row_of_result(a, token, head);
                total[0] = maxima[r][h];
                total[1] = sum;
            }
            device float* row_of_out = out + row_of_result(a, token, head) * VALUE_DIM;
#pragma clang loop unroll(full)
            for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
                if (8 * fragment < VALUE_DIM) {
                    const float2 pair = float2(results[r][fragment][2 * h], results[r][fragment][2 * h + 1]);
                    *(device float2*)(row_of_out + 8 * fragment + 2 * t) = pair * inverse;
                }
            }
        }
    }
}

// Longer heads have fewer rows and keys at a time: the results of all rows are in registers.
#define PREFILL(NAME, KV)                                                            \
    INSTANCE(prefill_attention_##NAME##_64, prefill_attention, KV, 64, 64, 2, 64)    \
    INSTANCE(prefill_attention_##NAME##_128, prefill_attention, KV, 192, 128, 2, 64) \
    INSTANCE(prefill_attention_##NAME##_256, prefill_attention, KV, 256, 256, 1, 32)
PREFILL(f16, half)
PREFILL(bf16, bfloat)
PREFILL(q8_0, Code)
PREFILL(fp8_e4m3, Fp8)
