// The types and instructions that the kernels' prelude wraps in inline PTX, by the layouts that the PTX manual gives.
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
inline float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline bf16 to_bf16(float x) {
    unsigned u = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {(unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline float to_float(f16 x) {
    unsigned sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 0x3ff;
    if (exponent == 0) { float v = float(mantissa) * 5.9604644775390625e-8f; return __uint_as_float(sign | __float_as_uint(v)); }
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline f16 to_f16(float x) {
    if (x != x) return {0x7fff};
    unsigned u = __float_as_uint(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude >= 0x477ff000u) return {(unsigned short)(sign | 0x7c00)}; // rounds to at least 2^16
    if (magnitude < 0x38800000u) return {(unsigned short)(sign | (unsigned)nearbyintf(__uint_as_float(magnitude) * 16777216.0f))};
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return {(unsigned short)(sign | ((magnitude >> 13) - (112 << 10)))};
}
inline unsigned pack_bf16(float low, float high) { return to_bf16(low).bits | unsigned(to_bf16(high).bits) << 16; }
inline unsigned pack_f16(float low, float high) { return to_f16(low).bits | unsigned(to_f16(high).bits) << 16; }
inline float fast_exp2(float x) { return exp2f(x); }
inline float fast_log2(float x) { return log2f(x); }
// Kernels start in order.
inline void wait_for_predecessor() {}
inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

namespace softgpu {
inline void check(const char* what, const void* p, size_t align, bool in_shared) {
    if (size_t(p) % align) fail(MISALIGNED, "%s of an address that is not a multiple of %zu", what, align);
    if (in_shared && !is_shared(p)) fail(INVALID_SPACE, "%s of an address outside of shared memory", what);
}
struct Mma { float* d; const unsigned *a, *b; };
// D += A B of one warp: A [16, K] by rows, B [K, 8] by columns, sums in f32 in the order of k.
template <int K> inline void multiply(Mma** all, const float (&A)[16][K], const float (&B)[K][8]) {
    float S[16][8] = {};
    for (int r = 0; r < 16; r++) for (int k = 0; k < K; k++) for (int c = 0; c < 8; c++) S[r][c] += A[r][k] * B[k][c];
    for (int l = 0; l < 32; l++) for (int i = 0; i < 4; i++) all[l]->d[i] += S[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
}
template <class T> inline void mma_16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    Mma m{d, a, b};
    warp_op(~0u, &m, [](Mma** all) {
        float A[16][16], B[16][8];
        auto half = [](unsigned v, int h) { return to_float(T{(unsigned short)(v >> 16 * h)}); };
        for (int l = 0; l < 32; l++) {
            if (!all[l]) return; // a warp that is not whole: undefined
            int g = l / 4, t = l % 4;
            for (int h = 0; h < 2; h++) {
                for (int i = 0; i < 4; i++) A[g + i % 2 * 8][2 * t + i / 2 * 8 + h] = half(all[l]->a[i], h);
                for (int i = 0; i < 2; i++) B[2 * t + i * 8 + h][g] = half(all[l]->b[i], h);
            }
        }
        multiply<16>(all, A, B);
    });
}
// Lane l names row l % 8 of matrix l / 8 % N; each lane gets two neighbours of row lane / 4 of each matrix.
template <int N, bool TRANSPOSED> inline void load_matrices(unsigned (&r)[N], const void* row) {
    struct L { unsigned* r; const void* row; } x{r, row};
    if (lane() < 8 * N) check("ldmatrix", row, 16, true);
    warp_op(~0u, &x, [](L** all) {
        for (int l = 0; l < 32; l++) for (int m = 0; m < N; m++) {
            auto at = [&](int i, int j) -> unsigned { return all[8 * m + i] ? ((const unsigned short*)all[8 * m + i]->row)[j] : 0xffff; };
            int i = l / 4, j = l % 4 * 2;
            if (all[l]) all[l]->r[m] = TRANSPOSED ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
        }
    });
}
template <int N, bool TRANSPOSED> inline void store_matrices(const unsigned (&r)[N], void* row) {
    struct L { const unsigned* r; void* row; } x{r, row};
    if (lane() < 8 * N) check("stmatrix", row, 16, true);
    warp_op(~0u, &x, [](L** all) {
        for (int l = 0; l < 32; l++) for (int m = 0; m < N; m++) for (int h = 0; h < 2; h++) {
            int i = l / 4, j = l % 4 * 2 + h;
            if (all[l]) ((unsigned short*)all[8 * m + (TRANSPOSED ? j : i)]->row)[TRANSPOSED ? i : j] = (unsigned short)(all[l]->r[m] >> 16 * h);
        }
    });
}
// A butterfly over each N neighbouring lanes as one operation of the warp, with the bits of its exchanges one after another.
template <int N, class T, class F> inline T butterfly(T v, F) {
    struct R { T v; } r{v};
    warp_op(~0u, &r, [](R** all) {
        T old[WARP];
        for (int l = 0; l < 32; l++) if (!all[l]) return; // a warp that is not whole: undefined
        for (int by = N / 2; by; by >>= 1) {
            for (int l = 0; l < 32; l++) old[l] = all[l]->v;
            for (int l = 0; l < 32; l++) all[l]->v = (*(F*)nullptr)(old[l], old[l ^ by]);
        }
    });
    return r.v;
}
// Nothing arrives before it is waited for, and until then the place is poison.
inline void copy_async(void* to, const void* from, unsigned size, unsigned bytes) {
    check("cp.async", to, size, true);
    check("cp.async", from, size, false);
    memset(to, 0xff, size);
    block()->now->copies.push({to, from, bytes, size - bytes, false});
}
}
// Sums of bf16 products; with a leading argument, the type that it has.
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { softgpu::mma_16<bf16>(d, a, b); }
inline void mma_m16n8k16(bf16, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { softgpu::mma_16<bf16>(d, a, b); }
inline void mma_m16n8k16(f16, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { softgpu::mma_16<f16>(d, a, b); }
// tf32: f32 whose low 13 bits do not count.
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    softgpu::Mma m{d, a, b};
    softgpu::warp_op(~0u, &m, [](softgpu::Mma** all) {
        float A[16][8], B[8][8];
        auto tf32 = [](unsigned v) { return __uint_as_float(v & 0xffffe000u); };
        for (int l = 0; l < 32; l++) {
            if (!all[l]) return;
            int g = l / 4, t = l % 4;
            for (int i = 0; i < 4; i++) A[g + i % 2 * 8][t + i / 2 * 4] = tf32(all[l]->a[i]);
            for (int i = 0; i < 2; i++) B[t + i * 4][g] = tf32(all[l]->b[i]);
        }
        softgpu::multiply<8>(all, A, B);
    });
}
template <int N, class T> inline T lane_sum(T v) { return softgpu::butterfly<N>(v, [](T a, T b) { return a + b; }); }
template <int N> inline float lane_max(float v) { return softgpu::butterfly<N>(v, [](float a, float b) { return fmaxf(a, b); }); }
inline unsigned to_tf32(float x) { unsigned u = __float_as_uint(x); return x != x ? 0x7fffffffu : (u + 0x1000u) & 0xffffe000u; }
template <bool TRANSPOSED = false> inline void ldmatrix_x1(unsigned (&r)[1], const void* row) { softgpu::load_matrices<1, TRANSPOSED>(r, row); }
template <bool TRANSPOSED = false> inline void ldmatrix_x2(unsigned (&r)[2], const void* row) { softgpu::load_matrices<2, TRANSPOSED>(r, row); }
template <bool TRANSPOSED = false> inline void ldmatrix_x4(unsigned (&r)[4], const void* row) { softgpu::load_matrices<4, TRANSPOSED>(r, row); }
template <bool TRANSPOSED = false> inline void stmatrix_x1(void* row, const unsigned (&r)[1]) { softgpu::store_matrices<1, TRANSPOSED>(r, row); }
template <bool TRANSPOSED = false> inline void stmatrix_x2(void* row, const unsigned (&r)[2]) { softgpu::store_matrices<2, TRANSPOSED>(r, row); }
template <bool TRANSPOSED = false> inline void stmatrix_x4(void* row, const unsigned (&r)[4]) { softgpu::store_matrices<4, TRANSPOSED>(r, row); }
// Only the first `bytes` come from memory, the rest is zeros.
inline void cp_async_16(void* to, const void* from, int bytes = 16) { softgpu::copy_async(to, from, 16, bytes); }
inline void cp_async_8(void* to, const void* from, int bytes = 8) { softgpu::copy_async(to, from, 8, bytes); }
inline void cp_async_4(void* to, const void* from, int bytes = 4) { softgpu::copy_async(to, from, 4, bytes); }
inline void cp_async_commit() { softgpu::block()->now->copies.push({nullptr, nullptr, 0, 0, true}); }
template <int PENDING> inline void cp_async_wait() {
    auto& copies = softgpu::block()->now->copies;
    int groups = 0;
    unsigned end = 0;
    for (unsigned i = 0; i < copies.n; i++) groups += copies.at[i].is_commit;
    for (int done = 0; end < copies.n && done < groups - PENDING; end++) {
        auto& c = copies.at[end];
        if (c.is_commit) { done++; continue; }
        memcpy(c.to, c.from, c.bytes);
        memset((char*)c.to + c.bytes, 0, c.zeros);
    }
    memmove(copies.at, copies.at + end, (copies.n - end) * sizeof *copies.at);
    copies.n -= end;
}
