// Weights for products in FP8, which multiply e4m3 numbers of weights over STEP.
//
// X: bf16 or e4m3, which are over STEP already. Y: e4m3, or bf16 for the numbers that e4m3 times STEP are.
constexpr float STEP = 1.0f / 16.0f;
// Elements of a thread at a time.
constexpr int WIDTH = 8;

// Four neighbouring elements as e4m3.
__device__ __forceinline__ unsigned four(const e4m3* x) { return *(const unsigned*)x; }
__device__ __forceinline__ unsigned four(const bf16* x) {
    float v[4];
    load_vector(v, x);
    return pack_e4m3(v[0] * (1.0f / STEP), v[1] * (1.0f / STEP), v[2] * (1.0f / STEP), v[3] * (1.0f / STEP));
}
__device__ __forceinline__ void store_eight(e4m3* y, unsigned low, unsigned high) {
    Vector<unsigned, 2> words;
    words.at[0] = low;
    words.at[1] = high;
    *(Vector<unsigned, 2>*)y = words;
}
__device__ __forceinline__ void store_eight(bf16* y, unsigned low, unsigned high) {
    float v[WIDTH];
    for (int j = 0; j < WIDTH; j++) v[j] = of_e4m3((j < 4 ? low : high) >> j % 4 * 8 & 0xffu) * STEP;
    store_vector(y, v);
}

// y [n] = x, rounded. WIDTH divides n.
extern "C" __global__ void __launch_bounds__(256) round_weights(const X* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) store_eight(y + i * WIDTH, four(x + i * WIDTH), four(x + i * WIDTH + 4));
}

// y [cols, rows] = x [rows, cols], rounded and transposed. 16 divides rows and cols. Blocks x and y count tiles of TILE x TILE elements
// along columns and rows.
//
// A thread has four rows of four neighbouring columns as words, and exchanges their bytes: word j then has column j. In shared memory a
// column of the tile is a row of words, and word w of it is at w ^ (column / 4), so that the lanes of a warp use different banks both when
// they write words of their columns and when they read a whole column.
constexpr int TILE = 128, WORDS = TILE / 4;
extern "C" __global__ void __launch_bounds__(256) transpose_weights(const X* __restrict__ x, unsigned* __restrict__ y, int rows, int cols) {
    wait_for_predecessor();
    __shared__ unsigned tile[TILE][WORDS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = blockIdx.y * TILE, first_col = blockIdx.x * TILE, col = first_col + 4 * lane;
    // Of every warp: four groups of four rows. All loads are under way before the first word is needed.
    unsigned word[WORDS / 8][4];
    #pragma unroll
    for (int i = 0; i < WORDS / 8; i++) {
        const int row = first_row + 4 * (warp + 8 * i);
        const bool is_inside = row < rows && col < cols;
        #pragma unroll
        for (int j = 0; j < 4; j++) word[i][j] = is_inside ? four(x + (long long)(row + j) * cols + col) : 0u;
    }
    #pragma unroll
    for (int i = 0; i < WORDS / 8; i++) {
        const int at = (warp + 8 * i) ^ lane;
        const unsigned low01 = __byte_perm(word[i][0], word[i][1], 0x5140), low23 = __byte_perm(word[i][2], word[i][3], 0x5140);
        const unsigned high01 = __byte_perm(word[i][0], word[i][1], 0x7362), high23 = __byte_perm(word[i][2], word[i][3], 0x7362);
        tile[4 * lane][at] = __byte_perm(low01, low23, 0x5410);
        tile[4 * lane + 1][at] = __byte_perm(low01, low23, 0x7632);
        tile[4 * lane + 2][at] = __byte_perm(high01, high23, 0x5410);
        tile[4 * lane + 3][at] = __byte_perm(high01, high23, 0x7632);
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
        const int c = warp + 8 * i;
        if (first_col + c < cols && first_row + 4 * lane < rows) {
            y[((long long)(first_col + c) * rows + first_row) / 4 + lane] = tile[c][lane ^ (c / 4)];
        }
    }
}
