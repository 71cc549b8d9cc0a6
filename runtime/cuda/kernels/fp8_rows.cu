// Rows of activations for products in FP8.
//
// Y: e4m3, or bf16 for the numbers that e4m3 times the row's scale are. V: neighbouring elements that a thread moves at once; divides
// cols, and a multiple of 4 or 1. ITEMS: such vectors of each thread.
// x: bf16 [n, cols] with `stride` elements from row to row; y: [n, cols]; scale: [n].

// The least power of two with which this largest magnitude, the bits of a bf16 number, is at most 448; NaN if it is not finite.
__device__ __forceinline__ float scale_of(unsigned largest) {
    const int exponent = int(largest >> 7), mantissa = int(largest & 0x7fu);
    if (exponent == 255) return __uint_as_float(0x7fffffffu);
    if (largest == 0) return 1.0f;
    // 448 is 1.75 x 2^8. Reciprocals of scales are finite too.
    const int power = (exponent > 1 ? exponent : 1) - 8 + (mantissa > 0x60);
    return __uint_as_float((power > 1 ? (unsigned)power : 1u) << 23);
}
template <int N> __device__ __forceinline__ void store_rounded(e4m3* y, const float (&x)[N], float, float reciprocal) {
    if (N % 4) {
        for (int j = 0; j < N; j++) y[j].bits = (unsigned char)pack_e4m3(x[j] * reciprocal, 0.0f, 0.0f, 0.0f);
        return;
    }
    Vector<unsigned, (N + 3) / 4> words;
    for (int j = 0; j + 3 < N; j += 4) {
        words.at[j / 4] = pack_e4m3(x[j] * reciprocal, x[j + 1] * reciprocal, x[j + 2] * reciprocal, x[j + 3] * reciprocal);
    }
    *(Vector<unsigned, (N + 3) / 4>*)y = words;
}
template <int N> __device__ __forceinline__ void store_rounded(bf16* y, const float (&x)[N], float scale, float reciprocal) {
    float rounded[N];
    for (int j = 0; j < N; j++) rounded[j] = of_e4m3(e4m3_of(x[j] * reciprocal)) * scale;
    store_vector(y, rounded);
}
// What every block does besides its row: scales of the other operand's rows, which are all the same.
__device__ __forceinline__ void fill(float* __restrict__ others, int n_others, float other) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n_others; i += gridDim.x * blockDim.x) others[i] = other;
}

// One block per row. The row stays in registers, so x is read once: ITEMS V blockDim.x >= cols.
extern "C" __global__ void __launch_bounds__(1024) round_rows(const bf16* __restrict__ x, long long stride, Y* __restrict__ y,
        float* __restrict__ scale, int cols, float* __restrict__ others, int n_others, float other) {
    wait_for_predecessor();
    x += blockIdx.x * stride;
    y += (long long)blockIdx.x * cols;
    Vector<bf16, V> v[ITEMS];
    unsigned largest = 0;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c < cols) v[i] = *(const Vector<bf16, V>*)(x + c);
        else for (int j = 0; j < V; j++) v[i].at[j].bits = 0;
    }
    fill(others, n_others, other);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) for (int j = 0; j < V; j++) largest = max(largest, v[i].at[j].bits & 0x7fffu);
    // Magnitudes are in the order of their bits, NaN last.
    const float s = scale_of((unsigned)block_max(float(largest))), reciprocal = 1.0f / s;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (i * blockDim.x + threadIdx.x) * V;
        if (c >= cols) continue;
        float w[V];
        for (int j = 0; j < V; j++) w[j] = to_float(v[i].at[j]);
        store_rounded(y + c, w, s, reciprocal);
    }
    if (scale && threadIdx.x == 0) scale[blockIdx.x] = s;
}

// The same for rows that are too long for registers: the second pass reads x from the cache.
extern "C" __global__ void __launch_bounds__(512) round_long_rows(const bf16* __restrict__ x, long long stride, Y* __restrict__ y,
        float* __restrict__ scale, int cols, float* __restrict__ others, int n_others, float other) {
    wait_for_predecessor();
    x += blockIdx.x * stride;
    y += (long long)blockIdx.x * cols;
    unsigned largest = 0;
    for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
        Vector<bf16, V> v = *(const Vector<bf16, V>*)(x + c);
        for (int j = 0; j < V; j++) largest = max(largest, v.at[j].bits & 0x7fffu);
    }
    fill(others, n_others, other);
    const float s = scale_of((unsigned)block_max(float(largest))), reciprocal = 1.0f / s;
    for (int c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
        float w[V];
        load_vector(w, x + c);
        store_rounded(y + c, w, s, reciprocal);
    }
    if (scale && threadIdx.x == 0) scale[blockIdx.x] = s;
}
