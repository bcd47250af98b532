// Vectors with the alignment of their components.
#pragma once

namespace metal {
template <class T, int N>
struct msl_packed_storage;
template <class T>
struct msl_packed_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
};
template <class T>
struct msl_packed_storage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
  };
};
template <class T>
struct msl_packed_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
  };
};

template <class T, int N>
struct packed_vec : msl_packed_storage<T, N> {
  using msl_packed_storage<T, N>::v;
  packed_vec() = default;
  template <class... A, enable_if_t<sizeof...(A) == N, int> = 0>
  packed_vec(A... a) {
    int k = 0;
    ((v[k++] = T(a)), ...);
  }
  packed_vec(vec<T, N> o) {
    for (int i = 0; i < N; ++i) v[i] = o[i];
  }
  operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; ++i) r[i] = v[i];
    return r;
  }
  void operator=(vec<T, N> o) {
    for (int i = 0; i < N; ++i) v[i] = o[i];
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
