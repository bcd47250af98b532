// Matmuls whose rows have the same bits in every batch of up to 64: shared by `few_rows.cu` and `several_rows.cu`.
//
// A row of weights is divided into sixteen slices. A chunk is sixteen fragments, one for each slice. The dot product of
// a slice is added in the order of its fragments; the sums of slices are added in order within quarters, and the
// quarters in pairs.

#include "matmul.h"
#include "packed.h"

constant constexpr int SLICES = 16;

// The packing of activations without a norm is that of matmuls of more rows.
constant constexpr float X_SCALE = 1.0f / FIXED_FACTOR;

// sums += fragments · activations, of the first and the second eight rows of a tile. `activations_of(n, eight)` returns
// the activations of token tile n and eight columns.
template <typename F, int TOKEN_TILES, typename ACTIVATIONS>
inline void multiply_fragments(
    thread const Fragment<F> (&fragments)[2],
    ACTIVATIONS activations_of,
    thread float (&sums)[TOKEN_TILES][4]
) {
#pragma clang loop unroll(full)
    for (int eight = 0; eight < num_eights<F>(); ++eight) {
        uint low[4];
        uint high[4];
        decode_eight<F>(fragments[0], eight, low);
        decode_eight<F>(fragments[1], eight, high);
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 x = activations_of(n, eight);
            msl_multiply_tile(sums[n], low[0], high[0], low[1], high[1], x.x, x.y);
            msl_multiply_tile(sums[n], low[2], high[2], low[3], high[3], x.z, x.w);
        }
    }
}
