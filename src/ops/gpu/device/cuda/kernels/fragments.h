// Weights in tiles, in the layout of `src/ops/gpu/matmul/tiles.rs`: a lane's fragment of a row, and how it is decoded.
//
// A tile is eight rows by one K tile: 64 columns of dense formats, 128 of others. Lane 4 · g + t has a fragment of row
// g: for dense formats sixteen neighbours from column 16 · t on, for others eight of each of four blocks of 32, from
// column 8 · t on. The instruction takes fragments as they are, so no weight is moved, and a warp reads 512 contiguous
// bytes at a time.

#include "formats.h"

// A plane that a format does not have.
struct NoPlane {};

template <typename T>
constexpr uint bytes_of_plane() {
    return is_same_v<T, NoPlane> ? 0 : sizeof(T);
}

template <typename F, typename CODES>
constexpr bool has_codes() {
    return is_same_v<typename F::Codes, CODES>;
}

// The planes of a fragment: codes, in words of sixteen bytes (eight for 2-bit codes); high bits; and scales, which
// SHARING lanes of a row have in common.
template <typename F>
struct Fragment {
    static constexpr constant uint COLUMNS = 128;
    static constexpr constant int WORDS = has_codes<F, uint4>() ? 2 : 1;
    static constexpr constant int LOW_BITS = has_codes<F, uint>() || has_codes<F, ThirdBits::Codes>() ? 2 : 4;
    static constexpr constant int HIGH_BITS = has_codes<F, SixBits::Codes>() ? 2
        : has_codes<F, FifthBits::Codes>() || has_codes<F, ThirdBits::Codes>() ? 1 : 0;
    static constexpr constant bool HAS_MINIMUM = F::HAS_MINIMUM;
    typedef conditional_t<LOW_BITS == 2, uint2, uint4> Word;
    typedef conditional_t<HIGH_BITS == 2, uint2, conditional_t<HIGH_BITS == 1, uint, NoPlane>> High;
    typedef conditional_t<HAS_MINIMUM && !F::HAS_UNIT_SCALES, uint4, uint2> Scale;
    static constexpr constant uint SHARING = F::HAS_UNIT_SCALES ? 2 : 4;
    Word words[WORDS];
    High high;
    Scale scale;
};

struct DenseFragment {
    static constexpr constant uint COLUMNS = 64;
    static constexpr constant int WORDS = 2;
    static constexpr constant bool HAS_MINIMUM = false;
    typedef uint4 Word;
    typedef NoPlane High;
    typedef NoPlane Scale;
    static constexpr constant uint SHARING = 4;
    uint4 words[WORDS];
    High high;
    Scale scale;
};
template <>
struct Fragment<F16> : DenseFragment {};

// The number of a lane's groups of eight columns, and the first column of group `i` of lane t.
template <typename F>
constexpr int num_eights() {
    return Fragment<F>::COLUMNS / 32;
}
template <typename F>
inline uint column_of_eight(uint i, uint t) {
    return Fragment<F>::COLUMNS == 64 ? 16 * t + 8 * i : 32 * i + 8 * t;
}

inline void read_plane(device const NoPlane*, thread NoPlane&) {}
template <typename T>
inline void read_plane(device const T* from, thread T& part) {
    part = *from;
}
inline void copy_plane(threadgroup NoPlane*, device const NoPlane*) {}
template <typename T>
inline void copy_plane(threadgroup T* to, device const T* from) {
    msl_copy(to, from);
}
inline void take_plane(threadgroup const NoPlane*, thread NoPlane&) {}
template <typename T>
inline void take_plane(threadgroup const T* from, thread T& part) {
    part = *from;
}

// The addresses of a lane's planes of fragment `index` of a matrix, counted tile by tile, and of the fragments after
// it. An address takes one operation, since this is done for every fragment.
template <typename F>
struct Source {
    typedef Fragment<F> P;
    device const typename P::Word* words;
    device const typename P::High* high;
    device const typename P::Scale* scale;
    Source() {}
    Source(device const uchar* base, Planes planes, uint index, uint lane)
        : words((device const typename P::Word*)base + (ulong(index) * (P::WORDS * LANES) + lane)),
          high((device const typename P::High*)(base + 16ul * planes.high) + (ulong(index) * LANES + lane)),
          scale(
              (device const typename P::Scale*)(base + 16ul * planes.scales)
              + (ulong(index) * (LANES / P::SHARING) + lane / P::SHARING)
          ) {}
    device const typename P::Word* words_at(uint index) const { return words + ulong(index) * (P::WORDS * LANES); }
    device const typename P::High* high_at(uint index) const { return high + ulong(index) * LANES; }
    device const typename P::Scale* scale_at(uint index) const { return scale + ulong(index) * (LANES / P::SHARING); }
    P read(uint index) const {
        P fragment;
#pragma clang loop unroll(full)
        for (int word = 0; word < P::WORDS; ++word) {
            fragment.words[word] = words_at(index)[word * LANES];
        }
        read_plane(high_at(index), fragment.high);
        read_plane(scale_at(index), fragment.scale);
        return fragment;
    }
};

// Fragments on their way through shared memory. Each thread has slots of its own, so it reads what it has copied
// without a barrier. A stage has FRAGMENTS of each thread; the same planes of all threads are adjacent.
template <typename F, uint NUM_THREADS, int FRAGMENTS>
struct Ring {
    typedef Fragment<F> P;
    static constexpr constant uint HIGH = NUM_THREADS * FRAGMENTS * P::WORDS * bytes_of_plane<typename P::Word>();
    static constexpr constant uint SCALES = HIGH + NUM_THREADS * FRAGMENTS * bytes_of_plane<typename P::High>();
    static constexpr constant uint STAGE_BYTES = SCALES + NUM_THREADS * FRAGMENTS * bytes_of_plane<typename P::Scale>();
    threadgroup char* memory;
    uint thread_index;
    Ring(threadgroup char* memory, uint thread_index) : memory(memory), thread_index(thread_index) {}

    template <typename T>
    threadgroup T* part(uint begin, uint stage, int index) const {
        return (threadgroup T*)(memory + thread_index * bytes_of_plane<T>() + stage * STAGE_BYTES + begin) + index * NUM_THREADS;
    }
    void bring(uint stage, int own, Source<F> source, uint index) const {
#pragma clang loop unroll(full)
        for (int word = 0; word < P::WORDS; ++word) {
            copy_plane(part<typename P::Word>(0, stage, own * P::WORDS + word), source.words_at(index) + word * LANES);
        }
        copy_plane(part<typename P::High>(HIGH, stage, own), source.high_at(index));
        copy_plane(part<typename P::Scale>(SCALES, stage, own), source.scale_at(index));
    }
    P take(uint stage, int own) const {
        P fragment;
#pragma clang loop unroll(full)
        for (int word = 0; word < P::WORDS; ++word) {
            fragment.words[word] = *part<typename P::Word>(0, stage, own * P::WORDS + word);
        }
        take_plane(part<typename P::High>(HIGH, stage, own), fragment.high);
        take_plane(part<typename P::Scale>(SCALES, stage, own), fragment.scale);
        return fragment;
    }
};

// Eight weights become four words of two halves: their codes minus the zero point, exactly. Each format pairs the
// columns that are cheapest to decode; activations follow its order. Codes are masked into halves from 1024 on, where
// the step is 1, so that subtracting 1024 and the zero point is exact.
enum class Pairs { NEIGHBOURS, FOUR_APART, TWO_APART };

template <Pairs PAIRS>
constexpr int apart() {
    return PAIRS == Pairs::NEIGHBOURS ? 1 : PAIRS == Pairs::FOUR_APART ? 4 : 2;
}
// The first column of a word, of eight.
template <Pairs PAIRS>
constexpr int first_of_pair(int word) {
    return PAIRS == Pairs::NEIGHBOURS ? 2 * word : PAIRS == Pairs::FOUR_APART ? word : word / 2 * 4 + word % 2;
}

constant constexpr uint FROM_1024 = 0x64006400u;

// The lowest bits of two codes of eight, at the positions of `nibble_pair`.
inline Masked low_pair(uint4 words, int eight, int pair) {
    return nibble_pair(words[eight], pair);
}
inline Masked low_pair(uint2 words, int eight, int pair) {
    return packed_pair(words[eight / 2], 4 * (eight % 2) + pair, 2, 0);
}

inline uint high_bits_of(NoPlane, int) {
    return 0;
}
inline uint high_bits_of(uint high, int) {
    return high;
}
inline uint high_bits_of(uint2 high, int eight) {
    return high[eight / 2];
}

template <typename F>
struct Decoder {
    static constexpr constant Pairs PAIRS = Pairs::FOUR_APART;
    static void codes(Fragment<F> fragment, int eight, thread uint (&words)[4]) {
        constexpr int HIGH_BITS = Fragment<F>::HIGH_BITS;
        constexpr uint ZERO = uint(F::ZERO) * 0x00010001u;
#pragma clang loop unroll(full)
        for (int pair = 0; pair < 4; ++pair) {
            const Masked low = low_pair(fragment.words[0], eight, pair);
            uint both = FROM_1024;
            if (HIGH_BITS > 0) {
                // With 2-bit codes, a word has those of two groups of eight.
                const int index = HIGH_BITS == 1 ? 4 * eight + pair : 4 * (eight % 2) + pair;
                const Masked upper =
                    packed_pair(high_bits_of(fragment.high, eight), index, HIGH_BITS, Fragment<F>::LOW_BITS);
                both = msl_with_bits(upper.moved, upper.mask, both);
            }
            both = msl_with_bits(low.moved, low.mask, both);
            // Odd ones are 16 times as large: a sixteenth of such a half begins at 64.
            words[pair] = pair % 2 == 0
                ? msl_add_pairs(both, (FROM_1024 | 0x80008000u) + ZERO)
                : msl_multiply_add_pairs(both, 0x2C002C00u, 0xD400D400u + 16 * ZERO);
        }
    }
};

// Of four bytes with 128 added, two at distance two.
inline uint pair_of_bytes(uint four, int first) {
    const uint both = msl_with_bits(four >> (8 * first), 0x00FF00FFu, FROM_1024);
    return msl_add_pairs(both, (FROM_1024 | 0x80008000u) + 0x00800080u);
}

template <typename F>
struct ByteDecoder {
    static constexpr constant Pairs PAIRS = Pairs::TWO_APART;
    static void codes(Fragment<F> fragment, int eight, thread uint (&words)[4]) {
#pragma clang loop unroll(full)
        for (int word = 0; word < 4; ++word) {
            words[word] = pair_of_bytes(fragment.words[eight / 2][eight % 2 * 2 + word / 2], word % 2);
        }
    }
};
template <>
struct Decoder<Q8_0> : ByteDecoder<Q8_0> {};
template <>
struct Decoder<Q8_S> : ByteDecoder<Q8_S> {};

// The values of the lower four nibbles, as bytes with 128 added. The low three bits of a nibble index the lower and the
// upper eight entries of the table; the fourth bits select between the two.
inline uint bytes_of_indices(uint nibbles) {
    const uint indices = nibbles & 0x7777u;
    const uint lower = msl_permute(0x3F2D1801u, 0x766A5D4Fu, indices);
    const uint upper = msl_permute(0xA6998D81u, 0xF1D9C5B5u, indices);
    return msl_permute(lower, upper, 0x3210u | (nibbles & 0x8888u) >> 1);
}

template <>
struct Decoder<IQ4_NL> {
    static constexpr constant Pairs PAIRS = Pairs::TWO_APART;
    static void codes(Fragment<IQ4_NL> fragment, int eight, thread uint (&words)[4]) {
#pragma clang loop unroll(full)
        for (int part = 0; part < 2; ++part) {
            const uint four = bytes_of_indices(fragment.words[0][eight] >> (16 * part));
            words[2 * part] = pair_of_bytes(four, 0);
            words[2 * part + 1] = pair_of_bytes(four, 1);
        }
    }
};

template <>
struct Decoder<MXFP4> {
    static constexpr constant Pairs PAIRS = Pairs::FOUR_APART;
    static void codes(Fragment<MXFP4> fragment, int eight, thread uint (&words)[4]) {
#pragma clang loop unroll(full)
        for (int pair = 0; pair < 4; ++pair) {
            // 2^15 twice.
            words[pair] = msl_multiply_pairs(float_pair(fragment.words[0][eight], pair), 0x78007800u);
        }
    }
};

template <>
struct Decoder<F16> {
    static constexpr constant Pairs PAIRS = Pairs::NEIGHBOURS;
    static void codes(Fragment<F16> fragment, int eight, thread uint (&words)[4]) {
#pragma clang loop unroll(full)
        for (int word = 0; word < 4; ++word) {
            words[word] = fragment.words[eight][word];
        }
    }
};

// The same as floats, in the order of columns.
template <typename F>
inline void single_eight(Fragment<F> fragment, int eight, thread float (&values)[8]) {
    constexpr Pairs PAIRS = Decoder<F>::PAIRS;
    uint words[4];
    Decoder<F>::codes(fragment, eight, words);
#pragma clang loop unroll(full)
    for (int word = 0; word < 4; ++word) {
        const half2 pair = as_type<half2>(words[word]);
        values[first_of_pair<PAIRS>(word)] = float(pair.x);
        values[first_of_pair<PAIRS>(word) + apart<PAIRS>()] = float(pair.y);
    }
}

// The factors of a lane's codes, a word for eight columns: scale and minimum of group `i`, each twice as halves, or
// both as floats.
struct NoScales {
    NoScales(NoPlane) {}
    uint2 pair(int) const { return uint2(0, 0); }
    float2 single(int) const { return float2(1.0f, 0.0f); }
};

struct FourScales {
    uint2 halves;
    FourScales(uint2 scale) : halves(scale) {}
    uint2 pair(int i) const {
        return uint2(i % 2 == 0 ? msl_low_twice(halves[i / 2]) : msl_high_twice(halves[i / 2]), 0);
    }
    float2 single(int i) const {
        return float2(float(as_type<half2>(i % 2 == 0 ? halves[i / 2] : halves[i / 2] >> 16).x), 0.0f);
    }
};

// With minima.
struct FourPairs {
    uint4 pairs;
    FourPairs(uint4 scale) : pairs(scale) {}
    uint2 pair(int i) const { return uint2(msl_low_twice(pairs[i]), msl_high_twice(pairs[i])); }
    float2 single(int i) const {
        const half2 pair = as_type<half2>(pairs[i]);
        return float2(float(pair.x), float(pair.y));
    }
};

// Scale and minimum as nibbles of a byte, with their factors.
struct FourBytes {
    uint2 parts;
    FourBytes(uint2 scale) : parts(scale) {}
    uint products(int i) const {
        uint both = msl_with_bits(parts.x >> (8 * i), 0x0000000Fu, FROM_1024);
        both = msl_with_bits(parts.x >> (8 * i) << 12, 0x000F0000u, both);
        return msl_multiply_pairs(msl_add_pairs(both, FROM_1024 | 0x80008000u), parts.y);
    }
    uint2 pair(int i) const {
        const uint both = products(i);
        return uint2(msl_low_twice(both), msl_high_twice(both));
    }
    float2 single(int i) const {
        const half2 both = as_type<half2>(products(i));
        return float2(float(both.x), float(both.y));
    }
};

template <typename F>
using ScalesWithMinima = conditional_t<F::HAS_UNIT_SCALES, FourBytes, FourPairs>;

template <typename F>
using ScalesOf = conditional_t<
    Fragment<F>::COLUMNS == 64, NoScales, conditional_t<F::HAS_MINIMUM, ScalesWithMinima<F>, FourScales>>;

// Eight weights of a fragment, rounded to halves.
template <typename F>
inline void decode_eight(Fragment<F> fragment, int eight, thread uint (&words)[4]) {
    Decoder<F>::codes(fragment, eight, words);
    if (!is_same_v<ScalesOf<F>, NoScales>) {
        const uint2 pair = ScalesOf<F>(fragment.scale).pair(eight);
#pragma clang loop unroll(full)
        for (int word = 0; word < 4; ++word) {
            words[word] = Fragment<F>::HAS_MINIMUM ? msl_multiply_add_pairs(words[word], pair.x, pair.y)
                                                : msl_multiply_pairs(words[word], pair.x);
        }
    }
}
