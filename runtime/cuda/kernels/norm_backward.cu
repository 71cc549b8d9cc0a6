// Adjoint of the norms. With z = x rstd, or (x - mean) rstd, and a = dy gain:
//   RMS:   dx = dx0 + a rstd - x rstd^3 mean(a x)
//   layer: dx = dx0 + rstd (a - mean(a) - z mean(a z))
//   dgain = sum over rows of dy z, dbias = sum over rows of dy.
//
// X, Y: element types of x, dx0 and dx, and of dy. V: neighbouring elements that a thread moves at once; divides cols. ITEMS:
// such vectors of each thread. LAYER: 1 for the layer norm, 0 for the RMS norm. AGAIN: 1 if y, the norm's own result, is written
// as well. NARROW: 1 if dx is also written in half width.
// x, dy, dx0, dx: [n, cols]; gain: [cols]; rstd, mean: [n]; parts: [gridDim.x, (1 + LAYER) cols], a block's share of the sums
// over rows: of dgain, then of dbias. dx0 is null, or may be the memory of dx. y: [n, cols]; it may be the memory of dy, of which a
// thread reads the elements that it overwrites, and no others. bias: [cols]; only a layer norm that writes y reads it. narrow:
// [n, cols]: dx for products in half width.
#if AGAIN
#define UNLESS_AGAIN
#else
#define UNLESS_AGAIN __restrict__
#endif

// The elements of a vector that was loaded before they are needed.
template <class T> __device__ __forceinline__ void to_floats(float (&to)[V], const Vector<T, V>& from) {
    for (int j = 0; j < V; j++) to[j] = to_float(from.at[j]);
}

// Sums over the block. Each turn uses the other half of the memory, so that one barrier is enough: a thread writes a half again
// only after the next turn's barrier, which all threads reach after they have read it.
__device__ __forceinline__ void sum_row(float (&sums)[1 + LAYER], int turn) {
    __shared__ float parts[2][1 + LAYER][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int k = 0; k <= LAYER; k++) {
        sums[k] = warp_sum(sums[k]);
        if (lane == 0) parts[turn][k][warp] = sums[k];
    }
    __syncthreads();
    for (int k = 0; k <= LAYER; k++) sums[k] = warp_sum(lane < blockDim.x / 32 ? parts[turn][k][lane] : 0.0f);
}

// Adds the terms of the row's sums.
__device__ __forceinline__ void add_terms(float (&sums)[1 + LAYER], const float (&x)[V], const float (&dy)[V], const float (&g)[V], float r, float m) {
    for (int j = 0; j < V; j++) {
        const float a = dy[j] * g[j];
        if (LAYER) sums[0] += a;
        sums[LAYER] = fmaf(a, LAYER ? (x[j] - m) * r : x[j], sums[LAYER]);
    }
}

// Turns x into dx, for the sums that `finish_sums` returns.
__device__ __forceinline__ void to_dx(float (&x)[V], const float (&dy)[V], const float (&g)[V], const float (&dx0)[V], const float (&sums)[1 + LAYER], float r, float m) {
    for (int j = 0; j < V; j++) {
        const float a = dy[j] * g[j];
        x[j] = dx0[j] + (LAYER ? r * (a - sums[0] - (x[j] - m) * r * sums[LAYER]) : a * r - x[j] * sums[0]);
    }
}

// RMS: rstd^3 mean(a x); layer: mean(a), mean(a z).
__device__ __forceinline__ void finish_sums(float (&sums)[1 + LAYER], float r, int cols) {
    if (LAYER) sums[0] = sums[0] / cols, sums[LAYER] = sums[LAYER] / cols;
    else sums[0] = sums[0] * r * r * r / cols;
}

// The norm's own result, with the bits that `norm.cu` gives it.
__device__ __forceinline__ void store_again(Y* y, const float (&x)[V], const float (&g)[V], const float* bias, float r, float m) {
    float v[V], b[V];
    if (LAYER) load_vector(b, bias);
    for (int j = 0; j < V; j++) v[j] = LAYER ? (x[j] - m) * r * g[j] + b[j] : x[j] * r * g[j];
    store_vector(y, v);
}

struct Row {
    Vector<X, V> x[ITEMS];
    Vector<Y, V> dy[ITEMS];
    float r, m;
};

__device__ __forceinline__ void load_row(Row& to, const X* __restrict__ x, const Y* UNLESS_AGAIN dy, const float* __restrict__ rstd, const float* __restrict__ mean, long long row, int cols) {
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c >= cols) continue;
        to.x[i] = *(const Vector<X, V>*)(x + row * cols + c);
        to.dy[i] = *(const Vector<Y, V>*)(dy + row * cols + c);
    }
    to.r = rstd[row];
    if (LAYER) to.m = mean[row];
}

// Blocks run over rows with a stride and keep their share of dgain and dbias in registers, so that everything is read once:
// ITEMS V blockDim.x >= cols. The next row is on its way while a row is summed.
extern "C" __global__ void __launch_bounds__(512) norm_backward(const X* __restrict__ x, const float* gain,
        const float* __restrict__ rstd, const float* __restrict__ mean, const Y* UNLESS_AGAIN dy, const X* dx0, X* dx,
        Y* narrow, const float* bias, Y* y, float* __restrict__ parts, int cols, long long n) {
    wait_for_predecessor();
    float dgain[ITEMS][V] = {}, dbias[ITEMS][V] = {};
    Row next;
    load_row(next, x, dy, rstd, mean, blockIdx.x, cols);
    int turn = 0;
    #pragma unroll 1
    for (long long row = blockIdx.x; row < n; row += gridDim.x, turn ^= 1) {
        const Row now = next;
        if (row + gridDim.x < n) load_row(next, x, dy, rstd, mean, row + gridDim.x, cols);
        Vector<X, V> old[ITEMS];
        float sums[1 + LAYER] = {}, xs[V], dys[V], g[V], olds[V];
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = (i * blockDim.x + threadIdx.x) * V;
            if (c >= cols) continue;
            if (dx0) old[i] = *(const Vector<X, V>*)(dx0 + row * cols + c);
            load_vector(g, gain + c);
            to_floats(xs, now.x[i]);
            to_floats(dys, now.dy[i]);
            add_terms(sums, xs, dys, g, now.r, now.m);
            for (int j = 0; j < V; j++) {
                dgain[i][j] += dys[j] * (LAYER ? (xs[j] - now.m) * now.r : xs[j] * now.r);
                if (LAYER) dbias[i][j] += dys[j];
            }
        }
        sum_row(sums, turn);
        finish_sums(sums, now.r, cols);
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = (i * blockDim.x + threadIdx.x) * V;
            if (c >= cols) continue;
            load_vector(g, gain + c);
            to_floats(xs, now.x[i]);
            to_floats(dys, now.dy[i]);
            if (dx0) to_floats(olds, old[i]);
            else for (int j = 0; j < V; j++) olds[j] = 0;
            if (AGAIN) store_again(y + row * cols + c, xs, g, bias + c, now.r, now.m);
            to_dx(xs, dys, g, olds, sums, now.r, now.m);
            store_vector(dx + row * cols + c, xs);
            if (NARROW) store_vector(narrow + row * cols + c, xs);
        }
    }
    parts += (long long)blockIdx.x * (1 + LAYER) * cols;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c >= cols) continue;
        store_vector(parts + c, dgain[i]);
        if (LAYER) store_vector(parts + cols + c, dbias[i]);
    }
}

// Adds to a sum of this thread in memory.
__device__ __forceinline__ void add_part(float* to, const float (&v)[V]) {
    Vector<float, V> sum = *(const Vector<float, V>*)to;
    for (int j = 0; j < V; j++) sum.at[j] += v[j];
    *(Vector<float, V>*)to = sum;
}

// The same for rows that are too long for registers: x and dy are read again from the cache, and each block's share of dgain
// and dbias is in memory, zero at first.
extern "C" __global__ void __launch_bounds__(1024) norm_backward_long(const X* __restrict__ x, const float* gain,
        const float* __restrict__ rstd, const float* __restrict__ mean, const Y* UNLESS_AGAIN dy, const X* dx0, X* dx,
        Y* narrow, const float* bias, Y* y, float* parts, int cols, long long n) {
    wait_for_predecessor();
    parts += (long long)blockIdx.x * (1 + LAYER) * cols;
    int turn = 0;
    for (long long row = blockIdx.x; row < n; row += gridDim.x, turn ^= 1) {
        const long long at = row * cols;
        const float r = rstd[row], m = LAYER ? mean[row] : 0.0f;
        float sums[1 + LAYER] = {}, xs[V], dys[V], g[V], old[V] = {};
        for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
            load_vector(g, gain + c);
            load_vector(xs, x + at + c);
            load_vector(dys, dy + at + c);
            add_terms(sums, xs, dys, g, r, m);
        }
        sum_row(sums, turn);
        finish_sums(sums, r, cols);
        for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
            load_vector(g, gain + c);
            load_vector(xs, x + at + c);
            load_vector(dys, dy + at + c);
            if (dx0) load_vector(old, dx0 + at + c);
            float dgain[V];
            for (int j = 0; j < V; j++) dgain[j] = dys[j] * (LAYER ? (xs[j] - m) * r : xs[j] * r);
            add_part(parts + c, dgain);
            if (LAYER) add_part(parts + cols + c, dys);
            if (AGAIN) store_again(y + at + c, xs, g, bias + c, r, m);
            to_dx(xs, dys, g, old, sums, r, m);
            store_vector(dx + at + c, xs);
            if (NARROW) store_vector(narrow + at + c, xs);
        }
    }
}
