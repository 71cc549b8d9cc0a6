// Causal grouped-query attention on tensor cores.
// Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 1. A block has a tile of queries of one head, a warp 16
// PARTS of them: two parts share each fragment of keys, since one part alone would be bound by shared memory. Keys and values
// come in tiles, two in flight. Sums are f32; weights are rounded to X, as an operand of a product has to be.
constexpr int PARTS = D <= 128 ? 2 : 1, WARPS = 4, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * PARTS, QUERIES = ROWS * WARPS, KEYS = D <= 64 ? 64 : D <= 128 ? 32 : 16;

// The softmax so far of a thread's rows: the largest score, and this thread's sum of weights relative to that.
struct Running { float top[PARTS][2], total[PARTS][2]; };

// Turns scores into weights relative to the largest so far, and rescales earlier sums.
__device__ __forceinline__ void online_softmax(float (&s)[PARTS][KEYS / 8][4], Running& running, float (&sum)[PARTS][WIDTH / 8][4], float scale) {
    float shrink[PARTS][2], reference[PARTS][2];
    bool shrinks = false;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = running.top[p][h];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[p][n][2 * h], s[p][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            // A query that has seen no key yet: any finite reference makes its weights 0.
            reference[p][h] = top == -INFINITY ? 0.0f : top * scale;
            shrink[p][h] = fast_exp2(fmaf(running.top[p][h], scale, -reference[p][h]));
            shrinks |= shrink[p][h] != 1.0f;
            running.top[p][h] = top;
            running.total[p][h] *= shrink[p][h];
        }
    // After the first tiles the largest score rarely changes.
    if (__ballot_sync(~0u, shrinks)) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int d = 0; d < WIDTH / 8; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[p][d][i] *= shrink[p][i / 2];
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[p][n][i] = fast_exp2(fmaf(s[p][n][i], scale, -reference[p][i / 2]));
                running.total[p][i / 2] += s[p][n][i];
            }
}

// Continues from the result over other keys, if there is one. The rows of the warp are the `n` queries from `token` on.
__device__ __forceinline__ void begin(Running& running, float (&sum)[PARTS][WIDTH / 8][4], const Y* o0, const float* lse0, const Geometry& g, long long token, int head, int n, float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int query = p * 16 + h * 8 + lane / 4;
            const long long at = (token + query) * g.n_heads + head;
            const bool carried = o0 && query < n;
            const float before = carried ? lse0[at] : -INFINITY;
            running.top[p][h] = before / scale;
            // An average is a sum whose weights add up to 1.
            running.total[p][h] = before == -INFINITY || lane % 4 ? 0.0f : 1.0f;
#pragma unroll
            for (int d = 0; d < WIDTH / 8; d++)
#pragma unroll
                for (int i = 0; i < 2; i++) sum[p][d][2 * h + i] = carried && d * 8 < D ? to_float(o0[at * D + d * 8 + lane % 4 * 2 + i]) : 0.0f;
        }
}

// Divides the sums by the sums of weights, and writes lse.
__device__ __forceinline__ void finish(const Running& running, float (&sum)[PARTS][WIDTH / 8][4], float* lse, const Geometry& g, long long token, int head, int n, float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = running.total[p][h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            // Without any visible key: an output of 0 and an lse of minus infinity.
            const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
            const int query = p * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && query < n) lse[(token + query) * g.n_heads + head] = running.top[p][h] * scale + fast_log2(total) * LN_2;
#pragma unroll
            for (int d = 0; d < WIDTH / 8; d++) {
                sum[p][d][2 * h] *= inverse;
                sum[p][d][2 * h + 1] *= inverse;
            }
        }
}

// o = softmax(scale q k^T) v and lse, merged with o0 and lse0 if they are given; these may be the memory of o and lse.
// `scale` is positive. Grid: (rows n_heads, tiles of queries).
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_mma_forward(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ doc_start,
                                                                              const Y* o0, const float* lse0, Y* o, float* lse, Geometry g, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(X, queries); // then keys and values of two stages
    __shared__ int from[QUERIES];
    X* stages = queries + QUERIES * PITCH;
    const int head = blockIdx.x % int(g.n_heads), row = blockIdx.x / int(g.n_heads), kv_head = head / (int(g.n_heads) / int(g.n_kv_heads));
    const int row0 = threadIdx.x / 32 * ROWS;
    // The last tiles see the most keys: started first, they leave no long block for the end.
    const Tile tile = query_tile(g, row, gridDim.y - 1 - blockIdx.y, QUERIES);
    auto run_of = [&](int run) { return key_run(g, row, run); };
    auto fetch = [&](const Tile& other, int stage) {
        const long long at = other.token * g.kv_stride + kv_head * D;
        load<KEYS, THREADS>(stages + stage * 2 * KEYS * PITCH, k + at, int(g.kv_stride), other.n);
        load<KEYS, THREADS>(stages + (stage * 2 + 1) * KEYS * PITCH, v + at, int(g.kv_stride), other.n);
        cp_async_commit();
    };
    load<QUERIES, THREADS>(queries, q + tile.token * g.q_stride + head * D, int(g.q_stride), tile.n);
    int low, high; // of the block, then of the warp
    visible_indexes<QUERIES>(g, tile, doc_start, from, low, high);
    Tiles seen = tiles_between(low, tile.index + tile.n - 1);
    bool is_left = seen.next(g, n_key_runs(g), KEYS, run_of);
    Tile other = tile_of(g, key_run(g, row, seen.run), seen.start, KEYS);
    if (is_left) fetch(other, 0);
    warp_bounds<ROWS>(from + row0, low, high);
    const int first = tile.index + row0, last = tile.index + (row0 + ROWS < tile.n ? row0 + ROWS : tile.n) - 1;

    Running running;
    float sum[PARTS][WIDTH / 8][4];
    begin(running, sum, o0, lse0, g, tile.token + row0, head, tile.n - row0, scale);
    for (int stage = 0; is_left; stage ^= 1) {
        const Tile now = other;
        cp_async_wait<0>();
        __syncthreads(); // all have this tile, and none needs the tile before it
        is_left = seen.next(g, n_key_runs(g), KEYS, run_of);
        if (is_left) {
            other = tile_of(g, key_run(g, row, seen.run), seen.start, KEYS);
            fetch(other, stage ^ 1);
        }
        if (now.index > last || now.index + now.n <= low) continue; // not seen by this warp
        const X* keys = stages + stage * 2 * KEYS * PITCH;
        float s[PARTS][KEYS / 8][4];
        scores<PARTS, KEYS, D <= 64 ? unrolled(4) : 1>(s, queries + row0 * PITCH, keys);
        if (now.n < KEYS || now.index < high || now.index + KEYS - 1 > first) hide<PARTS, KEYS>(s, from + row0, first, now.index, now.n, -INFINITY);
        online_softmax(s, running, sum, scale * LOG2_E);
        accumulate<PARTS, KEYS>(sum, s, keys + KEYS * PITCH);
    }
    // Where no tile was seen, queries may still be arriving where results pass.
    cp_async_wait<0>();
    __syncthreads();
    finish(running, sum, lse, g, tile.token + row0, head, tile.n - row0, scale);
    store<PARTS>(o + ((tile.token + row0) * g.n_heads + head) * D, (const Y*)nullptr, g.n_heads * D, tile.n - row0, sum, queries + row0 * PITCH);
}
