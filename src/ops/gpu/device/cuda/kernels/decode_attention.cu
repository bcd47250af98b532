// Attention of one token for each sequence over the paged cache, on tensor cores.
//
// A thread block has a KV split of one sequence's context, for one key head and up to eight of its query heads: keys
// and values are read once for all of them. Its warps alternate over tiles of 16 positions. Keys and values are loaded
// to registers in their memory layout, as the left operand of the instruction. Its 16 rows are positions for scores,
// and values of a head for results; its eight columns are query heads. Any assignment of columns works if both operands
// agree, and so does any assignment of rows to a head's values. A warp loads its next tile while it computes.
//
// KV splits, and the tiles of each warp, depend on the length of the sequence only, and the order of additions is
// fixed, so a row has the same bits in every batch. A second kernel merges the KV splits if there are several.
//
// If all tokens of a step are decoded ones, the kernel rotates as well. Each thread block rotates its queries. The one
// with the token's own position rotates the token's key, writes key and value to the cache, and reads them from shared
// memory.
//
// Queries and weights are halves. Scores are exponents of two: `scale` includes the logarithm. Weights are at most
// 2^15, so that the small weights of a long context keep their bits; sums add the weights as packed. With q8_0, scores
// of a group of values are multiplied by its scale, and values are scaled before they are weighted.

#define FOR_NVIDIA
#include "cached.h"
#include "rope.h"
#include "packed.h"
#include "softmax.h"

struct DecodeAttentionArgs {
    Pages pages;
    uint num_heads;
    uint q_stride;    // stride of tokens' queries, in values
    uint num_chunks;  // chunks of up to eight query heads that share a key head
    uint window;      // positions that a token attends to, itself included
    uint whole_size;  // longest context that is not split, in positions
    uint split_size;  // positions of a KV split; doubled until there are at most MAX_SPLITS
    uint num_splits;  // of the longest context of the launch
    uint num_tokens;  // of the step
    float scale;      // of scores, times log2(e)
    Rotation rotation;
    float soft_cap;   // on scores, times log2(e), if there is one
};

// Whether the kernel rotates queries and keys, and writes the token's key and value to the cache.
constant bool ROTATES [[function_constant(2)]];
constant bool HAS_SINKS [[function_constant(3)]];
constant bool HAS_SOFT_CAP [[function_constant(4)]];
// Values of a head: at most MAX_DIM, a multiple of 16, and a compile-time constant, so that loops unroll.
constant ushort HEAD_DIM [[function_constant(5)]];
// Distance of the two columns in a word of the next matmul, if results are packed for it; otherwise 0. Packing needs
// contexts without splits, and heads that are whole steps of the matmul.
constant ushort NEXT_APART [[function_constant(6)]];

constant constexpr uint TILE = 16;
constant constexpr uint HEADS = 8;
constant constexpr uint SLICES = 8;  // warps of a thread block
constant constexpr uint NUM_THREADS = SLICES * LANES;
constant constexpr uint MAX_SPLITS = LANES;
// Tiles that a warp prefetches to L2, after its first one, before it waits.
constant constexpr uint TILES_FETCHED = 3;
constant constexpr uint BYTES_OF_A_LINE = 128;
constant constexpr float LARGEST_EXPONENT = 15.0f;
// Positions before a token's own that the same step may compute, since they are draft tokens.
constant constexpr uint MAX_DRAFTED = 64;

// The bounds of a context's splits: from `first` on, a multiple of a tile.
struct Cut {
    uint window_start;
    uint first;
    uint split_size;
};
inline Cut cut_of(constant DecodeAttentionArgs& a, uint seq_len) {
    Cut cut;
    cut.window_start = seq_len > a.window ? seq_len - a.window : 0;
    cut.first = cut.window_start / TILE * TILE;
    const uint len = seq_len - cut.first;
    cut.split_size = len <= a.whole_size ? a.whole_size : a.split_size;
    while (cut.split_size * MAX_SPLITS < len) {
        cut.split_size *= 2;
    }
    return cut;
}

// The partial result of a head: its values, maximum and sum, padded to 16 bytes.
inline ulong record_of(constant DecodeAttentionArgs& a, uint row, uint head, uint split) {
    return ((ulong(row) * a.num_heads + head) * a.num_splits + split) * (HEAD_DIM + 4);
}

// Transposes eight rows of eight halves: lane 4 · g + t has two neighbours of row g and gets two neighbours of column
// g.
inline uint transposed(uint pair, uint lane) {
    const uint source = lane % 4 * 8 + lane / 8;
    const uint first = simd_shuffle(pair, ushort(source));
    const uint second = simd_shuffle(pair, ushort(source + 4));
    const uint shift = lane / 4 % 2 * 16;
    return (first >> shift & 0xFFFFu) | (second >> shift) << 16;
}

// The left operand for values 2w and 2w + 1 of eight, from four positions: the columns of a word are two positions.
// Scales, if any, are the lower or the upper halves of their words.
template <typename KV>
inline void weighed_pairs(uint4 const (&eights)[4], uint w, uint const (&)[4], bool, thread uint (&operand)[4]) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i += 2) {
        const uint first = in_halves<KV>(eights[i][w]);
        const uint second = in_halves<KV>(eights[i + 1][w]);
        operand[i] = (first & 0xFFFFu) | second << 16;
        operand[i + 1] = first >> 16 | (second & 0xFFFF0000u);
    }
}
template <typename KV>
inline void weighed_pairs(uint2 const (&eights)[4], uint w, uint const (&scales)[4], bool is_upper, thread uint (&operand)[4]) {
#pragma clang loop unroll(full)
    for (uint i = 0; i < 4; i += 2) {
        const uint scale = msl_permute(scales[i], scales[i + 1], is_upper ? 0x7632u : 0x5410u);
        const uint bytes = msl_permute(eights[i][w / 2], eights[i + 1][w / 2], w % 2 == 0 ? 0x5140u : 0x7362u);
        operand[i] = halves_of_bytes<KV>(bytes, 0);
        operand[i + 1] = halves_of_bytes<KV>(bytes, 2);
        if (is_same_v<KV, Code>) {
            operand[i] = msl_multiply_pairs(operand[i], scale);
            operand[i + 1] = msl_multiply_pairs(operand[i + 1], scale);
        }
    }
}

// The token's own key and value in shared memory, in the type of the cache; for q8_0 also their scales, and space for
// quantization.
template <typename KV, int MAX_DIM>
struct OwnRows {
    threadgroup KV* rows;
    OwnRows(threadgroup char* memory) : rows((threadgroup KV*)memory) {}
    threadgroup const Kept<KV>* eights(uint kind) const { return (threadgroup const Kept<KV>*)(rows + kind * MAX_DIM); }
    template <uint WORDS>
    void take_scales(uint, uint, uint, thread uint (&)[WORDS]) const {}
    void put_pair(constant Pages&, device KV* cache, bool is_first, uint kind, uint row, uint dim, uint2 at, float2 pair) const {
        threadgroup KV* own = rows + kind * MAX_DIM;
        own[at.x] = rounded_to<KV>(pair.x);
        own[at.y] = rounded_to<KV>(pair.y);
        if (is_first) {
            cache[ulong(row) * dim + at.x] = own[at.x];
            cache[ulong(row) * dim + at.y] = own[at.y];
        }
    }
    void end(constant Pages&, device KV*, bool, uint, uint, uint, uint) const {}
};
template <int MAX_DIM>
struct OwnRows<Code, MAX_DIM> {
    threadgroup Code* rows;
    threadgroup half* scales;
    threadgroup float* staged;
    OwnRows(threadgroup char* memory)
        : rows((threadgroup Code*)memory),
          scales((threadgroup half*)(rows + 2 * MAX_DIM)),
          staged((threadgroup float*)(scales + 2 * MAX_DIM / GROUP)) {}
    threadgroup const uint2* eights(uint kind) const { return (threadgroup const uint2*)(rows + kind * MAX_DIM); }
    template <uint WORDS>
    void take_scales(uint kind, uint dim, uint first, thread uint (&words)[WORDS]) const {
        threadgroup const uint* own = (threadgroup const uint*)(scales + kind * (MAX_DIM / GROUP));
#pragma clang loop unroll(full)
        for (uint word = 0; word < WORDS; ++word) {
            words[word] = 2 * GROUP * (first + word) < dim ? own[first + word] : 0;
        }
    }
    void put_pair(constant Pages&, device Code*, bool, uint kind, uint, uint, uint2 at, float2 pair) const {
        staged[kind * MAX_DIM + at.x] = pair.x;
        staged[kind * MAX_DIM + at.y] = pair.y;
    }
    void end(constant Pages& pages, device Code* cache, bool is_first, uint kind, uint row, uint dim, uint lane) const {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        // Scales fill whole words.
        for (uint first = 0; first < (dim + 2 * GROUP - 1) / (2 * GROUP) * (2 * GROUP); first += GROUP) {
            const bool exists = first + lane < dim;
            const float value = exists ? staged[kind * MAX_DIM + first + lane] : 0.0f;
            const Coded own = coded(value);
            if (exists) {
                rows[kind * MAX_DIM + first + lane].bits = own.code;
            }
            if (lane == 0) {
                scales[(kind * MAX_DIM + first) / GROUP] = own.scale;
            }
            if (is_first && first < dim) {
                put_group(pages, cache, row, dim, first, lane, value);
            }
        }
    }
};

// Reduces over the lanes with the same column of a tile.
inline float maximum_of_column(float value) {
#pragma clang loop unroll(full)
    for (uint distance = 4; distance < LANES; distance *= 2) {
        value = max(value, simd_shuffle_xor(value, ushort(distance)));
    }
    return value;
}
inline float sum_of_column(float value) {
#pragma clang loop unroll(full)
    for (uint distance = 4; distance < LANES; distance *= 2) {
        value += simd_shuffle_xor(value, ushort(distance));
    }
    return value;
}

template <typename KV, int MAX_DIM>
[[kernel]] void decode_attention(
    constant DecodeAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],  // [token, heads, then key heads and value heads if it rotates, head_dim]
    device KV* k_cache [[buffer(2)]],
    device KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const DecodeRow* rows [[buffer(5)]],
    device float* out [[buffer(6)]],       // [token, head, head_dim], or packed
    device float* partials [[buffer(7)]],  // [row, head, split, head_dim + 4]
    // Arguments of the rotation, as in rope.metal.
    device const uint* positions [[buffer(8)]],
    device const uint* slots [[buffer(9)]],
    device const float* q_norm [[buffer(10)]],
    device const float* k_norm [[buffer(11)]],
    device const float* table [[buffer(12)]],
    device const float* sinks [[buffer(13)]],  // [head]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint slice [[simdgroup_index_in_threadgroup]]
) {
    // 16-byte blocks of a key that four lanes prefetch at once, and of a value that eight lanes do. Wide heads leave no
    // registers for prefetching.
    constexpr bool READS_AHEAD = MAX_DIM <= 128;
    constexpr bool HAS_SCALES = is_same_v<KV, Code>;
    constexpr uint KEY_BLOCKS = MAX_DIM / 32;
    constexpr uint VALUE_BLOCKS = MAX_DIM / 64;
    constexpr uint KEYS_KEPT = READS_AHEAD ? KEY_BLOCKS : 2;
    constexpr uint VALUES_KEPT = READS_AHEAD ? VALUE_BLOCKS : 1;
    constexpr uint SCALES_KEPT = READS_AHEAD ? MAX_DIM / 64 : 1;
    // Stride of queries in uint4: two rows of four uint4 lie in different banks.
    constexpr uint QUERY_STRIDE = (KEY_BLOCKS | 1) * 4;
    // Pairs of a head that a lane rotates.
    constexpr uint PAIRS = MAX_DIM / 2 / LANES;
    const uint head_dim = HEAD_DIM;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint thread_index = slice * LANES + lane;

    // The step's batch metadata are complete before its first kernel starts.
    const uint token = rows[index.z].token;
    const uint seq_len = rows[index.z].seq_len;
    device const uint* block_table = block_tables + rows[index.z].table_start;
    const Cut cut = cut_of(a, seq_len);
    const uint split_start = cut.first + index.x * cut.split_size;
    if (split_start >= seq_len) {
        return;
    }
    const uint begin = max(split_start, cut.window_start);
    const uint end = min(split_start + cut.split_size, seq_len);
    const uint kv_head = index.y / a.num_chunks;
    const uint chunk = index.y % a.num_chunks;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint first_head = kv_head * heads_per_kv_head + chunk * HEADS;
    const uint num_heads = min(heads_per_kv_head - chunk * HEADS, HEADS);

    // Shared memory: the warps' maxima and sums by head, then the reduced sums; then queries and the token's own key
    // and value, which the warps' results overwrite later.
    threadgroup float* all_maxima = memory;
    threadgroup float* all_sums = all_maxima + SLICES * HEADS;
    threadgroup float* totals = all_sums + SLICES * HEADS;
    threadgroup float* parts = totals + HEADS;
    threadgroup uint4* queries = (threadgroup uint4*)parts;
    const OwnRows<KV, MAX_DIM> own_rows((threadgroup char*)(queries + HEADS * QUERY_STRIDE));
    const uint part_stride = head_dim + 4;

    // The end of this block's positions that are in the cache: the token's own one is not if this kernel writes it. If
    // none remain, nothing is read.
    const uint cached_end = ROTATES ? min(end, seq_len - 1) : end;
    const bool has_cached = !ROTATES || begin < cached_end;
    // The cache row of each lane's position of a tile, twice; positions outside the range give the row of one inside,
    // so that every read is valid.
    const auto row_of_lane = [&](uint tile) {
        const uint last = has_cached ? cached_end - 1 : begin;
        return row_of(a.pages, block_table, kv_head, clamp(tile + lane % TILE, begin, last));
    };
    // Keys of positions g and g + 8 of a tile; values of 2t, 2t + 1, 2t + 8 and 2t + 9.
    Kept<KV> keys[2][KEYS_KEPT];
    Kept<KV> values[4][VALUES_KEPT];
    // Scales of the same positions, if any: words of two scales.
    uint key_scales[2][SCALES_KEPT] = {};
    uint value_scales[4][SCALES_KEPT] = {};
    device const KV* key_rows[2];
    device const KV* value_rows[4];
    uint rows_of_keys[2];
    uint rows_of_values[4];
    const auto turn_to_keys = [&](uint own_row) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            rows_of_keys[i] = simd_shuffle(own_row, ushort(g + 8 * i));
            key_rows[i] = k_cache + ulong(rows_of_keys[i]) * head_dim;
        }
    };
    const auto turn_to_values = [&](uint own_row) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; ++i) {
            const ushort position = ushort(2 * t + i % 2 + i / 2 * 8);
            rows_of_values[i] = simd_shuffle(own_row, position);
            value_rows[i] = v_cache + ulong(rows_of_values[i]) * head_dim;
        }
    };
    // Reads past a head's end repeat its last values. Queries are zero there, and the results are not used.
    const auto read_keys = [&](uint block) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            keys[i][block % KEYS_KEPT] = *(device const Kept<KV>*)(key_rows[i] + min(32 * block + 8 * t, head_dim - 8));
        }
    };
    const auto read_values = [&](uint block) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; ++i) {
            values[i][block % VALUES_KEPT] = *(device const Kept<KV>*)(value_rows[i] + min(64 * block + 8 * g, head_dim - 8));
        }
    };
    device const KV* k_pool = k_cache;
    device const KV* v_pool = v_cache;
    const auto read_key_scales = [&](uint word) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            read_scales(a.pages, k_pool, rows_of_keys[i], head_dim, word, key_scales[i]);
        }
    };
    const auto read_value_scales = [&](uint word) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; ++i) {
            read_scales(a.pages, v_pool, rows_of_values[i], head_dim, word, value_scales[i]);
        }
    };
    const auto read_all_keys = [&](uint own_row) {
        turn_to_keys(own_row);
        read_key_scales(0);
#pragma clang loop unroll(full)
        for (uint block = 0; block < KEY_BLOCKS; ++block) {
            if (32 * block < head_dim) {
                read_keys(block);
            }
        }
    };
    const auto read_all_values = [&](uint own_row) {
        turn_to_values(own_row);
        read_value_scales(0);
#pragma clang loop unroll(full)
        for (uint block = 0; block < VALUE_BLOCKS; ++block) {
            if (64 * block < head_dim) {
                read_values(block);
            }
        }
    };

    // Replaces loads for the token's position and later ones with the token's own key and value.
    const auto put_own_key = [&](uint tile, uint block) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            if (max(tile + g + 8 * i, begin) >= cached_end) {
                keys[i][block % KEYS_KEPT] = own_rows.eights(0)[min(4 * block + t, head_dim / 8 - 1)];
            }
        }
    };
    const auto put_own_value = [&](uint tile, uint block) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; ++i) {
            if (max(tile + 2 * t + i % 2 + i / 2 * 8, begin) >= cached_end) {
                values[i][block % VALUES_KEPT] = own_rows.eights(1)[min(8 * block + g, head_dim / 8 - 1)];
            }
        }
    };

    const auto put_own_key_scales = [&](uint tile, uint word) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            if (max(tile + g + 8 * i, begin) >= cached_end) {
                own_rows.take_scales(0, head_dim, word, key_scales[i]);
            }
        }
    };
    const auto put_own_value_scales = [&](uint tile, uint word) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 4; ++i) {
            if (max(tile + 2 * t + i % 2 + i / 2 * 8, begin) >= cached_end) {
                own_rows.take_scales(1, head_dim, word, value_scales[i]);
            }
        }
    };

    uint tile = split_start + slice * TILE;
    const uint own_row = row_of_lane(tile);
    // A step starts after the previous one has ended, so the cache has the rows of earlier steps. Only keys and values
    // of the step's own tokens are waited for.
    if (READS_AHEAD && tile < end && has_cached) {
        read_all_keys(own_row);
        read_all_values(own_row);
    }
#pragma clang loop unroll(full)
    for (uint i = 1; i <= TILES_FETCHED; ++i) {
        const uint later = tile + i * SLICES * TILE;
        if (later < end) {
            device const KV* pool = lane < TILE ? k_cache : v_cache;
            const uint row = row_of_lane(later);
            for (uint value = 0; value < head_dim; value += BYTES_OF_A_LINE / sizeof(KV)) {
                msl_fetch(pool + ulong(row) * head_dim + value);
            }
            fetch_scales(a.pages, pool, row, head_dim);
        }
    }
    if (ROTATES) {
        // Warp i rotates query head i. The key and the value go to the next warps, wrapping around to the first one.
        const uint num_tasks = num_heads + (end == seq_len ? 2 : 0);
        const auto has_pair = [&](uint i) { return 2 * (i * LANES + lane) < head_dim; };
        const auto indices = [&](uint i) { return indices_of(a.rotation, i * LANES + lane); };
        device const float* angles = angles_at(a.rotation, table, positions[token]);
        const float query_scale = query_factor(a.rotation, angles) * a.scale;
        float2 turns[PAIRS];
        float2 weights[2][PAIRS];
#pragma clang loop unroll(full)
        for (uint i = 0; i < PAIRS; ++i) {
            if (has_pair(i)) {
                turns[i] = turn_of(a.rotation, angles, i * LANES + lane);
                if (HAS_NORMS) {
                    weights[0][i] = pair_at(slice < num_heads ? q_norm : k_norm, indices(i));
                    weights[1][i] = pair_at(k_norm, indices(i));
                }
            }
        }
        // Zeros for missing heads and past the end of each head.
        if (lane < 4 * KEY_BLOCKS && (slice >= num_heads || 8 * lane >= head_dim)) {
            queries[slice * QUERY_STRIDE + lane] = uint4(0);
        }
        msl_wait_for_inputs();
        float2 heads[2][PAIRS];
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < 2; ++turn) {
            const uint task = slice + turn * SLICES;
            const uint kind = task < num_heads ? 0 : task - num_heads + 1;
            const uint head = kind == 0 ? first_head + task : a.num_heads + (kind - 1) * a.pages.num_kv_heads + kv_head;
            device const float* source = q + ulong(token) * a.q_stride + head * head_dim;
#pragma clang loop unroll(full)
            for (uint i = 0; i < PAIRS; ++i) {
                if (task < num_tasks && has_pair(i)) {
                    heads[turn][i] = pair_at(source, indices(i));
                }
            }
        }
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < 2; ++turn) {
            const uint task = slice + turn * SLICES;
            if (task < num_tasks) {
                const bool is_value = task == num_heads + 1;
                float factor = 1.0f;
                if (HAS_NORMS) {
                    float squares = 0.0f;
#pragma clang loop unroll(full)
                    for (uint i = 0; i < PAIRS; ++i) {
                        squares = has_pair(i) ? add_squares(heads[turn][i], squares) : squares;
                    }
                    factor = factor_of(a.rotation, squares);
                }
                const uint row = row_of_slot(a.pages, kv_head, slots[token]);
                device KV* cache = is_value ? v_cache : k_cache;
                threadgroup ushort* query = (threadgroup ushort*)(queries + task * QUERY_STRIDE);
#pragma clang loop unroll(full)
                for (uint i = 0; i < PAIRS; ++i) {
                    if (has_pair(i)) {
                        const uint2 at = indices(i);
                        float2 pair = heads[turn][i];
                        if (!is_value) {
                            pair = HAS_NORMS ? normed(pair, factor, weights[turn][i]) : pair;
                            pair = rotated(pair, turns[i]);
                        }
                        if (task < num_heads) {
                            const uint halves = msl_halves(pair.x * query_scale, pair.y * query_scale);
                            query[at.x] = ushort(halves);
                            query[at.y] = ushort(halves >> 16);
                        } else {
                            own_rows.put_pair(a.pages, cache, chunk == 0, is_value, row, head_dim, at, pair);
                        }
                    }
                }
                if (task >= num_heads) {
                    own_rows.end(a.pages, cache, chunk == 0, is_value, row, head_dim, lane);
                }
            }
        }
    } else {
        msl_wait_for_inputs();
        if (READS_AHEAD && tile < end && tile + TILE + MAX_DRAFTED >= seq_len) {
            read_all_keys(own_row);
            read_all_values(own_row);
        }
        // Missing heads repeat the queries of an existing one.
        for (uint i = thread_index; i < HEADS * KEY_BLOCKS * 4; i += NUM_THREADS) {
            const uint head = i / (KEY_BLOCKS * 4);
            const uint eighth = i % (KEY_BLOCKS * 4);
            uint4 words = uint4(0);
            if (8 * eighth < head_dim) {
                device const float* source =
                    q + ulong(token) * a.q_stride + (first_head + min(head, num_heads - 1)) * head_dim + 8 * eighth;
                const float4 low = *(device const float4*)source * a.scale;
                const float4 high = *(device const float4*)(source + 4) * a.scale;
                words = uint4(
                    msl_halves(low.x, low.y), msl_halves(low.z, low.w), msl_halves(high.x, high.y),
                    msl_halves(high.z, high.w)
                );
            }
            queries[head * QUERY_STRIDE + eighth] = words;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Of heads 2t and 2t + 1. The words of a block of values are the tiles of results: a lane has both values of a
    // word.
    float maxima[2] = {LOWEST, LOWEST};
    float sums[2] = {};
    float results[VALUE_BLOCKS * 4][4] = {};
#pragma clang loop unroll(disable)
    for (; tile < end; tile += SLICES * TILE) {
        const bool goes_on = tile + SLICES * TILE < end;
        const bool has_own = ROTATES && tile + TILE > cached_end;
        const uint next_row = row_of_lane(READS_AHEAD ? tile + SLICES * TILE : tile);
        if (!READS_AHEAD) {
            turn_to_keys(next_row);
        } else if (has_own) {
            put_own_key_scales(tile, 0);
            put_own_value_scales(tile, 0);
#pragma clang loop unroll(full)
            for (uint block = 0; block < KEY_BLOCKS; ++block) {
                put_own_key(tile, block);
            }
#pragma clang loop unroll(full)
            for (uint block = 0; block < VALUE_BLOCKS; ++block) {
                put_own_value(tile, block);
            }
        }
        float scores[4] = {};
#pragma clang loop unroll(disable)
        for (uint first = 0; first < KEY_BLOCKS; first += KEYS_KEPT) {
#pragma clang loop unroll(full)
            for (uint kept = 0; kept < KEYS_KEPT; ++kept) {
                const uint block = first + kept;
                if (32 * block < head_dim) {
                    if (!READS_AHEAD) {
                        if (has_cached) {
                            read_keys(block);
                            read_key_scales(block / 2);
                        }
                        if (has_own) {
                            put_own_key(tile, block);
                            put_own_key_scales(tile, block / 2);
                        }
                    }
                    const uint4 query = queries[g * QUERY_STRIDE + 4 * block + t];
                    // A block is a group of values with one scale, if there are scales.
                    float of_block[4] = {};
                    thread float(&sum)[4] = HAS_SCALES ? of_block : scores;
#pragma clang loop unroll(full)
                    for (uint w = 0; w < 4; w += 2) {
                        msl_multiply_tile(
                            sum, plain_pair<KV>(keys[0][kept], w), plain_pair<KV>(keys[1][kept], w),
                            plain_pair<KV>(keys[0][kept], w + 1), plain_pair<KV>(keys[1][kept], w + 1), query[w],
                            query[w + 1]
                        );
                    }
                    if (HAS_SCALES) {
#pragma clang loop unroll(full)
                        for (int i = 0; i < 4; ++i) {
                            const half2 scales = as_type<half2>(key_scales[i / 2][block / 2 % SCALES_KEPT]);
                            scores[i] = fma(of_block[i], float(block % 2 == 0 ? scales.x : scales.y), scores[i]);
                        }
                    }
                }
            }
        }

        if (HAS_SOFT_CAP) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                scores[i] = capped(scores[i], a.soft_cap);
            }
        }
        bool counts[2];
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            const uint position = tile + g + 8 * i;
            counts[i] = position >= begin && position < end;
        }
        float factors[2];
        float weights[4];
#pragma clang loop unroll(full)
        for (int c = 0; c < 2; ++c) {
            const float own = max(counts[0] ? scores[c] : LOWEST, counts[1] ? scores[c + 2] : LOWEST);
            const float maximum = max(maxima[c], maximum_of_column(own));
            factors[c] = fast::exp2(maxima[c] - maximum);
            maxima[c] = maximum;
#pragma clang loop unroll(full)
            for (int i = 0; i < 2; ++i) {
                const float weight = fast::exp2(scores[c + 2 * i] - maximum + LARGEST_EXPONENT);
                weights[c + 2 * i] = counts[i] ? weight : 0.0f;
            }
            sums[c] *= factors[c];
        }
        uint own_weights[2];
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            const uint pair = msl_halves(weights[2 * i], weights[2 * i + 1]);
            const half2 packed = as_type<half2>(pair);
            sums[0] += float(packed.x);
            sums[1] += float(packed.y);
            own_weights[i] = transposed(pair, lane);
        }
        if (READS_AHEAD && goes_on) {
            read_all_keys(next_row);
        }
        if (!READS_AHEAD) {
            turn_to_values(next_row);
        }

        // Most tiles have no new maximum. Wide heads leave no register for the test.
        if (!READS_AHEAD || simd_any(factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma clang loop unroll(full)
            for (uint tile_of_results = 0; tile_of_results < VALUE_BLOCKS * 4; ++tile_of_results) {
#pragma clang loop unroll(full)
                for (int i = 0; i < 4; ++i) {
                    results[tile_of_results][i] *= factors[i % 2];
                }
            }
        }
        const auto add_values = [&](uint block) {
            Kept<KV> eights[4];
            uint scales[4];
#pragma clang loop unroll(full)
            for (uint i = 0; i < 4; ++i) {
                eights[i] = values[i][block % VALUES_KEPT];
                scales[i] = value_scales[i][block % SCALES_KEPT];
            }
#pragma clang loop unroll(full)
            for (uint w = 0; w < 4; ++w) {
                // Rows g are the first values of words, rows g + 8 the second ones.
                uint operand[4];
                weighed_pairs<KV>(eights, w, scales, g >= 4, operand);
                msl_multiply_tile(
                    results[4 * block + w], operand[0], operand[1], operand[2], operand[3], own_weights[0], own_weights[1]
                );
            }
        };
        if (READS_AHEAD) {
#pragma clang loop unroll(full)
            for (uint block = 0; block < VALUE_BLOCKS; ++block) {
                if (64 * block < head_dim) {
                    add_values(block);
                }
            }
        } else {
            // Unrolled, a compiler would load all values at once. Registers need an index that is known at compile
            // time.
#pragma clang loop unroll(disable)
            for (uint block = 0; 64 * block < head_dim; ++block) {
                if (has_cached) {
                    read_values(block);
                    read_value_scales(block);
                }
                if (has_own) {
                    put_own_value(tile, block);
                    put_own_value_scales(tile, block);
                }
                switch (block) {
                    case 0: add_values(0); break;
                    case 1: add_values(1 % VALUE_BLOCKS); break;
                    case 2: add_values(2 % VALUE_BLOCKS); break;
                    default: add_values(3 % VALUE_BLOCKS); break;
                }
            }
        }
        if (READS_AHEAD && goes_on) {
            read_all_values(next_row);
        }
    }

    // Rescales the warps' results to their common maximum.
#pragma clang loop unroll(full)
    for (uint c = 0; c < 2; ++c) {
        sums[c] = sum_of_column(sums[c]);
        if (g == 0) {
            all_maxima[slice * HEADS + 2 * t + c] = maxima[c];
            all_sums[slice * HEADS + 2 * t + c] = sums[c];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const auto maximum_of_head = [&](uint head) {
        float maximum = all_maxima[head];
#pragma clang loop unroll(full)
        for (uint s = 1; s < SLICES; ++s) {
            maximum = max(maximum, all_maxima[s * HEADS + head]);
        }
        return maximum;
    };
    if (thread_index < num_heads) {
        const float maximum = maximum_of_head(thread_index);
        float total = 0.0f;
#pragma clang loop unroll(full)
        for (uint s = 0; s < SLICES; ++s) {
            const float factor = fast::exp2(all_maxima[s * HEADS + thread_index] - maximum);
            total = fma(all_sums[s * HEADS + thread_index], factor, total);
        }
        // With several splits, the merge kernel adds it.
        totals[thread_index] = total;
        if (HAS_SINKS) {
            totals[thread_index] = with_sink(total, maximum - LARGEST_EXPONENT, sinks[first_head + thread_index]);
        }
        if (a.num_splits > 1) {
            device float* record = partials + record_of(a, index.z, first_head + thread_index, index.x);
            record[head_dim] = maximum;
            record[head_dim + 1] = total;
        }
    }
#pragma clang loop unroll(full)
    for (uint c = 0; c < 2; ++c) {
        const uint head = 2 * t + c;
        const float factor = fast::exp2(maxima[c] - maximum_of_head(head));
        threadgroup float* target = parts + (slice * num_heads + head) * part_stride;
#pragma clang loop unroll(full)
        for (uint block = 0; block < VALUE_BLOCKS; ++block) {
            const uint value = 64 * block + 8 * g;
            if (head < num_heads && value < head_dim) {
#pragma clang loop unroll(full)
                for (uint w = 0; w < 4; w += 2) {
                    const uint r = 4 * block + w;
                    *(threadgroup float4*)(target + value + 2 * w) =
                        float4(results[r][c], results[r][c + 2], results[r + 1][c], results[r + 1][c + 2]) * factor;
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (NEXT_APART > 0) {
        // A thread has the same word of four groups of eight columns: sixteen bytes of a packed row.
        const uint apart = NEXT_APART;
        const uint num_eighths = head_dim / 8;
        for (uint i = thread_index; i < num_heads * num_eighths; i += NUM_THREADS) {
            const uint own_head = i / num_eighths;
            const uint eighth = i % num_eighths;
            const uint word = eighth % 4;
            const uint first = (word & (apart - 1)) | (word & ~(apart - 1)) << 1;
            uint4 words;
#pragma clang loop unroll(full)
            for (uint unit = 0; unit < 4; ++unit) {
                const uint half_of_step = eighth % 8 / 4;
                const uint eight = apart == 1 ? 2 * unit + half_of_step : 4 * half_of_step + unit;
                threadgroup const float* own = parts + own_head * part_stride + (eighth / 8 * 64 + 8 * eight + first);
                float2 sum = float2(0.0f);
#pragma clang loop unroll(full)
                for (uint s = 0; s < SLICES; ++s) {
                    sum += float2(own[s * num_heads * part_stride], own[s * num_heads * part_stride + apart]);
                }
                const float2 result = sum / totals[own_head] * (1.0f / FIXED_FACTOR);
                words[unit] = msl_halves(result.x, result.y);
            }
            ((device uint4*)out)[index_of_eighth(token, (first_head + own_head) * num_eighths + eighth, a.num_tokens)] =
                words;
        }
        return;
    }
    const uint num_quads = head_dim / 4;
    for (uint i = thread_index; i < num_heads * num_quads; i += NUM_THREADS) {
        const uint own_head = i / num_quads;
        const uint value = i % num_quads * 4;
        float4 sum = float4(0.0f);
#pragma clang loop unroll(full)
        for (uint s = 0; s < SLICES; ++s) {
            sum += *(threadgroup const float4*)(parts + (s * num_heads + own_head) * part_stride + value);
        }
        const uint head = first_head + own_head;
        if (a.num_splits == 1) {
            *(device float4*)(out + (ulong(token) * a.num_heads + head) * head_dim + value) = sum / totals[own_head];
        } else {
            *(device float4*)(partials + record_of(a, index.z, head, index.x) + value) = sum;
        }
    }
}

#define DECODE(NAME, KV, MAX_DIM) INSTANCE(decode_attention_##NAME##_##MAX_DIM, decode_attention, KV, MAX_DIM)
DECODE(f16, half, 128)
DECODE(f16, half, 256)
DECODE(bf16, bfloat, 128)
DECODE(bf16, bfloat, 256)
DECODE(q8_0, Code, 128)
DECODE(q8_0, Code, 256)
DECODE(fp8_e4m3, Fp8, 128)
DECODE(fp8_e4m3, Fp8, 256)

// Merges the KV splits of a row for one head. A warp has every n-th split, each lane four or eight values.
[[kernel]] void decode_attention_merge(
    constant DecodeAttentionArgs& a [[buffer(0)]],
    device const DecodeRow* rows [[buffer(1)]],
    device const float* partials [[buffer(2)]],
    device float* out [[buffer(3)]],
    device const float* sinks [[buffer(4)]],  // [head]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint slice [[simdgroup_index_in_threadgroup]]
) {
    constexpr uint TURNS = MAX_SPLITS / SLICES;
    constexpr uint ROUNDS = 2;  // of four values for each lane, up to 256
    const uint head_dim = HEAD_DIM;
    const uint head = index.x;
    const uint thread_index = slice * LANES + lane;
    const uint seq_len = rows[index.y].seq_len;
    const Cut cut = cut_of(a, seq_len);
    const uint num_splits = (seq_len - cut.first + cut.split_size - 1) / cut.split_size;
    device const float* records = partials + record_of(a, index.y, head, 0);
    const uint stride = head_dim + 4;
    msl_wait_for_inputs();
    // All loads are issued before the first one is waited for.
    float4 values[ROUNDS][TURNS];
#pragma clang loop unroll(full)
    for (uint round = 0; round < ROUNDS; ++round) {
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < TURNS; ++turn) {
            const uint split = turn * SLICES + slice;
            const uint value = 4 * (round * LANES + lane);
            const bool exists = split < num_splits && value < head_dim;
            values[round][turn] =
                exists ? *(device const float4*)(records + split * stride + value) : float4(0.0f);
        }
    }
    // A lane for each split.
    const bool has_split = lane < num_splits;
    const float own_maximum = has_split ? records[lane * stride + head_dim] : LOWEST;
    const float own_sum = has_split ? records[lane * stride + head_dim + 1] : 0.0f;
    const float maximum = simd_max(own_maximum);
    const float own_weight = fast::exp2(own_maximum - maximum);
    const float sum_of_splits = simd_sum(own_sum * own_weight);
    const float total =
        HAS_SINKS ? with_sink(sum_of_splits, maximum - LARGEST_EXPONENT, sinks[head]) : sum_of_splits;
#pragma clang loop unroll(full)
    for (uint round = 0; round < ROUNDS; ++round) {
        float4 sum = float4(0.0f);
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < TURNS; ++turn) {
            const float weight = simd_shuffle(own_weight, ushort(turn * SLICES + slice));
            sum = fma(values[round][turn], float4(weight), sum);
        }
        const uint value = 4 * (round * LANES + lane);
        if (value < head_dim) {
            *(threadgroup float4*)(memory + slice * head_dim + value) = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < head_dim; i += NUM_THREADS) {
        float sum = 0.0f;
#pragma clang loop unroll(full)
        for (uint s = 0; s < SLICES; ++s) {
            sum += memory[s * head_dim + i];
        }
        out[(ulong(rows[index.y].token) * a.num_heads + head) * head_dim + i] = sum / total;
    }
}
