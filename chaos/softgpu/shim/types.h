// Vector types, with CUDA's alignment.
#define SOFTGPU_VECTORS(base, T, a2, a4) \
    struct base##1 { T x; }; \
    struct alignas(a2) base##2 { T x, y; }; \
    struct base##3 { T x, y, z; }; \
    struct alignas(a4) base##4 { T x, y, z, w; }; \
    inline base##1 make_##base##1(T x) { return {x}; } \
    inline base##2 make_##base##2(T x, T y) { return {x, y}; } \
    inline base##3 make_##base##3(T x, T y, T z) { return {x, y, z}; } \
    inline base##4 make_##base##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SOFTGPU_VECTORS(char, signed char, 2, 4)
SOFTGPU_VECTORS(uchar, unsigned char, 2, 4)
SOFTGPU_VECTORS(short, short, 4, 8)
SOFTGPU_VECTORS(ushort, unsigned short, 4, 8)
SOFTGPU_VECTORS(int, int, 8, 16)
SOFTGPU_VECTORS(uint, unsigned, 8, 16)
SOFTGPU_VECTORS(longlong, long long, 16, 16)
SOFTGPU_VECTORS(ulonglong, unsigned long long, 16, 16)
SOFTGPU_VECTORS(float, float, 8, 16)
SOFTGPU_VECTORS(double, double, 16, 16)
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
