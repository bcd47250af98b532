// Networks of experts: which of them each token goes through, where its share of their work is, and the sum of it.
//
// From the router's logits to experts is the work of a simdgroup for each token. Then tokens are grouped by expert, in
// their order, by one threadgroup: a sort that counts. In a step of few tokens that is the same threadgroup, and one
// launch.

#include "gated.h"
#include "groups.h"
#include "threads.h"

struct ChooseArgs {
    uint num_rows;         // tokens
    uint num_experts;      // to choose from
    uint num_chosen;       // of them, by each token
    uint num_shared;       // experts behind these that every token goes through
    uint num_groups;       // of experts, of which
    uint num_open_groups;  // are chosen from
    uint max_group_rows;   // rows of a group of tokens, at most
    uint max_groups;       // places in the list of those groups
    float scale;           // of weights
    uint is_sigmoid;       // or a softmax
    uint normalizes;       // weights, so that their sum is `scale`
    uint has_bias;         // to choose by
    uint chooses;          // what the launch does
    uint groups;
};

constant constexpr int SIMDGROUPS = 8;
constant constexpr int NUM_THREADS = SIMDGROUPS * LANES;
// Lower than the score of any expert that can be chosen, and than that of one that cannot.
constant constexpr float CLOSED = -1e30f;
constant constexpr float CHOSEN = -2e30f;
constant constexpr uint NOBODY = 0xFFFFFFFFu;

// The best of the scores of the lanes' experts, and the first expert that has it.
struct Best {
    float score;
    uint expert;
};

inline Best best_of_lanes(float score, uint expert) {
    Best best;
    best.score = simd_max(score);
    best.expert = simd_min(score >= best.score ? expert : NOBODY);
    return best;
}

// The best of experts `begin` to `end`, but for one. A lane looks at its own experts: every LANES-th one.
inline Best best_between(threadgroup const float* scores, uint begin, uint end, uint except, uint lane) {
    float score = 2.0f * CHOSEN;
    uint expert = NOBODY;
    for (uint e = lane; e < end; e += LANES) {
        if (e >= begin && e != except && scores[e] > score) {
            score = scores[e];
            expert = e;
        }
    }
    return best_of_lanes(score, expert);
}

// Closes the experts of all groups but the best ones. A group is as good as its best expert or, with sigmoids, as its
// best two together.
inline void close_groups(constant ChooseArgs& a, threadgroup float* scores, uint lane) {
    const uint group_len = a.num_experts / a.num_groups;
    float own_score = CHOSEN;
    for (uint g = 0; g < a.num_groups; ++g) {
        const uint begin = g * group_len;
        const Best first = best_between(scores, begin, begin + group_len, NOBODY, lane);
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

// The experts of a token. A lane's entries in threadgroup memory are its own.
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
        // What is no number comes behind all that are.
        scores[e] = score > CLOSED ? score : CLOSED;
    }
    if (a.num_open_groups < a.num_groups) {
        close_groups(a, scores, lane);
    }
    // Lane `i` has the weight of choice `i`.
    uint own_expert = 0;
    float own_weight = 0.0f;
    for (uint choice = 0; choice < a.num_chosen; ++choice) {
        const uint expert = min(best_between(scores, 0, a.num_experts, NOBODY, lane).expert, a.num_experts - 1);
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
    // What models were trained with, so that no sum is 0.
    const float chosen_sum = a.normalizes != 0 ? simd_sum(own_weight) + 1e-20f : 1.0f;
    if (lane < a.num_chosen) {
        experts[lane] = own_expert;
        weights[lane] = own_weight * (a.scale / chosen_sum);
    } else if (lane < a.num_chosen + a.num_shared) {
        experts[lane] = a.num_experts + lane - a.num_chosen;
        weights[lane] = 1.0f;
    }
}

// Of a lane's expert: how many lanes before it have the same one, and how many do in all. NOBODY is no expert.
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

// Gives every choice a place: those of an expert side by side, in the order of the choices. Each simdgroup has a part of
// them, and a table of how many of it each expert has.
inline void group_rows(
    constant ChooseArgs& a,
    device const uint* experts,
    device uint* places,
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
    const uint part_len = (num_choices + NUM_THREADS - 1) / NUM_THREADS * LANES;
    const uint num_parts = (num_choices + part_len - 1) / part_len;
    threadgroup uint* own = tables + group * num_experts;
    threadgroup uint* num_groups_of_all = tables + num_parts * num_experts;
    for (uint i = thread_index; i < num_parts * num_experts; i += NUM_THREADS) {
        tables[i] = 0;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint begin = min(group * part_len, num_choices);
    const uint end = min(begin + part_len, num_choices);
    for (uint first = begin; first < end; first += LANES) {
        const uint expert = first + lane < end ? experts[first + lane] : NOBODY;
        const Rank rank = rank_of(expert, lane);
        if (expert != NOBODY && rank.before == 0) {
            own[expert] += rank.all;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Of each part, where the places of each expert begin; and the groups.
    if (group == 0) {
        uint num_places = 0;
        uint num_groups = 0;
        for (uint first = 0; first < num_experts; first += LANES) {
            const bool exists = first + lane < num_experts;
            threadgroup uint* of_expert = tables + min(first + lane, num_experts - 1);
            uint count = 0;
            for (uint part = 0; part < num_parts; ++part) {
                count += exists ? of_expert[part * num_experts] : 0;
            }
            const uint num_own_groups = (count + a.max_group_rows - 1) / a.max_group_rows;
            uint place = num_places + simd_prefix_exclusive_sum(count);
            const uint own_groups = num_groups + simd_prefix_exclusive_sum(num_own_groups);
            for (uint i = 0; i < num_own_groups; ++i) {
                groups[own_groups + i].matrix = first + lane;
                groups[own_groups + i].first_place = place + i * a.max_group_rows;
                groups[own_groups + i].num_rows = min(count - i * a.max_group_rows, a.max_group_rows);
            }
            for (uint part = 0; exists && part < num_parts; ++part) {
                const uint of_part = of_expert[part * num_experts];
                of_expert[part * num_experts] = place;
                place += of_part;
            }
            num_places += simd_sum(count);
            num_groups += simd_sum(num_own_groups);
        }
        if (lane == 0) {
            *num_groups_of_all = num_groups;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = begin; first < end; first += LANES) {
        const uint expert = first + lane < end ? experts[first + lane] : NOBODY;
        const Rank rank = rank_of(expert, lane);
        if (expert != NOBODY) {
            const uint place = own[expert] + rank.before;
            places[first + lane] = place;
            rows[place] = (first + lane) / per_token;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (expert != NOBODY && rank.before == 0) {
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
    device uint* places [[buffer(5)]],         // [token, choice]
    device uint* rows [[buffer(6)]],           // [place]
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
        group_rows(a, experts, places, rows, groups, (threadgroup uint*)memory, thread_index, lane, group);
    }
}

struct GatedExpertsArgs {
    uint width;
    uint per_token;
    uint has_bias;  // each of the halves
    GatedForm form;
};

// gate = activation(gate + bias, up + bias) at the places of a token.
[[kernel]] void gated_experts(
    constant GatedExpertsArgs& a [[buffer(0)]],
    device const uint* experts [[buffer(1)]],     // [token, choice]
    device const uint* places [[buffer(2)]],      // [token, choice]
    device const float* gate_bias [[buffer(3)]],  // [expert, width]
    device const float* up_bias [[buffer(4)]],    // [expert, width]
    device const float* up [[buffer(5)]],         // [place, width]
    device float* gate [[buffer(6)]],             // [place, width]
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = index.x * LANES + lane;
    if (i >= a.width) {
        return;
    }
    for (uint choice = index.y * a.per_token; choice < (index.y + 1) * a.per_token; ++choice) {
        const ulong own = ulong(places[choice]) * a.width + i;
        const uint of_expert = a.has_bias != 0 ? experts[choice] * a.width + i : 0;
        const float g = a.has_bias != 0 ? gate[own] + gate_bias[of_expert] : gate[own];
        const float u = a.has_bias != 0 ? up[own] + up_bias[of_expert] : up[own];
        gate[own] = gated_value(a.form, g, u);
    }
}

struct CombineArgs {
    uint width;
    uint per_token;
    uint has_bias;
};

// x += Σ weight · (products + bias), over the choices of a token in their order.
[[kernel]] void combine_experts(
    constant CombineArgs& a [[buffer(0)]],
    device const uint* places [[buffer(1)]],
    device const float* weights [[buffer(2)]],
    device const float* products [[buffer(3)]],  // [place, width]
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
        const float product = products[ulong(places[choice]) * a.width + i];
        const float own = a.has_bias != 0 ? product + bias[experts[choice] * a.width + i] : product;
        value = fma(weights[choice], own, value);
    }
    x[token * a.width + i] = value;
}
