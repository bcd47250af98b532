// Emulates the instructions of NVIDIA's GPUs in `src/ops/gpu/device/msl/tensor_cores_cuda.hpp`.
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
inline uint msl_permute(uint low, uint high, uint indices) {
  const ulong both = low | ulong(high) << 32;
  uint bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= uint(both >> (8 * (indices >> (4 * i) & 7u)) & 255u) << (8 * i);
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

inline void msl_add(device float* target, float value) { *target += value; }
inline void msl_add_pair(device float* target, float first, float second) {
  *(device float2*)target = *(device const float2*)target + float2(first, second);
}
inline float msl_reciprocal(float x) { return 1.0f / x; }
inline float msl_exp2(float x) { return x < -126.0f ? 0.0f : exp2(x); }

// Four sums of a lane side by side, so that the compiler adds them together: these loops were a third of what a
// checked run took.
typedef float msl_four __attribute__((vector_size(16)));
struct msl_tiles {
  uint a[4], b[2];
};
// Eight halves at a time: one by one, their conversion was a quarter of it.
typedef _Float16 msl_eight_halves __attribute__((vector_size(16)));
typedef float msl_eight __attribute__((vector_size(32)));
MSL_UNCHECKED_INLINE void msl_convert(const void* halves, float* floats) {
  msl_eight_halves from;
  __builtin_memcpy(&from, halves, sizeof from);
  const msl_eight to = __builtin_convertvector(from, msl_eight);
  __builtin_memcpy(floats, &to, sizeof to);
}
// Word `word` of four neighbouring lanes' arguments.
MSL_UNCHECKED_INLINE void msl_row_of_tile(const MslExchange* exchange, int first_lane, int word, float* floats) {
  uint words[4];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&words[i], exchange->slots[first_lane + i] + 4 * word, 4);
  msl_convert(words, floats);
}
MSL_UNCHECKED inline void msl_multiply_tile(float (&sums)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1,
                                            MSL_HERE) {
  MslExchange* exchange = msl_give(msl_tiles{{a0, a1, a2, a3}, {b0, b1}}, MSL_MATRIX, line);
  if (exchange->active != ~0u) msl_fail(MSL_PARTIAL_MATRIX, line);
  const int g = msl_lane() / 4, t = msl_lane() % 4;
  // Rows g and g + 8 of `a`, columns 2t and 2t + 1 of `b`.
  float a[2][16], b[2][16];
  for (int i = 0; i < 2; ++i)
    for (int part = 0; part < 2; ++part) {
      msl_row_of_tile(exchange, 4 * g, i + 2 * part, &a[i][8 * part]);
      msl_row_of_tile(exchange, 4 * (2 * t + i), 4 + part, &b[i][8 * part]);
    }
  msl_four four = {sums[0], sums[1], sums[2], sums[3]};
  for (int k = 0; k < 16; ++k)
    four += msl_four{a[0][k], a[0][k], a[1][k], a[1][k]} * msl_four{b[0][k], b[1][k], b[0][k], b[1][k]};
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

// A block is there at once, with zeros after it, and threadgroups bring blocks for themselves.
template <uint STAGES>
void msl_begin_stages(threadgroup ulong*, uint) {}
template <uint STAGES, uint THREADS, uint CAPACITY>
void msl_bring(threadgroup uint4* stage, device const uint4* block, uint count, threadgroup ulong*, uint, uint thread_index) {
  for (uint i = thread_index; i < CAPACITY; i += THREADS) stage[i] = i < count ? block[i] : uint4(0);
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
  const int first_lane = msl_lane() / 4 * 4;
  float own[2][16];
  for (int i = 0; i < 2; ++i)
    for (int part = 0; part < 2; ++part) msl_row_of_tile(exchange, first_lane, i + 2 * part, &own[i][8 * part]);
  msl_rows rows;
  for (int k = 0; k < 16; ++k) rows.values[k] = msl_four{own[0][k], own[0][k], own[1][k], own[1][k]};
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
      float values[2][8];
      msl_convert(&first, values[0]);
      msl_convert(&second, values[1]);
      for (int i = 0; i < 8; ++i)
        four += rows.values[8 * eight + i] * msl_four{values[0][i], values[1][i], values[0][i], values[1][i]};
    }
    for (int i = 0; i < 4; ++i) sums[n][i] = four[i];
  }
}
inline void msl_show_copies() {}
template <int N>
void msl_begin_matmuls(uint (&)[N][4]) {}
inline void msl_end_matmuls() {}
template <int NUM_LATER>
void msl_wait_for_matmuls() {}
}  // namespace metal
