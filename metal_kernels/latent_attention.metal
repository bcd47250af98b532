// Attention of one token over latent rows. All query heads share one key head, and the first values of its keys are
// also the values.
//
// The context is split at fixed positions, as in `paged_attention.metal`. A threadgroup takes one KV split and eight
// query heads, the rows of a matrix; other threadgroups read the same cache rows for other heads at the same time.
// Cache rows are read KEYS at a time, directly into matrices in registers. Each simdgroup has a slab of SLAB values of
// every row, and the same slab of all queries. It computes a partial sum of each score; these are reduced in
// threadgroup memory. After the softmax, the same registers are the values that are weighted. Scores are exponents of
// two: `scale` includes the logarithm.
//
// A simdgroup may assign its values to matrices freely if queries and results use the same assignment. A lane reads
// eight neighbours of a row at once, and matrix `m` has pair `m` of them.

#include "kv_cache.h"
#include "matrices.h"
#include "softmax.h"

struct LatentAttentionArgs {
    Pages pages;
    uint num_heads;
    uint value_dim;   // the first values of a row, which are its value
    uint q_stride;    // stride of tokens' queries, in values
    uint split_size;  // positions of a KV split, a multiple of KEYS
    uint num_splits;  // of the longest sequence
    float scale;      // of scores, times log2(e)
};

constant constexpr uint HEADS = 8;
// A key for each lane.
constant constexpr int KEYS = LANES;
constant constexpr int SLAB = 64;
// What a lane reads of a row at once belongs to PAIRS matrices.
constant constexpr int PAIRS = 4;
constant constexpr int READS = SLAB / (8 * PAIRS);
constant constexpr int VALUE_FRAGMENTS = SLAB / 8;
// Stride of a head's weights and partial scores in threadgroup memory: padded, so that the rows of a matrix lie in
// different banks.
constant constexpr int STRIDE = KEYS + 8;
constant constexpr int PART_STRIDE = KEYS + 4;

// Queries and weights are in half precision if the cache has at most that precision. The registers then keep all rows
// of an iteration until they are weighted; otherwise rows are loaded eight at a time, and again from the device's
// caches.
template <typename KV>
struct Staged {
    typedef float type;
    static constexpr constant int ROWS = 8;
};
template <>
struct Staged<half> {
    typedef half type;
    static constexpr constant int ROWS = KEYS;
};

template <>
struct Staged<Code> {
    typedef half type;
    static constexpr constant int ROWS = KEYS;
};

template <>
struct Staged<Fp8> {
    typedef half type;
    static constexpr constant int ROWS = KEYS;
};

inline vec<half, 2> pair_of(Eight<Fp8> values, int pair) {
    const uint both = values.bits[pair / 2] >> (16 * (pair % 2));
    return vec<half, 2>(half(value_of_fp8(both)), half(value_of_fp8(both >> 8)));
}

inline vec<half, 2> pair_of(Eight<Code> values, int pair) {
    const uint codes = values.codes[pair / 2] >> (16 * (pair % 2));
    const float2 both = float2(float(codes & 0xFF), float(codes >> 8 & 0xFF)) - float(ZERO_CODE);
    const float2 wide = both * float(values.scale);
    return vec<half, 2>(half(wide.x), half(wide.y));
}

inline vec<half, 2> pair_of(Eight<half> values, int pair) {
    return as_type<half2>(values.bits[pair]);
}

inline vec<float, 2> pair_of(Eight<bfloat> values, int pair) {
    return float2(as_type<float>(values.bits[pair] << 16), as_type<float>(values.bits[pair] & 0xFFFF0000u));
}

inline vec<float, 2> pair_of(Eight<float> values, int pair) {
    const float4 four = pair < 2 ? values.low : values.high;
    return float2(four[pair % 2 * 2], four[pair % 2 * 2 + 1]);
}

// A lane's segment of each of eight rows.
template <typename KV>
struct Rows {
    Eight<KV> values[READS];
};

// Reads the slab from value `begin` on of the rows whose indices lanes from `first` on hold.
template <typename KV, int EIGHTS>
inline void fetch(
    constant Pages& pages,
    device const KV* cache,
    uint row_of_lane,
    int first,
    uint begin,
    Cell cell,
    thread Rows<KV> (&rows)[EIGHTS]
) {
#pragma clang loop unroll(full)
    for (int eight = 0; eight < EIGHTS; ++eight) {
        const uint row = simd_shuffle(row_of_lane, ushort(first + 8 * eight + cell.row));
#pragma clang loop unroll(full)
        for (int i = 0; i < READS; ++i) {
            // Past the end of a row, its last values are repeated; zeros in the queries cancel them.
            const uint value = min(begin + (PAIRS * i + cell.column / 2) * 8, pages.head_dim - 8);
            rows[eight].values[i] = eight_of(pages, cache, row, pages.head_dim, value);
        }
    }
}

template <typename KV>
[[kernel]] void latent_attention(
    constant LatentAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],  // [token, head, row of the cache]
    device const KV* cache [[buffer(2)]],
    device const uint* block_tables [[buffer(3)]],
    device const DecodeRow* rows [[buffer(4)]],
    device float* out [[buffer(5)]],       // [token, head, value_dim]
    device float* partials [[buffer(6)]],  // [row, head, split, value_dim + 2]
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    typedef typename Staged<KV>::type T;
    constexpr int ROWS = Staged<KV>::ROWS;
    constexpr int EIGHTS = ROWS / 8;
    const uint split = index.y;
    const uint first_head = index.x * HEADS;
    const uint token = rows[index.z].token;
    const uint begin = split * a.split_size;
    const uint end = min(begin + a.split_size, rows[index.z].seq_len);
    if (begin >= end) {
        return;
    }
    device const uint* block_table = block_tables + rows[index.z].table_start;
    // Partial scores, [simdgroup][head][key]; running statistics of each head; weights, [head][key].
    threadgroup float* own_parts = memory + group * HEADS * PART_STRIDE;
    threadgroup float* maxima = memory + num_groups * HEADS * PART_STRIDE;
    threadgroup float* sums = maxima + HEADS;
    threadgroup float* factors = sums + HEADS;
    threadgroup T* weights = (threadgroup T*)(factors + HEADS);

    const Cell cell = cell_of(lane);
    const uint row_dim = a.pages.head_dim;
    const uint slab = group * SLAB;
    // The cache row of each lane's key; past the last position, that of the last one.
    uint next_row = row_of(a.pages, block_table, 0, min(begin + lane, end - 1));
    simdgroup_matrix<T, 8, 8> queries[VALUE_FRAGMENTS];
    float2 results[VALUE_FRAGMENTS];
#pragma clang loop unroll(full)
    for (int i = 0; i < READS; ++i) {
        // Transposed: a row is a value, a column a head. A lane has every other one of eight values of two heads.
        const uint value = slab + (PAIRS * i + cell.row / 2) * 8;
        const bool exists = value < row_dim;
        const bool is_odd = cell.row % 2 != 0;
        T own[PAIRS][2];
#pragma clang loop unroll(full)
        for (int j = 0; j < 2; ++j) {
            const uint head = min(first_head + cell.column + j, a.num_heads - 1);
            device const float* query = q + token * a.q_stride + head * row_dim + (exists ? value : 0);
            const float4 low = ((device const float4*)query)[0];
            const float4 high = ((device const float4*)query)[1];
            const float every_other[PAIRS] = {
                is_odd ? low.y : low.x, is_odd ? low.w : low.z, is_odd ? high.y : high.x, is_odd ? high.w : high.z
            };
#pragma clang loop unroll(full)
            for (int pair = 0; pair < PAIRS; ++pair) {
                own[pair][j] = exists ? T(every_other[pair] * a.scale) : T(0.0f);
            }
        }
#pragma clang loop unroll(full)
        for (int pair = 0; pair < PAIRS; ++pair) {
            queries[PAIRS * i + pair] = matrix_of<T>(own[pair][0], own[pair][1]);
            results[PAIRS * i + pair] = float2(0.0f, 0.0f);
        }
    }
    if (thread_index < HEADS) {
        maxima[thread_index] = LOWEST;
        sums[thread_index] = 0.0f;
    }

    for (uint first = begin; first < end; first += KEYS) {
        const uint own_row = next_row;
        Rows<KV> fetched[EIGHTS];
        if (ROWS == KEYS) {
            fetch<KV>(a.pages, cache, own_row, 0, slab, cell, fetched);
        }
        next_row = row_of(a.pages, block_table, 0, min(first + KEYS + lane, end - 1));
#pragma clang loop unroll(disable)
        for (int key = 0; key < KEYS; key += ROWS) {
            if (ROWS < KEYS) {
                fetch<KV>(a.pages, cache, own_row, key, slab, cell, fetched);
            }
#pragma clang loop unroll(full)
            for (int eight = 0; eight < EIGHTS; ++eight) {
                simdgroup_float8x8 part = matrix_of<float>(0.0f, 0.0f);
#pragma clang loop unroll(full)
                for (int p = 0; p < VALUE_FRAGMENTS; ++p) {
                    const vec<T, 2> pair = pair_of(fetched[eight].values[p / PAIRS], p % PAIRS);
                    simdgroup_multiply_accumulate(part, matrix_of<T>(pair.x, pair.y), queries[p], part);
                }
                // Transposed, so that lanes add neighbours.
                threadgroup float* at = own_parts + cell.column * PART_STRIDE + key + 8 * eight + cell.row;
                at[0] = part.thread_elements()[0];
                at[PART_STRIDE] = part.thread_elements()[1];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // A lane for each key.
        for (uint head = group; head < HEADS; head += num_groups) {
            float score = 0.0f;
            for (uint g = 0; g < num_groups; ++g) {
                score += memory[(g * HEADS + head) * PART_STRIDE + lane];
            }
            const bool counts = first + lane < end;
            const float old_maximum = simd_shuffle(lane == 0 ? maxima[head] : 0.0f, 0);
            const float maximum = max(old_maximum, simd_max(counts ? score : float(LOWEST)));
            const T weight = T(counts ? fast::exp2(score - maximum) : 0.0f);
            weights[head * STRIDE + lane] = weight;
            const float sum = simd_sum(float(weight));
            if (lane == 0) {
                const float factor = fast::exp2(old_maximum - maximum);
                maxima[head] = maximum;
                sums[head] = sums[head] * factor + sum;
                factors[head] = factor;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(disable)
        for (int key = 0; key < KEYS; key += ROWS) {
            if (ROWS < KEYS) {
                fetch<KV>(a.pages, cache, own_row, key, slab, cell, fetched);
            }
            const float factor = key == 0 ? factors[cell.row] : 1.0f;
#pragma clang loop unroll(full)
            for (int p = 0; p < VALUE_FRAGMENTS; ++p) {
                simdgroup_float8x8 sum = matrix_of<float>(0.0f, 0.0f);
#pragma clang loop unroll(full)
                for (int eight = 0; eight < EIGHTS; ++eight) {
                    const vec<T, 2> pair = pair_of(fetched[eight].values[p / PAIRS], p % PAIRS);
                    const simdgroup_matrix<T, 8, 8> own_weights =
                        load_matrix<T>(weights + key + 8 * eight, STRIDE, cell);
                    simdgroup_multiply_accumulate(sum, own_weights, matrix_of<T>(pair.x, pair.y), sum);
                }
                results[p].x = fma(results[p].x, factor, sum.thread_elements()[0]);
                results[p].y = fma(results[p].y, factor, sum.thread_elements()[1]);
            }
        }
    }

    const uint head = first_head + cell.row;
    if (head >= a.num_heads) {
        return;
    }
    const bool is_whole = a.num_splits == 1;
    const ulong record = (ulong(index.z) * a.num_heads + head) * a.num_splits + split;
    device float* own_record = partials + record * (a.value_dim + 2);
    device float* target = is_whole ? out + (ulong(token) * a.num_heads + head) * a.value_dim : own_record + 2;
    // The same arithmetic as in the kernel that merges splits: a context with one split has the same bits whether or
    // not others of the launch have several.
    const float divisor = is_whole ? sums[cell.row] : 1.0f;
    if (!is_whole && group == 0 && cell.column == 0) {
        own_record[0] = maxima[cell.row];
        own_record[1] = sums[cell.row];
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < VALUE_FRAGMENTS; ++p) {
        const uint value = slab + (p / PAIRS * PAIRS + cell.column / 2) * 8 + p % PAIRS * 2;
        if (value < a.value_dim) {
            *(device float2*)(target + value) = results[p] / divisor;
        }
    }
}

INSTANCE(latent_attention_f16, latent_attention, half)
INSTANCE(latent_attention_bf16, latent_attention, bfloat)
INSTANCE(latent_attention_f32, latent_attention, float)
INSTANCE(latent_attention_q8_0, latent_attention, Code)
INSTANCE(latent_attention_fp8_e4m3, latent_attention, Fp8)
