// The paged cache: `[block][kv_head][slot][head_dim]` for keys and for values. All kernels read and write rows through
// this file. For q8_0, scales follow the rows of the whole pool.

#include "threads.h"

// Loops that index an array in registers are unrolled: otherwise a compiler may move the array to memory.

// A value of q8_0 in memory: its code, with ZERO_CODE added.
struct Code {
    uchar bits;
};
constant constexpr uint ZERO_CODE = 128;
constant constexpr float LARGEST_CODE = 127.0f;
// Values of a row that share a scale: one per lane of a simdgroup.
constant constexpr uint GROUP = 32;
static_assert(GROUP == LANES, "a lane for each value of a group");

// A value of fp8_e4m3: a sign, four bits of exponent with bias 7, three bits of mantissa. No infinities, one NaN.
struct Fp8 {
    uchar bits;
};
constant constexpr uint NAN_OF_FP8 = 0x7F;

// Eight neighbouring values in the type of the cache.
template <typename KV>
struct Eight {
    uint4 bits;
};
template <>
struct Eight<float> {
    float4 low;
    float4 high;
};
template <>
struct Eight<Code> {
    uint2 codes;
    half scale;
};
template <>
struct Eight<Fp8> {
    uint2 bits;
};

// The value of the lowest byte.
inline float value_of_fp8(uint bits) {
    const uint magnitude = bits & 0x7Fu;
    const uint normal = (magnitude << 20) + ((127u - 7u) << 23);
    const uint small = as_type<uint>(float(magnitude) * (1.0f / 512.0f));
    const uint finite = magnitude < 8u ? small : normal;
    return as_type<float>((magnitude == NAN_OF_FP8 ? 0x7FC00000u : finite) | (bits & 0x80u) << 24);
}

// The nearest value, of two equally near ones the even one. Those beyond the largest become it, and infinity becomes
// NaN. Bits are compared, since fast math ignores NaN.
inline Fp8 fp8_of(float value) {
    constexpr uint DROPPED = 20;  // bits of a float's mantissa
    constexpr uint SMALLEST_NORMAL = 0x3C800000u;  // 1/64
    constexpr float STEP_OF_SMALL = 16384.0f;      // its step is 1/512, like that of smaller numbers than 1/64
    const uint bits = as_type<uint>(value);
    const uint magnitude = bits & 0x7FFFFFFFu;
    const uint small = as_type<uint>(as_type<float>(magnitude) + STEP_OF_SMALL) - as_type<uint>(STEP_OF_SMALL);
    const uint rounded = magnitude + (1u << (DROPPED - 1)) - 1u + (magnitude >> DROPPED & 1u);
    const uint normal = min((rounded >> DROPPED) - ((127u - 7u) << 3), NAN_OF_FP8 - 1u);
    const uint finite = magnitude < SMALLEST_NORMAL ? small : normal;
    Fp8 result;
    result.bits = uchar((magnitude < 0x7F800000u ? finite : uint(NAN_OF_FP8)) | (bits >> 24 & 0x80u));
    return result;
}

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

inline void unpack(Eight<Code> packed, thread float (&values)[8]) {
    const float scale = float(packed.scale);
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; ++i) {
        values[i] = (float(packed.codes[i / 4] >> (8 * (i % 4)) & 0xFF) - float(ZERO_CODE)) * scale;
    }
}

inline void unpack(Eight<Fp8> packed, thread float (&values)[8]) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; ++i) {
        values[i] = value_of_fp8(packed.bits[i / 4] >> (8 * (i % 4)));
    }
}

// Where the blocks of sequences are.
struct Pages {
    uint num_kv_heads;
    uint block_size;
    uint head_dim;
    uint block_rows;  // stride of blocks, in rows
    uint scales;      // offset of the scales in a pool, in units of 16 bytes; unused without scales
};

// A token to compute, and its context.
struct DecodeRow {
    uint token;        // index in the step: the row of q and of the result
    uint seq_len;      // including this token
    uint table_start;  // of its sequence's block table
};

// The row of the token at `position`, in rows of `head_dim` values.
inline uint row_of(constant Pages& pages, device const uint* block_table, uint kv_head, uint position) {
    const uint block = block_table[position / pages.block_size];
    return block * pages.block_rows + kv_head * pages.block_size + position % pages.block_size;
}

// The row of a slot; slots are numbered through all blocks.
inline uint row_of_slot(constant Pages& pages, uint kv_head, uint slot) {
    return slot / pages.block_size * pages.block_rows + kv_head * pages.block_size + slot % pages.block_size;
}

// The number of scales in a row of `dim` values, rounded up to an even number, so that two fill a word.
inline device half* scales_of_row(constant Pages& pages, device Code* pool, uint row, uint dim) {
    return (device half*)(pool + 16ul * pages.scales) + ulong(row) * ((dim + 2 * GROUP - 1) / (2 * GROUP) * 2);
}
inline device const half* scales_of_row(constant Pages& pages, device const Code* pool, uint row, uint dim) {
    return (device const half*)(pool + 16ul * pages.scales) + ulong(row) * ((dim + 2 * GROUP - 1) / (2 * GROUP) * 2);
}

// Values `value` to `value + 7` of a row of `dim` values.
template <typename KV>
inline Eight<KV> eight_of(constant Pages&, device const KV* pool, uint row, uint dim, uint value) {
    return *(device const Eight<KV>*)(pool + ulong(row) * dim + value);
}
inline Eight<Code> eight_of(constant Pages& pages, device const Code* pool, uint row, uint dim, uint value) {
    Eight<Code> eight;
    eight.codes = *(device const uint2*)(pool + ulong(row) * dim + value);
    eight.scale = scales_of_row(pages, pool, row, dim)[value / GROUP];
    return eight;
}

// One value of a row.
template <typename KV>
inline float value_of(constant Pages&, device const KV* pool, uint row, uint dim, uint value) {
    return float(pool[ulong(row) * dim + value]);
}
inline float value_of(constant Pages&, device const Fp8* pool, uint row, uint dim, uint value) {
    return value_of_fp8(pool[ulong(row) * dim + value].bits);
}
inline float value_of(constant Pages& pages, device const Code* pool, uint row, uint dim, uint value) {
    const float code = float(pool[ulong(row) * dim + value].bits) - float(ZERO_CODE);
    return code * float(scales_of_row(pages, pool, row, dim)[value / GROUP]);
}

// The scale of a group whose largest magnitude has these bits: the smallest half such that 127 times it reaches the
// magnitude. Without such a half, or with a NaN value, the scale is NaN. Bits are compared, since fast math ignores
// NaN.
inline half scale_of(uint largest) {
    constexpr uint LARGEST = 0x4AFDE040u;  // 127 times the largest half
    if (largest > LARGEST) {
        return as_type<half>(ushort(0x7E00));
    }
    const float magnitude = as_type<float>(largest);
    ushort bits = as_type<ushort>(half(magnitude * (1.0f / LARGEST_CODE)));
    // The multiplication of a half by 127 is exact. The wanted half is the nearest one or the one before it.
    if (float(as_type<half>(bits)) * LARGEST_CODE < magnitude) {
        bits += 1;
    }
    return as_type<half>(bits);
}

// Encodes a value of a group; each lane has one value.
struct Coded {
    uchar code;
    half scale;
};
inline Coded coded(float value) {
    Coded result;
    result.scale = scale_of(simd_max(as_type<uint>(value) & 0x7FFFFFFFu));
    const bool has_codes = (as_type<ushort>(result.scale) & 0x7FFFu) - 1u < 0x7BFFu;
    const float code = has_codes ? rint(value / float(result.scale)) : 0.0f;
    result.code = uchar(int(code) + int(ZERO_CODE));
    return result;
}

// Rounds a value to a type of the cache without scales.
template <typename KV>
inline KV rounded_to(float value) {
    return KV(value);
}
template <>
inline Fp8 rounded_to<Fp8>(float value) {
    return fp8_of(value);
}

// Writes values from `first` on of a row of `dim` values to the cache: one from each lane of the simdgroup.
template <typename KV>
inline void put_group(constant Pages&, device KV* pool, uint row, uint dim, uint first, uint lane, float value) {
    if (first + lane < dim) {
        pool[ulong(row) * dim + first + lane] = rounded_to<KV>(value);
    }
}
inline void put_group(
    constant Pages& pages, device Code* pool, uint row, uint dim, uint first, uint lane, float value
) {
    const Coded own = coded(first + lane < dim ? value : 0.0f);
    if (first + lane < dim) {
        pool[ulong(row) * dim + first + lane].bits = own.code;
    }
    if (lane == 0) {
        scales_of_row(pages, pool, row, dim)[first / GROUP] = own.scale;
    }
}
