// The common start of every softmax, and what some models add to scores: a soft cap, and a sink for each head, which is
// a score without a value.
//
// Scores and caps are exponents of two. Sinks are as trained.

#include <metal_stdlib>
using namespace metal;

// Lower than any score, and finite, because kernels are compiled with fast math.
constant constexpr float LOWEST = -1e30f;

// `cap · tanh(score / cap)`. The exponent is bounded, so that no value is infinite.
inline float capped(float score, float cap) {
    const float exponent = min(score / cap * (2.0f * M_LOG2E_F), 100.0f);
    return cap - 2.0f * cap / (fast::exp2(exponent) + 1.0f);
}

// The sum of a row's weights and its sink's. A sink above the bound leaves all other weights at zero.
inline float with_sink(float sum, float maximum, float sink) {
    return sum + fast::exp2(min(sink * M_LOG2E_F - maximum, 100.0f));
}
