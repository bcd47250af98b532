// Between the projections of latent attention and attention: the row of each token on its way into the cache, and the
// rotated ends of queries; and rows on their way out of it, where keys and values are made of them.

#include "threads.h"

struct LatentKvWriteArgs {
    uint num_heads;
    uint query_width;   // values from one token's queries to the next
    uint query_stride;  // values from one head to the next
    uint kv_width;      // values from one token to the next; a row ends with the latent one and the key
    uint rank;          // values of the latent row, without the key
    uint num_pairs;     // values of the key, divided by two
    float eps;
};

constant bool IS_INTERLEAVED [[function_constant(0)]];  // pairs are neighbours; otherwise halves

// Values of a row that a lane has under way.
constant constexpr int TOGETHER = 8;

// One simdgroup for each query head of each token, and one for the row `[norm(latent), rotated key]`; some of them in a
// threadgroup.
template <typename KV>
[[kernel]] void latent_kv_write(
    constant LatentKvWriteArgs& a [[buffer(0)]],
    device const float* queries [[buffer(1)]],
    device const float* kv [[buffer(2)]],
    device const uint* positions [[buffer(3)]],  // [token]
    device const uint* slots [[buffer(4)]],      // [token]
    device const float* norm [[buffer(5)]],      // [rank]
    device const float* table [[buffer(6)]],     // [position, cosines and sines, pair]
    device KV* cache [[buffer(7)]],              // [slot, rank + 2 · pairs]
    device float* out [[buffer(8)]],             // [token, head, rank + 2 · pairs]
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const uint head = index.x * num_groups + group;
    const uint token = index.y;
    if (head > a.num_heads) {
        return;
    }
    const bool is_query = head < a.num_heads;
    const uint num_rotated = 2 * a.num_pairs;
    const uint row_dim = a.rank + num_rotated;
    device const float* latent = kv + token * a.kv_width + a.kv_width - row_dim;
    device const float* source =
        is_query ? queries + token * a.query_width + (head + 1) * a.query_stride - num_rotated : latent + a.rank;
    device float* target = out + (token * a.num_heads + head) * row_dim + a.rank;
    device KV* row = cache + ulong(slots[token]) * row_dim;
    device const float* cosines = table + ulong(positions[token]) * (num_rotated + 1);
    device const float* sines = cosines + a.num_pairs;
    for (uint pair = lane; pair < a.num_pairs; pair += LANES) {
        const uint first = IS_INTERLEAVED ? 2 * pair : pair;
        const uint second = IS_INTERLEAVED ? 2 * pair + 1 : pair + a.num_pairs;
        const float x = source[first];
        const float y = source[second];
        const float rotated_x = x * cosines[pair] - y * sines[pair];
        const float rotated_y = x * sines[pair] + y * cosines[pair];
        if (is_query) {
            target[first] = rotated_x;
            target[second] = rotated_y;
        } else {
            row[a.rank + first] = KV(rotated_x);
            row[a.rank + second] = KV(rotated_y);
        }
    }
    if (is_query) {
        return;
    }
    // There is one simdgroup for a row: what it reads is under way together.
    float squares = 0.0f;
    for (uint first = lane; first < a.rank; first += TOGETHER * LANES) {
        float values[TOGETHER];
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            values[i] = latent[min(first + i * LANES, a.rank - 1)];
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            squares += first + i * LANES < a.rank ? values[i] * values[i] : 0.0f;
        }
    }
    const float factor = rsqrt(simd_sum(squares) / float(a.rank) + a.eps);
    for (uint first = lane; first < a.rank; first += TOGETHER * LANES) {
        float values[TOGETHER];
        float weights[TOGETHER];
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            const uint existing = min(first + i * LANES, a.rank - 1);
            values[i] = latent[existing];
            weights[i] = norm[existing];
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            if (first + i * LANES < a.rank) {
                row[first + i * LANES] = KV(values[i] * factor * weights[i]);
            }
        }
    }
}

INSTANCE(latent_kv_write_f16, latent_kv_write, half)
INSTANCE(latent_kv_write_bf16, latent_kv_write, bfloat)
INSTANCE(latent_kv_write_f32, latent_kv_write, float)

struct LatentReadArgs {
    uint block_size;
    uint row_dim;    // values of a row of the cache, of which the last ones are rotated
    uint rank;
    uint num_heads;
    uint head_dim;   // values of a key, which ends with the rotated ones
    uint capacity;   // keys that there is room for, of each head
    uint begin;      // the first position
    uint end;        // behind the last one
};

// The latent values of a span of the context as activations, and its rotated keys as the ends of the keys of all heads.
// One simdgroup for each position; those behind the last one have what the last one has.
template <typename KV, typename T>
[[kernel]] void latent_read(
    constant LatentReadArgs& a [[buffer(0)]],
    device const KV* cache [[buffer(1)]],  // [slot, row_dim]
    device const uint* block_table [[buffer(2)]],
    device float* latent [[buffer(3)]],  // [position, rank]
    device T* keys [[buffer(4)]],        // [head, position, head_dim]
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint position = min(a.begin + index, a.end - 1);
    const uint slot = block_table[position / a.block_size] * a.block_size + position % a.block_size;
    device const KV* row = cache + ulong(slot) * a.row_dim;
    for (uint i = lane; i < a.rank; i += LANES) {
        latent[index * a.rank + i] = float(row[i]);
    }
    const uint num_rotated = a.row_dim - a.rank;
    for (uint i = lane; i < num_rotated; i += LANES) {
        const T value = T(row[a.rank + i]);
        for (uint head = 0; head < a.num_heads; ++head) {
            keys[(head * a.capacity + index + 1) * a.head_dim - num_rotated + i] = value;
        }
    }
}

INSTANCE(latent_read_f16, latent_read, half, half)
INSTANCE(latent_read_bf16, latent_read, bfloat, float)
INSTANCE(latent_read_f32, latent_read, float, float)
