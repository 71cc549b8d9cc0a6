// A cache of keys and values: new tokens are written to it, and attend to it, in f32 arithmetic.
// Source of the division into spans: Dao et al. 2023, Flash-Decoding. A new token has few queries, so its keys are divided
// among blocks, and a second kernel merges their results in the order of the spans.
//
// X: element type.
// qkv: [n, qkv_columns], positions: [n], cache: [sequences, capacity, columns], keys, then values; `seq_len` tokens of each
// sequence are new.
constexpr int THREADS = 256, WARPS = THREADS / 32;
// Keys and query heads of a block; see `lower/cache.rs`.
constexpr int SPAN = 256, HEADS = 8;

__device__ __forceinline__ float exp_of(float x) { return fast_exp2(x * 1.4426950408889634f); }

extern "C" __global__ void __launch_bounds__(THREADS) cache_write(const X* __restrict__ qkv, const int* __restrict__ positions, X* cache,
        int seq_len, int capacity, int qkv_columns, int columns, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n * columns) {
        const long long token = i / columns, column = i % columns;
        const long long row = token / seq_len * capacity + positions[token];
        cache[row * columns + column] = qkv[token * qkv_columns + qkv_columns - columns + column];
    }
}

// The heads of a group of query heads that share a key/value head are divided among `parts` blocks. blockIdx.x counts parts of
// the key/value heads of the tokens, blockIdx.y spans of keys.
// sums: [n, n_heads, spans, d], values weighted relative to the largest score of the span; stats: [n, n_heads, spans, 2], that
// score and the sum of the weights, which is 0 if the token sees no key of the span. Then the sums are not written.
// Five blocks of a multiprocessor: for more, NVIDIA's compiler would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 5) cached_attention(const X* __restrict__ qkv, const int* __restrict__ positions, const X* __restrict__ cache,
        float* __restrict__ sums, float* __restrict__ stats, int seq_len, int n_heads, int n_kv_heads, int d, int capacity, int window,
        int parts, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(float, shared);
    const int group = n_heads / n_kv_heads, part = blockIdx.x % parts, kv_head = blockIdx.x / parts % n_kv_heads;
    const int token = blockIdx.x / parts / n_kv_heads, span = blockIdx.y, spans = gridDim.y;
    const int first_head = kv_head * group + part * HEADS, heads = min(HEADS, group - part * HEADS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int position = positions[token];
    const int first = max(span * SPAN, position - window + 1), n = min((span + 1) * SPAN, position + 1) - first;
    // Of this block's first head; the next heads follow after `spans` of it each.
    const long long result = ((long long)token * n_heads + first_head) * spans + span;
    if (n <= 0) {
        for (int h = threadIdx.x; h < heads; h += THREADS) {
            stats[(result + (long long)h * spans) * 2] = -INFINITY;
            stats[(result + (long long)h * spans) * 2 + 1] = 0.0f;
        }
        return;
    }
    const int columns = 2 * n_kv_heads * d;
    const X* keys = cache + ((long long)(token / seq_len) * capacity + first) * columns + kv_head * d;
    const X* values = keys + n_kv_heads * d;
    float *q = shared, *weights = shared + heads * d;
    const X* queries = qkv + (long long)token * (n_heads * d + columns) + first_head * d;
    for (int i = threadIdx.x; i < heads * d; i += THREADS) q[i] = scale * to_float(queries[i]);
    __syncthreads();
    for (int j = warp; j < n; j += WARPS) {
        const X* key = keys + (long long)j * columns;
        for (int h = 0; h < heads; h++) {
            float sum = 0.0f;
            for (int c = lane; c < d; c += 32) sum = fmaf(q[h * d + c], to_float(key[c]), sum);
            sum = warp_sum(sum);
            if (lane == 0) weights[h * SPAN + j] = sum;
        }
    }
    __syncthreads();
    for (int h = warp; h < heads; h += WARPS) {
        float largest = -INFINITY, total = 0.0f;
        for (int j = lane; j < n; j += 32) largest = fmaxf(largest, weights[h * SPAN + j]);
        largest = warp_max(largest);
        for (int j = lane; j < n; j += 32) {
            const float weight = exp_of(weights[h * SPAN + j] - largest);
            weights[h * SPAN + j] = weight;
            total += weight;
        }
        total = warp_sum(total);
        if (lane == 0) {
            stats[(result + (long long)h * spans) * 2] = largest;
            stats[(result + (long long)h * spans) * 2 + 1] = total;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * d; i += THREADS) {
        const int h = i / d, c = i % d;
        float sum = 0.0f;
        for (int j = 0; j < n; j++) sum = fmaf(weights[h * SPAN + j], to_float(values[(long long)j * columns + c]), sum);
        sums[(result + (long long)h * spans) * d + c] = sum;
    }
}

// o: [n, n_heads, d], lse: [n, n_heads]; rows: n n_heads.
extern "C" __global__ void __launch_bounds__(THREADS) merge_spans(const float* __restrict__ sums, const float* __restrict__ stats,
        X* __restrict__ o, float* __restrict__ lse, int spans, int d, long long rows) {
    wait_for_predecessor();
    GRID_STRIDE(i, rows * d) {
        const long long row = i / d, column = i % d;
        const float* of_row = stats + row * spans * 2;
        float largest = -INFINITY, total = 0.0f, sum = 0.0f;
        for (int s = 0; s < spans; s++) largest = fmaxf(largest, of_row[2 * s]);
        for (int s = 0; s < spans; s++) {
            if (of_row[2 * s + 1] == 0.0f) continue;
            const float factor = exp_of(of_row[2 * s] - largest);
            total = fmaf(factor, of_row[2 * s + 1], total);
            sum = fmaf(factor, sums[(row * spans + s) * d + column], sum);
        }
        o[i] = from_float<X>(sum / total);
        if (column == 0) lse[row] = largest + fast_log2(total) * 0.6931471805599453f;
    }
}
