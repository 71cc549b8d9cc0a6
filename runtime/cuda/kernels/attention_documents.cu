// What attention through a library needs besides the library: where the documents are, documents of one token, and statistics
// in the layout of the machine.
//
// Macros: X, element type; HEAD_DIM.
constexpr int D = HEAD_DIM;

// Tokens are numbered along the batch; `doc_start` counts from the start of the row.
__device__ __forceinline__ bool is_last(const int* doc_start, int token, int seq_len) {
    const int index = token % seq_len;
    return index == seq_len - 1 || doc_start[token + 1] == index + 1;
}
__device__ __forceinline__ bool is_single(const int* doc_start, int token, int seq_len) {
    return doc_start[token] == token % seq_len && is_last(doc_start, token, seq_len);
}

// The documents of two tokens and more, in order: lengths [n_places], and where each begins in packed qkv, in outputs and in
// statistics [n_places + 1], in elements. Places behind the last document have the length 0 and begin at the end. One block of
// 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) attention_documents(const int* __restrict__ doc_start, int* __restrict__ lengths, long long* __restrict__ in_packed, long long* __restrict__ in_outputs,
                                                                       long long* __restrict__ in_statistics, int n_tokens, int seq_len, int n_places, int columns, int n_heads) {
    wait_for_predecessor();
    __shared__ int of_warp[32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int n_before = 0;
    for (int first = 0; first < n_tokens; first += 1024) {
        const int token = first + thread;
        const bool is_end = token < n_tokens && is_last(doc_start, token, seq_len) && doc_start[token] != token % seq_len;
        const unsigned ends = __ballot_sync(~0u, is_end);
        if (lane == 0) of_warp[warp] = __popc(ends);
        __syncthreads();
        int place = n_before + __popc(ends & ((1u << lane) - 1));
        for (int i = 0; i < 32; i++) {
            if (i < warp) place += of_warp[i];
            n_before += of_warp[i];
        }
        if (is_end && place < n_places) {
            const int length = token % seq_len - doc_start[token] + 1;
            const long long begin = token - length + 1;
            lengths[place] = length;
            in_packed[place] = begin * columns;
            in_outputs[place] = begin * n_heads * D;
            in_statistics[place] = begin * n_heads;
        }
        __syncthreads();
    }
    for (int place = n_before + thread; place <= n_places; place += 1024) {
        if (place < n_places) lengths[place] = 0;
        in_packed[place] = (long long)n_tokens * columns;
        in_outputs[place] = (long long)n_tokens * n_heads * D;
        in_statistics[place] = (long long)n_tokens * n_heads;
    }
}

// A token that is a document sees itself only: o = v, lse = scale q k. A warp has a query head of a token.
extern "C" __global__ void __launch_bounds__(256) attention_singles(const X* __restrict__ qkv, const int* __restrict__ doc_start, X* __restrict__ o, float* __restrict__ lse, int n_tokens, int seq_len, int n_heads,
                                                                    int n_kv_heads, float scale) {
    wait_for_predecessor();
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int token = int(i / n_heads), head = int(i % n_heads), lane = threadIdx.x % 32;
    if (token >= n_tokens || !is_single(doc_start, token, seq_len)) return;
    const X* row = qkv + (long long)token * (n_heads + 2 * n_kv_heads) * D;
    const X *q = row + head * D, *k = row + (n_heads + head / (n_heads / n_kv_heads)) * D, *v = k + n_kv_heads * D;
    float score = 0.0f;
    for (int d = lane; d < D; d += 32) {
        score = fmaf(to_float(q[d]), to_float(k[d]), score);
        o[i * D + d] = v[d];
    }
    score = warp_sum(score);
    if (lane == 0) lse[i] = scale * score;
}

// The adjoint: dv is the sum of do over the query heads of a key head; the weight is 1 for any score, so dq = dk = 0. A warp has a
// key head of a token.
extern "C" __global__ void __launch_bounds__(256) attention_singles_backward(const X* __restrict__ dout, const int* __restrict__ doc_start, X* __restrict__ dqkv, int n_tokens, int seq_len, int n_heads, int n_kv_heads) {
    wait_for_predecessor();
    const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int token = int(i / n_kv_heads), head = int(i % n_kv_heads), lane = threadIdx.x % 32, group = n_heads / n_kv_heads;
    if (token >= n_tokens || !is_single(doc_start, token, seq_len)) return;
    X* row = dqkv + (long long)token * (n_heads + 2 * n_kv_heads) * D;
    const X* from = dout + ((long long)token * n_heads + head * group) * D;
    X *dq = row + head * group * D, *dk = row + (n_heads + head) * D, *dv = dk + n_kv_heads * D;
    for (int d = lane; d < D; d += 32) {
        float sum = 0.0f;
        for (int h = 0; h < group; h++) {
            sum += to_float(from[h * D + d]);
            dq[h * D + d] = from_float<X>(0.0f);
        }
        dk[d] = from_float<X>(0.0f);
        dv[d] = from_float<X>(sum);
    }
}

// Statistics of whole rows: to [B, S, H] from [B, H, S], or back. Elements are numbered along [B, S, H].
extern "C" __global__ void __launch_bounds__(256) attention_statistics_from_rows(const float* __restrict__ of_rows, float* __restrict__ lse, int n_tokens, int seq_len, int n_heads) {
    wait_for_predecessor();
    GRID_STRIDE(i, (long long)n_tokens * n_heads) {
        const long long token = i / n_heads, row = token / seq_len;
        lse[i] = of_rows[(row * n_heads + i % n_heads) * seq_len + token % seq_len];
    }
}
extern "C" __global__ void __launch_bounds__(256) attention_statistics_to_rows(const float* __restrict__ lse, float* __restrict__ of_rows, int n_tokens, int seq_len, int n_heads) {
    wait_for_predecessor();
    GRID_STRIDE(i, (long long)n_tokens * n_heads) {
        const long long token = i / n_heads, row = token / seq_len;
        of_rows[(row * n_heads + i % n_heads) * seq_len + token % seq_len] = lse[i];
    }
}
