// Weight formats: how the codes (see `codes.h`) and scales of a unit, sixteen neighbouring weights of a row, are read.
//
// A repacked matrix is a few planes in sequence, each row by row: the low bits of the codes, the high bits, the scales,
// and the scales of the scales. A lane's reads of a plane are aligned to their size. `src/ops/gpu/matmul/layout.rs`
// writes this layout and documents each plane.

#include "codes.h"

// One of the matrices of a launch.
struct MatrixArgs {
    Planes planes;
    uint num_rows;
    uint out_offset;   // of its rows in a row of the result
    uint first_group;  // the first threadgroup that computes it; UINT_MAX if there is no such matrix
};

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

// If many lanes need the same scales (SHARES_SCALES), eight lanes read those of 32 units of a row, a word each, and
// each lane selects its own from them: fewer reads in flight, and fewer registers for their results.

// Sixteen bytes for 256 weights: the scales of scales and minima, the low four bits of the eight six-bit scales
// and minima, and their high two bits.
struct SuperBlock {
    uint scales;
    uint low;   // bits of four sub-blocks, including this one
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

// An 8-bit scale for 16 weights, four of which fill a word, and what 256 weights share: a scale of scales and, in some
// formats, one of minima.
template <typename BITS, typename SUPER>
struct UnitScales : BITS {
    static constexpr constant bool SHARES_SCALES = true;
    static constexpr constant bool HAS_UNIT_SCALES = true;
    struct Scale {
        uchar scale;
        SUPER super_scale;
    };
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        Scale scale;
        scale.scale = (base + 16ul * planes.scales)[row + unit];
        scale.super_scale = ((device const SUPER*)(base + 16ul * planes.super_scales))[(row + unit) / 16];
        return scale;
    }
    struct Shared {
        uint scales;  // of four units
        SUPER super_scale;
    };
    static Shared load_shared(device const uchar* base, Planes planes, uint row, uint word, uint first, uint last) {
        Shared shared;
        shared.scales = ((device const uint*)(base + 16ul * planes.scales))[(row + min(first + 4 * word, last)) / 4];
        const uint block = (row + min(first + word % 2 * 16, last)) / 16;
        shared.super_scale = ((device const SUPER*)(base + 16ul * planes.super_scales))[block];
        return shared;
    }
    static Scale take_scale(Shared shared, uint first_lane, uint lane) {
        Scale scale;
        scale.scale = uchar(simd_shuffle(shared.scales, ushort(first_lane + lane / 4)) >> (8 * (lane % 4)));
        scale.super_scale = simd_shuffle(shared.super_scale, ushort(first_lane + lane / 16));
        return scale;
    }
};

template <typename BITS>
struct SignedScales : UnitScales<BITS, half> {
    typedef typename UnitScales<BITS, half>::Scale Scale;
    static Unit decode(typename BITS::Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        unit.scale = float(scale.super_scale) * float(char(scale.scale));
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q3_K : SignedScales<ThirdBits> {
    static constexpr constant float ZERO = 4.0f;
};
struct Q6_K : SignedScales<SixBits> {
    static constexpr constant float ZERO = 32.0f;
};
struct IQ4_XS : SignedScales<CodebookIndices> {};

// Codes are eighths.
struct Q8_S : SignedScales<Bytes> {
    static constexpr constant float ZERO = 128.0f / 8.0f;
    static float prescale(int) { return TWO_24 / 8.0f; }
};

// The two nibbles are scale and minimum.
struct Q2_K : UnitScales<TwoBits, uint> {
    static constexpr constant bool HAS_MINIMUM = true;
    static Unit decode(Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        const half2 scales = as_type<half2>(scale.super_scale);
        unit.scale = float(scales.x) * float(scale.scale & 15u);
        unit.minimum = float(scales.y) * float(scale.scale >> 4);
        return unit;
    }
};

struct IQ4_NL : OneScale<CodebookIndices> {};

// The scale is the upper half of a float. Values are doubled.
struct MXFP4 : FourBitFloats {
    static float prescale(int) { return 32768.0f; }
    typedef ushort Scale;
    static Scale load_scale(device const uchar* base, Planes planes, uint row, uint unit) {
        return ((device const ushort*)(base + 16ul * planes.scales))[(row + unit) / 2];
    }
    static Unit decode(Codes codes, Scale scale) {
        Unit unit;
        decode_codes(codes, unit);
        unit.scale = as_type<float>(uint(scale) << 16);
        unit.minimum = 0.0f;
        return unit;
    }
};

struct Q8_0 : OneScale<Bytes> {
    static constexpr constant float ZERO = 128.0f;
};

// Sixteen weights as the file stores them, in N words.
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
    static constexpr constant bool HAS_UNIT_SCALES = false;
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

// A unit whose loads are in flight.
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
