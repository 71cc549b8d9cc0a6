// Sums of parts of gradients along the fixed tree over the microbatches of all ranks, with the bits of any other device.
//
// The nodes of all ranks cover the microbatches in order. A sum over the first m microbatches consists of one complete subtree
// for each bit of m, like a binary counter: adding a subtree merges it with those of the bits that carry.
constexpr int NODES = 32, THREADS = 128;
struct Nodes { const float* at[NODES]; };

template <int N> __device__ __forceinline__ void tree_sum_by(const Nodes& nodes, float* sum, long long n, int n_leaves, int n_ranks) {
    // One partial sum for each bit of the number of microbatches.
    DYNAMIC_SHARED(float, partial);
    auto place = [&](int level) { return partial + (level * THREADS + threadIdx.x) * N; };
    GRID_STRIDE(i, n / N) {
        float acc[N], left[N];
        long long counted = 0;
        auto merge = [&](int level) {
            load_vector(left, place(level));
            for (int c = 0; c < N; c++) acc[c] = left[c] + acc[c];
        };
        for (int rank = 0; rank < n_ranks; rank++) {
            long long end = (rank + 1ll) * n_leaves / n_ranks;
            // The fewest whole subtrees that the rank's microbatches consist of.
            for (int k = 0; counted < end; k++) {
                int level = 0;
                while (!(counted >> level & 1) && 2ll << level <= end - counted) level++;
                load_vector(acc, nodes.at[k] + rank * n + i * N);
                long long before = counted;
                counted += 1ll << level;
                for (; before >> level & 1; level++) merge(level);
                store_vector(place(level), acc);
            }
        }
        // What has no right neighbour, the last one first.
        int level = 0;
        while (!(counted >> level & 1)) level++;
        load_vector(acc, place(level));
        for (level++; counted >> level; level++) if (counted >> level & 1) merge(level);
        store_vector(sum + i * N, acc);
    }
}
// sum [n]; each of `nodes` [n_ranks, n].
extern "C" __global__ void __launch_bounds__(128) tree_sum(const __grid_constant__ Nodes nodes, float* sum, long long n, int n_leaves, int n_ranks) {
    wait_for_predecessor();
    if (n % 4 == 0) tree_sum_by<4>(nodes, sum, n, n_leaves, n_ranks);
    else tree_sum_by<1>(nodes, sum, n, n_leaves, n_ranks);
}
