// Code that clang would accept as C++ and the kernels' language does not, one case after the other, each compiled with
// what comes before the first. A case that is wrong names a part of the message; the right ones are like it. What no
// compiler here knows of is in `emulator/rewriter/rules`.
#include <metal_stdlib>
using namespace metal;

struct Block {
    half d;
    uchar qs[16];
};
struct Args {
    int n;
    uint stride;
};
inline float dot4(device const float4* a, thread const float4& b) {
    return dot(a[0], b);
}
inline void put(threadgroup float* s, float v) {
    s[0] = v;
}
template <typename T>
inline float load(device const T* p, uint i) {
    return float(p[i]);
}

// wrong: no matching function
kernel void threadgroup_as_device(device const float4* x [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    threadgroup float4 s[32];
    s[t & 31] = x[t];
    float4 q = x[t];
    o[t] = dot4(s, q);
}

// wrong: no matching function
kernel void device_as_threadgroup(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    put(o, 1.0f);
}

// wrong: no matching function
kernel void thread_as_device(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float4 q = float4(1);
    o[t] = dot4(&q, q);
}

// wrong: read-only
kernel void write_through_constant(constant Args& a [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    a.n = 3;
    o[t] = a.n;
}

// wrong: read-only
kernel void write_through_const(device const float* x [[buffer(0)]], uint t [[thread_position_in_grid]]) {
    x[t] = 1.0f;
}

// wrong: address space
kernel void cast_to_another_space(device const uchar* x [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    thread const half* p = (thread const half*)(x + 2 * t);
    o[t] = p[0];
}

// wrong: no matching function
kernel void constant_as_device(constant float* x [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = load(x, t);
}

// wrong: between pointers into one address space
kernel void either_space(constant float* x [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = (t > 3 ? x : o)[t];
}

// wrong: non-const reference cannot bind to vector element
inline void set(thread float& v) {
    v = 1.0f;
}
kernel void component_by_reference(device float4* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float4 v = o[t];
    set(v.x);
    o[t] = v;
}

// wrong: address of vector element
kernel void address_of_a_component(device float4* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    device float* x = &o[t].x;
    x[0] = 1.0f;
}

// wrong: not contextually convertible to 'bool'
kernel void condition_of_vectors(device float4* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = o[t] < o[0] ? o[t] : o[0];
}

// wrong: implicit conversion loses floating-point precision
kernel void rounding_unsaid(device bfloat* x [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    x[t] = o[t];
}

// wrong: constexpr if is a C++17 extension
template <int N>
inline float later_language(float x) {
    if constexpr (N > 1) {
        return x;
    }
    return N;
}
kernel void calls_later_language(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = later_language<2>(o[t]);
}

// wrong: variable length array
kernel void length_at_run_time(constant Args& a [[buffer(0)]], device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float x[a.n];
    x[t] = 1.0f;
    o[t] = x[t];
}

// wrong: unused variable 'y'
kernel void warned_of(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float y = o[t];
    o[t] = 1.0f;
}

// wrong: names its address space
inline float without_space(float* p) {
    return p[0];
}
kernel void calls_it(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float z = 2;
    o[t] = without_space(&z);
}

// wrong: ambiguous
kernel void mixed_types(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = max(o[t], half(1));
}

// wrong: component count
kernel void three_of_four(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    float4 a = float4(1, 2, 3);
    o[t] = a.x;
}

// wrong: from incompatible type
kernel void implicit_conversion(device half4* x [[buffer(0)]], device float4* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = x[t];
}

// wrong: no such word: double
kernel void with_double(device float* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    double z = o[t];
    o[t] = float(z * z);
}

// right
struct Loader {
    device const Block* from;
    threadgroup half* to;
    uint n;
    void go(uint i) {
        to[i] = from[i].d;
    }
    half get(uint i) const {
        return to[i];
    }
};
inline float run(constant Args& a, device const Block* x, threadgroup half* s, uint t) {
    Block b = x[t];
    Loader l{x, s, 4u};
    l.go(t & 3);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return float(b.d) + float(l.get(0)) + float(a.n);
}
kernel void spaces_as_they_are(
    constant Args& a [[buffer(0)]],
    device const Block* x [[buffer(1)]],
    device float* o [[buffer(2)]],
    threadgroup half* s [[threadgroup(0)]],
    uint t [[thread_position_in_grid]]) {
    simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8>(0.f);
    simdgroup_half8x8 left, right;
    simdgroup_load(left, s, 8);
    simdgroup_load(right, s + 64, 8, ulong2(0), true);
    simdgroup_multiply_accumulate(c, left, right, c);
    const uint n = a.n;
    const half2 h = half2(half(c.thread_elements()[0]), half(1));
    float2 f = float2(h);
    f.xy = f.yx;
    uchar4 u = as_type<uchar4>(n);
    o[t] = run(a, x, s, t) + f.x + float(u.x) + simd_sum(c.thread_elements()[1]);
}

// right
kernel void explicit_conversion(device half4* x [[buffer(0)]], device float4* o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
    o[t] = float4(x[t]) + max(float(x[t].x), 1.0f);
}

// right
static_assert(__METAL_VERSION__ == 310, "the version that pipelines are compiled for");
kernel void one_space(threadgroup float* s [[threadgroup(0)]], device float* o [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    const float x = t > 3 ? s[t] : o[t];
    device float* p = t > 3 ? o : o + 1;
    float4 v = float4(x, float2(x), p[t]);
    v.y = t > 4 ? t > 5 ? 1.0f : 2.0f : v[t % 4];
    o[t] = v.x + v.y + v.z + v.w;
}
