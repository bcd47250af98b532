// Between the projections and attention: norms of heads, rotation, and the way into the cache.
//
// One simdgroup for each head of each token, those of some heads in a threadgroup. Queries are rotated where they are; keys and values go to their
// slot of the cache, `[block][kv_head][slot][head_dim]`.

#include "threads.h"

struct RopeArgs {
    uint num_heads;
    uint num_kv_heads;
    uint head_dim;
    uint num_pairs;   // values that are rotated, divided by two
    uint block_size;
    float eps;        // of the norms
};

constant bool HAS_NORMS [[function_constant(0)]];
constant bool IS_INTERLEAVED [[function_constant(1)]];  // pairs are neighbours; otherwise halves

template <typename KV>
[[kernel]] void rope_kv_write(
    constant RopeArgs& a [[buffer(0)]],
    device float* qkv [[buffer(1)]],               // [token, (heads + 2 · kv_heads) · head_dim]
    device const uint* positions [[buffer(2)]],    // [token]
    device const uint* slots [[buffer(3)]],        // [token]
    device const float* q_norm [[buffer(4)]],      // [head_dim]
    device const float* k_norm [[buffer(5)]],      // [head_dim]
    device const float* table [[buffer(6)]],       // [position, cosines and sines, pair]
    device KV* k_cache [[buffer(7)]],
    device KV* v_cache [[buffer(8)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const uint head = index.x * num_groups + group;
    const uint token = index.y;
    const uint num_all = a.num_heads + 2 * a.num_kv_heads;
    if (head >= num_all) {
        return;
    }
    device float* values = qkv + (token * num_all + head) * a.head_dim;
    const bool is_query = head < a.num_heads;
    const bool is_value = head >= a.num_heads + a.num_kv_heads;
    const uint kv_head = (head - a.num_heads) % a.num_kv_heads;
    const uint slot = slots[token];
    const ulong row = (ulong(slot / a.block_size) * a.num_kv_heads + kv_head) * a.block_size + slot % a.block_size;
    if (is_value) {
        for (uint i = lane; i < a.head_dim; i += LANES) {
            v_cache[row * a.head_dim + i] = KV(values[i]);
        }
        return;
    }
    device const float* norm = is_query ? q_norm : k_norm;
    float factor = 1.0f;
    if (HAS_NORMS) {
        float squares = 0.0f;
        for (uint i = lane; i < a.head_dim; i += LANES) {
            squares += values[i] * values[i];
        }
        factor = rsqrt(simd_sum(squares) / float(a.head_dim) + a.eps);
        // All lanes have read what a lane writes below.
        simdgroup_barrier(mem_flags::mem_device);
    }
    device const float* cosines = table + ulong(positions[token]) * 2 * a.num_pairs;
    device const float* sines = cosines + a.num_pairs;
    device KV* key = k_cache + row * a.head_dim;
    for (uint pair = lane; pair < a.num_pairs; pair += LANES) {
        const uint first = IS_INTERLEAVED ? 2 * pair : pair;
        const uint second = IS_INTERLEAVED ? 2 * pair + 1 : pair + a.num_pairs;
        float x = values[first];
        float y = values[second];
        if (HAS_NORMS) {
            x *= factor * norm[first];
            y *= factor * norm[second];
        }
        const float rotated_x = x * cosines[pair] - y * sines[pair];
        const float rotated_y = x * sines[pair] + y * cosines[pair];
        if (is_query) {
            values[first] = rotated_x;
            values[second] = rotated_y;
        } else {
            key[first] = KV(rotated_x);
            key[second] = KV(rotated_y);
        }
    }
    for (uint i = 2 * a.num_pairs + lane; i < a.head_dim; i += LANES) {
        const float value = HAS_NORMS ? values[i] * factor * norm[i] : values[i];
        if (is_query) {
            values[i] = value;
        } else {
            key[i] = KV(value);
        }
    }
}

INSTANCE(rope_kv_write_f16, rope_kv_write, half)
INSTANCE(rope_kv_write_bf16, rope_kv_write, bfloat)
INSTANCE(rope_kv_write_f32, rope_kv_write, float)
