// A bias and its gradient. X: element type of the matrix. V: neighbouring elements that a thread moves at once; divides all
// columns and strides.

// y = x + bias; y may be the memory of x. x, y: [n, cols]; bias: [cols]. A thread has the same columns in each of its rows.
extern "C" __global__ void __launch_bounds__(256) add_bias(const X* x, const float* __restrict__ bias, X* y, int cols, long long n) {
    wait_for_predecessor();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (c >= cols) return;
    float b[V], v[V];
    load_vector(b, bias + c);
    for (long long row = blockIdx.y; row < n; row += gridDim.y) {
        load_vector(v, x + row * cols + c);
        for (int j = 0; j < V; j++) v[j] += b[j];
        store_vector(y + row * cols + c, v);
    }
}

// First stage of a sum over rows: parts[p] = sum of dy's rows p * 8 + 0..8, (p + gridDim.y) * 8 + 0..8, …
// dy: the first of cols columns of a matrix with `stride` columns; parts: [gridDim.y, cols]. Blocks of 8 warps: each warp has
// a row and 32 V columns at a time.
extern "C" __global__ void __launch_bounds__(256) column_sum(const X* __restrict__ dy, long long stride, float* __restrict__ parts, int cols, long long n) {
    wait_for_predecessor();
    __shared__ float tile[8][32 * V];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 32 * V, c = first + lane * V;
    float sum[V] = {};
    if (c < cols) {
        #pragma unroll 4
        for (long long row = blockIdx.y * 8LL + warp; row < n; row += gridDim.y * 8LL) {
            float v[V];
            load_vector(v, dy + row * stride + c);
            for (int j = 0; j < V; j++) sum[j] += v[j];
        }
    }
    for (int j = 0; j < V; j++) tile[warp][lane * V + j] = sum[j];
    __syncthreads();
    const int column = first + threadIdx.x;
    if (threadIdx.x >= 32 * V || column >= cols) return;
    float total = 0;
    for (int w = 0; w < 8; w++) total += tile[w][threadIdx.x];
    parts[blockIdx.y * (long long)cols + column] = total;
}
