// Kernel entry points. The structure of buffer(0) and the addresses of the other buffers form one structure, the
// kernel's launch argument; the host's side is `cuda/mod.rs`.
//
// For each kernel of a file, `cuda/source.rs` defines MSL_PARAMETERS_<kernel> as the list of its parameters, and
// selects a kernel with MSL_WANTED_<name>: the others are not compiled. MSL_WAITS_ITSELF is whether the kernel waits
// for earlier kernels' writes itself.
#pragma once
#include "built_ins.hpp"

extern __shared__ __align__(1024) char msl_threadgroup_memory[];

namespace metal {
struct MslParameter {
  int kind, index;
};
// Bytes of the structure of buffer(0), the first parameter.
template <class P>
struct msl_size;
template <class A, class... P>
struct msl_size<void (*)(A&, P...)> {
  static constexpr int bytes = sizeof(A);
};
template <int NUM_BUFFERS, int SIZE>
struct MslArguments {
  alignas(16) char bytes[SIZE];
  char* buffers[NUM_BUFFERS];
};

METAL_FUNC unsigned msl_argument_value(int built_in, int c) {
  const unsigned index = (threadIdx.x & ~31u) | unsigned(msl_lane_of(threadIdx.x & 31));
  const unsigned group[3] = {blockIdx.x, blockIdx.y, blockIdx.z};
  const unsigned groups[3] = {gridDim.x, gridDim.y, gridDim.z};
  const unsigned threads[3] = {blockDim.x, 1, 1};
  const unsigned indices[3] = {index, 0, 0};
  switch (built_in) {
    case MSL_THREAD_IN_GRID: return group[c] * threads[c] + indices[c];
    case MSL_THREAD_IN_THREADGROUP: return indices[c];
    case MSL_THREADGROUP_IN_GRID: return group[c];
    case MSL_THREADGROUPS_PER_GRID: return groups[c];
    case MSL_THREADS_PER_GRID: return groups[c] * threads[c];
    case MSL_THREADS_PER_THREADGROUP: return threads[c];
    case MSL_THREAD_INDEX: return index;
    case MSL_LANE: return index & 31;
    case MSL_SIMDGROUP: return index / 32;
    case MSL_SIMDGROUPS: return threads[0] / 32;
    default: return 32;
  }
}

template <class P>
struct msl_argument {
  template <class A>
  METAL_FUNC static P get(const A&, MslParameter p) {
    return P(msl_argument_value(p.index, 0));
  }
};
template <class T>
struct msl_argument<T*> {
  template <class A>
  METAL_FUNC static T* get(const A& arguments, MslParameter p) {
    return p.kind == MSL_THREADGROUP ? (T*)msl_threadgroup_memory : (T*)arguments.buffers[p.index - 1];
  }
};
template <class T>
struct msl_argument<T&> {
  template <class A>
  METAL_FUNC static T& get(const A& arguments, MslParameter) {
    return *(T*)arguments.bytes;
  }
};
template <class T, int N>
struct msl_argument<vec<T, N>> {
  template <class A>
  METAL_FUNC static vec<T, N> get(const A&, MslParameter p) {
    vec<T, N> value;
    MSL_UNROLL
    for (int k = 0; k < N; ++k) value.v[k] = T(msl_argument_value(p.index, k));
    return value;
  }
};
template <int... I>
struct msl_positions {};
template <int N, int... I>
struct msl_first : msl_first<N - 1, N - 1, I...> {};
template <int... I>
struct msl_first<0, I...> {
  typedef msl_positions<I...> type;
};
template <class A, class... P, int... I>
METAL_FUNC void msl_call(void (*kernel)(P...), const A& arguments, const MslParameter* parameters,
                         msl_positions<I...>) {
  kernel(msl_argument<P>::get(arguments, parameters[I])...);
}
template <class A, class... P>
METAL_FUNC void msl_enter(void (*kernel)(P...), const A& arguments, const MslParameter* parameters) {
  msl_call(kernel, arguments, parameters, typename msl_first<sizeof...(P)>::type());
}
constexpr int msl_num_buffers(const MslParameter* parameters, int count) {
  int most = 1;
  for (int i = 0; i < count; ++i)
    if (parameters[i].kind == MSL_BUFFER && parameters[i].index > most) most = parameters[i].index;
  return most;
}
}  // namespace metal

#define MSL_ENTRY(NAME, KERNEL, ...)                                                                              \
  constexpr MslParameter NAME##_parameters[] = {__VA_ARGS__};                                                     \
  extern "C" __global__ void MSL_IN_CLUSTER __launch_bounds__(MSL_BOUNDS)                                         \
      msl_##NAME(const __grid_constant__                                                                          \
                 MslArguments<msl_num_buffers(NAME##_parameters, sizeof(NAME##_parameters) / sizeof(MslParameter)), \
                              msl_size<decltype(&KERNEL)>::bytes>                                                 \
                     arguments) {                                                                                 \
    constexpr MslParameter parameters[] = {__VA_ARGS__};                                                          \
    msl_let_next_begin();                                                                                         \
    msl_wait_for_inputs(!MSL_WAITS_ITSELF);                                                                       \
    msl_enter(&KERNEL, arguments, parameters);                                                                    \
  }

#define MSL_SECOND(FIRST, SECOND, ...) SECOND
#define MSL_IS_WANTED(...) MSL_SECOND(__VA_ARGS__, 0, 0)
#define MSL_JOIN(A, B) MSL_JOINED(A, B)
#define MSL_JOINED(A, B) A##B
#define MSL_INSTANCE_0(...)
#define MSL_INSTANCE_1(NAME, KERNEL, ...) MSL_ENTRY(NAME, (KERNEL<__VA_ARGS__>), MSL_PARAMETERS_##KERNEL)
#define MSL_PLAIN_0(...)
#define MSL_PLAIN_1(KERNEL) MSL_ENTRY(KERNEL, KERNEL, MSL_PARAMETERS_##KERNEL)
#define INSTANCE(NAME, KERNEL, ...) \
  MSL_JOIN(MSL_INSTANCE_, MSL_IS_WANTED(MSL_WANTED_##NAME))(NAME, KERNEL, __VA_ARGS__)
// A kernel that is not a template.
#define MSL_PLAIN(KERNEL) MSL_JOIN(MSL_PLAIN_, MSL_IS_WANTED(MSL_WANTED_##KERNEL))(KERNEL)
