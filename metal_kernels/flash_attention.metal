// Attention of several tokens of a sequence over the paged cache: prompts, pieces of prompts, and what follows a
// prefix that was found in the cache.
//
// The rows of a tile are the query heads of one key head, for a few neighbouring tokens. Each simdgroup has eight
// rows, with the whole of their results in registers. The keys and values of the context come by in tiles through
// threadgroup memory and are read once for all rows. No matrix of scores exists beyond a tile.

#include "kv_cache.h"

struct FlashAttentionArgs {
    Pages pages;
    uint num_heads;
    uint q_stride;  // values from one token's queries to the next
    uint window;    // positions that a token attends to, itself included
    float scale;    // of scores, times log2(e)
};

// Neighbouring tokens of one sequence.
struct PrefillTile {
    uint first_token;     // of the step: the row of q and of the result
    uint num_tokens;
    uint first_position;  // of the first token in its sequence
    uint table_start;     // of the sequence's block table
};

// Keys and values wait in half precision if they are so in the cache, queries likewise.
template <typename KV>
struct Staged {
    typedef float type;
};
template <>
struct Staged<half> {
    typedef half type;
};

// Copies `num_rows` rows of the cache to threadgroup memory.
template <typename KV, typename T>
inline void stage(
    device const KV* cache,
    threadgroup const uint* rows,
    uint num_rows,
    uint head_dim,
    threadgroup T* target,
    uint stride,
    uint thread_index,
    uint num_threads
) {
    const uint eighths = head_dim / 8;
    for (uint i = thread_index; i < num_rows * eighths; i += num_threads) {
        const uint row = i / eighths;
        const uint column = i % eighths * 8;
        float values[8];
        unpack(*(device const Eight<KV>*)(cache + ulong(rows[row]) * head_dim + column), values);
        for (int d = 0; d < 8; ++d) {
            target[row * stride + column + d] = T(values[d]);
        }
    }
}

template <typename KV, int MAX_DIM, int KEYS, int SIMDGROUPS>
[[kernel]] void flash_attention(
    constant FlashAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],
    device const KV* k_cache [[buffer(2)]],
    device const KV* v_cache [[buffer(3)]],
    device const uint* block_tables [[buffer(4)]],
    device const PrefillTile* tiles [[buffer(5)]],
    device float* out [[buffer(6)]],  // [token, head, head_dim]
    threadgroup char* memory [[threadgroup(0)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    typedef typename Staged<KV>::type T;
    constexpr int NUM_THREADS = SIMDGROUPS * LANES;
    constexpr int ROWS = 8 * SIMDGROUPS;
    constexpr int STRIDE = MAX_DIM + 8;
    constexpr int SCORE_STRIDE = KEYS + 4;
    threadgroup T* staged_q = (threadgroup T*)memory;
    threadgroup T* staged_kv = staged_q + ROWS * STRIDE;
    threadgroup float* scores = (threadgroup float*)(staged_kv + KEYS * STRIDE);
    threadgroup float* diagonals = scores + ROWS * SCORE_STRIDE;
    threadgroup uint* cache_rows = (threadgroup uint*)(diagonals + SIMDGROUPS * 64);

    const uint kv_head = index.y;
    const uint first_token = tiles[index.x].first_token;
    const uint num_tokens = tiles[index.x].num_tokens;
    const uint first_position = tiles[index.x].first_position;
    device const uint* block_table = block_tables + tiles[index.x].table_start;
    const uint head_dim = a.pages.head_dim;
    const uint num_pieces = head_dim / 8;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint num_rows = num_tokens * heads_per_kv_head;

    for (uint i = thread_index; i < ROWS * head_dim; i += NUM_THREADS) {
        const uint row = i / head_dim;
        const uint d = i % head_dim;
        float value = 0.0f;
        if (row < num_rows) {
            const uint token = first_token + row / heads_per_kv_head;
            const uint head = kv_head * heads_per_kv_head + row % heads_per_kv_head;
            value = q[token * a.q_stride + head * head_dim + d] * a.scale;
        }
        staged_q[row * STRIDE + d] = T(value);
    }

    // Four lanes share a row of scores and know its running maximum and sum.
    const uint own_row = group * 8 + lane / 4;
    const uint own_position = first_position + min(own_row, num_rows - 1) / heads_per_kv_head;
    const uint own_begin = own_position + 1 > a.window ? own_position + 1 - a.window : 0;
    float maximum = LOWEST;
    float sum = 0.0f;
    simdgroup_float8x8 results[MAX_DIM / 8];
#pragma clang loop unroll(full)
    for (int piece = 0; piece < MAX_DIM / 8; ++piece) {
        results[piece] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    const simdgroup_float8x8 zero = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    threadgroup T* own_q = staged_q + group * 8 * STRIDE;
    threadgroup float* own_scores = scores + group * 8 * SCORE_STRIDE;
    threadgroup float* diagonal = diagonals + group * 64;

    const uint end = first_position + num_tokens;
    const uint begin = first_position + 1 > a.window ? first_position + 1 - a.window : 0;
    for (uint first_key = begin / KEYS * KEYS; first_key < end; first_key += KEYS) {
        if (thread_index < KEYS) {
            const uint position = min(first_key + thread_index, end - 1);
            cache_rows[thread_index] = row_of(a.pages, block_table, kv_head, position);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<KV, T>(k_cache, cache_rows, KEYS, head_dim, staged_kv, STRIDE, thread_index, NUM_THREADS);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 products[KEYS / 8];
        for (int key = 0; key < KEYS / 8; ++key) {
            products[key] = zero;
        }
        for (uint piece = 0; piece < num_pieces; ++piece) {
            simdgroup_matrix<T, 8, 8> query;
            simdgroup_load(query, own_q + 8 * piece, STRIDE);
            for (int key = 0; key < KEYS / 8; ++key) {
                simdgroup_matrix<T, 8, 8> keys;
                simdgroup_load(keys, staged_kv + 8 * key * STRIDE + 8 * piece, STRIDE, ulong2(0, 0), true);
                simdgroup_multiply_accumulate(products[key], query, keys, products[key]);
            }
        }
        for (int key = 0; key < KEYS / 8; ++key) {
            simdgroup_store(products[key], own_scores + 8 * key, SCORE_STRIDE);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);

        threadgroup float* row_scores = own_scores + lane / 4 * SCORE_STRIDE;
        float own[KEYS / 4];
        float tile_maximum = LOWEST;
        for (int i = 0; i < KEYS / 4; ++i) {
            const uint position = first_key + 4 * i + lane % 4;
            const bool counts = position >= own_begin && position <= own_position;
            own[i] = counts ? row_scores[4 * i + lane % 4] : LOWEST;
            tile_maximum = max(tile_maximum, own[i]);
        }
        tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, 1));
        tile_maximum = max(tile_maximum, simd_shuffle_xor(tile_maximum, 2));
        const float new_maximum = max(maximum, tile_maximum);
        const float factor = fast::exp2(maximum - new_maximum);
        maximum = new_maximum;
        float tile_sum = 0.0f;
        for (int i = 0; i < KEYS / 4; ++i) {
            const float weight = own[i] > LOWEST ? fast::exp2(own[i] - maximum) : 0.0f;
            tile_sum += weight;
            row_scores[4 * i + lane % 4] = weight;
        }
        sum = sum * factor + sum_of_lanes(tile_sum, 4);
        // Results so far are multiplied with their rows' factors: a product with a diagonal matrix, of which a
        // lane has two values in its own row.
        const uint column = lane % 4 * 2;
        diagonal[lane * 2] = column == lane / 4 ? factor : 0.0f;
        diagonal[lane * 2 + 1] = column + 1 == lane / 4 ? factor : 0.0f;

        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<KV, T>(v_cache, cache_rows, KEYS, head_dim, staged_kv, STRIDE, thread_index, NUM_THREADS);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 factors;
        simdgroup_load(factors, diagonal, 8);
        simdgroup_float8x8 weights[KEYS / 8];
        for (int key = 0; key < KEYS / 8; ++key) {
            simdgroup_load(weights[key], own_scores + 8 * key, SCORE_STRIDE);
        }
        // Unrolled, so that results are in registers.
#pragma clang loop unroll(full)
        for (int piece = 0; piece < MAX_DIM / 8; ++piece) {
            if (piece < int(num_pieces)) {
                simdgroup_float8x8 result;
                simdgroup_multiply(result, factors, results[piece]);
                for (int key = 0; key < KEYS / 8; ++key) {
                    simdgroup_matrix<T, 8, 8> values;
                    simdgroup_load(values, staged_kv + 8 * key * STRIDE + 8 * piece, STRIDE);
                    simdgroup_multiply_accumulate(result, weights[key], values, result);
                }
                results[piece] = result;
            }
        }
    }

    // The results go out through the memory of the queries, piece by piece.
    threadgroup float* own_results = (threadgroup float*)own_q;
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma clang loop unroll(full)
    for (int piece = 0; piece < MAX_DIM / 8; ++piece) {
        if (piece < int(num_pieces)) {
            simdgroup_store(results[piece], own_results, 8);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            if (own_row < num_rows) {
                const uint token = first_token + own_row / heads_per_kv_head;
                const uint head = kv_head * heads_per_kv_head + own_row % heads_per_kv_head;
                const uint d = 8 * piece + lane % 4 * 2;
                device float* target = out + (ulong(token) * a.num_heads + head) * head_dim + d;
                target[0] = own_results[lane * 2] * inverse;
                target[1] = own_results[lane * 2 + 1] * inverse;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// The tiles are as large as threadgroup memory allows.
#define FLASH(NAME, KV, MAX_DIM, KEYS, SIMDGROUPS)                                            \
    template [[host_name("flash_attention_" NAME "_" #MAX_DIM)]] [[kernel]] decltype(         \
        flash_attention<KV, MAX_DIM, KEYS, SIMDGROUPS>)                                       \
        flash_attention<KV, MAX_DIM, KEYS, SIMDGROUPS>;
FLASH("f16", half, 64, 32, 4)
FLASH("f16", half, 128, 32, 4)
FLASH("f16", half, 256, 16, 4)
FLASH("bf16", bfloat, 64, 32, 4)
FLASH("bf16", bfloat, 128, 16, 4)
FLASH("bf16", bfloat, 256, 8, 2)
FLASH("f32", float, 64, 32, 4)
FLASH("f32", float, 128, 16, 4)
FLASH("f32", float, 256, 8, 2)
