// Choosing a token from the logits of each row, as the host's sampler does: bias, banned tokens, penalties,
// temperature, min-p, top-k, top-p and a draw from a counter-based generator.
//
// One threadgroup for each row. The vocabulary is divided into 32 contiguous segments, so that sums over segments are
// also prefix sums for the draw. A simdgroup has one segment or, on a device that allows fewer threads, every n-th
// segment: the order of additions is the same for any number of threads. Tokens are ranked by weight and then by id.
// Thresholds are found by the bits of weights, which are ordered like the weights: each of three passes over the row
// counts the values of the next ten bits. The passes add integers, so the order of threads does not matter.

// One simdgroup for each segment.
#define MAX_THREADS 1024
#include "threads.h"

struct SampleArgs {
    uint vocab_size;
    uint num_rows;
    uint step;  // in a multi-step launch: the number of tokens that each row has sampled before
};

// The parameters of a row.
struct SampleRow {
    float inverse_temperature;  // 0: greedy
    uint top_k;                 // 0: no limit
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint seed_low;
    uint seed_high;
    uint stream;
    uint num_output_tokens;     // before the first step
    uint min_tokens;            // banned tokens may appear from this number on
    uint history_start;
    uint history_len;
    uint bias_start;
    uint bias_len;
    uint ban_start;
    uint ban_len;
};

// A token that the row has seen before the first step.
struct Seen {
    uint token_id;
    uint count;  // in the output; 0 if it is only in the prompt
};

struct Bias {
    uint token_id;
    float bias;
};

constant constexpr uint NO_TOKEN = 0xFFFFFFFFu;
constant constexpr uint MINUS_INFINITY = 0xFF800000u;
constant constexpr uint NUM_SEGMENTS = 32;

// Tokens that a lane loads before it uses them, where their use would delay the next load.
constant constexpr int BATCH = 4;
// The same where a lane only compares them, which takes fewer registers.
constant constexpr int READS = 8;

// Bits of a weight that a pass distinguishes. Three passes cover all bits of a weight, since none is above 1.0.
constant constexpr int DIGIT_BITS = 10;
constant constexpr uint NUM_BINS = 1u << DIGIT_BITS;

// With a thousand threads, each has few registers: loops over segments and bins are not unrolled.

// The thread's indices in its threadgroup.
struct ThreadPosition {
    uint thread_index;
    uint num_threads;
    uint lane;
    uint group;
    uint num_groups;
};

// Bits that are ordered like the floats, including infinities. A compiler with fast math may assume that floats are
// finite.
inline uint ordered(uint bits) {
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

inline uint maximum_of_all(uint value, threadgroup uint* scratch, ThreadPosition position) {
    value = simd_max(value);
    if (position.lane == 0) {
        scratch[position.group] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint result = 0;
    for (uint g = 0; g < position.num_groups; ++g) {
        result = max(result, scratch[g]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

inline uint minimum_of_all(uint value, threadgroup uint* scratch, ThreadPosition position) {
    return ~maximum_of_all(~value, scratch, position);
}

// The tokens of a segment; a lane has every 32nd.
struct Range {
    uint begin;
    uint end;
};

inline Range range_of(uint vocab_size, uint segment) {
    const uint len = (vocab_size + NUM_SEGMENTS * LANES - 1) / (NUM_SEGMENTS * LANES) * LANES;
    Range range;
    range.begin = min(segment * len, vocab_size);
    range.end = min(range.begin + len, vocab_size);
    return range;
}

// The first of the most likely tokens; none if a logit is NaN or infinite, or if all are minus infinity.
inline uint most_likely(device const uint* logits, uint vocab_size, threadgroup uint* scratch, ThreadPosition position) {
    uint best = 0;
    uint best_id = NO_TOKEN;
    for (uint segment = position.group; segment < NUM_SEGMENTS; segment += position.num_groups) {
        const Range range = range_of(vocab_size, segment);
        for (uint first = range.begin + position.lane; first < range.end; first += READS * LANES) {
            uint batch[READS];
#pragma clang loop unroll(full)
            for (int b = 0; b < READS; ++b) {
                const uint i = first + b * LANES;
                batch[b] = i < range.end ? logits[i] : uint(MINUS_INFINITY);
            }
#pragma clang loop unroll(full)
            for (int b = 0; b < READS; ++b) {
                // NaN ranks highest.
                const bool is_nan = (batch[b] & 0x7FFFFFFFu) > 0x7F800000u;
                const uint rank = is_nan ? 0xFFFFFFFFu : ordered(batch[b]);
                if (rank > best) {
                    best = rank;
                    best_id = first + b * LANES;
                }
            }
        }
    }
    const uint highest = maximum_of_all(best, scratch, position);
    const uint id = minimum_of_all(best == highest ? best_id : uint(NO_TOKEN), scratch, position);
    const bool is_finite = highest < ordered(0x7F800000u) && highest > ordered(MINUS_INFINITY);
    return is_finite ? id : uint(NO_TOKEN);
}

inline float repeated(float logit, float penalty) {
    return logit > 0.0f ? logit / penalty : logit * penalty;
}

// The number of times that earlier steps of this multi-step sampled `token_id`.
inline uint times_sampled(device const uint* sampled, uint num_rows, uint row, uint steps, uint token_id) {
    uint count = 0;
    for (uint step = 0; step < steps; ++step) {
        count += sampled[step * num_rows + row] == token_id ? 1 : 0;
    }
    return count;
}

inline void penalize(device uint* logits, constant SampleRow& row, uint token_id, uint count) {
    const uint bits = logits[token_id];
    if (bits == MINUS_INFINITY) {
        return;
    }
    float logit = repeated(as_type<float>(bits), row.repetition_penalty);
    if (count > 0) {
        logit -= row.frequency_penalty * float(count) + row.presence_penalty;
    }
    logits[token_id] = as_type<uint>(logit);
}

// Applies everything that changes single logits.
inline void adjust(
    constant SampleArgs& a,
    constant SampleRow& row,
    uint row_index,
    device uint* logits,
    device const Seen* history,
    device const Bias* biases,
    device const uint* banned,
    device const uint* sampled,
    ThreadPosition position
) {
    // All threads have read the logits.
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = position.thread_index; i < row.bias_len; i += position.num_threads) {
        const uint token_id = biases[row.bias_start + i].token_id;
        if (token_id < a.vocab_size && logits[token_id] != MINUS_INFINITY) {
            logits[token_id] = as_type<uint>(as_type<float>(logits[token_id]) + biases[row.bias_start + i].bias);
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (row.num_output_tokens + a.step < row.min_tokens) {
        for (uint i = position.thread_index; i < row.ban_len; i += position.num_threads) {
            const uint token_id = banned[row.ban_start + i];
            if (token_id < a.vocab_size) {
                logits[token_id] = MINUS_INFINITY;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = position.thread_index; i < row.history_len; i += position.num_threads) {
        device const Seen& seen = history[row.history_start + i];
        const uint count = seen.count + times_sampled(sampled, a.num_rows, row_index, a.step, seen.token_id);
        penalize(logits, row, seen.token_id, count);
    }
    // Tokens that earlier steps sampled and the history lacks: each distinct one once, by its first step.
    const bool has_penalties =
        row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
    for (uint step = position.thread_index; has_penalties && step < a.step; step += position.num_threads) {
        const uint token_id = sampled[step * a.num_rows + row_index];
        bool is_new = token_id < a.vocab_size
            && times_sampled(sampled, a.num_rows, row_index, step, token_id) == 0;
        for (uint i = 0; is_new && i < row.history_len; ++i) {
            is_new = history[row.history_start + i].token_id != token_id;
        }
        if (is_new) {
            const uint count = times_sampled(sampled, a.num_rows, row_index, a.step, token_id);
            penalize(logits, row, token_id, count);
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
}

// A number in [0, 1) with 24 random bits: Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
// (SC 2011). These are the upper bits of the host's draw.
inline float uniform_number(constant SampleRow& row, uint index) {
    uint4 counter = uint4(index, 0, row.stream, 0);
    uint2 key = uint2(row.seed_low, row.seed_high);
    for (int round = 0; round < 10; ++round) {
        const uint low0 = 0xD2511F53u * counter.x;
        const uint low1 = 0xCD9E8D57u * counter.z;
        const uint high0 = mulhi(0xD2511F53u, counter.x);
        const uint high1 = mulhi(0xCD9E8D57u, counter.z);
        counter = uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key += uint2(0x9E3779B9u, 0xBB67AE85u);
    }
    return float(counter.x >> 8) * (1.0f / 16777216.0f);
}

// The tokens that remain: those with weights above `weight`, and those with that weight and an id up to `last_id`.
struct Cut {
    uint weight;  // the bits of a weight; weights are not negative, so bits are ordered like them
    uint last_id;
};

inline bool is_kept(uint weight, uint id, Cut cut) {
    return weight > cut.weight || (weight == cut.weight && id <= cut.last_id);
}

// The length of a prefix of the ranking.
struct Goal {
    uint count;   // tokens; 0: use `fraction` of the weight
    float fraction;  // of `total`
    ulong total;  // in fixed point; 0: the weight of all tokens that remain
};

// Threadgroup memory of the passes.
struct Memory {
    threadgroup uint* words;        // NUM_SEGMENTS
    threadgroup ulong* masses;      // LANES
    threadgroup atomic_uint* bins;  // NUM_BINS counts, and twice as many sums of lower bits
};

// A sum of weights in units of 2^-40: the sum of their mantissas and their common exponent.
inline ulong fixed_point(ulong mantissas, uint exponent) {
    constexpr uint UNIT = 127 + 23 - 40;
    return exponent >= UNIT ? mantissas << (exponent - UNIT) : mantissas >> min(UNIT - exponent, 63u);
}

inline ulong fixed_point(uint weight) {
    return fixed_point((weight & 0x007FFFFFu) | 0x00800000u, weight >> 23);
}

inline ulong fraction_of(ulong total, float fraction) {
    const ulong factor = ulong(uint(fraction * 4294967296.0f));
    return (total >> 32) * factor + ((total & 0xFFFFFFFFu) * factor >> 32);
}

// Counts the weights that `cut` keeps and whose highest bits are `prefix`, by the digit that ends `shift` bits above
// the lowest one. With `sums`, also adds up the bits below the digit, as two halves of equal width.
inline void count_digits(
    device const uint* weights,
    uint vocab_size,
    Cut cut,
    uint prefix,
    uint shift,
    bool sums,
    threadgroup atomic_uint* bins,
    ThreadPosition position
) {
    for (uint i = position.thread_index; i < 3 * NUM_BINS; i += position.num_threads) {
        atomic_store_explicit(&bins[i], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint segment = position.group; segment < NUM_SEGMENTS; segment += position.num_groups) {
        const Range range = range_of(vocab_size, segment);
        for (uint first = range.begin + position.lane; first < range.end; first += BATCH * LANES) {
            uint batch[BATCH];
#pragma clang loop unroll(full)
            for (int b = 0; b < BATCH; ++b) {
                const uint i = first + b * LANES;
                batch[b] = i < range.end ? weights[i] : 0;
            }
#pragma clang loop unroll(full)
            for (int b = 0; b < BATCH; ++b) {
                const uint weight = batch[b];
                if (weight == 0 || weight >> shift >> DIGIT_BITS != prefix || !is_kept(weight, first + b * LANES, cut)) {
                    continue;
                }
                const uint bin = weight >> shift & (NUM_BINS - 1);
                const uint below = weight & ((1u << shift) - 1);
                atomic_fetch_add_explicit(&bins[bin], 1u, memory_order_relaxed);
                if (sums && below > 0) {
                    atomic_fetch_add_explicit(&bins[NUM_BINS + bin], below & (NUM_BINS - 1), memory_order_relaxed);
                    atomic_fetch_add_explicit(&bins[2 * NUM_BINS + bin], below >> DIGIT_BITS, memory_order_relaxed);
                }
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A bin's contribution to the goal: its tokens, or their weight.
inline ulong mass_of(threadgroup const atomic_uint* bins, uint prefix, uint shift, uint bin, bool sums) {
    const ulong count = atomic_load_explicit(&bins[bin], memory_order_relaxed);
    if (!sums || count == 0) {
        return count;
    }
    const ulong low = atomic_load_explicit(&bins[NUM_BINS + bin], memory_order_relaxed);
    const ulong high = atomic_load_explicit(&bins[2 * NUM_BINS + bin], memory_order_relaxed);
    const uint lowest = (prefix << DIGIT_BITS | bin) << shift;
    const ulong mantissa = (lowest & 0x007FFFFFu) | 0x00800000u;
    return fixed_point(count * mantissa + (high << DIGIT_BITS) + low, lowest >> 23);
}

// The `number`-th token (from 1 on) of those that `cut` keeps and that have this weight.
inline uint find_equal(
    device const uint* weights, uint vocab_size, Cut cut, uint weight, uint number, Memory memory, ThreadPosition position
) {
    for (uint segment = position.group; segment < NUM_SEGMENTS; segment += position.num_groups) {
        const Range range = range_of(vocab_size, segment);
        uint count = 0;
        for (uint i = range.begin + position.lane; i < range.end; i += LANES) {
            count += weights[i] == weight && is_kept(weight, i, cut) ? 1 : 0;
        }
        count = simd_sum(count);
        if (position.lane == 0) {
            memory.words[segment] = count;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint found = NO_TOKEN;
    for (uint segment = position.group; segment < NUM_SEGMENTS && found == NO_TOKEN; segment += position.num_groups) {
        uint running = 0;
#pragma clang loop unroll(disable)
        for (uint p = 0; p < segment; ++p) {
            running += memory.words[p];
        }
        if (running >= number || running + memory.words[segment] < number) {
            continue;
        }
        const Range range = range_of(vocab_size, segment);
        for (uint first = range.begin; first < range.end && found == NO_TOKEN; first += LANES) {
            const uint i = first + position.lane;
            const bool is_equal = i < range.end && weights[i] == weight && is_kept(weight, i, cut);
            const uint up_to_here = running + simd_prefix_inclusive_sum(is_equal ? 1u : 0u);
            found = simd_min(is_equal && up_to_here == number ? i : uint(NO_TOKEN));
            running = simd_shuffle(up_to_here, ushort(LANES - 1));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return minimum_of_all(found, memory.words, position);
}

// The shortest prefix of the ranking that reaches the goal; all remaining tokens if none does.
inline Cut shortest(
    device const uint* weights, uint vocab_size, Cut cut, Goal goal, Memory memory, ThreadPosition position
) {
    constexpr uint BINS_PER_LANE = NUM_BINS / LANES;
    const bool sums = goal.count == 0;
    ulong wanted = goal.count;
    ulong above = 0;
    uint prefix = 0;
    uint num_equal = 0;
#pragma clang loop unroll(disable)
    for (int shift = 2 * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        count_digits(weights, vocab_size, cut, prefix, shift, sums, memory.bins, position);
        // The first simdgroup scans the bins, from the highest one on.
        const uint first_bin = NUM_BINS - 1 - position.lane * BINS_PER_LANE;
        ulong mass = 0;
        if (position.group == 0) {
#pragma clang loop unroll(disable)
            for (uint i = 0; i < BINS_PER_LANE; ++i) {
                mass += mass_of(memory.bins, prefix, shift, first_bin - i, sums);
            }
            memory.masses[position.lane] = mass;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        ulong total = 0;
        ulong before = above;
#pragma clang loop unroll(disable)
        for (uint lane = 0; lane < uint(LANES); ++lane) {
            total += memory.masses[lane];
            before += lane < position.lane ? memory.masses[lane] : 0;
        }
        if (shift == 2 * DIGIT_BITS) {
            wanted = sums ? max(fraction_of(goal.total > 0 ? goal.total : total, goal.fraction), ulong(1)) : wanted;
            if (total < wanted) {
                return cut;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (position.group == 0 && before < wanted && wanted <= before + mass) {
            uint bin = first_bin;
            ulong next = mass_of(memory.bins, prefix, shift, bin, sums);
            while (before + next < wanted) {
                before += next;
                bin -= 1;
                next = mass_of(memory.bins, prefix, shift, bin, sums);
            }
            memory.masses[0] = before;
            memory.words[0] = bin;
            memory.words[1] = atomic_load_explicit(&memory.bins[bin], memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        above = memory.masses[0];
        prefix = prefix << DIGIT_BITS | memory.words[0];
        num_equal = memory.words[1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // The weight at which the goal is reached. Of several tokens with that weight, only the number needed is kept.
    const ulong one = sums ? max(fixed_point(prefix), ulong(1)) : 1;
    const ulong number = (wanted - above + one - 1) / one;
    Cut last;
    last.weight = prefix;
    last.last_id = prefix == cut.weight ? cut.last_id : uint(NO_TOKEN);
    if (number < num_equal) {
        last.last_id = find_equal(weights, vocab_size, cut, prefix, uint(number), memory, position);
    }
    return last;
}

// The token at which the running sum of kept weights, in the order of ids, exceeds `u` times their total.
inline uint draw(
    device const uint* weights, uint vocab_size, Cut cut, float u, threadgroup uint* scratch, ThreadPosition position
) {
    threadgroup float* sums = (threadgroup float*)scratch;
    uint last_kept = 0;
    for (uint segment = position.group; segment < NUM_SEGMENTS; segment += position.num_groups) {
        const Range range = range_of(vocab_size, segment);
        float sum = 0.0f;
        for (uint i = range.begin + position.lane; i < range.end; i += LANES) {
            const uint weight = weights[i];
            if (weight > 0 && is_kept(weight, i, cut)) {
                sum += as_type<float>(weight);
                last_kept = i + 1;
            }
        }
        sum = simd_sum(sum);
        if (position.lane == 0) {
            sums[segment] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
#pragma clang loop unroll(disable)
    for (uint segment = 0; segment < NUM_SEGMENTS; ++segment) {
        total += sums[segment];
    }
    const float target = u * total;
    // The first token of the thread's segments past the target; the very last token if rounding missed the target.
    uint found = NO_TOKEN;
    for (uint segment = position.group; segment < NUM_SEGMENTS && found == NO_TOKEN; segment += position.num_groups) {
        float running = 0.0f;
#pragma clang loop unroll(disable)
        for (uint p = 0; p < segment; ++p) {
            running += sums[p];
        }
        if (running + sums[segment] <= target) {
            continue;
        }
        const Range range = range_of(vocab_size, segment);
        for (uint first = range.begin; first < range.end && found == NO_TOKEN; first += LANES) {
            const uint i = first + position.lane;
            const uint weight = i < range.end ? weights[i] : 0;
            const float own = weight > 0 && is_kept(weight, i, cut) ? as_type<float>(weight) : 0.0f;
            const float up_to_here = running + simd_prefix_inclusive_sum(own);
            found = simd_min(own > 0.0f && up_to_here > target ? i : uint(NO_TOKEN));
            running = simd_shuffle(up_to_here, ushort(LANES - 1));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint first_found = minimum_of_all(found, scratch, position);
    const uint last = maximum_of_all(last_kept, scratch, position) - 1;
    return first_found != NO_TOKEN ? first_found : last;
}

[[kernel]] void sample(
    constant SampleArgs& a [[buffer(0)]],
    constant SampleRow* rows [[buffer(1)]],
    device const Seen* history [[buffer(2)]],
    device const Bias* biases [[buffer(3)]],
    device const uint* banned [[buffer(4)]],
    device uint* all_logits [[buffer(5)]],  // f32 as bits, changed
    device uint* sampled [[buffer(6)]],     // [step, row]
    uint index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    // A slot for each simdgroup or for each segment.
    threadgroup uint scratch[NUM_SEGMENTS];
    threadgroup ulong masses[LANES];
    threadgroup atomic_uint bins[3 * NUM_BINS];
    const Memory memory = { scratch, masses, bins };
    ThreadPosition position;
    position.thread_index = thread_index;
    position.num_threads = num_threads;
    position.lane = lane;
    position.group = group;
    position.num_groups = num_groups;
    constant SampleRow& row = rows[index];
    device uint* logits = all_logits + ulong(index) * a.vocab_size;

    uint token = most_likely(logits, a.vocab_size, scratch, position);
    const bool is_changed = row.bias_len > 0 || row.history_len > 0 || row.repetition_penalty != 1.0f
        || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f
        || (row.ban_len > 0 && row.num_output_tokens + a.step < row.min_tokens);
    if (token != NO_TOKEN && is_changed) {
        adjust(a, row, index, logits, history, biases, banned, sampled, position);
        token = most_likely(logits, a.vocab_size, scratch, position);
    }
    if (token != NO_TOKEN && row.inverse_temperature > 0.0f) {
        // Probabilities up to a common factor: the most likely token has 1.
        const float highest = as_type<float>(logits[token]);
        threadgroup_barrier(mem_flags::mem_device);
        threadgroup float* sums = (threadgroup float*)scratch;
        for (uint segment = group; segment < NUM_SEGMENTS; segment += num_groups) {
            const Range range = range_of(a.vocab_size, segment);
            float sum = 0.0f;
            for (uint first = range.begin + lane; first < range.end; first += BATCH * LANES) {
                uint batch[BATCH];
#pragma clang loop unroll(full)
                for (int b = 0; b < BATCH; ++b) {
                    const uint i = first + b * LANES;
                    batch[b] = i < range.end ? logits[i] : uint(MINUS_INFINITY);
                }
#pragma clang loop unroll(full)
                for (int b = 0; b < BATCH; ++b) {
                    const float logit = as_type<float>(batch[b]);
                    const float weight =
                        batch[b] == MINUS_INFINITY ? 0.0f : exp((logit - highest) * row.inverse_temperature);
                    sum += weight;
                    if (first + b * LANES < range.end) {
                        logits[first + b * LANES] = as_type<uint>(weight);
                    }
                }
            }
            sum = simd_sum(sum);
            if (lane == 0) {
                sums[segment] = sum;
            }
        }
        // From here on, each thread reads only values that it has written itself.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float total = 0.0f;
#pragma clang loop unroll(disable)
        for (uint segment = 0; segment < NUM_SEGMENTS; ++segment) {
            total += sums[segment];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Cut cut;
        cut.weight = as_type<uint>(row.min_p);
        cut.last_id = NO_TOKEN;
        Goal goal;
        if (row.top_k > 0) {
            goal.count = row.top_k;
            cut = shortest(logits, a.vocab_size, cut, goal, memory, position);
        }
        if (row.top_p < 1.0f) {
            goal.count = 0;
            goal.fraction = row.top_p;
            goal.total = 0;
            if (row.top_k == 0) {
                // Tokens whose total weight is too small to matter need not be counted.
                const float negligible = (1.0f - row.top_p) * total / float(a.vocab_size);
                cut.weight = max(cut.weight, as_type<uint>(negligible));
                goal.total = row.min_p > 0.0f ? 0 : fixed_point(as_type<uint>(total));
            }
            cut = shortest(logits, a.vocab_size, cut, goal, memory, position);
        }
        const float u = uniform_number(row, row.num_output_tokens + a.step);
        token = draw(logits, a.vocab_size, cut, u, scratch, position);
    }
    if (thread_index == 0) {
        sampled[a.step * a.num_rows + index] = token;
    }
}
