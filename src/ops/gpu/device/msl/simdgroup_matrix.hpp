// 8×8 matrices of a simdgroup, with two elements in each lane.
//
// With quad = lane / 4, a lane holds row (quad & 4) + lane / 2 % 4, columns (quad & 2)·2 + lane % 2 · 2 and the next.
// This is the layout of Apple's GPUs; kernels that use `thread_elements` rely on it.
#pragma once

#ifndef MSL_HERE
#define MSL_HERE int line = 0
#endif

namespace metal {
inline int msl_row() { return (msl_lane() >> 2 & 4) + (msl_lane() >> 1 & 3); }
inline int msl_column() { return (msl_lane() >> 2 & 2) * 2 + (msl_lane() & 1) * 2; }

template <class T, int C, int R>
struct simdgroup_matrix : msl_surplus {
  static_assert(C == 8 && R == 8, "simdgroup matrices are 8 by 8");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    elements.v[0] = msl_row() == msl_column() ? diagonal : T(0.0f);
    elements.v[1] = msl_row() == msl_column() + 1 ? diagonal : T(0.0f);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int C, int R = C>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}
// `origin` is (column, row), as in memory without transposition.
inline ulong msl_element(ulong row, ulong column, ulong stride, ulong2 origin, bool transpose) {
  return transpose ? (column + origin.v[0]) * stride + row + origin.v[1]
                   : (row + origin.v[1]) * stride + column + origin.v[0];
}
template <class T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* from, ulong stride = 8,
                           ulong2 origin = ulong2(0ul), bool transpose = false) {
  for (int k = 0; k < 2; ++k)
    matrix.elements.v[k] = from[msl_element(msl_row(), msl_column() + k, stride, origin, transpose)];
}
template <class T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, T* to, ulong stride = 8,
                            ulong2 origin = ulong2(0ul), bool transpose = false) {
  for (int k = 0; k < 2; ++k)
    to[msl_element(msl_row(), msl_column() + k, stride, origin, transpose)] = matrix.elements.v[k];
}
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                          MSL_HERE) {
  float sum[4] = {float(c.elements.v[0]), float(c.elements.v[1])};
  c.put(sum + 2);
  msl_multiply(a.elements.v[0], a.elements.v[1], b.elements.v[0], b.elements.v[1], sum, line);
  d.elements.v[0] = D(sum[0]);
  d.elements.v[1] = D(sum[1]);
  d.take(sum + 2);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                               simdgroup_matrix<B, 8, 8> b, MSL_HERE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8>(0.0f), line);
}
}  // namespace metal
