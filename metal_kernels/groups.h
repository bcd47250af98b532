// Groups of rows of activations: those of the tokens that go through the same matrix of a stack, such as an expert.
//
// A token's share of the work of one of its experts is a place: a row of the buffers between the products. A group's
// places lie side by side.

#include <metal_stdlib>
using namespace metal;

struct RowGroup {
    uint matrix;       // of the stack
    uint first_place;
    uint num_rows;     // none: there is no such group
};

// What a threadgroup computes of a stack of matrices.
struct Part {
    uint matrix;
    uint num_rows;     // of activations
    uint first_place;  // of a group
    uint x_offset;     // of the activations of place or row 0
    uint out_offset;   // of the first row's results
};

inline Part part_of_group(RowGroup group, uint out_stride) {
    Part part;
    part.matrix = group.matrix;
    part.num_rows = group.num_rows;
    part.first_place = group.first_place;
    part.x_offset = 0;
    part.out_offset = group.first_place * out_stride;
    return part;
}

// The row of activations at a place: a listed one, or that of the place itself.
inline uint row_at(device const uint* rows, uint is_listed, uint place) {
    return is_listed != 0 ? rows[place] : place;
}
