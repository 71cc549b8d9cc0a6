// RMS norm over all queries of a token and over all its keys, for squares that are summed before; values pass through.
//
// X: element type. V: neighbouring elements that a thread moves at once; divides q and k. ITEMS: vectors of each thread in
// qk_norm_backward.
// qkv, out, dout, dqkv: [n, q + 2 k]; squares, dsquares: [n, 2]; gain_q: [q]; gain_k: [k]; summed_q, summed_k: numbers of
// squares in the sums.

// Sums of the queries and of the keys over the block. Each turn uses the other half of the memory; see norm_backward.cu.
__device__ __forceinline__ void sum_row(float (&sums)[2], int turn) {
    __shared__ float parts[2][2][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int k = 0; k < 2; k++) {
        sums[k] = warp_sum(sums[k]);
        if (lane == 0) parts[turn][k][warp] = sums[k];
    }
    __syncthreads();
    for (int k = 0; k < 2; k++) sums[k] = warp_sum(lane < blockDim.x / 32 ? parts[turn][k][lane] : 0.0f);
}

extern "C" __global__ void __launch_bounds__(512) qk_squares(const X* __restrict__ qkv, float* __restrict__ squares, int q, int k) {
    wait_for_predecessor();
    qkv += (long long)blockIdx.x * (q + 2 * k);
    float v[V], sums[2] = {};
    #pragma unroll 4
    for (int c = threadIdx.x * V; c < q + k; c += blockDim.x * V) {
        load_vector(v, qkv + c);
        float sum = 0;
        for (int j = 0; j < V; j++) sum = fmaf(v[j], v[j], sum);
        sums[0] += c < q ? sum : 0.0f;
        sums[1] += c < q ? 0.0f : sum;
    }
    sum_row(sums, 0);
    if (threadIdx.x < 2) squares[blockIdx.x * 2LL + threadIdx.x] = threadIdx.x ? sums[1] : sums[0];
}

// dqkv = dqkv0 + 2 qkv dsquares, for values dqkv0. dqkv0: null, or may be the memory of dqkv.
extern "C" __global__ void __launch_bounds__(256) qk_squares_backward(const X* __restrict__ qkv, const float* __restrict__ dsquares, const X* dqkv0, X* dqkv, int q, int k, long long n) {
    wait_for_predecessor();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V, width = q + 2 * k;
    if (c >= width) return;
    for (long long row = blockIdx.y; row < n; row += gridDim.y) {
        float x[V], dx[V] = {};
        if (dqkv0) load_vector(dx, dqkv0 + row * width + c);
        if (c < q + k) {
            const float d = 2.0f * dsquares[row * 2 + (c < q ? 0 : 1)];
            load_vector(x, qkv + row * width + c);
            for (int j = 0; j < V; j++) dx[j] += d * x[j];
        }
        store_vector(dqkv + row * width + c, dx);
    }
}

extern "C" __global__ void __launch_bounds__(256) qk_norm(const X* __restrict__ qkv, const float* __restrict__ gain_q, const float* __restrict__ gain_k,
        const float* __restrict__ squares, X* __restrict__ out, int q, int k, float summed_q, float summed_k, float eps, long long n) {
    wait_for_predecessor();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V, width = q + 2 * k;
    if (c >= width) return;
    float x[V], g[V] = {};
    if (c < q + k) load_vector(g, c < q ? gain_q + c : gain_k + (c - q));
    const float summed = c < q ? summed_q : summed_k;
    #pragma unroll 2
    for (long long row = blockIdx.y; row < n; row += gridDim.y) {
        load_vector(x, qkv + row * width + c);
        if (c < q + k) {
            const float r = 1.0f / sqrtf(squares[row * 2 + (c < q ? 0 : 1)] / summed + eps);
            for (int j = 0; j < V; j++) x[j] = x[j] * r * g[j];
        }
        store_vector(out + row * width + c, x);
    }
}

// For the columns first..end of queries and keys, where ITEMS V blockDim.x >= end - first: dqkv = dout gain rstd; dsquares, the
// gradient of the squares (added to those of earlier columns, unless first is 0); and parts [gridDim.x, q + k], a block's share
// of dgain_q and dgain_k. The values are copied with the first columns.
extern "C" __global__ void __launch_bounds__(512) qk_norm_backward(const X* __restrict__ qkv, const float* __restrict__ gain_q, const float* __restrict__ gain_k,
        const float* __restrict__ squares, const X* __restrict__ dout, X* __restrict__ dqkv, float* __restrict__ dsquares, float* __restrict__ parts,
        int q, int k, int first, int end, float summed_q, float summed_k, float eps, long long n) {
    wait_for_predecessor();
    const int width = q + 2 * k;
    float dgain[ITEMS][V] = {}, x[V], dy[V], g[V];
    int turn = 0;
    for (long long row = blockIdx.x; row < n; row += gridDim.x, turn ^= 1) {
        const long long at = row * width;
        const float r[2] = {1.0f / sqrtf(squares[row * 2] / summed_q + eps), 1.0f / sqrtf(squares[row * 2 + 1] / summed_k + eps)};
        float sums[2] = {};
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = first + (i * blockDim.x + threadIdx.x) * V;
            if (c >= end) continue;
            const float scale = c < q ? r[0] : r[1];
            load_vector(x, qkv + at + c);
            load_vector(dy, dout + at + c);
            load_vector(g, c < q ? gain_q + c : gain_k + (c - q));
            float sum = 0;
            for (int j = 0; j < V; j++) {
                sum = fmaf(dy[j] * g[j], x[j], sum);
                dgain[i][j] += dy[j] * x[j] * scale;
                dy[j] = dy[j] * g[j] * scale;
            }
            sums[0] += c < q ? sum : 0.0f;
            sums[1] += c < q ? 0.0f : sum;
            store_vector(dqkv + at + c, dy);
        }
        for (int c = q + k + threadIdx.x * V; first == 0 && c < width; c += blockDim.x * V) {
            *(Vector<X, V>*)(dqkv + at + c) = *(const Vector<X, V>*)(dout + at + c);
        }
        sum_row(sums, turn);
        if (threadIdx.x < 2) {
            const float d = threadIdx.x ? sums[1] * r[1] * r[1] * r[1] / (-2.0f * summed_k) : sums[0] * r[0] * r[0] * r[0] / (-2.0f * summed_q);
            float* to = dsquares + row * 2 + threadIdx.x;
            *to = first == 0 ? d : *to + d;
        }
    }
    parts += (long long)blockIdx.x * (q + k);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = first + (i * blockDim.x + threadIdx.x) * V;
        if (c < end) store_vector(parts + c, dgain[i]);
    }
}
