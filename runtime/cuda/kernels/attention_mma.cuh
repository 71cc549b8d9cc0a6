// Tiles of tokens in shared memory and their products on tensor cores, for head widths that are multiples of 8.
//
// Macros: X, half-width element type of the operands; Y, element type of outputs and gradients, X or float; HEAD_DIM.
// A warp multiplies fragments of 16 rows; thread `lane` has rows lane / 4 and lane / 4 + 8 of a fragment of results, and two
// neighbouring columns of every eight.
constexpr int D = HEAD_DIM, WIDTH = (D + 15) / 16 * 16, STEPS = WIDTH / 16;
// Eight rows of eight columns must lie in different banks: rows of whole 128 bytes are permuted, others padded.
constexpr bool PERMUTED = WIDTH % 64 == 0;
constexpr int PITCH = PERMUTED ? WIDTH : WIDTH + 8;

// Place of the columns `8 chunk ..` of a row. Rows of tiles start at multiples of eight.
__device__ __forceinline__ int place(int row, int chunk) { return row * PITCH + (PERMUTED ? chunk ^ row % 8 : chunk) * 8; }

// Starts to load up to ROWS tokens, with zeros for those beyond and in the columns beyond the head.
template <int ROWS, int THREADS> __device__ __forceinline__ void load(X* to, const X* from, int stride, int n) {
    constexpr int CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS;
    if constexpr (THREADS % CHUNKS == 0 && STEP % 8 == 0 && ROWS % STEP == 0) {
        // A thread's rows have the same columns and the same permutation: all addresses come from the first.
        const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const X* source = from + row * stride + chunk * 8;
        to += place(row, chunk);
#pragma unroll
        for (int k = 0; k < ROWS; k += STEP) {
            const bool is_given = row + k < n && chunk * 8 < D;
            cp_async_16(to + k * PITCH, is_given ? source + k * stride : from, is_given ? 16 : 0);
        }
    } else {
#pragma unroll
        for (int k = 0; k < (ROWS * CHUNKS + THREADS - 1) / THREADS; k++) {
            const int i = threadIdx.x + k * THREADS, row = i / CHUNKS, chunk = i % CHUNKS;
            if (ROWS * CHUNKS % THREADS && i >= ROWS * CHUNKS) break;
            const bool is_given = row < n && chunk * 8 < D;
            cp_async_16(to + place(row, chunk), is_given ? from + row * stride + chunk * 8 : from, is_given ? 16 : 0);
        }
    }
}

// Rows `row0 ..` as the left operand, columns `16 step ..`.
__device__ __forceinline__ void left(unsigned (&a)[4], const X* tile, int row0, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + row0 * PITCH + place(lane % 16, 2 * step + lane / 16));
}
// 16 rows as columns of the right operand (a product with the transpose of the tile).
__device__ __forceinline__ void right_transposed(unsigned (&b)[4], const X* tile, int row0, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + row0 * PITCH + place(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}
// 16 rows as rows of the right operand.
__device__ __forceinline__ void right(unsigned (&b)[4], const X* tile, int row0, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4<true>(b, tile + row0 * PITCH + place(lane % 8 + lane / 8 % 2 * 8, 2 * step + lane / 16));
}
// 16 columns of results.
__device__ __forceinline__ void multiply(float (&c0)[4], float (&c1)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    const unsigned b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
    mma_m16n8k16(X(), c0, a, b0);
    mma_m16n8k16(X(), c1, a, b1);
}

// How many steps of `scores` to unroll, at most `steps`. NVIDIA's compiler uses more registers for sm_100 than for earlier GPUs: kernels
// that need nearly all of them would spill the addresses of unrolled steps there.
__device__ constexpr int unrolled(int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    return 1;
#else
    return steps;
#endif
}

// s = a b^T, where `a` are 16 PARTS rows of a warp and `b` N rows.
template <int PARTS, int N, int UNROLL> __device__ __forceinline__ void scores(float (&s)[PARTS][N / 8][4], const X* a, const X* b) {
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[p][n][i] = 0.0f;
#pragma unroll UNROLL // all steps of wide heads would need too many registers for addresses
    for (int d = 0; d < STEPS; d++) {
        unsigned x[PARTS][4];
#pragma unroll
        for (int p = 0; p < PARTS; p++) left(x[p], a, p * 16, d);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            unsigned y[4];
            right_transposed(y, b, n * 16, d);
#pragma unroll
            for (int p = 0; p < PARTS; p++) multiply(s[p][2 * n], s[p][2 * n + 1], x[p], y);
        }
    }
}

// sum += w b, where the weights `w` are results of products, rounded to X, and `b` has N rows.
template <int PARTS, int N> __device__ __forceinline__ void accumulate(float (&sum)[PARTS][WIDTH / 8][4], const float (&w)[PARTS][N / 8][4], const X* b) {
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        unsigned x[PARTS][4];
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[p][i] = pack(X(), w[p][2 * n + i / 2][i % 2 * 2], w[p][2 * n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
            unsigned y[4];
            right(y, b, n * 16, d);
#pragma unroll
            for (int p = 0; p < PARTS; p++) multiply(sum[p][2 * d], sum[p][2 * d + 1], x[p], y);
        }
    }
}

// Replaces the scores of keys that a query does not see. Rows are queries: `from` has the least index that each sees, and `first`
// is the index of the first; columns are the `n` keys from `index` on.
template <int PARTS, int N> __device__ __forceinline__ void hide(float (&s)[PARTS][N / 8][4], const int* from, int first, int index, int n, float with) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int query = p * 16 + h * 8 + lane / 4, own = first + query - index;
            const int least = from[query] - index, most = own < n ? own : n - 1;
#pragma unroll
            for (int j = 0; j < N / 8; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int key = j * 8 + lane % 4 * 2 + i;
                    if ((key < least) | (key > most)) s[p][j][2 * h + i] = with;
                }
        }
}

template <int PARTS> __device__ __forceinline__ void multiply_all(float (&sum)[PARTS][WIDTH / 8][4], float factor) {
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int d = 0; d < WIDTH / 8; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[p][d][i] *= factor;
}

// Writes the first `n` rows of a warp's results to the columns of a head, added to `before` if there is any, which may be the
// same memory. Half-width rows pass through `staging`, rows of the warp's own, so that each thread writes 16 bytes.
template <int PARTS> __device__ __forceinline__ void store(Y* to, const Y* before, long long stride, int n, const float (&sum)[PARTS][WIDTH / 8][4], X* staging) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Y) == sizeof(float)) {
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = p * 16 + h * 8 + lane / 4;
                if (row >= n) continue;
#pragma unroll
                for (int d = 0; d < WIDTH / 8; d++) {
                    if (d * 8 >= D) continue;
                    const long long at = row * stride + d * 8 + lane % 4 * 2;
                    float2 x = before ? *(const float2*)(before + at) : float2{0.0f, 0.0f};
                    x.x += sum[p][d][2 * h];
                    x.y += sum[p][d][2 * h + 1];
                    *(float2*)(to + at) = x;
                }
            }
    } else {
        __syncwarp();
#pragma unroll
        for (int p = 0; p < PARTS; p++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int d = 0; d < WIDTH / 8; d++)
                    *(unsigned*)(staging + (p * 16 + h * 8) * PITCH + place(lane / 4, d) + lane % 4 * 2) = pack(X(), sum[p][d][2 * h], sum[p][d][2 * h + 1]);
        __syncwarp();
        for (int i = lane; i < 16 * PARTS * (WIDTH / 8); i += 32) {
            const int row = i / (WIDTH / 8), chunk = i % (WIDTH / 8);
            if (row < n && chunk * 8 < D) *(uint4*)(to + row * stride + chunk * 8) = *(const uint4*)(staging + place(row, chunk));
        }
    }
}

// Least and greatest of `from` over N rows, at every lane of the warp.
template <int N> __device__ __forceinline__ void warp_bounds(const int* from, int& low, int& high) {
    low = high = from[threadIdx.x % N];
    for (int by = 16; by; by >>= 1) {
        const int l = __shfl_xor_sync(~0u, low, by), h = __shfl_xor_sync(~0u, high, by);
        low = l < low ? l : low;
        high = h > high ? h : high;
    }
}
