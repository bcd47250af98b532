// A driver without a GPU behind it: what NVIDIA's says up to the point where something is missing.
#include <stddef.h>
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
Result cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) { return LAUNCH; }
Result cuModuleLoadData(void **module, const void *image) { *module = &handle; return SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { *function = &handle; return SUCCESS; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 512; return SUCCESS; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
