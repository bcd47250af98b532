// A ring of stages in shared memory, each filled at once with a block of memory. The tests' emulator has the same
// functions.
//
// If the kernel's constant CLUSTER is above one and the GPU supports clusters, thread blocks that are neighbours along
// y and need the same blocks form one: each loads a part of a block for all of them. A stage is refilled after all have
// released its previous block. Otherwise, each thread block copies blocks for itself. A stage has a barrier, and
// `round` counts how often it has been filled.
#pragma once

#if __CUDA_ARCH__ >= 900 && MSL_CLUSTER > 1
#define MSL_IN_CLUSTER __cluster_dims__(1, MSL_CLUSTER, 1)
#else
#define MSL_IN_CLUSTER
#endif

namespace metal {
#if __CUDA_ARCH__ >= 900
constexpr uint MSL_NEIGHBOURS = MSL_CLUSTER > 1 ? MSL_CLUSTER : 1;
METAL_FUNC uint msl_shared(threadgroup const void* target) { return uint(__cvta_generic_to_shared(target)); }

// Waits until the barrier's phase of this parity has ended.
METAL_FUNC void msl_wait_for_phase(threadgroup const ulong* barrier, uint parity) {
  asm volatile(
      "{.reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1; @!over bra again;}"
      ::"r"(msl_shared(barrier)), "r"(parity)
      : "memory");
}

// Initialises two barriers for each stage: first those of all stages for loaded data, then those for released stages. A
// barrier of the thread block has to follow.
template <uint STAGES>
METAL_FUNC void msl_begin_stages(threadgroup ulong* barriers, uint thread_index) {
  if (thread_index == 0) {
    for (uint i = 0; i < 2 * STAGES; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(msl_shared(barriers + i)), "r"(i < STAGES ? 1 : MSL_NEIGHBOURS)
                   : "memory");
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
  }
  if (MSL_NEIGHBOURS > 1)
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Starts to fill a stage with `count` times sixteen bytes, at most CAPACITY; zero loads nothing. All threads call it,
// one issues the copy.
template <uint STAGES, uint THREADS, uint CAPACITY>
METAL_FUNC void msl_bring(threadgroup uint4* stage, device const uint4* block, uint count, threadgroup ulong* barrier,
                          uint round, uint thread_index) {
  if (thread_index != 0 || count == 0) return;
  if (round > 0) msl_wait_for_phase(barrier + STAGES, (round - 1) % 2);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(msl_shared(barrier)), "r"(16 * count) : "memory");
  constexpr uint PART = CAPACITY / MSL_NEIGHBOURS;
  uint rank = 0;
  if (MSL_NEIGHBOURS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint first = rank * PART;
  if (first >= count) return;
  const uint bytes = 16 * min(count - first, PART);
  const ushort every = (1 << MSL_NEIGHBOURS) - 1;
  if (MSL_NEIGHBOURS > 1)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(msl_shared(stage + first)), "l"(block + first), "r"(bytes), "r"(msl_shared(barrier)), "h"(every)
        : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(msl_shared(stage + first)), "l"(block + first), "r"(bytes), "r"(msl_shared(barrier))
                 : "memory");
}

// Waits until a block is loaded, for this thread, and after a barrier for all. NUM_LATER loads have been started since.
template <uint NUM_LATER>
METAL_FUNC void msl_wait_for_stage(threadgroup const ulong* barrier, uint round) {
  msl_wait_for_phase(barrier, round % 2);
}

// Releases a block: a barrier has ensured that all threads of the thread block are done with it. Only stages that are
// refilled may be released: then no writes arrive here after all blocks have.
template <uint STAGES>
METAL_FUNC void msl_free_stage(threadgroup const ulong* barrier, uint thread_index) {
  if (thread_index != 0) return;
  const uint own = msl_shared(barrier + STAGES);
  MSL_UNROLL
  for (uint rank = 0; rank < MSL_NEIGHBOURS; ++rank)
    asm volatile(
        "{.reg .b32 other; mapa.shared::cluster.u32 other, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [other];}" ::"r"(own),
        "r"(rank)
        : "memory");
}
#else
template <uint STAGES>
METAL_FUNC void msl_begin_stages(threadgroup ulong*, uint) {}
// Each thread copies a part of the block; its copies form a group.
template <uint STAGES, uint THREADS, uint CAPACITY>
METAL_FUNC void msl_bring(threadgroup uint4* stage, device const uint4* block, uint count, threadgroup ulong*, uint,
                          uint thread_index) {
  MSL_UNROLL
  for (uint first = 0; first < CAPACITY; first += THREADS)
    if (first + thread_index < count) msl_copy(stage + first + thread_index, block + first + thread_index);
  msl_end_group();
}
template <uint NUM_LATER>
METAL_FUNC void msl_wait_for_stage(threadgroup const ulong*, uint) {
  msl_wait_for_groups<int(NUM_LATER)>();
}
template <uint STAGES>
METAL_FUNC void msl_free_stage(threadgroup const ulong*, uint) {}
#endif
}  // namespace metal
