// Choosing a token from the logits of each row, as the host's sampler does: bias, banned tokens, penalties,
// temperature, min-p, top-k, top-p and a draw from a counter-based generator.
//
// One threadgroup for each row. The vocabulary is cut into 32 contiguous parts, so that sums over parts are also the
// beginnings of the parts in the draw. A simdgroup has one part or, on a device that allows fewer threads, every so
// many: what is added to what is the same for any number of threads. Tokens are ranked by weight and then by id.
// Thresholds are found by bisection over the bits of weights, which are ordered like the weights: each step is one
// pass over the row.

#include "threads.h"

struct SampleArgs {
    uint vocab_size;
    uint num_rows;
    uint step;  // of a multi-step: how many tokens each row has sampled before
};

// The parameters of a row.
struct SampleRow {
    float inverse_temperature;  // 0: the most likely token
    uint top_k;                 // 0: all
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    uint seed_low;
    uint seed_high;
    uint stream;
    uint num_output_tokens;     // before the first step
    uint min_tokens;            // banned tokens are banned below it
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
constant constexpr uint NUM_PARTS = 32;

// What a thread is in its threadgroup.
struct Place {
    uint thread_index;
    uint num_threads;
    uint lane;
    uint group;
    uint num_groups;
};

// Bits that are ordered like the floats, also the infinite ones. Comparisons of floats would be compiled as if
// there were none.
inline uint ordered(uint bits) {
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

inline uint maximum_of_all(uint value, threadgroup uint* scratch, Place place) {
    value = simd_max(value);
    if (place.lane == 0) {
        scratch[place.group] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint result = 0;
    for (uint g = 0; g < place.num_groups; ++g) {
        result = max(result, scratch[g]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

inline uint minimum_of_all(uint value, threadgroup uint* scratch, Place place) {
    return ~maximum_of_all(~value, scratch, place);
}

inline uint count_of_all(uint value, threadgroup uint* scratch, Place place) {
    value = simd_sum(value);
    if (place.lane == 0) {
        scratch[place.group] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint result = 0;
    for (uint g = 0; g < place.num_groups; ++g) {
        result += scratch[g];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return result;
}

// The tokens of a part, of which a lane takes every 32nd.
struct Range {
    uint begin;
    uint end;
};

inline Range range_of(uint vocab_size, uint part) {
    const uint len = (vocab_size + NUM_PARTS * LANES - 1) / (NUM_PARTS * LANES) * LANES;
    Range range;
    range.begin = min(part * len, vocab_size);
    range.end = min(range.begin + len, vocab_size);
    return range;
}

// The first of the most likely tokens; none if a logit is NaN or infinite or all are minus infinity.
inline uint most_likely(device const uint* logits, uint vocab_size, threadgroup uint* scratch, Place place) {
    uint best = 0;
    uint best_id = NO_TOKEN;
    for (uint part = place.group; part < NUM_PARTS; part += place.num_groups) {
        const Range range = range_of(vocab_size, part);
        for (uint i = range.begin + place.lane; i < range.end; i += LANES) {
            const uint bits = logits[i];
            // NaN becomes the highest of all.
            const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
            const uint rank = is_nan ? 0xFFFFFFFFu : ordered(bits);
            if (rank > best) {
                best = rank;
                best_id = i;
            }
        }
    }
    const uint highest = maximum_of_all(best, scratch, place);
    const uint id = minimum_of_all(best == highest ? best_id : NO_TOKEN, scratch, place);
    const bool is_finite = highest < ordered(0x7F800000u) && highest > ordered(MINUS_INFINITY);
    return is_finite ? id : NO_TOKEN;
}

inline float repeated(float logit, float penalty) {
    return logit > 0.0f ? logit / penalty : logit * penalty;
}

// How often `token_id` was sampled in earlier steps of this multi-step.
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
    Place place
) {
    // All threads have read the logits.
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = place.thread_index; i < row.bias_len; i += place.num_threads) {
        const uint token_id = biases[row.bias_start + i].token_id;
        if (token_id < a.vocab_size && logits[token_id] != MINUS_INFINITY) {
            logits[token_id] = as_type<uint>(as_type<float>(logits[token_id]) + biases[row.bias_start + i].bias);
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (row.num_output_tokens + a.step < row.min_tokens) {
        for (uint i = place.thread_index; i < row.ban_len; i += place.num_threads) {
            const uint token_id = banned[row.ban_start + i];
            if (token_id < a.vocab_size) {
                logits[token_id] = MINUS_INFINITY;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    for (uint i = place.thread_index; i < row.history_len; i += place.num_threads) {
        device const Seen& seen = history[row.history_start + i];
        const uint count = seen.count + times_sampled(sampled, a.num_rows, row_index, a.step, seen.token_id);
        penalize(logits, row, seen.token_id, count);
    }
    // What was sampled in earlier steps and is not in the history: each such token once, by its first step.
    const bool has_penalties =
        row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
    for (uint step = place.thread_index; has_penalties && step < a.step; step += place.num_threads) {
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

// A number in [0, 1) with 24 random bits: Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3" (SC 2011), the upper bits of what the host draws.
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

// The tokens that are left: weights above `weight`, and of those with that weight the ids up to `last_id`.
struct Cut {
    uint weight;  // the bits of a weight, which are ordered like it, as no weight is negative
    uint last_id;
};

inline bool is_kept(uint weight, uint id, Cut cut) {
    return weight > cut.weight || (weight == cut.weight && id <= cut.last_id);
}

// How many tokens that `cut` keeps have at least the weight `least` (and an id up to `last_id` if equal), and the sum
// of their weights.
struct Mass {
    uint count;
    float sum;
};

inline Mass mass_from(
    device const uint* weights, uint vocab_size, Cut cut, Cut from, threadgroup uint* scratch, Place place
) {
    threadgroup float* sums = (threadgroup float*)scratch;
    uint count = 0;
    for (uint part = place.group; part < NUM_PARTS; part += place.num_groups) {
        const Range range = range_of(vocab_size, part);
        float sum = 0.0f;
        for (uint i = range.begin + place.lane; i < range.end; i += LANES) {
            const uint weight = weights[i];
            if (is_kept(weight, i, cut) && is_kept(weight, i, from)) {
                count += 1;
                sum += as_type<float>(weight);
            }
        }
        sum = simd_sum(sum);
        if (place.lane == 0) {
            sums[part] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Mass mass;
    mass.sum = 0.0f;
    for (uint part = 0; part < NUM_PARTS; ++part) {
        mass.sum += sums[part];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mass.count = count_of_all(count, scratch, place);
    return mass;
}

// The shortest beginning of the ranking that has `count` tokens or, with `count` 0, the weight `sum`.
inline Cut shortest(
    device const uint* weights, uint vocab_size, Cut cut, uint count, float sum, threadgroup uint* scratch, Place place
) {
    // The highest weight from which on there is enough. 1.0 is the weight of the most likely token.
    Cut from;
    from.last_id = NO_TOKEN;
    uint low = cut.weight;
    uint high = as_type<uint>(1.0f);
    while (low < high) {
        const uint middle = low + (high - low + 1) / 2;
        from.weight = middle;
        const Mass mass = mass_from(weights, vocab_size, cut, from, scratch, place);
        const bool is_enough = count > 0 ? mass.count >= count : mass.sum >= sum;
        if (is_enough) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    from.weight = low;
    // The first id among equals with which there is enough.
    uint first = 0;
    uint last = vocab_size - 1;
    while (first < last) {
        const uint middle = first + (last - first) / 2;
        from.last_id = middle;
        const Mass mass = mass_from(weights, vocab_size, cut, from, scratch, place);
        const bool is_enough = count > 0 ? mass.count >= count : mass.sum >= sum;
        if (is_enough) {
            last = middle;
        } else {
            first = middle + 1;
        }
    }
    from.last_id = first;
    return from;
}

// The token at which the running sum of kept weights, in the order of ids, exceeds `u` times all.
inline uint draw(
    device const uint* weights, uint vocab_size, Cut cut, float u, threadgroup uint* scratch, Place place
) {
    threadgroup float* sums = (threadgroup float*)scratch;
    uint last_kept = 0;
    for (uint part = place.group; part < NUM_PARTS; part += place.num_groups) {
        const Range range = range_of(vocab_size, part);
        float sum = 0.0f;
        for (uint i = range.begin + place.lane; i < range.end; i += LANES) {
            const uint weight = weights[i];
            if (weight > 0 && is_kept(weight, i, cut)) {
                sum += as_type<float>(weight);
                last_kept = i + 1;
            }
        }
        sum = simd_sum(sum);
        if (place.lane == 0) {
            sums[part] = sum;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (uint part = 0; part < NUM_PARTS; ++part) {
        total += sums[part];
    }
    const float target = u * total;
    // The first token of the own parts that goes beyond the target; the last token of all if rounding lost it.
    uint found = NO_TOKEN;
    for (uint part = place.group; part < NUM_PARTS && found == NO_TOKEN; part += place.num_groups) {
        float running = 0.0f;
        for (uint p = 0; p < part; ++p) {
            running += sums[p];
        }
        if (running + sums[part] <= target) {
            continue;
        }
        const Range range = range_of(vocab_size, part);
        for (uint first = range.begin; first < range.end && found == NO_TOKEN; first += LANES) {
            const uint i = first + place.lane;
            const uint weight = i < range.end ? weights[i] : 0;
            const float own = weight > 0 && is_kept(weight, i, cut) ? as_type<float>(weight) : 0.0f;
            const float up_to_here = running + simd_prefix_inclusive_sum(own);
            found = simd_min(own > 0.0f && up_to_here > target ? i : NO_TOKEN);
            running = simd_shuffle(up_to_here, ushort(LANES - 1));
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint first_found = minimum_of_all(found, scratch, place);
    const uint last = maximum_of_all(last_kept, scratch, place) - 1;
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
    // A place for each simdgroup or for each part.
    threadgroup uint scratch[NUM_PARTS];
    Place place;
    place.thread_index = thread_index;
    place.num_threads = num_threads;
    place.lane = lane;
    place.group = group;
    place.num_groups = num_groups;
    constant SampleRow& row = rows[index];
    device uint* logits = all_logits + ulong(index) * a.vocab_size;

    uint token = most_likely(logits, a.vocab_size, scratch, place);
    const bool is_changed = row.bias_len > 0 || row.history_len > 0 || row.repetition_penalty != 1.0f
        || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f
        || (row.ban_len > 0 && row.num_output_tokens + a.step < row.min_tokens);
    if (token != NO_TOKEN && is_changed) {
        adjust(a, row, index, logits, history, biases, banned, sampled, place);
        token = most_likely(logits, a.vocab_size, scratch, place);
    }
    if (token != NO_TOKEN && row.inverse_temperature > 0.0f) {
        // Probabilities up to a common factor: the most likely token has 1.
        const float highest = as_type<float>(logits[token]);
        threadgroup_barrier(mem_flags::mem_device);
        for (uint part = group; part < NUM_PARTS; part += num_groups) {
            const Range range = range_of(a.vocab_size, part);
            for (uint i = range.begin + lane; i < range.end; i += LANES) {
                const uint bits = logits[i];
                const float weight = exp((as_type<float>(bits) - highest) * row.inverse_temperature);
                logits[i] = bits == MINUS_INFINITY ? 0 : as_type<uint>(weight);
            }
        }
        // From here on, each thread reads only what it has written itself.
        Cut cut;
        cut.weight = as_type<uint>(row.min_p);
        cut.last_id = NO_TOKEN;
        Cut everything;
        everything.weight = 0;
        everything.last_id = NO_TOKEN;
        if (row.top_k > 0 && mass_from(logits, a.vocab_size, cut, everything, scratch, place).count > row.top_k) {
            cut = shortest(logits, a.vocab_size, cut, row.top_k, 0.0f, scratch, place);
        }
        if (row.top_p < 1.0f) {
            const float total = mass_from(logits, a.vocab_size, cut, everything, scratch, place).sum;
            cut = shortest(logits, a.vocab_size, cut, 0, row.top_p * total, scratch, place);
        }
        const float u = uniform_number(row, row.num_output_tokens + a.step);
        token = draw(logits, a.vocab_size, cut, u, scratch, place);
    }
    if (thread_index == 0) {
        sampled[a.step * a.num_rows + index] = token;
    }
}
