// What the instructions of NVIDIA's GPUs do that `src/ops/gpu/msl/tensor_cores_cuda.hpp` has functions for.
#pragma once

namespace metal {
inline void msl_wait_for_inputs(bool = true) {}

inline half msl_half_of(uint pair, int index) { return as_type<half>(ushort(pair >> (16 * index))); }
inline uint msl_pair_of(half first, half second) {
  return as_type<ushort>(first) | uint(as_type<ushort>(second)) << 16;
}
inline float msl_finite(float value) { return value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value; }
inline uint msl_halves(float first, float second) {
  return msl_pair_of(half(msl_finite(first)), half(msl_finite(second)));
}
template <class T>
inline void msl_fetch(device const T* value) {
  (void)T(*value);
}
inline uint msl_low_twice(uint pair) { return (pair & 0xFFFFu) * 0x00010001u; }
inline uint msl_high_twice(uint pair) { return (pair >> 16) * 0x00010001u; }
inline uint msl_permute(uint low, uint high, uint places) {
  const ulong both = low | ulong(high) << 32;
  uint bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= uint(both >> (8 * (places >> (4 * i) & 7u)) & 255u) << (8 * i);
  return bytes;
}
inline uint msl_with_bits(uint bits, uint mask, uint others) { return (bits & mask) | others; }
inline uint msl_multiply_add_pairs(uint a, uint b, uint c) {
  half results[2];
  for (int i = 0; i < 2; ++i)
    results[i] = half(double(msl_half_of(a, i)) * double(msl_half_of(b, i)) + double(msl_half_of(c, i)));
  return msl_pair_of(results[0], results[1]);
}
inline uint msl_add_pairs(uint a, uint b) { return msl_multiply_add_pairs(a, 0x3C003C00u, b); }
// The zero has the sign that changes nothing.
inline uint msl_multiply_pairs(uint a, uint b) { return msl_multiply_add_pairs(a, b, 0x80008000u); }

inline void msl_add(device float* place, float value) { *place += value; }
inline void msl_add_pair(device float* place, float first, float second) {
  *(device float2*)place = *(device const float2*)place + float2(first, second);
}
inline float msl_reciprocal(float x) { return 1.0f / x; }
inline float msl_exp2(float x) { return x < -126.0f ? 0.0f : exp2(x); }

// Four sums of a lane side by side, so that the compiler adds them together: these loops were a third of what a
// checked run took.
typedef float msl_four __attribute__((vector_size(16)));
struct msl_tiles {
  uint a[4], b[2];
};
MSL_UNCHECKED inline void msl_multiply_tile(float (&sums)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1,
                                            MSL_HERE) {
  MslExchange* exchange = msl_give(msl_tiles{{a0, a1, a2, a3}, {b0, b1}}, MSL_MATRIX, line);
  if (exchange->active != ~0u) msl_fail(MSL_PARTIAL_MATRIX, line);
  const int g = msl_lane() / 4, t = msl_lane() % 4;
  // Rows g and g + 8 of `a`, columns 2t and 2t + 1 of `b`.
  msl_four four = {sums[0], sums[1], sums[2], sums[3]};
  for (int k = 0; k < 16; ++k) {
    const msl_tiles* of_a = (const msl_tiles*)exchange->slots[g * 4 + k % 8 / 2];
    float a[2], b[2];
    for (int i = 0; i < 2; ++i) {
      const msl_tiles* of_b = (const msl_tiles*)exchange->slots[(2 * t + i) * 4 + k % 8 / 2];
      a[i] = float(msl_half_of(of_a->a[i + k / 8 * 2], k % 2));
      b[i] = float(msl_half_of(of_b->b[k / 8], k % 2));
    }
    four += msl_four{a[0], a[0], a[1], a[1]} * msl_four{b[0], b[1], b[0], b[1]};
  }
  for (int i = 0; i < 4; ++i) sums[i] = four[i];
}
// Row `index` % 8 of matrix `index` / 8, of those whose rows the lanes name.
inline const ushort* msl_row_of(MslExchange* exchange, int index) {
  const ushort* row;
  __builtin_memcpy(&row, exchange->slots[index], sizeof(row));
  return row;
}
inline void msl_load_matrices(threadgroup const ushort* row, uint (&words)[4], MSL_HERE) {
  MslExchange* exchange = msl_give(row, MSL_MATRIX, line);
  for (int i = 0; i < 4; ++i) {
    const ushort* pair = msl_row_of(exchange, 8 * i + msl_lane() / 4) + msl_lane() % 4 * 2;
    words[i] = pair[0] | uint(pair[1]) << 16;
  }
}
inline void msl_load_transposed(threadgroup const ushort* row, uint (&words)[4], MSL_HERE) {
  MslExchange* exchange = msl_give(row, MSL_MATRIX, line);
  const int column = msl_lane() / 4, first = msl_lane() % 4 * 2;
  for (int i = 0; i < 4; ++i)
    words[i] = msl_row_of(exchange, 8 * i + first)[column] | uint(msl_row_of(exchange, 8 * i + first + 1)[column]) << 16;
}

// A copy is there at once.
template <class T>
inline void msl_copy(threadgroup T* target, device const T* source) {
  *target = *source;
}
inline void msl_end_group() {}
template <int NUM_LATER>
void msl_wait_for_groups() {}

// A block is there at once, with zeros behind it, and threadgroups bring blocks for themselves.
template <uint STAGES>
void msl_begin_stages(threadgroup ulong*, uint) {}
template <uint STAGES, uint THREADS, uint ROOM>
void msl_bring(threadgroup uint4* stage, device const uint4* block, uint count, threadgroup ulong*, uint, uint thread_index) {
  for (uint i = thread_index; i < ROOM; i += THREADS) stage[i] = i < count ? block[i] : uint4(0);
}
template <uint NUM_LATER>
void msl_wait_for_stage(threadgroup const ulong*, uint) {}
template <uint STAGES>
void msl_free_stage(threadgroup const ulong*, uint) {}

inline uint msl_swizzled(uint row, uint eight) { return 8 * row + (eight ^ (row % 8)); }
struct msl_rows {
  msl_four values[16];
};
// The two rows of `a` that a lane has sums of, each value twice.
MSL_UNCHECKED inline msl_rows msl_own_rows(const uint (&a)[4], int line) {
  MslExchange* exchange = msl_give(msl_tiles{{a[0], a[1], a[2], a[3]}, {}}, MSL_MATRIX, line);
  if (exchange->active != ~0u) msl_fail(MSL_PARTIAL_MATRIX, line);
  msl_rows rows;
  for (int k = 0; k < 16; ++k) {
    const msl_tiles* of_a = (const msl_tiles*)exchange->slots[msl_lane() / 4 * 4 + k % 8 / 2];
    const float first = float(msl_half_of(of_a->a[k / 8 * 2], k % 2));
    const float second = float(msl_half_of(of_a->a[1 + k / 8 * 2], k % 2));
    rows.values[k] = msl_four{first, first, second, second};
  }
  return rows;
}
template <int TILES>
void msl_multiply_rows(float (&sums)[TILES][4], const uint (&a)[4], threadgroup const uint4* tile, int k, MSL_HERE) {
  const msl_rows rows = msl_own_rows(a, line);
  for (int n = 0; n < TILES; ++n) {
    msl_four four = {sums[n][0], sums[n][1], sums[n][2], sums[n][3]};
    const uint token = 8 * n + msl_lane() % 4 * 2;
    for (int eight = 0; eight < 2; ++eight) {
      const uint4 first = tile[msl_swizzled(token, 2 * k + eight)];
      const uint4 second = tile[msl_swizzled(token + 1, 2 * k + eight)];
      for (int i = 0; i < 8; ++i) {
        const float values[2] = {float(msl_half_of(first[i / 2], i % 2)), float(msl_half_of(second[i / 2], i % 2))};
        four += rows.values[8 * eight + i] * msl_four{values[0], values[1], values[0], values[1]};
      }
    }
    for (int i = 0; i < 4; ++i) sums[n][i] = four[i];
  }
}
inline void msl_show_copies() {}
template <int N>
void msl_begin_products(uint (&)[N][4]) {}
inline void msl_end_products() {}
template <int NUM_LATER>
void msl_wait_for_products() {}
}  // namespace metal
