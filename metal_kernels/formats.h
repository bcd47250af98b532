// Weight formats: how sixteen neighbouring weights of a row, a unit, are read and decoded.
//
// A repacked matrix is a few planes, one after the other, each row by row: the low bits of the codes, the high
// bits, the scales, and the scales of the scales. What one lane reads of a plane is aligned to its size.
// `src/ops/metal/layout.rs` writes what is read here and says what each plane holds.
//
// Codes become floats without conversions and shifts, which are slow on Apple GPUs: or-ed into the mantissa of
// 2^23 and with 2^23 subtracted again, code `i` of a word gives 2^(bits * i) times its value, exactly. The
// factor is taken out of the activation that it is multiplied with, once for all rows: `prescale(i)`.

#include "threads.h"

// Where the planes of a matrix begin, in steps of 16 bytes from its start. The low bits begin at 0.
struct Planes {
    uint high;
    uint scales;
    uint super_scales;
};

// One of the matrices of a launch.
struct MatrixArgs {
    Planes planes;
    uint num_rows;
    uint out_offset;   // where its rows begin in a row of the result
    uint first_group;  // the first threadgroup that computes it; the largest number if there is no such matrix
};

// A decoded unit: weight `i` is `scale * prescale(i) * code[i] - minimum`.
struct Unit {
    float code[16];
    float scale;
    float minimum;
};

constant constexpr uint MAGIC = 0x4B000000u;
constant constexpr float TWO_23 = 8388608.0f;

// `value` has bits below 2^23 only; `bias` is in the units of its lowest bit.
inline float magic_float(uint value, float bias) {
    return as_type<float>(MAGIC | value) - (TWO_23 + bias);
}

inline float power_of_16(int exponent) {
    return float(1 << (4 * exponent));
}

// 2^23 / prescale of nibble `i` of a word is representable for i below 4; the upper four are moved down.
inline float nibble(uint2 codes, int i, float bias) {
    const uint word = codes[i / 8];
    const uint half_word = i % 8 < 4 ? word : word >> 16;
    return magic_float(half_word & (15u << (4 * (i % 4))), bias * power_of_16(i % 4));
}

// The fifth bits of a unit, one of each weight, times 16, in the scale of the nibbles.
inline float fifth_bit(uint bits, int i) {
    return (bits & (1u << i)) != 0 ? 16.0f * power_of_16(i % 4) : 0.0f;
}

struct FourBits {
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static float prescale(int i) { return 1.0f / power_of_16(i % 4); }
};

struct Q4_0 : FourBits {
    struct Raw {
        uint2 codes;
        half scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 8.0f);
        }
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q4_1 : FourBits {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        half2 scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.scale = ((device const half2*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 0.0f);
        }
        unit.scale = float(raw.scale.x);
        unit.minimum = -float(raw.scale.y);
        return unit;
    }
};

struct Q5_0 : FourBits {
    struct Raw {
        uint2 codes;
        ushort fifth;
        half scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 16.0f) + fifth_bit(raw.fifth, i);
        }
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q5_1 : FourBits {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        ushort fifth;
        half2 scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const half2*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 0.0f) + fifth_bit(raw.fifth, i);
        }
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

inline SuperBlock load_super_block(device const uchar* base, constant Planes& planes, uint unit) {
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

struct Q4_K : FourBits {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        SuperBlock block;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.block = load_super_block(base, planes, unit);
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 0.0f);
        }
        apply_super_block(raw.block, unit);
        return unit;
    }
};

struct Q5_K : FourBits {
    static constexpr constant bool HAS_MINIMUM = true;
    struct Raw {
        uint2 codes;
        ushort fifth;
        SuperBlock block;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.fifth = ((device const ushort*)(base + 16ul * planes.high))[unit];
        raw.block = load_super_block(base, planes, unit);
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            unit.code[i] = nibble(raw.codes, i, 0.0f) + fifth_bit(raw.fifth, i);
        }
        apply_super_block(raw.block, unit);
        return unit;
    }
};

struct Q6_K : FourBits {
    struct Raw {
        uint2 codes;
        uint upper;
        char scale;
        half super_scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint2*)base)[unit];
        raw.upper = ((device const uint*)(base + 16ul * planes.high))[unit];
        raw.scale = ((device const char*)(base + 16ul * planes.scales))[unit];
        raw.super_scale = ((device const half*)(base + 16ul * planes.super_scales))[unit / 16];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            // The upper bits of weight `i` are bits 2·(i % 8) of their half of the word.
            const uint bits = i < 8 ? raw.upper : raw.upper >> 16;
            const float upper = magic_float(bits & (3u << (2 * (i % 8))), 0.0f);
            const float factor = 16.0f * power_of_16(i % 4) / float(1 << (2 * (i % 8)));
            unit.code[i] = fma(upper, factor, nibble(raw.codes, i, 32.0f));
        }
        unit.scale = float(raw.super_scale) * float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q8_0 {
    static constexpr constant bool HAS_MINIMUM = false;
    static constexpr constant bool IS_WIDE = false;
    static float prescale(int i) { return i % 2 == 0 ? 1.0f : 1.0f / 256.0f; }
    struct Raw {
        uint4 codes;
        half scale;
    };
    static Raw load(device const uchar* base, constant Planes& planes, uint unit) {
        Raw raw;
        raw.codes = ((device const uint4*)base)[unit];
        raw.scale = ((device const half*)(base + 16ul * planes.scales))[unit / 2];
        return raw;
    }
    static Unit decode(Raw raw) {
        Unit unit;
        for (int i = 0; i < 16; ++i) {
            // Codes are stored with 128 added.
            const uint word = i % 4 < 2 ? raw.codes[i / 4] : raw.codes[i / 4] >> 16;
            unit.code[i] = i % 2 == 0 ? magic_float(word & 255u, 128.0f)
                                      : magic_float(word & 0xFF00u, 128.0f * 256.0f);
        }
        unit.scale = float(raw.scale);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Dense {
    static constexpr constant bool HAS_MINIMUM = false;
    static float prescale(int) { return 1.0f; }
};

struct F16 : Dense {
    static constexpr constant bool IS_WIDE = false;
    struct Raw {
        uint4 low;
        uint4 high;
    };
    static Raw load(device const uchar* base, constant Planes&, uint unit) {
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
    static Raw load(device const uchar* base, constant Planes&, uint unit) {
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
    static Raw load(device const uchar* base, constant Planes&, uint unit) {
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
