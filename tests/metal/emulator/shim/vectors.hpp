// Vectors: aligned and packed, their operators and the swizzles that kernels use.
//
// MSL_GENERIC stands for any address space but `constant`. Copies are written out because the copy of a union
// would not have it.
#pragma once

namespace metal {
// clang converts between half and bfloat only by way of float.
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
struct swizzle {
  T all[N == 3 ? 4 : N];
  typedef vec<T, (int)sizeof...(I)> V;
  operator V() const {
    V r;
    const int index[] = {I...};
    for (int k = 0; k < (int)sizeof...(I); ++k) r.v[k] = all[index[k]];
    return r;
  }
  void set(const MSL_GENERIC V& a) {
    const int index[] = {I...};
    for (int k = 0; k < (int)sizeof...(I); ++k) all[index[k]] = a.v[k];
  }
  void operator=(const MSL_GENERIC V& a) { set(a); }
  void operator=(const MSL_GENERIC swizzle& a) {
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
struct num_components {
  static constexpr constant int n = 1;
};
template <class T, int N>
struct num_components<vec<T, N>> {
  static constexpr constant int n = N;
};
template <class T, int N, int... I>
struct num_components<swizzle<T, N, I...>> {
  static constexpr constant int n = sizeof...(I);
};

// The components by index, by name and as swizzles. Three have the size of four.
template <class T, int N>
struct vector_storage;
template <class T>
struct alignas(2 * sizeof(T)) vector_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    swizzle<T, 2, 0, 1> xy;
    swizzle<T, 2, 1, 0> yx;
    swizzle<T, 2, 0, 0> xx;
    swizzle<T, 2, 1, 1> yy;
    swizzle<T, 2, 0, 0, 0, 0> xxxx;
    swizzle<T, 2, 0, 1, 0, 1> xyxy;
  };
  vector_storage() = default;
  constexpr vector_storage(T a, T b) : v{a, b} {}
  vector_storage(const MSL_GENERIC vector_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
  }
  MSL_GENERIC vector_storage& operator=(const MSL_GENERIC vector_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    return *this;
  }
};
template <class T>
struct alignas(4 * sizeof(T)) vector_storage<T, 3> {
  union {
    T v[4];
    struct {
      T x, y, z;
    };
    swizzle<T, 3, 0, 1> xy;
    swizzle<T, 3, 1, 2> yz;
    swizzle<T, 3, 0, 2> xz;
    swizzle<T, 3, 1, 0> yx;
    swizzle<T, 3, 2, 0> zx;
    swizzle<T, 3, 2, 1> zy;
    swizzle<T, 3, 0, 1, 2> xyz;
    swizzle<T, 3, 2, 1, 0> zyx;
    swizzle<T, 3, 0, 0, 0> xxx;
  };
  vector_storage() = default;
  constexpr vector_storage(T a, T b, T c) : v{a, b, c, T(0)} {}
  vector_storage(const MSL_GENERIC vector_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
  }
  MSL_GENERIC vector_storage& operator=(const MSL_GENERIC vector_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
    return *this;
  }
};
template <class T>
struct alignas(4 * sizeof(T)) vector_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    swizzle<T, 4, 0, 1> xy;
    swizzle<T, 4, 1, 2> yz;
    swizzle<T, 4, 2, 3> zw;
    swizzle<T, 4, 0, 2> xz;
    swizzle<T, 4, 1, 3> yw;
    swizzle<T, 4, 0, 3> xw;
    swizzle<T, 4, 1, 0> yx;
    swizzle<T, 4, 3, 2> wz;
    swizzle<T, 4, 2, 0> zx;
    swizzle<T, 4, 3, 1> wy;
    swizzle<T, 4, 0, 1, 2> xyz;
    swizzle<T, 4, 1, 2, 3> yzw;
    swizzle<T, 4, 2, 1, 0> zyx;
    swizzle<T, 4, 3, 2, 1, 0> wzyx;
    swizzle<T, 4, 0, 0, 0, 0> xxxx;
    swizzle<T, 4, 0, 1, 2, 3> xyzw;
    swizzle<T, 4, 1, 0, 3, 2> yxwz;
    swizzle<T, 4, 2, 3, 0, 1> zwxy;
  };
  vector_storage() = default;
  constexpr vector_storage(T a, T b, T c, T d) : v{a, b, c, d} {}
  vector_storage(const MSL_GENERIC vector_storage& o) {
    v[0] = o.v[0];
    v[1] = o.v[1];
    v[2] = o.v[2];
    v[3] = o.v[3];
  }
  MSL_GENERIC vector_storage& operator=(const MSL_GENERIC vector_storage& o) {
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
#define MSL_OPERAND const MSL_GENERIC vec&
#endif

template <class T, int N>
struct vec : vector_storage<T, N> {
  using vector_storage<T, N>::v;
  vec() = default;
#ifdef MSL_CUDA
  // As a whole, because clang forgets the alignment of a vector when it goes through its components.
  vec(const vec& o) { __builtin_memcpy(this, &o, sizeof(vec)); }
  vec& operator=(const vec& o) {
    __builtin_memcpy(this, &o, sizeof(vec));
    return *this;
  }
#else
  vec(const MSL_GENERIC vec& o) : vector_storage<T, N>() {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
  }
  MSL_GENERIC vec& operator=(const MSL_GENERIC vec& o) {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
    return *this;
  }
#endif
#ifdef MSL_ADDRESS_SPACES
  vec(const __constant vec& o) : vector_storage<T, N>() {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
  }
  T operator[](int i) const __constant { return v[i]; }
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
  constexpr vec(A a, B b, R... r) : vector_storage<T, N>(msl_cast<T>(a), msl_cast<T>(b), msl_cast<T>(r)...) {}
  template <class A, class B, class... R, enable_if_t<(sizeof...(R) + 2 < N), int> = 0>
  vec(A a, B b, R... r) {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, r), ...);
    static_assert(num_components<A>::n + num_components<B>::n + (0 + ... + num_components<R>::n) == N,
                  "component count");
  }
#ifdef MSL_ADDRESS_SPACES
  __private T& operator[](int i) __private { return v[i]; }
  __local T& operator[](int i) __local { return v[i]; }
  __global T& operator[](int i) __global { return v[i]; }
  const __private T& operator[](int i) const __private { return v[i]; }
  const __local T& operator[](int i) const __local { return v[i]; }
  const __global T& operator[](int i) const __global { return v[i]; }
#endif
  MSL_GENERIC T& operator[](int i) { return v[i]; }
  constexpr const MSL_GENERIC T& operator[](int i) const { return v[i]; }
  template <class U, enable_if_t<is_arithmetic_v<U>, int> = 0>
  void put(MSL_GENERIC int& k, U a) {
    v[k++] = msl_cast<T>(a);
  }
  template <class U, int M>
  void put(MSL_GENERIC int& k, vec<U, M> a) {
    for (int i = 0; i < M; ++i) v[k++] = T(a.v[i]);
  }
  template <class U, int M, int... I>
  void put(MSL_GENERIC int& k, swizzle<U, M, I...> a) {
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
  MSL_GENERIC vec& operator op##=(MSL_OPERAND b) {            \
    for (int i = 0; i < N; ++i) v[i] = T(v[i] op b.v[i]);     \
    return *this;                                             \
  }                                                           \
  MSL_GENERIC vec& operator op##=(T b) {                      \
    for (int i = 0; i < N; ++i) v[i] = T(v[i] op b);          \
    return *this;                                             \
  }
  // clang-format off
  MSL_OPERATORS(+) MSL_OPERATORS(-) MSL_OPERATORS(*) MSL_OPERATORS(/) MSL_OPERATORS(%)
  MSL_OPERATORS(&) MSL_OPERATORS(|) MSL_OPERATORS(^) MSL_OPERATORS(<<) MSL_OPERATORS(>>)
  // clang-format on
#undef MSL_OPERATORS
#define MSL_COMPARISONS(op)                                                               \
  friend vec<bool, N> operator op(const MSL_GENERIC vec & a, const MSL_GENERIC vec & b) { \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a.v[i] op b.v[i];                                \
    return r;                                                                             \
  }                                                                                       \
  friend vec<bool, N> operator op(const MSL_GENERIC vec & a, T b) {                       \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a.v[i] op b;                                     \
    return r;                                                                             \
  }                                                                                       \
  friend vec<bool, N> operator op(T a, const MSL_GENERIC vec & b) {                       \
    vec<bool, N> r;                                                                       \
    for (int i = 0; i < N; ++i) r.v[i] = a op b.v[i];                                     \
    return r;                                                                             \
  }
      // clang-format off
  MSL_COMPARISONS(<) MSL_COMPARISONS(>) MSL_COMPARISONS(<=) MSL_COMPARISONS(>=) MSL_COMPARISONS(==) MSL_COMPARISONS(!=)
  // clang-format on
#undef MSL_COMPARISONS
              friend vec
              operator-(const MSL_GENERIC vec& a) {
    vec r;
    for (int i = 0; i < N; ++i) r.v[i] = -a.v[i];
    return r;
  }
  friend vec operator~(const MSL_GENERIC vec& a) {
    vec r;
    for (int i = 0; i < N; ++i) r.v[i] = ~a.v[i];
    return r;
  }
  friend vec<bool, N> operator!(const MSL_GENERIC vec& a) {
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

    // Packed vectors have the alignment of their components.
    template <class T, int N>
    struct packed_storage;
template <class T>
struct packed_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
};
template <class T>
struct packed_storage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
  };
};
template <class T>
struct packed_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
  };
};

template <class T, int N>
struct packed_vec : packed_storage<T, N> {
  using packed_storage<T, N>::v;
  packed_vec() = default;
  template <class... A, enable_if_t<sizeof...(A) == N, int> = 0>
  packed_vec(A... a) {
    int k = 0;
    ((v[k++] = T(a)), ...);
  }
  packed_vec(vec<T, N> o) {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
  }
  operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r.v[i] = v[i];
    return r;
  }
  void operator=(vec<T, N> o) {
    for (int i = 0; i < N; ++i) v[i] = o.v[i];
  }
  MSL_GENERIC T& operator[](int i) { return v[i]; }
  const MSL_GENERIC T& operator[](int i) const { return v[i]; }
};

#define MSL_PACKED(T)                     \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4;
// clang-format off
MSL_PACKED(char) MSL_PACKED(uchar) MSL_PACKED(short) MSL_PACKED(ushort) MSL_PACKED(int) MSL_PACKED(uint)
MSL_PACKED(half) MSL_PACKED(bfloat) MSL_PACKED(float)
// clang-format on
#undef MSL_PACKED
}  // namespace metal
