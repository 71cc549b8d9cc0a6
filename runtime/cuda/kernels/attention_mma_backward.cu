// The adjoint of causal grouped-query attention on tensor cores, for heads of at most 128 columns.
// Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 2. We differ: queries and keys have a kernel each, so that
// every gradient is summed by one block in a fixed order, at the price of two more products. Weights and gradients of scores
// stay in registers and are rounded to X, as operands of products have to be.
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int STRIP = 32; // scores of a warp at a time, along the tile that all warps share

// Queries of a block and keys of a stage of `attention_mma_dq`.
constexpr int Q_PARTS = 2, Q_ROWS = 16 * Q_PARTS, QUERIES = Q_ROWS * WARPS, STAGE_KEYS = D <= 64 ? 64 : 32;
// Keys of a block and queries of a stage of `attention_mma_dkv`: both gradients take registers.
constexpr int K_PARTS = D <= 64 ? 2 : 1, K_ROWS = 16 * K_PARTS, KEYS = K_ROWS * WARPS, STAGE_QUERIES = D <= 64 ? 64 : 32;

// Turns scores into their gradients: the weight times the difference of its gradient from delta. Rows are queries.
__device__ __forceinline__ void score_gradients(float (&s)[Q_PARTS][STRIP / 8][4], const float (&dp)[Q_PARTS][STRIP / 8][4], const float2* known, float scale) {
#pragma unroll
    for (int p = 0; p < Q_PARTS; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 of_query = known[p * 16 + h * 8 + threadIdx.x % 32 / 4];
#pragma unroll
            for (int j = 0; j < STRIP / 8; j++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) s[p][j][i] = fast_exp2(fmaf(s[p][j][i], scale, -of_query.x)) * (dp[p][j][i] - of_query.y);
        }
}

// dq of one tile of queries of one head, added to dq0 if it is given. Grid: (rows n_heads, tiles of queries).
// statistics: of attention_prepare.cu, as are `bounds`, of tiles of STAGE_QUERIES, and `all_from` below.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_mma_dq(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ doc_start,
                                                                         const float2* __restrict__ statistics, const X* __restrict__ dout, const Y* dq0, Y* dq,
                                                                         Geometry g, long long dq_stride, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(X, queries); // gradients of outputs, then keys and values of two stages
    __shared__ int from[QUERIES];
    __shared__ float2 known[QUERIES]; // statistics
    static_assert(QUERIES == THREADS, "each thread has a query's statistics");
    X *gradients = queries + QUERIES * PITCH, *stages = gradients + QUERIES * PITCH;
    const int head = blockIdx.x % int(g.n_heads), row = blockIdx.x / int(g.n_heads), kv_head = head / (int(g.n_heads) / int(g.n_kv_heads));
    const int row0 = threadIdx.x / 32 * Q_ROWS;
    long long place;
    const Tile tile = query_tile(g, row, gridDim.y - 1 - blockIdx.y, QUERIES, &place);
    auto run_of = [&](int run) { return key_run(g, row, run); };
    auto fetch = [&](const Tile& other, int stage) {
        const long long at = other.token * g.kv_stride + kv_head * D;
        load<STAGE_KEYS, THREADS>(stages + stage * 2 * STAGE_KEYS * PITCH, k + at, int(g.kv_stride), other.n);
        load<STAGE_KEYS, THREADS>(stages + (stage * 2 + 1) * STAGE_KEYS * PITCH, v + at, int(g.kv_stride), other.n);
        cp_async_commit();
    };
    load<QUERIES, THREADS>(queries, q + tile.token * g.q_stride + head * D, int(g.q_stride), tile.n);
    load<QUERIES, THREADS>(gradients, dout + (tile.token * g.n_heads + head) * D, int(g.n_heads) * D, tile.n);
    int low, high; // of the block, then of the warp
    visible_indexes<QUERIES>(g, tile, doc_start, from, low, high);
    Tiles seen = tiles_between(low, tile.index + tile.n - 1);
    bool is_left = seen.next(g, n_key_runs(g), STAGE_KEYS, run_of);
    Tile other = tile_of(g, key_run(g, row, seen.run), seen.start, STAGE_KEYS);
    if (is_left) fetch(other, 0);
    warp_bounds<Q_ROWS>(from + row0, low, high);
    const int first = tile.index + row0, last = tile.index + (row0 + Q_ROWS < tile.n ? row0 + Q_ROWS : tile.n) - 1;

    float sum[Q_PARTS][WIDTH / 8][4] = {};
    // In shared memory, because no registers are left. The first barrier of the loop is behind the writes.
    known[threadIdx.x] = int(threadIdx.x) < tile.n ? statistics[head * padded_queries(g) + place + threadIdx.x] : float2{0.0f, 0.0f};
    for (int stage = 0; is_left; stage ^= 1) {
        const Tile now = other;
        cp_async_wait<0>();
        __syncthreads(); // all have this tile, and none needs the tile before it
        is_left = seen.next(g, n_key_runs(g), STAGE_KEYS, run_of);
        if (is_left) {
            other = tile_of(g, key_run(g, row, seen.run), seen.start, STAGE_KEYS);
            fetch(other, stage ^ 1);
        }
        const X *keys = stages + stage * 2 * STAGE_KEYS * PITCH, *values = keys + STAGE_KEYS * PITCH;
#pragma unroll 1
        for (int strip = 0; strip < now.n; strip += STRIP) {
            const int index = now.index + strip, n = now.n - strip;
            if (index > last || index + STRIP <= low) continue; // not seen by this warp
            float s[Q_PARTS][STRIP / 8][4], dp[Q_PARTS][STRIP / 8][4];
            scores<Q_PARTS, STRIP, 4>(s, queries + row0 * PITCH, keys + strip * PITCH);
            scores<Q_PARTS, STRIP, 4>(dp, gradients + row0 * PITCH, values + strip * PITCH);
            score_gradients(s, dp, known + row0, scale * LOG2_E);
            if (n < STRIP || index < high || index + STRIP - 1 > first) hide<Q_PARTS, STRIP>(s, from + row0, first, index, n, 0.0f);
            accumulate<Q_PARTS, STRIP>(sum, s, keys + strip * PITCH);
        }
    }
    // Where no tile was seen, queries may still be arriving where results pass.
    cp_async_wait<0>();
    __syncthreads();
    multiply_all<Q_PARTS>(sum, scale);
    const long long at = (tile.token + row0) * dq_stride + head * D;
    store<Q_PARTS>(dq + at, dq0 ? dq0 + at : dq0, dq_stride, tile.n - row0, sum, queries + row0 * PITCH);
}

// Visits the tiles of queries that see a tile of keys: head by head of its group, and along the row for each head.
struct Seeing {
    int head, number; // query head; number of the current tile among those of all rows
    Tiles tiles;
    __device__ __forceinline__ bool next(const Geometry& g, int row, int head_end, const Tile& keys, const int* bounds) {
        const int per_run = (run_len(g) + STAGE_QUERIES - 1) / STAGE_QUERIES, last = keys.index + keys.n - 1;
        for (;;) {
            if (tiles.next(g, runs_of_rank(g), STAGE_QUERIES, [&](int run) { return query_run(g, row, run); })) {
                number = (row * runs_of_rank(g) + tiles.run) * per_run + tiles.start / STAGE_QUERIES;
                if (last >= bounds[2 * number]) return true; // others are of later documents
            } else {
                if (++head == head_end) return false;
                tiles = tiles_between(tiles.low, tiles.high);
            }
        }
    }
};

// Turns scores into weights. Columns are queries, of which `known` has pairs.
__device__ __forceinline__ void weights(float (&s)[K_PARTS][STRIP / 8][4], const float4* known, float scale) {
#pragma unroll
    for (int j = 0; j < STRIP / 8; j++) {
        const float4 pair = known[j * 4 + threadIdx.x % 4];
#pragma unroll
        for (int p = 0; p < K_PARTS; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[p][j][i] = fast_exp2(fmaf(s[p][j][i], scale, -(i % 2 ? pair.z : pair.x)));
    }
}

// Turns weights into gradients of scores.
__device__ __forceinline__ void score_gradients_of_keys(float (&s)[K_PARTS][STRIP / 8][4], const float (&dp)[K_PARTS][STRIP / 8][4], const float4* known) {
#pragma unroll
    for (int j = 0; j < STRIP / 8; j++) {
        const float4 pair = known[j * 4 + threadIdx.x % 4];
#pragma unroll
        for (int p = 0; p < K_PARTS; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[p][j][i] *= dp[p][j][i] - (i % 2 ? pair.w : pair.y);
    }
}

// Clears the weights that queries do not give to keys. Rows are the keys from index `first` on, columns the queries from `index`
// on, which see the keys from `from` on.
__device__ __forceinline__ void hide_queries(float (&s)[K_PARTS][STRIP / 8][4], const int* from, int index, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < STRIP / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int query = j * 8 + lane % 4 * 2 + i, least = from[query] - first - lane / 4, most = index + query - first - lane / 4;
#pragma unroll
            for (int p = 0; p < K_PARTS; p++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int key = p * 16 + h * 8;
                    if ((key < least) | (key > most)) s[p][j][2 * h + i] = 0.0f;
                }
        }
}

// dk and dv of one tile of keys of one key head, added to dk0 and dv0 if they are given: the sum over the query heads of its
// group, one after the other. Grid: (rows n_kv_heads, tiles of keys).
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_mma_dkv(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, const int* __restrict__ all_from,
                                                                          const int* __restrict__ bounds, const float2* __restrict__ statistics, const X* __restrict__ dout,
                                                                          const Y* dk0, const Y* dv0, Y* dk, Y* dv, Geometry g, long long dkv_stride, float scale) {
    wait_for_predecessor();
    DYNAMIC_SHARED(X, keys); // values, then queries and gradients of outputs of two stages
    __shared__ float4 known[2][STAGE_QUERIES / 2]; // statistics of pairs of queries
    __shared__ uint4 from[2][STAGE_QUERIES / 4];
    X *values = keys + KEYS * PITCH, *stages = values + KEYS * PITCH;
    const int kv_head = blockIdx.x % int(g.n_kv_heads), row = blockIdx.x / int(g.n_kv_heads), group = int(g.n_heads) / int(g.n_kv_heads);
    const int row0 = threadIdx.x / 32 * K_ROWS;
    const Tile tile = key_tile(g, row, blockIdx.y, KEYS); // the first tiles are seen by the most queries
    const long long key_at = tile.token * g.kv_stride + kv_head * D, seen_to = tile.index + tile.n - 2 + g.window;
    const int first = tile.index + row0, last = tile.index + (row0 + K_ROWS < tile.n ? row0 + K_ROWS : tile.n) - 1;
    load<KEYS, THREADS>(keys, k + key_at, int(g.kv_stride), tile.n);
    load<KEYS, THREADS>(values, v + key_at, int(g.kv_stride), tile.n);

    Seeing seeing = {kv_head * group, 0, tiles_between(tile.index, seen_to < 0x7fffffff ? int(seen_to) : 0x7fffffff)};
    auto advance = [&] { return seeing.next(g, row, (kv_head + 1) * group, tile, bounds); };
    auto fetch = [&](int stage) {
        const int head = seeing.head;
        const Tile other = tile_of(g, query_run(g, row, seeing.tiles.run), seeing.tiles.start, STAGE_QUERIES);
        X* to = stages + stage * 2 * STAGE_QUERIES * PITCH;
        load<STAGE_QUERIES, THREADS>(to, q + other.token * g.q_stride + head * D, int(g.q_stride), other.n);
        load<STAGE_QUERIES, THREADS>(to + STAGE_QUERIES * PITCH, dout + (other.token * g.n_heads + head) * D, int(g.n_heads) * D, other.n);
        const long long place = padded_place(g, row, seeing.tiles.run, seeing.tiles.start);
        const int pair = threadIdx.x, four = threadIdx.x - STAGE_QUERIES / 2;
        if (four < 0) cp_async_16(&known[stage][pair], statistics + head * padded_queries(g) + place + 2 * pair, 2 * pair < other.n ? 16 : 0);
        else if (four < STAGE_QUERIES / 4) cp_async_16(&from[stage][four], all_from + place + 4 * four, 4 * four < other.n ? 16 : 0);
        cp_async_commit();
    };
    bool is_left = advance();
    if (is_left) fetch(0);
    float of_k[K_PARTS][WIDTH / 8][4] = {}, of_v[K_PARTS][WIDTH / 8][4] = {};
    for (int stage = 0; is_left; stage ^= 1) {
        const Tile now = tile_of(g, query_run(g, row, seeing.tiles.run), seeing.tiles.start, STAGE_QUERIES);
        const int high = bounds[2 * seeing.number + 1];
        cp_async_wait<0>();
        __syncthreads(); // all have this tile, and none needs the tile before it
        is_left = advance();
        if (is_left) fetch(stage ^ 1);
        const X *queries = stages + stage * 2 * STAGE_QUERIES * PITCH, *gradients = queries + STAGE_QUERIES * PITCH;
#pragma unroll 1
        for (int strip = 0; strip < now.n; strip += STRIP) {
            const int index = now.index + strip;
            if (index + STRIP <= first || last < first) continue; // not seeing this warp's keys
            float s[K_PARTS][STRIP / 8][4], dp[K_PARTS][STRIP / 8][4];
            scores<K_PARTS, STRIP, unrolled(2)>(s, keys + row0 * PITCH, queries + strip * PITCH);
            weights(s, known[stage] + strip / 2, scale * LOG2_E);
            if (index < last || high > first) hide_queries(s, (const int*)from[stage] + strip, index, first);
            accumulate<K_PARTS, STRIP>(of_v, s, gradients + strip * PITCH);
            scores<K_PARTS, STRIP, unrolled(2)>(dp, values + row0 * PITCH, gradients + strip * PITCH);
            score_gradients_of_keys(s, dp, known[stage] + strip / 2);
            accumulate<K_PARTS, STRIP>(of_k, s, queries + strip * PITCH);
        }
    }
    // Where no tile was seen, keys and values may still be arriving where results pass.
    cp_async_wait<0>();
    __syncthreads();
    multiply_all<K_PARTS>(of_k, scale);
    const long long at = (tile.token + row0) * dkv_stride + kv_head * D;
    store<K_PARTS>(dk + at, dk0 ? dk0 + at : dk0, dkv_stride, tile.n - row0, of_k, keys + row0 * PITCH);
    store<K_PARTS>(dv + at, dv0 ? dv0 + at : dv0, dkv_stride, tile.n - row0, of_v, values + row0 * PITCH);
}
