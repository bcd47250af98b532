// What every softmax begins with, and what some models have besides scores: a cap on these, and a sink for each head, a score
// without a value.
//
// Scores are exponents of two, and so are caps. Sinks are as they were trained.

#include <metal_stdlib>
using namespace metal;

// Lower than any score, and finite, because kernels are compiled with fast math.
constant constexpr float LOWEST = -1e30f;

// `cap · tanh(score / cap)`. The exponent is bounded, so that nothing is infinite.
inline float capped(float score, float cap) {
    const float exponent = min(score / cap * (2.0f * M_LOG2E_F), 100.0f);
    return cap - 2.0f * cap / (fast::exp2(exponent) + 1.0f);
}

// The sum of a row's weights and that of its sink. Beside a sink that is larger by the bound nothing else weighs anything.
inline float with_sink(float sum, float maximum, float sink) {
    return sum + fast::exp2(min(sink * M_LOG2E_F - maximum, 100.0f));
}
