// Attention of one token for each sequence over the paged cache.
//
// The context of a sequence is split at fixed positions, so that a result depends neither on the batch nor on the
// device's load. A threadgroup takes one KV split of one sequence for one key head and all of its query heads: keys and
// values are read once for the group. It computes the scores of all keys of the split in threadgroup memory, then their
// softmax, then the weighted sums of values, so a thread holds either queries or sums in its registers. With several KV
// splits, a second kernel merges them.
//
// A lane has eight values of a key, so a simdgroup reads LANES / LANES_PER_KEY keys at once; the lanes of a key reduce
// its score. Scores are exponents of two: `scale` includes the logarithm.

#include "kv_cache.h"
#include "softmax.h"

constant bool HAS_SINKS [[function_constant(0)]];
constant bool HAS_SOFT_CAP [[function_constant(1)]];

struct PagedAttentionArgs {
    Pages pages;
    uint num_heads;
    uint q_stride;    // stride of tokens' queries, in values
    uint split_size;  // positions of a KV split, a multiple of 32
    uint num_splits;  // of the longest sequence
    uint window;      // positions that a token attends to, itself included
    uint num_slices;  // simdgroups that share the keys of a KV split
    float scale;      // of scores, times log2(e)
    float soft_cap;   // on scores, times log2(e), if there is one
};

constant constexpr int TILE = 32;
// Reads that a lane has in flight.
constant constexpr int BATCH = 4;
// Values of a head that a lane merges.
constant constexpr int MERGED = 4;

// The tiles of 32 positions that a simdgroup reads: every `step`-th one from `tile` on.
struct Slice {
    uint begin;  // positions to attend to
    uint end;
    uint tile;
    uint step;
};

// The cache row of each lane's position of a tile; positions outside give the row of one inside.
inline uint row_of_lane(
    constant Pages& pages, device const uint* block_table, uint kv_head, Slice slice, uint tile, uint lane
) {
    const uint position = clamp(tile * TILE + lane, slice.begin, slice.end - 1);
    return row_of(pages, block_table, kv_head, position);
}

// Reads eight values of BATCH rows. `row` is the result of `row_of_lane`, `first` the index of the first row in the
// tile.
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

// HEADS is the number of query heads per simdgroup; a larger group is divided among simdgroups.
template <typename KV, int HEADS, int LANES_PER_KEY>
[[kernel]] void paged_attention(
    constant PagedAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],
    device const KV* k_cache [[buffer(2)]],
    device const KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const DecodeRow* rows [[buffer(5)]],
    device float* out [[buffer(6)]],       // [token, head, head_dim]
    device float* partials [[buffer(7)]],  // [row, head, split, head_dim + 2]
    device const float* sinks [[buffer(8)]],  // [head]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    constexpr uint KEYS_AT_ONCE = LANES / LANES_PER_KEY;
    const uint split = index.x;
    const uint kv_head = index.y;
    const uint token = rows[index.z].token;
    const uint seq_len = rows[index.z].seq_len;
    const uint window_start = seq_len > a.window ? seq_len - a.window : 0;
    const uint split_start = split * a.split_size;
    Slice slice;
    slice.begin = max(split_start, window_start);
    slice.end = min(split_start + a.split_size, seq_len);
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
    // Lanes without values read the first ones and multiply them by zeros.
    const uint offset = has_values ? first_value : 0;

    // Maximum and sum of each head; then the scores, [chunk][position in the KV split][head of the chunk].
    threadgroup float* maxima = memory;
    threadgroup float* sums = memory + num_padded_heads;
    threadgroup float* scores = memory + 2 * num_padded_heads;
    threadgroup float* own_scores = scores + chunk * a.split_size * HEADS;

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
                        own_scores[(tile * TILE + key - split_start) * HEADS + h] =
                            HAS_SOFT_CAP ? capped(own[h], a.soft_cap) : own[h];
                    }
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: a simdgroup has every n-th head.
    for (uint head = group; head < num_padded_heads; head += num_groups) {
        threadgroup float* head_scores = scores + head / HEADS * a.split_size * HEADS + head % HEADS;
        float maximum = LOWEST;
        for (uint position = slice.begin + lane; position < slice.end; position += LANES) {
            maximum = max(maximum, head_scores[(position - split_start) * HEADS]);
        }
        maximum = simd_max(maximum);
        float sum = 0.0f;
        for (uint position = slice.begin + lane; position < slice.end; position += LANES) {
            const float weight = fast::exp2(head_scores[(position - split_start) * HEADS] - maximum);
            head_scores[(position - split_start) * HEADS] = weight;
            sum += weight;
        }
        sum = simd_sum(sum);
        if (HAS_SINKS && a.num_splits == 1) {
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
                    const float weight = counts ? own_scores[(position - split_start) * HEADS + h] : 0.0f;
#pragma clang loop unroll(full)
                    for (int d = 0; d < 8; ++d) {
                        values[h][d] = fma(weight, v[d], values[h][d]);
                    }
                }
            }
        }
    }
    // Reduces over the lanes of a simdgroup that have different keys, then over simdgroups.
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
        if (a.num_splits == 1) {
            out[(ulong(token) * a.num_heads + head) * head_dim + d] = value / sums[own_head];
        } else {
            const ulong record = (ulong(index.z) * a.num_heads + head) * a.num_splits + split;
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
HEAD_COUNTS(fp8_e4m3, Fp8)

// Merges the KV splits of a sequence: values in the order of splits, sums across lanes. A simdgroup has MERGED · LANES
// values of a head.
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
    const uint first = window_start / a.split_size;
    const uint last = (seq_len - 1) / a.split_size;
    device const float* records = partials + (ulong(index.y) * a.num_heads + head) * a.num_splits * record;
    // A lane for each split, or for every LANES-th one.
    float own_maximum = LOWEST;
    for (uint split = first + lane; split <= last; split += LANES) {
        own_maximum = max(own_maximum, records[split * record]);
    }
    const float maximum = simd_max(own_maximum);
    float own_sum = 0.0f;
    for (uint split = first + lane; split <= last; split += LANES) {
        own_sum += records[split * record + 1] * fast::exp2(records[split * record] - maximum);
    }
    const float sum_of_splits = simd_sum(own_sum);
    const float sum = HAS_SINKS ? with_sink(sum_of_splits, maximum, sinks[head]) : sum_of_splits;
    float values[MERGED] = {};
    for (uint start = first; start <= last; start += LANES) {
        const uint num_splits = min(last + 1 - start, uint(LANES));
        const float own_weight =
            lane < num_splits ? fast::exp2(records[(start + lane) * record] - maximum) : 0.0f;
        for (uint i = 0; i < num_splits; ++i) {
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
