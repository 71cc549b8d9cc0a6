// Columns of a matrix, apart and together. P: element type of the parts. X: that of the whole. V: neighbouring elements that a
// thread moves at once; divides the columns of both parts.
// left: [n, a]; right: [n, b]; x: [n, a + b]. A thread has the same columns in each of its rows. With a second loop, over
// columns, the compiler stores elements one by one.

extern "C" __global__ void __launch_bounds__(256) split_columns(const X* __restrict__ x, P* __restrict__ left, P* __restrict__ right, int a, int b, long long n) {
    wait_for_predecessor();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V, width = c < a ? a : b;
    if (c >= a + b) return;
    P* const to = c < a ? left + c : right + (c - a);
    for (long long row = blockIdx.y; row < n; row += gridDim.y) {
        float v[V];
        load_vector(v, x + row * (a + b) + c);
        store_vector(to + row * width, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) join_columns(const P* __restrict__ left, const P* __restrict__ right, X* __restrict__ x, int a, int b, long long n) {
    wait_for_predecessor();
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * V, width = c < a ? a : b;
    if (c >= a + b) return;
    const P* const from = c < a ? left + c : right + (c - a);
    for (long long row = blockIdx.y; row < n; row += gridDim.y) {
        float v[V];
        load_vector(v, from + row * width);
        store_vector(x + row * (a + b) + c, v);
    }
}
