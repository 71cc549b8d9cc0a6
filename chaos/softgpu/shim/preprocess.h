// What a kernel's source may ask the preprocessor. Included in front of the unchanged source while it is preprocessed;
// softgpu.h follows for the compilation of the result.
#define SOFTGPU 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
// The instructions that the prelude wraps in inline PTX come from prelude.h.
#define PHALANX_INTRINSICS 1
#define DYNAMIC_SHARED(T, name) T* name = (T*)softgpu::dynamic_shared()
