// Mixture of experts: routes tokens to experts, groups the routed rows by expert, and combines the experts' results.
//
// One simdgroup per token computes its experts from the router's logits. One threadgroup then groups tokens by expert
// with a counting sort, which keeps their order. In a step of few tokens, the same threadgroup does both in one launch.
// The choices of a single token are groups without sorting.

#include "gated.h"
#include "groups.h"
#include "threads.h"

struct ChooseArgs {
    uint num_rows;         // tokens
    uint num_experts;      // experts that the router chooses from
    uint num_chosen;       // experts per token
    uint num_shared;       // shared experts, which follow the others and which every token goes through
    uint num_groups;       // groups of experts
    uint num_open_groups;  // groups that stay open to choices
    uint max_group_rows;   // maximum rows of a group of tokens
    uint max_groups;       // slots in the list of those groups
    float scale;           // of the weights
    uint is_sigmoid;       // or softmax
    uint normalizes;       // scales the weights to a sum of `scale`
    uint has_bias;         // added to the scores that choose
    uint chooses;          // which of its steps the launch runs
    uint groups;
};

constant constexpr int SIMDGROUPS = 8;
constant constexpr int NUM_THREADS = SIMDGROUPS * LANES;
// Scores of experts in closed groups and of experts that are already chosen, below every real score.
constant constexpr float CLOSED = -1e30f;
constant constexpr float CHOSEN = -2e30f;
constant constexpr uint NO_EXPERT = 0xFFFFFFFFu;

// The best score over the lanes' experts, and the first expert that has it.
struct Best {
    float score;
    uint expert;
};

inline Best best_of_lanes(float score, uint expert) {
    Best best;
    best.score = simd_max(score);
    best.expert = simd_min(score >= best.score ? expert : uint(NO_EXPERT));
    return best;
}

// The best of experts `begin` to `end`, except one. A lane scans every LANES-th expert.
inline Best best_between(threadgroup const float* scores, uint begin, uint end, uint except, uint lane) {
    float score = 2.0f * CHOSEN;
    uint expert = NO_EXPERT;
    for (uint e = lane; e < end; e += LANES) {
        if (e >= begin && e != except && scores[e] > score) {
            score = scores[e];
            expert = e;
        }
    }
    return best_of_lanes(score, expert);
}

// Closes all groups of experts except the best ones. A group's score is that of its best expert or, with sigmoids, the
// sum of its best two.
inline void close_groups(constant ChooseArgs& a, threadgroup float* scores, uint lane) {
    const uint group_len = a.num_experts / a.num_groups;
    float own_score = CHOSEN;
    for (uint g = 0; g < a.num_groups; ++g) {
        const uint begin = g * group_len;
        const Best first = best_between(scores, begin, begin + group_len, NO_EXPERT, lane);
        float score = first.score;
        if (a.is_sigmoid != 0 && group_len > 1) {
            score += best_between(scores, begin, begin + group_len, first.expert, lane).score;
        }
        own_score = lane == g ? score : own_score;
    }
    uint num_better = 0;
    for (uint g = 0; g < a.num_groups; ++g) {
        const float other = simd_shuffle(own_score, ushort(g));
        num_better += other > own_score || (other == own_score && g < lane) ? 1 : 0;
    }
    for (uint first = 0; first < a.num_experts; first += LANES) {
        const uint expert = first + lane;
        const uint group = min(expert / group_len, a.num_groups - 1);
        const bool is_closed = simd_shuffle(num_better, ushort(group)) >= a.num_open_groups;
        if (is_closed && expert < a.num_experts) {
            scores[expert] = CLOSED;
        }
    }
}

// Chooses the experts of a token. A lane reads only its own entries in threadgroup memory.
inline void choose(
    constant ChooseArgs& a,
    device const float* logits,
    device const float* bias,
    device uint* experts,
    device float* weights,
    threadgroup float* probabilities,
    threadgroup float* scores,
    uint lane
) {
    float maximum = CLOSED;
    for (uint e = lane; e < a.num_experts; e += LANES) {
        maximum = max(maximum, logits[e]);
    }
    maximum = simd_max(maximum);
    float sum = 0.0f;
    for (uint e = lane; e < a.num_experts; e += LANES) {
        const float own = a.is_sigmoid != 0 ? 1.0f / (1.0f + exp(-logits[e])) : exp(logits[e] - maximum);
        probabilities[e] = own;
        sum += own;
    }
    const float total = a.is_sigmoid != 0 ? 1.0f : simd_sum(sum);
    for (uint e = lane; e < a.num_experts; e += LANES) {
        probabilities[e] /= total;
        const float score = probabilities[e] + (a.has_bias != 0 ? bias[e] : 0.0f);
        // NaN ranks below every number. Its bits are compared, because a comparison of floats may be taken for one
        // without NaN.
        const bool is_nan = (as_type<uint>(score) & 0x7FFFFFFFu) > 0x7F800000u;
        scores[e] = is_nan || score < CLOSED ? float(CLOSED) : score;
    }
    if (a.num_open_groups < a.num_groups) {
        close_groups(a, scores, lane);
    }
    // Lane `i` has the weight of choice `i`.
    uint own_expert = 0;
    float own_weight = 0.0f;
    for (uint choice = 0; choice < a.num_chosen; ++choice) {
        const uint expert = min(best_between(scores, 0, a.num_experts, NO_EXPERT, lane).expert, a.num_experts - 1);
        float weight = 0.0f;
        if (expert % LANES == lane) {
            scores[expert] = CHOSEN;
            weight = probabilities[expert];
        }
        weight = simd_shuffle(weight, ushort(expert % LANES));
        if (choice == lane) {
            own_expert = expert;
            own_weight = weight;
        }
    }
    // The constant that models were trained with: the sum is never 0.
    const float chosen_sum = a.normalizes != 0 ? simd_sum(own_weight) + 1e-20f : 1.0f;
    if (lane < a.num_chosen) {
        experts[lane] = own_expert;
        weights[lane] = own_weight * (a.scale / chosen_sum);
    } else if (lane < a.num_chosen + a.num_shared) {
        experts[lane] = a.num_experts + lane - a.num_chosen;
        weights[lane] = 1.0f;
    }
}

// For the lane's expert: the number of earlier lanes with the same one, and the number of all of them. NO_EXPERT counts
// as none.
struct Rank {
    uint before;
    uint all;
};

inline Rank rank_of(uint expert, uint lane) {
    Rank rank = {0, 0};
    for (uint other = 0; other < uint(LANES); ++other) {
        const bool is_same = simd_shuffle(expert, ushort(other)) == expert;
        rank.all += is_same ? 1 : 0;
        rank.before += is_same && other < lane ? 1 : 0;
    }
    return rank;
}

// Gives every choice a slot. The slots of an expert are adjacent, in the order of the choices. Each simdgroup has a
// segment of the choices, and a table of its count for each expert.
inline void group_rows(
    constant ChooseArgs& a,
    device const uint* experts,
    device uint* slots,
    device uint* rows,
    device RowGroup* groups,
    threadgroup uint* tables,
    uint thread_index,
    uint lane,
    uint group
) {
    const uint num_experts = a.num_experts + a.num_shared;
    const uint per_token = a.num_chosen + a.num_shared;
    const uint num_choices = a.num_rows * per_token;
    if (a.num_rows == 1) {
        // A token's choices are different experts, so each is a group already.
        if (thread_index < num_choices) {
            slots[thread_index] = thread_index;
            rows[thread_index] = 0;
            groups[thread_index].matrix = experts[thread_index];
            groups[thread_index].first_slot = thread_index;
            groups[thread_index].num_rows = 1;
        }
        return;
    }
    const uint segment_len = (num_choices + NUM_THREADS - 1) / NUM_THREADS * LANES;
    const uint num_segments = (num_choices + segment_len - 1) / segment_len;
    threadgroup uint* own = tables + group * num_experts;
    threadgroup uint* num_groups_of_all = tables + num_segments * num_experts;
    for (uint i = thread_index; i < num_segments * num_experts; i += NUM_THREADS) {
        tables[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint begin = min(group * segment_len, num_choices);
    const uint end = min(begin + segment_len, num_choices);
    for (uint first = begin; first < end; first += LANES) {
        const uint expert = first + lane < end ? experts[first + lane] : uint(NO_EXPERT);
        const Rank rank = rank_of(expert, lane);
        if (expert != NO_EXPERT && rank.before == 0) {
            own[expert] += rank.all;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The first slot of each expert in each segment; then the groups.
    if (group == 0) {
        uint num_slots = 0;
        uint num_groups = 0;
        for (uint first = 0; first < num_experts; first += LANES) {
            const bool exists = first + lane < num_experts;
            threadgroup uint* of_expert = tables + min(first + lane, num_experts - 1);
            uint count = 0;
            for (uint segment = 0; segment < num_segments; ++segment) {
                count += exists ? of_expert[segment * num_experts] : 0;
            }
            const uint num_own_groups = (count + a.max_group_rows - 1) / a.max_group_rows;
            uint slot = num_slots + simd_prefix_exclusive_sum(count);
            const uint own_groups = num_groups + simd_prefix_exclusive_sum(num_own_groups);
            for (uint i = 0; i < num_own_groups; ++i) {
                groups[own_groups + i].matrix = first + lane;
                groups[own_groups + i].first_slot = slot + i * a.max_group_rows;
                groups[own_groups + i].num_rows = min(count - i * a.max_group_rows, a.max_group_rows);
            }
            for (uint segment = 0; exists && segment < num_segments; ++segment) {
                const uint of_segment = of_expert[segment * num_experts];
                of_expert[segment * num_experts] = slot;
                slot += of_segment;
            }
            num_slots += simd_sum(count);
            num_groups += simd_sum(num_own_groups);
        }
        if (lane == 0) {
            *num_groups_of_all = num_groups;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = begin; first < end; first += LANES) {
        const uint expert = first + lane < end ? experts[first + lane] : uint(NO_EXPERT);
        const Rank rank = rank_of(expert, lane);
        if (expert != NO_EXPERT) {
            const uint slot = own[expert] + rank.before;
            slots[first + lane] = slot;
            rows[slot] = (first + lane) / per_token;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (expert != NO_EXPERT && rank.before == 0) {
            own[expert] += rank.all;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = *num_groups_of_all + thread_index; i < a.max_groups; i += NUM_THREADS) {
        groups[i].num_rows = 0;
    }
}

[[kernel]] void choose_experts(
    constant ChooseArgs& a [[buffer(0)]],
    device const float* logits [[buffer(1)]],  // [token, expert]
    device const float* bias [[buffer(2)]],    // [expert]
    device uint* experts [[buffer(3)]],        // [token, choice]
    device float* weights [[buffer(4)]],       // [token, choice]
    device uint* slots [[buffer(5)]],         // [token, choice]
    device uint* rows [[buffer(6)]],           // [slot]
    device RowGroup* groups [[buffer(7)]],
    threadgroup float* memory [[threadgroup(0)]],
    uint index [[threadgroup_position_in_grid]],
    uint num_threadgroups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]]
) {
    if (a.chooses != 0) {
        const uint per_token = a.num_chosen + a.num_shared;
        threadgroup float* probabilities = memory + 2 * group * a.num_experts;
        threadgroup float* scores = probabilities + a.num_experts;
        for (uint token = index * SIMDGROUPS + group; token < a.num_rows; token += num_threadgroups * SIMDGROUPS) {
            choose(
                a, logits + token * a.num_experts, bias, experts + token * per_token, weights + token * per_token,
                probabilities, scores, lane
            );
        }
    }
    if (a.chooses != 0 && a.groups != 0) {
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    }
    if (a.groups != 0) {
        group_rows(a, experts, slots, rows, groups, (threadgroup uint*)memory, thread_index, lane, group);
    }
}

struct GatedExpertsArgs {
    uint width;
    uint per_token;
    uint has_bias;  // each for gate and up
    GatedFormula formula;
};

// gate = activation(gate + bias, up + bias) at the slots of a token.
[[kernel]] void gated_experts(
    constant GatedExpertsArgs& a [[buffer(0)]],
    device const uint* experts [[buffer(1)]],     // [token, choice]
    device const uint* slots [[buffer(2)]],      // [token, choice]
    device const float* gate_bias [[buffer(3)]],  // [expert, width]
    device const float* up_bias [[buffer(4)]],    // [expert, width]
    device const float* up [[buffer(5)]],         // [slot, width]
    device float* gate [[buffer(6)]],             // [slot, width]
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = index.x * LANES + lane;
    if (i >= a.width) {
        return;
    }
    for (uint choice = index.y * a.per_token; choice < (index.y + 1) * a.per_token; ++choice) {
        const ulong own = ulong(slots[choice]) * a.width + i;
        const uint of_expert = a.has_bias != 0 ? experts[choice] * a.width + i : 0;
        const float g = a.has_bias != 0 ? gate[own] + gate_bias[of_expert] : gate[own];
        const float u = a.has_bias != 0 ? up[own] + up_bias[of_expert] : up[own];
        gate[own] = gated_value(a.formula, g, u);
    }
}

struct CombineArgs {
    uint width;
    uint per_token;
    uint has_bias;
};

// x += Σ weight · (projected + bias), over the choices of a token in their order.
[[kernel]] void combine_experts(
    constant CombineArgs& a [[buffer(0)]],
    device const uint* slots [[buffer(1)]],
    device const float* weights [[buffer(2)]],
    device const float* projected [[buffer(3)]],  // [slot, width]
    device float* x [[buffer(4)]],               // [token, width]
    device const uint* experts [[buffer(5)]],    // [token, choice]
    device const float* bias [[buffer(6)]],      // [expert, width]
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = index.x * LANES + lane;
    if (i >= a.width) {
        return;
    }
    const uint token = index.y;
    float value = x[token * a.width + i];
    for (uint choice = token * a.per_token; choice < (token + 1) * a.per_token; ++choice) {
        const float output = projected[ulong(slots[choice]) * a.width + i];
        const float own = a.has_bias != 0 ? output + bias[experts[choice] * a.width + i] : output;
        value = fma(weights[choice], own, value);
    }
    x[token * a.width + i] = value;
}
