// Rows of logits and their sums of exponentials. A block works on one row. Sums of a few exponentials are f32, all others f64.
// X: element type of logits and of their gradients.
//
// A row of a large vocabulary has half a megabyte in f32. Reading it twice from memory would move half as many bytes again, so the
// threads keep what they read first in registers, and read the rest again from its end: that is still in the cache.

// Elements of a vector of 16 bytes.
constexpr int WIDTH = 16 / sizeof(X);
// Vectors that a thread keeps: as many as its registers hold on every architecture.
constexpr int KEPT = sizeof(X) == 4 ? 8 : 3;

__device__ __forceinline__ float exp_of(float x) { return fast_exp2(x * 1.4426950408889634f); }

// A row in memory: `head` elements up to the first multiple of 16 bytes, vectors, then `tail` elements.
struct Row {
    int head, n_vectors, tail;
    __device__ __forceinline__ Row(const X* row, int v) {
        head = min(int((16 - (unsigned long long)row % 16) % 16 / sizeof(X)), v);
        n_vectors = (v - head) / WIDTH;
        tail = (v - head) % WIDTH;
    }
    // Head and tail belong to the first threads, one element each; -1 for the others.
    __device__ __forceinline__ int edge() const {
        int i = threadIdx.x;
        return i < head ? i : i < head + tail ? WIDTH * n_vectors + i : -1;
    }
};

// Sum of exponentials relative to the largest element so far.
struct Total { float largest; double sum; };
template <int N> __device__ __forceinline__ void add_to(Total& total, const float (&x)[N]) {
    float largest = x[0];
    for (int j = 1; j < N; j++) largest = fmaxf(largest, x[j]);
    if (largest > total.largest) {
        total.sum *= exp_of(total.largest - largest);
        total.largest = largest;
    }
    // Relative to 0 if all are minus infinity, so that the sum is 0; NaN stays NaN.
    float reference = total.largest == -INFINITY ? 0.0f : total.largest, sum = 0.0f;
    for (int j = 0; j < N; j++) sum += exp_of(x[j] - reference);
    total.sum += sum;
}

// A vector as words: the compiler keeps elements of two bytes in a register each.
struct alignas(16) Piece { unsigned words[4]; };
__device__ __forceinline__ Piece load_piece(const X* from, int i) { return *(const Piece*)(from + (long long)WIDTH * i); }
__device__ __forceinline__ Piece load_or(const X* from, int i, int n, float otherwise) {
    if (i < n) return load_piece(from, i);
    float x[WIDTH];
    for (int j = 0; j < WIDTH; j++) x[j] = otherwise;
    Vector<X, WIDTH> v = vector_of(X(), x);
    return *(const Piece*)&v;
}
template <int FIRST = 0, int N> __device__ __forceinline__ void to_floats(float (&to)[N], const Piece& from) {
    const Vector<X, WIDTH> v = *(const Vector<X, WIDTH>*)&from;
    for (int j = 0; j < WIDTH; j++) to[FIRST + j] = to_float(v.at[j]);
}

// Stores what this kernel does not read again, so that the cache keeps what it does. (A plain store was compiled to four.)
__device__ __forceinline__ void store_last(X* to, const float (&x)[WIDTH]) {
    Vector<X, WIDTH> v = vector_of(X(), x);
    __stcs((float4*)to, *(const float4*)&v);
}

// The total of a row, at every thread; what each thread keeps.
__device__ __forceinline__ Total read_row(const X* row, const Row& parts, Piece (&kept)[KEPT], float& edge) {
    const X* body = row + parts.head;
    Total total = {-INFINITY, 0.0};
    for (int k = 0; k < KEPT; k++) kept[k] = load_or(body, threadIdx.x + k * blockDim.x, parts.n_vectors, -INFINITY);
    edge = parts.edge() < 0 ? -INFINITY : to_float(row[parts.edge()]);
    for (int k = 0; k < KEPT; k++) {
        float x[WIDTH];
        to_floats(x, kept[k]);
        add_to(total, x);
    }
    float edges[1] = {edge};
    add_to(total, edges);
    for (int i = threadIdx.x + KEPT * blockDim.x; i < parts.n_vectors; i += 2 * blockDim.x) {
        float both[2 * WIDTH];
        Piece x = load_or(body, i, parts.n_vectors, -INFINITY), y = load_or(body, i + blockDim.x, parts.n_vectors, -INFINITY);
        to_floats(both, x);
        to_floats<WIDTH>(both, y);
        add_to(total, both);
    }
    float largest = block_max(total.largest), reference = largest == -INFINITY ? 0.0f : largest;
    return {largest, block_sum(total.sum * exp_of(total.largest - reference))};
}

// The statistics of a row, merged over all parts in their order.
struct Merged { float largest; double sum; float of_label; };
__device__ __forceinline__ Merged merge(const float* __restrict__ stats, int n_shards, int n, int row) {
    Merged m = {-INFINITY, 0.0, -INFINITY};
    for (int s = 0; s < n_shards; s++) {
        const float* part = stats + ((long long)s * n + row) * 3;
        m.largest = part[0] > m.largest ? part[0] : m.largest;
        m.of_label = part[2] > m.of_label ? part[2] : m.of_label;
    }
    for (int s = 0; s < n_shards; s++) {
        const float* part = stats + ((long long)s * n + row) * 3;
        m.sum += double(part[1]) * double(exp_of(part[0] - m.largest));
    }
    return m;
}
