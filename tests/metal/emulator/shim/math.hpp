// <metal_math>, <metal_integer>, <metal_relational> and <metal_geometric>, as far as kernels use them.
#pragma once

namespace metal {
template <class T, class U>
inline T as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type size");
  T r;
  __builtin_memcpy((MSL_GENERIC void*)&r, (MSL_GENERIC void*)&u, sizeof(T));
  return r;
}
// One overload for each type, so that a call with mixed types is ambiguous, as it is for Apple's compiler.
// There is none for bfloat: kernels convert to float.
#define MSL_ALL_FP(X) X(float) X(half)
#define MSL_ALL_INT(X) X(char) X(signed char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define MSL_F1(name, expr)                                  \
  inline float name(float x) { return expr; }               \
  inline half name(half h) {                                \
    float x = h;                                            \
    return half(expr);                                      \
  }                                                         \
  template <class T, int N>                                 \
  inline vec<T, N> name(vec<T, N> a) {                      \
    vec<T, N> r;                                            \
    for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i]);      \
    return r;                                               \
  }                                                         \
  template <class T, int N, int... I>                       \
  inline vec<T, sizeof...(I)> name(swizzle<T, N, I...> a) { \
    vec<T, sizeof...(I)> t = a;                             \
    return name(t);                                         \
  }
#define MSL_F1_ALL                                                                                           \
  MSL_F1(exp, MSL_MATH(expf)(x))                                                                             \
  MSL_F1(exp2, MSL_MATH(exp2f)(x))                                                                           \
  MSL_F1(exp10, MSL_MATH(powf)(10.0f, x))                                                                    \
  MSL_F1(log, MSL_MATH(logf)(x))                                                                             \
  MSL_F1(log2, MSL_MATH(log2f)(x)) MSL_F1(log10, MSL_MATH(log10f)(x)) MSL_F1(sqrt, MSL_MATH(sqrtf)(x))       \
      MSL_F1(rsqrt, 1.0f / MSL_MATH(sqrtf)(x)) MSL_F1(sin, MSL_MATH(sinf)(x)) MSL_F1(cos, MSL_MATH(cosf)(x)) \
          MSL_F1(tan, MSL_MATH(tanf)(x)) MSL_F1(tanh, MSL_MATH(tanhf)(x)) MSL_F1(sinh, MSL_MATH(sinhf)(x))   \
              MSL_F1(cosh, MSL_MATH(coshf)(x)) MSL_F1(asin, MSL_MATH(asinf)(x))                              \
                  MSL_F1(acos, MSL_MATH(acosf)(x)) MSL_F1(atan, MSL_MATH(atanf)(x))                          \
                      MSL_F1(floor, MSL_MATH(floorf)(x)) MSL_F1(ceil, MSL_MATH(ceilf)(x))                    \
                          MSL_F1(round, MSL_MATH(roundf)(x)) MSL_F1(rint, MSL_MATH(rintf)(x))                \
                              MSL_F1(trunc, MSL_MATH(truncf)(x)) MSL_F1(fabs, MSL_MATH(fabsf)(x))            \
                                  MSL_F1(fract, x - MSL_MATH(floorf)(x))                                     \
                                      MSL_F1(saturate, MSL_MATH(fminf)(MSL_MATH(fmaxf)(x, 0.0f), 1.0f))      \
                                          MSL_F1(sign, x > 0   ? 1.0f                                        \
                                                       : x < 0 ? -1.0f                                       \
                                                               : x)
#define MSL_F2(name, expr)                                                     \
  inline float name(float x, float y) { return expr; }                         \
  inline half name(half a, half b) {                                           \
    float x = a, y = b;                                                        \
    return half(expr);                                                         \
  }                                                                            \
  template <class T, int N>                                                    \
  inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {                            \
    vec<T, N> r;                                                               \
    for (int i = 0; i < N; ++i) r.v[i] = name(a.v[i], b.v[i]);                 \
    return r;                                                                  \
  }                                                                            \
  template <class T, int N, class S, enable_if_t<is_arithmetic_v<S>, int> = 0> \
  inline vec<T, N> name(vec<T, N> a, S b) {                                    \
    return name(a, vec<T, N>(T(b)));                                           \
  }                                                                            \
  template <class T, int N, class S, enable_if_t<is_arithmetic_v<S>, int> = 0> \
  inline vec<T, N> name(S a, vec<T, N> b) {                                    \
    return name(vec<T, N>(T(a)), b);                                           \
  }
#define MSL_F2_ALL                                                        \
  MSL_F2(pow, MSL_MATH(powf)(x, y))                                       \
  MSL_F2(powr, MSL_MATH(powf)(x, y))                                      \
  MSL_F2(fmod, MSL_MATH(fmodf)(x, y))                                     \
  MSL_F2(atan2, MSL_MATH(atan2f)(x, y))                                   \
  MSL_F2(fmin, MSL_MATH(fminf)(x, y)) MSL_F2(fmax, MSL_MATH(fmaxf)(x, y)) \
      MSL_F2(copysign, MSL_MATH(copysignf)(x, y)) MSL_F2(step, y < x ? 0.0f : 1.0f) MSL_F2(divide, x / y)
#define MSL_MINMAX_INT(T)                          \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
#define MSL_MINMAX_FP(T)                                                    \
  inline T min(T a, T b) { return T(MSL_MATH(fminf)(float(a), float(b))); } \
  inline T max(T a, T b) { return T(MSL_MATH(fmaxf)(float(a), float(b))); } \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
#define MSL_MINMAX                                                \
  MSL_ALL_INT(MSL_MINMAX_INT)                                     \
  MSL_ALL_FP(MSL_MINMAX_FP)                                       \
  template <class T, int N>                                       \
  inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {                \
    vec<T, N> r;                                                  \
    for (int i = 0; i < N; ++i) r.v[i] = min(a.v[i], b.v[i]);     \
    return r;                                                     \
  }                                                               \
  template <class T, int N>                                       \
  inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {                \
    vec<T, N> r;                                                  \
    for (int i = 0; i < N; ++i) r.v[i] = max(a.v[i], b.v[i]);     \
    return r;                                                     \
  }                                                               \
  template <class T, int N>                                       \
  inline vec<T, N> clamp(vec<T, N> x, vec<T, N> a, vec<T, N> b) { \
    return min(max(x, a), b);                                     \
  }                                                               \
  template <class T, int N>                                       \
  inline vec<T, N> clamp(vec<T, N> x, T a, T b) {                 \
    return min(max(x, vec<T, N>(a)), vec<T, N>(b));               \
  }
MSL_F1_ALL MSL_F2_ALL MSL_MINMAX inline float sincos(float x, thread float& c) {
  c = MSL_MATH(cosf)(x);
  return MSL_MATH(sinf)(x);
}
inline float fma(float a, float b, float c) { return MSL_MATH(fmaf)(a, b, c); }
inline half fma(half a, half b, half c) { return half(MSL_MATH(fma)((double)a, (double)b, (double)c)); }
template <class T, int N>
inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
#define MSL_AB(T) \
  inline T abs(T x) { return x < T(0) ? T(-x) : x; }
MSL_AB(char) MSL_AB(short) MSL_AB(int) MSL_AB(long) inline float abs(float x) { return MSL_MATH(fabsf)(x); }
inline half abs(half x) { return half(MSL_MATH(fabsf)(float(x))); }
inline uint abs(uint x) { return x; }
inline uchar abs(uchar x) { return x; }
inline ushort abs(ushort x) { return x; }
inline ulong abs(ulong x) { return x; }
template <class T, int N>
inline vec<T, N> abs(vec<T, N> a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = abs(a.v[i]);
  return r;
}
#define MSL_ISN(T)                                                                        \
  inline bool isnan(T x) { return float(x) != float(x); }                                 \
  inline bool isinf(T x) { return MSL_MATH(fabsf)(float(x)) == __builtin_huge_valf(); }   \
  inline bool isfinite(T x) { return MSL_MATH(fabsf)(float(x)) < __builtin_huge_valf(); } \
  inline bool signbit(T x) { return as_type<uint>(float(x)) >> 31; }                      \
  inline T mix(T a, T b, T t) { return a + (b - a) * t; }                                 \
  inline T smoothstep(T a, T b, T x) {                                                    \
    T t = clamp((x - a) / (b - a), T(0), T(1));                                           \
    return t * t * (T(3) - T(2) * t);                                                     \
  }                                                                                       \
  inline T ldexp(T x, int e) { return T(MSL_MATH(ldexpf)(float(x), e)); }
MSL_ALL_FP(MSL_ISN)
template <class T, int N>
inline vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) {
  return a + (b - a) * t;
}
template <class T, enable_if_t<is_arithmetic_v<T>, int> = 0>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r.v[i] = c.v[i] ? b.v[i] : a.v[i];
  return r;
}
template <class T, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) {
  return c ? b : a;
}
template <int N>
inline bool any(vec<bool, N> a) {
  bool r = false;
  for (int i = 0; i < N; ++i) r = r || a.v[i];
  return r;
}
template <int N>
inline bool all(vec<bool, N> a) {
  bool r = true;
  for (int i = 0; i < N; ++i) r = r && a.v[i];
  return r;
}
inline bool any(bool a) { return a; }
inline bool all(bool a) { return a; }
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T r = T(0);
  for (int i = 0; i < N; ++i) r = T(r + a.v[i] * b.v[i]);
  return r;
}
template <class T, int N>
inline T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}
template <class T>
inline T popcount(T x) {
  return T(__builtin_popcountll((ulong)x & (~0ull >> (64 - 8 * sizeof(T)))));
}
template <class T>
inline T clz(T x) {
  return x == 0 ? T(8 * sizeof(T))
                : T(__builtin_clzll((ulong)x & (~0ull >> (64 - 8 * sizeof(T)))) - (64 - 8 * sizeof(T)));
}
template <class T>
inline T ctz(T x) {
  return x == 0 ? T(8 * sizeof(T)) : T(__builtin_ctzll((ulong)x));
}
inline uint reverse_bits(uint x) {
  uint r = 0;
  for (int i = 0; i < 32; ++i)
    if (x >> i & 1) r |= 1u << (31 - i);
  return r;
}
template <class T>
inline T rotate(T x, T n) {
  const T m = 8 * sizeof(T) - 1;
  return T((x << (n & m)) | (x >> ((-n) & m)));
}
inline uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
inline int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
inline ulong mulhi(ulong a, ulong b) { return (ulong)(((unsigned __int128)a * b) >> 64); }
inline float4 unpack_unorm4x8_to_float(uint x) {
  return float4((x & 255) / 255.0f, (x >> 8 & 255) / 255.0f, (x >> 16 & 255) / 255.0f, (x >> 24) / 255.0f);
}
namespace precise {
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace precise
namespace fast {
using metal::clamp;
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::fmax;
using metal::fmin;
using metal::log;
using metal::log2;
using metal::max;
using metal::min;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace fast
}  // namespace metal
