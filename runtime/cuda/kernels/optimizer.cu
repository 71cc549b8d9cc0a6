// Updates of parameters by rules that work element by element or in blocks of elements, with the bits of the same formulas on the CPU. The scalars of a
// step stay in device memory; one thread of a block derives the factors from them, because f64 arithmetic is slow on some GPUs.

// What one update covers: a run of elements of a parameter, its state and its gradient. Of a split weight, `p` are the bf16 numbers and
// `rest` what they leave; else `rest` is null.
struct Run { void* p; unsigned short* rest; float* state[2]; const float* g; long long n, end; };
// Within the 4 KiB that the arguments of a kernel may have on every GPU.
constexpr int RUNS = 70;
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
template <int N, class Rule, class Weights> __device__ __forceinline__ void update_groups(const Rule& rule, const Weights& weights, const Run& run, long long first, long long stride) {
    for (long long i = first; i < run.n / N; i += stride) {
        float p[N], g[N], state[Rule::N_STATE][N];
        weights.load(p, i * N);
        load_vector(g, run.g + i * N);
        for (int s = 0; s < Rule::N_STATE; s++) load_vector(state[s], run.state[s] + i * N);
        for (int j = 0; j < N; j++) {
            float own[Rule::N_STATE];
            for (int s = 0; s < Rule::N_STATE; s++) own[s] = state[s][j];
            rule(p[j], own, g[j]);
            for (int s = 0; s < Rule::N_STATE; s++) state[s][j] = own[s];
        }
        weights.store(i * N, p);
        for (int s = 0; s < Rule::N_STATE; s++) store_vector(run.state[s] + i * N, state[s]);
    }
}
// Updates a part of a run.
template <class Rule, class Weights> __device__ __forceinline__ void update_part(const Rule& rule, const Weights& weights, const Run& run, Part part) {
    constexpr int N = Weights::WIDTH;
    long long first = (long long)part.index * blockDim.x + threadIdx.x, stride = (long long)part.count * blockDim.x;
    // The run may begin anywhere in the parameter, and behind blocks anywhere in the state and in the gradient.
    unsigned long long starts = weights.starts() | (unsigned long long)run.state[0] | (unsigned long long)run.state[1] | (unsigned long long)run.g;
    if (starts % 16) return update_groups<1>(rule, weights, run, first, stride);
    update_groups<N>(rule, weights, run, first, stride);
    update_groups<1>(rule, weights, run, run.n / N * N + first, stride);
}
// Updates the block's part of its run.
template <class Rule> __device__ __forceinline__ void update_run(const Rule& rule, const Runs& runs, int n_runs) {
    int own = own_run(runs, n_runs);
    Run run = runs.at[own];
    Part part = own_part(runs, own);
    if (run.rest) update_part(rule, Split{(unsigned short*)run.p, run.rest}, run, part);
    else update_part(rule, Whole{(float*)run.p}, run, part);
}

// Factors of the gradient that are not finite leave everything unchanged: the gradient overflowed.
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }

__device__ __forceinline__ AdamW adamw_rule(double scale, double lr, const double* corrections, float keep1, float take1, float keep2, float take2, float eps, double weight_decay) {
    double decay = 1.0 - lr * weight_decay, step = lr / corrections[0], inverse_root = 1.0 / sqrt(corrections[1]);
    return {float(scale), keep1, take1, keep2, take2, float(decay), eps, float(step), float(inverse_root)};
}

extern "C" __global__ void __launch_bounds__(256) adamw(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* corrections, const double* coefficient, float keep1, float take1, float keep2, float take2, float eps, double weight_decay) {
    wait_for_predecessor();
    __shared__ AdamW rule;
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    if (threadIdx.x == 0) rule = adamw_rule(scale, *lr, corrections, keep1, take1, keep2, take2, eps, weight_decay);
    __syncthreads();
    update_run(AdamW(rule), runs, n_runs);
}

// State in blocks: elements of a block, and its words, a scale and codes of 8 bits.
constexpr int BLOCK = 256, WORDS = 1 + BLOCK / 4;

// The number that a code of 8 bits stands for, for numbers of either sign or for those that are not negative: the numbers of
// `DynamicMap` of the device crate, with its roundings. Behind each power of 10 are twice as many numbers as behind the one below.
template <bool SIGNED> __device__ __forceinline__ float dynamic_number(int code) {
    constexpr int ZERO = SIGNED ? 127 : 0;
    if (code == ZERO || code == 255) return code == ZERO ? 0.0f : 1.0f;
    int position = (code < ZERO ? ZERO - code : code - ZERO) + (SIGNED ? 0 : 1), n = 1;
    float power = SIGNED ? 1e-6f : 1e-7f;
    for (int exponent = SIGNED ? -6 : -7; 2 * n <= position; n *= 2) {
        exponent++;
        power = exponent == -6 ? 1e-6f : exponent == -5 ? 1e-5f : exponent == -4 ? 1e-4f : exponent == -3 ? 1e-3f : exponent == -2 ? 1e-2f : exponent == -1 ? 1e-1f : 1.0f;
    }
    int i = position - n, half = (n + 1) / 2;
    float step = (1.0f - 0.1f) / float(n);
    float low = i < half ? 0.1f + step * float(i) : 1.0f - step * float(n - i);
    float high = i + 1 < half ? 0.1f + step * float(i + 1) : 1.0f - step * float(n - i - 1);
    float number = power * ((low + high) / 2.0f);
    return code < ZERO ? -number : number;
}
// Elements of a lane: a warp updates a block.
constexpr int ITEMS = BLOCK / 32;

// What codes stand for, the middles between neighbours, with one below all in front, and powers of 10.
struct Codes {
    static constexpr int DECADES = 7;
    float numbers[2][BLOCK], middles[2][BLOCK], powers[DECADES];
    // Filled by a block of threads.
    __device__ __forceinline__ void fill() {
        const int code = threadIdx.x;
        numbers[0][code] = dynamic_number<true>(code);
        numbers[1][code] = dynamic_number<false>(code);
        if (code == 0) {
            powers[0] = 1.0f;
            for (int i = 1; i < DECADES; i++) powers[i] = 10.0f * powers[i - 1];
        }
        __syncthreads();
        for (int s = 0; s < 2; s++) middles[s][code] = code ? (numbers[s][code - 1] + numbers[s][code]) / 2.0f : -INFINITY;
        __syncthreads();
    }
    // The code of the nearest number; the lower one of two that are as near. The digits of x tell about where it lies, and the middles decide.
    template <bool SIGNED> __device__ __forceinline__ int nearest(float x) const {
        const float* middle = middles[SIGNED ? 0 : 1];
        const float size = fabsf(x);
        // Binary digits in front of the first one that is not zero, times log10(2).
        int decade = min(max((127 - int(__float_as_uint(size) >> 23)) * 1233 >> 12, 0), DECADES - 1);
        float y = size * powers[decade];
        if (y > 1.0f && decade) decade--, y *= 0.1f;
        const int n = (SIGNED ? 64 : 128) >> decade;
        const int position = n + min(max(int((y - 0.1f) * (float(n) / 0.9f)), 0), n - 1);
        int code = !SIGNED ? position - 1 : x < 0.0f ? 127 - position : 127 + position;
        while (code && !(middle[code] < x)) code--;
        while (code < BLOCK - 1 && middle[code + 1] < x) code++;
        return code;
    }
};

// Loads or stores the elements of a lane, of which it has `n`; `wide` if they are whole vectors.
template <class Weights> __device__ __forceinline__ void load_items(float (&to)[ITEMS], const Weights& from, long long i, int n, bool wide) {
    constexpr int N = Weights::WIDTH;
    if (wide) {
        #pragma unroll
        for (int at = 0; at < ITEMS; at += N) {
            float part[N];
            from.load(part, i + at);
            #pragma unroll
            for (int j = 0; j < N; j++) to[at + j] = part[j];
        }
    } else {
        #pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            float one[1] = {};
            if (j < n) from.load(one, i + j);
            to[j] = one[0];
        }
    }
}
template <class Weights> __device__ __forceinline__ void store_items(const Weights& to, long long i, const float (&from)[ITEMS], int n, bool wide) {
    constexpr int N = Weights::WIDTH;
    if (wide) {
        #pragma unroll
        for (int at = 0; at < ITEMS; at += N) {
            float part[N];
            #pragma unroll
            for (int j = 0; j < N; j++) part[j] = from[at + j];
            to.store(i + at, part);
        }
    } else {
        #pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            float one[1] = {from[j]};
            if (j < n) to.store(i + j, one);
        }
    }
}

// Updates the block whose elements begin at `first`, and whose words are `words`.
template <class Weights> __device__ __forceinline__ void update_block(const AdamW& rule, const Codes& codes, const Weights& weights, unsigned* const (&words)[2], const float* g, long long first, long long n, bool is_aligned) {
    const int lane = threadIdx.x % 32;
    const long long i = first + lane * ITEMS;
    const int own = int(min(max(n - i, 0LL), (long long)ITEMS));
    const bool wide = is_aligned && own == ITEMS;
    float p[ITEMS], gradient[ITEMS], state[2][ITEMS];
    load_items(p, weights, i, own, wide);
    load_items(gradient, Whole{(float*)g}, i, own, wide);
    #pragma unroll
    for (int s = 0; s < 2; s++) {
        const float scale = __uint_as_float(words[s][0]);
        #pragma unroll
        for (int w = 0; w < ITEMS / 4; w++) {
            const unsigned four = 4 * w < own ? words[s][1 + lane * (ITEMS / 4) + w] : 0;
            #pragma unroll
            for (int j = 0; j < 4; j++) state[s][4 * w + j] = 4 * w + j < own ? codes.numbers[s][four >> 8 * j & 255u] * scale : 0.0f;
        }
    }
    float largest[2] = {};
    #pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        float of_element[2] = {state[0][j], state[1][j]};
        if (j < own) rule(p[j], of_element, gradient[j]);
        #pragma unroll
        for (int s = 0; s < 2; s++) {
            state[s][j] = of_element[s];
            largest[s] = fmaxf(largest[s], fabsf(of_element[s]));
        }
    }
    store_items(weights, i, p, own, wide);
    #pragma unroll
    for (int s = 0; s < 2; s++) {
        // Behind it all lanes have read the words.
        largest[s] = warp_max(largest[s]);
        const float factor = 1.0f / fmaxf(largest[s], 1.17549435e-38f);
        if (lane == 0) words[s][0] = __float_as_uint(largest[s]);
        #pragma unroll
        for (int w = 0; w < ITEMS / 4; w++) {
            // Bytes of the last word that no element has are zero.
            unsigned four = 0;
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const float x = state[s][4 * w + j] * factor;
                if (4 * w + j < own) four |= unsigned(s ? codes.nearest<false>(x) : codes.nearest<true>(x)) << 8 * j;
            }
            if (4 * w < own) words[s][1 + lane * (ITEMS / 4) + w] = four;
        }
    }
}
template <class Weights> __device__ __forceinline__ void update_blocks(const AdamW& rule, const Codes& codes, const Weights& weights, unsigned* m, unsigned* v, const float* g, long long n) {
    const bool is_aligned = (weights.starts() | (unsigned long long)g) % 16 == 0;
    const int warps = blockDim.x / 32;
    for (long long block = (long long)blockIdx.x * warps + threadIdx.x / 32; block * BLOCK < n; block += (long long)gridDim.x * warps) {
        unsigned* const words[2] = {m + block * WORDS, v + block * WORDS};
        update_block(rule, codes, weights, words, g, block * BLOCK, n, is_aligned);
    }
}

// AdamW of a run of elements with state in blocks; each warp updates some of them.
extern "C" __global__ void __launch_bounds__(256) adamw_blocks(void* p, unsigned short* rest, unsigned* m, unsigned* v, const float* g, long long n, const double* lr, const double* corrections, const double* coefficient, float keep1, float take1, float keep2, float take2, float eps, double weight_decay) {
    wait_for_predecessor();
    __shared__ AdamW rule;
    __shared__ Codes codes;
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    if (threadIdx.x == 0) rule = adamw_rule(scale, *lr, corrections, keep1, take1, keep2, take2, eps, weight_decay);
    codes.fill();
    if (rest) update_blocks(AdamW(rule), codes, Split{(unsigned short*)p, rest}, m, v, g, n);
    else update_blocks(AdamW(rule), codes, Whole{(float*)p}, m, v, g, n);
}

extern "C" __global__ void __launch_bounds__(256) sgd(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* coefficient, float momentum, float weight_decay) {
    wait_for_predecessor();
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    update_run(Sgd{float(scale), momentum, weight_decay, float(*lr)}, runs, n_runs);
}

extern "C" __global__ void __launch_bounds__(256) lion(const __grid_constant__ Runs runs, int n_runs, const double* lr, const double* coefficient, float keep1, float take1, float keep2, float take2, double weight_decay) {
    wait_for_predecessor();
    double scale = *coefficient;
    if (!is_finite(scale)) return;
    Lion rule = {float(scale), keep1, take1, keep2, take2, float(1.0 - *lr * weight_decay), float(*lr)};
    update_run(rule, runs, n_runs);
}
