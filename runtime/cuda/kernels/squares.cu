// Sums of squares in f64. X: element type. The square of an f32 is exact in f64, so that fma rounds as often as an addition.
constexpr int WIDTH = 16 / sizeof(X);

__device__ __forceinline__ void add_square(double& sum, float x) { sum = fma(double(x), double(x), sum); }

// out [blocks] = the sum over each block of the grid.
extern "C" __global__ void __launch_bounds__(256) sum_squares(const X* __restrict__ x, long long n, double* out) {
    double sums[WIDTH] = {};
    // Elements in front of the first multiple of 16 bytes.
    long long head = (16 - (unsigned long long)x % 16) % 16 / sizeof(X);
    if (head > n) head = n;
    const X* body = x + head;
    GRID_STRIDE(i, (n - head) / WIDTH) {
        float v[WIDTH];
        load_vector(v, body + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) add_square(sums[j], v[j]);
    }
    GRID_REST(i, n - head, WIDTH) add_square(sums[0], to_float(body[i]));
    if (blockIdx.x == 0 && threadIdx.x < head) add_square(sums[1], to_float(x[threadIdx.x]));
    for (int width = WIDTH / 2; width; width /= 2)
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    double sum = block_sum(sums[0]);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// out [ceil(n / block)]: the sum over each run of `block` elements, one warp each. Its order depends on the run alone.
extern "C" __global__ void __launch_bounds__(256) sum_squares_blocks(const X* __restrict__ x, long long n, long long block, double* out) {
    long long n_runs = (n + block - 1) / block, warps = (long long)gridDim.x * blockDim.x / 32;
    int lane = threadIdx.x % 32;
    for (long long run = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; run < n_runs; run += warps) {
        const X* from = x + run * block;
        long long len = min(block, n - run * block);
        double sum = 0.0;
        if (block % WIDTH == 0) {
            for (long long i = lane; i < len / WIDTH; i += 32) {
                float v[WIDTH];
                load_vector(v, from + i * WIDTH);
                for (int j = 0; j < WIDTH; j++) add_square(sum, v[j]);
            }
            if (lane < len % WIDTH) add_square(sum, to_float(from[len / WIDTH * WIDTH + lane]));
        } else {
            for (long long i = lane; i < len; i += 32) add_square(sum, to_float(from[i]));
        }
        sum = warp_sum(sum);
        if (lane == 0) out[run] = sum;
    }
}
