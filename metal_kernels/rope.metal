// Norms of heads, rotation and the write to the cache, between the projections and attention.
//
// One simdgroup for each head of each token, several in a threadgroup. Queries and keys are rotated in place; keys and
// values are then written to their slot of the cache.

#include "kv_cache.h"
#include "rope.h"

struct RopeArgs {
    Pages pages;
    uint num_heads;
    Rotation rotation;
};

template <typename KV>
[[kernel]] void rope_kv_write(
    constant RopeArgs& a [[buffer(0)]],
    device float* qkv [[buffer(1)]],               // [token, (heads + 2 · kv_heads) · head_dim]
    device const uint* positions [[buffer(2)]],    // [token]
    device const uint* slots [[buffer(3)]],        // [token]
    device const float* q_norm [[buffer(4)]],      // [head_dim]
    device const float* k_norm [[buffer(5)]],      // [head_dim]
    device const float* table [[buffer(6)]],       // [position, cosines, sines and one factor]
    device KV* k_cache [[buffer(7)]],
    device KV* v_cache [[buffer(8)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    const uint head = index.x * num_groups + group;
    const uint token = index.y;
    const uint num_kv_heads = a.pages.num_kv_heads;
    const uint head_dim = a.pages.head_dim;
    const uint num_all = a.num_heads + 2 * num_kv_heads;
    if (head >= num_all) {
        return;
    }
    device float* values = qkv + (token * num_all + head) * head_dim;
    const bool is_query = head < a.num_heads;
    const bool is_value = head >= a.num_heads + num_kv_heads;
    if (!is_value) {
        device const float* norm = is_query ? q_norm : k_norm;
        const uint num_pairs = head_dim / 2;
        float factor = 1.0f;
        if (HAS_NORMS) {
            float squares = 0.0f;
            for (uint pair = lane; pair < num_pairs; pair += LANES) {
                squares = add_squares(pair_at(values, indices_of(a.rotation, pair)), squares);
            }
            factor = factor_of(a.rotation, squares);
        }
        device const float* angles = angles_at(a.rotation, table, positions[token]);
        const float scale = is_query ? query_factor(a.rotation, angles) : 1.0f;
        for (uint pair = lane; pair < num_pairs; pair += LANES) {
            const uint2 indices = indices_of(a.rotation, pair);
            float2 own = pair_at(values, indices);
            if (HAS_NORMS) {
                own = normed(own, factor, pair_at(norm, indices));
            }
            own = rotated(own, turn_of(a.rotation, angles, pair)) * scale;
            values[indices.x] = own.x;
            values[indices.y] = own.y;
        }
    }
    if (is_query) {
        return;
    }
    // A lane writes values that others have rotated.
    simdgroup_barrier(mem_flags::mem_device);
    const uint row = row_of_slot(a.pages, (head - a.num_heads) % num_kv_heads, slots[token]);
    device KV* cache = is_value ? v_cache : k_cache;
    for (uint first = 0; first < head_dim; first += LANES) {
        put_group(a.pages, cache, row, head_dim, first, lane, values[min(first + lane, head_dim - 1)]);
    }
}

INSTANCE(rope_kv_write_f16, rope_kv_write, half)
INSTANCE(rope_kv_write_bf16, rope_kv_write, bfloat)
INSTANCE(rope_kv_write_f32, rope_kv_write, float)
INSTANCE(rope_kv_write_q8_0, rope_kv_write, Code)
INSTANCE(rope_kv_write_fp8_e4m3, rope_kv_write, Fp8)
