// What the adjoint of attention needs besides its operands.
//
// Macros: X, element type of queries; Y, that of outputs and gradients; HEAD_DIM; TILE, queries of a tile of the kernel that
// reads the bounds, a multiple of 4.
constexpr int D = HEAD_DIM;

// statistics [H, padded queries] = (lse in units of log2, delta), where delta is the sum of do o over the head, from which the
// gradients of scores are computed; zeros in the padding. `rounded` gets do in the element type of queries, unless it is null.
// LANES lanes have a head of a query.
extern "C" __global__ void __launch_bounds__(256) attention_statistics(const Y* __restrict__ o, const float* __restrict__ lse, const Y* __restrict__ dout, float2* __restrict__ statistics,
                                                                       X* __restrict__ rounded, Geometry g) {
    wait_for_predecessor();
    constexpr int VECTOR = D % (16 / sizeof(Y)) ? 1 : 16 / sizeof(Y), PARTS = D / VECTOR;
    constexpr int LANES = PARTS > 16 ? 32 : PARTS > 8 ? 16 : PARTS > 4 ? 8 : PARTS > 2 ? 4 : 2;
    // All lanes of a warp take part in its sums.
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES, place = i / g.n_heads;
    const int head = int(i % g.n_heads), start = int(place % padded_run(g));
    const bool is_place = place < padded_queries(g), is_query = is_place && start < run_len(g);
    const long long token = place / padded_run(g) * run_len(g) + start, at = token * g.n_heads + head;
    float delta = 0.0f;
    for (int part = threadIdx.x % LANES; part < PARTS && is_query; part += LANES) {
        const long long first = at * D + part * VECTOR;
        float x[VECTOR], y[VECTOR];
        if constexpr (VECTOR == 1) {
            x[0] = to_float(o[first]);
            y[0] = to_float(dout[first]);
        } else {
            unpack_16(o + first, x);
            unpack_16(dout + first, y);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            delta = fmaf(x[j], y[j], delta);
            if (rounded) rounded[first + j] = from_float<X>(y[j]);
        }
    }
    delta = lane_sum<LANES>(delta);
    if (is_place && threadIdx.x % LANES == 0) statistics[head * padded_queries(g) + place] = is_query ? float2{lse[at] * LOG2_E, delta} : float2{0.0f, 0.0f};
}

// from [padded queries]: the least index that each query sees; bounds [tiles, 2]: the least and the greatest of a tile. One warp
// has a tile; grid: tiles of all rows.
extern "C" __global__ void __launch_bounds__(32) attention_bounds(const int* __restrict__ doc_start, int* __restrict__ from, int* __restrict__ bounds, Geometry g, int tiles_per_row) {
    wait_for_predecessor();
    __shared__ int of_tile[TILE];
    long long place;
    const Tile tile = query_tile(g, blockIdx.x / tiles_per_row, blockIdx.x % tiles_per_row, TILE, &place);
    int low, high;
    visible_indexes<TILE>(g, tile, doc_start, of_tile, low, high);
    for (int i = threadIdx.x; i < (tile.n + 3) / 4 * 4; i += 32) from[place + i] = of_tile[i];
    if (threadIdx.x == 0) {
        bounds[2 * blockIdx.x] = low;
        bounds[2 * blockIdx.x + 1] = high;
    }
}
