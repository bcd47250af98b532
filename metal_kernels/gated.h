// What the two halves of a gated network become.

#include <metal_stdlib>
using namespace metal;

struct GatedForm {
    float slope;  // see the program's
    float cubic;
    float limit;
    float shift;
};

// gate / (1 + e^(-slope · (gate + cubic · gate³))) · (up + shift), both bounded. So is the exponent, so that nothing is
// infinite.
inline float gated_value(constant GatedForm& form, float gate, float up) {
    const float g = gate > form.limit ? form.limit : gate;
    const float bounded = up > form.limit ? form.limit : up;
    const float u = bounded < -form.limit ? -form.limit : bounded;
    const float exponent = -form.slope * fma(form.cubic * g * g, g, g);
    return g / (1.0f + exp(min(exponent, 80.0f))) * (u + form.shift);
}
