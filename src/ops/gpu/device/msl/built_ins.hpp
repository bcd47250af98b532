// The numbers that the rewriter gives to kinds of parameters and to built-in values, in the order of its
// table.
#pragma once

enum { MSL_BUFFER = 0, MSL_THREADGROUP = 1, MSL_BUILT_IN = 2 };

enum {
  MSL_THREAD_IN_GRID,
  MSL_THREAD_IN_THREADGROUP,
  MSL_THREADGROUP_IN_GRID,
  MSL_THREADGROUPS_PER_GRID,
  MSL_THREADS_PER_GRID,
  MSL_THREADS_PER_THREADGROUP,
  MSL_THREAD_INDEX,
  MSL_LANE,
  MSL_SIMDGROUP,
  MSL_SIMDGROUPS,
  MSL_SIMD_WIDTH,
  MSL_EXECUTION_WIDTH,
};
