// Norms of heads and rotation. A simdgroup has a head, and each lane every 32nd of its pairs of values.
//
// Several kernels rotate, and a head has the same bits whichever of them does: the operations and their order are here,
// and `fma` leaves compilers no choice.

#include "threads.h"

constant bool HAS_NORMS [[function_constant(0)]];
constant bool IS_INTERLEAVED [[function_constant(1)]];  // pairs are neighbours; otherwise halves of what is rotated

struct Rotation {
    uint num_pairs;     // that are rotated; the values behind them are pairs of neighbours
    float inverse_dim;  // one over the values of a head
    float eps;          // of the norms
};

// Where the values of a pair are in a head.
inline uint2 places_of(constant Rotation& rotation, uint pair) {
    const bool is_split = !IS_INTERLEAVED && pair < rotation.num_pairs;
    return is_split ? uint2(pair, pair + rotation.num_pairs) : uint2(2 * pair, 2 * pair + 1);
}

// The cosines and the sines of a position, behind which is what queries are multiplied by.
inline device const float* angles_at(constant Rotation& rotation, device const float* table, uint position) {
    return table + ulong(position) * (2 * rotation.num_pairs + 1);
}
inline float query_factor(constant Rotation& rotation, device const float* angles) {
    return angles[2 * rotation.num_pairs];
}

inline float2 pair_at(device const float* values, uint2 places) {
    return float2(values[places.x], values[places.y]);
}

// The cosine and the sine of a pair, from those of a position.
inline float2 turn_of(constant Rotation& rotation, device const float* angles, uint pair) {
    return pair < rotation.num_pairs ? float2(angles[pair], angles[rotation.num_pairs + pair]) : float2(1.0f, 0.0f);
}

// `sum` and the squares of a pair.
inline float add_squares(float2 pair, float sum) {
    return fma(pair.y, pair.y, fma(pair.x, pair.x, sum));
}

// One over the root of the mean of a head's squares, which the lanes have parts of.
inline float factor_of(constant Rotation& rotation, float squares) {
    return rsqrt(fma(simd_sum(squares), rotation.inverse_dim, rotation.eps));
}

inline float2 normed(float2 pair, float factor, float2 weights) {
    return pair * (factor * weights);
}

inline float2 rotated(float2 pair, float2 turn) {
    return float2(fma(-pair.y, turn.y, pair.x * turn.x), fma(pair.x, turn.y, pair.y * turn.x));
}
