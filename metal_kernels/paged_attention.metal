// Attention of one token for each sequence over the paged cache.
//
// The context of a sequence is cut at fixed positions, so that neither the batch nor the device's load shows in a
// result. A threadgroup takes one piece of one sequence for one key head and all of its query heads: keys and values
// are read once for the group. First come the scores of all keys of the piece, in threadgroup memory; then their
// softmax; then the sums of values. So a thread holds queries or sums in its registers, not both. If there is more
// than one piece, a second kernel merges them.
//
// Eight values of a key are in one lane, so that a simdgroup reads LANES / LANES_PER_KEY keys at once; the lanes of a
// key add up its scores. Scores are exponents of two: the logarithm is part of `scale`.

#include "kv_cache.h"
#include "softmax.h"

constant bool HAS_SINKS [[function_constant(0)]];
constant bool HAS_SOFT_CAP [[function_constant(1)]];

struct PagedAttentionArgs {
    Pages pages;
    uint num_heads;
    uint q_stride;    // values from one token's queries to the next
    uint piece_size;  // positions of a piece, a multiple of 32
    uint num_pieces;  // of the longest sequence
    uint window;      // positions that a token attends to, itself included
    uint num_slices;  // simdgroups that share the keys of a piece
    float scale;      // of scores, times log2(e)
    float soft_cap;   // on scores, times log2(e), if there is one
};

constant constexpr int TILE = 32;
// Reads that a lane has under way.
constant constexpr int BATCH = 4;
// Values of a head that a lane merges.
constant constexpr int MERGED = 4;

// What a simdgroup reads of the cache, in tiles of 32 positions, every `step` tiles from `tile` on.
struct Slice {
    uint begin;  // positions that count
    uint end;
    uint tile;
    uint step;
};

// The row of the cache for each lane's position of a tile; positions that do not count give the row of one that does.
inline uint row_of_lane(
    constant Pages& pages, device const uint* block_table, uint kv_head, Slice slice, uint tile, uint lane
) {
    const uint position = clamp(tile * TILE + lane, slice.begin, slice.end - 1);
    return row_of(pages, block_table, kv_head, position);
}

// Reads eight values of BATCH rows. `row` is what `row_of_lane` gave, `first` the place of the first row in the tile.
template <typename KV, int LANES_PER_KEY>
inline void read_batch(
    constant Pages& pages,
    device const KV* cache,
    uint row,
    uint first,
    uint value,
    uint lane,
    thread Eight<KV> (&batch)[BATCH]
) {
    constexpr int KEYS_AT_ONCE = LANES / LANES_PER_KEY;
#pragma clang loop unroll(full)
    for (int i = 0; i < BATCH; ++i) {
        const uint key = (first + i * KEYS_AT_ONCE + lane / LANES_PER_KEY) % TILE;
        batch[i] = eight_of(pages, cache, simd_shuffle(row, ushort(key)), pages.head_dim, value);
    }
}

// HEADS is how many query heads a simdgroup takes; a group of more is shared among simdgroups.
template <typename KV, int HEADS, int LANES_PER_KEY>
[[kernel]] void paged_attention(
    constant PagedAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],
    device const KV* k_cache [[buffer(2)]],
    device const KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const DecodeRow* rows [[buffer(5)]],
    device float* out [[buffer(6)]],       // [token, head, head_dim]
    device float* partials [[buffer(7)]],  // [row, head, piece, head_dim + 2]
    device const float* sinks [[buffer(8)]],  // [head]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    constexpr uint KEYS_AT_ONCE = LANES / LANES_PER_KEY;
    const uint piece = index.x;
    const uint kv_head = index.y;
    const uint token = rows[index.z].token;
    const uint seq_len = rows[index.z].seq_len;
    const uint window_start = seq_len > a.window ? seq_len - a.window : 0;
    const uint piece_start = piece * a.piece_size;
    Slice slice;
    slice.begin = max(piece_start, window_start);
    slice.end = min(piece_start + a.piece_size, seq_len);
    if (slice.begin >= slice.end) {
        return;
    }
    slice.tile = slice.begin / TILE + group % a.num_slices;
    slice.step = a.num_slices;
    const uint head_dim = a.pages.head_dim;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint chunk = group / a.num_slices;
    const uint num_padded_heads = num_groups / a.num_slices * HEADS;
    device const uint* block_table = block_tables + rows[index.z].table_start;
    const uint first_value = lane % LANES_PER_KEY * 8;
    const bool has_values = first_value < head_dim;
    // Lanes without values read the first ones and multiply them with zeros.
    const uint offset = has_values ? first_value : 0;

    // Maximum and sum of each head; then the scores, [chunk][position in the piece][head of the chunk].
    threadgroup float* maxima = memory;
    threadgroup float* sums = memory + num_padded_heads;
    threadgroup float* scores = memory + 2 * num_padded_heads;
    threadgroup float* own_scores = scores + chunk * a.piece_size * HEADS;

    float queries[HEADS][8];
#pragma clang loop unroll(full)
    for (int h = 0; h < HEADS; ++h) {
        const uint head = min(chunk * HEADS + h, heads_per_kv_head - 1) + kv_head * heads_per_kv_head;
        device const float4* source = (device const float4*)(q + token * a.q_stride + head * head_dim + offset);
        const float scale = has_values ? a.scale : 0.0f;
#pragma clang loop unroll(full)
        for (int d = 0; d < 8; ++d) {
            queries[h][d] = source[d / 4][d % 4] * scale;
        }
    }
    for (uint tile = slice.tile; tile * TILE < slice.end; tile += slice.step) {
        const uint row = row_of_lane(a.pages, block_table, kv_head, slice, tile, lane);
        // Unrolled, the reads of all turns would fill the registers.
#pragma clang loop unroll(disable)
        for (uint first = 0; first < TILE; first += BATCH * KEYS_AT_ONCE) {
            Eight<KV> batch[BATCH];
            read_batch<KV, LANES_PER_KEY>(a.pages, k_cache, row, first, offset, lane, batch);
#pragma clang loop unroll(full)
            for (int i = 0; i < BATCH; ++i) {
                float k[8];
                unpack(batch[i], k);
                const uint key = first + i * KEYS_AT_ONCE + lane / LANES_PER_KEY;
                float own[HEADS];
#pragma clang loop unroll(full)
                for (int h = 0; h < HEADS; ++h) {
                    float score = 0.0f;
#pragma clang loop unroll(full)
                    for (int d = 0; d < 8; ++d) {
                        score = fma(queries[h][d], k[d], score);
                    }
                    own[h] = sum_of_lanes(score, LANES_PER_KEY);
                }
                if (first_value == 0 && key < TILE) {
#pragma clang loop unroll(full)
                    for (int h = 0; h < HEADS; ++h) {
                        own_scores[(tile * TILE + key - piece_start) * HEADS + h] =
                            HAS_SOFT_CAP ? capped(own[h], a.soft_cap) : own[h];
                    }
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: a simdgroup takes every so many heads.
    for (uint head = group; head < num_padded_heads; head += num_groups) {
        threadgroup float* head_scores = scores + head / HEADS * a.piece_size * HEADS + head % HEADS;
        float maximum = LOWEST;
        for (uint position = slice.begin + lane; position < slice.end; position += LANES) {
            maximum = max(maximum, head_scores[(position - piece_start) * HEADS]);
        }
        maximum = simd_max(maximum);
        float sum = 0.0f;
        for (uint position = slice.begin + lane; position < slice.end; position += LANES) {
            const float weight = fast::exp2(head_scores[(position - piece_start) * HEADS] - maximum);
            head_scores[(position - piece_start) * HEADS] = weight;
            sum += weight;
        }
        sum = simd_sum(sum);
        if (HAS_SINKS && a.num_pieces == 1) {
            const uint own_head = min(head, heads_per_kv_head - 1);
            sum = with_sink(sum, maximum, sinks[kv_head * heads_per_kv_head + own_head]);
        }
        if (lane == 0) {
            maxima[head] = maximum;
            sums[head] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float values[HEADS][8] = {};
    for (uint tile = slice.tile; tile * TILE < slice.end; tile += slice.step) {
        const uint row = row_of_lane(a.pages, block_table, kv_head, slice, tile, lane);
        // Unrolled, the reads of all turns would fill the registers.
#pragma clang loop unroll(disable)
        for (uint first = 0; first < TILE; first += BATCH * KEYS_AT_ONCE) {
            Eight<KV> batch[BATCH];
            read_batch<KV, LANES_PER_KEY>(a.pages, v_cache, row, first, offset, lane, batch);
#pragma clang loop unroll(full)
            for (int i = 0; i < BATCH; ++i) {
                float v[8];
                unpack(batch[i], v);
                const uint key = first + i * KEYS_AT_ONCE + lane / LANES_PER_KEY;
                const uint position = tile * TILE + key;
                const bool counts = key < TILE && position >= slice.begin && position < slice.end;
#pragma clang loop unroll(full)
                for (int h = 0; h < HEADS; ++h) {
                    const float weight = counts ? own_scores[(position - piece_start) * HEADS + h] : 0.0f;
#pragma clang loop unroll(full)
                    for (int d = 0; d < 8; ++d) {
                        values[h][d] = fma(weight, v[d], values[h][d]);
                    }
                }
            }
        }
    }
    // The keys of a simdgroup that different lanes have, then those of different simdgroups.
#pragma clang loop unroll(full)
    for (int h = 0; h < HEADS; ++h) {
#pragma clang loop unroll(full)
        for (int d = 0; d < 8; ++d) {
            for (int distance = LANES_PER_KEY; distance < LANES; distance *= 2) {
                values[h][d] += simd_shuffle_xor(values[h][d], ushort(distance));
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < uint(LANES_PER_KEY) && has_values) {
#pragma clang loop unroll(full)
        for (int h = 0; h < HEADS; ++h) {
#pragma clang loop unroll(full)
            for (int d = 0; d < 8; ++d) {
                scores[(group * HEADS + h) * head_dim + first_value + d] = values[h][d];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < heads_per_kv_head * head_dim; i += num_groups * LANES) {
        const uint own_head = i / head_dim;
        const uint d = i % head_dim;
        float value = 0.0f;
        for (uint s = 0; s < a.num_slices; ++s) {
            const uint source = (own_head / HEADS * a.num_slices + s) * HEADS + own_head % HEADS;
            value += scores[source * head_dim + d];
        }
        const uint head = kv_head * heads_per_kv_head + own_head;
        if (a.num_pieces == 1) {
            out[(ulong(token) * a.num_heads + head) * head_dim + d] = value / sums[own_head];
        } else {
            const ulong record = (ulong(index.z) * a.num_heads + head) * a.num_pieces + piece;
            device float* target = partials + record * (head_dim + 2);
            target[2 + d] = value;
            if (d == 0) {
                target[0] = maxima[own_head];
                target[1] = sums[own_head];
            }
        }
    }
}

#define ATTENTION(NAME, KV, HEADS, LANES_PER_KEY) \
    INSTANCE(paged_attention_##NAME##_##HEADS##_##LANES_PER_KEY, paged_attention, KV, HEADS, LANES_PER_KEY)
#define WIDTHS(NAME, KV, HEADS) \
    ATTENTION(NAME, KV, HEADS, 8) ATTENTION(NAME, KV, HEADS, 16) ATTENTION(NAME, KV, HEADS, 32)
#define HEAD_COUNTS(NAME, KV) WIDTHS(NAME, KV, 1) WIDTHS(NAME, KV, 2) WIDTHS(NAME, KV, 4)
HEAD_COUNTS(f16, half)
HEAD_COUNTS(bf16, bfloat)
HEAD_COUNTS(f32, float)
HEAD_COUNTS(q8_0, Code)

// Merges the pieces of a sequence: values in their order, sums by lanes. A simdgroup has MERGED · LANES values of a
// head.
[[kernel]] void paged_attention_merge(
    constant PagedAttentionArgs& a [[buffer(0)]],
    device const DecodeRow* rows [[buffer(1)]],
    device const float* partials [[buffer(2)]],
    device float* out [[buffer(3)]],
    device const float* sinks [[buffer(4)]],  // [head]
    uint3 index [[threadgroup_position_in_grid]],
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
    // A lane for each piece, or for every LANES-th one.
    float own_maximum = LOWEST;
    for (uint piece = first + lane; piece <= last; piece += LANES) {
        own_maximum = max(own_maximum, records[piece * record]);
    }
    const float maximum = simd_max(own_maximum);
    float own_sum = 0.0f;
    for (uint piece = first + lane; piece <= last; piece += LANES) {
        own_sum += records[piece * record + 1] * fast::exp2(records[piece * record] - maximum);
    }
    const float sum_of_pieces = simd_sum(own_sum);
    const float sum = HAS_SINKS ? with_sink(sum_of_pieces, maximum, sinks[head]) : sum_of_pieces;
    float values[MERGED] = {};
    for (uint start = first; start <= last; start += LANES) {
        const uint num_pieces = min(last + 1 - start, uint(LANES));
        const float own_weight =
            lane < num_pieces ? fast::exp2(records[(start + lane) * record] - maximum) : 0.0f;
        for (uint i = 0; i < num_pieces; ++i) {
            const float weight = simd_shuffle(own_weight, ushort(i));
            device const float* own = records + (start + i) * record + 2;
#pragma clang loop unroll(full)
            for (int v = 0; v < MERGED; ++v) {
                const uint d = (index.z * MERGED + v) * LANES + lane;
                values[v] = fma(own[min(d, head_dim - 1)], weight, values[v]);
            }
        }
    }
#pragma clang loop unroll(full)
    for (int v = 0; v < MERGED; ++v) {
        const uint d = (index.z * MERGED + v) * LANES + lane;
        if (d < head_dim) {
            out[(ulong(rows[index.y].token) * a.num_heads + head) * head_dim + d] = values[v] / sum;
        }
    }
}
