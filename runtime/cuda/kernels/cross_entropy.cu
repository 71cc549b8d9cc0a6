// Softmax cross-entropy over rows of logits, and its gradient.

__device__ __forceinline__ void zero_row(X* row, const Row& parts) {
    float zeros[WIDTH] = {};
    for (int i = threadIdx.x; i < parts.n_vectors; i += blockDim.x) store_last(row + parts.head + (long long)WIDTH * i, zeros);
    if (parts.edge() >= 0) row[parts.edge()] = from_float<X>(0.0f);
}

// losses [n] = ln sum exp(logits) - the label's logit, or 0 where the label is negative; dlogits, if not null, =
// (softmax - onehot(label)) scale, or 0. dlogits may be the logits. A label outside of the classes has an infinite loss and a
// gradient of NaN, for which the step changes nothing.
extern "C" __global__ void __launch_bounds__(1024) loss_of_rows(const X* logits, const int* labels, const double* gradient_scale, int v, double* losses, X* dlogits) {
    wait_for_predecessor();
    long long at = (long long)blockIdx.x * v;
    const X* row = logits + at;
    int label = labels[blockIdx.x];
    Row parts(row, v);
    if (label < 0) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0;
        if (dlogits) zero_row(dlogits + at, parts);
        return;
    }
    float of_label = label < v ? to_float(row[label]) : -INFINITY, edge;
    Piece kept[KEPT];
    Total total = read_row(row, parts, kept, edge);
    if (threadIdx.x == 0) losses[blockIdx.x] = double(total.largest) + log(total.sum) - double(of_label);
    if (!dlogits) return;
    float scale = float(*gradient_scale), largest = total.largest;
    float factor = label < v ? float(double(scale) / total.sum) : INFINITY - INFINITY;
    X *to = dlogits + at, *body = to + parts.head;
    auto write = [=](const Piece& x, int i) {
        float d[WIDTH];
        to_floats(d, x);
        for (int j = 0; j < WIDTH; j++) d[j] = exp_of(d[j] - largest) * factor;
        store_last(body + (long long)WIDTH * i, d);
    };
    // From the end on.
    int first = threadIdx.x + KEPT * blockDim.x, n_left = first < parts.n_vectors ? (parts.n_vectors - first - 1) / int(blockDim.x) + 1 : 0;
    for (int k = n_left - 1; k >= 0; k -= 2) {
        int i = first + k * int(blockDim.x), j = i - int(blockDim.x);
        Piece x = load_piece(row + parts.head, i), y;
        if (k > 0) y = load_piece(row + parts.head, j);
        write(x, i);
        if (k > 0) write(y, j);
    }
    for (int k = 0; k < KEPT; k++) {
        int i = threadIdx.x + k * blockDim.x;
        if (i < parts.n_vectors) write(kept[k], i);
    }
    if (parts.edge() >= 0) to[parts.edge()] = from_float<X>(exp_of(edge - largest) * factor);
    __syncthreads();
    if (threadIdx.x == 0 && label < v) to[label] = from_float<X>(exp_of(of_label - largest) * factor - scale);
}

// stats [n, 3] of a row of a part of the classes, those from `first` on: the largest logit, the sum of exponentials relative to
// it, and the label's logit, minus infinity if it is elsewhere. A negative label: the numbers of no classes.
extern "C" __global__ void __launch_bounds__(1024) statistics_of_rows(const X* __restrict__ logits, const int* __restrict__ labels, int v, int first, float* stats) {
    wait_for_predecessor();
    const X* row = logits + (long long)blockIdx.x * v;
    int label = labels[blockIdx.x], column = label - first;
    Total total = {-INFINITY, 0.0};
    if (label >= 0) {
        Piece kept[KEPT];
        float edge;
        total = read_row(row, Row(row, v), kept, edge);
    }
    if (threadIdx.x) return;
    float* to = stats + 3ll * blockIdx.x;
    to[0] = total.largest;
    to[1] = float(total.sum);
    to[2] = label >= 0 && column >= 0 && column < v ? to_float(row[column]) : -INFINITY;
}

// losses [n], from the statistics [n_shards, n, 3] of all parts.
extern "C" __global__ void __launch_bounds__(256) loss_of_statistics(const int* labels, const float* stats, int n_shards, int n, double* losses) {
    wait_for_predecessor();
    GRID_STRIDE(row, n) {
        Merged m = merge(stats, n_shards, n, int(row));
        losses[row] = labels[row] < 0 ? 0.0 : double(m.largest) + log(m.sum) - double(m.of_label);
    }
}

// dlogits [n, v] of this part, which may be the logits. A block for each row and each run of columns.
extern "C" __global__ void __launch_bounds__(256) gradient_of_statistics(const X* logits, const int* labels, const double* gradient_scale, const float* stats, int n_shards, int n, int v, int first, X* dlogits) {
    wait_for_predecessor();
    int index = blockIdx.x, label = labels[index], column = label - first;
    const X* row = logits + (long long)index * v;
    X* to = dlogits + (long long)index * v;
    Row parts(row, v);
    Merged m = merge(stats, n_shards, n, index);
    float scale = float(*gradient_scale), factor = float(double(scale) / m.sum);
    auto gradient = [&](float x, int i) {
        float d = exp_of(x - m.largest) * factor;
        return label < 0 ? 0.0f : i == column ? d - scale : d;
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
