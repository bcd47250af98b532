// Keywords, scalar types and constants, for NVIDIA's run-time compiler. Everything but the keywords is in `metal`, like
// the kernels, so that the compiler's functions with the same names do not conflict.
#pragma once

#define device
#define threadgroup
#define thread
#define constant const
#define MSL_TABLE __constant__ const
#define MSL_GENERIC
#define METAL_FUNC __forceinline__
#define MSL_MATH(name) ::name
#define MSL_BUILT_IN(name) msl_##name
#define MSL_UNROLL _Pragma("unroll")

#define INFINITY __int_as_float(0x7F800000)
#define NAN __int_as_float(0x7FC00000)
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_EPSILON 1.192092896e-07f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f

namespace metal {
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long long int64_t;
typedef ulong uint64_t;

METAL_FUNC void msl_memcpy(void* to, const void* from, size_t size) { memcpy(to, from, size); }
METAL_FUNC int msl_popcount(uint x) { return __popc(int(x)); }
METAL_FUNC int msl_clz(uint x) { return __clz(int(x)); }
METAL_FUNC int msl_ctz(uint x) { return __ffs(int(x)) - 1; }

// 16-bit floats compute as floats and are rounded when they are stored, to nearest, ties to even.
struct half {
  ushort bits;
  half() = default;
  METAL_FUNC half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  METAL_FUNC operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};
struct bfloat {
  ushort bits;
  bfloat() = default;
  METAL_FUNC bfloat(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  METAL_FUNC operator float() const { return __int_as_float(int(bits) << 16); }
};
#define HALF_MAX half(65504.0f)
}  // namespace metal
