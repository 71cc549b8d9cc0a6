// Norms of rows: y = x rstd gain, or y = (x - mean) rstd gain + bias.
//
// X, Y: element types of x and y. V: neighbouring elements that a thread moves at once; divides cols. ITEMS: such vectors of
// each thread. LAYER: 1 for the layer norm, 0 for the RMS norm, which has neither bias nor mean.
// x, y: [n, cols]; gain, bias: [cols]; rstd, mean: [n].

// One block per row. The row stays in registers, so x is read once: ITEMS V blockDim.x >= cols.
extern "C" __global__ void __launch_bounds__(1024) norm_rows(const X* __restrict__ x, const float* __restrict__ gain,
        const float* __restrict__ bias, Y* __restrict__ y, float* __restrict__ rstd, float* __restrict__ mean, int cols, float eps) {
    wait_for_predecessor();
    x += (long long)blockIdx.x * cols;
    y += (long long)blockIdx.x * cols;
    float v[ITEMS][V], g[ITEMS][V], b[V], sum = 0;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c < cols) load_vector(v[i], x + c);
        else for (int j = 0; j < V; j++) v[i][j] = 0;
    }
    // Asked for before the sums, so that it arrives meanwhile.
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c < cols) load_vector(g[i], gain + c);
    }
    float m = 0;
    if (LAYER) {
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) for (int j = 0; j < V; j++) sum += v[i][j];
        m = block_sum(sum) / cols;
        sum = 0;
    }
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if ((int)(i * blockDim.x + threadIdx.x) * V < cols) for (int j = 0; j < V; j++) {
            const float d = LAYER ? v[i][j] - m : v[i][j];
            sum = fmaf(d, d, sum);
        }
    }
    const float r = 1.0f / sqrtf(block_sum(sum) / cols + eps);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c >= cols) continue;
        if (LAYER) load_vector(b, bias + c);
        for (int j = 0; j < V; j++) v[i][j] = LAYER ? (v[i][j] - m) * r * g[i][j] + b[j] : v[i][j] * r * g[i][j];
        store_vector(y + c, v[i]);
    }
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = r;
        if (LAYER) mean[blockIdx.x] = m;
    }
}

// The same for rows that are too long for registers: each pass after the first reads x from the cache.
extern "C" __global__ void __launch_bounds__(1024) norm_long(const X* __restrict__ x, const float* __restrict__ gain,
        const float* __restrict__ bias, Y* __restrict__ y, float* __restrict__ rstd, float* __restrict__ mean, int cols, float eps) {
    wait_for_predecessor();
    x += (long long)blockIdx.x * cols;
    y += (long long)blockIdx.x * cols;
    float v[V], g[V], b[V], sum = 0, m = 0;
    if (LAYER) {
        for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
            load_vector(v, x + c);
            for (int j = 0; j < V; j++) sum += v[j];
        }
        m = block_sum(sum) / cols;
        sum = 0;
    }
    for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
        load_vector(v, x + c);
        for (int j = 0; j < V; j++) sum = fmaf(v[j] - m, v[j] - m, sum);
    }
    const float r = 1.0f / sqrtf(block_sum(sum) / cols + eps);
    for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
        load_vector(v, x + c);
        load_vector(g, gain + c);
        if (LAYER) load_vector(b, bias + c);
        for (int j = 0; j < V; j++) v[j] = LAYER ? (v[j] - m) * r * g[j] + b[j] : v[j] * r * g[j];
        store_vector(y + c, v);
    }
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = r;
        if (LAYER) mean[blockIdx.x] = m;
    }
}
