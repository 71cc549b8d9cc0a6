// SwiGLU and GELU, and their adjoints. X: element type of x and dx; Y: that of y and dy.
constexpr int WIDTH = 8;

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Columns of `x [rows, 2 cols]` in front of the vector with this index in `y [rows, cols]`.
template <int N> __device__ __forceinline__ long long gate_of(unsigned i, unsigned cols) {
    unsigned per_row = cols / N, row = i / per_row;
    return (long long)row * 2 * cols + (i - row * per_row) * N;
}

template <int N> __device__ __forceinline__ void swiglu_by(const X* __restrict__ x, Y* __restrict__ y, unsigned cols, unsigned n_vectors) {
    GRID_STRIDE(i, n_vectors) {
        const X* from = x + gate_of<N>(unsigned(i), cols);
        float gate[N], up[N];
        load_vector(gate, from);
        load_vector(up, from + cols);
        for (int j = 0; j < N; j++) gate[j] = gate[j] * sigmoid(gate[j]) * up[j];
        store_vector(y + i * N, gate);
    }
}
// y [rows, cols] = silu(gate) up, where x [rows, 2 cols] has the gate first.
extern "C" __global__ void __launch_bounds__(256) swiglu(const X* x, Y* y, int cols, int n_vectors) {
    wait_for_predecessor();
    if (cols % WIDTH == 0) swiglu_by<WIDTH>(x, y, cols, n_vectors);
    else swiglu_by<1>(x, y, cols, n_vectors);
}

// The gradients of gate and up replace them, and y, the result of the activation, replaces dy.
__device__ __forceinline__ void swiglu_gradient(float& gate, float& up, float& dy) {
    const float s = sigmoid(gate), silu = gate * s, d = dy;
    dy = silu * up;
    gate = d * up * (s + silu * (1.0f - s));
    up = d * silu;
}

// dx may be x.
template <int N> __device__ __forceinline__ void swiglu_backward_by(const X* x, const Y* __restrict__ dy, X* dx, unsigned cols, unsigned n_vectors) {
    GRID_STRIDE(i, n_vectors) {
        long long at = gate_of<N>(unsigned(i), cols);
        float gate[N], up[N], dact[N];
        load_vector(gate, x + at);
        load_vector(up, x + at + cols);
        load_vector(dact, dy + i * N);
        for (int j = 0; j < N; j++) swiglu_gradient(gate[j], up[j], dact[j]);
        store_vector(dx + at, gate);
        store_vector(dx + at + cols, up);
    }
}
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(const X* x, const Y* dy, X* dx, int cols, int n_vectors) {
    wait_for_predecessor();
    if (cols % WIDTH == 0) swiglu_backward_by<WIDTH>(x, dy, dx, cols, n_vectors);
    else swiglu_backward_by<1>(x, dy, dx, cols, n_vectors);
}

// The same, and y = swiglu(x) again. dx may be x, and y may be dy.
template <int N> __device__ __forceinline__ void swiglu_backward_again_by(const X* x, const Y* dy, X* dx, Y* y, unsigned cols, unsigned n_vectors) {
    GRID_STRIDE(i, n_vectors) {
        long long at = gate_of<N>(unsigned(i), cols);
        float gate[N], up[N], act[N];
        load_vector(gate, x + at);
        load_vector(up, x + at + cols);
        load_vector(act, dy + i * N);
        for (int j = 0; j < N; j++) swiglu_gradient(gate[j], up[j], act[j]);
        store_vector(dx + at, gate);
        store_vector(dx + at + cols, up);
        store_vector(y + i * N, act);
    }
}
extern "C" __global__ void __launch_bounds__(256) swiglu_backward_again(const X* x, const Y* dy, X* dx, Y* y, int cols, int n_vectors) {
    wait_for_predecessor();
    if (cols % WIDTH == 0) swiglu_backward_again_by<WIDTH>(x, dy, dx, y, cols, n_vectors);
    else swiglu_backward_again_by<1>(x, dy, dx, y, cols, n_vectors);
}

constexpr float GELU_SCALE = 1.5957691216057308f; // 2 sqrt(2 / pi): 1 + tanh(u) = 2 sigmoid(2 u)
constexpr float GELU_CUBIC = 0.044715f;
__device__ __forceinline__ float gelu_of(float x) { return x * sigmoid(GELU_SCALE * (x + GELU_CUBIC * x * x * x)); }
__device__ __forceinline__ float gelu_slope(float x) {
    float s = sigmoid(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    return s + x * s * (1.0f - s) * (GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x));
}

// y = x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
extern "C" __global__ void __launch_bounds__(256) gelu(const X* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        float v[WIDTH];
        load_vector(v, x + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) v[j] = gelu_of(v[j]);
        store_vector(y + i * WIDTH, v);
    }
    GRID_REST(i, n, WIDTH) y[i] = from_float<Y>(gelu_of(to_float(x[i])));
}
extern "C" __global__ void __launch_bounds__(256) gelu_backward(const X* __restrict__ x, const Y* __restrict__ dy, X* __restrict__ dx, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        float v[WIDTH], d[WIDTH];
        load_vector(v, x + i * WIDTH);
        load_vector(d, dy + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) v[j] = d[j] * gelu_slope(v[j]);
        store_vector(dx + i * WIDTH, v);
    }
    GRID_REST(i, n, WIDTH) dx[i] = from_float<X>(to_float(dy[i]) * gelu_slope(to_float(x[i])));
}

// The same, and y = gelu(x) again. dx may be x, and y may be dy.
extern "C" __global__ void __launch_bounds__(256) gelu_backward_again(const X* x, const Y* dy, X* dx, Y* y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        float v[WIDTH], d[WIDTH];
        load_vector(v, x + i * WIDTH);
        load_vector(d, dy + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) {
            const float act = gelu_of(v[j]);
            v[j] = d[j] * gelu_slope(v[j]);
            d[j] = act;
        }
        store_vector(dx + i * WIDTH, v);
        store_vector(y + i * WIDTH, d);
    }
    GRID_REST(i, n, WIDTH) {
        const float v = to_float(x[i]), d = to_float(dy[i]);
        dx[i] = from_float<X>(d * gelu_slope(v));
        y[i] = from_float<Y>(gelu_of(v));
    }
}
