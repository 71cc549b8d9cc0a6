// Rows of adapted weights with trained lengths (DoRA). X: element type of the product's matrix.

// lengths[o] = |row first + o of w + factor b a|. w: [O, n_in], or [n_in, O] with TRANSPOSED, where `stride` elements lie between its
// rows; a: [rank, n_in]; b: [K, rank]. A block has a row.
template <bool TRANSPOSED> __device__ __forceinline__ void row_length(const float* w, const float* a, const float* b, float* lengths, long long stride, int n_in, int rank, float factor) {
    long long o = blockIdx.x;
    double squares = 0.0;
    for (long long i = threadIdx.x; i < n_in; i += blockDim.x) {
        float x = TRANSPOSED ? w[i * stride + o] : w[o * stride + i];
        for (int r = 0; r < rank; r++) x += factor * b[o * rank + r] * a[(long long)r * n_in + i];
        squares += double(x) * double(x);
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) lengths[o] = float(sqrt(squares));
}
extern "C" __global__ void __launch_bounds__(256) row_lengths(const float* __restrict__ w, const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ lengths, long long stride, int n_in, int rank, float factor) {
    wait_for_predecessor();
    row_length<false>(w, a, b, lengths, stride, n_in, rank, factor);
}
extern "C" __global__ void __launch_bounds__(256) column_lengths(const float* __restrict__ w, const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ lengths, long long stride, int n_in, int rank, float factor) {
    wait_for_predecessor();
    row_length<true>(w, a, b, lengths, stride, n_in, rank, factor);
}

// y = x, with columns first..first + k times magnitude / length; y may be the memory of x. x, y: [n / cols, cols].
extern "C" __global__ void __launch_bounds__(256) scale_columns(const X* x, const float* __restrict__ magnitude, const float* __restrict__ lengths, X* y, long long n, int cols, int first, int k) {
    wait_for_predecessor();
    GRID_STRIDE(i, n) {
        int c = int(i % cols) - first;
        float v = to_float(x[i]);
        if (c >= 0 && c < k) v *= magnitude[c] / lengths[c];
        y[i] = from_float<X>(v);
    }
}

// dmagnitude = sums over rows of dy x / length, plus `before` unless it is null. A block has 32 columns; each of its 8 warps sums every
// eighth row. x, dy: column `first` of matrices [n, cols].
extern "C" __global__ void __launch_bounds__(256) magnitude_backward(const X* __restrict__ x, const X* __restrict__ dy, const float* __restrict__ lengths, const float* before, float* dmagnitude, long long n, int cols, int k) {
    wait_for_predecessor();
    __shared__ float tile[8][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < k) for (long long row = warp; row < n; row += 8) sum += to_float(x[row * cols + c]) * to_float(dy[row * cols + c]);
    tile[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= k) return;
    float total = 0.0f;
    for (int w = 0; w < 8; w++) total += tile[w][lane];
    dmagnitude[c] = total / lengths[c] + (before ? before[c] : 0.0f);
}
