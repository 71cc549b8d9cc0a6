// Embedding and its adjoint. Y: element type of activations; tables are f32, perhaps split, and frozen ones perhaps bf16.
constexpr int WIDTH = 8;

// A row of a table that holds the ids from `first` on.
struct Place { bool is_here; long long row; };
__device__ __forceinline__ Place place_of(int id, int first, int rows) {
    long long row = (long long)id - first;
    return {row >= 0 && row < rows, row};
}

struct Halves {
    const bf16* p;
    template <int N> __device__ __forceinline__ void load(float (&to)[N], long long i) const { load_vector(to, p + i); }
};
template <int N, class Table> __device__ __forceinline__ void embedding_by(const int* __restrict__ ids, const Table& table, const Y* residual, Y* x, unsigned cols, int first, int rows, float absent, unsigned n_vectors) {
    unsigned per_row = cols / N;
    GRID_STRIDE(i, n_vectors) {
        unsigned token = unsigned(i) / per_row, column = (unsigned(i) - token * per_row) * N;
        Place place = place_of(ids[token], first, rows);
        float v[N], before[N];
        if (place.is_here) table.load(v, place.row * cols + column);
        else for (int j = 0; j < N; j++) v[j] = absent;
        if (residual) {
            load_vector(before, residual + i * N);
            for (int j = 0; j < N; j++) v[j] += before[j];
        }
        store_vector(x + i * N, v);
    }
}
// x [n, cols] = (residual +) the row of each id; `absent` for ids without a row in the table. x may be the residual.
template <class Table> __device__ __forceinline__ void embedding_of(const Table& table, const int* ids, const Y* residual, Y* x, int cols, int first, int rows, float absent, int n_vectors) {
    if (cols % WIDTH == 0) embedding_by<WIDTH>(ids, table, residual, x, cols, first, rows, absent, n_vectors);
    else embedding_by<1>(ids, table, residual, x, cols, first, rows, absent, n_vectors);
}
extern "C" __global__ void __launch_bounds__(256, 4) embedding(const int* ids, float* table, const Y* residual, Y* x, int cols, int first, int rows, float absent, int n_vectors) {
    wait_for_predecessor();
    embedding_of(Whole{table}, ids, residual, x, cols, first, rows, absent, n_vectors);
}
extern "C" __global__ void __launch_bounds__(256, 4) embedding_of_bf16(const int* ids, const bf16* table, const Y* residual, Y* x, int cols, int first, int rows, float absent, int n_vectors) {
    wait_for_predecessor();
    embedding_of(Halves{table}, ids, residual, x, cols, first, rows, absent, n_vectors);
}
extern "C" __global__ void __launch_bounds__(256, 4) embedding_of_split(const int* ids, unsigned short* table, const Y* residual, Y* x, int cols, int first, int rows, float absent, int n_vectors) {
    wait_for_predecessor();
    embedding_of(Split{table, table + (long long)rows * cols}, ids, residual, x, cols, first, rows, absent, n_vectors);
}

// Tokens of a block of order_tokens.
constexpr int TOKENS = 64, WARPS = 8;
// How many of ids[from..to) are less than each of two ids, or equal to it.
template <bool OR_EQUAL> __device__ __forceinline__ void count(const int* __restrict__ ids, int from, int to, const int (&id)[2], int (&n_before)[2]) {
    for (; from + 4 <= to; from += 4) {
        Vector<int, 4> other = *(const Vector<int, 4>*)(ids + from);
        for (int j = 0; j < 4; j++)
            for (int k = 0; k < 2; k++) n_before[k] += OR_EQUAL ? other.at[j] <= id[k] : other.at[j] < id[k];
    }
    for (; from < to; from++)
        for (int k = 0; k < 2; k++) n_before[k] += OR_EQUAL ? ids[from] <= id[k] : ids[from] < id[k];
}
// sorted [n] = (id, token), by id and then by token. A token's place is the number of tokens before it. Counting all pairs is
// quadratic, but one launch: 8,192 tokens are 67 million comparisons, and a radix sort would need about nine launches.
extern "C" __global__ void __launch_bounds__(256) order_tokens(const int* __restrict__ ids, int n, uint2* __restrict__ sorted) {
    wait_for_predecessor();
    __shared__ int counts[WARPS][TOKENS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * TOKENS, last = min(first + TOKENS, n);
    int id[2], n_before[2] = {};
    for (int k = 0; k < 2; k++) id[k] = first + 32 * k + lane < n ? ids[first + 32 * k + lane] : 0;
    // Each warp counts among its part of all tokens: those in front of the block, behind the block, and of the block.
    int part = ((n + WARPS - 1) / WARPS + 3) / 4 * 4, from = min(warp * part, n), to = min(from + part, n);
    count<true>(ids, from, min(to, first), id, n_before);
    count<false>(ids, max(from, last), to, id, n_before);
    for (int other = max(from, first); other < min(to, last); other++)
        for (int k = 0; k < 2; k++) n_before[k] += ids[other] < id[k] || (ids[other] == id[k] && other < first + 32 * k + lane);
    for (int k = 0; k < 2; k++) counts[warp][32 * k + lane] = n_before[k];
    __syncthreads();
    int token = first + threadIdx.x;
    if (threadIdx.x >= TOKENS || token >= n) return;
    int place = 0;
    for (int w = 0; w < WARPS; w++) place += counts[w][threadIdx.x];
    sorted[place] = {unsigned(ids[token]), unsigned(token)};
}

// Columns of a block of embedding_backward, and rows that a thread loads at a time.
constexpr int COLUMNS = 1024, AT_ONCE = 8;
template <int N> __device__ __forceinline__ void sum_rows(const uint2* __restrict__ sorted, const Y* __restrict__ dx, float* to, int at, int n, int cols, bool accumulates) {
    unsigned id = sorted[at].x;
    for (int column = blockIdx.y * COLUMNS + threadIdx.x * N; column < min(cols, (int(blockIdx.y) + 1) * COLUMNS); column += blockDim.x * N) {
        float sum[N] = {};
        if (accumulates) load_vector(sum, to + column);
        bool is_whole = true;
        for (int k = at; is_whole; k += AT_ONCE) {
            float rows[AT_ONCE][N];
            bool has[AT_ONCE];
            for (int j = 0; j < AT_ONCE; j++) {
                uint2 entry = sorted[min(k + j, n - 1)];
                has[j] = k + j < n && entry.x == id;
                if (has[j]) load_vector(rows[j], dx + (long long)entry.y * cols + column);
            }
            for (int j = 0; j < AT_ONCE; j++)
                for (int c = 0; c < N; c++) sum[c] = has[j] ? sum[c] + rows[j][c] : sum[c];
            is_whole = has[AT_ONCE - 1];
        }
        store_vector(to + column, sum);
    }
}
// dtable[id] (+)= the rows of dx whose token has this id, in the order of tokens. A block for each token: the first token of an
// id sums all of them.
extern "C" __global__ void __launch_bounds__(256, 2) embedding_backward(const uint2* sorted, const Y* dx, float* dtable, int n, int cols, int first, int rows, int accumulates) {
    wait_for_predecessor();
    int at = blockIdx.x;
    uint2 entry = sorted[at];
    Place place = place_of(int(entry.x), first, rows);
    if (!place.is_here || (at > 0 && sorted[at - 1].x == entry.x)) return;
    float* to = dtable + place.row * cols;
    if (cols % 4 == 0) sum_rows<4>(sorted, dx, to, at, n, cols, accumulates);
    else sum_rows<1>(sorted, dx, to, at, n, cols, accumulates);
}
