// Attention of single tokens over latent rows, on tensor cores. All query heads share one key head, and the first
// values of its keys are also the values.
//
// A thread block has a KV split of one token's context and up to 16 of its query heads. Cache rows pass through shared
// memory, TILE positions at a time, once for all heads, as keys and as values; the next tile is loaded while one is
// used. Positions are the rows of the first GEMM. Each warp multiplies 16 of them by a quarter of the queries' columns,
// which stay in its registers. The quarters are reduced in shared memory, with a lane for each position and a warp for
// some heads, and all warps read the weights there. Values of a row are the rows of the second GEMM: each warp has
// every eighth block of 16 values, of all heads, and keeps the results.
//
// KV splits depend on the length of the sequence only, and the order of additions is fixed, so a row has the same bits
// in every batch. A second kernel merges the KV splits if there are several.
//
// Queries and weights are halves. Scores are exponents of two: `scale` includes the logarithm. Weights are at most
// 2^15, so that the small weights of a long context keep their bits; sums add the weights as packed. Rows of bf16
// become halves when they are used, those of eight bits when they are loaded.

#define FOR_NVIDIA
#include "cached.h"
#include "softmax.h"

struct DecodeLatentAttentionArgs {
    Pages pages;
    uint num_heads;
    uint value_dim;
    uint q_stride;    // stride of tokens' queries, in values
    uint split_size;  // positions of a KV split; doubled until there are at most MAX_SPLITS
    uint num_splits;  // of the longest context of the launch
    float scale;      // of scores, times log2(e)
};

// Values of a row, and the number of them that are its value: multiples of 16, as compile-time constants.
constant ushort ROW_DIM [[function_constant(0)]];
constant ushort VALUE_DIM [[function_constant(1)]];

constant constexpr uint MAX_ROW_DIM = 576;
constant constexpr uint MAX_VALUE_DIM = 512;
constant constexpr uint MAX_SPLITS = 2 * LANES;
constant constexpr uint WARPS = 8;
constant constexpr uint QUARTERS = 4;
constant constexpr uint TILE = WARPS / QUARTERS * 16;
constant constexpr float LARGEST_EXPONENT = 15.0f;

inline uint split_size_of(constant DecodeLatentAttentionArgs& a, uint seq_len) {
    uint split_size = a.split_size;
    while (split_size * MAX_SPLITS < seq_len) {
        split_size *= 2;
    }
    return split_size;
}

// The partial result of a head: its values, maximum and sum, padded to 16 bytes.
inline ulong record_of(constant DecodeLatentAttentionArgs& a, uint row, uint head, uint split) {
    return ((ulong(row) * a.num_heads + head) * a.num_splits + split) * (a.value_dim + 4);
}

template <typename KV, int HEADS>
[[kernel]] void decode_latent_attention(
    constant DecodeLatentAttentionArgs& a [[buffer(0)]],
    device const float* q [[buffer(1)]],  // [token, head, row of the cache]
    device const KV* cache [[buffer(2)]],
    device const uint* block_tables [[buffer(3)]],
    device const DecodeRow* rows [[buffer(4)]],
    device float* out [[buffer(5)]],       // [token, head, value_dim]
    device float* partials [[buffer(6)]],  // [row, head, split, value_dim + 4]
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint warp [[simdgroup_index_in_threadgroup]]
) {
    constexpr uint HEAD_TILES = HEADS / 8;
    constexpr uint OWN_HEADS = HEADS / WARPS;
    constexpr uint STEPS = MAX_ROW_DIM / 16 / QUARTERS;
    constexpr uint VALUE_TILES = MAX_VALUE_DIM / 16 / WARPS;
    constexpr uint THREADS_OF_ROW = WARPS * LANES / TILE;
    // Strides in halves or floats, padded: rows that are read together lie in different banks.
    const uint row_stride = (ROW_DIM / 8 | 1) * 8;
    constexpr uint PART_STRIDE = TILE + 4;
    constexpr uint WEIGHT_STRIDE = TILE + 8;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint quarter = warp % QUARTERS;
    const uint first_position = warp / QUARTERS * 16;
    const uint thread_index = warp * LANES + lane;

    // Two tiles of rows; partial scores, [quarter][head][position]; weights, [head][position]; for each head the factor
    // for its previous results, and the sum of its weights.
    threadgroup ushort* tiles = (threadgroup ushort*)memory;
    threadgroup float* parts = (threadgroup float*)(tiles + 2 * TILE * row_stride);
    threadgroup half* weights = (threadgroup half*)(parts + QUARTERS * HEADS * PART_STRIDE);
    threadgroup float* factors = (threadgroup float*)(weights + HEADS * WEIGHT_STRIDE);
    threadgroup float* totals = factors + HEADS;

    // The step's batch metadata are complete before its first kernel starts.
    const uint token = rows[index.z].token;
    const uint seq_len = rows[index.z].seq_len;
    device const uint* block_table = block_tables + rows[index.z].table_start;
    const uint split_size = split_size_of(a, seq_len);
    const uint begin = index.y * split_size;
    if (begin >= seq_len) {
        return;
    }
    const uint end = min(begin + split_size, seq_len);
    const uint first_head = index.x * HEADS;
    const uint num_heads = min(a.num_heads - first_head, uint(HEADS));

    // Positions past the end repeat the last one, so that every read is valid.
    const uint own_position = thread_index / THREADS_OF_ROW;
    const uint own_eighth = thread_index % THREADS_OF_ROW;
    const auto row_of_thread = [&](uint first) {
        return row_of(a.pages, block_table, 0, min(first + own_position, end - 1));
    };
    // Calls `visit` with the value and the address of each of this thread's groups of eight values of a tile.
    const auto visit_own = [&](uint tile, auto visit) {
        threadgroup ushort* target = tiles + (tile * TILE + own_position) * row_stride + 8 * own_eighth;
#pragma clang loop unroll(full)
        for (uint first = 0; first < MAX_ROW_DIM / 8; first += THREADS_OF_ROW) {
            if (first + THREADS_OF_ROW <= ROW_DIM / 8 || first + own_eighth < ROW_DIM / 8) {
                visit(8 * (first + own_eighth), target + 8 * first);
            }
        }
    };
    const auto begin_copy = [&](uint row, uint tile) {
        visit_own(tile, [&](uint value, threadgroup ushort* target) {
            begin_eight(a.pages, cache, row, ROW_DIM, value, target);
        });
        msl_end_group();
    };
    uint next_row = row_of_thread(begin);
    msl_wait_for_inputs();
    begin_copy(next_row, 0);
    next_row = row_of_thread(begin + TILE);

    // Columns from 16 · (4 · step + quarter) on, of heads g and g + 8. Missing heads repeat the queries of an existing
    // one.
    const auto has_step = [&](uint step) {
        return 16 * QUARTERS * (step + 1) <= ROW_DIM || 16 * (QUARTERS * step + quarter) < ROW_DIM;
    };
    uint queries[STEPS][HEAD_TILES][2];
#pragma clang loop unroll(full)
    for (uint step = 0; step < STEPS; ++step) {
#pragma clang loop unroll(full)
        for (uint n = 0; n < HEAD_TILES; ++n) {
            const uint head = first_head + min(8 * n + g, num_heads - 1);
            device const float* query = q + ulong(token) * a.q_stride + head * ROW_DIM + 2 * t;
#pragma clang loop unroll(full)
            for (uint i = 0; i < 2; ++i) {
                queries[step][n][i] = 0;
                if (has_step(step)) {
                    const float2 pair =
                        *(device const float2*)(query + 16 * (QUARTERS * step + quarter) + 8 * i) * a.scale;
                    queries[step][n][i] = msl_halves(pair.x, pair.y);
                }
            }
        }
    }

    // Of the warp's heads: the sum covers the lane's positions only.
    float maxima[OWN_HEADS];
    float sums[OWN_HEADS];
#pragma clang loop unroll(full)
    for (uint turn = 0; turn < OWN_HEADS; ++turn) {
        maxima[turn] = LOWEST;
        sums[turn] = 0.0f;
    }
    float results[VALUE_TILES][HEAD_TILES][4] = {};
    const auto has_values = [&](uint m) {
        return 16 * WARPS * (m + 1) <= VALUE_DIM || 16 * (WARPS * m + warp) < VALUE_DIM;
    };
    uint parity = 0;
    for (uint first = begin; first < end; first += TILE) {
        threadgroup const ushort* tile = tiles + parity * TILE * row_stride;
        msl_wait_for_groups<0>();
        if (sizeof(KV) == 1) {
            visit_own(parity, [&](uint value, threadgroup ushort* target) { end_eight<KV>(target, value); });
        }
        // From here on all threads see the tile's rows, and none uses the previous tile.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        parity = 1 - parity;
        if (first + TILE < end) {
            begin_copy(next_row, parity);
            next_row = row_of_thread(first + 2 * TILE);
        }

        // Even and odd steps have separate sums, so that one need not wait for the other.
        float scores[2][HEAD_TILES][4] = {};
        threadgroup const ushort* own_keys = tile + (first_position + lane % 16) * row_stride + lane / 16 * 8;
#pragma clang loop unroll(full)
        for (uint step = 0; step < STEPS; ++step) {
            if (has_step(step)) {
                uint keys[4];
                msl_load_matrices(own_keys + 16 * (QUARTERS * step + quarter), keys);
#pragma clang loop unroll(full)
                for (int i = 0; i < 4; ++i) {
                    keys[i] = in_halves<KV>(keys[i]);
                }
#pragma clang loop unroll(full)
                for (uint n = 0; n < HEAD_TILES; ++n) {
                    msl_multiply_tile(
                        scores[step % 2][n], keys[0], keys[1], keys[2], keys[3], queries[step][n][0], queries[step][n][1]
                    );
                }
            }
        }
#pragma clang loop unroll(full)
        for (uint n = 0; n < HEAD_TILES; ++n) {
#pragma clang loop unroll(full)
            for (uint i = 0; i < 4; ++i) {
                const uint head = 8 * n + 2 * t + i % 2;
                parts[(quarter * HEADS + head) * PART_STRIDE + first_position + g + i / 2 * 8] =
                    scores[0][n][i] + scores[1][n][i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // A lane for each position.
#pragma clang loop unroll(full)
        for (uint turn = 0; turn < OWN_HEADS; ++turn) {
            const uint head = turn * WARPS + warp;
            float score = parts[head * PART_STRIDE + lane];
#pragma clang loop unroll(full)
            for (uint i = 1; i < QUARTERS; ++i) {
                score += parts[(i * HEADS + head) * PART_STRIDE + lane];
            }
            const bool counts = first + lane < end;
            const float maximum = max(maxima[turn], simd_max(counts ? score : LOWEST));
            const float factor = msl_exp2(maxima[turn] - maximum);
            const half weight = half(counts ? msl_exp2(score - maximum + LARGEST_EXPONENT) : 0.0f);
            maxima[turn] = maximum;
            sums[turn] = fma(sums[turn], factor, float(weight));
            weights[head * WEIGHT_STRIDE + lane] = weight;
            if (lane == 0) {
                factors[head] = factor;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        uint own_weights[HEAD_TILES][4];
        float own_factors[HEAD_TILES][2];
#pragma clang loop unroll(full)
        for (uint n = 0; n < HEAD_TILES; ++n) {
            threadgroup const half* of_head = weights + (8 * n + lane % 8) * WEIGHT_STRIDE;
            msl_load_matrices((threadgroup const ushort*)(of_head + lane / 8 * 8), own_weights[n]);
#pragma clang loop unroll(full)
            for (uint i = 0; i < 2; ++i) {
                own_factors[n][i] = factors[8 * n + 2 * t + i];
            }
        }
        threadgroup const ushort* own_values =
            tile + (lane / 16 * 8 + lane % 8) * row_stride + 16 * warp + lane / 8 % 2 * 8;
#pragma clang loop unroll(full)
        for (uint m = 0; m < VALUE_TILES; ++m) {
            if (has_values(m)) {
#pragma clang loop unroll(full)
                for (uint n = 0; n < HEAD_TILES; ++n) {
#pragma clang loop unroll(full)
                    for (uint i = 0; i < 4; ++i) {
                        results[m][n][i] *= own_factors[n][i % 2];
                    }
                }
#pragma clang loop unroll(full)
                for (uint half_tile = 0; half_tile < 2; ++half_tile) {
                    uint values[4];
                    msl_load_transposed(own_values + 16 * half_tile * row_stride + 16 * WARPS * m, values);
#pragma clang loop unroll(full)
                    for (int i = 0; i < 4; ++i) {
                        values[i] = in_halves<KV>(values[i]);
                    }
#pragma clang loop unroll(full)
                    for (uint n = 0; n < HEAD_TILES; ++n) {
                        msl_multiply_tile(
                            results[m][n], values[0], values[1], values[2], values[3], own_weights[n][2 * half_tile],
                            own_weights[n][2 * half_tile + 1]
                        );
                    }
                }
            }
        }
    }

    const bool is_whole = a.num_splits == 1;
#pragma clang loop unroll(full)
    for (uint turn = 0; turn < OWN_HEADS; ++turn) {
        const uint head = turn * WARPS + warp;
        const float total = simd_sum(sums[turn]);
        if (lane == 0) {
            totals[head] = total;
            if (!is_whole && head < num_heads) {
                device float* record = partials + record_of(a, index.z, first_head + head, index.y);
                record[VALUE_DIM] = maxima[turn];
                record[VALUE_DIM + 1] = total;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (uint n = 0; n < HEAD_TILES; ++n) {
#pragma clang loop unroll(full)
        for (uint i = 0; i < 2; ++i) {
            const uint head = 8 * n + 2 * t + i;
            if (head < num_heads) {
                const float total = totals[head];
                device float* target =
                    is_whole ? out + (ulong(token) * a.num_heads + first_head + head) * VALUE_DIM
                             : partials + record_of(a, index.z, first_head + head, index.y);
#pragma clang loop unroll(full)
                for (uint m = 0; m < VALUE_TILES; ++m) {
                    if (has_values(m)) {
                        const uint value = 16 * (WARPS * m + warp) + g;
                        target[value] = is_whole ? results[m][n][i] / total : results[m][n][i];
                        target[value + 8] = is_whole ? results[m][n][i + 2] / total : results[m][n][i + 2];
                    }
                }
            }
        }
    }
}

#define DECODE(NAME, KV, HEADS) INSTANCE(decode_latent_attention_##NAME##_##HEADS, decode_latent_attention, KV, HEADS)
DECODE(f16, half, 16)
DECODE(bf16, bfloat, 16)
DECODE(q8_0, Code, 16)
DECODE(fp8_e4m3, Fp8, 16)

// Merges the KV splits of a row of one head, four values per lane. A warp has every eighth split.
[[kernel]] void decode_latent_attention_merge(
    constant DecodeLatentAttentionArgs& a [[buffer(0)]],
    device const DecodeRow* rows [[buffer(1)]],
    device const float* partials [[buffer(2)]],
    device float* out [[buffer(3)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint warp [[simdgroup_index_in_threadgroup]]
) {
    constexpr uint TURNS = MAX_SPLITS / WARPS;
    constexpr uint OWN_SPLITS = MAX_SPLITS / LANES;
    constexpr uint VALUES = 4 * LANES;
    const uint head = index.x;
    const uint seq_len = rows[index.y].seq_len;
    const uint split_size = split_size_of(a, seq_len);
    const uint num_splits = (seq_len + split_size - 1) / split_size;
    device const float* records = partials + record_of(a, index.y, head, 0);
    const uint stride = a.value_dim + 4;
    const uint value = index.z * VALUES + 4 * lane;
    msl_wait_for_inputs();
    // All loads are issued before the first one is waited for.
    float4 values[TURNS];
#pragma clang loop unroll(full)
    for (uint turn = 0; turn < TURNS; ++turn) {
        const uint split = turn * WARPS + warp;
        const bool exists = split < num_splits && value < a.value_dim;
        values[turn] = exists ? *(device const float4*)(records + split * stride + value) : float4(0.0f);
    }
    // A lane for some splits.
    float own_weights[OWN_SPLITS];
    float own_sums[OWN_SPLITS];
    float maximum = LOWEST;
#pragma clang loop unroll(full)
    for (uint i = 0; i < OWN_SPLITS; ++i) {
        const uint split = i * LANES + lane;
        own_weights[i] = split < num_splits ? records[split * stride + a.value_dim] : LOWEST;
        own_sums[i] = split < num_splits ? records[split * stride + a.value_dim + 1] : 0.0f;
        maximum = max(maximum, own_weights[i]);
    }
    maximum = simd_max(maximum);
    float total = 0.0f;
#pragma clang loop unroll(full)
    for (uint i = 0; i < OWN_SPLITS; ++i) {
        own_weights[i] = msl_exp2(own_weights[i] - maximum);
        total = fma(own_sums[i], own_weights[i], total);
    }
    total = simd_sum(total);
    float4 sum = float4(0.0f);
#pragma clang loop unroll(full)
    for (uint turn = 0; turn < TURNS; ++turn) {
        const uint split = turn * WARPS + warp;
        const float weight = simd_shuffle(own_weights[turn * WARPS / LANES], ushort(split % LANES));
        sum = fma(values[turn], float4(weight), sum);
    }
    *(threadgroup float4*)(memory + warp * VALUES + 4 * lane) = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint own = warp * LANES + lane;
    if (own < VALUES && index.z * VALUES + own < a.value_dim) {
        float all = 0.0f;
#pragma clang loop unroll(full)
        for (uint s = 0; s < WARPS; ++s) {
            all += memory[s * VALUES + own];
        }
        const ulong row = ulong(rows[index.y].token) * a.num_heads + head;
        out[row * a.value_dim + index.z * VALUES + own] = all / total;
    }
}
