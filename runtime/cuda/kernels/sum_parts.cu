// Second stage of sums over rows: adds the shares of all blocks, along a fixed tree.
//
// parts: [n_parts, n_a + n_b]; base_a, a: [n_a]; base_b, b: [n_b]. Results: a = base_a + sum of the first n_a columns, b = base_b +
// sum of the others. A base is null, or may be the memory of its result. Blocks of 32 warps, 32 columns each.
extern "C" __global__ void __launch_bounds__(1024) sum_parts(const float* __restrict__ parts, int n_parts, const float* base_a,
        float* a, int n_a, const float* base_b, float* b, int n_b) {
    wait_for_predecessor();
    __shared__ float tile[32][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cols = n_a + n_b;
    const int column = blockIdx.x * 32 + lane;
    float sum = 0;
    if (column < cols) {
        #pragma unroll 8
        for (int part = warp; part < n_parts; part += 32) sum += parts[(long long)part * cols + column];
    }
    tile[warp][lane] = sum;
    __syncthreads();
    // Transposed: a warp adds the 32 sums of one column.
    sum = warp_sum(tile[lane][warp]);
    const int c = blockIdx.x * 32 + warp;
    if (lane != 0 || c >= cols) return;
    if (c < n_a) a[c] = base_a ? base_a[c] + sum : sum;
    else b[c - n_a] = base_b ? base_b[c - n_a] + sum : sum;
}
