// Keywords, scalar types and constants, for each of the three compilations.
#pragma once

#if defined(__OPENCL_CPP_VERSION__)
#define MSL_ADDRESS_SPACES 1
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define MSL_GENERIC __generic
typedef unsigned long size_t;
typedef long ptrdiff_t;
#else
#define device
#define threadgroup
#define thread
#define constant const
#define MSL_GENERIC
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef _Float16 half;
#endif
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong uintptr_t;

#define METAL_FUNC inline __attribute__((__always_inline__))

// A function constant is a variable that the run time sets before a launch.
#if defined(MSL_ADDRESS_SPACES)
#define MSL_FUNCTION_CONSTANT(type, name, index) __global type name
#define MSL_DERIVED_CONSTANT(type, name, value)        \
  struct name##_derived {                              \
    operator type() const { return value; }            \
    operator type() const __constant { return value; } \
  };                                                   \
  static constant name##_derived name = {}
#else
#if defined(MSL_CUDA)
// As on Apple's GPUs, each set of flags is a compilation of its own. Numbers are set when a module is loaded.
#define MSL_FUNCTION_CONSTANT(type, name, index) MSL_FUNCTION_CONSTANT_##type(name, index)
#define MSL_FUNCTION_CONSTANT_bool(name, index) static constexpr bool name = MSL_VALUE_OF_##name
#define MSL_FUNCTION_CONSTANT_ushort(name, index) \
  extern "C" __attribute__((__constant__)) ushort name __asm__("msl_constant_" #index) = 0
#else
#define MSL_FUNCTION_CONSTANT(type, name, index) static type name
#endif
#define MSL_DERIVED_CONSTANT(type, name, value) \
  static const struct name##_derived {          \
    operator type() const { return value; }     \
  } name = {}
#endif

#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f

#if defined(MSL_CUDA)
#pragma clang force_cuda_host_device begin
#define MSL_MATH(name) __nv_##name
extern "C" {
float __nv_expf(float);
float __nv_exp2f(float);
float __nv_logf(float);
float __nv_log2f(float);
float __nv_sqrtf(float);
float __nv_sinf(float);
float __nv_cosf(float);
float __nv_tanhf(float);
float __nv_floorf(float);
float __nv_ceilf(float);
float __nv_roundf(float);
float __nv_rintf(float);
float __nv_truncf(float);
float __nv_fabsf(float);
float __nv_powf(float, float);
float __nv_fmodf(float, float);
float __nv_fminf(float, float);
float __nv_fmaxf(float, float);
float __nv_copysignf(float, float);
float __nv_ldexpf(float, int);
float __nv_fmaf(float, float, float);
double __nv_fma(double, double, double);
}
#else
#define MSL_MATH(name) __builtin_##name
#endif
