// Updates of parameters by rules that work element by element, with the bits of the same formulas on the CPU. The scalars of a
// step stay in device memory; one thread of a block derives the factors from them, because f64 arithmetic is slow on some GPUs.

// What one update covers: a run of elements of a parameter, its state and its gradient.
struct Run { float *p, *state[2]; const float* g; long long n, end; };
// Within the 4 KiB that the arguments of a kernel may have on every GPU.
constexpr int RUNS = 80;
struct Runs { Run at[RUNS]; };

struct AdamW {
    static constexpr int N_STATE = 2;
    float scale, keep1, take1, keep2, take2, decay, eps, step, inverse_root;
    __device__ __forceinline__ void operator()(float& p, float (&state)[2], float g) const {
        float &m = state[0], &v = state[1];
        g = g * scale;
        m = keep1 * m + take1 * g;
        v = keep2 * v + take2 * g * g;
        p = p * decay - step * m / (sqrtf(v) * inverse_root + eps);
    }
};
struct Sgd {
    static constexpr int N_STATE = 1;
    float scale, momentum, decay, lr;
    __device__ __forceinline__ void operator()(float& p, float (&state)[1], float g) const {
        g = g * scale + decay * p;
        state[0] = momentum * state[0] + g;
        p = p - lr * state[0];
    }
};
struct Lion {
    static constexpr int N_STATE = 1;
    float scale, keep1, take1, keep2, take2, decay, lr;
    __device__ __forceinline__ void operator()(float& p, float (&state)[1], float g) const {
        g = g * scale;
        float direction = keep1 * state[0] + take1 * g, change = direction == 0.0f ? 0.0f : copysignf(lr, direction);
        p = p * decay - change;
        state[0] = keep2 * state[0] + take2 * g;
    }
};

// Updates the groups of N elements with index `first`, `first + stride`, …
template <int N, class Rule> __device__ __forceinline__ void update_groups(const Rule& rule, const Run& run, long long first, long long stride) {
    for (long long i = first; i < run.n / N; i += stride) {
        float p[N], g[N], state[Rule::N_STATE][N];
        load_vector(p, run.p + i * N);
        load_vector(g, run.g + i * N);
        for (int s = 0; s < Rule::N_STATE; s++) load_vector(state[s], run.state[s] + i * N);
        for (int j = 0; j < N; j++) {
            float own[Rule::N_STATE];
            for (int s = 0; s < Rule::N_STATE; s++) own[s] = state[s][j];
            rule(p[j], own, g[j]);
            for (int s = 0; s < Rule::N_STATE; s++) state[s][j] = own[s];
        }
        store_vector(run.p + i * N, p);
        for (int s = 0; s < Rule::N_STATE; s++) store_vector(run.state[s] + i * N, state[s]);
    }
}
// Updates the block's part of its run.
template <class Rule> __device__ __forceinline__ void update_run(const Rule& rule, const Runs& runs, int n_runs) {
    int own = own_run(runs, n_runs);
    Run run = runs.at[own];
    Part part = own_part(runs, own);
    long long first = (long long)part.index * blockDim.x + threadIdx.x, stride = (long long)part.count * blockDim.x;
    // Gradient and state begin at a multiple of 16 bytes; the run may begin anywhere in the parameter.
    if ((unsigned long long)run.p % 16) return update_groups<1>(rule, run, first, stride);
    update_groups<4>(rule, run, first, stride);
    long long rest = run.n / 4 * 4;
    Run tail = {run.p + rest, {run.state[0] + rest, run.state[1] + rest}, run.g + rest, run.n - rest, 0};
    update_groups<1>(rule, tail, first, stride);
}

// Factors of the gradient that are not finite leave everything unchanged: the gradient overflowed.
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }

extern "C" __global__ void __launch_bounds__(256) adamw(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* corrections, const double* coefficient, float keep1, float take1, float keep2, float take2, float eps, double weight_decay) {
    __shared__ AdamW rule;
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    if (threadIdx.x == 0) {
        double decay = 1.0 - *lr * weight_decay, step = *lr / corrections[0], inverse_root = 1.0 / sqrt(corrections[1]);
        rule = {float(scale), keep1, take1, keep2, take2, float(decay), eps, float(step), float(inverse_root)};
    }
    __syncthreads();
    update_run(AdamW(rule), runs, n_runs);
}

extern "C" __global__ void __launch_bounds__(256) sgd(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* coefficient, float momentum, float weight_decay) {
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    update_run(Sgd{float(scale), momentum, weight_decay, float(*lr)}, runs, n_runs);
}

extern "C" __global__ void __launch_bounds__(256) lion(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* coefficient, float keep1, float take1, float keep2, float take2, double weight_decay) {
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    Lion rule = {float(scale), keep1, take1, keep2, take2, float(1.0 - *lr * weight_decay), float(*lr)};
    update_run(rule, runs, n_runs);
}
