// Elementwise arithmetic. X, Y: element types of the operand and of the result; Z: that of a second operand.
#ifndef Z
#define Z X
#endif
// Elements of a thread at a time: 16 bytes of the narrowest type.
constexpr int WIDTH = 8;

// y = x + z; y may be x or z.
extern "C" __global__ void __launch_bounds__(256) add(const X* x, const Z* z, Y* y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        float a[WIDTH], b[WIDTH];
        load_vector(a, x + i * WIDTH);
        load_vector(b, z + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) a[j] += b[j];
        store_vector(y + i * WIDTH, a);
    }
    GRID_REST(i, n, WIDTH) y[i] = from_float<Y>(to_float(x[i]) + to_float(z[i]));
}

// y = factor x; y may be x.
extern "C" __global__ void __launch_bounds__(256) scale(const X* x, Y* y, float factor, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        float v[WIDTH];
        load_vector(v, x + i * WIDTH);
        for (int j = 0; j < WIDTH; j++) v[j] *= factor;
        store_vector(y + i * WIDTH, v);
    }
    GRID_REST(i, n, WIDTH) y[i] = from_float<Y>(to_float(x[i]) * factor);
}

template <int N> __device__ __forceinline__ void add_row_by(const float* __restrict__ row, const X* x, Y* y, unsigned cols, unsigned n_vectors) {
    GRID_STRIDE(i, n_vectors) {
        float a[N], b[N];
        load_vector(a, row + unsigned(i) % (cols / N) * N);
        load_vector(b, x + i * N);
        for (int j = 0; j < N; j++) b[j] += a[j];
        store_vector(y + i * N, b);
    }
}
// y [rows, cols] = x [rows, cols] + row [cols]; y may be x.
extern "C" __global__ void __launch_bounds__(256) add_row(const float* row, const X* x, Y* y, int cols, int n_vectors) {
    wait_for_predecessor();
    if (cols % WIDTH == 0) add_row_by<WIDTH>(row, x, y, cols, n_vectors);
    else add_row_by<1>(row, x, y, cols, n_vectors);
}

// The finaliser of MurmurHash3, as on the CPU.
__device__ __forceinline__ unsigned mix(unsigned x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}
// y [rows, cols] = x, with zeros for drawn elements and the others times `factor`; y may be x.
extern "C" __global__ void __launch_bounds__(256) dropout(const X* x, const int* __restrict__ keys, Y* y, int cols, long long n, unsigned threshold, float factor, unsigned stream, unsigned first_column) {
    wait_for_predecessor();
    GRID_STRIDE(i, n) {
        unsigned of_token = mix(mix(unsigned(keys[i / cols])) ^ stream * 0x9e3779b9u);
        unsigned draw = mix((of_token + (first_column + unsigned(i % cols))) * 0x85ebca6bu ^ of_token);
        y[i] = from_float<Y>(draw >= threshold ? to_float(x[i]) * factor : 0.0f);
    }
}
