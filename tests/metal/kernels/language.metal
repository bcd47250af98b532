// What kernels may use of the language, in kernels whose results are easy to tell.
#include <metal_stdlib>
using namespace metal;

struct RowArgs {
    uint num_columns;
    float scale;
};

constant bool doubled [[function_constant(3)]];
constant ushort offset [[function_constant(4)]];
constant float factor = doubled ? 2.0 : 1.0;

// out[row] = factor * scale * sum(x[row]) + offset
template <typename T>
[[kernel]] void row_sums(
    constant RowArgs& a [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device float* out [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
    threadgroup float sums[8];
    float4 sum = float4(0.0);
    for (uint i = thread_index * 4; i < a.num_columns; i += 4 * threads.x) {
        sum += float4(*(device const vec<T, 4>*)(x + group.x * a.num_columns + i));
    }
    const float of_simdgroup = simd_sum(sum.x + sum.y + sum.z + sum.w);
    if (lane == 0) {
        sums[simdgroup] = of_simdgroup;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0) {
        float total = 0.0;
        for (uint i = 0; i < threads.x / 32; ++i) {
            total += sums[i];
        }
        out[group.x] = factor * a.scale * total + float(offset);
    }
}

#define ROW_SUMS(name, T) \
    template [[host_name(name)]] [[kernel]] decltype(row_sums<T>) row_sums<T>;
ROW_SUMS("row_sums_f32", float)
ROW_SUMS("row_sums_f16", half)
ROW_SUMS("row_sums_bf16", bfloat)

// out = a · bᵀ + 1, all 8 by 8; the result goes through threadgroup memory.
[[kernel]] void matrix_matmul(
    device const half* a [[buffer(1)]],
    device const float* b [[buffer(2)]],
    device float* out [[buffer(3)]],
    threadgroup float* tile [[threadgroup(0)]],
    ushort lane [[thread_index_in_simdgroup]]) {
    simdgroup_half8x8 left;
    simdgroup_float8x8 right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(0.0f);
    sum.thread_elements()[0] = 1.0f;
    sum.thread_elements()[1] = 1.0f;
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8, ulong2(0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, tile, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[lane] = tile[lane];
    out[lane + 32] = tile[lane + 32];
}

// counts[v] = how often v is among the values, which are below 16.
[[kernel]] void histogram(
    device const uchar* values [[buffer(1)]],
    device atomic_uint* counts [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup atomic_uint bins[16];
    if (thread_index < 16) {
        atomic_store_explicit(&bins[thread_index], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&bins[values[group * 64 + thread_index]], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < 16) {
        const uint bin = atomic_load_explicit(&bins[thread_index], memory_order_relaxed);
        atomic_fetch_add_explicit(&counts[thread_index], bin, memory_order_relaxed);
    }
}

// For each thread eight values that it gets from the others.
[[kernel]] void exchanges(
    device uint* out [[buffer(1)]],
    uint index [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
    const uint value = lane * lane;
    device uint* mine = out + index * 8;
    mine[0] = simd_shuffle_xor(value, 5);
    mine[1] = simd_prefix_exclusive_sum(value);
    mine[2] = simd_prefix_inclusive_sum(value);
    mine[3] = uint(ulong(simd_ballot(lane % 3 == 0)));
    mine[4] = simd_max(value);
    mine[5] = simd_broadcast(value, 7);
    mine[6] = simd_shuffle_down(value, 1);
    mine[7] = uint(simd_any(lane == 3)) + 2 * uint(simd_all(lane < 31));
}

// The bits of a float in its four bytes, and packed vectors.
[[kernel]] void bits(
    device const packed_float3* x [[buffer(1)]],
    device uchar4* bytes [[buffer(2)]],
    device packed_half2* pairs [[buffer(3)]],
    uint index [[thread_position_in_grid]]) {
    const float3 value = x[index];
    bytes[index] = as_type<uchar4>(value.z);
    pairs[index] = packed_half2(half(value.x), 1.5h);
}
