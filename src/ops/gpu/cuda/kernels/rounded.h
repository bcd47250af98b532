// Activations that are rounded for the next product by the kernel that computes them, without a look at their row.

#include <metal_stdlib>
using namespace metal;

// They are divided by 16, so that what is below a million does not become infinite; larger ones are cut off. Those below a
// thousandth have fewer bits than a half has otherwise: what they lose is less than a bfloat loses of what is beside them.
constant constexpr float FIXED_FACTOR = 16.0f;

// Which of the four words of eight columns has a column, if two that are a word are `apart` from each other.
inline uint word_of_column(uint column, uint apart) {
    return (column & (apart - 1)) | (column >> 1 & ~(apart - 1));
}

// Where the words of eight columns `eight` of a step of 64 are, for a product with weights whose columns are so far apart: in
// which half of the step, and for which of four lanes. Of dense formats a lane has two eights side by side, of others one of
// each block of 32.
inline uint half_of_eight(uint eight, uint apart) {
    return apart == 1 ? eight % 2 : eight / 4;
}
inline uint lane_of_eight(uint eight, uint apart) {
    return apart == 1 ? eight / 2 : eight % 4;
}
