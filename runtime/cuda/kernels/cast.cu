// Conversions of elements. X, Y: element types before and after.

// A run of elements; `end` as in runs.cuh.
struct Run { const X* x; Y* y; long long n, end; };
constexpr int RUNS = 32;
struct Runs { Run at[RUNS]; };
// Elements of a thread at a time: 16 bytes of the narrowest type.
constexpr int WIDTH = 8;

// y = x, converted, in each run.
extern "C" __global__ void __launch_bounds__(256) cast(const __grid_constant__ Runs runs, int n_runs) {
    wait_for_predecessor();
    int own = own_run(runs, n_runs);
    Run run = runs.at[own];
    Part part = own_part(runs, own);
    long long first = (long long)part.index * blockDim.x + threadIdx.x, stride = (long long)part.count * blockDim.x;
    for (long long i = first; i < run.n / WIDTH; i += stride) {
        float v[WIDTH];
        load_vector(v, run.x + i * WIDTH);
        store_vector(run.y + i * WIDTH, v);
    }
    for (long long i = run.n / WIDTH * WIDTH + first; i < run.n; i += stride) run.y[i] = from_float<Y>(to_float(run.x[i]));
}
