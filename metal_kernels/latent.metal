// Latent attention between its projections and attention: writes each token's row to the cache, rotates the ends of
// queries, and reads rows back to expand keys and values from them.

#include "kv_cache.h"

struct LatentKvWriteArgs {
    Pages pages;      // rows of latent values and key
    uint num_heads;
    uint query_width;   // stride of tokens' queries
    uint query_stride;  // stride of heads' queries
    uint kv_width;      // stride of tokens; a row ends with the latent values and the key
    uint rank;          // latent values of a row, without the key
    uint num_pairs;     // half the values of the key
    float eps;
};

constant bool IS_INTERLEAVED [[function_constant(0)]];  // pairs (2i, 2i + 1); otherwise (i, i + num_pairs)

// Values of a row that a lane has in flight.
constant constexpr int TOGETHER = 8;

// A rotated value of a head's end.
inline float rotated_value(device const float* source, device const float* cosines, uint num_pairs, uint index) {
    const bool is_second = IS_INTERLEAVED ? index % 2 != 0 : index >= num_pairs;
    const uint pair = IS_INTERLEAVED ? index / 2 : is_second ? index - num_pairs : index;
    const float x = source[IS_INTERLEAVED ? 2 * pair : pair];
    const float y = source[IS_INTERLEAVED ? 2 * pair + 1 : pair + num_pairs];
    const float cosine = cosines[pair];
    const float sine = cosines[num_pairs + pair];
    return is_second ? fma(x, sine, y * cosine) : fma(x, cosine, -y * sine);
}

// One simdgroup for each query head of each token, and one for the row `[norm(latent), rotated key]`. A threadgroup has
// several simdgroups.
template <typename KV>
[[kernel]] void latent_kv_write(
    constant LatentKvWriteArgs& a [[buffer(0)]],
    device const float* queries [[buffer(1)]],
    device const float* kv [[buffer(2)]],
    device const uint* positions [[buffer(3)]],  // [token]
    device const uint* slots [[buffer(4)]],      // [token]
    device const float* norm [[buffer(5)]],      // [rank]
    device const float* table [[buffer(6)]],     // [position, cosines and sines, pair]
    device KV* cache [[buffer(7)]],              // rows of rank + 2 · pairs
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
    const uint num_rotated = 2 * a.num_pairs;
    const uint row_dim = a.rank + num_rotated;
    device const float* cosines = table + ulong(positions[token]) * (num_rotated + 1);
    if (head < a.num_heads) {
        device const float* source = queries + token * a.query_width + (head + 1) * a.query_stride - num_rotated;
        device float* target = out + (token * a.num_heads + head) * row_dim + a.rank;
        for (uint i = lane; i < num_rotated; i += LANES) {
            target[i] = rotated_value(source, cosines, a.num_pairs, i);
        }
        return;
    }
    // Only one simdgroup has the row, so its reads are issued together.
    device const float* latent = kv + token * a.kv_width + a.kv_width - row_dim;
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
    const uint row = row_of_slot(a.pages, 0, slots[token]);
    for (uint first = 0; first < row_dim; first += TOGETHER * LANES) {
        float values[TOGETHER];
        float weights[TOGETHER];
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            const uint value = first + i * LANES + lane;
            const uint existing = min(value, a.rank - 1);
            values[i] = latent[existing];
            weights[i] = norm[existing] * factor;
            if (value >= a.rank) {
                const uint of_key = min(value, row_dim - 1) - a.rank;
                values[i] = rotated_value(latent + a.rank, cosines, a.num_pairs, of_key);
                weights[i] = 1.0f;
            }
        }
#pragma clang loop unroll(full)
        for (int i = 0; i < TOGETHER; ++i) {
            if (first + i * LANES < row_dim) {
                put_group(a.pages, cache, row, row_dim, first + i * LANES, lane, values[i] * weights[i]);
            }
        }
    }
}

INSTANCE(latent_kv_write_f16, latent_kv_write, half)
INSTANCE(latent_kv_write_bf16, latent_kv_write, bfloat)
INSTANCE(latent_kv_write_f32, latent_kv_write, float)
INSTANCE(latent_kv_write_q8_0, latent_kv_write, Code)
INSTANCE(latent_kv_write_fp8_e4m3, latent_kv_write, Fp8)

struct LatentReadArgs {
    Pages pages;     // rows whose last values are rotated
    uint rank;
    uint num_heads;
    uint head_dim;   // values of a key, which ends with the rotated ones
    uint capacity;   // keys that each head has space for
    uint begin;      // first position
    uint end;        // after the last position
};

// Reads a span of the context: its latent values as activations, and its rotated keys as the ends of the keys of all
// heads. One simdgroup for each position; positions after the end repeat the last one.
template <typename KV, typename T>
[[kernel]] void latent_read(
    constant LatentReadArgs& a [[buffer(0)]],
    device const KV* cache [[buffer(1)]],
    device const uint* block_table [[buffer(2)]],
    device float* latent [[buffer(3)]],  // [position, rank]
    device T* keys [[buffer(4)]],        // [head, position, head_dim]
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint position = min(a.begin + index, a.end - 1);
    const uint row = row_of(a.pages, block_table, 0, position);
    const uint row_dim = a.pages.head_dim;
    for (uint i = lane; i < a.rank; i += LANES) {
        latent[index * a.rank + i] = value_of(a.pages, cache, row, row_dim, i);
    }
    const uint num_rotated = row_dim - a.rank;
    for (uint i = lane; i < num_rotated; i += LANES) {
        const T value = T(value_of(a.pages, cache, row, row_dim, a.rank + i));
        for (uint head = 0; head < a.num_heads; ++head) {
            keys[(head * a.capacity + index + 1) * a.head_dim - num_rotated + i] = value;
        }
    }
}

INSTANCE(latent_read_f16, latent_read, half, half)
INSTANCE(latent_read_bf16, latent_read, bfloat, float)
INSTANCE(latent_read_f32, latent_read, float, float)
INSTANCE(latent_read_q8_0, latent_read, Code, half)
INSTANCE(latent_read_fp8_e4m3, latent_read, Fp8, half)
