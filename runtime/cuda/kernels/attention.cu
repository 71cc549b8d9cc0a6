// Causal grouped-query attention in f32 arithmetic, for all element types and head widths, and its adjoint.
// Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.
//
// Macros: X, element type of queries, keys and values; Y, that of outputs and gradients; HEAD_DIM; TILE, tokens of a tile.
// Blocks of 256 threads have a tile of queries (or of keys); thread (tx, ty) has the rows ty + 16 i of it and the columns
// tx + 16 j. Tiles are f32 in shared memory. The adjoint has one kernel for queries and one for keys, each with a fixed order
// of sums: no atomics.
constexpr int THREADS = 256, EDGE = 16;
constexpr int D = HEAD_DIM;
// Rows of tiles, filled with zeros, and their pitch: eight neighbouring rows start in different banks.
constexpr int WIDTH = (D + 15) / 16 * 16, PITCH = WIDTH + 4, SCORE_PITCH = TILE + 4;
constexpr int ROWS = TILE / EDGE, COLUMNS = TILE / EDGE, WIDE = WIDTH / EDGE;
constexpr int TILE_SIZE = TILE * PITCH;

// Loads the tokens of a tile, and zeros beyond.
template <class T> __device__ __forceinline__ void load(float* to, const T* from, long long stride, int n) {
    constexpr int VECTOR = 16 / sizeof(T);
    if (D % VECTOR == 0) {
        for (int i = threadIdx.x; i < TILE * (WIDTH / VECTOR); i += THREADS) {
            const int row = i / (WIDTH / VECTOR), column = i % (WIDTH / VECTOR) * VECTOR;
            float x[VECTOR] = {};
            if (row < n && column < D) unpack_16(from + row * stride + column, x);
#pragma unroll
            for (int k = 0; k < VECTOR; k += 4) *(float4*)(to + row * PITCH + column + k) = float4{x[k], x[k + 1], x[k + 2], x[k + 3]};
        }
    } else {
        for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
            const int row = i / WIDTH, column = i % WIDTH;
            to[row * PITCH + column] = row < n && column < D ? to_float(from[row * stride + column]) : 0.0f;
        }
    }
}

// s = a b^T, both [TILE, WIDTH].
__device__ __forceinline__ void scores(float (&s)[ROWS][COLUMNS], const float* a, const float* b) {
    a += threadIdx.x / EDGE * PITCH;
    b += threadIdx.x % EDGE * PITCH;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) s[i][j] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < WIDTH; d += 4) {
        float4 y[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) y[j] = *(const float4*)(b + j * EDGE * PITCH + d);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float4 x = *(const float4*)(a + i * EDGE * PITCH + d);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) s[i][j] = fmaf(x.w, y[j].w, fmaf(x.z, y[j].z, fmaf(x.y, y[j].y, fmaf(x.x, y[j].x, s[i][j]))));
        }
    }
}

// sum += p b, where p is [TILE, TILE] and b [TILE, WIDTH].
__device__ __forceinline__ void accumulate(float (&sum)[ROWS][WIDE], const float* p, const float* b) {
    p += threadIdx.x / EDGE * SCORE_PITCH;
    b += threadIdx.x % EDGE;
#pragma unroll 1
    for (int k = 0; k < TILE; k += 4) {
        float4 x[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) x[i] = *(const float4*)(p + i * EDGE * SCORE_PITCH + k);
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const float* y = b + k * PITCH + j * EDGE;
            const float y0 = y[0], y1 = y[PITCH], y2 = y[2 * PITCH], y3 = y[3 * PITCH];
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum[i][j] = fmaf(x[i].w, y3, fmaf(x[i].z, y2, fmaf(x[i].y, y1, fmaf(x[i].x, y0, sum[i][j]))));
        }
    }
}

// Stores each thread's rows of a tile of weights. A row is read by the half warp that wrote it.
__device__ __forceinline__ void keep(float* to, const float (&s)[ROWS][COLUMNS]) {
    to += threadIdx.x / EDGE * SCORE_PITCH + threadIdx.x % EDGE;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) to[i * EDGE * SCORE_PITCH + j * EDGE] = s[i][j];
    __syncwarp();
}

// Writes `factor sum`, added to `before` if there is any, to the columns of a head; `to` may be `before`.
__device__ __forceinline__ void store(Y* to, const Y* before, long long stride, int n, const float (&sum)[ROWS][WIDE], float factor) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = threadIdx.x / EDGE + i * EDGE;
        if (row >= n) continue;
#pragma unroll
        for (int j = 0; j < WIDE; j++) {
            const int column = threadIdx.x % EDGE + j * EDGE;
            if (column >= D) continue;
            const long long at = row * stride + column;
            to[at] = from_float<Y>(before ? fmaf(factor, sum[i][j], to_float(before[at])) : factor * sum[i][j]);
        }
    }
}

// The softmax so far of the rows of a thread: its largest score, and the sum of this thread's weights relative to that.
struct Running { float top[ROWS], total[ROWS]; };

// Turns scores, in units of log2, into weights relative to the largest score so far, and rescales earlier sums.
__device__ __forceinline__ void online_softmax(float (&s)[ROWS][COLUMNS], Running& running, float (&sum)[ROWS][WIDE]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float top = running.top[i];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) top = fmaxf(top, s[i][j]);
        top = lane_max<EDGE>(top);
        // A query that has seen no key yet: any finite reference makes its weights 0.
        const float reference = top == -INFINITY ? 0.0f : top, shrink = fast_exp2(running.top[i] - reference);
        running.top[i] = top;
        running.total[i] *= shrink;
#pragma unroll
        for (int j = 0; j < WIDE; j++) sum[i][j] *= shrink;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            s[i][j] = fast_exp2(s[i][j] - reference);
            running.total[i] += s[i][j];
        }
    }
}

// o = softmax(scale q k^T) v and lse of one tile of queries of one head, merged with o0 and lse0 if they are given; these may
// be the memory of o and lse. Grid: (rows n_heads, tiles of queries).
extern "C" __global__ void __launch_bounds__(256, 2) attention_forward(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ doc_start,
                                                                   const Y* o0, const float* lse0, Y* o, float* lse, Geometry g, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(float, queries);
    __shared__ int from[TILE];
    // Weights take the place of the keys.
    float *keys = queries + TILE_SIZE, *values = keys + (TILE_SIZE > TILE * SCORE_PITCH ? TILE_SIZE : TILE * SCORE_PITCH);
    const int head = blockIdx.x % int(g.n_heads), row = blockIdx.x / int(g.n_heads), ty = threadIdx.x / EDGE, tx = threadIdx.x % EDGE;
    const int kv_head = head / (int(g.n_heads) / int(g.n_kv_heads));
    // The last tiles see the most keys: started first, they leave no long block for the end.
    const Tile tile = query_tile(g, row, gridDim.y - 1 - blockIdx.y, TILE);
    int low, high;
    visible_indexes<TILE>(g, tile, doc_start, from, low, high);
    load(queries, q + tile.token * g.q_stride + (long long)head * D, g.q_stride, tile.n);
    Running running;
    float sum[ROWS][WIDE];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const long long at = (tile.token + ty + i * EDGE) * g.n_heads + head;
        const bool carried = o0 && ty + i * EDGE < tile.n;
        const float before = carried ? lse0[at] : -INFINITY;
        running.top[i] = before * LOG2_E;
        // An average is a sum whose weights add up to 1.
        running.total[i] = before == -INFINITY || tx ? 0.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < WIDE; j++) sum[i][j] = carried && tx + j * EDGE < D ? to_float(o0[at * D + tx + j * EDGE]) : 0.0f;
    }
    const int last = tile.index + tile.n - 1;
    Tiles seen = tiles_between(low, last);
    while (seen.next(g, n_key_runs(g), TILE, [&](int run) { return key_run(g, row, run); })) {
        const Tile other = tile_of(g, key_run(g, row, seen.run), seen.start, TILE);
        __syncthreads();
        load(keys, k + other.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, other.n);
        load(values, v + other.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, other.n);
        __syncthreads();
        float s[ROWS][COLUMNS];
        scores(s, queries, keys);
        const bool masked = other.n < TILE || other.index < high || other.index + TILE - 1 > tile.index;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int key = tx + j * EDGE, index = other.index + key, query = ty + i * EDGE;
                const bool hidden = masked && (key >= other.n || index > tile.index + query || index < from[query]);
                s[i][j] = hidden ? -INFINITY : s[i][j] * (scale * LOG2_E);
            }
        online_softmax(s, running, sum);
        __syncthreads();
        keep(keys, s);
        accumulate(sum, keys, values);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float total = running.total[i];
        total = lane_sum<EDGE>(total);
        const int query = ty + i * EDGE;
        const long long at = (tile.token + query) * g.n_heads + head;
        // Without any visible key: an output of 0 and an lse of minus infinity.
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        if (query >= tile.n) continue;
        if (tx == 0) lse[at] = (running.top[i] + fast_log2(total)) * LN_2;
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            if (tx + j * EDGE < D) o[at * D + tx + j * EDGE] = from_float<Y>(sum[i][j] * inverse);
    }
}

// dq of one tile of queries of one head, added to dq0 if it is given. statistics: of attention_prepare.cu, as are `bounds`, of
// tiles of TILE queries, and `all_from` below. Grid: (rows n_heads, tiles of queries).
extern "C" __global__ void __launch_bounds__(256, 1) attention_dq(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ doc_start,
                                                              const float2* __restrict__ statistics, const Y* __restrict__ dout, const Y* dq0, Y* dq,
                                                              Geometry g, long long dq_stride, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(float, queries);
    __shared__ int from[TILE];
    float *gradients = queries + TILE_SIZE, *keys = gradients + TILE_SIZE, *values = keys + TILE_SIZE; // gradients of scores replace the values
    const int head = blockIdx.x % int(g.n_heads), row = blockIdx.x / int(g.n_heads), ty = threadIdx.x / EDGE, tx = threadIdx.x % EDGE;
    const int kv_head = head / (int(g.n_heads) / int(g.n_kv_heads));
    long long place;
    const Tile tile = query_tile(g, row, gridDim.y - 1 - blockIdx.y, TILE, &place);
    int low, high;
    visible_indexes<TILE>(g, tile, doc_start, from, low, high);
    load(queries, q + tile.token * g.q_stride + (long long)head * D, g.q_stride, tile.n);
    load(gradients, dout + (tile.token * g.n_heads + head) * D, g.n_heads * D, tile.n);
    float sum[ROWS][WIDE] = {};
    float2 known[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) known[i] = ty + i * EDGE < tile.n ? statistics[head * padded_queries(g) + place + ty + i * EDGE] : float2{0.0f, 0.0f};
    Tiles seen = tiles_between(low, tile.index + tile.n - 1);
    while (seen.next(g, n_key_runs(g), TILE, [&](int run) { return key_run(g, row, run); })) {
        const Tile other = tile_of(g, key_run(g, row, seen.run), seen.start, TILE);
        __syncthreads();
        load(keys, k + other.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, other.n);
        load(values, v + other.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, other.n);
        __syncthreads();
        float s[ROWS][COLUMNS], dp[ROWS][COLUMNS];
        scores(s, queries, keys);
        scores(dp, gradients, values);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int key = tx + j * EDGE, index = other.index + key, query = ty + i * EDGE;
                const bool hidden = key >= other.n || index > tile.index + query || index < from[query];
                s[i][j] = hidden ? 0.0f : fast_exp2(fmaf(s[i][j], scale * LOG2_E, -known[i].x)) * (dp[i][j] - known[i].y);
            }
        __syncthreads();
        keep(values, s);
        accumulate(sum, values, keys);
    }
    const long long at = tile.token * dq_stride + (long long)head * D;
    store(dq + at, dq0 ? dq0 + at : dq0, dq_stride, tile.n, sum, scale);
}

// dk and dv of one tile of keys of one key head, added to dk0 and dv0 if they are given: the sum over the query heads of its
// group, one after the other. Grid: (rows n_kv_heads, tiles of keys).
extern "C" __global__ void __launch_bounds__(256, 1) attention_dkv(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ all_from,
                                                               const int* __restrict__ bounds, const float2* __restrict__ statistics, const Y* __restrict__ dout,
                                                               const Y* dk0, const Y* dv0, Y* dk, Y* dv, Geometry g, long long dkv_stride, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(float, keys);
    __shared__ int from[TILE];
    __shared__ float2 known[TILE];
    float *values = keys + TILE_SIZE, *queries = values + TILE_SIZE, *gradients = queries + TILE_SIZE, *weights = gradients + TILE_SIZE;
    const int kv_head = blockIdx.x % int(g.n_kv_heads), row = blockIdx.x / int(g.n_kv_heads), ty = threadIdx.x / EDGE, tx = threadIdx.x % EDGE;
    const int group = int(g.n_heads) / int(g.n_kv_heads), tiles_per_run = (run_len(g) + TILE - 1) / TILE;
    const Tile tile = key_tile(g, row, blockIdx.y, TILE); // the first tiles are seen by the most queries
    load(keys, k + tile.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, tile.n);
    load(values, v + tile.token * g.kv_stride + (long long)kv_head * D, g.kv_stride, tile.n);
    float of_k[ROWS][WIDE] = {}, of_v[ROWS][WIDE] = {};
    const long long last = tile.index + tile.n - 1, seen_to = last + g.window - 1;
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        Tiles seeing = tiles_between(tile.index, seen_to < 0x7fffffff ? int(seen_to) : 0x7fffffff);
        while (seeing.next(g, runs_of_rank(g), TILE, [&](int run) { return query_run(g, row, run); })) {
            if (last < bounds[2 * ((row * runs_of_rank(g) + seeing.run) * tiles_per_run + seeing.start / TILE)]) continue; // of later documents
            const Tile other = tile_of(g, query_run(g, row, seeing.run), seeing.start, TILE);
            __syncthreads();
            load(queries, q + other.token * g.q_stride + (long long)head * D, g.q_stride, other.n);
            load(gradients, dout + (other.token * g.n_heads + head) * D, g.n_heads * D, other.n);
            if (threadIdx.x < TILE) {
                const long long place = padded_place(g, row, seeing.run, seeing.start) + threadIdx.x;
                const bool is_query = threadIdx.x < other.n;
                from[threadIdx.x] = is_query ? all_from[place] : 0;
                known[threadIdx.x] = is_query ? statistics[head * padded_queries(g) + place] : float2{0.0f, 0.0f};
            }
            __syncthreads();
            float s[ROWS][COLUMNS], dp[ROWS][COLUMNS];
            scores(s, keys, queries);
            scores(dp, values, gradients);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    const int index = tile.index + ty + i * EDGE, query = tx + j * EDGE;
                    const bool hidden = index > other.index + query || index < from[query];
                    s[i][j] = hidden ? 0.0f : fast_exp2(fmaf(s[i][j], scale * LOG2_E, -known[query].x));
                    dp[i][j] = s[i][j] * (dp[i][j] - known[query].y);
                }
            keep(weights, s);
            accumulate(of_v, weights, gradients);
            __syncwarp();
            keep(weights, dp);
            accumulate(of_k, weights, queries);
        }
    }
    const long long at = tile.token * dkv_stride + (long long)kv_head * D;
    store(dk + at, dk0 ? dk0 + at : dk0, dkv_stride, tile.n, of_k, scale);
    store(dv + at, dv0 ? dv0 + at : dv0, dkv_stride, tile.n, of_v, 1.0f);
}
