// Numbers of 4 bits of exponent and 3 of mantissa, up to 448, without infinities. Shared by the sources that round to them or read them.
struct e4m3 { unsigned char bits; };

// Rounds to nearest even; larger numbers become 448.
__device__ __forceinline__ unsigned e4m3_of(float x) {
    const unsigned u = __float_as_uint(x), magnitude = u & 0x7fffffffu;
    // Below 2^-6 numbers are multiples of 2^-9: the last bit of numbers near 2^14.
    const unsigned small = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) & 0xffu;
    const unsigned normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    unsigned code = magnitude < 0x3c800000u ? small : normal - (120u << 3);
    if (code > 0x7eu) code = 0x7eu;
    if (magnitude > 0x7f800000u) code = 0x7fu;
    return code | (u >> 24 & 0x80u);
}
// Four of them, the first in the lowest bits.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
#if !defined(PHALANX_INTRINSICS) && __CUDA_ARCH__ >= 890
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | unsigned(high) << 16;
#else
    return e4m3_of(a) | e4m3_of(b) << 8 | e4m3_of(c) << 16 | e4m3_of(d) << 24;
#endif
}
// The number of these 8 bits: its exponent as if it had the bias of f32, times the difference.
__device__ __forceinline__ float of_e4m3(unsigned bits) {
    const float magnitude = (bits & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float((bits & 0x7fu) << 20) * __uint_as_float(247u << 23);
    return bits & 0x80u ? -magnitude : magnitude;
}
