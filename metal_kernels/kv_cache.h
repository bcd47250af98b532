// Reading the paged cache: `[block][kv_head][slot][head_dim]` for keys and for values.

#include "threads.h"

// Loops that index an array in registers are unrolled: elsewhere a compiler may put the array in memory.

// Eight neighbouring values, as they lie in memory.
template <typename KV>
struct Eight {
    uint4 bits;
};
template <>
struct Eight<float> {
    float4 low;
    float4 high;
};

inline void unpack(Eight<half> packed, thread float (&values)[8]) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
        const half2 pair = as_type<half2>(packed.bits[i]);
        values[2 * i] = float(pair.x);
        values[2 * i + 1] = float(pair.y);
    }
}

inline void unpack(Eight<bfloat> packed, thread float (&values)[8]) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = as_type<float>(packed.bits[i] << 16);
        values[2 * i + 1] = as_type<float>(packed.bits[i] & 0xFFFF0000u);
    }
}

inline void unpack(Eight<float> packed, thread float (&values)[8]) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
        values[i] = packed.low[i];
        values[4 + i] = packed.high[i];
    }
}

// Where the tokens of a sequence are.
struct Pages {
    uint num_kv_heads;
    uint block_size;
    uint head_dim;
};

// A token that is computed, and what it attends to.
struct DecodeRow {
    uint token;        // of the step: the row of q and of the result
    uint seq_len;      // up to it
    uint table_start;  // of its sequence's block table
};

// The row of the token at `position`, in rows of `head_dim` values.
inline uint row_of(constant Pages& pages, device const uint* block_table, uint kv_head, uint position) {
    const uint block = block_table[position / pages.block_size];
    return (block * pages.num_kv_heads + kv_head) * pages.block_size + position % pages.block_size;
}

// Lower than any score, and finite, because kernels are compiled with fast math.
constant constexpr float LOWEST = -1e30f;
