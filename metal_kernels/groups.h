// Groups of rows of activations: the tokens that go through the same matrix of a stack, such as an expert.
//
// A slot is a routed row: one token for one of its experts, a row of the buffers between the matmuls. A group's slots
// are adjacent.

#include <metal_stdlib>
using namespace metal;

struct RowGroup {
    uint matrix;       // of the stack
    uint first_slot;
    uint num_rows;     // 0 if there is no such group
};

// The matrix of a stack, and the rows, that a threadgroup computes.
struct Problem {
    uint matrix;
    uint num_rows;     // of activations
    uint first_slot;  // of a group
    uint x_offset;     // of the activations of slot or row 0
    uint out_offset;   // of the first row's results
};

inline Problem problem_of_group(RowGroup group, uint out_stride) {
    Problem problem;
    problem.matrix = group.matrix;
    problem.num_rows = group.num_rows;
    problem.first_slot = group.first_slot;
    problem.x_offset = 0;
    problem.out_offset = group.first_slot * out_stride;
    return problem;
}

// The row of activations for a slot: a listed one, or the slot's own index.
inline uint row_at(device const uint* rows, uint is_listed, uint slot) {
    return is_listed != 0 ? rows[slot] : slot;
}
