// Runs of elements that one launch covers. Each has blocks of its own, as many as a launch for the run alone would have, so that
// its results have the same bits; its `end` is the first block behind them.
struct Part { int index, count; };

// The run of this block.
template <class Runs> __device__ __forceinline__ int own_run(const Runs& runs, int n_runs) {
    int low = 0, high = n_runs - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((long long)blockIdx.x < runs.at[middle].end) high = middle;
        else low = middle + 1;
    }
    return low;
}
// Which of the run's blocks this one is.
template <class Runs> __device__ __forceinline__ Part own_part(const Runs& runs, int run) {
    int first = run ? int(runs.at[run - 1].end) : 0;
    return {int(blockIdx.x) - first, int(runs.at[run].end) - first};
}
