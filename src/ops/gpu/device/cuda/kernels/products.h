// Products of weights with rows of activations on tensor cores: what `few_rows.cu` and `many_rows.cu` share.
//
// Weights and activations become halves: weights as in `metal_kernels/matmul.metal`, activations after the weights of
// the norm and scaled. Sums are floats, to which the norm's factor is applied.
//
// What is the GPU's alone are the functions msl_…: instructions of the GPU, and in the tests' emulator what they do.

#include "groups.h"
#include "pieces.h"

struct ProductArgs {
    uint num_units;   // of 16 columns of the matrices
    uint num_tokens;
    uint x_stride;
    uint out_stride;
    uint x_next;    // from the activations of one matrix of a stack to those of the next one
    uint out_next;  // likewise results
    uint gathers;   // whether the rows of groups are listed
    float eps;
    MatrixArgs matrices[3];
    uint num_tiles;   // of all matrices
    uint num_groups;  // that may be in the list
    uint num_first;   // threadgroups that have no tiles of the last matrix, if that has another format
    uint x_rows;      // of rounded activations, of all matrices
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];
constant bool IS_GROUPED [[function_constant(3)]];
constant bool IS_HALF [[function_constant(4)]];

// What a threadgroup computes: of which matrix of a stack, and of which rows of activations.
inline Part part_of(constant ProductArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return part_of_group(groups[index], a.out_stride);
    }
    Part part;
    part.matrix = index;
    part.num_rows = a.num_tokens;
    part.first_place = 0;
    part.x_offset = index * a.x_next;
    part.out_offset = index * a.out_next;
    return part;
}

// Eight columns of activations as halves, in pairs, after they are multiplied with `scale`.
template <Pairs PAIRS>
inline uint4 paired(thread const float (&values)[8], float scale) {
    uint4 words;
#pragma clang loop unroll(full)
    for (int word = 0; word < 4; ++word) {
        const int first = first_of_pair<PAIRS>(word);
        words[word] = msl_halves(values[first] * scale, values[first + apart<PAIRS>()] * scale);
    }
    return words;
}

inline float gated(float gate, float up) {
    return gate / (1.0f + exp(-gate)) * up;
}

inline void store(device float* out, ulong index, float value) {
    if (IS_HALF) {
        ((device half*)out)[index] = half(value);
    } else {
        out[index] = value;
    }
}
