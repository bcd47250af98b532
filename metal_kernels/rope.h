// Norms of heads and rotation. A simdgroup has a head, and each lane every 32nd of its pairs of values.
//
// Several kernels rotate. They share these operations and their order, with explicit `fma`, so that a head has the same
// bits in each of them.

#include "threads.h"

constant bool HAS_NORMS [[function_constant(0)]];
constant bool IS_INTERLEAVED [[function_constant(1)]];  // pairs (2i, 2i + 1); otherwise (i, i + num_pairs)

struct Rotation {
    uint num_pairs;     // rotated pairs; the values after them form pairs of neighbours
    float inverse_dim;  // one over the values of a head
    float eps;          // of the norms
};

// The indices of a pair's two values in a head.
inline uint2 indices_of(constant Rotation& rotation, uint pair) {
    const bool is_split = !IS_INTERLEAVED && pair < rotation.num_pairs;
    return is_split ? uint2(pair, pair + rotation.num_pairs) : uint2(2 * pair, 2 * pair + 1);
}

// The cosines and sines of a position, followed by the factor for queries.
inline device const float* angles_at(constant Rotation& rotation, device const float* table, uint position) {
    return table + ulong(position) * (2 * rotation.num_pairs + 1);
}
inline float query_factor(constant Rotation& rotation, device const float* angles) {
    return angles[2 * rotation.num_pairs];
}

inline float2 pair_at(device const float* values, uint2 indices) {
    return float2(values[indices.x], values[indices.y]);
}

// The cosine and the sine of a pair, from those of a position.
inline float2 turn_of(constant Rotation& rotation, device const float* angles, uint pair) {
    return pair < rotation.num_pairs ? float2(angles[pair], angles[rotation.num_pairs + pair]) : float2(1.0f, 0.0f);
}

// `sum` plus the squares of a pair.
inline float add_squares(float2 pair, float sum) {
    return fma(pair.y, pair.y, fma(pair.x, pair.x, sum));
}

// 1 / RMS of a head, whose squares are summed across lanes.
inline float factor_of(constant Rotation& rotation, float squares) {
    return rsqrt(fma(simd_sum(squares), rotation.inverse_dim, rotation.eps));
}

inline float2 normed(float2 pair, float factor, float2 weights) {
    return pair * (factor * weights);
}

inline float2 rotated(float2 pair, float2 turn) {
    return float2(fma(-pair.y, turn.y, pair.x * turn.x), fma(pair.x, turn.y, pair.y * turn.x));
}
