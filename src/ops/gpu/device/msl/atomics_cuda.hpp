// <metal_atomic>, as far as kernels use it, with the GPU's own instructions.
#pragma once

namespace metal {
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;

#define MSL_ATOMIC(name, instruction)                             \
  template <class T>                                              \
  METAL_FUNC T name(atomic<T>* object, T operand, memory_order) { \
    return ::instruction(&object->value, operand);                \
  }
MSL_ATOMIC(atomic_fetch_add_explicit, atomicAdd)
MSL_ATOMIC(atomic_fetch_sub_explicit, atomicSub)
MSL_ATOMIC(atomic_fetch_min_explicit, atomicMin)
MSL_ATOMIC(atomic_fetch_max_explicit, atomicMax)
MSL_ATOMIC(atomic_fetch_or_explicit, atomicOr)
MSL_ATOMIC(atomic_fetch_and_explicit, atomicAnd)
MSL_ATOMIC(atomic_exchange_explicit, atomicExch)
#undef MSL_ATOMIC
template <class T>
METAL_FUNC T atomic_load_explicit(const atomic<T>* object, memory_order) {
  return *(const volatile T*)&object->value;
}
template <class T, class U>
METAL_FUNC void atomic_store_explicit(atomic<T>* object, U operand, memory_order) {
  *(volatile T*)&object->value = T(operand);
}
}  // namespace metal
