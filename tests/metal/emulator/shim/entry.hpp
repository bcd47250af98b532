// How the run time enters a kernel: each parameter is asked for by its position.
#pragma once
#include "abi.hpp"

// Planted defects are selected at run time: one object for all of them.
inline bool is_planted(long defect) { return msl_defect == defect; }

template <class P>
struct msl_argument {
  static P get(int position) { return P(msl_argument_value(position, 0)); }
  static constexpr unsigned long size = 0;
};
template <class T>
struct msl_argument<T*> {
  static T* get(int position) { return (T*)msl_argument_pointer(position); }
  static constexpr unsigned long size = 0;
};
template <class T>
struct msl_argument<T&> {
  static T& get(int position) { return *(T*)msl_argument_pointer(position); }
  static constexpr unsigned long size = sizeof(T);
};
template <class T, int N>
struct msl_argument<metal::vec<T, N>> {
  static metal::vec<T, N> get(int position) {
    metal::vec<T, N> value;
    for (int k = 0; k < N; ++k) value.v[k] = T(msl_argument_value(position, k));
    return value;
  }
  static constexpr unsigned long size = 0;
};

template <class T, T... I>
struct msl_positions {};
template <class... P, int... I>
inline void msl_call(void (*kernel)(P...), msl_positions<int, I...>) {
  kernel(msl_argument<P>::get(I)...);
}
template <class... P>
inline void msl_call(void (*kernel)(P...)) {
  msl_call(kernel, __make_integer_seq<msl_positions, int, int(sizeof...(P))>());
}
template <class K, K kernel>
void msl_enter() {
  msl_call(kernel);
}
template <int position, class... P>
constexpr unsigned long msl_parameter_size(void (*)(P...)) {
  constexpr unsigned long sizes[] = {msl_argument<P>::size...};
  return sizes[position];
}
