// Atomic operations on memory of the device.
namespace softgpu {
template <class T> struct Word { using type = unsigned long long; };
template <> struct Word<float> { using type = unsigned; };
template <class T, class F> inline T update(T* p, F f) {
    using W = typename Word<T>::type;
    W* at = (W*)p;
    W old = __atomic_load_n(at, __ATOMIC_RELAXED), neu;
    T value;
    do {
        memcpy(&value, &old, sizeof value);
        T changed = f(value);
        memcpy(&neu, &changed, sizeof neu);
    } while (!__atomic_compare_exchange_n(at, &old, neu, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return value;
}
template <class T, class F> inline T update_int(T* p, F f) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, T(f(old)), true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
}
inline float atomicAdd(float* p, float v) { return softgpu::update(p, [=](float x) { return x + v; }); }
inline double atomicAdd(double* p, double v) { return softgpu::update(p, [=](double x) { return x + v; }); }
#define SOFTGPU_ATOMICS(T) \
    inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicSub(T* p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicMin(T* p, T v) { return softgpu::update_int(p, [=](T x) { return x < v ? x : v; }); } \
    inline T atomicMax(T* p, T v) { return softgpu::update_int(p, [=](T x) { return x > v ? x : v; }); } \
    inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
    inline T atomicCAS(T* p, T expected, T v) { \
        T old = expected; \
        if (!__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) softgpu::pause(); \
        return old; \
    }
SOFTGPU_ATOMICS(int)
SOFTGPU_ATOMICS(unsigned)
SOFTGPU_ATOMICS(long long)
SOFTGPU_ATOMICS(unsigned long long)
inline unsigned short atomicCAS(unsigned short* p, unsigned short expected, unsigned short v) {
    unsigned short old = expected;
    if (!__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) softgpu::pause();
    return old;
}
inline float atomicExch(float* p, float v) { return softgpu::update(p, [=](float) { return v; }); }
inline unsigned atomicInc(unsigned* p, unsigned most) { return softgpu::update_int(p, [=](unsigned x) { return x >= most ? 0 : x + 1; }); }
inline unsigned atomicDec(unsigned* p, unsigned most) { return softgpu::update_int(p, [=](unsigned x) { return x == 0 || x > most ? most : x - 1; }); }
// Wider scopes: all are as wide as the machine here.
template <class T> inline T atomicAdd_block(T* p, T v) { return atomicAdd(p, v); }
template <class T> inline T atomicAdd_system(T* p, T v) { return atomicAdd(p, v); }
template <class T> inline T atomicExch_system(T* p, T v) { return atomicExch(p, v); }
template <class T> inline T atomicCAS_system(T* p, T expected, T v) { return atomicCAS(p, expected, v); }
