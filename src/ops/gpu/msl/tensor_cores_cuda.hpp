// Halves in pairs, and matrices of them on tensor cores. The tests' emulator has the same functions.
#pragma once

namespace metal {
// Two numbers as halves in a word, the first one below; what is too large becomes the largest half.
METAL_FUNC uint msl_halves(float first, float second) {
  uint pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
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

// sums += a · b, 16 rows by 16 columns of `a` and 8 columns of `b`. With lane = 4 · g + t, a lane has of `a` rows g (in a0
// and a2) and g + 8, columns 2t and 2t + 1 (in a0 and a1) and 8 more; of `b` the same of column g; and of the sums columns
// 2t and 2t + 1 of row g, then of row g + 8.
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

// Four 8×8 matrices of halves: lane i names row i % 8 of matrix i / 8 and gets two neighbours of row i / 4 of each.
METAL_FUNC void msl_load_matrices(threadgroup const ushort* row, uint (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint(__cvta_generic_to_shared(row))));
}
// The same of matrices that lie transposed: it gets two neighbours of column i / 4 of each.
METAL_FUNC void msl_load_transposed(threadgroup const ushort* row, uint (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(uint(__cvta_generic_to_shared(row))));
}

// Copies sixteen bytes to threadgroup memory while the thread goes on. Its copies up to `msl_end_group` are a group; once
// all but its last NUM_LATER groups are waited for, they are there for the thread, and behind a barrier for the others.
METAL_FUNC void msl_copy(threadgroup uint4* target, device const uint4* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint(__cvta_generic_to_shared(target))), "l"(source)
               : "memory");
}
METAL_FUNC void msl_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NUM_LATER>
METAL_FUNC void msl_wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_LATER) : "memory");
}
}  // namespace metal
