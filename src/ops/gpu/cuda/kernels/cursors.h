// Where a warp of `few_rows.cu` reads a row of weights: a lane has one unit of every 32. All addresses but the first are that
// of the last one and a number that is known beforehand.

#include "formats.h"

// Units from one that a lane reads to the next, which are a chunk.
constant constexpr uint UNITS = 32;

// Codes that lie side by side.
template <typename CODES>
struct CodeCursor {
    device const CODES* codes;
    void begin(device const uchar* base, Planes, ulong index) { codes = (device const CODES*)base + index; }
    void advance(uint chunks) { codes += chunks * UNITS; }
    CODES load(int chunk) const { return codes[chunk * UNITS]; }
};

template <>
struct CodeCursor<FifthBits::Codes> {
    device const uint2* low;
    device const ushort* fifth;
    void begin(device const uchar* base, Planes planes, ulong index) {
        low = (device const uint2*)base + index;
        fifth = (device const ushort*)(base + 16ul * planes.high) + index;
    }
    void advance(uint chunks) {
        low += chunks * UNITS;
        fifth += chunks * UNITS;
    }
    FifthBits::Codes load(int chunk) const {
        FifthBits::Codes codes;
        codes.low = low[chunk * UNITS];
        codes.fifth = fifth[chunk * UNITS];
        return codes;
    }
};

template <>
struct CodeCursor<Q6_K::Codes> {
    device const uint2* low;
    device const uint* upper;
    void begin(device const uchar* base, Planes planes, ulong index) {
        low = (device const uint2*)base + index;
        upper = (device const uint*)(base + 16ul * planes.high) + index;
    }
    void advance(uint chunks) {
        low += chunks * UNITS;
        upper += chunks * UNITS;
    }
    Q6_K::Codes load(int chunk) const {
        Q6_K::Codes codes;
        codes.low = low[chunk * UNITS];
        codes.upper = upper[chunk * UNITS];
        return codes;
    }
};

// A scale for two units.
template <typename SCALE>
struct ScaleCursor {
    device const SCALE* scales;
    void begin(device const uchar* base, Planes planes, ulong index) {
        scales = (device const SCALE*)(base + 16ul * planes.scales) + index / 2;
    }
    void advance(uint chunks) { scales += chunks * (UNITS / 2); }
    SCALE load(int chunk) const { return scales[chunk * (UNITS / 2)]; }
};

template <>
struct ScaleCursor<NoScale> {
    void begin(device const uchar*, Planes, ulong) {}
    void advance(uint) {}
    NoScale load(int) const { return NoScale(); }
};

// Four words for sixteen units, of which a lane has the same one in each.
template <>
struct ScaleCursor<SuperBlock> {
    device const uint* words;
    uint sub_block;
    void begin(device const uchar* base, Planes planes, ulong index) {
        words = (device const uint*)(base + 16ul * planes.scales) + index / 16 * 4;
        sub_block = uint(index) % 16 / 2;
    }
    void advance(uint chunks) { words += chunks * (UNITS / 4); }
    SuperBlock load(int chunk) const {
        device const uint* own = words + chunk * (UNITS / 4);
        SuperBlock scale;
        scale.sub_block = sub_block;
        scale.scales = own[0];
        scale.low = (own + sub_block / 4)[1];
        scale.high = own[3];
        return scale;
    }
};

template <>
struct ScaleCursor<Q6_K::Scale> {
    device const char* scales;
    device const half* super_scales;
    void begin(device const uchar* base, Planes planes, ulong index) {
        scales = (device const char*)(base + 16ul * planes.scales) + index;
        super_scales = (device const half*)(base + 16ul * planes.super_scales) + index / 16;
    }
    void advance(uint chunks) {
        scales += chunks * UNITS;
        super_scales += chunks * (UNITS / 16);
    }
    Q6_K::Scale load(int chunk) const {
        Q6_K::Scale scale;
        scale.scale = scales[chunk * UNITS];
        scale.super_scale = super_scales[chunk * (UNITS / 16)];
        return scale;
    }
};

template <typename F>
struct Cursor {
    CodeCursor<typename F::Codes> codes;
    ScaleCursor<typename F::Scale> scale;
    // At the unit `index` of the matrix.
    void begin(device const uchar* base, Planes planes, ulong index) {
        codes.begin(base, planes, index);
        scale.begin(base, planes, index);
    }
    void advance(uint chunks) {
        codes.advance(chunks);
        scale.advance(chunks);
    }
    Raw<F> load(int chunk) const {
        Raw<F> raw;
        raw.codes = codes.load(chunk);
        raw.scale = scale.load(chunk);
        return raw;
    }
};
