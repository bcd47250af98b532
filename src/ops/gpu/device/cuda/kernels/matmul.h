// Matmuls of weights with rows of activations on tensor cores: shared by `few_rows.cu` and `many_rows.cu`.
//
// Weights and activations become halves: weights as in `metal_kernels/matmul.metal`, activations after the norm's
// weights and scaled. Sums are floats, to which the norm's factor is applied.
//
// Functions msl_… are instructions of the GPU; the tests' emulator has its own version of them.

#include "groups.h"
#include "fragments.h"

struct MatmulArgs {
    uint num_units;   // of 16 columns of the matrices
    uint num_tokens;
    uint x_stride;
    uint out_stride;
    uint x_next;    // stride of activations between matrices of a stack
    uint out_next;  // stride of results between matrices of a stack
    uint gathers;   // whether groups list their rows
    float eps;
    MatrixArgs matrices[3];
    uint num_tiles;   // of all matrices
    uint num_groups;  // maximum groups in the list
    uint num_first;   // thread blocks that have no tiles of the last matrix, if that has another format
    uint x_rows;      // of packed activations, of all matrices
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];
constant bool IS_GROUPED [[function_constant(3)]];
constant bool IS_HALF [[function_constant(4)]];

// What a thread block computes: the matrix of a stack, and the rows of activations.
inline Problem problem_of(constant MatmulArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return problem_of_group(groups[index], a.out_stride);
    }
    Problem problem;
    problem.matrix = index;
    problem.num_rows = a.num_tokens;
    problem.first_slot = 0;
    problem.x_offset = index * a.x_next;
    problem.out_offset = index * a.out_next;
    return problem;
}

// Eight columns of activations as pairs of halves, multiplied by `scale`.
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
