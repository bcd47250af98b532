// <metal_type_traits> and <metal_limits>, as far as kernels use them.
#pragma once

namespace metal {
template <class T, T V>
struct integral_constant {
  static constexpr constant T value = V;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr constant bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class X, class Y>
struct conditional {
  typedef X type;
};
template <class X, class Y>
struct conditional<false, X, Y> {
  typedef Y type;
};
template <bool B, class X, class Y>
using conditional_t = typename conditional<B, X, Y>::type;
template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
using remove_cv_t = __remove_cv(T);

template <class T>
struct msl_floating : false_type {};
template <>
struct msl_floating<float> : true_type {};
template <>
struct msl_floating<half> : true_type {};
template <>
struct msl_floating<bfloat> : true_type {};
template <class T>
struct msl_integral : false_type {};
#define MSL_INTEGRAL(T) \
  template <>           \
  struct msl_integral<T> : true_type {};
// clang-format off
MSL_INTEGRAL(bool) MSL_INTEGRAL(char) MSL_INTEGRAL(signed char) MSL_INTEGRAL(uchar) MSL_INTEGRAL(short)
MSL_INTEGRAL(ushort) MSL_INTEGRAL(int) MSL_INTEGRAL(uint) MSL_INTEGRAL(long) MSL_INTEGRAL(ulong)
// clang-format on
#undef MSL_INTEGRAL
template <class T>
constexpr constant bool is_floating_point_v = msl_floating<__remove_cv(T)>::value;
template <class T>
constexpr constant bool is_integral_v = msl_integral<__remove_cv(T)>::value;
template <class T>
constexpr constant bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;

template <class T>
struct numeric_limits;
#define MSL_LIMITS(T, LOWEST, MIN, MAX, INF, EPSILON)     \
  template <>                                             \
  struct numeric_limits<T> {                              \
    static constexpr T lowest() { return (T)(LOWEST); }   \
    static constexpr T min() { return (T)(MIN); }         \
    static constexpr T max() { return (T)(MAX); }         \
    static constexpr T infinity() { return (T)(INF); }    \
    static constexpr T epsilon() { return (T)(EPSILON); } \
  };
MSL_LIMITS(float, -3.402823466e+38f, 1.175494351e-38f, 3.402823466e+38f, INFINITY, 1.192092896e-07f)
MSL_LIMITS(half, -65504.0f, 6.103515625e-05f, 65504.0f, INFINITY, 0.0009765625f)
MSL_LIMITS(bfloat, -3.38953139e+38f, 1.175494351e-38f, 3.38953139e+38f, INFINITY, 0.0078125f)
MSL_LIMITS(char, -128, -128, 127, 0, 0)
MSL_LIMITS(uchar, 0, 0, 255, 0, 0)
MSL_LIMITS(short, -32768, -32768, 32767, 0, 0)
MSL_LIMITS(ushort, 0, 0, 65535, 0, 0)
MSL_LIMITS(int, -2147483647 - 1, -2147483647 - 1, 2147483647, 0, 0)
MSL_LIMITS(uint, 0, 0, 4294967295u, 0, 0)
MSL_LIMITS(long, -9223372036854775807l - 1, -9223372036854775807l - 1, 9223372036854775807l, 0, 0)
MSL_LIMITS(ulong, 0, 0, 18446744073709551615ul, 0, 0)
#undef MSL_LIMITS
}  // namespace metal
