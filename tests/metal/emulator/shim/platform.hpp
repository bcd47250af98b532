// Keywords, scalar types and constants, for each of the two compilations.
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
#define MSL_FUNCTION_CONSTANT(type, name, index) static type name
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

#define MSL_MATH(name) __builtin_##name
#define MSL_BUILT_IN(name) __builtin_##name
