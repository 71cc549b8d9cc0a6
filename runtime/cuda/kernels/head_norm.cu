// RMS norm of each query and key head of packed qkv; values pass through.
//
// X: element type. V: neighbouring elements that a thread moves at once; divides the head width d. LANES: threads of a head, a
// power of two up to 32. ITEMS: vectors of each thread; ITEMS V LANES >= d.
// qkv, out, dout, dqkv: [n, heads of d], the first n_q of them queries, the next n_k keys, the others, up to n_heads, values;
// gain_q, gain_k: [d]; rstd: [n, n_q + n_k].

// n_all: heads of all tokens.
extern "C" __global__ void __launch_bounds__(256) head_norm(const X* __restrict__ qkv, const float* __restrict__ gain_q, const float* __restrict__ gain_k,
        X* __restrict__ out, float* __restrict__ rstd, int d, int n_q, int n_k, int n_heads, int n_all, float eps) {
    wait_for_predecessor();
    const int lane = threadIdx.x % LANES, head = blockIdx.x * (256 / LANES) + threadIdx.x / LANES;
    // Threads without a head take part in the sums of their warp.
    const int cols = head < n_all ? d : 0, token = head / n_heads, h = head % n_heads;
    const long long at = (long long)head * d;
    float x[ITEMS][V], g[V], sum = 0;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * LANES + lane) * V;
        if (c >= cols) continue;
        load_vector(x[i], qkv + at + c);
        for (int j = 0; j < V; j++) sum = fmaf(x[i][j], x[i][j], sum);
    }
    const float r = 1.0f / sqrtf(lane_sum<LANES>(sum) / d + eps);
    const bool is_value = h >= n_q + n_k;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * LANES + lane) * V;
        if (c >= cols) continue;
        if (!is_value) {
            load_vector(g, (h < n_q ? gain_q : gain_k) + c);
            for (int j = 0; j < V; j++) x[i][j] = x[i][j] * r * g[j];
        }
        store_vector(out + at + c, x[i]);
    }
    if (lane == 0 && cols && !is_value) rstd[(long long)token * (n_q + n_k) + h] = r;
}

// Writes the block's sum of `v` to `part [d]`.
__device__ __forceinline__ void write_part(float (&v)[ITEMS][V], float* part, int d) {
    __shared__ float tile[8][LANES * ITEMS * V];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) for (int j = 0; j < V; j++) {
        for (int by = 16; by >= LANES; by >>= 1) v[i][j] += __shfl_xor_sync(~0u, v[i][j], by);
        if (lane < LANES) tile[warp][(i * LANES + lane) * V + j] = v[i][j];
    }
    __syncthreads();
    #pragma unroll 1
    for (int c = threadIdx.x; c < d; c += 256) {
        float sum = 0;
        for (int w = 0; w < 8; w++) sum += tile[w][c];
        part[c] = sum;
    }
}

// dx = dy gain rstd - x rstd^3 mean(dy gain x). parts: [gridDim.x, 2 d], a block's share of dgain_q and dgain_k.
extern "C" __global__ void __launch_bounds__(256) head_norm_backward(const X* __restrict__ qkv, const float* __restrict__ gain_q, const float* __restrict__ gain_k,
        const float* __restrict__ rstd, const X* __restrict__ dout, X* __restrict__ dqkv, float* __restrict__ parts,
        int d, int n_q, int n_k, int n_heads, int n_all) {
    wait_for_predecessor();
    const int lane = threadIdx.x % LANES, step = gridDim.x * (256 / LANES);
    float dgain_q[ITEMS][V] = {}, dgain_k[ITEMS][V] = {};
    // The block's first head is the same for all its threads, so all of them run equally often.
    for (int first = blockIdx.x * (256 / LANES); first < n_all; first += step) {
        const int head = first + threadIdx.x / LANES, cols = head < n_all ? d : 0, token = head / n_heads, h = head % n_heads;
        const bool is_query = h < n_q, is_value = h >= n_q + n_k;
        const long long at = (long long)head * d;
        const float r = cols && !is_value ? rstd[(long long)token * (n_q + n_k) + h] : 0.0f;
        float x[ITEMS][V], dy[ITEMS][V], g[ITEMS][V], sum = 0;
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = (i * LANES + lane) * V;
            if (c >= cols) continue;
            load_vector(dy[i], dout + at + c);
            if (is_value) continue;
            load_vector(x[i], qkv + at + c);
            load_vector(g[i], (is_query ? gain_q : gain_k) + c);
            for (int j = 0; j < V; j++) sum = fmaf(dy[i][j] * g[i][j], x[i][j], sum);
        }
        const float along = lane_sum<LANES>(sum) * r * r * r / d;
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = (i * LANES + lane) * V;
            if (c >= cols) continue;
            for (int j = 0; !is_value && j < V; j++) {
                const float dgain = dy[i][j] * x[i][j] * r;
                dgain_q[i][j] += is_query ? dgain : 0.0f;
                dgain_k[i][j] += is_query ? 0.0f : dgain;
                dy[i][j] = dy[i][j] * g[i][j] * r - x[i][j] * along;
            }
            store_vector(dqkv + at + c, dy[i]);
        }
    }
    parts += (long long)blockIdx.x * 2 * d;
    write_part(dgain_q, parts, d);
    write_part(dgain_k, parts + d, d);
}
