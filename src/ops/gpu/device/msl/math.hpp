// <metal_math>, <metal_integer>, <metal_relational> and <metal_geometric>, as far as kernels use them.
//
// Each type has one overload, so a call with mixed types is ambiguous, as with Apple's compiler. bfloat has none:
// kernels convert to float.
#pragma once

namespace metal {
template <class T, class U>
inline T as_type(U from) {
  static_assert(sizeof(T) == sizeof(U), "as_type keeps the size");
  T to;
  MSL_BUILT_IN(memcpy)((MSL_GENERIC void*)&to, (MSL_GENERIC void*)&from, sizeof(T));
  return to;
}

#if defined(MSL_ADDRESS_SPACES)
// There it is a vector.
#define MSL_OF_SWIZZLE(name)
#else
#define MSL_OF_SWIZZLE(name)                                    \
  template <class T, int N, int... I>                           \
  inline vec<T, sizeof...(I)> name(msl_swizzle<T, N, I...> a) { \
    return name(vec<T, sizeof...(I)>(a));                       \
  }
#endif

// Functions of one argument, rounded from float: `value` is an expression of x.
#define MSL_UNARY(name, value)                              \
  inline float name(float x) { return value; }              \
  inline half name(half number) {                           \
    const float x = number;                                 \
    return half(value);                                     \
  }                                                         \
  template <class T, int N>                                 \
  inline vec<T, N> name(vec<T, N> a) {                      \
    vec<T, N> r;                                            \
    for (int i = 0; i < N; ++i) r[i] = name(a[i]);      \
    return r;                                               \
  }                                                         \
  MSL_OF_SWIZZLE(name)
// clang-format off
MSL_UNARY(exp, MSL_MATH(expf)(x))
MSL_UNARY(exp2, MSL_MATH(exp2f)(x))
MSL_UNARY(log, MSL_MATH(logf)(x))
MSL_UNARY(log2, MSL_MATH(log2f)(x))
MSL_UNARY(sqrt, MSL_MATH(sqrtf)(x))
MSL_UNARY(rsqrt, 1.0f / MSL_MATH(sqrtf)(x))
MSL_UNARY(sin, MSL_MATH(sinf)(x))
MSL_UNARY(cos, MSL_MATH(cosf)(x))
MSL_UNARY(tanh, MSL_MATH(tanhf)(x))
MSL_UNARY(floor, MSL_MATH(floorf)(x))
MSL_UNARY(ceil, MSL_MATH(ceilf)(x))
MSL_UNARY(round, MSL_MATH(roundf)(x))
MSL_UNARY(rint, MSL_MATH(rintf)(x))
MSL_UNARY(trunc, MSL_MATH(truncf)(x))
MSL_UNARY(fabs, MSL_MATH(fabsf)(x))
MSL_UNARY(abs, MSL_MATH(fabsf)(x))
MSL_UNARY(saturate, MSL_MATH(fminf)(MSL_MATH(fmaxf)(x, 0.0f), 1.0f))
// clang-format on
#undef MSL_UNARY
#undef MSL_OF_SWIZZLE

// Functions of two arguments.
#define MSL_BINARY(name, value)                                \
  inline float name(float x, float y) { return value; }        \
  inline half name(half a, half b) {                           \
    const float x = a, y = b;                                  \
    return half(value);                                        \
  }                                                            \
  template <class T, int N>                                    \
  inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {            \
    vec<T, N> r;                                               \
    for (int i = 0; i < N; ++i) r[i] = name(a[i], b[i]); \
    return r;                                                  \
  }
// clang-format off
MSL_BINARY(pow, MSL_MATH(powf)(x, y))
MSL_BINARY(powr, MSL_MATH(powf)(x, y))
MSL_BINARY(fmod, MSL_MATH(fmodf)(x, y))
MSL_BINARY(fmin, MSL_MATH(fminf)(x, y))
MSL_BINARY(fmax, MSL_MATH(fmaxf)(x, y))
MSL_BINARY(copysign, MSL_MATH(copysignf)(x, y))
MSL_BINARY(divide, x / y)
MSL_BINARY(step, y < x ? 0.0f : 1.0f)
MSL_BINARY(min, MSL_MATH(fminf)(x, y))
MSL_BINARY(max, MSL_MATH(fmaxf)(x, y))
// clang-format on
#undef MSL_BINARY

#define MSL_INTEGER(T)                             \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
MSL_INTEGER(char)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
#undef MSL_INTEGER
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }

#define MSL_CLAMP(T) \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
MSL_CLAMP(float)
MSL_CLAMP(half)
MSL_CLAMP(short)
MSL_CLAMP(ushort)
MSL_CLAMP(int)
MSL_CLAMP(uint)
MSL_CLAMP(long)
MSL_CLAMP(ulong)
#undef MSL_CLAMP
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N>
inline vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}

inline float fma(float a, float b, float c) { return MSL_MATH(fmaf)(a, b, c); }
inline half fma(half a, half b, half c) { return half(MSL_MATH(fma)((double)a, (double)b, (double)c)); }
template <class T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = fma(a[i], b[i], c[i]);
  return r;
}

#define MSL_FLOATING(T)                                                      \
  inline bool isnan(T x) { return float(x) != float(x); }                    \
  inline bool isinf(T x) { return MSL_MATH(fabsf)(float(x)) == INFINITY; }   \
  inline bool isfinite(T x) { return MSL_MATH(fabsf)(float(x)) < INFINITY; } \
  inline T mix(T a, T b, T t) { return a + (b - a) * t; }                    \
  inline T ldexp(T x, int exponent) { return T(MSL_MATH(ldexpf)(float(x), exponent)); }
MSL_FLOATING(float)
MSL_FLOATING(half)
#undef MSL_FLOATING

template <class T, enable_if_t<is_arithmetic_v<T>, int> = 0>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
#if !defined(MSL_ADDRESS_SPACES)
// clang has no vectors of bool.
template <class T, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <int N>
inline bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || a[i];
  return r;
}
template <int N>
inline bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && a[i];
  return r;
}
#endif

template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T r = T(0);
  for (int i = 0; i < N; ++i) r = T(r + a[i] * b[i]);
  return r;
}

inline uint popcount(uint x) { return MSL_BUILT_IN(popcount)(x); }
inline uint clz(uint x) { return x == 0 ? 32 : MSL_BUILT_IN(clz)(x); }
inline uint ctz(uint x) { return x == 0 ? 32 : MSL_BUILT_IN(ctz)(x); }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }
inline int mulhi(int a, int b) { return int(long(a) * b >> 32); }

#define MSL_SAME_FUNCTIONS \
  using metal::cos;        \
  using metal::divide;     \
  using metal::exp;        \
  using metal::exp2;       \
  using metal::fmax;       \
  using metal::fmin;       \
  using metal::log;        \
  using metal::log2;       \
  using metal::max;        \
  using metal::min;        \
  using metal::pow;        \
  using metal::rsqrt;      \
  using metal::sin;        \
  using metal::sqrt;       \
  using metal::tanh;
namespace precise {
MSL_SAME_FUNCTIONS
}
namespace fast {
MSL_SAME_FUNCTIONS
}
#undef MSL_SAME_FUNCTIONS
}  // namespace metal
