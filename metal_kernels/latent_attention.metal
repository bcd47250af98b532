// Attention of one token over latent rows. All query heads share one key head, and the first values of its keys are
// also the values.
//
// The context is split at fixed positions, as in `paged_attention.metal`. A threadgroup takes one KV split and eight
// query heads, the rows of a matrix; other threadgroups read the same cache rows for other heads at the same time.
// Cache rows are read KEYS at a time, directly into matrices in registers. Each simdgroup has VALUES values of every
// row, OTHERS of what a row has besides its value, and the same of all queries. It computes a partial sum of each score.
// These are reduced in threadgroup memory by every simdgroup for itself, so weights, maxima and sums stay in registers,
// and there is one barrier for KEYS rows. After the softmax, the same registers are the values that are weighted. The
// rows of the next turn are fetched meanwhile. Scores are exponents of two: `scale` includes the logarithm.
//
// A simdgroup may assign its values to matrices freely if queries and results use the same assignment. A lane reads
// eight neighbours of a row at once, and matrix `m` has pair `m` of them. Of what is no value, two lanes have the same
// eight, each a half of it.

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

// A simdgroup has more registers on NVIDIA's GPUs if no threadgroup has more threads.
#define MAX_THREADS 192

constant constexpr uint HEADS = 8;
constant constexpr int KEYS = 16;
constant constexpr int VALUES = 128;
constant constexpr int OTHERS = 16;
// What a lane reads of a row at once belongs to PAIRS matrices.
constant constexpr int PAIRS = 4;
constant constexpr int READS = VALUES / (8 * PAIRS);
constant constexpr int VALUE_FRAGMENTS = VALUES / 8;
constant constexpr int OTHER_FRAGMENTS = OTHERS / 8;
constant constexpr int FRAGMENTS = VALUE_FRAGMENTS + OTHER_FRAGMENTS;
// Stride of a head's partial scores in threadgroup memory: padded, so that the rows of a matrix lie in different banks.
constant constexpr int PART_STRIDE = KEYS + 4;

// Queries and weights are in half precision if the cache has at most that precision. The registers then keep all rows
// of a turn until they are weighted, and those of the next one; otherwise rows are loaded eight at a time, and again
// from the device's caches.
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
    Eight<KV> others;
};

// The matrix of eight rows and eight of the simdgroup's values: row keys, columns values.
template <typename T, typename KV>
inline simdgroup_matrix<T, 8, 8> matrix_of_rows(Rows<KV> rows, int fragment) {
    const vec<T, 2> pair = pair_of(rows.values[fragment / PAIRS], fragment % PAIRS);
    return matrix_of<T>(pair.x, pair.y);
}

// The same for what is no value.
template <typename T, typename KV>
inline simdgroup_matrix<T, 8, 8> matrix_of_others(Rows<KV> rows, int fragment, Cell cell) {
    const bool is_upper = cell.column / 2 % 2 != 0;
    const vec<T, 2> lower = pair_of(rows.others, fragment);
    const vec<T, 2> upper = pair_of(rows.others, fragment + PAIRS / 2);
    return matrix_of<T>(is_upper ? upper.x : lower.x, is_upper ? upper.y : lower.y);
}

// Reads the simdgroup's values of the rows whose indices lanes from `first` on hold.
template <typename KV, int EIGHTS>
inline void fetch(
    constant LatentAttentionArgs& a,
    device const KV* cache,
    uint row_of_lane,
    int first,
    uint group,
    Cell cell,
    thread Rows<KV> (&rows)[EIGHTS]
) {
    const uint row_dim = a.pages.head_dim;
#pragma clang loop unroll(full)
    for (int eight = 0; eight < EIGHTS; ++eight) {
        const uint row = simd_shuffle(row_of_lane, ushort(first + 8 * eight + cell.row));
        // Past an end, its last values are repeated; zeros in the queries cancel them.
#pragma clang loop unroll(full)
        for (int i = 0; i < READS; ++i) {
            const uint value = min(group * VALUES + (PAIRS * i + cell.column / 2) * 8, a.value_dim - 8);
            rows[eight].values[i] = eight_of(a.pages, cache, row, row_dim, value);
        }
        const uint other = min(a.value_dim + group * OTHERS + cell.column / 4 * 8, row_dim - 8);
        rows[eight].others = eight_of(a.pages, cache, row, row_dim, other);
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

    const Cell cell = cell_of(lane);
    const uint row_dim = a.pages.head_dim;
    simdgroup_matrix<T, 8, 8> queries[FRAGMENTS];
    float2 results[VALUE_FRAGMENTS];
    const bool is_odd = cell.row % 2 != 0;
    // Transposed: a row is a value, a column a head. A lane has every other one of eight values of two heads.
#pragma clang loop unroll(full)
    for (int i = 0; i < READS; ++i) {
        const uint value = group * VALUES + (PAIRS * i + cell.row / 2) * 8;
        const bool exists = value < a.value_dim;
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
    // Likewise every other one of four values.
    {
        const uint other = a.value_dim + group * OTHERS + cell.row / 2 * 4;
        const bool exists = other < row_dim;
        T own[OTHER_FRAGMENTS][2];
#pragma clang loop unroll(full)
        for (int j = 0; j < 2; ++j) {
            const uint head = min(first_head + cell.column + j, a.num_heads - 1);
            device const float* query = q + token * a.q_stride + head * row_dim + (exists ? other : 0);
            const float4 four = *(device const float4*)query;
            own[0][j] = exists ? T((is_odd ? four.y : four.x) * a.scale) : T(0.0f);
            own[1][j] = exists ? T((is_odd ? four.w : four.z) * a.scale) : T(0.0f);
        }
        queries[VALUE_FRAGMENTS] = matrix_of<T>(own[0][0], own[0][1]);
        queries[VALUE_FRAGMENTS + 1] = matrix_of<T>(own[1][0], own[1][1]);
    }
    // Of the lane's head: the largest score, and the sum of weights.
    float maximum = LOWEST;
    float sum = 0.0f;

    // The cache row of each lane's key; past the last position, that of the last one. Two lanes have the same key.
    const uint own_key = lane % KEYS;
    uint own_row = row_of(a.pages, block_table, 0, min(begin + own_key, end - 1));
    Rows<KV> fetched[EIGHTS];
    if (ROWS == KEYS) {
        fetch<KV>(a, cache, own_row, 0, group, cell, fetched);
    }
    // Partial scores, [simdgroup][head][key], in two halves in turn: while one is read, the other may be written.
    threadgroup float* parts = memory;
    threadgroup float* next_parts = memory + num_groups * HEADS * PART_STRIDE;
    for (uint first = begin; first < end; first += KEYS) {
        const uint next_row = row_of(a.pages, block_table, 0, min(first + KEYS + own_key, end - 1));
        Rows<KV> ahead[EIGHTS];
        if (ROWS == KEYS) {
            fetch<KV>(a, cache, next_row, 0, group, cell, ahead);
        }
        threadgroup float* own_parts = parts + group * HEADS * PART_STRIDE;
#pragma clang loop unroll(disable)
        for (int key = 0; key < KEYS; key += ROWS) {
            if (ROWS < KEYS) {
                fetch<KV>(a, cache, own_row, key, group, cell, fetched);
            }
#pragma clang loop unroll(full)
            for (int eight = 0; eight < EIGHTS; ++eight) {
                // Two sums, so that a product does not wait for the one before.
                simdgroup_float8x8 even = matrix_of<float>(0.0f, 0.0f);
                simdgroup_float8x8 odd = matrix_of<float>(0.0f, 0.0f);
#pragma clang loop unroll(full)
                for (int p = 0; p < VALUE_FRAGMENTS; p += 2) {
                    const simdgroup_matrix<T, 8, 8> first_keys = matrix_of_rows<T>(fetched[eight], p);
                    const simdgroup_matrix<T, 8, 8> second_keys = matrix_of_rows<T>(fetched[eight], p + 1);
                    simdgroup_multiply_accumulate(even, first_keys, queries[p], even);
                    simdgroup_multiply_accumulate(odd, second_keys, queries[p + 1], odd);
                }
                const simdgroup_matrix<T, 8, 8> first_others = matrix_of_others<T>(fetched[eight], 0, cell);
                const simdgroup_matrix<T, 8, 8> second_others = matrix_of_others<T>(fetched[eight], 1, cell);
                simdgroup_multiply_accumulate(even, first_others, queries[VALUE_FRAGMENTS], even);
                simdgroup_multiply_accumulate(odd, second_others, queries[VALUE_FRAGMENTS + 1], odd);
                // Transposed, so that lanes read neighbours.
                threadgroup float* at = own_parts + cell.column * PART_STRIDE + key + 8 * eight + cell.row;
                at[0] = even.thread_elements()[0] + odd.thread_elements()[0];
                at[PART_STRIDE] = even.thread_elements()[1] + odd.thread_elements()[1];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // A row of scores for each head, which four lanes have.
        float2 scores[KEYS / 8];
        float own_maximum = LOWEST;
#pragma clang loop unroll(full)
        for (int eight = 0; eight < KEYS / 8; ++eight) {
            threadgroup const float* of_head = parts + cell.row * PART_STRIDE + 8 * eight + cell.column;
            float2 score = float2(0.0f, 0.0f);
            for (uint g = 0; g < num_groups; ++g) {
                score += *(threadgroup const float2*)(of_head + g * HEADS * PART_STRIDE);
            }
            const uint key = first + 8 * eight + cell.column;
            score.x = key < end ? score.x : float(LOWEST);
            score.y = key + 1 < end ? score.y : float(LOWEST);
            own_maximum = max(own_maximum, max(score.x, score.y));
            scores[eight] = score;
        }
        const float new_maximum = max(maximum, maximum_of_row(own_maximum));
        const float factor = fast::exp2(maximum - new_maximum);
        maximum = new_maximum;
        simdgroup_matrix<T, 8, 8> weights[KEYS / 8];
        float own_sum = 0.0f;
#pragma clang loop unroll(full)
        for (int eight = 0; eight < KEYS / 8; ++eight) {
            const uint key = first + 8 * eight + cell.column;
            const T weight = T(key < end ? fast::exp2(scores[eight].x - maximum) : 0.0f);
            const T next_weight = T(key + 1 < end ? fast::exp2(scores[eight].y - maximum) : 0.0f);
            weights[eight] = matrix_of<T>(weight, next_weight);
            own_sum += float(weight) + float(next_weight);
        }
        sum = fma(sum, factor, sum_of_row(own_sum));

#pragma clang loop unroll(full)
        for (int key = 0; key < KEYS; key += ROWS) {
            if (ROWS < KEYS) {
                fetch<KV>(a, cache, own_row, key, group, cell, fetched);
            }
            const float own_factor = key == 0 ? factor : 1.0f;
#pragma clang loop unroll(full)
            for (int p = 0; p < VALUE_FRAGMENTS; ++p) {
                simdgroup_float8x8 added = matrix_of<float>(0.0f, 0.0f);
#pragma clang loop unroll(full)
                for (int eight = 0; eight < EIGHTS; ++eight) {
                    const simdgroup_matrix<T, 8, 8> values = matrix_of_rows<T>(fetched[eight], p);
                    simdgroup_multiply_accumulate(added, weights[key / 8 + eight], values, added);
                }
                results[p].x = fma(results[p].x, own_factor, added.thread_elements()[0]);
                results[p].y = fma(results[p].y, own_factor, added.thread_elements()[1]);
            }
        }
        own_row = next_row;
#pragma clang loop unroll(full)
        for (int eight = 0; ROWS == KEYS && eight < EIGHTS; ++eight) {
            fetched[eight] = ahead[eight];
        }
        threadgroup float* read = parts;
        parts = next_parts;
        next_parts = read;
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
    const float divisor = is_whole ? sum : 1.0f;
    if (!is_whole && group == 0 && cell.column == 0) {
        own_record[0] = maximum;
        own_record[1] = sum;
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < VALUE_FRAGMENTS; ++p) {
        const uint value = group * VALUES + (p / PAIRS * PAIRS + cell.column / 2) * 8 + p % PAIRS * 2;
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
