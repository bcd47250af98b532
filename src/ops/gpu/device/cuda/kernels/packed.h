// Packs results in half precision for the next GEMM in the kernel that computes them, without a pass over their row.

#include <metal_stdlib>
using namespace metal;

// They are divided by 16, so that values below a million stay finite; larger ones are clamped. Below a thousandth,
// halves lose bits: less than a bfloat loses of the values next to them.
constant constexpr float FIXED_FACTOR = 16.0f;

// Packed rows have the layout that GEMMs of many rows read: for each step of 64 columns, all rows in sequence, eight
// times sixteen bytes of each in the order of `msl_swizzled`. So a thread block reads one contiguous block per step.
inline ulong index_of_step(uint row, uint step, uint num_rows) {
    return (ulong(step) * num_rows + row) * 8;
}
inline ulong index_of_eighth(uint row, uint eighth, uint num_rows) {
    return index_of_step(row, eighth / 8, num_rows) + (eighth % 8 ^ row % 8);
}

// The word of a column, of four words of eight columns, if the two columns of a word are `apart` from each other.
inline uint word_of_column(uint column, uint apart) {
    return (column & (apart - 1)) | (column >> 1 & ~(apart - 1));
}

// The index of the words of eight columns `eight` of a step of 64, for a GEMM with weights whose columns are that far
// apart: the half of the step, and the lane of four. For dense formats a lane has two adjacent groups of eight, for
// others one of each block of 32.
inline uint half_of_eight(uint eight, uint apart) {
    return apart == 1 ? eight % 2 : eight / 4;
}
inline uint lane_of_eight(uint eight, uint apart) {
    return apart == 1 ? eight / 2 : eight % 4;
}
