// Paged decode attention, one threadgroup per (sequence, query head), split over NSG simdgroups; f16 or f32 cache.
// Written in the style the Linux harness can check: args in one `constant` struct, explicit simdgroup_barrier wherever
// lanes exchange data through threadgroup memory, functors instead of function-pointer template arguments.
#include <metal_stdlib>
using namespace metal;

struct PagedArgs { int n_heads, n_kv_heads, head_dim, block_size, max_blocks; float scale; };
constant ushort NSG [[function_constant(0)]];

template <typename T, int D>
[[kernel]] void paged_attn_decode(
    constant PagedArgs& a           [[buffer(0)]],
    device const T* q               [[buffer(1)]],   // [seq, head, D]
    device const T* kcache          [[buffer(2)]],   // [block, kv_head, block_size, D]
    device const T* vcache          [[buffer(3)]],
    device const int* block_table   [[buffer(4)]],   // [seq, max_blocks]
    device const int* context_len   [[buffer(5)]],
    device T* out                   [[buffer(6)]],
    threadgroup float* sh           [[threadgroup(0)]],   // NSG * (D + 2)
    uint3 tg   [[threadgroup_position_in_grid]],
    uint lane  [[thread_index_in_simdgroup]],
    uint sg    [[simdgroup_index_in_threadgroup]]) {
  constexpr int E = D / 32;
  typedef vec<T, E> TE; typedef vec<float, E> FE;
  const int head = tg.x, seq = tg.y, kvh = head / (a.n_heads / a.n_kv_heads), n = context_len[seq];
  const FE qv = FE(*(device const TE*)(q + (seq*a.n_heads + head)*D + lane*E)) * a.scale;
  FE acc = FE(0.0f); float m = -INFINITY, s = 0.0f;
  for (int i = int(sg); i < n; i += NSG) {
    const int blk = block_table[seq*a.max_blocks + i / a.block_size];
    const ulong off = ulong((blk*a.n_kv_heads + kvh)*a.block_size + i % a.block_size)*D + lane*E;
    const float x = simd_sum(dot(qv, FE(*(device const TE*)(kcache + off))));
    const float mn = max(m, x), c = fast::exp(m - mn), p = fast::exp(x - mn);
    acc = acc*c + FE(*(device const TE*)(vcache + off))*p; s = s*c + p; m = mn;
  }
  threadgroup float* so = sh + sg*(D + 2);
  for (int e = 0; e < E; ++e) so[lane*E + e] = acc[e];
  if (lane == 0) { so[D] = m; so[D + 1] = s; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    float M = -INFINITY; for (int g = 0; g < NSG; ++g) M = max(M, sh[g*(D + 2) + D]);
    float S = 0.0f; FE r = FE(0.0f);
    for (int g = 0; g < NSG; ++g) {
      threadgroup const float* p = sh + g*(D + 2); const float c = p[D + 1] == 0.0f ? 0.0f : fast::exp(p[D] - M);
      S += p[D + 1]*c; for (int e = 0; e < E; ++e) r[e] += p[lane*E + e]*c;
    }
    for (int e = 0; e < E; ++e) out[(seq*a.n_heads + head)*D + lane*E + e] = T(S == 0.0f ? 0.0f : r[e]/S);
  }
}
#define INST(name, T, D) template [[host_name(name)]] [[kernel]] decltype(paged_attn_decode<T, D>) paged_attn_decode<T, D>;
INST("paged_attn_decode_f16_128", half, 128)
INST("paged_attn_decode_f32_128", float, 128)
INST("paged_attn_decode_bf16_64", bfloat, 64)
