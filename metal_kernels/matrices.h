// Matrices of 8×8 values in the registers of a simdgroup.
//
// A lane has two neighbouring values of a row. Apple does not say which ones, but all of its GPUs have had the same
// places since there are such matrices, and other projects' kernels rely on them as well; were they others, a probe of
// `self-test` would say so. Who knows them needs no detour through threadgroup memory for what is done to single
// values, and reads a matrix in one access of a lane.

#include "threads.h"

// Where in a matrix the first of a lane's values is.
struct Cell {
    uint row;
    uint column;
};

inline Cell cell_of(uint lane) {
    Cell cell;
    cell.row = lane / 16 * 4 + lane / 2 % 4;
    cell.column = lane / 8 % 2 * 4 + lane % 2 * 2;
    return cell;
}

template <typename T>
inline simdgroup_matrix<T, 8, 8> matrix_of(T first, T second) {
    simdgroup_matrix<T, 8, 8> matrix;
    matrix.thread_elements()[0] = first;
    matrix.thread_elements()[1] = second;
    return matrix;
}

// The matrix whose rows lie `stride` values apart, with its first value at `at`.
template <typename T>
inline simdgroup_matrix<T, 8, 8> load_matrix(threadgroup const T* at, uint stride, Cell cell) {
    const vec<T, 2> pair = *(threadgroup const vec<T, 2>*)(at + cell.row * stride + cell.column);
    return matrix_of<T>(pair.x, pair.y);
}

// The same with its columns `stride` values apart.
template <typename T>
inline simdgroup_matrix<T, 8, 8> load_transposed(threadgroup const T* at, uint stride, Cell cell) {
    threadgroup const T* first = at + cell.column * stride + cell.row;
    return matrix_of<T>(first[0], first[stride]);
}

template <typename T>
inline void store_matrix(simdgroup_matrix<T, 8, 8> matrix, threadgroup T* at, uint stride, Cell cell) {
    threadgroup T* own = at + cell.row * stride + cell.column;
    own[0] = matrix.thread_elements()[0];
    own[1] = matrix.thread_elements()[1];
}

// What the lanes of a row have, added up or the largest of it, in each of them.
inline float sum_of_row(float value) {
    value += simd_shuffle_xor(value, 1);
    return value + simd_shuffle_xor(value, 8);
}

inline float maximum_of_row(float value) {
    value = max(value, simd_shuffle_xor(value, 1));
    return max(value, simd_shuffle_xor(value, 8));
}
