// What a compiled kernel source, the run time and the host say to each other. The host's side is
// `emulator/object.rs`.
#pragma once
#include "built_ins.hpp"

extern "C" {
// A parameter of a kernel; the last of a list has kind -1. Only a reference has a size.
struct MslParameter {
  int kind, index;
  unsigned long size;
};
struct MslKernel {
  const char* name;
  void (*enter)();
  const MslParameter* parameters;
};
struct MslConstant {
  int index;
  unsigned long size;
  void* address;
};
extern const MslKernel msl_kernels[];
extern const MslConstant msl_constants[];

// What the lanes of a simdgroup give to each other in one operation. The first lane that needs a result of
// all computes it for the others.
enum { MSL_SLOT = 64 };
struct MslExchange {
  unsigned active;
  bool has_result;
  alignas(16) char result[MSL_SLOT];
  alignas(16) char slots[32][MSL_SLOT];
};

// The planted defect that shows in the launch, by its number; -1 if none does.
extern __attribute__((visibility("hidden"))) long msl_defect;

enum { MSL_SHUFFLE = 3, MSL_REDUCTION, MSL_SCAN, MSL_VOTE, MSL_MATRIX };
enum { MSL_INACTIVE_LANE, MSL_NO_SUCH_LANE, MSL_PARTIAL_MATRIX };

// Convergent, as Apple's are: a loop with one of these gets no remainder when it is unrolled.
#define MSL_CONVERGENT __attribute__((convergent))
MSL_CONVERGENT void msl_threadgroup_barrier(int flags, int site, int line);
MSL_CONVERGENT void msl_simdgroup_barrier(int flags, int site, int line);
// Waits until all lanes have given their value.
MSL_CONVERGENT MslExchange* msl_exchange(const void* value, int size, int operation, int line);
int msl_lane();
void* msl_threadgroup_variable(int site, unsigned long size, int alignment);
void* msl_argument_pointer(int position);
unsigned msl_argument_value(int position, int component);
[[noreturn]] void msl_fail(int what, int line);
}
