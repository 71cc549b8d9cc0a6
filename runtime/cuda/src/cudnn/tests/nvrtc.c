// NVRTC that compiles nothing: planning wants a program of some bytes. Signatures are those of nvrtc.h, as far as they matter.
#include <stddef.h>
static const int archs[] = {75, 80, 86, 89, 90, 100, 103, 120};
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *n) { *n = 8; return 0; }
int nvrtcGetSupportedArchs(int *to) { for (int i = 0; i < 8; i++) to[i] = archs[i]; return 0; }
int nvrtcCreateProgram(void **program) { *program = program; return 0; }
int nvrtcDestroyProgram() { return 0; }
int nvrtcCompileProgram() { return 0; }
int nvrtcGetCUBINSize(void *program, size_t *n) { *n = 64; return 0; }
int nvrtcGetCUBIN() { return 0; }
int nvrtcGetPTXSize(void *program, size_t *n) { *n = 64; return 0; }
int nvrtcGetPTX() { return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *n) { *n = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *to) { *to = 0; return 0; }
int nvrtcAddNameExpression() { return 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **to) { *to = name; return 0; }
const char *nvrtcGetErrorString() { return "none"; }
int nvrtcGetLTOIRSize(void *program, size_t *n) { *n = 64; return 0; }
int nvrtcGetLTOIR() { return 0; }
int nvrtcGetOptiXIRSize(void *program, size_t *n) { *n = 64; return 0; }
int nvrtcGetOptiXIR() { return 0; }
int nvrtcSetFlowCallback() { return 0; }
int nvrtcGetPCHCreateStatus() { return 0; }
int nvrtcGetPCHHeapSize(size_t *n) { *n = 0; return 0; }
int nvrtcGetPCHHeapSizeRequired(void *program, size_t *n) { *n = 0; return 0; }
int nvrtcSetPCHHeapSize() { return 0; }
int __nvrtcCPEx() { return 0; }
