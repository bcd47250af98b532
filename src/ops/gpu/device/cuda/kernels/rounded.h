// Activations that are rounded for the next product by the kernel that computes them, without a look at their row.

#include <metal_stdlib>
using namespace metal;

// They are divided by 16, so that what is below a million does not become infinite; larger ones are cut off. Those below a
// thousandth have fewer bits than a half has otherwise: what they lose is less than a bfloat loses of what is beside them.
constant constexpr float FIXED_FACTOR = 16.0f;

// Rounded rows lie as products with many of them read them: for each step of 64 columns, all rows one behind the other, eight
// times sixteen bytes of each in the order of `msl_swizzled`. So what a threadgroup wants of a step lies together.
inline ulong place_of_step(uint row, uint step, uint num_rows) {
    return (ulong(step) * num_rows + row) * 8;
}
inline ulong place_of_eighth(uint row, uint eighth, uint num_rows) {
    return place_of_step(row, eighth / 8, num_rows) + (eighth % 8 ^ row % 8);
}

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
