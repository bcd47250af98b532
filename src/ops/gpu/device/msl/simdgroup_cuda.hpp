// Barriers and the functions of a simdgroup on a GPU for CUDA, where it is a warp.
#pragma once

namespace metal {
// Maps a lane to the GPU's lane, and back. If a library uses matrices, lanes are numbered so that each has the values
// of a matrix that the GPU's instructions assign to it. Both functions only move bits, so the number of `a ^ b` is that
// of `a` ^ that of `b`.
#if defined(MSL_MATRICES)
METAL_FUNC int msl_own_lane(int lane) { return (lane & 17) | (lane & 8) >> 2 | (lane & 6) << 1; }
METAL_FUNC int msl_lane_of(int own) { return (own & 17) | (own & 2) << 2 | (own & 12) >> 1; }
#else
METAL_FUNC int msl_own_lane(int lane) { return lane; }
METAL_FUNC int msl_lane_of(int own) { return own; }
#endif
METAL_FUNC int msl_lane() {
  int own;
  asm("mov.u32 %0, %%laneid;" : "=r"(own));
  return msl_lane_of(own);
}
// Kernels are launched while the previous one still runs. This waits for its writes; a kernel reads only weights before
// it.
METAL_FUNC void msl_wait_for_inputs(bool is_needed = true) {
#if __CUDA_ARCH__ >= 900
  if (is_needed) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
METAL_FUNC void msl_let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
METAL_FUNC void threadgroup_barrier(mem_flags flags) {
  if (int(flags) & int(mem_flags::mem_device)) __threadfence();
  __syncthreads();
}
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

// Word by word, as the GPU's shuffles work.
template <class T, class Exchange>
METAL_FUNC T msl_exchange(T value, Exchange exchange) {
  union Words {
    T value;
    int words[(sizeof(T) + 3) / 4];
    METAL_FUNC Words() {}
  } given, got;
  given.words[sizeof(given.words) / 4 - 1] = 0;
  given.value = value;
  MSL_UNROLL
  for (int i = 0; i < int(sizeof(given.words) / 4); ++i)
    got.words[i] = exchange(given.words[i]);
  return got.value;
}
template <class T>
METAL_FUNC T msl_from_lane(T value, int lane) {
  const int own = msl_own_lane(lane);
  return msl_exchange(value, [=](int word) { return __shfl_sync(~0u, word, own); });
}
template <class T>
METAL_FUNC T simd_shuffle(T value, ushort lane) {
  return msl_from_lane(value, lane);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  const int own = msl_own_lane(mask);
  return msl_exchange(value, [=](int word) { return __shfl_xor_sync(~0u, word, own); });
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
      const T b = simd_shuffle_xor(a, ushort(step));   \
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
METAL_FUNC simd_vote simd_ballot(bool value) { return {__ballot_sync(0xFFFFFFFFu, value)}; }
METAL_FUNC bool simd_any(bool value) { return simd_ballot(value).votes != 0; }
METAL_FUNC bool simd_all(bool value) { return simd_ballot(!value).votes == 0; }

METAL_FUNC uint msl_bits(float value) { return __float_as_uint(value); }
METAL_FUNC uint msl_pair(half first, half second) { return first.bits | uint(second.bits) << 16; }
// Two neighbours of a row of a matrix of 16-bit values become two of the transposed matrix.
METAL_FUNC uint msl_transposed(uint pair) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}
METAL_FUNC void msl_transpose(uint& first, uint& second) {
  const uint low = msl_transposed((first & 0xFFFF) | second << 16);
  const uint high = msl_transposed(first >> 16 | (second & 0xFFFF0000));
  first = (low & 0xFFFF) | high << 16;
  second = low >> 16 | (high & 0xFFFF0000);
}
// A lane's values of the additional eight rows of the GPU's matrices. They are not used; sums carry them, so that they
// stay in the registers that the instruction expects.
struct msl_surplus {
  float surplus[2] = {0.0f, 0.0f};
  METAL_FUNC void put(float* sum) const {
    sum[0] = surplus[0];
    sum[1] = surplus[1];
  }
  METAL_FUNC void take(const float* sum) {
    surplus[0] = sum[0];
    surplus[1] = sum[1];
  }
};
// `c` += a · b, with the GPU's instructions for matrices of 16 rows.
METAL_FUNC void msl_multiply(half a0, half a1, half b0, half b1, float* c, int) {
  const uint a = msl_pair(a0, a1), b = msl_transposed(msl_pair(b0, b1));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4}, {%5}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a), "r"(b));
}
// The instruction uses only 10 bits of each operand's mantissa: the upper eight rows have those, the lower ones the
// rest. A sum of eight multiplications has fewer bits than a float, so longer sums are accumulated separately.
METAL_FUNC uint msl_rest(float value) {
  return msl_bits(value - __uint_as_float(msl_bits(value) & 0xFFFFE000));
}
METAL_FUNC void msl_multiply_in_parts(float a0, float a1, uint b0, uint b1, float* c) {
  float sums[4];
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(msl_bits(a0)), "r"(msl_rest(a0)), "r"(msl_bits(a1)), "r"(msl_rest(a1)), "r"(b0), "r"(b1), "f"(0.0f));
  c[0] += sums[0] + sums[2];
  c[1] += sums[1] + sums[3];
}
METAL_FUNC void msl_multiply(float a0, float a1, half b0, half b1, float* c, int) {
  const uint b = msl_transposed(msl_pair(b0, b1));
  b0.bits = ushort(b);
  b1.bits = ushort(b >> 16);
  msl_multiply_in_parts(a0, a1, msl_bits(b0), msl_bits(b1), c);
}
METAL_FUNC void msl_multiply(float a0, float a1, float b0, float b1, float* c, int) {
  uint first = msl_bits(b0), second = msl_bits(b1);
  msl_transpose(first, second);
  b0 = __uint_as_float(first);
  b1 = __uint_as_float(second);
  msl_multiply_in_parts(a0, a1, first, second, c);
  msl_multiply_in_parts(a0, a1, msl_rest(b0), msl_rest(b1), c);
}
template <class A, class B>
METAL_FUNC void msl_multiply(A a0, A a1, B b0, B b1, float* c, int line) {
  msl_multiply(float(a0), float(a1), float(b0), float(b1), c, line);
}
}  // namespace metal
