// Rows of the cache, of any type, as halves for tensor cores.
//
// Keys and values of bf16 become halves; those above the largest half are clamped to it. Values of fp8_e4m3 and codes of
// q8_0 become halves without loss; multiplying codes by their scale rounds once.

#include "kv_cache.h"

// A lane's unit of a row: eight neighbours.
template <typename KV>
struct KeptEight {
    typedef uint4 type;
};
template <>
struct KeptEight<Code> {
    typedef uint2 type;
};
template <>
struct KeptEight<Fp8> {
    typedef uint2 type;
};
template <typename KV>
using Kept = typename KeptEight<KV>::type;

// Two values of the cache as halves.
template <typename KV>
inline uint in_halves(uint pair) {
    return is_same_v<KV, bfloat> ? msl_halves(as_type<float>(pair << 16), as_type<float>(pair & 0xFFFF0000u)) : pair;
}

// Two of four bytes as halves from 1024 on, where the step is 1, minus 1024 and the zero code, exactly.
inline uint halves_of_codes(uint bytes, uint first) {
    const uint from_1024 = msl_permute(bytes, 0x64646464u, first == 0 ? 0x4140u : 0x4342u);
    return msl_add_pairs(from_1024, 0xE480E480u);
}

// Two of four values of fp8_e4m3 as halves, exactly: as halves with the other bias, times the quotient of both. Only NaN
// has a carry, which makes its exponent that of NaN.
inline uint halves_of_fp8(uint bytes, uint first) {
#ifdef MSL_HAS_FP8
    return msl_halves_of_fp8(first == 0 ? bytes : bytes >> 16);
#else
    const uint upper = msl_permute(bytes, 0u, first == 0 ? 0x1404u : 0x3424u);
    const uint magnitudes = upper >> 1 & 0x3F803F80u;
    const uint carries = (magnitudes + 0x00800080u) & 0x40004000u;
    return msl_multiply_pairs(magnitudes | carries | (upper & 0x80008000u), 0x5C005C00u);
#endif
}

// Two of four bytes as halves: values of fp8_e4m3, or codes before their scale.
template <typename KV>
inline uint halves_of_bytes(uint bytes, uint first) {
    return is_same_v<KV, Code> ? halves_of_codes(bytes, first) : halves_of_fp8(bytes, first);
}

// Neighbours 2w and 2w + 1 of eight, before their scale.
template <typename KV>
inline uint plain_pair(uint4 eight, uint w) {
    return in_halves<KV>(eight[w]);
}
template <typename KV>
inline uint plain_pair(uint2 eight, uint w) {
    return halves_of_bytes<KV>(eight[w / 2], w % 2 * 2);
}

// One or two words, of two scales each, of a row from word `first` on, if there are scales; words past the end are left
// out.
template <typename KV, uint WORDS>
inline void read_scales(constant Pages&, device const KV*, uint, uint, uint, thread uint (&)[WORDS]) {}
template <uint WORDS>
inline void read_scales(
    constant Pages& pages, device const Code* pool, uint row, uint dim, uint first, thread uint (&words)[WORDS]
) {
    static_assert(WORDS <= 2, "two words at a time");
    device const uint* scales = (device const uint*)scales_of_row(pages, pool, row, dim);
    const uint num_words = (dim + 2 * GROUP - 1) / (2 * GROUP);
    if (WORDS == 2 && num_words == 2) {
        const uint2 both = *(device const uint2*)scales;
        words[0] = both.x;
        words[WORDS - 1] = both.y;
    } else if (first < num_words) {
        words[0] = scales[first];
    }
}

template <typename KV>
inline void fetch_scales(constant Pages&, device const KV*, uint, uint) {}
inline void fetch_scales(constant Pages& pages, device const Code* pool, uint row, uint dim) {
    msl_fetch(scales_of_row(pages, pool, row, dim));
}

// Starts an asynchronous copy of eight neighbours of a row to eight halves in shared memory.
template <typename KV>
inline void begin_eight(constant Pages&, device const KV* pool, uint row, uint dim, uint value, threadgroup ushort* target) {
    msl_copy((threadgroup uint4*)target, (device const uint4*)(pool + ulong(row) * dim + value));
}
inline void begin_eight(
    constant Pages& pages, device const Code* pool, uint row, uint dim, uint value, threadgroup ushort* target
) {
    msl_copy((threadgroup uint2*)target, (device const uint2*)(pool + ulong(row) * dim + value));
    device const uint* scales = (device const uint*)scales_of_row(pages, pool, row, dim);
    msl_copy((threadgroup uint*)(target + 4), scales + value / (2 * GROUP));
}

inline void begin_eight(constant Pages&, device const Fp8* pool, uint row, uint dim, uint value, threadgroup ushort* target) {
    msl_copy((threadgroup uint2*)target, (device const uint2*)(pool + ulong(row) * dim + value));
}

// Whether copied values still have to be converted to halves.
template <typename KV>
constexpr bool is_converted() {
    return !is_same_v<KV, half>;
}

// Converts this thread's copied values at an address to halves.
template <typename KV>
inline void end_eight(threadgroup ushort* target, uint value) {
    uint4 words;
    if (is_same_v<KV, Code>) {
        const uint2 codes = *(threadgroup const uint2*)target;
        const uint scales = *(threadgroup const uint*)(target + 4);
        const uint scale = value / GROUP % 2 == 0 ? msl_low_twice(scales) : msl_high_twice(scales);
#pragma clang loop unroll(full)
        for (uint w = 0; w < 4; ++w) {
            words[w] = msl_multiply_pairs(halves_of_codes(codes[w / 2], w % 2 * 2), scale);
        }
    } else if (is_same_v<KV, Fp8>) {
        const uint2 bytes = *(threadgroup const uint2*)target;
#pragma clang loop unroll(full)
        for (uint w = 0; w < 4; ++w) {
            words[w] = halves_of_bytes<KV>(bytes[w / 2], w % 2 * 2);
        }
    } else {
        words = *(threadgroup const uint4*)target;
#pragma clang loop unroll(full)
        for (uint w = 0; w < 4; ++w) {
            words[w] = in_halves<KV>(words[w]);
        }
    }
    *(threadgroup uint4*)target = words;
}
