// Adafactor: sums over whole tensors in two rounds, and the update. The elements of a value are listed as tiles, parts of
// matrices; a launch works on one tile. Sums are f64 along a fixed order, and rounded to f32 once for each tile.

// Columns of a tile that a block works on, and rows whose sums it keeps at a time.
constexpr int ROWS = 64, COLUMNS = 1024, THREADS = 256, WARPS = THREADS / 32, N = 4;

// A tile: its elements in the gradient, and in the parameter's run.
struct Tile { float* p; const float* g; long long n_rows, n_columns, stride; };
// The averages that a tile's elements share, without the squares of this step, and the sums of these squares: of its rows (null
// for vectors) and columns; the numbers of rows and columns of the whole matrix.
struct Averages { const float *rows, *row_sums, *columns, *column_sums; long long n_rows, n_columns; };

__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }
__device__ __forceinline__ float moved(float average, float sum, float weight, float inverse_n) { return average + weight * (sum * inverse_n - average); }

// The block's part of a tile: `rows` rows, a multiple of ROWS but for the last block; N neighbouring columns for each thread.
struct Part {
    long long first_row, end_row, column;
    int n_columns;
    bool is_aligned;
    __device__ __forceinline__ Part(const Tile& tile, int rows) {
        first_row = (long long)blockIdx.y * rows;
        end_row = min(first_row + rows, tile.n_rows);
        column = (long long)blockIdx.x * COLUMNS + threadIdx.x * N;
        long long left = tile.n_columns - column;
        n_columns = left < 0 ? 0 : left < N ? int(left) : N;
        is_aligned = n_columns == N && tile.stride % N == 0 && (unsigned long long)tile.p % 16 == 0 && (unsigned long long)tile.g % 16 == 0;
    }
    __device__ __forceinline__ void load(float (&x)[N], const float* from) const {
        if (is_aligned) return load_vector(x, from);
        for (int j = 0; j < N; j++) x[j] = j < n_columns ? from[j] : 0.0f;
    }
    __device__ __forceinline__ void store(float* to, const float (&x)[N]) const {
        if (is_aligned) return store_vector(to, x);
        for (int j = 0; j < N; j++) if (j < n_columns) to[j] = x[j];
    }
};

// Sums of squares of the scaled gradient, over the block's part of each row and column, and of the parameter. Partial sums:
// row_parts [column blocks, n_rows] (unless null), column_parts [row blocks, n_columns], tensor_parts [blocks].
extern "C" __global__ void __launch_bounds__(256) square_parts(Tile tile, int rows, const double* coefficient, double* row_parts, double* column_parts, double* tensor_parts) {
    wait_for_predecessor();
    __shared__ double of_rows[ROWS][WARPS];
    Part part(tile, rows);
    float scale = float(*coefficient);
    double of_columns[N] = {}, of_tensor = 0.0;
    for (long long first = part.first_row; first < part.end_row; first += ROWS) {
        int n = int(min((long long)ROWS, part.end_row - first));
        for (int i = 0; i < n; i++) {
            long long at = (first + i) * tile.stride + part.column;
            float g[N], p[N];
            part.load(g, tile.g + at);
            part.load(p, tile.p + at);
            double of_row = 0.0;
            for (int j = 0; j < N; j++) {
                double x = j < part.n_columns ? double(g[j] * scale) : 0.0, w = double(p[j]);
                of_columns[j] += x * x;
                of_row += x * x;
                of_tensor += w * w;
            }
            of_row = warp_sum(of_row);
            if (threadIdx.x % 32 == 0) of_rows[i][threadIdx.x / 32] = of_row;
        }
        __syncthreads();
        if (row_parts && threadIdx.x < n) {
            double of_row = 0.0;
            for (int w = 0; w < WARPS; w++) of_row += of_rows[threadIdx.x][w];
            row_parts[blockIdx.x * tile.n_rows + first + threadIdx.x] = of_row;
        }
        __syncthreads();
    }
    for (int j = 0; j < N; j++) if (j < part.n_columns) column_parts[blockIdx.y * tile.n_columns + part.column + j] = of_columns[j];
    double sum = block_sum(of_tensor);
    if (threadIdx.x == 0) tensor_parts[(long long)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// to [n] += the sums of parts [n_parts, n].
extern "C" __global__ void __launch_bounds__(256) add_parts(const double* __restrict__ parts, long long n_parts, long long n, float* to) {
    wait_for_predecessor();
    GRID_STRIDE(i, n) {
        double sum = 0.0;
        for (long long k = 0; k < n_parts; k++) sum += parts[k * n + i];
        to[i] += float(sum);
    }
}
// to += the sum of parts [n].
extern "C" __global__ void __launch_bounds__(256) add_all_parts(const double* __restrict__ parts, long long n, float* to) {
    wait_for_predecessor();
    double sum = 0.0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *to += float(sum);
}

// The inverse of the mean of a matrix's row averages, with the squares of this step.
extern "C" __global__ void __launch_bounds__(256) inverse_mean(const float* averages, const float* sums, long long n_rows, long long n_columns, const double* weight, double eps1, float* out) {
    wait_for_predecessor();
    float w = float(*weight), inverse_n = 1.0f / float(n_columns);
    double sum = 0.0;
    for (long long i = threadIdx.x; i < n_rows; i += blockDim.x) sum += double(moved(averages[i], sums[i], w, inverse_n));
    sum = block_sum(sum) / double(n_rows);
    if (threadIdx.x == 0) *out = float(1.0 / (sum > eps1 ? sum : eps1));
}

// What the elements of a part are divided by.
struct Divisors {
    float columns[N], row_weight, row_inverse_n, inverse_mean, scale, least;
    __device__ __forceinline__ Divisors(const Part& part, const Averages& a, const float* inverse_mean_of_rows, const double* weight, const double* coefficient, float least) : least(least) {
        row_weight = float(*weight);
        row_inverse_n = 1.0f / float(a.n_columns);
        inverse_mean = a.rows ? *inverse_mean_of_rows : 1.0f;
        scale = float(*coefficient);
        float inverse_n = 1.0f / float(a.n_rows);
        for (int j = 0; j < N; j++) columns[j] = j < part.n_columns ? moved(a.columns[part.column + j], a.column_sums[part.column + j], row_weight, inverse_n) : 1.0f;
    }
    __device__ __forceinline__ float factor(const Averages& a, long long row) const {
        return a.rows ? moved(a.rows[row], a.row_sums[row], row_weight, row_inverse_n) * inverse_mean : 1.0f;
    }
    __device__ __forceinline__ float update(float g, int j, float factor) const {
        float average = factor * columns[j];
        return g * scale / sqrtf(average > least ? average : least);
    }
};

// parts [blocks]: the sum of squares of the updates of each block's part, before they are clipped.
extern "C" __global__ void __launch_bounds__(256) update_squares(Tile tile, int rows, Averages averages, const float* inverse_mean_of_rows, const double* weight, const double* coefficient, float least, double* parts) {
    wait_for_predecessor();
    Part part(tile, rows);
    Divisors divisors(part, averages, inverse_mean_of_rows, weight, coefficient, least);
    double sum = 0.0;
    for (long long row = part.first_row; row < part.end_row; row++) {
        float g[N], factor = divisors.factor(averages, row);
        part.load(g, tile.g + row * tile.stride + part.column);
        for (int j = 0; j < N; j++) {
            double u = j < part.n_columns ? double(divisors.update(g[j], j, factor)) : 0.0;
            sum += u * u;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[(long long)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// The scalars of a tensor's update.
struct Change { double eps2, d, weight_decay, n_elements; };

// p = p decay - length u. `of_tensor`, `of_updates`: the sums of squares of the tensor and of its update.
extern "C" __global__ void __launch_bounds__(256) update(Tile tile, int rows, Averages averages, const float* inverse_mean_of_rows, const double* lr, const double* scalars, const double* coefficient, float least, Change change, const float* of_tensor, const float* of_updates) {
    wait_for_predecessor();
    __shared__ float decay, length;
    if (!is_finite(*coefficient)) return;
    if (threadIdx.x == 0) {
        double rms = sqrt(double(*of_tensor) / change.n_elements), of_update = sqrt(double(*of_updates) / change.n_elements) / change.d;
        double relative = fmax(rms, change.eps2) * fmin(*lr, scalars[1]);
        decay = float(1.0 - *lr * change.weight_decay);
        length = float(relative / fmax(of_update, 1.0));
    }
    __syncthreads();
    Part part(tile, rows);
    Divisors divisors(part, averages, inverse_mean_of_rows, scalars, coefficient, least);
    for (long long row = part.first_row; row < part.end_row; row++) {
        long long at = row * tile.stride + part.column;
        float p[N], g[N], factor = divisors.factor(averages, row);
        part.load(p, tile.p + at);
        part.load(g, tile.g + at);
        for (int j = 0; j < N; j++) p[j] = p[j] * decay - length * divisors.update(g[j], j, factor);
        part.store(tile.p + at, p);
    }
}

// Adds the squares of this step to the averages of n rows, or columns, of `of` elements each.
extern "C" __global__ void __launch_bounds__(256) move_averages(float* averages, const float* sums, long long n, long long of, const double* weight, const double* coefficient) {
    wait_for_predecessor();
    if (!is_finite(*coefficient)) return;
    float w = float(*weight), inverse_n = 1.0f / float(of);
    GRID_STRIDE(i, n) averages[i] = moved(averages[i], sums[i], w, inverse_n);
}
