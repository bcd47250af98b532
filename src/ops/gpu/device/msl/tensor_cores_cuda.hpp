// Halves in pairs, and matrices of them on tensor cores. The tests' emulator has the same functions.
#pragma once

namespace metal {
// Two floats as halves in a word, the first in the low bits; too large values become the largest half.
METAL_FUNC uint msl_halves(float first, float second) {
  uint pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
// One of them, broadcast.
METAL_FUNC uint msl_low_twice(uint pair) { return __byte_perm(pair, pair, 0x1010); }
METAL_FUNC uint msl_high_twice(uint pair) { return __byte_perm(pair, pair, 0x3232); }
// Selects four of the eight bytes of `low` and `high` by the nibbles of `indices`, each below 8.
METAL_FUNC uint msl_permute(uint low, uint high, uint indices) { return __byte_perm(low, high, indices); }
// `others` with the masked bits, in one instruction, which the compiler finds if one mask is in a register.
METAL_FUNC uint msl_with_bits(uint bits, uint mask, uint others) {
  uint result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(others));
  return result;
}
METAL_FUNC uint msl_add_pairs(uint a, uint b) {
  uint sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
METAL_FUNC uint msl_multiply_pairs(uint a, uint b) {
  uint product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
METAL_FUNC uint msl_multiply_add_pairs(uint a, uint b, uint c) {
  uint result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// Two values of fp8_e4m3, in the low bytes, as halves. The compiler of CUDA 12.1 is the first that knows it for all of
// these GPUs.
#if __CUDA_ARCH__ >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
#define MSL_HAS_FP8
METAL_FUNC uint msl_halves_of_fp8(uint bytes) {
  uint pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)bytes));
  return pair;
}
#endif

// sums += a · b, 16 rows by 16 columns of `a` and 8 columns of `b`. With lane = 4 · g + t, a lane has of `a` rows g
// (a0, a2) and g + 8 (a1, a3), columns 2t and 2t + 1 (a0, a1) and the same plus 8 (a2, a3); of `b` the same of column
// g; and of the sums columns 2t and 2t + 1 of row g, then of row g + 8.
METAL_FUNC void msl_multiply_tile(float (&sums)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 2ˣ, and 0 where that is below the smallest normal number.
METAL_FUNC float msl_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x; the last bit may be wrong.
METAL_FUNC float msl_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Loads four 8×8 matrices of halves: lane i gives the address of row i % 8 of matrix i / 8 and gets two neighbours of
// row i / 4 of each.
METAL_FUNC void msl_load_matrices(threadgroup const ushort* row, uint (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint(__cvta_generic_to_shared(row))));
}
// The same for transposed matrices: the lane gets two neighbours of column i / 4 of each.
METAL_FUNC void msl_load_transposed(threadgroup const ushort* row, uint (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint(__cvta_generic_to_shared(row))));
}

// Prefetches a cache line to L2.
template <class T>
METAL_FUNC void msl_fetch(device const T* value) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(value));
}

// Adds to a float in memory, or to two of which the first is aligned to eight bytes, without returning them.
METAL_FUNC void msl_add(device float* target, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
}
METAL_FUNC void msl_add_pair(device float* target, float first, float second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(first), "f"(second) : "memory");
#else
  msl_add(target, first);
  msl_add(target + 1, second);
#endif
}

// Copies sixteen, eight or four bytes to shared memory asynchronously. A thread's copies up to `msl_end_group` are a
// group. After a wait for all but the last NUM_LATER groups, the thread sees them, and after a barrier the others do.
METAL_FUNC void msl_copy(threadgroup uint4* target, device const uint4* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint(__cvta_generic_to_shared(target))), "l"(source)
               : "memory");
}
METAL_FUNC void msl_copy(threadgroup uint2* target, device const uint2* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(uint(__cvta_generic_to_shared(target))), "l"(source)
               : "memory");
}
template <class T>
METAL_FUNC void msl_copy(threadgroup T* target, device const T* source) {
  static_assert(sizeof(T) == 4, "four, eight or sixteen bytes");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint(__cvta_generic_to_shared(target))), "l"(source)
               : "memory");
}
METAL_FUNC void msl_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NUM_LATER>
METAL_FUNC void msl_wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_LATER) : "memory");
}

// Matmuls of a warpgroup's rows with rows of shared memory, by one instruction if the GPU has it, otherwise by warps.
//
// A tile is TOKENS rows of 64 halves, sixteen bytes `i` of row r at index i ^ r % 8 of the row: eight rows that are
// read together lie in different banks. It begins at a multiple of 1024 bytes. Matmuls are asynchronous until they are
// waited for; their operands and sums must not change meanwhile.
METAL_FUNC uint msl_swizzled(uint row, uint eight) { return 8 * row + (eight ^ (row % 8)); }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MSL_SUMS_0_TO_31 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MSL_SUMS_0_TO_47 \
  MSL_SUMS_0_TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MSL_SUMS_0_TO_63 \
  MSL_SUMS_0_TO_47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MSL_SUMS_0_TO_79 \
  MSL_SUMS_0_TO_63 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MSL_SUMS_0_TO_95 \
  MSL_SUMS_0_TO_79 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MSL_SUMS_0_TO_111 \
  MSL_SUMS_0_TO_95 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MSL_SUMS_0_TO_127 \
  MSL_SUMS_0_TO_111 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MSL_TILE(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define MSL_4_TILES(n) MSL_TILE(n), MSL_TILE(n + 1), MSL_TILE(n + 2), MSL_TILE(n + 3)
#define MSL_8_TILES(n) MSL_4_TILES(n), MSL_4_TILES(n + 4)
#define MSL_MULTIPLY(TOKENS, SUMS, OPERANDS, ...)                                                          \
  asm volatile("{.reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n" #TOKENS       \
               "k16.f32.f16.f16 {" SUMS "}, " OPERANDS ", adds, 1, 1, 0;}"                                 \
               : __VA_ARGS__                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
METAL_FUNC void msl_multiply_64_rows(float (&sums)[8][4], const uint (&a)[4], unsigned long long tile) {
  MSL_MULTIPLY(64, MSL_SUMS_0_TO_31, "{%32, %33, %34, %35}, %36", MSL_8_TILES(0));
}
METAL_FUNC void msl_multiply_64_rows(float (&sums)[16][4], const uint (&a)[4], unsigned long long tile) {
  MSL_MULTIPLY(128, MSL_SUMS_0_TO_63, "{%64, %65, %66, %67}, %68", MSL_8_TILES(0), MSL_8_TILES(8));
}
METAL_FUNC void msl_multiply_64_rows(float (&sums)[20][4], const uint (&a)[4], unsigned long long tile) {
  MSL_MULTIPLY(160, MSL_SUMS_0_TO_79, "{%80, %81, %82, %83}, %84", MSL_8_TILES(0), MSL_8_TILES(8), MSL_4_TILES(16));
}
METAL_FUNC void msl_multiply_64_rows(float (&sums)[32][4], const uint (&a)[4], unsigned long long tile) {
  MSL_MULTIPLY(256, MSL_SUMS_0_TO_127, "{%128, %129, %130, %131}, %132", MSL_8_TILES(0), MSL_8_TILES(8), MSL_8_TILES(16), MSL_8_TILES(24));
}
template <int TILES>
METAL_FUNC void msl_multiply_rows(float (&sums)[TILES][4], const uint (&a)[4], threadgroup const uint4* tile, int k) {
  // The address and the stride of eight rows, in units of 16 bytes, and the order of bytes in a row.
  const unsigned long long address = (__cvta_generic_to_shared(tile) & 0x3FFFF) >> 4;
  msl_multiply_64_rows(sums, a, 1ull << 62 | 64ull << 32 | 1ull << 16 | (address + 2 * k));
}
// Makes the thread's copies visible to matmuls.
METAL_FUNC void msl_show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Keeps these words in registers for matmuls.
template <int N>
METAL_FUNC void msl_begin_matmuls(uint (&words)[N][4]) {
  MSL_UNROLL
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(words[i][0]), "+r"(words[i][1]), "+r"(words[i][2]), "+r"(words[i][3])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group of matmuls.
METAL_FUNC void msl_end_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int NUM_LATER>
METAL_FUNC void msl_wait_for_matmuls() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NUM_LATER) : "memory");
}
#else
template <int TILES>
METAL_FUNC void msl_multiply_rows(float (&sums)[TILES][4], const uint (&a)[4], threadgroup const uint4* tile, int k) {
  const uint lane = msl_lane();
  const uint row = lane / 16 * 8 + lane % 8;
  MSL_UNROLL
  for (int n = 0; n < TILES; n += 2) {
    uint b[4];
    msl_load_matrices((threadgroup const ushort*)(tile + msl_swizzled(8 * n + row, 2 * k + lane / 8 % 2)), b);
    msl_multiply_tile(sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
    msl_multiply_tile(sums[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
  }
}
METAL_FUNC void msl_show_copies() {}
template <int N>
METAL_FUNC void msl_begin_matmuls(uint (&)[N][4]) {}
METAL_FUNC void msl_end_matmuls() {}
template <int NUM_LATER>
METAL_FUNC void msl_wait_for_matmuls() {}
#endif
}  // namespace metal
