// Between the projections of latent attention and attention: the row of each token on its way into the cache, and the
// rotated ends of queries.
//
// One simdgroup for each query head of each token, and one for the row `[norm(latent), rotated key]`.

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
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint head = index.x;
    const uint token = index.y;
    const bool is_query = head < a.num_heads;
    const uint num_rotated = 2 * a.num_pairs;
    const uint row_dim = a.rank + num_rotated;
    device const float* latent = kv + token * a.kv_width + a.kv_width - row_dim;
    device const float* source =
        is_query ? queries + token * a.query_width + (head + 1) * a.query_stride - num_rotated : latent + a.rank;
    device float* target = out + (token * a.num_heads + head) * row_dim + a.rank;
    device KV* row = cache + ulong(slots[token]) * row_dim;
    device const float* cosines = table + ulong(positions[token]) * num_rotated;
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
    float squares = 0.0f;
    for (uint i = lane; i < a.rank; i += LANES) {
        squares += latent[i] * latent[i];
    }
    const float factor = rsqrt(simd_sum(squares) / float(a.rank) + a.eps);
    for (uint i = lane; i < a.rank; i += LANES) {
        row[i] = KV(latent[i] * factor * norm[i]);
    }
}

template [[host_name("latent_kv_write_f16")]] [[kernel]] decltype(latent_kv_write<half>) latent_kv_write<half>;
template [[host_name("latent_kv_write_bf16")]] [[kernel]] decltype(latent_kv_write<bfloat>) latent_kv_write<bfloat>;
template [[host_name("latent_kv_write_f32")]] [[kernel]] decltype(latent_kv_write<float>) latent_kv_write<float>;
