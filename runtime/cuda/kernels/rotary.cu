// Rotary embedding of queries and keys: (a, b) -> (a cos - b sin, b cos + a sin) for elements i and i + half of a head.
//
// X: element type. V: pairs that a thread rotates at once; divides half. HEADS: heads of each thread, which share cosines and
// sines.
// x, y: [n, columns], heads of 2 half columns, the first n_heads of them rotated; positions: [n]; cosines, sines:
// [positions, half]. y may be the memory of x; then the other columns stay, else they are copied. sign: -1 rotates backwards.

// The elements of a vector that was loaded before they are needed.
template <class T> __device__ __forceinline__ void to_floats(float (&to)[V], const Vector<T, V>& from) {
    for (int j = 0; j < V; j++) to[j] = to_float(from.at[j]);
}

extern "C" __global__ void __launch_bounds__(256) rotary(const X* x, X* y, const int* __restrict__ positions, const float* __restrict__ cosines,
        const float* __restrict__ sines, int half, int n_heads, int columns, int head_step, float sign, long long n) {
    wait_for_predecessor();
    // Threads of a token: one for each vector of half a head, for every head_step-th head.
    const unsigned vectors = half / V, threads = vectors * head_step;
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x, token = index / threads, rest = index % threads;
    if (token >= n) return;
    const int i = rest % vectors * V, head = rest / vectors;
    const long long first = (long long)token * columns, angle = (long long)positions[token] * half + i;
    float cos[V], sin[V], a[V], b[V], to[V];
    load_vector(cos, cosines + angle);
    load_vector(sin, sines + angle);
    for (int j = 0; j < V; j++) sin[j] *= sign;
    Vector<X, V> left[HEADS], right[HEADS];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int at = (head + h * head_step) * 2 * half + i;
        if (head + h * head_step >= n_heads) continue;
        left[h] = *(const Vector<X, V>*)(x + first + at);
        right[h] = *(const Vector<X, V>*)(x + first + at + half);
    }
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int at = (head + h * head_step) * 2 * half + i;
        if (head + h * head_step >= n_heads) continue;
        to_floats(a, left[h]);
        to_floats(b, right[h]);
        for (int j = 0; j < V; j++) to[j] = a[j] * cos[j] - b[j] * sin[j];
        store_vector(y + first + at, to);
        for (int j = 0; j < V; j++) to[j] = b[j] * cos[j] + a[j] * sin[j];
        store_vector(y + first + at + half, to);
    }
    if (x == y) return;
    for (int c = n_heads * 2 * half + rest * V; c < columns; c += threads * V) {
        *(Vector<X, V>*)(y + first + c) = *(const Vector<X, V>*)(x + first + c);
    }
}
