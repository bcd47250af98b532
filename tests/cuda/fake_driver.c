// A driver without a GPU behind it: what NVIDIA's says up to the point where something is missing.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 12080
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef CAPABILITY
#define CAPABILITY 90
#endif
#ifndef ALLOCATE
#define ALLOCATE 0
#endif
#ifndef LAUNCH
#define LAUNCH 0
#endif

typedef int Result;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, LAUNCH_FAILED = 719 };

Result cuDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
Result cuInit(unsigned flags) { return INIT; }
Result cuGetErrorName(Result error, const char **name) {
    *name = error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}
Result cuGetErrorString(Result error, const char **text) {
    *text = error == NO_DEVICE ? "no CUDA-capable device is detected" : error == OUT_OF_MEMORY ? "out of memory" : "unknown error";
    return SUCCESS;
}

Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetName(char *name, int len, int device) { strncpy(name, "Fake GPU", (size_t)len); return SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    enum { MAJOR = 75, MINOR = 76, SHARED_MEMORY = 97 };
    *value = attribute == MAJOR ? CAPABILITY / 10 : attribute == MINOR ? CAPABILITY % 10
           : attribute == SHARED_MEMORY ? 227 << 10 : 1;
    return SUCCESS;
}

static int handle;
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &handle; return SUCCESS; }
Result cuCtxSetCurrent(void *context) { return SUCCESS; }
Result cuStreamCreate(void **stream, unsigned flags) { *stream = &handle; return SUCCESS; }
Result cuStreamSynchronize(void *stream) { return SUCCESS; }
Result cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = (size_t)80 << 30; return SUCCESS; }
Result cuMemAlloc_v2(unsigned long long *at, size_t len) { *at = 256; return ALLOCATE; }
Result cuMemFree_v2(unsigned long long at) { return SUCCESS; }
Result cuMemsetD8Async(unsigned long long at, unsigned char value, size_t len, void *stream) { return SUCCESS; }
Result cuMemcpyHtoDAsync_v2(unsigned long long at, const void *from, size_t len, void *stream) { return SUCCESS; }
Result cuMemcpyDtoHAsync_v2(void *to, unsigned long long at, size_t len, void *stream) { memset(to, 0, len); return SUCCESS; }
Result cuEventCreate(void **event, unsigned flags) { *event = &handle; return SUCCESS; }
Result cuEventRecord(void *event, void *stream) { return SUCCESS; }
Result cuEventSynchronize(void *event) { return SUCCESS; }

// What was queued is written to a file at the end, if one is named.
static int num_launches, num_nodes, num_graphs, num_replays, num_replaced;
Result cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  num_launches++;
  return LAUNCH;
}
Result cuGraphCreate(void **graph, unsigned flags) { *graph = &handle; num_nodes = 0; return SUCCESS; }
Result cuGraphAddNode_v2(void **node, void *graph, void *const *before, const void *edges, size_t count, void *parameters) {
  *node = (char *)&handle + ++num_nodes;
  return count == (num_nodes > 1) && (count == 0 || (char *)*before + 1 == (char *)*node) ? SUCCESS : 1;
}
Result cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { *exec = &handle; num_graphs++; return SUCCESS; }
Result cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const void *parameters) { num_replaced++; return SUCCESS; }
Result cuGraphLaunch(void *exec, void *stream) { num_replays++; return SUCCESS; }
Result cuGraphExecDestroy(void *exec) { return SUCCESS; }
Result cuGraphDestroy(void *graph) { return SUCCESS; }
__attribute__((destructor)) static void write_counts(void) {
  const char *path = getenv("FAKE_DRIVER_COUNTS");
  FILE *file = path ? fopen(path, "w") : NULL;
  if (file == NULL) return;
  fprintf(file, "%d %d %d %d %d\n", num_launches, num_nodes, num_graphs, num_replays, num_replaced);
  fclose(file);
}
Result cuModuleLoadData(void **module, const void *image) { *module = &handle; return SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = &handle; return SUCCESS; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 512; return SUCCESS; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
