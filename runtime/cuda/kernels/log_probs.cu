// Log-probabilities of labels over rows of logits, and their gradient.

// log_probs [n] = the label's logit - ln sum exp(logits), and norms [n] that logarithm; both 0 where the label is negative. A label
// outside of the classes has the log-probability of minus infinity.
extern "C" __global__ void __launch_bounds__(1024) log_probs_of_rows(const X* __restrict__ logits, const int* __restrict__ labels, int v, float* log_probs, float* norms) {
    wait_for_predecessor();
    const X* row = logits + (long long)blockIdx.x * v;
    int label = labels[blockIdx.x];
    if (label < 0) {
        if (threadIdx.x == 0) log_probs[blockIdx.x] = norms[blockIdx.x] = 0.0f;
        return;
    }
    Piece kept[KEPT];
    float edge;
    Total total = read_row(row, Row(row, v), kept, edge);
    if (threadIdx.x) return;
    double norm = double(total.largest) + log(total.sum);
    log_probs[blockIdx.x] = label < v ? float(double(to_float(row[label])) - norm) : -INFINITY;
    norms[blockIdx.x] = float(norm);
}

// The same from the statistics [n_shards, n, 3] of all parts of the classes.
extern "C" __global__ void __launch_bounds__(256) log_probs_of_statistics(const int* labels, const float* stats, int n_shards, int n, float* log_probs, float* norms) {
    wait_for_predecessor();
    GRID_STRIDE(row, n) {
        Merged m = merge(stats, n_shards, n, int(row));
        double norm = double(m.largest) + log(m.sum);
        log_probs[row] = labels[row] < 0 ? 0.0f : float(double(m.of_label) - norm);
        norms[row] = labels[row] < 0 ? 0.0f : float(norm);
    }
}

// dlogits [n, v] = (onehot(label) - softmax) d, or 0 where the label is negative, for the classes from `first` on; it may be the
// logits. A block for each row and each run of columns.
extern "C" __global__ void __launch_bounds__(256) log_probs_gradient(const X* logits, const int* labels, const float* norms, const float* d, int v, int first, X* dlogits) {
    wait_for_predecessor();
    int index = blockIdx.x, label = labels[index], column = label - first;
    const X* row = logits + (long long)index * v;
    X* to = dlogits + (long long)index * v;
    Row parts(row, v);
    float norm = norms[index], slope = d[index];
    auto gradient = [&](float x, int i) {
        float p = exp_of(x - norm);
        return label < 0 ? 0.0f : i == column ? slope * (1.0f - p) : -slope * p;
    };
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < parts.n_vectors; i += gridDim.y * blockDim.x) {
        float x[WIDTH];
        load_vector(x, row + parts.head + (long long)WIDTH * i);
        for (int j = 0; j < WIDTH; j++) x[j] = gradient(x[j], parts.head + WIDTH * i + j);
        store_last(to + parts.head + (long long)WIDTH * i, x);
    }
    int edge = parts.edge();
    if (blockIdx.y == 0 && edge >= 0) to[edge] = from_float<X>(gradient(to_float(row[edge]), edge));
}
