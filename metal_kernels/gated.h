// The activation functions of gated feed-forward networks.

#include <metal_stdlib>
using namespace metal;

struct GatedFormula {
    float slope;  // see the Rust side
    float cubic;
    float limit;
    float shift;
};

// gate / (1 + e^(-slope · (gate + cubic · gate³))) · (up + shift), with both inputs bounded. The exponent is bounded
// too, so that no value is infinite.
inline float gated_value(constant GatedFormula& formula, float gate, float up) {
    const float g = gate > formula.limit ? formula.limit : gate;
    const float bounded = up > formula.limit ? formula.limit : up;
    const float u = bounded < -formula.limit ? -formula.limit : bounded;
    const float exponent = -formula.slope * fma(formula.cubic * g * g, g, g);
    return g / (1.0f + exp(min(exponent, 80.0f))) * (u + formula.shift);
}
