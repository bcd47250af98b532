// Products whose rows have the same bits in every batch of up to 64: what `few_rows.cu` and `several_rows.cu` share.
//
// A row of weights is cut into sixteen slices, each a piece of every sixteen, which are a chunk. The products of a slice are
// added in the order of its pieces; the sums of slices in that order to those of quarters, and these two by two.

#include "products.h"
#include "rounded.h"

constant constexpr int SLICES = 16;

// Activations are rounded as they are for products of more rows where these have no norm.
constant constexpr float X_SCALE = 1.0f / FIXED_FACTOR;

// sums += the products of pieces, of the first and the second eight rows of a tile, with the activations that
// `activations_of(n, eight)` gives, of token tile n and eight columns.
template <typename F, int TOKEN_TILES, typename ACTIVATIONS>
inline void multiply_pieces(
    thread const Piece<F> (&pieces)[2],
    ACTIVATIONS activations_of,
    thread float (&sums)[TOKEN_TILES][4]
) {
#pragma clang loop unroll(full)
    for (int eight = 0; eight < num_eights<F>(); ++eight) {
        uint low[4];
        uint high[4];
        decode_eight<F>(pieces[0], eight, low);
        decode_eight<F>(pieces[1], eight, high);
#pragma clang loop unroll(full)
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const uint4 x = activations_of(n, eight);
            msl_multiply_tile(sums[n], low[0], high[0], low[1], high[1], x.x, x.y);
            msl_multiply_tile(sums[n], low[2], high[2], low[3], high[3], x.z, x.w);
        }
    }
}
