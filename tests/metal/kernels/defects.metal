// Kernels with one defect each, and how each is right. `expect` says what has to be found; nothing if it is right.
#include <metal_stdlib>
using namespace metal;

// expect: race on buffer(1)
[[kernel]] void fence_of_the_wrong_memory(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float v = x[t ^ 33];
    threadgroup_barrier(mem_flags::mem_device);
    x[t] = v;
}

// expect:
[[kernel]] void fence_of_the_right_memory(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t] = t;
    threadgroup_barrier(mem_flags::mem_device);
    const float v = x[t ^ 33];
    threadgroup_barrier(mem_flags::mem_device);
    x[t] = v;
}

// expect: race on threadgroup variable(0)
[[kernel]] void fence_of_no_memory(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = t;
    threadgroup_barrier(mem_flags::mem_none);
    x[t] = s[t ^ 33];
}

// expect: race on buffer(1)
[[kernel]] void two_threadgroups_add(
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
    if (t == 0) {
        x[0] += float(g);
    }
}

// expect:
[[kernel]] void two_threadgroups_add_atomically(device atomic_uint* x [[buffer(1)]]) {
    atomic_fetch_add_explicit(x, 1u, memory_order_relaxed);
}

// expect: race on threadgroup variable(0)
[[kernel]] void no_barrier_of_the_simdgroup(
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = 0.0;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    s[t] = t;
    x[t] = s[t ^ 1];
}

// expect:
[[kernel]] void barrier_of_the_simdgroup(
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = t;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    x[t] = s[t ^ 1];
}

// expect: race on threadgroup variable(0)
[[kernel]] void written_while_others_read(
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[t] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float v = s[0] + s[1];
    if (t == 40) {
        s[1] = v;
    }
    x[t] = v;
}

// expect: access out of bounds
[[kernel]] void one_past_the_buffer(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t + 1] = 1.0;
}

// expect: access out of bounds
[[kernel]] void far_from_the_buffer(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t + 0x40000000u] = 1.0;
}

// expect: access out of bounds
[[kernel]] void one_past_the_array(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[63];
    s[t] = t;
    x[t] = s[t];
}

// expect: read of memory without value
[[kernel]] void never_written(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    if (t != 5) {
        s[t] = t;
    }
    x[t] = s[t];
}

// expect: write to what is declared as read
[[kernel]] void writes_its_input(device float* x [[buffer(1)]], device float* y [[buffer(2)]], uint t [[thread_index_in_threadgroup]]) {
    x[t] = y[t];
}

// expect: read of what is declared as written
[[kernel]] void reads_its_output(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t] += 1.0;
}

// expect:
[[kernel]] void reads_back_its_output(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    x[t] = 1.0;
    x[t] += 1.0;
}

// expect: lanes of one simdgroup take different ways
[[kernel]] void sum_of_some_lanes(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t % 2 == 0) {
        x[t] = simd_sum(1.0f);
    } else {
        x[t] = simd_max(1.0f);
    }
}

// expect: threads wait in different threadgroup_barriers
[[kernel]] void barriers_in_two_ways(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 32) {
        threadgroup_barrier(mem_flags::mem_device);
    } else {
        threadgroup_barrier(mem_flags::mem_device);
    }
    x[t] = 1.0;
}

// expect: a threadgroup_barrier is reached by 32 of 64 threads
[[kernel]] void barrier_of_some_threads(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    if (t < 32) {
        return;
    }
    threadgroup_barrier(mem_flags::mem_device);
    x[t] = 1.0;
}

// expect: a simdgroup function reads a lane that has returned
[[kernel]] void shuffle_from_a_lane_that_has_returned(
    device float* x [[buffer(1)]],
    uint t [[thread_index_in_threadgroup]]) {
    if (t == 3) {
        return;
    }
    x[t] = simd_shuffle_xor(1.0f, 1);
}

// expect: more than 32768 bytes of threadgroup memory
[[kernel]] void too_much_memory(device float* x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup float s[8000];
    threadgroup float r[200];
    s[t] = t;
    r[t] = t;
    x[t] = s[t] + r[t];
}
