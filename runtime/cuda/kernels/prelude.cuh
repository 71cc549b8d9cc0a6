// Types, conversions and instructions for which C++ has no word. Header-free: the run-time compiler needs no include path.
// Another PHALANX_INTRINSICS (that of the software GPU) brings its own versions of what is between the guards.
// The sum and the maximum over each N neighbouring lanes of a whole warp, at each of them; the sum along a fixed tree, so that every
// run has the same bits. Kernels call lane_sum and lane_max.
template <int N, class T> __device__ __forceinline__ T shuffled_sum(T v) {
    for (int by = N / 2; by; by >>= 1) v += __shfl_xor_sync(~0u, v, by);
    return v;
}
template <int N> __device__ __forceinline__ float shuffled_max(float v) {
    for (int by = N / 2; by; by >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, by));
    return v;
}
#ifndef PHALANX_INTRINSICS
#define DYNAMIC_SHARED(T, name) extern __shared__ __align__(1024) unsigned char name##_bytes[]; T* name = (T*)name##_bytes
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r; }
__device__ __forceinline__ bf16 to_bf16(float x) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }
__device__ __forceinline__ f16 to_f16(float x) { f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }
__device__ __forceinline__ unsigned pack_bf16(float low, float high) { unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ unsigned pack_f16(float low, float high) { unsigned r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
// What every kernel does before anything else. A kernel that is launched early may start before the one before it in its stream has
// ended; from here on that has ended, and so have all before that, for it did the same. Then the next one may start.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
// D += A B of one warp: A [16, 16] by rows, B [16, 8] by columns, sums in f32.
__device__ __forceinline__ void mma_m16n8k16(bf16, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(f16, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Lane l names row l % 8 of matrix l / 8; each lane gets two neighbours of row lane / 4 of each matrix.
template <bool TRANSPOSED = false> __device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    if (TRANSPOSED) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
    else asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// Copies 16 bytes; only the first `bytes` of them (0 or 16) from memory, zeros otherwise.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, int bytes = 16) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory"); }
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
template <int N, class T> __device__ __forceinline__ T lane_sum(T v) { return shuffled_sum<N>(v); }
template <int N> __device__ __forceinline__ float lane_max(float v) { return shuffled_max<N>(v); }
__device__ __forceinline__ float fast_exp2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float fast_log2(float x) { float r; asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
#endif

#ifndef INFINITY // a macro of a header that the run-time compiler does not have
#define INFINITY __int_as_float(0x7f800000)
#endif
__device__ __forceinline__ float to_float(float x) { return x; }
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return to_bf16(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return to_f16(x); }
__device__ __forceinline__ unsigned pack(bf16, float low, float high) { return pack_bf16(low, high); }
__device__ __forceinline__ unsigned pack(f16, float low, float high) { return pack_f16(low, high); }

template <class T> __device__ __forceinline__ T warp_sum(T v) { return lane_sum<32>(v); }
__device__ __forceinline__ float warp_max(float v) { return lane_max<32>(v); }
// Sum over a block of up to 1024 threads, a multiple of 32, at every thread.
template <class T> __device__ __forceinline__ T block_sum(T v) {
    __shared__ T parts[32];
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : T(0));
}
__device__ __forceinline__ float block_max(float v) {
    __shared__ float parts[32];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_max(threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : -INFINITY);
}
#define GRID_STRIDE(i, n) for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (long long)(n); i += (long long)gridDim.x * blockDim.x)
// The elements behind the last whole group of `width`, one for each of the first threads of the grid.
#define GRID_REST(i, n, width) if (long long i = (long long)(n) / (width) * (width) + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (long long)(n))

// Neighbouring elements that are loaded and stored 16 bytes at a time; their address is a multiple of 16 bytes, or of the
// size of all if that is less.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vector { T at[N]; };
template <int N, class T> __device__ __forceinline__ void load_vector(float (&to)[N], const T* from) {
    Vector<T, N> v = *(const Vector<T, N>*)from;
    for (int i = 0; i < N; i++) to[i] = to_float(v.at[i]);
}
template <int N> __device__ __forceinline__ Vector<float, N> vector_of(float, const float (&x)[N]) {
    Vector<float, N> v;
    for (int i = 0; i < N; i++) v.at[i] = x[i];
    return v;
}
// Pairs are converted by one instruction.
template <class T, int N> __device__ __forceinline__ Vector<T, N> vector_of(T, const float (&x)[N]) {
    Vector<T, N> v;
    for (int i = 0; i + 1 < N; i += 2) {
        unsigned both = pack(T(), x[i], x[i + 1]);
        v.at[i].bits = (unsigned short)both;
        v.at[i + 1].bits = (unsigned short)(both >> 16);
    }
    if (N % 2) v.at[N - 1] = from_float<T>(x[N - 1]);
    return v;
}
template <int N, class T> __device__ __forceinline__ void store_vector(T* to, const float (&from)[N]) {
    *(Vector<T, N>*)to = vector_of(T(), from);
}
