// Weight formats: how sixteen neighbouring weights of a row, a unit, are read and decoded.
//
// A repacked matrix is a few planes, one after the other, each row by row: the low bits of the codes, the high
// bits, the scales, and the scales of the scales. What one lane reads of a plane is aligned to its size.
// `src/ops/metal/layout.rs` writes what is read here and says what each plane holds.
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

// Codes `pair` and `pair + 4` of the eight nibbles of a word, for `pair` below 4: an odd one 16 times as large.
inline uint nibble_pair(uint word, int pair) {
    const uint moved = pair < 2 ? word : word >> 8;
    return moved & (pair % 2 == 0 ? 0x000F000Fu : 0x00F000F0u);
}

// `bits` bits of each half of `high`, those of pair `index`, to where they stand above nibbles of `nibble_pair`.
inline uint high_pair(uint high, int index, int bits) {
    const int to = index % 2 == 0 ? 4 : 8;
    const int from = index * bits;
    const uint moved = from <= to ? high << (to - from) : high >> (from - to);
    return moved & (((1u << bits) - 1u) * 0x00010001u << to);
}

inline void set_pair(thread Unit& unit, int word, int pair, uint bits) {
    const half2 codes = as_type<half2>(bits);
    unit.code[8 * word + pair] = float(codes.x);
    unit.code[8 * word + pair + 4] = float(codes.y);
}

// Four bits, or more with `bits` of each code in `high`: those of the pairs in order, in each half of the word.
inline void decode_nibbles(uint2 codes, uint high, int bits, thread Unit& unit) {
    for (int word = 0; word < 2; ++word) {
        for (int pair = 0; pair < 4; ++pair) {
            uint both = nibble_pair(codes[word], pair);
            if (bits > 0) {
                both |= high_pair(high, 4 * word + pair, bits);
            }
            set_pair(unit, word, pair, both);
        }
    }
}

// One bit of each of sixteen codes, a byte for each half, as `decode_nibbles` wants it.
inline uint fifth_bits(ushort bits) {
    return (uint(bits) | uint(bits) << 8) & 0x00FF00FFu;
}

struct Nibbles {
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static constexpr constant float ZERO = 0.0f;
    static float prescale(int i) { return i % 2 == 0 ? TWO_24 : TWO_24 / 16.0f; }
};

struct Q4_0 : Nibbles {
    static constexpr constant float ZERO = 8.0f;
    struct Raw {
        uint2 codes;
        half scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, 0, 0, unit);
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q4_1 : Nibbles {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        half2 scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.scale = ((device const half2*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, 0, 0, unit);
        unit.scale = float(raw.scale.x);
        unit.minimum = -float(raw.scale.y);
        return unit;
    }
};

struct Q5_0 : Nibbles {
    static constexpr constant float ZERO = 16.0f;
    struct Raw {
        uint2 codes;
        ushort fifth;
        half scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, fifth_bits(raw.fifth), 1, unit);
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q5_1 : Nibbles {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        ushort fifth;
        half2 scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const half2*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, fifth_bits(raw.fifth), 1, unit);
        unit.scale = float(raw.scale.x);
        unit.minimum = -float(raw.scale.y);
        return unit;
    }
};

// Sixteen bytes for 256 weights: the scales of scales and minima, the low four bits of the eight six-bit scales
// and minima, and their high two bits.
struct SuperBlock {
    half2 scales;
    uchar low;
    uchar high;
};

inline SuperBlock load_super_block(device const uchar* base, Planes planes, uint unit) {
    device const uchar* block = base + 16ul * planes.scales + 16 * (unit / 16);
    const uint sub_block = unit % 16 / 2;
    SuperBlock loaded;
    loaded.scales = *(device const half2*)block;
    loaded.low = block[4 + sub_block];
    loaded.high = block[12 + sub_block / 2] >> (4 * (sub_block % 2));
    return loaded;
}

inline void apply_super_block(SuperBlock block, thread Unit& unit) {
    const uint scale = (block.low & 15u) | (block.high & 3u) << 4;
    const uint minimum = block.low >> 4 | (block.high & 12u) << 2;
    unit.scale = float(block.scales.x) * float(scale);
    unit.minimum = float(block.scales.y) * float(minimum);
}

struct Q4_K : Nibbles {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        SuperBlock block;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.block = load_super_block(base, planes, unit);
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, 0, 0, unit);
        apply_super_block(raw.block, unit);
        return unit;
    }
};

struct Q5_K : Nibbles {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        ushort fifth;
        SuperBlock block;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.block = load_super_block(base, planes, unit);
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, fifth_bits(raw.fifth), 1, unit);
        apply_super_block(raw.block, unit);
        return unit;
    }
};

struct Q6_K : Nibbles {
    static constexpr constant float ZERO = 32.0f;
    struct Raw {
        uint2 codes;
        uint upper;
        char scale;
        half super_scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.upper = ((device const uint*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const char*)(base + 16ul * planes.scales))[unit];
        raw.super_scale = ((device const half*)(base + 16ul * planes.super_scales))[unit / 16];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        decode_nibbles(raw.codes, raw.upper, 2, unit);
        unit.scale = float(raw.super_scale) * float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

// Codes are stored with 128 added.
struct Q8_0 {
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static constexpr constant float ZERO = 128.0f;
    static float prescale(int) { return TWO_24; }
    struct Raw {
        uint4 codes;
        half scale;
    };
    static Raw load(device const uchar* base, Planes planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint4*)base)[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 4; ++i) {
            const half2 even = as_type<half2>(raw.codes[i] & 0x00FF00FFu);
            const half2 odd = as_type<half2>(raw.codes[i] >> 8 & 0x00FF00FFu);
            unit.code[4 * i] = float(even.x);
            unit.code[4 * i + 1] = float(odd.x);
            unit.code[4 * i + 2] = float(even.y);
            unit.code[4 * i + 3] = float(odd.y);
        }
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Dense {
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant float ZERO = 0.0f;
    static float prescale(int) { return 1.0f; }
};

struct F16 : Dense {
    static constexpr constant bool IS_WIDE = false;
    struct Raw {
        uint4 low;
        uint4 high;
    };
    static Raw load(device const uchar* base, Planes, uint unit) {
        Raw raw;
        raw.low = ((device const uint4*)base)[2 * unit];
        raw.high = ((device const uint4*)base)[2 * unit + 1];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 8; ++i) {
            const half2 pair = as_type<half2>(i < 4 ? raw.low[i] : raw.high[i - 4]);
            unit.code[2 * i] = float(pair.x);
            unit.code[2 * i + 1] = float(pair.y);
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};

struct BF16 : Dense {
    static constexpr constant bool IS_WIDE = true;
    struct Raw {
        uint4 low;
        uint4 high;
    };
    static Raw load(device const uchar* base, Planes, uint unit) {
        Raw raw;
        raw.low = ((device const uint4*)base)[2 * unit];
        raw.high = ((device const uint4*)base)[2 * unit + 1];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 8; ++i) {
            const uint pair = i < 4 ? raw.low[i] : raw.high[i - 4];
            unit.code[2 * i] = as_type<float>(pair << 16);
            unit.code[2 * i + 1] = as_type<float>(pair & 0xFFFF0000u);
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};

struct F32 : Dense {
    static constexpr constant bool IS_WIDE = true;
    struct Raw {
        float4 values[4];
    };
    static Raw load(device const uchar* base, Planes, uint unit) {
        Raw raw;
        for (int i = 0; i < 4; ++i) {
            raw.values[i] = ((device const float4*)base)[4 * unit + i];
        }
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = raw.values[i / 4][i % 4];
        }
        unit.scale = 1.0f;
        unit.minimum = 0.0f;
        return unit;
    }
};
