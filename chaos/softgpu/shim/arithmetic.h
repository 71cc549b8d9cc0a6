// Arithmetic that CUDA has and C++ has not. Functions that name a rounding are never contracted with their neighbours.
using std::isfinite; using std::isinf; using std::isnan; using std::signbit;
namespace softgpu {
template <class T> inline T keep(T v) { asm("" : "+x"(v)); return v; }
template <class To, class From> inline To bits(From v) { static_assert(sizeof(To) == sizeof(From)); To to; memcpy(&to, &v, sizeof to); return to; }
template <class To> inline To clamp(double v) {
    if (v != v) return 0;
    const double low = double(To(-1) < To(0) ? To(1ull << (8 * sizeof(To) - 1)) : To(0)), high = double(To(-1) < To(0) ? To((1ull << (8 * sizeof(To) - 1)) - 1) : To(-1));
    return v <= low ? To(low) : v >= high ? (To(-1) < To(0) ? To((1ull << (8 * sizeof(To) - 1)) - 1) : To(-1)) : To(v);
}
}
// As in CUDA, the arguments may have different types, and a NaN loses against a number.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
template <class A, class B> constexpr auto max(A a, B b) -> decltype(a + b) { decltype(a + b) x = a, y = b; return x < y ? y : x; }
template <class A, class B> constexpr auto min(A a, B b) -> decltype(a + b) { decltype(a + b) x = a, y = b; return y < x ? y : x; }

#define SOFTGPU_ROUNDED(name, T, params, expression) inline T name params { return softgpu::keep<T>(expression); }
SOFTGPU_ROUNDED(__fadd_rn, float, (float a, float b), a + b)
SOFTGPU_ROUNDED(__fsub_rn, float, (float a, float b), a - b)
SOFTGPU_ROUNDED(__fmul_rn, float, (float a, float b), a * b)
SOFTGPU_ROUNDED(__fdiv_rn, float, (float a, float b), a / b)
SOFTGPU_ROUNDED(__frcp_rn, float, (float a), 1.0f / a)
SOFTGPU_ROUNDED(__fsqrt_rn, float, (float a), sqrtf(a))
SOFTGPU_ROUNDED(__frsqrt_rn, float, (float a), float(1.0 / sqrt(double(a))))
SOFTGPU_ROUNDED(__fmaf_rn, float, (float a, float b, float c), fmaf(a, b, c))
SOFTGPU_ROUNDED(__dadd_rn, double, (double a, double b), a + b)
SOFTGPU_ROUNDED(__dsub_rn, double, (double a, double b), a - b)
SOFTGPU_ROUNDED(__dmul_rn, double, (double a, double b), a * b)
SOFTGPU_ROUNDED(__ddiv_rn, double, (double a, double b), a / b)
SOFTGPU_ROUNDED(__drcp_rn, double, (double a), 1.0 / a)
SOFTGPU_ROUNDED(__dsqrt_rn, double, (double a), sqrt(a))
SOFTGPU_ROUNDED(__fma_rn, double, (double a, double b, double c), fma(a, b, c))
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float exp10f(float x, int = 0) { return powf(10.0f, x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x != x ? 0.0f : x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }

inline float __uint_as_float(unsigned x) { return softgpu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return softgpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return softgpu::bits<float>(x); }
inline int __float_as_int(float x) { return softgpu::bits<int>(x); }
inline double __longlong_as_double(long long x) { return softgpu::bits<double>(x); }
inline long long __double_as_longlong(double x) { return softgpu::bits<long long>(x); }
inline double __hiloint2double(int high, int low) { return softgpu::bits<double>((unsigned long long)(unsigned)high << 32 | (unsigned)low); }
inline int __double2hiint(double x) { return int(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return int(__double_as_longlong(x)); }
inline int __float2int_rn(float x) { return softgpu::clamp<int>(nearbyint(double(x))); }
inline int __float2int_rz(float x) { return softgpu::clamp<int>(trunc(double(x))); }
inline int __float2int_rd(float x) { return softgpu::clamp<int>(floor(double(x))); }
inline int __float2int_ru(float x) { return softgpu::clamp<int>(ceil(double(x))); }
inline unsigned __float2uint_rn(float x) { return softgpu::clamp<unsigned>(nearbyint(double(x))); }
inline unsigned __float2uint_rz(float x) { return softgpu::clamp<unsigned>(trunc(double(x))); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline double __int2double_rn(int x) { return double(x); }
inline double __uint2double_rn(unsigned x) { return double(x); }

inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i); return r; }
inline unsigned long long __brevll(unsigned long long x) { return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32)); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    unsigned long long all = (unsigned long long)y << 32 | x; unsigned r = 0;
    for (int i = 0; i < 4; i++) { unsigned n = s >> 4 * i & 15, v = unsigned(all >> 8 * (n & 7)) & 255; if (n & 8) v = v & 128 ? 255 : 0; r |= v << 8 * i; }
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { by &= 31; return by ? high << by | low >> (32 - by) : high; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { by &= 31; return by ? low >> by | high << (32 - by) : low; }
inline long long clock64() { return (long long)__builtin_ia32_rdtsc(); }
inline int clock() { return int(clock64()); }
inline unsigned long long __globaltimer() { return __builtin_ia32_rdtsc(); }

// Loads and stores with a hint for the cache.
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stwb(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
inline size_t __cvta_generic_to_shared(const void* p) { return size_t((const char*)p - softgpu::block()->dynamic); }
inline unsigned __isShared(const void* p) { return softgpu::is_shared(p); }
inline unsigned __isGlobal(const void* p) { return !softgpu::is_shared(p); }
#define __builtin_assume(x) ((void)0)
