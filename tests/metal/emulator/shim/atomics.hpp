// <metal_atomic>, as far as kernels use it.
#pragma once

namespace metal {
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define MSL_ATOMIC(name, new_value)                                                                        \
  template <class T, class U>                                                                              \
  inline T name(atomic<T>* object, U operand, memory_order) {                                              \
    T b = T(operand), a, next;                                                                             \
    __atomic_load(&object->value, &a, __ATOMIC_RELAXED);                                                   \
    do {                                                                                                   \
      next = T(new_value);                                                                                 \
    } while (                                                                                              \
        !__atomic_compare_exchange(&object->value, &a, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return a;                                                                                              \
  }
MSL_ATOMIC(atomic_fetch_add_explicit, a + b)
MSL_ATOMIC(atomic_fetch_sub_explicit, a - b)
MSL_ATOMIC(atomic_fetch_min_explicit, b < a ? b : a)
MSL_ATOMIC(atomic_fetch_max_explicit, a < b ? b : a)
MSL_ATOMIC(atomic_fetch_or_explicit, a | b)
MSL_ATOMIC(atomic_fetch_and_explicit, a& b)
MSL_ATOMIC(atomic_exchange_explicit, b)
#undef MSL_ATOMIC
// Operations that are one instruction on a GPU do not yield.
inline uint atomic_fetch_add_explicit(atomic<uint>* object, uint operand, memory_order) {
  return __atomic_fetch_add(&object->value, operand, __ATOMIC_RELAXED);
}
template <class T, class U>
inline bool atomic_compare_exchange_weak_explicit(atomic<T>* object, T* expected, U desired, memory_order,
                                                  memory_order) {
  T next = T(desired), found = *expected;
  const bool done =
      __atomic_compare_exchange(&object->value, &found, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  *expected = found;
  return done;
}
template <class T>
inline T atomic_load_explicit(const atomic<T>* object, memory_order) {
  T value;
  __atomic_load(&object->value, &value, __ATOMIC_RELAXED);
  return value;
}
template <class T, class U>
inline void atomic_store_explicit(atomic<T>* object, U operand, memory_order) {
  T value = T(operand);
  __atomic_store(&object->value, &value, __ATOMIC_RELAXED);
}
}  // namespace metal
