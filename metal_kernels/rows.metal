// Row operations: embedding, gathering rows, copying blocks of the cache; and norms and gates that no matmul fuses.

#include "formats.h"
#include "gated.h"

struct EmbedArgs {
    Planes planes;
    uint num_units;  // of 16 columns
    uint num_rows;   // of the table
    float scale;
};

// out[i] = scale · table[token_ids[i]]. A thread decodes a unit. An invalid token, which a failed row passes on, is
// embedded as zeros.
template <typename F>
[[kernel]] void embed(
    constant EmbedArgs& a [[buffer(0)]],
    device const uchar* table [[buffer(1)]],
    device const uint* token_ids [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint unit = index.x * LANES + lane;
    if (unit >= a.num_units) {
        return;
    }
    const uint token_id = token_ids[index.y];
    device float4* target = (device float4*)out + 4 * (ulong(index.y) * a.num_units + unit);
    if (token_id >= a.num_rows) {
        for (int part = 0; part < 4; ++part) {
            target[part] = float4(0.0f);
        }
        return;
    }
    const Raw<F> raw = load_unit<F>(table, in_registers(a.planes), token_id * a.num_units, unit);
    const Unit decoded = F::decode(raw.codes, raw.scale);
#pragma clang loop unroll(full)
    for (int part = 0; part < 4; ++part) {
        float4 values;
#pragma clang loop unroll(full)
        for (int i = 0; i < 4; ++i) {
            const float code = decoded.code[4 * part + i] * F::prescale(4 * part + i) - F::ZERO;
            const float value = code * decoded.scale;
            values[i] = F::HAS_MINIMUM ? value - decoded.minimum : value;
        }
        target[part] = values * a.scale;
    }
}

#define EMBED(F) INSTANCE(embed_##F, embed, F)
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
EMBED(IQ4_XS)
EMBED(MXFP4)
EMBED(Q8_S)
EMBED(F16)
EMBED(BF16)
EMBED(F32)

struct GatherArgs {
    uint num_rows;
    uint width;
};

// x[i] = x[rows[i]] for ascending rows, in place. A thread moves one column, from the first row to the last, so that no
// row is overwritten before it is read.
[[kernel]] void gather_rows(
    constant GatherArgs& a [[buffer(0)]],
    device const uint* rows [[buffer(1)]],
    device float* x [[buffer(2)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint column = index * LANES + lane;
    if (column >= a.width) {
        return;
    }
    for (uint i = 0; i < a.num_rows; ++i) {
        x[ulong(i) * a.width + column] = x[ulong(rows[i]) * a.width + column];
    }
}

struct SiluMulArgs {
    uint num_values;
};

// gate = silu(gate) · up, for matrices of two formats, which no matmul fuses.
[[kernel]] void silu_mul(
    constant SiluMulArgs& a [[buffer(0)]],
    device const float* up [[buffer(1)]],
    device float* gate [[buffer(2)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = index * LANES + lane;
    if (i < a.num_values) {
        gate[i] = gate[i] / (1.0f + exp(-gate[i])) * up[i];
    }
}

struct GatedArgs {
    uint width;  // of one half
    GatedFormula formula;
};

// out = activation(gate, up).
[[kernel]] void gated(
    constant GatedArgs& a [[buffer(0)]],
    device const float* halves [[buffer(1)]],  // [row, 2, width]
    device float* out [[buffer(2)]],           // [row, width]
    uint2 index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint i = LANES * index.x + lane;
    if (i >= a.width) {
        return;
    }
    device const float* own = halves + ulong(index.y) * 2 * a.width + i;
    out[ulong(index.y) * a.width + i] = gated_value(a.formula, own[0], own[a.width]);
}

// 1 / √(mean(x²) + eps) of a row, for all threads of its threadgroup.
inline float norm_factor(
    device const float* own,
    uint width,
    float inverse_width,
    float eps,
    threadgroup float* squares,
    uint thread_index,
    uint lane,
    uint group,
    uint num_groups
) {
    float own_squares = 0.0f;
    for (uint i = thread_index; i < width; i += num_groups * LANES) {
        own_squares = fma(own[i], own[i], own_squares);
    }
    own_squares = simd_sum(own_squares);
    if (lane == 0) {
        squares[group] = own_squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (uint i = 0; i < num_groups; ++i) {
        sum += squares[i];
    }
    return rsqrt(fma(sum, inverse_width, eps));
}

struct NormResidualArgs {
    uint width;
    float inverse_width;
    float eps;
};

// x += norm(y), one threadgroup per row.
[[kernel]] void norm_residual(
    constant NormResidualArgs& a [[buffer(0)]],
    device const float* y [[buffer(1)]],
    device const float* weight [[buffer(2)]],
    device float* x [[buffer(3)]],
    threadgroup float* squares [[threadgroup(0)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    device const float* own = y + ulong(row) * a.width;
    const float factor =
        norm_factor(own, a.width, a.inverse_width, a.eps, squares, thread_index, lane, group, num_groups);
    device float* target = x + ulong(row) * a.width;
    for (uint i = thread_index; i < a.width; i += num_groups * LANES) {
        target[i] = fma(own[i] * factor, weight[i], target[i]);
    }
}

struct NormPartArgs {
    uint len;           // of the norm
    float inverse_len;
    float eps;
    uint first;         // first value of a row to normalise
    uint width;         // of a row
};

// x = norm(x) for a range of each row, one threadgroup per row.
[[kernel]] void norm_part(
    constant NormPartArgs& a [[buffer(0)]],
    device const float* weight [[buffer(1)]],
    device float* x [[buffer(2)]],
    threadgroup float* squares [[threadgroup(0)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint group [[simdgroup_index_in_threadgroup]],
    uint num_groups [[simdgroups_per_threadgroup]]
) {
    device float* part = x + (ulong(row) * a.width + a.first);
    const float factor =
        norm_factor(part, a.len, a.inverse_len, a.eps, squares, thread_index, lane, group, num_groups);
    for (uint i = thread_index; i < a.len; i += num_groups * LANES) {
        part[i] = part[i] * factor * weight[i];
    }
}

struct CopyBlockArgs {
    uint source;
    uint target;
    uint num_words;  // of 16 bytes in a block
};

// Copies a block of the cache within its pool.
[[kernel]] void copy_block(
    constant CopyBlockArgs& a [[buffer(0)]],
    device uint4* pool [[buffer(1)]],
    uint index [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint word = index * LANES + lane;
    if (word < a.num_words) {
        pool[ulong(a.target) * a.num_words + word] = pool[ulong(a.source) * a.num_words + word];
    }
}
