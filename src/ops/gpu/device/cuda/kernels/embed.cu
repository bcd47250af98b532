// Embeddings from a table in tiles (`fragments.h`).

#define FOR_NVIDIA
#include "fragments.h"

struct EmbedArgs {
    Planes planes;
    uint num_units;  // of 16 columns
    uint num_rows;   // of the table
    float scale;
};

// out[i] = scale · table[token_ids[i]]. A thread decodes the fragment that a matmul's lane would have, in single
// precision. An invalid token, which a failed row passes on, is embedded as zeros.
template <typename F>
[[kernel]] void embed_tiled(
    constant EmbedArgs& a [[buffer(0)]],
    device const uchar* table [[buffer(1)]],
    device const uint* token_ids [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint num_columns = 16 * a.num_units;
    const uint num_k_tiles = (num_columns + Fragment<F>::COLUMNS - 1) / Fragment<F>::COLUMNS;
    // Four lanes have a K tile.
    const uint k_tile = index.x * (LANES / 4) + lane / 4;
    const uint t = lane % 4;
    if (k_tile >= num_k_tiles) {
        return;
    }
    msl_wait_for_inputs();
    const uint token_id = token_ids[index.y];
    const bool exists = token_id < a.num_rows;
    const uint row = exists ? token_id : 0;
    const uint fragment = row / 8 * num_k_tiles + k_tile;
    const Fragment<F> own = Source<F>(table, in_registers(a.planes), fragment, row % 8 * 4 + t).read(0);
    const ScalesOf<F> scales(own.scale);
    device float* target = out + ulong(index.y) * num_columns;
#pragma clang loop unroll(full)
    for (int eight = 0; eight < num_eights<F>(); ++eight) {
        const uint column = k_tile * Fragment<F>::COLUMNS + column_of_eight<F>(eight, t);
        if (column >= num_columns) {
            continue;
        }
        float codes[8];
        single_eight<F>(own, eight, codes);
        const float2 pair = scales.single(eight);
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
            target[column + i] = exists ? fma(codes[i], pair.x, pair.y) * a.scale : 0.0f;
        }
    }
}

#define EMBED(F) INSTANCE(embed_tiled_##F, embed_tiled, F)
EMBED(Q4_0)
EMBED(Q4_1)
EMBED(Q5_0)
EMBED(Q5_1)
EMBED(Q8_0)
EMBED(Q4_K)
EMBED(Q5_K)
EMBED(Q6_K)
EMBED(Q2_K)
EMBED(Q3_K)
EMBED(IQ4_NL)
EMBED(MXFP4)
EMBED(Q8_S)
EMBED(F16)
