// Sums over the rows of a microbatch, and formulas over groups of these rows.

// sums [2, n_rows]: for each row of `len` tokens, the sum of those that have a label, and their number; each counts as much as its weight says, if
// there are weights. A block for each row.
extern "C" __global__ void __launch_bounds__(256) row_sums(const float* __restrict__ x, const int* __restrict__ labels, const float* __restrict__ weights, int len, int n_rows, double* sums) {
    wait_for_predecessor();
    long long first = (long long)blockIdx.x * len;
    double sum = 0.0, count = 0.0;
    for (int i = threadIdx.x; i < len; i += blockDim.x) {
        if (labels[first + i] < 0) continue;
        double weight = weights ? double(weights[first + i]) : 1.0;
        sum += weight * double(x[first + i]);
        count += weight;
    }
    sum = block_sum(sum);
    count = block_sum(count);
    if (threadIdx.x) return;
    sums[blockIdx.x] = sum;
    sums[n_rows + blockIdx.x] = count;
}

// dx [n] = the derivative of its row's sum for each token that has a label, times its weight if there are weights, otherwise 0.
extern "C" __global__ void __launch_bounds__(256) row_sums_backward(const double* __restrict__ d, const int* __restrict__ labels, const float* __restrict__ weights, int len, int n, float* dx) {
    wait_for_predecessor();
    GRID_STRIDE(i, n) dx[i] = labels[i] >= 0 ? float(d[i / len] * (weights ? double(weights[i]) : 1.0)) : 0.0f;
}

// A step of a tape: what it does, and the steps that it reads, or its constant. The numbers are those of lower/formulas.rs.
constexpr int STEPS = 144, SUMS = 16, OPERANDS = 8, RESULTS = 40, LANES = 32;
struct Words { unsigned long long at[STEPS]; };
struct Results { unsigned long long at[RESULTS]; };
struct Operands { double* at[OPERANDS]; };

__device__ __forceinline__ double log_sigmoid(double x) { return x < 0.0 ? x - log1p(exp(x)) : -log1p(exp(-x)); }

// Runs the tape for each group of `group` rows with a counted token in the first operand. sums [n_sums] = (carried +) the sums of the
// first results over the groups, if `counts`; each of the n_gradients operands dx gets `group` of the other results for its rows,
// and 0 for other groups and for counts. given: sums of earlier formulas, if there are any. sums may be carried.
extern "C" __global__ void __launch_bounds__(32) formulas(const __grid_constant__ Words codes, const __grid_constant__ Words constants, const __grid_constant__ Results results, const __grid_constant__ Operands x, const __grid_constant__ Operands dx, int n_steps, int n_sums, int n_gradients, int group, int n_rows, int counts, const double* hyper, const double* given, const double* carried, double* sums) {
    wait_for_predecessor();
    __shared__ double done[STEPS][LANES];
    __shared__ double totals[SUMS][LANES];
    int lane = threadIdx.x;
    for (int i = 0; i < n_sums; i++) totals[i][lane] = 0.0;
    for (int g = 0; g < n_gradients; g++)
        for (int i = lane; i < 2 * n_rows; i += LANES) dx.at[g][i] = 0.0;
    __syncthreads();
    for (int first = lane * group; first < n_rows; first += LANES * group) {
        bool is_group = false;
        for (int i = 0; i < group; i++) is_group |= x.at[0][n_rows + first + i] != 0.0;
        if (!is_group) continue;
        for (int i = 0; i < n_steps; i++) {
            unsigned long long code = codes.at[i];
            int op = int(code & 0xff), a = int(code >> 8 & 0xffffff), b = int(code >> 32);
            double y = 0.0;
            if (op == 0) y = x.at[a >> 1][(a & 1) * n_rows + first + b];
            else if (op == 1) y = __longlong_as_double((long long)constants.at[i]);
            else if (op == 12) y = hyper[a];
            else if (op == 13) y = given[a];
            else {
                double p = done[a][lane], q = op <= 5 ? done[b][lane] : 0.0;
                switch (op) {
                    case 2: y = p + q; break;
                    case 3: y = p - q; break;
                    case 4: y = p * q; break;
                    case 5: y = p / q; break;
                    case 6: y = exp(p); break;
                    case 7: y = log(p); break;
                    case 8: y = log_sigmoid(p); break;
                    case 9: y = 1.0 / (1.0 + exp(-p)); break;
                    case 10: y = p < 0.0 ? 0.0 : p; break;
                    case 11: y = p > 0.0 ? 1.0 : 0.0; break;
                }
            }
            done[i][lane] = y;
        }
        for (int i = 0; i < n_sums && counts; i++) totals[i][lane] += done[int(results.at[i])][lane];
        for (int g = 0; g < n_gradients; g++)
            for (int i = 0; i < group; i++) dx.at[g][first + i] = done[int(results.at[n_sums + g * group + i])][lane];
    }
    for (int i = 0; i < n_sums; i++) {
        double sum = warp_sum(totals[i][lane]);
        if (lane == 0) sums[i] = carried ? carried[i] + sum : sum;
    }
}
