// Products of weights with many rows of activations, those of prompts, on tensor cores, with the norm in front and the
// residual behind. The sums are added in the order of columns, so a row has the same bits in every batch of so many.
//
// Activations are rounded to halves once, by a kernel of its own. They come by in threadgroup memory, and are what the
// instruction reads from there for all rows of weights; these go from memory to registers as in `few_rows.cu`, where unit t
// of 64 columns is what lane t of four brings.

#define FOR_NVIDIA
#include "products.h"

// Sums take most of the registers that a thread can have.
#define MAX_THREADS 256

struct RoundArgs {
    uint num_units;  // of 16 columns
    uint stride;     // of rounded rows, which are filled up with zeros: pairs of steps
    uint x_stride;
    uint x_next;     // from the activations of one matrix of a stack to those of the next one
    uint num_rows;   // of one
    float eps;
};

// Eight warps share a tile, each with 16 rows of weights. A step is 64 columns: eight times sixteen bytes of a row of
// activations.
constant constexpr int ROWS = 128;
constant constexpr uint NUM_THREADS = MAX_THREADS;
constant constexpr uint EIGHTHS = 8;
// Steps whose activations are in threadgroup memory: those that are multiplied, those before, which slower warps may
// still read, and those that are on their way.
constant constexpr uint STAGES = 6;

template <typename F, int TOKENS, bool GATED>
inline void many(
    constant ProductArgs& a,
    constant MatrixArgs& matrix,
    device const uchar* weights,
    device const uchar* up_weights,
    device const float* bias,
    device const uint4* x,
    device const float* x_factors,
    device float* out,
    device const uint* rows,
    threadgroup char* memory,
    uint tile,
    uint first_token,
    Part part,
    uint thread_index
) {
    constexpr int TILES = TOKENS / 8;
    constexpr uint RESULTS = GATED ? 8 : 16;
    const uint lane = thread_index % LANES;
    const uint g = lane / 4;
    const uint t = lane % 4;
    const uint first_row = (tile - matrix.first_group) * (ROWS / 16 * RESULTS) + thread_index / LANES * RESULTS;
    const uint num_steps = a.x_stride / 64;
    threadgroup uint4* staged = (threadgroup uint4*)memory;
    threadgroup float* factors = (threadgroup float*)(staged + STAGES * TOKENS * EIGHTHS);

    const Planes planes = in_registers(matrix.planes);
    device const uchar* own_weights[2] = { weights, GATED ? up_weights : weights };
    uint own_rows[2];
#pragma clang loop unroll(full)
    for (int h = 0; h < 2; ++h) {
        const uint row = min(row_of_tile<GATED>(first_row, g + 8 * h), matrix.num_rows - 1);
        own_rows[h] = (part.matrix * matrix.num_rows + row) * a.num_units;
    }
    // The weights and the words of two steps take turns: those of the last step are still multiplied while the next are
    // decoded and the ones after that are on their way.
    Raw<F> raw[2][2];
    uint words[2][4][4];
    const auto fetch_weights = [&](uint step, int turn) {
        const uint unit = min(4 * step + t, a.num_units - 1);
#pragma clang loop unroll(full)
        for (int h = 0; h < 2; ++h) {
            raw[turn][h] = load_unit<F>(own_weights[h], planes, own_rows[h], unit);
        }
    };
    fetch_weights(0, 0);
    fetch_weights(1, 1);

    // A thread brings one eighth of every 32nd row of activations. Rows that do not exist have the numbers of one that
    // does; nobody reads their sums.
    const auto row_of_x = [&](uint token) {
        const uint existing = min(first_token + token, part.num_rows - 1);
        return part.x_offset + (IS_GROUPED ? row_at(rows, a.gathers, part.first_place + existing) : existing);
    };
    constexpr int TURNS = TOKENS * EIGHTHS / NUM_THREADS;
    const uint own_eighth = thread_index % EIGHTHS;
    const uint own_token = thread_index / EIGHTHS;
    threadgroup uint4* target = staged + msl_swizzled(own_token, own_eighth);
    uint sources[TURNS];
    msl_wait_for_inputs();
#pragma clang loop unroll(full)
    for (int turn = 0; turn < TURNS; ++turn) {
        sources[turn] = row_of_x(own_token + turn * (NUM_THREADS / EIGHTHS)) * (a.x_stride / 8) + own_eighth;
    }
    const auto bring = [&](uint step) {
        if (step < num_steps) {
            threadgroup uint4* stage = target + step % STAGES * (TOKENS * EIGHTHS);
#pragma clang loop unroll(full)
            for (int turn = 0; turn < TURNS; ++turn) {
                msl_copy(stage + turn * NUM_THREADS, x + sources[turn] + step * EIGHTHS);
            }
        }
        msl_end_group();
    };
#pragma clang loop unroll(full)
    for (uint step = 0; step < STAGES - 2; ++step) {
        bring(step);
    }
    if (thread_index < uint(TOKENS)) {
        factors[thread_index] = x_factors[row_of_x(thread_index)];
    }

    float sums[TILES][4] = {};
    const auto multiply_step = [&](uint step, int turn) {
        thread uint (&own)[4][4] = words[turn];
        uint low[8];
        uint high[8];
        Decoder<F>::words(raw[turn][0], low);
        Decoder<F>::words(raw[turn][1], high);
        if (is_same_v<F, F16>) {
            // Words that need no decoding become others all the same, by adding zero: the compiler lets no products be
            // under way while what they might read is loaded.
#pragma clang loop unroll(full)
            for (int word = 0; word < 8; ++word) {
                low[word] = msl_add_pairs(low[word], 0x80008000u);
                high[word] = msl_add_pairs(high[word], 0x80008000u);
            }
        }
#pragma clang loop unroll(full)
        for (int k = 0; k < 4; ++k) {
            own[k][0] = low[2 * k];
            own[k][1] = high[2 * k];
            own[k][2] = low[2 * k + 1];
            own[k][3] = high[2 * k + 1];
        }
        fetch_weights(step + 2, turn);
        msl_wait_for_groups<STAGES - 3>();
        msl_show_copies();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        msl_begin_products(own);
#pragma clang loop unroll(full)
        for (int k = 0; k < 4; ++k) {
            msl_multiply_rows(sums, own[k], staged + step % STAGES * (TOKENS * EIGHTHS), k);
        }
        msl_end_products();
        // What was multiplied two steps ago is free: every warp has waited for that before the barrier.
        msl_wait_for_products<1>();
        bring(step + STAGES - 2);
    };
    for (uint step = 0; step < num_steps; step += 2) {
        multiply_step(step, 0);
        multiply_step(step + 1, 1);
    }
    msl_wait_for_products<0>();

    // All that is added to is read before anything is written: reads wait for writes to what might be the same place.
    if (ADDS) {
#pragma clang loop unroll(full)
        for (int n = 0; n < TILES; ++n) {
#pragma clang loop unroll(full)
            for (int i = 0; i < 4; ++i) {
                const uint token = 8 * n + 2 * t + i % 2;
                const uint row = first_row + g + 8 * (i / 2);
                const bool exists = first_token + token < part.num_rows && row < matrix.num_rows;
                const ulong place = part.out_offset + ulong(first_token + token) * a.out_stride + matrix.out_offset + row;
                sums[n][i] = fma(sums[n][i], factors[token], exists ? out[place] : 0.0f);
            }
        }
    }
#pragma clang loop unroll(full)
    for (int n = 0; n < TILES; ++n) {
#pragma clang loop unroll(full)
        for (int odd = 0; odd < 2; ++odd) {
            const uint token = 8 * n + 2 * t + odd;
            if (first_token + token >= part.num_rows) {
                continue;
            }
            const float factor = ADDS ? 1.0f : factors[token];
            const ulong place = part.out_offset + ulong(first_token + token) * a.out_stride + matrix.out_offset;
            const uint row = first_row + g;
            if (GATED) {
                if (row < matrix.num_rows) {
                    store(out, place + row, gated(sums[n][odd] * factor, sums[n][2 + odd] * factor));
                }
            } else {
#pragma clang loop unroll(full)
                for (int h = 0; h < 2; ++h) {
                    if (row + 8 * h < matrix.num_rows) {
                        const float other = HAS_BIAS ? bias[row + 8 * h] : 0.0f;
                        store(out, place + row + 8 * h, fma(sums[n][2 * h + odd], factor, other));
                    }
                }
            }
        }
    }
}

template <typename F, typename LAST, int TOKENS>
[[kernel]] void many_rows(
    constant ProductArgs& a [[buffer(0)]],
    device const uchar* weights0 [[buffer(1)]],
    device const uchar* weights1 [[buffer(2)]],
    device const uchar* weights2 [[buffer(3)]],
    device const float* bias0 [[buffer(4)]],
    device const float* bias1 [[buffer(5)]],
    device const float* bias2 [[buffer(6)]],
    device const uint4* x [[buffer(7)]],          // rounded: [row, stride]
    device const float* x_factors [[buffer(8)]],  // [row]
    device float* out [[buffer(9)]],
    device const RowGroup* groups [[buffer(10)]],
    device const uint* rows [[buffer(11)]],
    threadgroup char* memory [[threadgroup(0)]],
    uint3 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    msl_wait_for_inputs(IS_GROUPED);
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.x * TOKENS;
    if (first_token >= part.num_rows) {
        return;
    }
    const uint tile = index.y;
    const uint m = tile < a.matrices[1].first_group ? 0 : tile < a.matrices[2].first_group ? 1 : 2;
    device const uchar* weights = m == 0 ? weights0 : m == 1 ? weights1 : weights2;
    device const float* bias = m == 0 ? bias0 : m == 1 ? bias1 : bias2;
    if (is_same_v<F, LAST> || m < 2) {
        many<F, TOKENS, false>(
            a, a.matrices[m], weights, weights, bias, x, x_factors, out, rows, memory, tile, first_token, part,
            thread_index
        );
    } else {
        many<LAST, TOKENS, false>(
            a, a.matrices[2], weights2, weights2, bias2, x, x_factors, out, rows, memory, tile, first_token, part,
            thread_index
        );
    }
}

template <typename F, int TOKENS>
[[kernel]] void many_rows_swiglu(
    constant ProductArgs& a [[buffer(0)]],
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
    const Part part = part_of(a, groups, index.z);
    const uint first_token = index.x * TOKENS;
    if (first_token >= part.num_rows) {
        return;
    }
    many<F, TOKENS, true>(
        a, a.matrices[0], gate_weights, up_weights, x_factors, x, x_factors, out, rows, memory, index.y, first_token,
        part, thread_index
    );
}

// Rounds a row of activations, multiplied with the weights of the norm, to halves, in the order of columns that the weights
// of the format have. A power of two brings its largest value below the largest half; the factor takes it back, with the
// norm's own.
template <Pairs PAIRS>
[[kernel]] void round_rows(
    constant RoundArgs& a [[buffer(0)]],
    device const float* x [[buffer(1)]],
    device const float* norm [[buffer(2)]],
    device uint* rounded [[buffer(3)]],  // [matrix, row, stride] halves
    device float* factors [[buffer(4)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]]
) {
    threadgroup float maxima[32];
    threadgroup float sums[32];
    msl_wait_for_inputs();
    const ulong row = ulong(index.y) * a.num_rows + index.x;
    device const float* own = x + ulong(index.y) * a.x_next + ulong(index.x) * a.x_stride;
    const auto read_eight = [&](uint column, thread float (&values)[8]) {
#pragma clang loop unroll(full)
        for (int four = 0; four < 2; ++four) {
            const float4 read = *(device const float4*)(own + column + 4 * four);
#pragma clang loop unroll(full)
            for (int v = 0; v < 4; ++v) {
                values[4 * four + v] = read[v];
            }
        }
    };
    const auto weigh = [&](uint column, thread float (&values)[8]) {
        if (HAS_NORM) {
#pragma clang loop unroll(full)
            for (int v = 0; v < 8; ++v) {
                values[v] *= norm[column + v];
            }
        }
    };
    float maximum = 0.0f;
    float sum = 0.0f;
    for (uint eight = thread_index; eight < 2 * a.num_units; eight += num_threads) {
        float values[8];
        read_eight(8 * eight, values);
#pragma clang loop unroll(full)
        for (int v = 0; v < 8; ++v) {
            sum = fma(values[v], values[v], sum);
        }
        weigh(8 * eight, values);
#pragma clang loop unroll(full)
        for (int v = 0; v < 8; ++v) {
            maximum = max(maximum, abs(values[v]));
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
    const float scale = as_type<float>(exponent << 23);
    if (thread_index == 0) {
        const float inverse = as_type<float>((254 - exponent) << 23);
        factors[row] = HAS_NORM ? inverse * rsqrt(sum / float(16 * a.num_units) + a.eps) : inverse;
    }
    // A unit has a word in each eighth of its step, so the four lanes of a step exchange words: each gets two eighths, four
    // words of four units.
    device uint4* target = (device uint4*)(rounded + row * (a.stride / 2));
    const uint own_place = thread_index % 4;
    for (uint first = 0; first < a.stride / 16; first += num_threads) {
        const uint unit = first + thread_index;
        uint words[8] = {};
        if (unit < a.num_units) {
#pragma clang loop unroll(full)
            for (int eight = 0; eight < 2; ++eight) {
                float values[8];
                read_eight(16 * unit + 8 * eight, values);
                weigh(16 * unit + 8 * eight, values);
                const uint4 four = paired<PAIRS>(values, scale);
#pragma clang loop unroll(full)
                for (int word = 0; word < 4; ++word) {
                    words[4 * eight + word] = four[word];
                }
            }
        }
#pragma clang loop unroll(full)
        for (int eight = 0; eight < 8; eight += 4) {
            uint4 gathered;
#pragma clang loop unroll(full)
            for (uint turn = 0; turn < 4; ++turn) {
                // In turn `t`, a lane gives the word that lane ^ t wants, and gets that of unit ^ t.
                const uint wanted = own_place ^ turn;
                const uint given = wanted == 0 ? words[eight] : wanted == 1 ? words[eight + 1]
                                 : wanted == 2 ? words[eight + 2] : words[eight + 3];
                const uint got = simd_shuffle_xor(given, ushort(turn));
                gathered.x = wanted == 0 ? got : gathered.x;
                gathered.y = wanted == 1 ? got : gathered.y;
                gathered.z = wanted == 2 ? got : gathered.z;
                gathered.w = wanted == 3 ? got : gathered.w;
            }
            if (unit < a.stride / 16) {
                target[unit / 4 * 8 + eight + own_place] = gathered;
            }
        }
    }
}

INSTANCE(round_rows_neighbours, round_rows, Pairs::NEIGHBOURS)
INSTANCE(round_rows_four_apart, round_rows, Pairs::FOUR_APART)
INSTANCE(round_rows_two_apart, round_rows, Pairs::TWO_APART)

#define MANY(F, TOKENS)                                         \
    INSTANCE(many_rows_##F##_##TOKENS, many_rows, F, F, TOKENS) \
    INSTANCE(many_rows_swiglu_##F##_##TOKENS, many_rows_swiglu, F, TOKENS)
#define FORMAT(F) MANY(F, 64) MANY(F, 128) MANY(F, 256)
FORMAT(Q4_0)
FORMAT(Q4_1)
FORMAT(Q5_0)
FORMAT(Q5_1)
FORMAT(Q8_0)
FORMAT(Q4_K)
FORMAT(Q5_K)
FORMAT(Q6_K)
FORMAT(F16)
FORMAT(BF16)

#define MIXED(F, LAST)                                            \
    INSTANCE(many_rows_##F##_##LAST##_64, many_rows, F, LAST, 64)   \
    INSTANCE(many_rows_##F##_##LAST##_128, many_rows, F, LAST, 128) \
    INSTANCE(many_rows_##F##_##LAST##_256, many_rows, F, LAST, 256)
MIXED(Q4_K, Q6_K)
MIXED(Q5_K, Q6_K)
