// Weight formats: how sixteen neighbouring weights of a row, a unit, are read and decoded.
//
// A repacked matrix is a few planes, one after the other, each row by row: the low bits of the codes, the high
// bits, the scales, and the scales of the scales. What one lane reads of a plane is aligned to its size.
// `src/ops/gpu/layout.rs` writes what is read here and says what each plane holds.
//
// Codes become floats without conversions of integers and with few shifts, which are slow on Apple GPUs: two codes
// of a word are masked out where they stand and read as a pair of halves below the normal ones. Such a half is its
// bits times 2^-24, exactly, and is a normal number as a float. The factor, and where in the half the code stands,
// is taken out of the activation that it is multiplied with, once for all rows: `prescale(i)`. Codes that are stored
// with an offset keep it; `ZERO` times the sum of the activations is subtracted instead.

#include "threads.h"

// Where the planes of a matrix begin, in steps of 16 bytes from its start. The low bits begin at 0.
struct Planes {
    uint high;
    uint scales;
    uint super_scales;
};

// A copy that stays in registers: what is in `constant` memory may be read anew behind every barrier.
inline Planes in_registers(constant Planes& planes) {
    Planes copy;
    copy.high = planes.high;
    copy.scales = planes.scales;
    copy.super_scales = planes.super_scales;
    return copy;
}

// One of the matrices of a launch.
struct MatrixArgs {
    Planes planes;
    uint num_rows;
    uint out_offset;   // where its rows begin in a row of the result
    uint first_group;  // the first threadgroup that computes it; the largest number if there is no such matrix
};

// A decoded unit: weight `i` is `scale * (prescale(i) * code[i] - ZERO) - minimum`.
struct Unit {
    float code[16];
    float scale;
    float minimum;
};

constant constexpr float TWO_24 = 16777216.0f;

// Bits of a word, where they are wanted, and which of them are.
struct Masked {
    uint moved;
    uint mask;
    uint bits() const { return moved & mask; }
};

// Codes `pair` and `pair + 4` of the eight nibbles of a word, for `pair` below 4: an odd one 16 times as large.
inline Masked nibble_pair(uint word, int pair) {
    return { pair < 2 ? word : word >> 8, pair % 2 == 0 ? 0x000F000Fu : 0x00F000F0u };
}

// `bits` bits of each half of `high`, those of pair `index`, to where they stand above nibbles of `nibble_pair`.
inline Masked high_pair(uint high, int index, int bits) {
    const int to = index % 2 == 0 ? 4 : 8;
    const int from = index * bits;
    return { from <= to ? high << (to - from) : high >> (from - to), ((1u << bits) - 1u) * 0x00010001u << to };
}

inline void set_pair(thread Unit& unit, int word, int pair, uint bits) {
    const half2 codes = as_type<half2>(bits);
    unit.code[8 * word + pair] = float(codes.x);
    unit.code[8 * word + pair + 4] = float(codes.y);
}

// Four bits, or more with `bits` of each code in `high`: those of the pairs in order, in each half of the word.
inline void decode_nibbles(uint2 codes, uint high, int bits, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int word = 0; word < 2; ++word) {
#pragma clang loop unroll(full)
        for (int pair = 0; pair < 4; ++pair) {
            uint both = nibble_pair(codes[word], pair).bits();
            if (bits > 0) {
                both |= high_pair(high, 4 * word + pair, bits).bits();
            }
            set_pair(unit, word, pair, both);
        }
    }
}

// One bit of each of sixteen codes, a byte for each half, as `decode_nibbles` wants it.
inline uint fifth_bits(ushort bits) {
    return (uint(bits) | uint(bits) << 8) & 0x00FF00FFu;
}

// A format says how a unit's codes and its scale are read, which is `row + unit` of the matrix if `row` is where its row
// begins, and how they are decoded. WORDS is the number of accesses that its codes take.
struct Nibbles {
    static constexpr constant int WORDS = 1;
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static constexpr constant bool SHARES_SCALES = false;
    static constexpr constant float ZERO = 0.0f;
    static float prescale(int i) { return i % 2 == 0 ? TWO_24 : TWO_24 / 16.0f; }
    typedef uint2 Codes;
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        return ((device const uint2*)base)[row + unit];
    }
};

// Nibbles with a fifth bit.
struct FifthBits : Nibbles {
    struct Codes {
        uint2 low;
        ushort fifth;
    };
    static Codes load_codes(device const uchar* base, Planes planes, uint row, uint unit) {
        Codes codes;
        codes.low = ((device const uint2*)base)[row + unit];
        codes.fifth = ((device const ushort*)(base + 16ul * planes.high))[row + unit];
        return codes;
    }
};

inline void decode_codes(uint2 codes, thread Unit& unit) {
    decode_nibbles(codes, 0, 0, unit);
}

inline void decode_codes(FifthBits::Codes codes, thread Unit& unit) {
    decode_nibbles(codes.low, fifth_bits(codes.fifth), 1, unit);
}

// A scale for 32 weights.
template <typename BITS>
struct OneScale : BITS {
    typedef half Scale;
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        return ((device const half*)(base + 16ul * planes.scales))[(row + unit) / 2];
    }
    static Unit decode(typename BITS::Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        unit.scale = float(scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

// A scale and a minimum for 32 weights.
template <typename BITS>
struct ScaleAndMinimum : BITS {
    static constexpr constant bool HAS_MINIMUM = true;
    typedef half2 Scale;
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        return ((device const half2*)(base + 16ul * planes.scales))[(row + unit) / 2];
    }
    static Unit decode(typename BITS::Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        unit.scale = float(scale.x);
        unit.minimum = -float(scale.y);
        return unit;
    }
};

struct Q4_0 : OneScale<Nibbles> {
    static constexpr constant float ZERO = 8.0f;
};
struct Q4_1 : ScaleAndMinimum<Nibbles> {};
struct Q5_0 : OneScale<FifthBits> {
    static constexpr constant float ZERO = 16.0f;
};
struct Q5_1 : ScaleAndMinimum<FifthBits> {};

// Where many lanes need the same scales (SHARES_SCALES), those of 32 units of a row are read by eight lanes, a word each,
// and each lane takes its own from them: fewer accesses under way, and fewer registers for what they bring.

// Sixteen bytes for 256 weights: the scales of scales and minima, the low four bits of the eight six-bit scales
// and minima, and their high two bits.
struct SuperBlock {
    uint scales;
    uint low;   // of four sub-blocks, this one among them
    uint high;
    uint sub_block;
};

template <typename BITS>
struct SuperBlocks : BITS {
    static constexpr constant bool HAS_MINIMUM = true;
    static constexpr constant bool SHARES_SCALES = true;
    typedef SuperBlock Scale;
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        device const uint* words = (device const uint*)(base + 16ul * planes.scales) + (row + unit) / 16 * 4;
        Scale scale;
        scale.sub_block = unit % 16 / 2;
        scale.scales = words[0];
        scale.low = words[1 + scale.sub_block / 4];
        scale.high = words[3];
        return scale;
    }
    typedef uint Shared;
    static Shared load_shared(device const uchar* base, Planes planes, uint row, uint word, uint first, uint last) {
        const uint block = (row + min(first + word / 4 * 16, last)) / 16;
        return ((device const uint*)(base + 16ul * planes.scales))[4 * block + word % 4];
    }
    static Scale take_scale(Shared shared, uint first_lane, uint lane) {
        first_lane += lane / 16 * 4;
        Scale scale;
        scale.sub_block = lane % 16 / 2;
        scale.scales = simd_shuffle(shared, ushort(first_lane));
        scale.low = simd_shuffle(shared, ushort(first_lane + 1 + scale.sub_block / 4));
        scale.high = simd_shuffle(shared, ushort(first_lane + 3));
        return scale;
    }
    static Unit decode(typename BITS::Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        const uint low = scale.low >> (8 * (scale.sub_block % 4));
        const uint high = scale.high >> (4 * scale.sub_block);
        const half2 scales = as_type<half2>(scale.scales);
        unit.scale = float(scales.x) * float((low & 15u) | (high & 3u) << 4);
        unit.minimum = float(scales.y) * float((low >> 4 & 15u) | (high & 12u) << 2);
        return unit;
    }
};

struct Q4_K : SuperBlocks<Nibbles> {};
struct Q5_K : SuperBlocks<FifthBits> {};

struct Q6_K : Nibbles {
    static constexpr constant float ZERO = 32.0f;
    static constexpr constant bool SHARES_SCALES = true;
    struct Codes {
        uint2 low;
        uint upper;
    };
    static Codes load_codes(device const uchar* base, Planes planes, uint row, uint unit) {
        Codes codes;
        codes.low = ((device const uint2*)base)[row + unit];
        codes.upper = ((device const uint*)(base + 16ul * planes.high))[row + unit];
        return codes;
    }
    struct Scale {
        char scale;
        half super_scale;
    };
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        Scale scale;
        scale.scale = ((device const char*)(base + 16ul * planes.scales))[row + unit];
        scale.super_scale = ((device const half*)(base + 16ul * planes.super_scales))[(row + unit) / 16];
        return scale;
    }
    struct Shared {
        uint scales;  // of four units
        half super_scale;
    };
    static Shared load_shared(device const uchar* base, Planes planes, uint row, uint word, uint first, uint last) {
        Shared shared;
        shared.scales = ((device const uint*)(base + 16ul * planes.scales))[(row + min(first + 4 * word, last)) / 4];
        const uint block = (row + min(first + word % 2 * 16, last)) / 16;
        shared.super_scale = ((device const half*)(base + 16ul * planes.super_scales))[block];
        return shared;
    }
    static Scale take_scale(Shared shared, uint first_lane, uint lane) {
        Scale scale;
        scale.scale = char(simd_shuffle(shared.scales, ushort(first_lane + lane / 4)) >> (8 * (lane % 4)));
        scale.super_scale = simd_shuffle(shared.super_scale, ushort(first_lane + lane / 16));
        return scale;
    }
    static Unit decode(Codes codes, Scale scale) {
        Unit unit;
        decode_nibbles(codes.low, codes.upper, 2, unit);
        unit.scale = float(scale.super_scale) * float(scale.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

inline void decode_codes(uint4 codes, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
        const half2 even = as_type<half2>(codes[i] & 0x00FF00FFu);
        const half2 odd = as_type<half2>(codes[i] >> 8 & 0x00FF00FFu);
        unit.code[4 * i] = float(even.x);
        unit.code[4 * i + 1] = float(odd.x);
        unit.code[4 * i + 2] = float(even.y);
        unit.code[4 * i + 3] = float(odd.y);
    }
}

// Codes are stored with 128 added.
struct Bytes : Nibbles {
    static float prescale(int) { return TWO_24; }
    typedef uint4 Codes;
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        return ((device const uint4*)base)[row + unit];
    }
};

struct Q8_0 : OneScale<Bytes> {
    static constexpr constant float ZERO = 128.0f;
};

// Sixteen weights as they are in the file, in N words.
template <int N>
struct Words {
    uint4 word[N];
};

struct NoScale {};

template <int N>
struct Dense {
    static constexpr constant int WORDS = N;
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool SHARES_SCALES = false;
    static constexpr constant float ZERO = 0.0f;
    static float prescale(int) { return 1.0f; }
    typedef Words<N> Codes;
    typedef NoScale Scale;
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        Codes codes;
#pragma clang loop unroll(full)
        for (int i = 0; i < N; ++i) {
            codes.word[i] = ((device const uint4*)base)[N * (row + unit) + i];
        }
        return codes;
    }
    static Scale load_scale(device const uchar*, Planes, uint, uint) { return Scale(); }
};

struct F16 : Dense<2> {
    static constexpr constant bool IS_WIDE = false;
    static Unit decode(Codes codes, Scale) {
        Unit unit;
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
            const half2 pair = as_type<half2>(codes.word[i / 4][i % 4]);
            unit.code[2 * i] = float(pair.x);
            unit.code[2 * i + 1] = float(pair.y);
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};

struct BF16 : Dense<2> {
    static constexpr constant bool IS_WIDE = true;
    static Unit decode(Codes codes, Scale) {
        Unit unit;
#pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
            const uint pair = codes.word[i / 4][i % 4];
            unit.code[2 * i] = as_type<float>(pair << 16);
            unit.code[2 * i + 1] = as_type<float>(pair & 0xFFFF0000u);
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};

struct F32 : Dense<4> {
    static constexpr constant bool IS_WIDE = true;
    static Unit decode(Codes codes, Scale) {
        Unit unit;
#pragma clang loop unroll(full)
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = as_type<float>(codes.word[i / 4][i % 4]);
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};

// A unit on its way.
template <typename F>
struct Raw {
    typename F::Codes codes;
    typename F::Scale scale;
};

template <typename F>
inline Raw<F> load_unit(device const uchar* base, Planes planes, uint row, uint unit) {
    Raw<F> raw;
    raw.codes = F::load_codes(base, planes, row, unit);
    raw.scale = F::load_scale(base, planes, row, unit);
    return raw;
}
