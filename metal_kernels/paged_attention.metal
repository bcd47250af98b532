// Attention of one token for each sequence over the paged cache.
//
// The context of a sequence is cut at fixed positions, so that neither the batch nor the device's load shows in a
// result. A threadgroup takes one piece of one sequence for one key head and all of its query heads: keys and
// values are read once for the group. Its simdgroups take turns at 32 tokens. If there is more than one piece, a
// second kernel merges them.
//
// Eight values of a key are in one lane, so that LANES / (head_dim / 8) keys are read at once; the lanes of a key
// add up its scores. Scores are exponents of two: the logarithm is part of `scale`.

#include "kv_cache.h"

struct PagedAttentionArgs {
    Pages pages;
    uint num_heads;
    uint q_stride;       // values from one token's queries to the next
    uint piece_size;     // positions of a piece, a multiple of 32
    uint num_pieces;     // of the longest sequence
    uint window;         // positions that a token attends to, itself included
    uint num_slices;     // simdgroups that share the tokens of a piece
    float scale;         // of scores, times log2(e)
};

// One sequence of the step.
struct DecodeRow {
    uint token;        // of the step: the row of q and of the result
    uint seq_len;
    uint table_start;  // of its block table
};

constant constexpr int TILE = 32;
// Keys that a lane reads before it uses them.
constant constexpr int BATCH = 4;

// The running softmax of HEADS query heads over some keys.
template <int HEADS>
struct Partial {
    float maximum[HEADS];
    float sum[HEADS];
    float values[HEADS][8];
};

// Adds the keys of one tile, of which lane `i` knows the row of token `i` and whether it counts.
template <typename KV, int HEADS, uint LANES_PER_KEY>
inline void add_tile(
    constant PagedAttentionArgs& a,
    device const KV* k_cache,
    device const KV* v_cache,
    uint row,
    bool counts,
    thread const float (&q)[HEADS][8],
    threadgroup float* scores,  // [TILE][HEADS]
    uint lane,
    thread Partial<HEADS>& partial
) {
    constexpr uint keys_at_once = LANES / LANES_PER_KEY;
    const uint own_key = lane / LANES_PER_KEY;
    const uint first_value = lane % LANES_PER_KEY * 8;
    const bool has_values = first_value < a.pages.head_dim;
    // Lanes without values read the first ones and multiply them with zeros.
    const uint offset = has_values ? first_value : 0;
    for (uint first = 0; first < TILE; first += BATCH * keys_at_once) {
        Eight<KV> keys[BATCH];
        for (int i = 0; i < BATCH; ++i) {
            const uint key = (first + i * keys_at_once + own_key) % TILE;
            const ulong key_row = simd_shuffle(row, ushort(key));
            keys[i] = *(device const Eight<KV>*)(k_cache + key_row * a.pages.head_dim + offset);
        }
        for (int i = 0; i < BATCH; ++i) {
            const uint key = first + i * keys_at_once + own_key;
            float k[8];
            unpack(keys[i], k);
            for (int h = 0; h < HEADS; ++h) {
                float score = 0.0f;
                for (int d = 0; d < 8; ++d) {
                    score = fma(q[h][d], k[d], score);
                }
                score = sum_of_lanes(score, LANES_PER_KEY);
                if (first_value == 0 && key < TILE) {
                    scores[key * HEADS + h] = score;
                }
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int h = 0; h < HEADS; ++h) {
        const float score = counts ? scores[lane * HEADS + h] : LOWEST;
        const float maximum = max(partial.maximum[h], simd_max(score));
        const float weight = counts ? fast::exp2(score - maximum) : 0.0f;
        const float factor = fast::exp2(partial.maximum[h] - maximum);
        partial.sum[h] = partial.sum[h] * factor + simd_sum(weight);
        partial.maximum[h] = maximum;
        for (int d = 0; d < 8; ++d) {
            partial.values[h][d] *= factor;
        }
        scores[lane * HEADS + h] = weight;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = 0; first < TILE; first += BATCH * keys_at_once) {
        Eight<KV> values[BATCH];
        for (int i = 0; i < BATCH; ++i) {
            const uint key = (first + i * keys_at_once + own_key) % TILE;
            const ulong key_row = simd_shuffle(row, ushort(key));
            values[i] = *(device const Eight<KV>*)(v_cache + key_row * a.pages.head_dim + offset);
        }
        for (int i = 0; i < BATCH; ++i) {
            const uint key = first + i * keys_at_once + own_key;
            float v[8];
            unpack(values[i], v);
            for (int h = 0; h < HEADS; ++h) {
                const float weight = key < TILE ? scores[key * HEADS + h] : 0.0f;
                for (int d = 0; d < 8; ++d) {
                    partial.values[h][d] = fma(weight, v[d], partial.values[h][d]);
                }
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// HEADS is how many query heads a simdgroup takes; a group of more is shared among simdgroups. LANES_PER_KEY is a
// power of two, at least head_dim / 8; that it is known makes the sums of several keys go side by side.
template <typename KV, int HEADS, uint LANES_PER_KEY>
[[kernel]] void paged_attention(
    constant PagedAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],
    device const KV* k_cache [[buffer(2)]],
    device const KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const DecodeRow* rows [[buffer(5)]],
    device float* out [[buffer(6)]],       // [token, head, head_dim]
    device float* partials [[buffer(7)]],  // [row, head, piece, head_dim + 2]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    const uint piece = index.x;
    const uint kv_head = index.y;
    const uint token = rows[index.z].token;
    const uint seq_len = rows[index.z].seq_len;
    const uint window_start = seq_len > a.window ? seq_len - a.window : 0;
    const uint begin = max(piece * a.piece_size, window_start);
    const uint end = min((piece + 1) * a.piece_size, seq_len);
    if (begin >= end) {
        return;
    }
    const uint head_dim = a.pages.head_dim;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint slice = group % a.num_slices;
    const uint first_head = group / a.num_slices * HEADS;
    const uint first_value = lane % LANES_PER_KEY * 8;
    const bool has_values = first_value < head_dim;

    float queries[HEADS][8];
    for (int h = 0; h < HEADS; ++h) {
        const uint head = min(first_head + h, heads_per_kv_head - 1) + kv_head * heads_per_kv_head;
        device const float* source = q + token * a.q_stride + head * head_dim + (has_values ? first_value : 0);
        for (int d = 0; d < 8; ++d) {
            queries[h][d] = has_values ? source[d] * a.scale : 0.0f;
        }
    }
    Partial<HEADS> partial;
    for (int h = 0; h < HEADS; ++h) {
        partial.maximum[h] = LOWEST;
        partial.sum[h] = 0.0f;
        for (int d = 0; d < 8; ++d) {
            partial.values[h][d] = 0.0f;
        }
    }
    threadgroup float* scores = memory + group * TILE * HEADS;
    device const uint* block_table = block_tables + rows[index.z].table_start;
    const uint first_tile = begin / TILE;
    for (uint tile = first_tile + slice; tile * TILE < end; tile += a.num_slices) {
        const uint position = tile * TILE + lane;
        const bool counts = position >= begin && position < end;
        const uint row = row_of(a.pages, block_table, kv_head, clamp(position, begin, end - 1));
        add_tile<KV, HEADS, LANES_PER_KEY>(a, k_cache, v_cache, row, counts, queries, scores, lane, partial);
    }
    // The keys of a simdgroup that different lanes have.
    for (int h = 0; h < HEADS; ++h) {
        for (int d = 0; d < 8; ++d) {
            for (uint distance = LANES_PER_KEY; distance < LANES; distance *= 2) {
                partial.values[h][d] += simd_shuffle_xor(partial.values[h][d], ushort(distance));
            }
        }
    }
    // The simdgroups of the threadgroup: maximum, sum and values of each of their heads.
    const uint record = head_dim + 2;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int h = 0; h < HEADS; ++h) {
        threadgroup float* target = memory + (group * HEADS + h) * record;
        if (lane == 0) {
            target[0] = partial.maximum[h];
            target[1] = partial.sum[h];
        }
        if (lane < LANES_PER_KEY && has_values) {
            for (int d = 0; d < 8; ++d) {
                target[2 + first_value + d] = partial.values[h][d];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < heads_per_kv_head * head_dim; i += num_threads) {
        const uint own_head = i / head_dim;
        const uint d = i % head_dim;
        // The simdgroups of a head lie one after the other, each with HEADS records.
        threadgroup const float* records =
            memory + (own_head / HEADS * a.num_slices * HEADS + own_head % HEADS) * record;
        float maximum = LOWEST;
        for (uint s = 0; s < a.num_slices; ++s) {
            maximum = max(maximum, records[s * HEADS * record]);
        }
        float sum = 0.0f;
        float value = 0.0f;
        for (uint s = 0; s < a.num_slices; ++s) {
            threadgroup const float* own = records + s * HEADS * record;
            const float factor = fast::exp2(own[0] - maximum);
            sum += own[1] * factor;
            value += own[2 + d] * factor;
        }
        const uint head = kv_head * heads_per_kv_head + own_head;
        if (a.num_pieces == 1) {
            out[(ulong(token) * a.num_heads + head) * head_dim + d] = value / sum;
        } else {
            device float* target =
                partials + ((ulong(index.z) * a.num_heads + head) * a.num_pieces + piece) * record;
            target[2 + d] = value;
            if (d == 0) {
                target[0] = maximum;
                target[1] = sum;
            }
        }
    }
}

#define ATTENTION(NAME, KV, HEADS, LANES_PER_KEY)                                                      \
    template [[host_name("paged_attention_" NAME "_" #HEADS "_" #LANES_PER_KEY)]] [[kernel]] decltype( \
        paged_attention<KV, HEADS, LANES_PER_KEY>) paged_attention<KV, HEADS, LANES_PER_KEY>;
#define HEAD_SIZES(NAME, KV, HEADS) \
    ATTENTION(NAME, KV, HEADS, 8) ATTENTION(NAME, KV, HEADS, 16) ATTENTION(NAME, KV, HEADS, 32)
#define HEAD_COUNTS(NAME, KV) HEAD_SIZES(NAME, KV, 1) HEAD_SIZES(NAME, KV, 2) HEAD_SIZES(NAME, KV, 4)
HEAD_COUNTS("f16", half)
HEAD_COUNTS("bf16", bfloat)
HEAD_COUNTS("f32", float)

// Merges the pieces of a sequence, in their order. One simdgroup for each head.
[[kernel]] void paged_attention_merge(
    constant PagedAttentionArgs& a [[buffer(0)]],
    device const DecodeRow* rows [[buffer(1)]],
    device const float* partials [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint head = index.x;
    const uint seq_len = rows[index.y].seq_len;
    const uint head_dim = a.pages.head_dim;
    const uint record = head_dim + 2;
    const uint window_start = seq_len > a.window ? seq_len - a.window : 0;
    const uint first = window_start / a.piece_size;
    const uint last = (seq_len - 1) / a.piece_size;
    device const float* records = partials + (ulong(index.y) * a.num_heads + head) * a.num_pieces * record;
    float maximum = LOWEST;
    for (uint piece = first; piece <= last; ++piece) {
        maximum = max(maximum, records[piece * record]);
    }
    float sum = 0.0f;
    for (uint piece = first; piece <= last; ++piece) {
        sum += records[piece * record + 1] * fast::exp2(records[piece * record] - maximum);
    }
    for (uint d = lane; d < head_dim; d += LANES) {
        float value = 0.0f;
        for (uint piece = first; piece <= last; ++piece) {
            device const float* own = records + piece * record;
            value += own[2 + d] * fast::exp2(own[0] - maximum);
        }
        out[(ulong(rows[index.y].token) * a.num_heads + head) * head_dim + d] = value / sum;
    }
}
