// Sums of squares in f64. X: element type. The square of an f32 is exact in f64, so that fma rounds as often as an addition.
constexpr int WIDTH = 16 / sizeof(X);

__device__ __forceinline__ void add_square(double& sum, float x) { sum = fma(double(x), double(x), sum); }

// A run of elements. out: a sum for each of its blocks.
struct Run { const X* x; long long n; double* out; long long end; };
// Within the 4 KiB that the arguments of a kernel may have on every GPU.
constexpr int RUNS = 120;
struct Runs { Run at[RUNS]; };

// out [blocks of the run] = the sum over each of them.
extern "C" __global__ void __launch_bounds__(256) sum_squares(const __grid_constant__ Runs runs, int n_runs) {
    wait_for_predecessor();
    int own = own_run(runs, n_runs);
    Part part = own_part(runs, own);
    const X* __restrict__ x = runs.at[own].x;
    long long n = runs.at[own].n;
    double sums[WIDTH] = {};
    // Elements in front of the first multiple of 16 bytes.
    long long head = (16 - (unsigned long long)x % 16) % 16 / sizeof(X);
    if (head > n) head = n;
    const X* body = x + head;
    long long first = (long long)part.index * blockDim.x + threadIdx.x, stride = (long long)part.count * blockDim.x;
    long long n_vectors = (n - head) / WIDTH;
    for (long long i = first; i < n_vectors; i += stride) {
        float v[WIDTH];
        load_vector(v, body + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) add_square(sums[j], v[j]);
    }
    // The elements behind the last whole vector.
    if (n_vectors * WIDTH + first < n - head) add_square(sums[0], to_float(body[n_vectors * WIDTH + first]));
    if (part.index == 0 && threadIdx.x < head) add_square(sums[1], to_float(x[threadIdx.x]));
    for (int width = WIDTH / 2; width; width /= 2)
        for (int j = 0; j < width; j++) sums[j] += sums[j + width];
    double sum = block_sum(sums[0]);
    if (threadIdx.x == 0) runs.at[own].out[part.index] = sum;
}

// The second stage: adds the sums of all blocks of a run, at most one for each thread. Runs of one block each.
struct Sum { const double* x; long long n; double* out; long long end; };
struct Sums { Sum at[RUNS]; };
extern "C" __global__ void __launch_bounds__(1024) sum_of_blocks(const __grid_constant__ Sums runs, int n_runs) {
    wait_for_predecessor();
    Sum own = runs.at[blockIdx.x];
    double sum = block_sum(threadIdx.x < own.n ? own.x[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *own.out = sum;
}

// out [ceil(n / block)]: the sum over each run of `block` elements, one warp each. Its order depends on the run alone.
// Five blocks of a multiprocessor: for more, NVIDIA's compiler would spill.
extern "C" __global__ void __launch_bounds__(256, 5) sum_squares_blocks(const X* __restrict__ x, long long n, long long block, double* out) {
    wait_for_predecessor();
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
