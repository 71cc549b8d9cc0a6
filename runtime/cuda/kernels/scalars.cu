// Sums of f64 scalars, and the factor that clips gradients. Every sum has a fixed order.

// Pointers of one launch: within the 4 KiB that the arguments of a kernel may have on every GPU.
constexpr int TERMS = 240;
struct Terms { const double* at[TERMS]; };
struct Places { long long at[TERMS]; };

// out = (carried +) the terms in order; out may be carried.
extern "C" __global__ void __launch_bounds__(256) sum_terms(const __grid_constant__ Terms terms, int n, const double* carried, double* out) {
    wait_for_predecessor();
    __shared__ double values[TERMS];
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = *terms.at[i];
    __syncthreads();
    if (threadIdx.x) return;
    double sum = carried ? *carried : 0.0;
    for (int i = 0; i < n; i++) sum += values[i];
    *out = sum;
}

// Sums of a long vector: each block sums its part, in four sums a thread.
__device__ __forceinline__ double sum_of_block(const double* __restrict__ x, long long n) {
    double sums[4] = {};
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x, stride = (long long)gridDim.x * blockDim.x;
    for (long long i = first; i < n; i += 4 * stride)
        for (int j = 0; j < 4; j++) if (i + j * stride < n) sums[j] += x[i + j * stride];
    return block_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
// out [blocks] = the sum of each block, plus what is carried if there is only one; out may be carried.
extern "C" __global__ void __launch_bounds__(1024) sum_values(const double* __restrict__ x, long long n, const double* carried, double* out) {
    wait_for_predecessor();
    double sum = sum_of_block(x, n);
    if (threadIdx.x == 0) out[blockIdx.x] = carried ? *carried + sum : sum;
}

// out [m] = (carried +) the sum of n runs of m elements, in order; out may be carried.
extern "C" __global__ void __launch_bounds__(256) sum_runs(const double* __restrict__ x, int n, int m, const double* carried, double* out) {
    wait_for_predecessor();
    GRID_STRIDE(j, m) {
        double sum = carried ? carried[j] : 0.0;
        for (int i = 0; i < n; i++) sum += x[(long long)i * m + j];
        out[j] = sum;
    }
}

// Puts scalars at their places in a vector.
extern "C" __global__ void __launch_bounds__(256) place_terms(const __grid_constant__ Terms terms, const __grid_constant__ Places places, int n, double* out) {
    wait_for_predecessor();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[places.at[i]] = *terms.at[i];
}

// The L2 norm of the unscaled gradient, and the factor that clips it: NaN if the norm is not finite. At most `max_norm`;
// infinite if gradients are not clipped.
extern "C" __global__ void __launch_bounds__(32) clip_coefficient(const double* total, const double* loss_scale, double max_norm, double* norm_out, double* coefficient) {
    wait_for_predecessor();
    if (threadIdx.x) return;
    double norm = sqrt(*total) / *loss_scale;
    double clip = max_norm / (norm + 1e-6);
    bool is_finite = norm - norm == 0.0;
    *norm_out = norm;
    *coefficient = is_finite ? (clip < 1.0 ? clip : 1.0) / *loss_scale : norm - norm;
}
