// How a kernel is entered on a GPU for CUDA: the addresses of buffers, the places of threadgroup memory and the
// bytes behind buffer(0) come in one structure. The host's side is `cuda/gpu.rs`.
#pragma once
#include "built_ins.hpp"

#define MSL_SHARED __attribute__((__shared__))
// Buffer 0 is the bytes themselves: a launch needs no copy, and the compiler knows that they do not change.
struct MslArguments {
  char* buffers[31];
  unsigned threadgroup_offsets[8];
  alignas(16) char bytes[512];
};
struct MslParameterOfCuda {
  int kind, index;
};
extern MSL_SHARED __attribute__((__aligned__(16))) char msl_threadgroup_memory[];

inline unsigned msl_argument_value(int built_in, int c) {
  const unsigned thread_index = (unsigned)__nvvm_read_ptx_sreg_tid_x();
  const unsigned place[3] = {(thread_index & ~31u) | (unsigned)metal::msl_lane_of(thread_index & 31),
                             (unsigned)__nvvm_read_ptx_sreg_tid_y(), (unsigned)__nvvm_read_ptx_sreg_tid_z()};
  const unsigned threads[3] = {(unsigned)__nvvm_read_ptx_sreg_ntid_x(),
                               (unsigned)__nvvm_read_ptx_sreg_ntid_y(),
                               (unsigned)__nvvm_read_ptx_sreg_ntid_z()};
  const unsigned group[3] = {(unsigned)__nvvm_read_ptx_sreg_ctaid_x(),
                             (unsigned)__nvvm_read_ptx_sreg_ctaid_y(),
                             (unsigned)__nvvm_read_ptx_sreg_ctaid_z()};
  const unsigned groups[3] = {(unsigned)__nvvm_read_ptx_sreg_nctaid_x(),
                              (unsigned)__nvvm_read_ptx_sreg_nctaid_y(),
                              (unsigned)__nvvm_read_ptx_sreg_nctaid_z()};
  switch (built_in) {
    case MSL_THREAD_IN_GRID: return group[c] * threads[c] + place[c];
    case MSL_THREAD_IN_THREADGROUP: return place[c];
    case MSL_THREADGROUP_IN_GRID: return group[c];
    case MSL_THREADGROUPS_PER_GRID: return groups[c];
    case MSL_THREADS_PER_GRID: return groups[c] * threads[c];
    case MSL_THREADS_PER_THREADGROUP: return threads[c];
    case MSL_THREAD_INDEX: return place[0];
    case MSL_LANE: return place[0] & 31;
    case MSL_SIMDGROUP: return place[0] / 32;
    case MSL_SIMDGROUPS: return threads[0] / 32;
    default: return 32;
  }
}

template <class P>
struct msl_argument {
  METAL_FUNC static P get(const MslArguments&, MslParameterOfCuda p) {
    return P(msl_argument_value(p.index, 0));
  }
};
// The conversion tells the compiler that the pointer is to no other memory; a cast and its reverse would not.
METAL_FUNC char* msl_buffer(const MslArguments& arguments, int index) {
  __attribute__((address_space(1))) char* buffer;
  asm("cvta.to.global.u64 %0, %1;" : "=l"(buffer) : "l"(arguments.buffers[index]));
  return (char*)buffer;
}
template <class T>
struct msl_argument<T*> {
  METAL_FUNC static T* get(const MslArguments& arguments, MslParameterOfCuda p) {
    if (p.kind == MSL_THREADGROUP) return (T*)(msl_threadgroup_memory + arguments.threadgroup_offsets[p.index]);
    return p.index == 0 ? (T*)arguments.bytes : (T*)msl_buffer(arguments, p.index);
  }
};
template <class T>
struct msl_argument<T&> {
  METAL_FUNC static T& get(const MslArguments& arguments, MslParameterOfCuda p) {
    return p.index == 0 ? *(T*)arguments.bytes : *(T*)msl_buffer(arguments, p.index);
  }
};
template <class T, int N>
struct msl_argument<metal::vec<T, N>> {
  METAL_FUNC static metal::vec<T, N> get(const MslArguments&, MslParameterOfCuda p) {
    metal::vec<T, N> value;
    for (int k = 0; k < N; ++k) value.v[k] = T(msl_argument_value(p.index, k));
    return value;
  }
};
template <class T, T... I>
struct msl_positions {};
template <auto kernel, class... P, int... I>
METAL_FUNC void msl_call(void (*)(P...), const MslArguments& arguments, const MslParameterOfCuda* parameters,
                         msl_positions<int, I...>) {
  kernel(msl_argument<P>::get(arguments, parameters[I])...);
}
template <auto kernel, class... P>
METAL_FUNC void msl_call(void (*function)(P...), const MslArguments& arguments,
                         const MslParameterOfCuda* parameters) {
  msl_call<kernel>(function, arguments, parameters,
                   __make_integer_seq<msl_positions, int, int(sizeof...(P))>());
}
// The structure is used where the driver puts it. In C++, a kernel whose arguments are indexed would first copy
// all of them. Told that it is in that memory, the assembler needs no registers for what it reads of it.
#define MSL_CUDA_ENTRY(name, kernel, ...)                                      \
  extern "C" __attribute__((__global__)) void msl_##name(MslArguments) {       \
    constexpr MslParameterOfCuda parameters[] = {__VA_ARGS__};                 \
    __attribute__((address_space(101))) const MslArguments* arguments;         \
    asm("mov.b64 %0, msl_" #name "_param_0;" : "=l"(arguments));               \
    msl_call<kernel>(kernel, *(const MslArguments*)arguments, parameters);     \
  }
