// A run-time compiler that makes something of every program.
#include <stddef.h>
#include <string.h>

typedef int Result;

Result nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 9; return 0; }
Result nvrtcGetNumSupportedArchs(int *count) { *count = 1; return 0; }
Result nvrtcGetSupportedArchs(int *architectures) { *architectures = 90; return 0; }
Result nvrtcCreateProgram(void **program, const char *text, const char *name, int count, const char **headers, const char **names) { return 0; }
Result nvrtcCompileProgram(void *program, int count, const char **options) { return 0; }
Result nvrtcGetProgramLogSize(void *program, size_t *len) { *len = 1; return 0; }
Result nvrtcGetProgramLog(void *program, char *log) { *log = 0; return 0; }
Result nvrtcGetCUBINSize(void *program, size_t *len) { *len = 4; return 0; }
Result nvrtcGetCUBIN(void *program, char *image) { memcpy(image, "fake", 4); return 0; }
Result nvrtcGetPTXSize(void *program, size_t *len) { *len = 0; return 0; }
Result nvrtcGetPTX(void *program, char *image) { return 0; }
Result nvrtcDestroyProgram(void **program) { return 0; }
