// Rows of the cache as tensor cores take them: halves, of whatever type the cache is.
//
// Keys and values of bf16 become halves, and the largest half what is larger. Codes of q8_0 become halves without loss; with
// their scale they are rounded once.

#include "kv_cache.h"

// What a lane reads of a row at once: eight neighbours.
template <typename KV>
struct KeptEight {
    typedef uint4 type;
};
template <>
struct KeptEight<Code> {
    typedef uint2 type;
};
template <typename KV>
using Kept = typename KeptEight<KV>::type;

// Two values of the cache as halves.
template <typename KV>
inline uint in_halves(uint pair) {
    return is_same_v<KV, bfloat> ? msl_halves(as_type<float>(pair << 16), as_type<float>(pair & 0xFFFF0000u)) : pair;
}

// Two of four bytes as halves that begin at 1024, where a step is 1; less what that and the zero code add, exactly.
inline uint halves_of_codes(uint bytes, uint first) {
    const uint from_1024 = msl_permute(bytes, 0x64646464u, first == 0 ? 0x4140u : 0x4342u);
    return msl_add_pairs(from_1024, 0xE480E480u);
}

// Neighbours 2w and 2w + 1 of eight, without their scale.
template <typename KV>
inline uint plain_pair(uint4 eight, uint w) {
    return in_halves<KV>(eight[w]);
}
template <typename KV>
inline uint plain_pair(uint2 eight, uint w) {
    return halves_of_codes(eight[w / 2], w % 2 * 2);
}

// One or two words of two scales of a row, from word `first` on, if there are scales; those behind the last are left out.
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

// Begins to copy eight neighbours of a row to the place of eight halves in threadgroup memory.
template <typename KV>
inline void begin_eight(constant Pages&, device const KV* pool, uint row, uint dim, uint value, threadgroup ushort* place) {
    msl_copy((threadgroup uint4*)place, (device const uint4*)(pool + ulong(row) * dim + value));
}
inline void begin_eight(
    constant Pages& pages, device const Code* pool, uint row, uint dim, uint value, threadgroup ushort* place
) {
    msl_copy((threadgroup uint2*)place, (device const uint2*)(pool + ulong(row) * dim + value));
    device const uint* scales = (device const uint*)scales_of_row(pages, pool, row, dim);
    msl_copy((threadgroup uint*)(place + 4), scales + value / (2 * GROUP));
}

// Whether what was copied has to become halves.
template <typename KV>
constexpr bool is_converted() {
    return !is_same_v<KV, half>;
}

// Makes halves of what this thread has copied to a place.
template <typename KV>
inline void end_eight(threadgroup ushort* place, uint value) {
    uint4 words;
    if (is_same_v<KV, Code>) {
        const uint2 codes = *(threadgroup const uint2*)place;
        const uint scales = *(threadgroup const uint*)(place + 4);
        const uint scale = value / GROUP % 2 == 0 ? msl_low_twice(scales) : msl_high_twice(scales);
#pragma clang loop unroll(full)
        for (uint w = 0; w < 4; ++w) {
            words[w] = msl_multiply_pairs(halves_of_codes(codes[w / 2], w % 2 * 2), scale);
        }
    } else {
        words = *(threadgroup const uint4*)place;
#pragma clang loop unroll(full)
        for (uint w = 0; w < 4; ++w) {
            words[w] = in_halves<KV>(words[w]);
        }
    }
    *(threadgroup uint4*)place = words;
}
