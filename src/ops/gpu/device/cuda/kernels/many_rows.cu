// GEMMs of many rows of activations, those of prompts and of many sequences, on tensor cores, with the norm before and
// the residual after. Sums are added in the order of columns, so a row has the same bits in every batch of this size.
// With fewer tiles than SMs, several thread blocks share the columns of a tile (split-K), and a kernel of
// `several_rows.cu` reduces their partial sums.
//
// Activations are packed in half precision once, in the order of `packed.h`: by a kernel of its own, or by the one that
// computes them. The instruction reads them from shared memory for all rows of weights. Weights are loaded to registers
// in the layout of their tiles (`fragments.h`). Where the GPU supports it, two thread blocks with the same activations
// load half of them each, which halves the reads from L2.

#define FOR_NVIDIA
#include "matmul.h"
#include "packed.h"

// Sums take most of a thread's registers.
#define MAX_THREADS 256

struct PackArgs {
    uint num_units;  // of 16 columns
    uint stride;     // columns of packed rows, padded with zeros to pairs of steps
    uint x_stride;
    uint x_next;     // stride of activations between matrices of a stack
    uint num_rows;   // of one matrix
    uint num_matrices;
    float eps;
    uint is_fixed;  // whether all rows have the same factor
};

// Distance of the two columns in a word of the next matmul, if results are packed for it; otherwise 0. Such a matmul
// has no further factor.
constant ushort NEXT_APART [[function_constant(5)]];
// Thread blocks that share the columns of a tile (split-K): one, two or four.
constant ushort K_SPLITS [[function_constant(6)]];
// Thread blocks of neighbouring tiles that load the same activations together; 0 if threads copy rows one by one, which
// need not be adjacent then.
constant ushort CLUSTER [[function_constant(7)]];

// Eight warps share a tile, each with 16 rows of weights. A step is 64 columns: eight times sixteen bytes of a row of
// activations.
constant constexpr int ROWS = 128;
constant constexpr uint NUM_THREADS = MAX_THREADS;
constant constexpr uint EIGHTHS = 8;
// Steps of activations in shared memory: the current one, the one before, which slower warps may still read, an earlier
// one, which the other thread block may still read, and those in flight.
constant constexpr uint STAGES = 6;
constant constexpr uint STEPS_AHEAD = STAGES - 3;
// Steps by which weights are prefetched to L2 before they are loaded.
constant constexpr uint STEPS_TO_CACHE = 4;

// The row of its matrix for row g, or with `h` row g + 8, of a warp's 16: neighbours, so that a lane has two adjacent
// results; for a gated matmul, the same row of both matrices.
template <bool GATED>
inline uint own_row(uint first_row, uint g, uint h) {
    return GATED ? first_row + g : first_row + 2 * g + h;
}

inline float quickly_gated(float gate, float up) {
    return gate * msl_reciprocal(1.0f + msl_exp2(gate * -1.44269504f)) * up;
}

// Stores a result, or two adjacent ones of which the first has an even index, or adds them to the previous values.
// Additions are atomic and read nothing, so no thread waits.
inline void put(device float* out, ulong index, float value) {
    if (ADDS) {
        msl_add(out + index, value);
    } else {
        store(out, index, value);
    }
}
inline void put_pair(device float* out, ulong index, float first, float second) {
    if (ADDS) {
        msl_add_pair(out + index, first, second);
    } else if (IS_HALF) {
        ((device uint*)out)[index / 2] = msl_halves(first, second);
    } else {
        *(device float2*)(out + index) = float2(first, second);
    }
}

template <typename F, int TOKENS, bool GATED>
inline void many(
    constant MatmulArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const uint4* x,
    device const float* x_factors,
    device float* out,
    device float* partials,
    device const uint* rows,
    threadgroup char* memory,
    uint tile,
    uint first_token,
    Problem problem,
    uint k_split,
    uint thread_index
) {
    constexpr int TILES = TOKENS / 8;
    constexpr uint RESULTS = GATED ? 8 : 16;
    const uint lane = thread_index % LANES;
    const uint warp = thread_index / LANES;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint first_row = (tile - matrix.first_group) * (ROWS / 16 * RESULTS) + warp * RESULTS;
    // The steps of its K split; their number is even.
    const uint num_pairs = a.x_stride / 128;
    const uint first_step = k_split * num_pairs / K_SPLITS * 2;
    const uint end_step = (k_split + 1) * num_pairs / K_SPLITS * 2;
    threadgroup uint4* staged = (threadgroup uint4*)memory;
    threadgroup float* factors = (threadgroup float*)(staged + STAGES * TOKENS * EIGHTHS);
    threadgroup ulong* barriers = (threadgroup ulong*)(factors + TOKENS);
    const uint num_tokens = problem.num_rows - first_token;
    if (CLUSTER > 0) {
        msl_begin_stages<STAGES>(barriers, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Missing rows repeat the weights of existing ones; their sums are not used.
    const Planes planes = in_registers(matrix.planes);
    constexpr uint STEPS = Fragment<F>::COLUMNS / 64;
    const uint num_k_tiles = (16 * a.num_units + Fragment<F>::COLUMNS - 1) / Fragment<F>::COLUMNS;
    Source<F> sources_of_weights[2];
#pragma clang loop unroll(full)
    for (int h = 0; h < 2; ++h) {
        const uint num_eights = (matrix.num_rows + 7) / 8;
        const uint row = own_row<GATED>(first_row, g, h);
        const uint first_index = (problem.matrix * num_eights + min(row / 8, num_eights - 1)) * num_k_tiles;
        sources_of_weights[h] = Source<F>(GATED && h == 1 ? up_weights : weights, planes, first_index, row % 8 * 4 + t);
    }
    // Weights and decoded words alternate between two buffers: those of the last step are multiplied while the next are
    // decoded and the ones after that are loaded. Of the two steps in a K tile, the second uses the weights of the
    // first.
    Fragment<F> fragments[2][2];
    uint words[2][4][4];
    const auto fetch_weights = [&](uint step, int turn) {
        // Missing columns repeat the weights of existing ones; their activations are zeros.
        const uint k_tile = min(step / STEPS, num_k_tiles - 1);
        // Prefetches later weights to L2, where all thread blocks with these rows find them. Loads from memory would be
        // too late.
        if (t < 2 * Fragment<F>::WORDS) {
            const bool is_second = t >= Fragment<F>::WORDS;
            const uint later = min(k_tile + STEPS_TO_CACHE / STEPS, num_k_tiles - 1);
            device const typename Fragment<F>::Word* words =
                is_second ? sources_of_weights[1].words_at(later) : sources_of_weights[0].words_at(later);
            msl_fetch(words + t % Fragment<F>::WORDS * LANES);
        }
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            fragments[turn][h] = sources_of_weights[h].read(k_tile);
        }
    };
    fetch_weights(first_step, 0);
    fetch_weights(first_step + (STEPS == 1 ? 1 : 2), 1);

    // Missing rows have arbitrary values or, where a thread copies one group of every 32nd row, those of an existing
    // row; their sums are not used.
    const auto row_of_x = [&](uint token) {
        const uint existing = min(first_token + token, problem.num_rows - 1);
        return problem.x_offset + (IS_GROUPED ? row_at(rows, a.gathers, problem.first_slot + existing) : existing);
    };
    constexpr int TURNS = TOKENS * EIGHTHS / NUM_THREADS;
    const uint own_eighth = thread_index % EIGHTHS;
    const uint own_token = thread_index / EIGHTHS;
    uint sources[TURNS];
    msl_wait_for_inputs();
#pragma clang loop unroll(full)
    for (int turn = 0; turn < TURNS && CLUSTER == 0; ++turn) {
        sources[turn] = uint(index_of_eighth(row_of_x(own_token + turn * (NUM_THREADS / EIGHTHS)), own_eighth, a.x_rows));
    }
    // A step's stage, and its round through all stages.
    struct RingPosition {
        uint stage;
        uint round;
        RingPosition moved(uint num_steps) const {
            const bool is_next = stage + num_steps >= STAGES;
            return RingPosition { is_next ? stage + num_steps - STAGES : stage + num_steps, is_next ? round + 1 : round };
        }
    };
    const auto bring = [&](uint step, RingPosition position) {
        threadgroup uint4* stage = staged + position.stage * (TOKENS * EIGHTHS);
        if (CLUSTER > 0) {
            const uint num_brought = step < end_step ? min(num_tokens, uint(TOKENS)) : 0;
            msl_bring<STAGES, NUM_THREADS, TOKENS * EIGHTHS>(
                stage, x + index_of_step(first_token, step, a.x_rows), num_brought * EIGHTHS, barriers + position.stage,
                position.round, thread_index
            );
            return;
        }
#pragma clang loop unroll(full)
        for (int turn = 0; turn < TURNS; ++turn) {
            if (step < end_step) {
                const uint token = own_token + turn * (NUM_THREADS / EIGHTHS);
                msl_copy(stage + msl_swizzled(token, own_eighth), x + sources[turn] + index_of_step(0, step, a.x_rows));
            }
        }
        msl_end_group();
    };
#pragma clang loop unroll(full)
    for (uint step = 0; step < STEPS_AHEAD; ++step) {
        bring(first_step + step, RingPosition { step, 0 });
    }
    // The copy runs while matmuls are computed.
    const float own_factor = HAS_NORM && thread_index < uint(TOKENS) ? x_factors[row_of_x(thread_index)] : FIXED_FACTOR;

    float sums[TILES][4] = {};
    RingPosition position = { 0, 0 };
    const auto multiply_step = [&](uint step, int turn) {
        thread uint (&own)[4][4] = words[turn];
        // The step's half of its K tile.
        const int which = STEPS == 1 ? turn : 0;
#pragma clang loop unroll(full)
        for (int eight = 0; eight < 2; ++eight) {
            const int of_fragment = STEPS == 1 ? eight : 2 * turn + eight;
            uint low[4];
            uint high[4];
            decode_eight<F>(fragments[which][0], of_fragment, low);
            decode_eight<F>(fragments[which][1], of_fragment, high);
            if (is_same_v<F, F16>) {
                // Adds zero to words that need no decoding: otherwise the compiler keeps no matmul in flight while
                // their registers are loaded.
#pragma clang loop unroll(full)
                for (int word = 0; word < 4; ++word) {
                    low[word] = msl_add_pairs(low[word], 0x80008000u);
                    high[word] = msl_add_pairs(high[word], 0x80008000u);
                }
            }
#pragma clang loop unroll(full)
            for (int k = 0; k < 2; ++k) {
                own[2 * eight + k][0] = low[2 * k];
                own[2 * eight + k][1] = high[2 * k];
                own[2 * eight + k][2] = low[2 * k + 1];
                own[2 * eight + k][3] = high[2 * k + 1];
            }
        }
        if (STEPS == 1) {
            fetch_weights(step + 2, turn);
        } else if (turn == 1) {
#pragma clang loop unroll(full)
            for (int h = 0; h < 2; ++h) {
                fragments[0][h] = fragments[1][h];
            }
            fetch_weights(step + 3, 1);
        }
        if (CLUSTER > 0) {
            msl_wait_for_stage<STEPS_AHEAD - 1>(barriers + position.stage, position.round);
        } else {
            msl_wait_for_groups<STEPS_AHEAD - 1>();
            msl_show_copies();
        }
        // The stage of two steps ago is free after this: every warp has waited for that step before.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        msl_begin_matmuls(own);
#pragma clang loop unroll(full)
        for (int k = 0; k < 4; ++k) {
            msl_multiply_rows(sums, own[k], staged + position.stage * (TOKENS * EIGHTHS), k);
        }
        msl_end_matmuls();
        // Only for stages that are filled again: a thread block that ends has then waited for all writes of others to
        // it.
        if (CLUSTER > 0 && step >= first_step + 2 && step + STAGES - 2 < end_step) {
            msl_free_stage<STAGES>(barriers + position.moved(STAGES - 2).stage, thread_index);
        }
        bring(step + STEPS_AHEAD, position.moved(STEPS_AHEAD));
        position = position.moved(1);
        msl_wait_for_matmuls<1>();
    };
    // Each split has some steps.
    uint step = first_step;
    do {
        multiply_step(step, 0);
        multiply_step(step + 1, 1);
        step += 2;
    } while (step < end_step);
    msl_wait_for_matmuls<0>();
    if (thread_index < uint(TOKENS)) {
        factors[thread_index] = own_factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (GATED && NEXT_APART > 0) {
        // A lane has column g of eight, of two tokens. It exchanges one value with the lane that has the other column
        // of the word, so that each has a word of one token. The 64 columns of each token overwrite activations.
        const uint apart = NEXT_APART;
        const bool is_second = (g & apart) != 0;
        const uint word = half_of_eight(warp, apart) * 4 + word_of_column(g, apart);
        const bool exists = first_row + g < matrix.num_rows;
#pragma clang loop unroll(full)
        for (int n = 0; n < TILES; ++n) {
            float values[2];
#pragma clang loop unroll(full)
            for (int odd = 0; odd < 2; ++odd) {
                const float factor = factors[8 * n + 2 * t + odd];
                const float result = quickly_gated(sums[n][odd] * factor, sums[n][2 + odd] * factor);
                values[odd] = exists ? result * (1.0f / FIXED_FACTOR) : 0.0f;
            }
            const float got = simd_shuffle_xor(is_second ? values[0] : values[1], ushort(4 * apart));
            const uint token = 8 * n + 2 * t + (is_second ? 1 : 0);
            threadgroup uint* eighth = (threadgroup uint*)(staged + msl_swizzled(token, word));
            eighth[lane_of_eight(warp, apart)] = is_second ? msl_halves(got, values[1]) : msl_halves(values[0], got);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // They are a step of the next matmul.
        device uint4* own_out = (device uint4*)out + index_of_step(first_token, tile, problem.num_rows);
#pragma clang loop unroll(full)
        for (int turn = 0; turn < TURNS; ++turn) {
            const uint index = turn * NUM_THREADS + thread_index;
            if (index < num_tokens * EIGHTHS && tile < a.num_tiles) {
                own_out[index] = staged[index];
            }
        }
    } else if (GATED) {
#pragma clang loop unroll(full)
        for (int n = 0; n < TILES; ++n) {
#pragma clang loop unroll(full)
            for (int odd = 0; odd < 2; ++odd) {
                const uint token = 8 * n + 2 * t + odd;
                const float factor = factors[token];
                if (token < num_tokens && first_row + g < matrix.num_rows) {
                    const ulong out_index = problem.out_offset + ulong(first_token + token) * a.out_stride + first_row + g;
                    store(out, out_index, quickly_gated(sums[n][odd] * factor, sums[n][2 + odd] * factor));
                }
            }
        }
    } else {
        const uint row = first_row + 2 * g;
        const bool is_paired = (a.out_stride | problem.out_offset | matrix.out_offset | matrix.num_rows) % 2 == 0;
        float biases[2] = {};
#pragma clang loop unroll(full)
        for (int h = 0; h < 2 && HAS_BIAS; ++h) {
            biases[h] = bias[min(row + h, matrix.num_rows - 1)];
        }
        const ulong first_index = problem.out_offset + ulong(first_token) * a.out_stride + matrix.out_offset + row;
        const auto leave_to_be_added = [&] {
            device float* own = partials + ulong(k_split) * a.num_tokens * a.out_stride + first_index + 2 * t * a.out_stride;
#pragma clang loop unroll(full)
            for (int n = 0; n < TILES; ++n) {
#pragma clang loop unroll(full)
                for (int odd = 0; odd < 2; ++odd) {
                    if (8 * n + 2 * t + odd < num_tokens && row < matrix.num_rows) {
                        device float* pair = own + odd * a.out_stride;
                        if (is_paired) {
                            *(device float2*)pair = float2(sums[n][odd], sums[n][2 + odd]);
                        } else {
                            pair[0] = sums[n][odd];
                            if (row + 1 < matrix.num_rows) {
                                pair[1] = sums[n][2 + odd];
                            }
                        }
                    }
                }
                own += 8 * a.out_stride;
            }
        };
        const auto write = [&](auto is_pair) {
#pragma clang loop unroll(full)
            for (int n = 0; n < TILES; ++n) {
#pragma clang loop unroll(full)
                for (int odd = 0; odd < 2; ++odd) {
                    const uint token = 8 * n + 2 * t + odd;
                    if (token < num_tokens && row < matrix.num_rows) {
                        const float factor = factors[token];
                        const float first = fma(sums[n][odd], factor, biases[0]);
                        const float second = fma(sums[n][2 + odd], factor, biases[1]);
                        const ulong out_index = first_index + ulong(token) * a.out_stride;
                        if (is_pair.value) {
                            put_pair(out, out_index, first, second);
                        } else {
                            put(out, out_index, first);
                            if (row + 1 < matrix.num_rows) {
                                put(out, out_index + 1, second);
                            }
                        }
                    }
                }
            }
        };
        if (K_SPLITS > 1) {
            leave_to_be_added();
        } else if (is_paired) {
            write(true_type());
        } else {
            write(false_type());
        }
    }
}

template <typename F, typename LAST, int TOKENS>
[[kernel]] void many_rows(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const uint4* x [[buffer(7)]],          // packed
    device const float* x_factors [[buffer(8)]],  // [row]
    device float* out [[buffer(9)]],
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    device float* partials [[buffer(12)]],  // [split, row, as results]
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    // A single matrix may have K splits, a stack has none.
    const uint k_split = K_SPLITS > 1 ? index.z : 0;
    const Problem problem = problem_of(a, groups, K_SPLITS > 1 ? 0 : index.z);
    const uint first_token = index.x * TOKENS;
    if (first_token >= problem.num_rows) {
        return;
    }
    const uint tile = index.y;
    const uint m = tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    if (is_same_v<F, LAST> || m < 2) {
        many<F, TOKENS, false>(
            a, a.matrices[m], weights, weights, bias, x, x_factors, out, partials, rows, memory, tile, first_token, problem,
            k_split, thread_index
        );
    } else {
        many<LAST, TOKENS, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, x_factors, out, partials, rows, memory, tile, first_token,
            problem, k_split, thread_index
        );
    }
}

template <typename F, int TOKENS>
[[kernel]] void many_rows_swiglu(
    constant MatmulArgs& a [[buffer(0)]],
    device const uchar* gate_weights [[buffer(1)]],
    device const uchar* up_weights [[buffer(2)]],
    device const uint4* x [[buffer(3)]],
    device const float* x_factors [[buffer(4)]],
    device float* out [[buffer(5)]],
    device const RowGroup* groups [[buffer(6)]],
    device const uint* rows [[buffer(7)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const Problem problem = problem_of(a, groups, index.z);
    const uint first_token = index.x * TOKENS;
    if (first_token >= problem.num_rows) {
        return;
    }
    many<F, TOKENS, true>(
        a, a.matrices[0], gate_weights, up_weights, x_factors, x, x_factors, out, out, rows, memory, index.y, first_token,
        problem, 0, thread_index
    );
}

// Packs a row of activations in half precision, multiplied by the weights of the norm, in the order of columns of the
// weights' format. A power of two scales its largest value below the largest half; the factor undoes it and includes
// the norm's own. Without factors, the scale is the constant of the kernels that pack their own results, so that a row
// has the same bits in both cases.
template <Pairs PAIRS>
[[kernel]] void pack_rows(
    constant PackArgs& a [[buffer(0)]],
    device const float* x [[buffer(1)]],
    device const float* norm [[buffer(2)]],
    device uint4* packed [[buffer(3)]],  // of [matrix, row]
    device float* factors [[buffer(4)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]]
) {
    threadgroup float maxima[32];
    threadgroup float sums[32];
    msl_wait_for_inputs();
    const uint row = index.y * a.num_rows + index.x;
    device const float* own = x + ulong(index.y) * a.x_next + ulong(index.x) * a.x_stride;
    const auto read_eight = [&](uint column, thread float (&values)[8], thread float (&weighed)[8]) {
#pragma clang loop unroll(full)
        for (int four = 0; four < 2; ++four) {
            const float4 read = *(device const float4*)(own + column + 4 * four);
            const float4 weights = HAS_NORM ? *(device const float4*)(norm + column + 4 * four) : float4(1.0f);
#pragma clang loop unroll(full)
            for (int v = 0; v < 4; ++v) {
                values[4 * four + v] = read[v];
                weighed[4 * four + v] = read[v] * weights[v];
            }
        }
    };
    // A thread keeps the values that it reads first; the rest of longer rows is read twice.
    float kept[2][8] = {};
    float maximum = 0.0f;
    float sum = 0.0f;
    const uint first_read_later = a.is_fixed != 0 ? 0 : num_threads;
    for (uint unit = thread_index; unit < a.num_units && a.is_fixed == 0; unit += num_threads) {
#pragma clang loop unroll(full)
        for (int half_unit = 0; half_unit < 2; ++half_unit) {
            float values[8];
            float weighed[8];
            read_eight(16 * unit + 8 * half_unit, values, weighed);
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                sum = fma(values[v], values[v], sum);
                maximum = max(maximum, abs(weighed[v]));
                kept[half_unit][v] = unit == thread_index ? weighed[v] : kept[half_unit][v];
            }
        }
    }
    maximum = simd_max(maximum);
    sum = simd_sum(sum);
    if (thread_index % LANES == 0) {
        maxima[thread_index / LANES] = maximum;
        sums[thread_index / LANES] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    maximum = 0.0f;
    sum = 0.0f;
    for (uint warp = 0; warp < num_threads / LANES; ++warp) {
        maximum = max(maximum, maxima[warp]);
        sum += sums[warp];
    }
    // To between 2^14 and 2^15.
    const uint exponent = clamp(268 - int(as_type<uint>(maximum) >> 23), 1, 253);
    const float scale = a.is_fixed != 0 ? 1.0f / FIXED_FACTOR : as_type<float>(exponent << 23);
    if (thread_index == 0 && a.is_fixed == 0) {
        const float inverse = as_type<float>((254 - exponent) << 23);
        factors[row] = HAS_NORM ? inverse * rsqrt(sum / float(16 * a.num_units) + a.eps) : inverse;
    }
    // A lane multiplies eight words of a step, one in each eighth. For dense formats, they come from one unit, and four
    // lanes exchange words: each gets two eighths. For others, they are eight columns of each of two blocks, and two
    // lanes exchange words: each gets two eighths of a block.
    const auto put_eighth = [&](uint eighth, uint4 words) {
        packed[index_of_eighth(row, eighth, a.num_matrices * a.num_rows)] = words;
    };
    const uint own_index = thread_index % 4;
    for (uint first = 0; first < a.stride / 16; first += num_threads) {
        const uint unit = first + thread_index;
        uint words[8] = {};
#pragma clang loop unroll(full)
        for (int half_unit = 0; half_unit < 2; ++half_unit) {
            float values[8];
            float weighed[8];
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                weighed[v] = first < first_read_later ? kept[half_unit][v] : 0.0f;
            }
            if (first >= first_read_later && unit < a.num_units) {
                read_eight(16 * unit + 8 * half_unit, values, weighed);
            }
            const uint4 four = paired<PAIRS>(weighed, scale);
#pragma clang loop unroll(full)
            for (int word = 0; word < 4; ++word) {
                words[4 * half_unit + word] = four[word];
            }
        }
        if (PAIRS != Pairs::NEIGHBOURS) {
            const bool is_odd = own_index % 2 == 1;
            uint4 gathered[2];
#pragma clang loop unroll(full)
            for (int i = 0; i < 2; ++i) {
                // An even lane gets words `i`, an odd one words `i` + 2, of the even lane's eights first.
                const uint2 own_words = is_odd ? uint2(words[2 + i], words[6 + i]) : uint2(words[i], words[4 + i]);
                const uint2 given = is_odd ? uint2(words[i], words[4 + i]) : uint2(words[2 + i], words[6 + i]);
                const uint2 got = uint2(simd_shuffle_xor(given.x, ushort(1)), simd_shuffle_xor(given.y, ushort(1)));
                gathered[i] = is_odd ? uint4(got.x, got.y, own_words.x, own_words.y)
                                     : uint4(own_words.x, own_words.y, got.x, got.y);
            }
            if (unit < a.stride / 16) {
                put_eighth(2 * unit, gathered[0]);
                put_eighth(2 * unit + 1, gathered[1]);
            }
            continue;
        }
#pragma clang loop unroll(full)
        for (int eight = 0; eight < 8; eight += 4) {
            uint4 gathered;
#pragma clang loop unroll(full)
            for (uint turn = 0; turn < 4; ++turn) {
                // In turn `t`, a lane exchanges words with lane ^ t: it gets that of unit ^ t.
                const uint wanted = own_index ^ turn;
                const uint given = wanted == 0 ? words[eight] : wanted == 1 ? words[eight + 1]
                                 : wanted == 2 ? words[eight + 2] : words[eight + 3];
                const uint got = simd_shuffle_xor(given, ushort(turn));
                gathered.x = wanted == 0 ? got : gathered.x;
                gathered.y = wanted == 1 ? got : gathered.y;
                gathered.z = wanted == 2 ? got : gathered.z;
                gathered.w = wanted == 3 ? got : gathered.w;
            }
            if (unit < a.stride / 16) {
                put_eighth(unit / 4 * 8 + eight + own_index, gathered);
            }
        }
    }
}

INSTANCE(pack_rows_neighbours, pack_rows, Pairs::NEIGHBOURS)
INSTANCE(pack_rows_four_apart, pack_rows, Pairs::FOUR_APART)
INSTANCE(pack_rows_two_apart, pack_rows, Pairs::TWO_APART)

#define MANY(F, TOKENS)                                         \
    INSTANCE(many_rows_##F##_##TOKENS, many_rows, F, F, TOKENS) \
    INSTANCE(many_rows_swiglu_##F##_##TOKENS, many_rows_swiglu, F, TOKENS)
#define FORMAT(F) MANY(F, 64) MANY(F, 128) MANY(F, 160) MANY(F, 256)
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
FORMAT(Q2_K)
FORMAT(Q3_K)
FORMAT(IQ4_NL)
FORMAT(MXFP4)
FORMAT(Q8_S)
FORMAT(F16)

#define MIXED(F, LAST)                                              \
    INSTANCE(many_rows_##F##_##LAST##_64, many_rows, F, LAST, 64)   \
    INSTANCE(many_rows_##F##_##LAST##_128, many_rows, F, LAST, 128) \
    INSTANCE(many_rows_##F##_##LAST##_160, many_rows, F, LAST, 160) \
    INSTANCE(many_rows_##F##_##LAST##_256, many_rows, F, LAST, 256)
MIXED(Q4_K, Q6_K)
MIXED(Q5_K, Q6_K)
