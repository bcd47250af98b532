// Products of weights with rows of activations on tensor cores: what `few_rows.cu` and `many_rows.cu` share.
//
// Weights and activations become halves: weights as in `metal_kernels/matmul.metal`, activations after the weights of
// the norm and scaled. Sums are floats, to which the norm's factor is applied.
//
// What is the GPU's alone are the functions msl_…: instructions of the GPU, and in the tests' emulator what they do.

#include "formats.h"
#include "groups.h"

struct ProductArgs {
    uint num_units;   // of 16 columns of the matrices
    uint num_tokens;
    uint x_stride;
    uint out_stride;
    uint x_next;    // from the activations of one matrix of a stack to those of the next one
    uint out_next;  // likewise results
    uint gathers;   // whether the rows of groups are listed
    float eps;
    MatrixArgs matrices[3];
    uint num_tiles;  // of all matrices
};

constant bool HAS_NORM [[function_constant(0)]];
constant bool HAS_BIAS [[function_constant(1)]];
constant bool ADDS [[function_constant(2)]];
constant bool IS_GROUPED [[function_constant(3)]];
constant bool IS_HALF [[function_constant(4)]];

// What a threadgroup computes: of which matrix of a stack, and of which rows of activations.
inline Part part_of(constant ProductArgs& a, device const RowGroup* groups, uint index) {
    if (IS_GROUPED) {
        return part_of_group(groups[index], a.out_stride);
    }
    Part part;
    part.matrix = index;
    part.num_rows = a.num_tokens;
    part.first_place = 0;
    part.x_offset = index * a.x_next;
    part.out_offset = index * a.out_next;
    return part;
}

// A unit becomes eight words of two halves. Which columns are a pair is what is quickest for the format; the activations
// follow. Codes are masked into halves from 1024 on, where a step is 1, so that the subtraction of 1024 and of the zero
// point is exact.
enum class Pairs { NEIGHBOURS, FOUR_APART, TWO_APART };

constant constexpr uint FROM_1024 = 0x64006400u;

// What codes are multiplied with, and what is added then.
struct Scales {
    uint scale;
    uint minimum;
};

inline Scales scales_of(half scale) {
    return { msl_low_twice(as_type<ushort>(scale)), 0 };
}
inline Scales scales_of(half2 scale) {
    return { msl_low_twice(as_type<uint>(scale)), msl_high_twice(as_type<uint>(scale)) };
}
// Scale and minimum are six bits each, exact as halves, and are multiplied with those of the super-block.
inline Scales scales_of(SuperBlock scale) {
    const uint low = scale.low >> (8 * (scale.sub_block % 4));
    const uint high = scale.high >> (4 * scale.sub_block);
    const uint six = (low & 15u) | (low & 0xF0u) << 12 | (high & 3u) << 4 | (high & 12u) << 18;
    const uint both = msl_add_pairs(six | FROM_1024, FROM_1024 | 0x80008000u);
    const uint pair = msl_multiply_pairs(both, scale.scales ^ 0x80000000u);
    return { msl_low_twice(pair), msl_high_twice(pair) };
}
inline Scales scales_of(Q6_K::Scale scale) {
    const float product = float(scale.scale) * float(scale.super_scale);
    return { msl_halves(product, product), 0 };
}

inline void low_and_high(uint2 codes, thread uint2& low, thread uint& high) {
    low = codes;
    high = 0;
}
inline void low_and_high(FifthBits::Codes codes, thread uint2& low, thread uint& high) {
    low = codes.low;
    high = fifth_bits(codes.fifth);
}
inline void low_and_high(Q6_K::Codes codes, thread uint2& low, thread uint& high) {
    low = codes.low;
    high = codes.upper;
}

template <typename F>
struct Decoder {
    static constexpr Pairs PAIRS = Pairs::FOUR_APART;
    static constexpr int HIGH_BITS =
        is_same_v<typename F::Codes, Q6_K::Codes> ? 2 : is_same_v<typename F::Codes, FifthBits::Codes> ? 1 : 0;
    static void words(Raw<F> raw, thread uint (&words)[8]) {
        constexpr uint ZERO = uint(F::ZERO) * 0x00010001u;
        const Scales scales = scales_of(raw.scale);
        uint2 low;
        uint high;
        low_and_high(raw.codes, low, high);
#pragma clang loop unroll(full)
        for (int word = 0; word < 8; ++word) {
            const int pair = word % 4;
            const Masked nibbles = nibble_pair(low[word / 4], pair);
            uint both = FROM_1024;
            if (HIGH_BITS > 0) {
                const Masked upper = high_pair(high, word, HIGH_BITS);
                both = msl_with_bits(upper.moved, upper.mask, both);
            }
            both = msl_with_bits(nibbles.moved, nibbles.mask, both);
            // Odd ones are 16 times as large: a sixteenth of them begins at 64.
            const uint code = pair % 2 == 0
                ? msl_add_pairs(both, (FROM_1024 | 0x80008000u) + ZERO)
                : msl_multiply_add_pairs(both, 0x2C002C00u, 0xD400D400u + 16 * ZERO);
            words[word] = F::HAS_MINIMUM ? msl_multiply_add_pairs(code, scales.scale, scales.minimum)
                                         : msl_multiply_pairs(code, scales.scale);
        }
    }
};

template <>
struct Decoder<Q8_0> {
    static constexpr Pairs PAIRS = Pairs::TWO_APART;
    static void words(Raw<Q8_0> raw, thread uint (&words)[8]) {
        const uint scale = scales_of(raw.scale).scale;
#pragma clang loop unroll(full)
        for (int word = 0; word < 8; ++word) {
            const uint both = msl_with_bits(raw.codes[word / 2] >> (8 * (word % 2)), 0x00FF00FFu, FROM_1024);
            words[word] = msl_multiply_pairs(msl_add_pairs(both, (FROM_1024 | 0x80008000u) + 0x00800080u), scale);
        }
    }
};

template <>
struct Decoder<F16> {
    static constexpr Pairs PAIRS = Pairs::NEIGHBOURS;
    static void words(Raw<F16> raw, thread uint (&words)[8]) {
#pragma clang loop unroll(full)
        for (int word = 0; word < 8; ++word) {
            words[word] = raw.codes.word[word / 4][word % 4];
        }
    }
};

template <>
struct Decoder<BF16> {
    static constexpr Pairs PAIRS = Pairs::NEIGHBOURS;
    static void words(Raw<BF16> raw, thread uint (&words)[8]) {
#pragma clang loop unroll(full)
        for (int word = 0; word < 8; ++word) {
            const uint pair = raw.codes.word[word / 4][word % 4];
            words[word] = msl_halves(as_type<float>(pair << 16), as_type<float>(pair & 0xFFFF0000u));
        }
    }
};

// Eight columns of activations as halves, in pairs, after they are multiplied with `scale`.
template <Pairs PAIRS>
inline uint4 paired(thread const float (&values)[8], float scale) {
    uint4 words;
#pragma clang loop unroll(full)
    for (int word = 0; word < 4; ++word) {
        const int first = PAIRS == Pairs::NEIGHBOURS ? 2 * word
                          : PAIRS == Pairs::FOUR_APART ? word
                                                       : word / 2 * 4 + word % 2;
        const int apart = PAIRS == Pairs::NEIGHBOURS ? 1 : PAIRS == Pairs::FOUR_APART ? 4 : 2;
        words[word] = msl_halves(values[first] * scale, values[first + apart] * scale);
    }
    return words;
}

// Which row of which matrix is row `i` of a tile of 16: of a gated product, eight rows of the gate and the same of `up`.
template <bool GATED>
inline uint row_of_tile(uint first_row, uint i) {
    return GATED ? first_row + i % 8 : first_row + i;
}

inline float gated(float gate, float up) {
    return gate / (1.0f + exp(-gate)) * up;
}

inline void store(device float* out, ulong index, float value) {
    if (IS_HALF) {
        ((device half*)out)[index] = half(value);
    } else {
        out[index] = value;
    }
}
