// Matrices of 8×8 values in the registers of a simdgroup.
//
// A lane has two neighbouring values of a row. Apple does not document which ones, but all of its GPUs with such
// matrices use the same lanes, and other projects' kernels rely on them as well. A probe of `self-test` would report a
// difference. Code that uses the layout handles single values without threadgroup memory, and loads a matrix in one
// read per lane.
// values, and reads a matrix in one access of a lane.

#include "threads.h"

// The row and column of the lane's first value.
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

// Loads the matrix at `at`, whose rows are `stride` values apart.
template <typename T>
inline simdgroup_matrix<T, 8, 8> load_matrix(threadgroup const T* at, uint stride, Cell cell) {
    const vec<T, 2> pair = *(threadgroup const vec<T, 2>*)(at + cell.row * stride + cell.column);
    return matrix_of<T>(pair.x, pair.y);
}

// The same for columns that are `stride` values apart.
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

// The sum or the maximum over the lanes of a row, in each of them.
inline float sum_of_row(float value) {
    value += simd_shuffle_xor(value, 1);
    return value + simd_shuffle_xor(value, 8);
}

inline float maximum_of_row(float value) {
    value = max(value, simd_shuffle_xor(value, 1));
    return max(value, simd_shuffle_xor(value, 8));
}
