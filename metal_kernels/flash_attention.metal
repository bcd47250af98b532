// Attention of several tokens of a sequence over the paged cache: prompts, chunks of prompts, and tokens after a cached
// prefix.
//
// The rows of a tile are the query heads of one key head for a few neighbouring tokens. Each simdgroup has eight rows,
// with their scores and results in registers. Keys and values are loaded tile by tile, alternately, to the same
// threadgroup memory, and are read once for all rows. The matrix of scores exists only as tiles.
//
// With latent attention, keys and values are expanded from the cache's rows for a span of the context at a time, and
// each query head has its own. A row's running results at the end of a span are kept in memory for the next one.

#include "matrices.h"
#include "prefill.h"

// Threadgroup memory has keys and values in half precision if the cache has at most that precision; likewise queries.
template <typename KV>
struct Staged {
    typedef float type;
};
template <>
struct Staged<half> {
    typedef half type;
};
template <>
struct Staged<Code> {
    typedef half type;
};
template <>
struct Staged<Fp8> {
    typedef half type;
};

inline void put(Eight<half> values, threadgroup half* target) {
    *(threadgroup uint4*)target = values.bits;
}

inline void put(Eight<float> values, threadgroup float* target) {
    ((threadgroup float4*)target)[0] = values.low;
    ((threadgroup float4*)target)[1] = values.high;
}

inline void put(Eight<bfloat> values, threadgroup float* target) {
    float wide[8];
    unpack(values, wide);
    ((threadgroup float4*)target)[0] = float4(wide[0], wide[1], wide[2], wide[3]);
    ((threadgroup float4*)target)[1] = float4(wide[4], wide[5], wide[6], wide[7]);
}

template <typename KV>
inline void put(Eight<KV> values, threadgroup half* target) {
    float wide[8];
    unpack(values, wide);
    ((threadgroup half4*)target)[0] = half4(half(wide[0]), half(wide[1]), half(wide[2]), half(wide[3]));
    ((threadgroup half4*)target)[1] = half4(half(wide[4]), half(wide[5]), half(wide[6]), half(wide[7]));
}

// Stride of rows in threadgroup memory, in values: padded, so that the rows of a matrix lie in different banks.
template <int MAX_DIM>
constexpr int stride() {
    return MAX_DIM + 8;
}

// Copies rows of `dim` values to threadgroup memory, eight values at a time, padded to MAX_DIM values.
template <typename KV, typename T, int MAX_DIM, int KEYS, int NUM_THREADS>
inline void stage(
    constant Pages& pages,
    device const KV* cache,
    threadgroup const uint* cache_rows,
    threadgroup T* target,
    ushort dim,
    uint thread_index
) {
    constexpr int EIGHTHS = MAX_DIM / 8;
    constexpr int NUM_TURNS = KEYS * EIGHTHS / NUM_THREADS;
    static_assert(NUM_TURNS * NUM_THREADS == KEYS * EIGHTHS, "every thread has as much to do");
#pragma clang loop unroll(full)
    for (int turn = 0; turn < NUM_TURNS; ++turn) {
        const uint i = thread_index + turn * NUM_THREADS;
        const uint column = i % EIGHTHS * 8;
        if (column < dim) {
            const Eight<KV> eight = eight_of(pages, cache, cache_rows[i / EIGHTHS], dim, column);
            put(eight, target + i / EIGHTHS * stride<MAX_DIM>() + column);
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
    device float* out [[buffer(6)]],            // [token, head, value]
    device const float* rotated [[buffer(7)]],  // [token, head, rotated_width]
    device float* totals [[buffer(8)]],         // [token, head]: maximum and sum
    device const float* sinks [[buffer(9)]],    // [head]
    threadgroup char* memory [[threadgroup(0)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    typedef typename Staged<KV>::type T;
    constexpr int NUM_THREADS = SIMDGROUPS * LANES;
    constexpr int STRIDE = stride<MAX_DIM>();
    constexpr int MAX_FRAGMENTS = MAX_DIM / 8;
    threadgroup T* staged = (threadgroup T*)memory;
    threadgroup T* own_queries = staged + (KEYS + 8 * group) * STRIDE;
    threadgroup uint* cache_rows = (threadgroup uint*)(staged + (KEYS + 8 * SIMDGROUPS) * STRIDE);

    const uint kv_head = index.y;
    const uint num_tokens = tiles[index.x].num_tokens;
    const uint first_position = tiles[index.x].first_position;
    device const uint* block_table = block_tables + tiles[index.x].table_start;
    const uint heads_per_kv_head = a.num_heads / a.pages.num_kv_heads;
    const uint num_rows = num_tokens * heads_per_kv_head;

    // The lane's row: the indices of its queries and results, and the positions that it attends to.
    const Cell cell = cell_of(lane);
    const uint row = min(group * 8 + cell.row, num_rows - 1);
    const bool exists = group * 8 + cell.row < num_rows;
    const uint token = tiles[index.x].first_token + row / heads_per_kv_head;
    const uint head = kv_head * heads_per_kv_head + row % heads_per_kv_head;
    const uint own_position = first_position + row / heads_per_kv_head;
    const uint own_begin = own_position + 1 > a.window ? own_position + 1 - a.window : 0;

    device const float* row_of_q = q + token * a.q_stride + head * HEAD_DIM;
    device const float* rotated_end = rotated + (token * a.num_heads + head + 1) * a.span.rotated_width;
#pragma clang loop unroll_count(4)
    for (int fragment = 0; fragment < HEAD_DIM / 8; ++fragment) {
        const uint value = 8 * fragment + cell.column;
        device const float* own = row_of_q + value;
        if (HAS_SPANS && value >= a.span.num_plain) {
            own = rotated_end - (HEAD_DIM - value);
        }
        const float2 pair = *(device const float2*)own * a.scale;
        store_matrix(matrix_of<T>(T(pair.x), T(pair.y)), own_queries + 8 * fragment, STRIDE, cell);
    }
    simdgroup_float8x8 results[MAX_FRAGMENTS];
#pragma clang loop unroll(full)
    for (int fragment = 0; fragment < MAX_FRAGMENTS; ++fragment) {
        results[fragment] = matrix_of<float>(0.0f, 0.0f);
    }
    float maximum = LOWEST;
    float sum = 0.0f;
    if (HAS_SPANS && a.span.begin > 0) {
        device const float* total = totals + 2 * row_of_result(a, token, head);
        const bool is_row_owner = exists && cell.column == 0;
        maximum = maximum_of_row(is_row_owner ? total[0] : float(LOWEST));
        sum = sum_of_row(is_row_owner ? total[1] : 0.0f);
        device const float* so_far = out + row_of_result(a, token, head) * VALUE_DIM;
#pragma clang loop unroll(full)
        for (int fragment = 0; fragment < MAX_FRAGMENTS; ++fragment) {
            if (8 * fragment < VALUE_DIM) {
                device const float2* pair_so_far = (device const float2*)(so_far + 8 * fragment + cell.column);
                const float2 pair = exists ? *pair_so_far : float2(0.0f);
                results[fragment] = matrix_of<float>(pair.x, pair.y);
            }
        }
    }

    const uint last = first_position + num_tokens;
    const uint end = HAS_SPANS ? min(last, a.span.end) : last;
    const uint window_begin = first_position + 1 > a.window ? first_position + 1 - a.window : 0;
    const uint begin = HAS_SPANS ? a.span.begin : window_begin / KEYS * KEYS;
    if (thread_index < KEYS) {
        cache_rows[thread_index] = row_of_key(a, block_table, kv_head, min(begin + thread_index, end - 1));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first_key = begin; first_key < end; first_key += KEYS) {
        stage<KV, T, MAX_DIM, KEYS, NUM_THREADS>(a.pages, k_cache, cache_rows, staged, HEAD_DIM, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        simdgroup_float8x8 scores[KEYS / 8];
#pragma clang loop unroll(full)
        for (int key = 0; key < KEYS / 8; ++key) {
            scores[key] = matrix_of<float>(0.0f, 0.0f);
        }
        // Two at a time: the next operands are loaded meanwhile, and no value is spilled. The number of turns is known,
        // or Apple's compiler would not unroll a loop with operations of the simdgroup.
#pragma clang loop unroll_count(2)
        for (int fragment = 0; fragment < MAX_DIM / 8; ++fragment) {
            if (8 * fragment >= HEAD_DIM) {
                continue;
            }
            const simdgroup_matrix<T, 8, 8> query = load_matrix<T>(own_queries + 8 * fragment, STRIDE, cell);
#pragma clang loop unroll(full)
            for (int key = 0; key < KEYS / 8; ++key) {
                const simdgroup_matrix<T, 8, 8> keys =
                    load_transposed<T>(staged + 8 * key * STRIDE + 8 * fragment, STRIDE, cell);
                simdgroup_multiply_accumulate(scores[key], query, keys, scores[key]);
            }
        }

        // The four lanes of a row have its running maximum and sum.
        float own[KEYS / 4];
        float tile_maximum = LOWEST;
#pragma clang loop unroll(full)
        for (int i = 0; i < KEYS / 4; ++i) {
            const uint position = first_key + 8 * (i / 2) + cell.column + i % 2;
            const bool counts = position >= own_begin && position <= own_position;
            own[i] = counts ? scores[i / 2].thread_elements()[i % 2] : float(LOWEST);
            if (HAS_SOFT_CAP && counts) {
                own[i] = capped(own[i], a.soft_cap);
            }
            tile_maximum = max(tile_maximum, own[i]);
        }
        const float new_maximum = max(maximum, maximum_of_row(tile_maximum));
        const float factor = fast::exp2(maximum - new_maximum);
        maximum = new_maximum;
        float tile_sum = 0.0f;
#pragma clang loop unroll(full)
        for (int i = 0; i < KEYS / 4; ++i) {
            own[i] = own[i] > LOWEST ? fast::exp2(own[i] - maximum) : 0.0f;
            tile_sum += own[i];
        }
        sum = sum * factor + sum_of_row(tile_sum);

        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage<KV, T, MAX_DIM, KEYS, NUM_THREADS>(a.pages, v_cache, cache_rows, staged, VALUE_DIM, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
        for (int fragment = 0; fragment < MAX_FRAGMENTS; ++fragment) {
            if (8 * fragment < VALUE_DIM) {
                simdgroup_float8x8 result = results[fragment];
                result.thread_elements()[0] *= factor;
                result.thread_elements()[1] *= factor;
#pragma clang loop unroll(full)
                for (int key = 0; key < KEYS / 8; ++key) {
                    const simdgroup_float8x8 weights = matrix_of<float>(own[2 * key], own[2 * key + 1]);
                    const simdgroup_matrix<T, 8, 8> values =
                        load_matrix<T>(staged + 8 * key * STRIDE + 8 * fragment, STRIDE, cell);
                    simdgroup_multiply_accumulate(result, weights, values, result);
                }
                results[fragment] = result;
            }
        }
        if (thread_index < KEYS) {
            const uint position = min(first_key + KEYS + thread_index, end - 1);
            cache_rows[thread_index] = row_of_key(a, block_table, kv_head, position);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    if (!exists) {
        return;
    }
    const bool goes_on = HAS_SPANS && end < last;
    if (HAS_SINKS && !goes_on) {
        sum = with_sink(sum, maximum, sinks[head]);
    }
    const float inverse = goes_on ? 1.0f : sum > 0.0f ? 1.0f / sum : 0.0f;
    if (goes_on && cell.column == 0) {
        device float* total = totals + 2 * row_of_result(a, token, head);
        total[0] = maximum;
        total[1] = sum;
    }
    device float* row_of_out = out + row_of_result(a, token, head) * VALUE_DIM;
#pragma clang loop unroll(full)
    for (int fragment = 0; fragment < MAX_FRAGMENTS; ++fragment) {
        if (8 * fragment < VALUE_DIM) {
            const float2 pair = float2(results[fragment].thread_elements()[0], results[fragment].thread_elements()[1]);
            *(device float2*)(row_of_out + 8 * fragment + cell.column) = pair * inverse;
        }
    }
}

// The number of keys leaves space for several threadgroups per core, and registers for the results of long heads.
#define FLASH(NAME, KV, MAX_DIM, KEYS, SIMDGROUPS) \
    INSTANCE(flash_attention_##NAME##_##MAX_DIM##_##KEYS, flash_attention, KV, MAX_DIM, KEYS, SIMDGROUPS)
FLASH(f16, half, 64, 32, 4)
FLASH(f16, half, 128, 16, 4)
FLASH(f16, half, 128, 32, 4)
FLASH(f16, half, 192, 16, 4)
FLASH(f16, half, 256, 8, 4)
FLASH(q8_0, Code, 64, 32, 4)
FLASH(q8_0, Code, 128, 16, 4)
FLASH(q8_0, Code, 128, 32, 4)
FLASH(q8_0, Code, 192, 16, 4)
FLASH(q8_0, Code, 256, 8, 4)
FLASH(fp8_e4m3, Fp8, 64, 32, 4)
FLASH(fp8_e4m3, Fp8, 128, 16, 4)
FLASH(fp8_e4m3, Fp8, 128, 32, 4)
FLASH(fp8_e4m3, Fp8, 192, 16, 4)
FLASH(fp8_e4m3, Fp8, 256, 8, 4)
FLASH(bf16, bfloat, 64, 32, 4)
FLASH(bf16, bfloat, 128, 16, 4)
FLASH(bf16, bfloat, 192, 8, 2)
FLASH(bf16, bfloat, 256, 8, 2)
FLASH(f32, float, 64, 32, 4)
FLASH(f32, float, 128, 16, 4)
FLASH(f32, float, 192, 8, 2)
FLASH(f32, float, 256, 8, 2)
