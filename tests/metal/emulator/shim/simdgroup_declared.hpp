// Declarations of simdgroup.hpp, simdgroup_matrix.hpp and atomics.hpp, with address spaces.
#pragma once

namespace metal {
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T>
T simd_shuffle(T, ushort);
template <class T>
T simd_shuffle_xor(T, ushort);
template <class T>
T simd_shuffle_down(T, ushort);
template <class T>
T simd_shuffle_up(T, ushort);
template <class T>
T simd_broadcast(T, ushort);
template <class T>
T simd_broadcast_first(T);
template <class T>
T simd_sum(T);
template <class T>
T simd_product(T);
template <class T>
T simd_min(T);
template <class T>
T simd_max(T);
template <class T>
T simd_and(T);
template <class T>
T simd_or(T);
template <class T>
T simd_xor(T);
template <class T>
T simd_prefix_inclusive_sum(T);
template <class T>
T simd_prefix_exclusive_sum(T);
struct simd_vote {
  typedef ulong vote_t;
  ulong votes;
  explicit operator ulong() const { return votes; }
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);

template <class T, int C, int R>
struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "simdgroup matrices are 8 by 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread vec<T, 2>& thread_elements() thread { return elements; }
  const thread vec<T, 2>& thread_elements() const thread { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value);
#define MSL_MATRIX_MEMORY(space)                                                                       \
  template <class T>                                                                                   \
  void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix, space const T* from, ulong stride = 8, \
                      ulong2 origin = ulong2(0ul), bool transpose = false);                            \
  template <class T>                                                                                   \
  void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, space T* to, ulong stride = 8,                \
                       ulong2 origin = ulong2(0ul), bool transpose = false);
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c);
template <class D, class A, class B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                        simdgroup_matrix<B, 8, 8> b);

template <class T>
struct atomic {
  T value;
};
// OpenCL has types with these names.
typedef atomic<int> msl_atomic_int;
typedef atomic<uint> msl_atomic_uint;
typedef atomic<float> msl_atomic_float;
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#define MSL_ATOMIC(space, name) \
  template <class T, class U>   \
  T name(space atomic<T>*, U, memory_order);
#define MSL_ATOMICS(space)                                                                                \
  MSL_ATOMIC(space, atomic_fetch_add_explicit)                                                            \
  MSL_ATOMIC(space, atomic_fetch_sub_explicit)                                                            \
  MSL_ATOMIC(space, atomic_fetch_min_explicit)                                                            \
  MSL_ATOMIC(space, atomic_fetch_max_explicit)                                                            \
  MSL_ATOMIC(space, atomic_fetch_or_explicit)                                                             \
  MSL_ATOMIC(space, atomic_fetch_and_explicit)                                                            \
  MSL_ATOMIC(space, atomic_exchange_explicit)                                                             \
  template <class T, class U>                                                                             \
  bool atomic_compare_exchange_weak_explicit(space atomic<T>*, thread T*, U, memory_order, memory_order); \
  template <class T>                                                                                      \
  T atomic_load_explicit(const space atomic<T>*, memory_order);                                           \
  template <class T, class U>                                                                             \
  void atomic_store_explicit(space atomic<T>*, U, memory_order);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_ATOMIC
}  // namespace metal
threadgroup void* msl_threadgroup_variable(int site, unsigned long size, int alignment);
