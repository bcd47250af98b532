// Barriers and the functions of a simdgroup, through the run time.
//
// Each takes the line of its call, and the run time checks that all lanes wait in the same one. What reads
// the values of other lanes is not instrumented: those are registers on a GPU.
#pragma once
#include "abi.hpp"

#define MSL_HERE int line = __builtin_LINE()
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined"), noinline, convergent))
#define MSL_UNCHECKED_INLINE __attribute__((no_sanitize("thread", "address", "undefined"), always_inline)) inline

namespace metal {
inline void threadgroup_barrier(mem_flags flags, int site, MSL_HERE) {
  msl_threadgroup_barrier(int(flags), site, line);
}
inline void simdgroup_barrier(mem_flags flags, int site, MSL_HERE) {
  msl_simdgroup_barrier(int(flags), site, line);
}

template <class T>
MSL_UNCHECKED MslExchange* msl_give(T value, int operation, int line) {
  static_assert(sizeof(T) <= MSL_SLOT, "a value of a simdgroup function is too large");
  return msl_exchange(&value, sizeof(T), operation, line);
}
template <class T>
MSL_UNCHECKED T msl_slot(MslExchange* exchange, unsigned lane, int line) {
  if (lane >= 32) msl_fail(MSL_NO_SUCH_LANE, line);
  if (!(exchange->active >> lane & 1)) msl_fail(MSL_INACTIVE_LANE, line);
  T value;
  __builtin_memcpy(&value, exchange->slots[lane], sizeof(T));
  return value;
}

template <class T>
inline T simd_shuffle(T value, ushort lane, MSL_HERE) {
  return msl_slot<T>(msl_give(value, MSL_SHUFFLE, line), lane, line);
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, MSL_HERE) {
  return msl_slot<T>(msl_give(value, MSL_SHUFFLE, line), msl_lane() ^ mask, line);
}
template <class T>
inline T simd_shuffle_down(T value, ushort delta, MSL_HERE) {
  MslExchange* exchange = msl_give(value, MSL_SHUFFLE, line);
  const uint lane = msl_lane() + delta;
  return lane < 32 ? msl_slot<T>(exchange, lane, line) : value;
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, MSL_HERE) {
  MslExchange* exchange = msl_give(value, MSL_SHUFFLE, line);
  const int lane = msl_lane() - int(delta);
  return lane >= 0 ? msl_slot<T>(exchange, lane, line) : value;
}
template <class T>
inline T simd_broadcast(T value, ushort lane, MSL_HERE) {
  return msl_slot<T>(msl_give(value, MSL_SHUFFLE, line), lane, line);
}
template <class T>
inline T simd_broadcast_first(T value, MSL_HERE) {
  MslExchange* exchange = msl_give(value, MSL_SHUFFLE, line);
  return msl_slot<T>(exchange, __builtin_ctz(exchange->active), line);
}

// A tree over the lanes, in which lanes that have returned are left out.
template <class F, class T>
MSL_UNCHECKED T msl_reduce(T value, MslExchange* exchange) {
  T values[32];
  if (exchange->has_result) {
    __builtin_memcpy(values, exchange->result, sizeof(T));
    return values[0];
  }
  uint active = exchange->active;
  for (int lane = 0; lane < 32; ++lane)
    if (active >> lane & 1) __builtin_memcpy(&values[lane], exchange->slots[lane], sizeof(T));
  for (int step = 16; step; step >>= 1) {
    for (int lane = 0; lane < step; ++lane) {
      if (!(active >> (lane + step) & 1)) continue;
      values[lane] = active >> lane & 1 ? F::of(values[lane], values[lane + step]) : values[lane + step];
      active |= 1u << lane;
    }
  }
  __builtin_memcpy(exchange->result, values, sizeof(T));
  exchange->has_result = true;
  return values[0];
}
#define MSL_REDUCTION_FUNCTION(name, value_of)                                  \
  struct msl_##name {                                                           \
    template <class T>                                                          \
    MSL_UNCHECKED static T of(T a, T b) {                                       \
      return T(value_of);                                                       \
    }                                                                           \
  };                                                                            \
  template <class T>                                                            \
  inline T name(T value, MSL_HERE) {                                            \
    return msl_reduce<msl_##name>(value, msl_give(value, MSL_REDUCTION, line)); \
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
MSL_UNCHECKED T msl_prefix(MslExchange* exchange, int end) {
  T sum = T(0);
  for (int lane = 0; lane < end; ++lane) {
    T value;
    __builtin_memcpy(&value, exchange->slots[lane], sizeof(T));
    if (exchange->active >> lane & 1) sum = T(sum + value);
  }
  return sum;
}
template <class T>
inline T simd_prefix_inclusive_sum(T value, MSL_HERE) {
  return msl_prefix<T>(msl_give(value, MSL_SCAN, line), msl_lane() + 1);
}
template <class T>
inline T simd_prefix_exclusive_sum(T value, MSL_HERE) {
  return msl_prefix<T>(msl_give(value, MSL_SCAN, line), msl_lane());
}

struct simd_vote {
  typedef ulong vote_t;
  ulong votes;
  explicit operator ulong() const { return votes; }
};
MSL_UNCHECKED inline simd_vote simd_ballot(bool value, MSL_HERE) {
  MslExchange* exchange = msl_give<uint>(value, MSL_VOTE, line);
  ulong votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (exchange->active >> lane & 1) votes |= ulong(exchange->slots[lane][0]) << lane;
  return {votes};
}
inline bool simd_any(bool value, MSL_HERE) { return simd_ballot(value, line).votes != 0; }
inline bool simd_all(bool value, MSL_HERE) { return simd_ballot(!value, line).votes == 0; }

// Matrices have eight rows here.
struct msl_surplus {
  void put(float*) const {}
  void take(const float*) {}
};
// Element (row, k) of `a` and (k, column) of `b`, both in the layout of `simdgroup_matrix.hpp`.
struct msl_fragments {
  float a[2], b[2];
};
MSL_UNCHECKED inline void msl_multiply(float a0, float a1, float b0, float b1, float* c, int line) {
  MslExchange* exchange = msl_give(msl_fragments{{a0, a1}, {b0, b1}}, MSL_MATRIX, line);
  if (exchange->active != ~0u) msl_fail(MSL_PARTIAL_MATRIX, line);
  const int lane = msl_lane();
  const int row = (lane >> 2 & 4) + (lane >> 1 & 3), column = (lane >> 2 & 2) * 2 + (lane & 1) * 2;
  for (int k = 0; k < 8; ++k) {
    const int of_a = (row & 4) << 2 | (row & 3) << 1 | (k & 4) << 1 | (k >> 1 & 1);
    const int of_b = (k & 4) << 2 | (k & 3) << 1 | (column & 4) << 1 | (column >> 1 & 1);
    const float a = ((const msl_fragments*)exchange->slots[of_a])->a[k & 1];
    const msl_fragments* other = (const msl_fragments*)exchange->slots[of_b];
    c[0] += a * other->b[0];
    c[1] += a * other->b[1];
  }
}
}  // namespace metal
