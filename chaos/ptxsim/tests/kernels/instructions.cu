// Functions of the language, element by element, for comparison with the host.
extern "C" __global__ void math_f32(const float* __restrict__ x, float* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i], p = fabsf(a) + 0.01f;
    float* o = y + i * 16;
    o[0] = sinf(a * 100.0f); o[1] = cosf(a * 1e6f); o[2] = expf(a * 20.0f); o[3] = logf(p);
    o[4] = powf(p, a * 3.0f); o[5] = tanhf(a * 2.0f); o[6] = erff(a); o[7] = a / p;
    o[8] = sqrtf(p); o[9] = rsqrtf(p); o[10] = fmaf(a, a, -p); o[11] = rintf(a * 37.0f);
    o[12] = floorf(a * 37.0f); o[13] = fmodf(a * 37.0f, p); o[14] = cbrtf(a); o[15] = (float)(int)(a * 1e3f);
}
extern "C" __global__ void math_f64(const double* __restrict__ x, double* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double a = x[i], p = fabs(a) + 0.01;
    double* o = y + i * 8;
    o[0] = sin(a * 1e6); o[1] = exp(a * 20.0); o[2] = log(p); o[3] = pow(p, a * 3.0);
    o[4] = a / p; o[5] = sqrt(p); o[6] = rsqrt(p); o[7] = fma(a, a, -p);
}
extern "C" __global__ void integers(const unsigned* __restrict__ x, unsigned long long* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned a = x[i], b = x[(i + 1) % n] | 1;
    int sa = (int)a, sb = (int)b;
    unsigned long long w = (unsigned long long)a << 32 | b;
    unsigned long long* o = y + i * 24;
    o[0] = a / b; o[1] = (unsigned)(sa / sb); o[2] = a % b; o[3] = (unsigned)(sa % sb);
    o[4] = w / (b >> 7 | 1); o[5] = (unsigned long long)((long long)w / (sb >> 3 | 1)); o[6] = w % (b >> 9 | 1); o[7] = __umulhi(a, b);
    o[8] = (unsigned)__mulhi(sa, sb); o[9] = __umul64hi(w, w ^ a); o[10] = __popc(a); o[11] = __clz(a >> (b & 31));
    o[12] = __brev(a); o[13] = __byte_perm(a, b, a & 0x7777); o[14] = __funnelshift_l(a, b, a); o[15] = __funnelshift_r(a, b, b);
    unsigned field, inserted, signed_field;
    asm("bfe.u32 %0, %1, %2, %3;" : "=r"(field) : "r"(a), "r"(b & 31), "r"(a & 31));
    asm("bfe.s32 %0, %1, %2, %3;" : "=r"(signed_field) : "r"(a), "r"(b & 31), "r"(a & 31));
    asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(inserted) : "r"(a), "r"(b), "r"(b & 31), "r"(a & 31));
    o[16] = field; o[17] = signed_field; o[18] = inserted; o[19] = __dp4a(sa, sb, 7) & 0xffffffffu;
    o[20] = (unsigned)(sa >> (b & 31)); o[21] = a >> (b & 31); o[22] = (unsigned)__clzll(w >> (a & 63)); o[23] = (unsigned)__ffs(a);
}
// Each warp's votes, shuffles and reductions.
extern "C" __global__ void collectives(const unsigned* __restrict__ x, unsigned* __restrict__ y) {
    unsigned lane = threadIdx.x, a = x[lane];
    unsigned* o = y + lane * 12;
    o[0] = __shfl_sync(~0u, a, 5); o[1] = __shfl_up_sync(~0u, a, 3); o[2] = __shfl_down_sync(~0u, a, 7); o[3] = __shfl_xor_sync(~0u, a, 9);
    o[4] = __shfl_down_sync(~0u, a, 3, 8); o[5] = __shfl_sync(~0u, a, 11, 16); o[6] = __ballot_sync(~0u, a & 1); o[7] = __match_any_sync(~0u, a & 3);
    o[8] = __reduce_add_sync(~0u, a); o[9] = __reduce_max_sync(~0u, a); o[10] = __any_sync(~0u, a > 0xf0000000u); o[11] = __reduce_min_sync(~0u, (int)a);
}
// Sums by atomics of every kind, 96 threads.
extern "C" __global__ void atomics(unsigned* u, float* f, double* d, unsigned long long* w) {
    __shared__ unsigned s[2];
    unsigned t = threadIdx.x;
    if (t < 2) s[t] = 0;
    __syncthreads();
    atomicAdd(&s[0], t); atomicMax(&s[1], t * 7 % 96);
    atomicAdd(u, 1u); atomicMin(u + 1, t + 5); atomicMax((int*)u + 2, (int)t - 50); atomicOr(u + 3, 1u << t % 32); atomicInc(u + 4, 40); atomicExch(u + 5, 9u);
    atomicAdd(f, 0.5f); atomicAdd(d, 0.25); atomicAdd(w, 1ull << 33);
    unsigned old = u[6 + t / 96 * 0 + 0] * 0, assumed;
    do { assumed = old; old = atomicCAS(u + 7, assumed, assumed + t); } while (old != assumed);
    __syncthreads();
    if (t < 2) u[8 + t] = s[t];
    int n = __syncthreads_count(t % 3 == 0);
    if (t == 0) u[10] = n;
    if (__syncthreads_or(t == 95) && !__syncthreads_and(t == 95) && t == 0) u[11] = 1;
}
// Arithmetic of 16 bits and conversions, by the instructions themselves.
extern "C" __global__ void halves(const float* __restrict__ x, unsigned* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i], b = x[(i + 1) % n];
    unsigned* o = y + i * 12;
    unsigned short ha, hb, hc, ba, bb, bc;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(ha) : "f"(a)); asm("cvt.rn.f16.f32 %0, %1;" : "=h"(hb) : "f"(b));
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(ba) : "f"(a)); asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bb) : "f"(b));
    o[0] = ha; o[1] = ba;
    asm("add.f16 %0, %1, %2;" : "=h"(hc) : "h"(ha), "h"(hb)); o[2] = hc;
    asm("mul.f16 %0, %1, %2;" : "=h"(hc) : "h"(ha), "h"(hb)); o[3] = hc;
    asm("fma.rn.f16 %0, %1, %2, %1;" : "=h"(hc) : "h"(ha), "h"(hb)); o[4] = hc;
    asm("fma.rn.bf16 %0, %1, %2, %1;" : "=h"(bc) : "h"(ba), "h"(bb)); o[5] = bc;
    asm("max.NaN.bf16 %0, %1, %2;" : "=h"(bc) : "h"(ba), "h"(bb)); o[6] = bc;
    unsigned pa, pb, pc;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pa) : "f"(a), "f"(b)); asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pb) : "f"(a), "f"(b));
    o[7] = pa; o[8] = pb;
    asm("fma.rn.f16x2 %0, %1, %1, %1;" : "=r"(pc) : "r"(pa)); o[9] = pc;
    float back; asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"(ha)); o[10] = __float_as_uint(back);
    o[11] = __float_as_uint(__fadd_rd(a, b)) ^ __float_as_uint(__fmul_ru(a, b)) ^ __float_as_uint(__fmaf_rz(a, b, a));
}
