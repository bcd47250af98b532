// Vectors as clang has them, for the check of address spaces: a component has no address and no reference is bound to
// it, a vector of another type is not converted, and all of that holds in every address space.
//
// Kernels run with those of `vectors.hpp`. What constructs one, `float4(…)`, is `msl_vector<float4>(…)` here.
#pragma once

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N>
struct packed_vec;

template <class X>
struct msl_num_components {
  static constexpr constant int n = 1;
};
template <class T, int N>
struct msl_num_components<vec<T, N>> {
  static constexpr constant int n = N;
};
template <class T, int N>
struct msl_num_components<packed_vec<T, N>> {
  static constexpr constant int n = N;
};
template <class V, class... A>
V msl_vector(A...) {
  constexpr int num_given = (0 + ... + msl_num_components<A>::n);
  static_assert(num_given == msl_num_components<V>::n || (num_given == 1 && sizeof...(A) == 1), "component count");
}

#define MSL_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
// clang-format off
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong)
MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(float)
// clang-format on
#undef MSL_VECTORS
}  // namespace metal

// Two pointers of which a condition chooses one have one address space: there is no other that holds both.
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable
template <int space>
struct msl_in;
template <class T>
msl_in<1>* msl_space(device T*);
template <class T>
msl_in<2>* msl_space(constant T*);
template <class T>
msl_in<3>* msl_space(threadgroup T*);
template <class T>
msl_in<4>* msl_space(thread T*);
void msl_space(...);
template <class A, class B>
constexpr void msl_alike() {
  static_assert(metal::is_same_v<A, B> || metal::is_same_v<A, void> || metal::is_same_v<B, void>,
                "a condition chooses between pointers into one address space");
}
