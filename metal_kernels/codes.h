// Reads the codes of a unit (sixteen neighbouring weights) and converts them to floats.
//
// Integer conversions and shifts are slow on Apple GPUs, so codes become floats with few of both. Two codes of a word
// are masked in their bit positions and reinterpreted as a pair of subnormal halves. Such a half is exactly its bits
// times 2^-24, and is a normal number as a float. `prescale(i)` removes that factor and the code's bit position from
// the activation, once for all rows. Codes that are stored with an offset keep it; `ZERO` times the sum of the
// activations is subtracted instead.

#include "threads.h"

// Tables that each lane indexes. Another vendor's compiler may define its own qualifier beforehand.
#ifndef MSL_TABLE
#define MSL_TABLE constant
#endif

// Offsets of a matrix's planes, in units of 16 bytes. The low bits begin at 0.
struct Planes {
    uint high;
    uint scales;
    uint super_scales;
};

// Copies to registers: values in `constant` memory may be read again after every barrier.
inline Planes in_registers(constant Planes& planes) {
    Planes copy;
    copy.high = planes.high;
    copy.scales = planes.scales;
    copy.super_scales = planes.super_scales;
    return copy;
}

// A decoded unit: weight `i` is `scale * (prescale(i) * code[i] - ZERO) - minimum`.
struct Unit {
    float code[16];
    float scale;
    float minimum;
};

constant constexpr float TWO_24 = 16777216.0f;

// Masks and shifts bits of a word to the requested position.
struct Masked {
    uint moved;
    uint mask;
    uint bits() const { return moved & mask; }
};

// Codes `pair` and `pair + 4` of the eight nibbles of a word, for `pair` below 4: an odd one 16 times as large.
inline Masked nibble_pair(uint word, int pair) {
    return { pair < 2 ? word : word >> 8, pair % 2 == 0 ? 0x000F000Fu : 0x00F000F0u };
}

// Moves `bits` bits of each half of `packed`, those of pair `index`, to bit `position` and up of its code, in the
// layout of `nibble_pair`.
inline Masked packed_pair(uint packed, int index, int bits, int position) {
    const int to = index % 2 == 0 ? position : position + 4;
    const int from = index * bits;
    return { from <= to ? packed << (to - from) : packed >> (from - to), ((1u << bits) - 1u) * 0x00010001u << to };
}

inline void set_pair(thread Unit& unit, int word, int pair, uint bits) {
    const half2 codes = as_type<half2>(bits);
    unit.code[8 * word + pair] = float(codes.x);
    unit.code[8 * word + pair + 4] = float(codes.y);
}

// Four bits, or more with `bits` of each code in `high`: the bits of the pairs in order, in each half of the word.
inline void decode_nibbles(uint2 codes, uint high, int bits, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int word = 0; word < 2; ++word) {
#pragma clang loop unroll(full)
        for (int pair = 0; pair < 4; ++pair) {
            uint both = nibble_pair(codes[word], pair).bits();
            if (bits > 0) {
                both |= packed_pair(high, 4 * word + pair, bits, 4).bits();
            }
            set_pair(unit, word, pair, both);
        }
    }
}

// Spreads one bit of each of sixteen codes to a byte for each half, as `packed_pair` expects.
inline uint single_bits(ushort bits) {
    return (uint(bits) | uint(bits) << 8) & 0x00FF00FFu;
}

// A format reads a unit's codes and scale, and decodes them. The unit's index is `row + unit`, where `row` is the row's
// first unit. WORDS is the number of reads that its codes take.
struct Nibbles {
    static constexpr constant int WORDS = 1;
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static constexpr constant bool SHARES_SCALES = false;
    static constexpr constant bool HAS_UNIT_SCALES = false;
    static constexpr constant float ZERO = 0.0f;
    static float prescale(int i) { return i % 2 == 0 ? float(TWO_24) : TWO_24 / 16.0f; }
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
    decode_nibbles(codes.low, single_bits(codes.fifth), 1, unit);
}

// Two bits, and a third one.
struct TwoBits : Nibbles {
    typedef uint Codes;
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        return ((device const uint*)base)[row + unit];
    }
};

struct ThirdBits : Nibbles {
    struct Codes {
        uint low;
        ushort third;
    };
    static Codes load_codes(device const uchar* base, Planes planes, uint row, uint unit) {
        Codes codes;
        codes.low = ((device const uint*)base)[row + unit];
        codes.third = ((device const ushort*)(base + 16ul * planes.high))[row + unit];
        return codes;
    }
};

inline void decode_codes(uint codes, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int index = 0; index < 8; ++index) {
        set_pair(unit, index / 4, index % 4, packed_pair(codes, index, 2, 0).bits());
    }
}

inline void decode_codes(ThirdBits::Codes codes, thread Unit& unit) {
    const uint third = single_bits(codes.third);
#pragma clang loop unroll(full)
    for (int index = 0; index < 8; ++index) {
        const uint low = packed_pair(codes.low, index, 2, 0).bits();
        set_pair(unit, index / 4, index % 4, low | packed_pair(third, index, 1, 2).bits());
    }
}

// Nibbles with two more bits.
struct SixBits : Nibbles {
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
};

inline void decode_codes(SixBits::Codes codes, thread Unit& unit) {
    decode_nibbles(codes.low, codes.upper, 2, unit);
}

// Nibbles that are indices into a table of values.
struct CodebookIndices : Nibbles {
    static float prescale(int) { return 1.0f; }
    struct Codes {
        uint2 indices;
    };
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        Codes codes;
        codes.indices = ((device const uint2*)base)[row + unit];
        return codes;
    }
};

MSL_TABLE float IQ4_VALUES[16] = {
    -127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f, 1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f
};

inline void decode_codes(CodebookIndices::Codes codes, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int i = 0; i < 16; ++i) {
        unit.code[i] = IQ4_VALUES[codes.indices[i / 8] >> (4 * (i % 8)) & 15u];
    }
}

// Floats of four bits: two of exponent, one of mantissa. As the upper bits of a half, they are exactly 2^-14 times
// their value.
struct FourBitFloats : Nibbles {
    struct Codes {
        uint2 floats;
    };
    static Codes load_codes(device const uchar* base, Planes, uint row, uint unit) {
        Codes codes;
        codes.floats = ((device const uint2*)base)[row + unit];
        return codes;
    }
};

// The floats `pair` and `pair + 4` of the eight of a word, as two such halves.
inline uint float_pair(uint word, int pair) {
    const uint magnitude = (pair < 3 ? word << (9 - 4 * pair) : word >> 3) & 0x0E000E00u;
    return magnitude | (word << (12 - 4 * pair) & 0x80008000u);
}

inline void decode_codes(FourBitFloats::Codes codes, thread Unit& unit) {
#pragma clang loop unroll(full)
    for (int index = 0; index < 8; ++index) {
        set_pair(unit, index / 4, index % 4, float_pair(codes.floats[index / 4], index % 4));
    }
}

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
