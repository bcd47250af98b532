// Vectors, their operators and the swizzles that kernels use, where kernels run.
//
// They are not clang's own, as in the emulator's `vectors_declared.hpp`: those have no constructors, a cast between
// them reinterprets bits, and their comparisons return integers.
#pragma once

namespace metal {
// clang converts between half and bfloat only through float.
template <class T, class F>
struct msl_conversion {
  template <class U>
  static constexpr T go(U&& u) {
    return static_cast<T>(u);
  }
};
template <>
struct msl_conversion<half, bfloat> {
  static half go(bfloat u) { return (half)(float)u; }
};
template <>
struct msl_conversion<bfloat, half> {
  static bfloat go(half u) { return (bfloat)(float)u; }
};
template <class T, class U>
constexpr METAL_FUNC T msl_cast(U&& u) {
  return msl_conversion<T, remove_cv_t<remove_reference_t<U>>>::go(u);
}

template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;

// Some components of a vector, in a union with its storage.
template <class T, int N, int... I>
struct msl_swizzle {
  T all[N == 3 ? 4 : N];
  typedef vec<T, (int)sizeof...(I)> V;
  operator V() const {
    V r;
    const int index[] = {I...};
    for (int k = 0; k < (int)sizeof...(I); ++k) r.v[k] = all[index[k]];
    return r;
  }
  void set(const V& a) {
    const int index[] = {I...};
    for (int k = 0; k < (int)sizeof...(I); ++k) all[index[k]] = a.v[k];
  }
  void operator=(const V& a) { set(a); }
  void operator=(const msl_swizzle& a) {
    V t = a;
    set(t);
  }
  void operator=(T a) { set(V(a)); }
  void operator+=(V a) { set(V(*this) + a); }
  void operator-=(V a) { set(V(*this) - a); }
  void operator*=(V a) { set(V(*this) * a); }
  void operator/=(V a) { set(V(*this) / a); }
  T operator[](int k) const {
    V t = *this;
    return t.v[k];
  }
};

template <class X>
struct msl_num_components {
  static constexpr constant int n = 1;
};
template <class T, int N>
struct msl_num_components<vec<T, N>> {
  static constexpr constant int n = N;
};
template <class T, int N, int... I>
struct msl_num_components<msl_swizzle<T, N, I...>> {
  static constexpr constant int n = sizeof...(I);
};

// The components by index, by name and as swizzles. Vectors of three have the size of four.
template <class T, int N>
struct msl_storage;
template <class T>
struct alignas(2 * sizeof(T)) msl_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    msl_swizzle<T, 2, 0, 1> xy;
    msl_swizzle<T, 2, 1, 0> yx;
    msl_swizzle<T, 2, 0, 0> xx;
    msl_swizzle<T, 2, 1, 1> yy;
    msl_swizzle<T, 2, 0, 0, 0, 0> xxxx;
    msl_swizzle<T, 2, 0, 1, 0, 1> xyxy;
  };
  msl_storage() = default;
  constexpr msl_storage(T a, T b) : v{a, b} {}
  msl_storage(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
  }
  msl_storage& operator=(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    return *this;
  }
};
template <class T>
struct alignas(4 * sizeof(T)) msl_storage<T, 3> {
  union {
    T v[4];
    struct {
      T x, y, z;
    };
    msl_swizzle<T, 3, 0, 1> xy;
    msl_swizzle<T, 3, 1, 2> yz;
    msl_swizzle<T, 3, 0, 2> xz;
    msl_swizzle<T, 3, 1, 0> yx;
    msl_swizzle<T, 3, 2, 0> zx;
    msl_swizzle<T, 3, 2, 1> zy;
    msl_swizzle<T, 3, 0, 1, 2> xyz;
    msl_swizzle<T, 3, 2, 1, 0> zyx;
    msl_swizzle<T, 3, 0, 0, 0> xxx;
  };
  msl_storage() = default;
  constexpr msl_storage(T a, T b, T c) : v{a, b, c, T(0)} {}
  msl_storage(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
  }
  msl_storage& operator=(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
    return *this;
  }
};
template <class T>
struct alignas(4 * sizeof(T)) msl_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    msl_swizzle<T, 4, 0, 1> xy;
    msl_swizzle<T, 4, 1, 2> yz;
    msl_swizzle<T, 4, 2, 3> zw;
    msl_swizzle<T, 4, 0, 2> xz;
    msl_swizzle<T, 4, 1, 3> yw;
    msl_swizzle<T, 4, 0, 3> xw;
    msl_swizzle<T, 4, 1, 0> yx;
    msl_swizzle<T, 4, 3, 2> wz;
    msl_swizzle<T, 4, 2, 0> zx;
    msl_swizzle<T, 4, 3, 1> wy;
    msl_swizzle<T, 4, 0, 1, 2> xyz;
    msl_swizzle<T, 4, 1, 2, 3> yzw;
    msl_swizzle<T, 4, 2, 1, 0> zyx;
    msl_swizzle<T, 4, 3, 2, 1, 0> wzyx;
    msl_swizzle<T, 4, 0, 0, 0, 0> xxxx;
    msl_swizzle<T, 4, 0, 1, 2, 3> xyzw;
    msl_swizzle<T, 4, 1, 0, 3, 2> yxwz;
    msl_swizzle<T, 4, 2, 3, 0, 1> zwxy;
  };
  msl_storage() = default;
  constexpr msl_storage(T a, T b, T c, T d) : v{a, b, c, d} {}
  msl_storage(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
    v[3] = o.v[3];
  }
  msl_storage& operator=(const msl_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
    v[3] = o.v[3];
    return *this;
  }
};

#ifdef MSL_CUDA
// A reference to memory would be read component by component.
#define MSL_OPERAND vec
#else
#define MSL_OPERAND const vec&
#endif

template <class T, int N>
struct vec : msl_storage<T, N> {
  using msl_storage<T, N>::v;
  vec() = default;
#ifdef MSL_CUDA
  // As a whole, because compilers forget the alignment of a vector that is copied by components.
  vec(const vec& o) { msl_copy(o); }
  vec& operator=(const vec& o) {
    msl_copy(o);
    return *this;
  }
  // By words, so that halves stay together in a register.
  METAL_FUNC void msl_copy(const vec& o) {
    if constexpr (sizeof(vec) % 16 == 0) {
      MSL_UNROLL
      for (int i = 0; i < int(sizeof(vec) / 16); ++i) ((::uint4*)this)[i] = ((const ::uint4*)&o)[i];
    } else if constexpr (sizeof(vec) == 8) {
      *(::uint2*)this = *(const ::uint2*)&o;
    } else if constexpr (sizeof(vec) == 4) {
      *(unsigned*)this = *(const unsigned*)&o;
    } else {
      MSL_UNROLL
      for (int i = 0; i < N; ++i) v[i] = o.v[i];
    }
  }
#else
  vec(const vec& o) : msl_storage<T, N>() {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
  }
  vec& operator=(const vec& o) {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
    return *this;
  }
#endif
  vec(T s) {
    for (int i = 0; i < N; ++i) v[i] = s;
  }
  template <class U>
  explicit vec(vec<U, N> o) {
    for (int i = 0; i < N; ++i) v[i] = msl_cast<T>(o.v[i]);
  }
  template <class U>
  explicit vec(packed_vec<U, N> o) {
    for (int i = 0; i < N; ++i) v[i] = T(o.v[i]);
  }
  template <class A, class B, class... R, enable_if_t<sizeof...(R) + 2 == N, int> = 0>
  constexpr vec(A a, B b, R... r) : msl_storage<T, N>(msl_cast<T>(a), msl_cast<T>(b), msl_cast<T>(r)...) {}
  template <class A, class B, class... R, enable_if_t<(sizeof...(R) + 2 < N), int> = 0>
  vec(A a, B b, R... r) {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, r), ...);
    static_assert(msl_num_components<A>::n + msl_num_components<B>::n + (0 + ... + msl_num_components<R>::n) == N,
                  "component count");
  }
  T& operator[](int i) { return v[i]; }
  constexpr const T& operator[](int i) const { return v[i]; }
  template <class U, enable_if_t<is_arithmetic_v<U>, int> = 0>
  void put(int& k, U a) {
    v[k++] = msl_cast<T>(a);
  }
  template <class U, int M>
  void put(int& k, vec<U, M> a) {
    for (int i = 0; i < M; ++i) v[k++] = T(a.v[i]);
  }
  template <class U, int M, int... I>
  void put(int& k, msl_swizzle<U, M, I...> a) {
    vec<U, (int)sizeof...(I)> t = a;
    put(k, t);
  }
#define MSL_OPERATORS(op)                                     \
  friend vec operator op(MSL_OPERAND a, MSL_OPERAND b) {      \
    vec r;                                                    \
    for (int i = 0; i < N; ++i) r.v[i] = T(a.v[i] op b.v[i]); \
    return r;                                                 \
  }                                                           \
  friend vec operator op(MSL_OPERAND a, T b) {                \
    vec r;                                                    \
    for (int i = 0; i < N; ++i) r.v[i] = T(a.v[i] op b);      \
    return r;                                                 \
  }                                                           \
  friend vec operator op(T a, MSL_OPERAND b) {                \
    vec r;                                                    \
    for (int i = 0; i < N; ++i) r.v[i] = T(a op b.v[i]);      \
    return r;                                                 \
  }                                                           \
  vec& operator op##=(MSL_OPERAND b) {            \
    for (int i = 0; i < N; ++i) v[i] = T(v[i] op b.v[i]);     \
    return *this;                                             \
  }                                                           \
  vec& operator op##=(T b) {                      \
    for (int i = 0; i < N; ++i) v[i] = T(v[i] op b);          \
    return *this;                                             \
  }
  // clang-format off
  MSL_OPERATORS(+) MSL_OPERATORS(-) MSL_OPERATORS(*) MSL_OPERATORS(/) MSL_OPERATORS(%)
  MSL_OPERATORS(&) MSL_OPERATORS(|) MSL_OPERATORS(^) MSL_OPERATORS(<<) MSL_OPERATORS(>>)
  // clang-format on
#undef MSL_OPERATORS
#define MSL_COMPARISONS(op)                                                               \
  friend vec<bool, N> operator op(const vec & a, const vec & b) { \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a.v[i] op b.v[i];                                \
    return r;                                                                             \
  }                                                                                       \
  friend vec<bool, N> operator op(const vec & a, T b) {                       \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a.v[i] op b;                                     \
    return r;                                                                             \
  }                                                                                       \
  friend vec<bool, N> operator op(T a, const vec & b) {                       \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a op b.v[i];                                     \
    return r;                                                                             \
  }
      // clang-format off
  MSL_COMPARISONS(<) MSL_COMPARISONS(>) MSL_COMPARISONS(<=) MSL_COMPARISONS(>=) MSL_COMPARISONS(==) MSL_COMPARISONS(!=)
  // clang-format on
#undef MSL_COMPARISONS
              friend vec
              operator-(const vec& a) {
    vec r;
    for (int i = 0; i < N; ++i) r.v[i] = -a.v[i];
    return r;
  }
  friend vec operator~(const vec& a) {
    vec r;
    for (int i = 0; i < N; ++i) r.v[i] = ~a.v[i];
    return r;
  }
  friend vec<bool, N> operator!(const vec& a) {
    vec<bool, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = !a.v[i];
    return r;
  }
};

#define MSL_VECTORS(T)    \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
// clang-format off
MSL_VECTORS(bool) MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong)
MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(float)
// clang-format on
#undef MSL_VECTORS
}  // namespace metal
