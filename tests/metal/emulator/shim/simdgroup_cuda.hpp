// Barriers and the functions of a simdgroup on a GPU for CUDA, where it is a warp.
#pragma once

namespace metal {
METAL_FUNC int msl_lane() {
  int lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
METAL_FUNC void threadgroup_barrier(mem_flags flags) {
  if (int(flags) & int(mem_flags::mem_device)) __nvvm_membar_gl();
  __nvvm_bar_sync(0);
}
METAL_FUNC void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(~0u); }

// Word by word, as the GPU exchanges them.
template <class T, class Exchange>
METAL_FUNC T msl_exchange(T value, Exchange exchange) {
  union Words {
    T value;
    int words[(sizeof(T) + 3) / 4];
    METAL_FUNC Words() {}
  } given, got;
  given.words[sizeof(given.words) / 4 - 1] = 0;
  given.value = value;
#pragma clang loop unroll(full)
  for (int i = 0; i < int(sizeof(given.words) / 4); ++i)
    got.words[i] = exchange(given.words[i]);
  return got.value;
}
template <class T>
METAL_FUNC T msl_from_lane(T value, int lane) {
  return msl_exchange(value, [=](int word) { return __nvvm_shfl_sync_idx_i32(~0u, word, lane, 31); });
}
template <class T>
METAL_FUNC T simd_shuffle(T value, ushort lane) {
  return msl_from_lane(value, lane);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  return msl_exchange(value, [=](int word) { return __nvvm_shfl_sync_bfly_i32(~0u, word, mask, 31); });
}
template <class T>
METAL_FUNC T simd_shuffle_down(T value, ushort delta) {
  const int lane = msl_lane() + delta;
  const T other = msl_from_lane(value, lane & 31);
  return lane < 32 ? other : value;
}
template <class T>
METAL_FUNC T simd_shuffle_up(T value, ushort delta) {
  const int lane = msl_lane() - int(delta);
  const T other = msl_from_lane(value, lane & 31);
  return lane >= 0 ? other : value;
}
template <class T>
METAL_FUNC T simd_broadcast(T value, ushort lane) {
  return msl_from_lane(value, lane);
}
template <class T>
METAL_FUNC T simd_broadcast_first(T value) {
  return msl_from_lane(value, 0);
}
#define MSL_REDUCTION_FUNCTION(name, value_of)         \
  template <class T>                                   \
  METAL_FUNC T name(T a) {                             \
    for (int step = 16; step; step >>= 1) {            \
      const T b = msl_from_lane(a, msl_lane() ^ step); \
      a = T(value_of);                                 \
    }                                                  \
    return a;                                          \
  }
MSL_REDUCTION_FUNCTION(simd_sum, a + b)
MSL_REDUCTION_FUNCTION(simd_product, a* b)
MSL_REDUCTION_FUNCTION(simd_min, metal::min(a, b))
MSL_REDUCTION_FUNCTION(simd_max, metal::max(a, b))
MSL_REDUCTION_FUNCTION(simd_and, a& b)
MSL_REDUCTION_FUNCTION(simd_or, a | b)
MSL_REDUCTION_FUNCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION_FUNCTION
template <class T>
METAL_FUNC T simd_prefix_inclusive_sum(T value) {
  for (int delta = 1; delta < 32; delta <<= 1) {
    const T other = msl_from_lane(value, (msl_lane() - delta) & 31);
    if (msl_lane() >= delta) value = T(value + other);
  }
  return value;
}
template <class T>
METAL_FUNC T simd_prefix_exclusive_sum(T value) {
  const T sum = msl_from_lane(simd_prefix_inclusive_sum(value), (msl_lane() - 1) & 31);
  return msl_lane() ? sum : T(0);
}
struct simd_vote {
  typedef ulong vote_t;
  ulong votes;
  METAL_FUNC explicit operator ulong() const { return votes; }
};
METAL_FUNC simd_vote simd_ballot(bool value) { return {simd_or(uint(value) << msl_lane())}; }
METAL_FUNC bool simd_any(bool value) { return simd_ballot(value).votes != 0; }
METAL_FUNC bool simd_all(bool value) { return simd_ballot(!value).votes == 0; }

// Element (row, k) of `a` and (k, column) of `b`, both in the layout of `simdgroup_matrix.hpp`.
METAL_FUNC void msl_multiply(float a0, float a1, float b0, float b1, float* c, int) {
  const int lane = msl_lane();
  const int row = (lane >> 2 & 4) + (lane >> 1 & 3), column = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
#pragma clang loop unroll(full)
  for (int k = 0; k < 8; ++k) {
    const int of_a = (row & 4) << 2 | (row & 3) << 1 | (k & 4) << 1 | (k >> 1 & 1);
    const int of_b = (k & 4) << 2 | (k & 3) << 1 | (column & 4) << 1 | (column >> 1 & 1);
    const float a = msl_from_lane(k & 1 ? a1 : a0, of_a);
    c[0] += a * msl_from_lane(b0, of_b);
    c[1] += a * msl_from_lane(b1, of_b);
  }
}
}  // namespace metal
