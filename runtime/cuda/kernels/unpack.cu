// Packed weights as numbers. Y: element type of the weights. A block of 64 weights is a scale and its codes.
constexpr int WIDTH = 8;

// y [n] = the bf16 numbers in x [n / 2], the first of each pair in the low half.
extern "C" __global__ void __launch_bounds__(256) unpack_bf16(const unsigned* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / 2) {
        float pair[2] = {__uint_as_float(x[i] << 16), __uint_as_float(x[i] & 0xffff0000u)};
        store_vector(y + 2 * i, pair);
    }
}

// y [n] = the e4m3 numbers in x [n / 4], the first of each four in the lowest bits, over 16.
extern "C" __global__ void __launch_bounds__(256) unpack_e4m3(const unsigned* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / 4) {
        unsigned word = x[i];
        float v[4];
        for (int j = 0; j < 4; j++) v[j] = of_e4m3(word >> j * 8 & 0xffu) * (1.0f / 16.0f);
        store_vector(y + 4 * i, v);
    }
}

// y [n] = scale q / 127, of 64 signed bytes q behind each scale in x [n / 64 * 17].
extern "C" __global__ void __launch_bounds__(256) unpack_int8(const unsigned* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    GRID_STRIDE(i, n / WIDTH) {
        const unsigned* block = x + i / 8 * 17;
        float scale = __uint_as_float(block[0]);
        float v[WIDTH];
        for (int j = 0; j < WIDTH; j++) {
            unsigned word = block[1 + i % 8 * 2 + j / 4];
            v[j] = float((signed char)(word >> j % 4 * 8)) * scale * (1.0f / 127.0f);
        }
        store_vector(y + i * WIDTH, v);
    }
}

// y [n] = scale NF4[q], of 64 codes q of 4 bits behind each scale in x [n / 64 * 9].
extern "C" __global__ void __launch_bounds__(256) unpack_nf4(const unsigned* __restrict__ x, Y* __restrict__ y, long long n) {
    wait_for_predecessor();
    __shared__ float numbers[16];
    if (threadIdx.x < 16) {
        const float nf4[16] = {-1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
            0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f};
        numbers[threadIdx.x] = nf4[threadIdx.x];
    }
    __syncthreads();
    GRID_STRIDE(i, n / WIDTH) {
        const unsigned* block = x + i / 8 * 9;
        float scale = __uint_as_float(block[0]);
        unsigned word = block[1 + i % 8];
        float v[WIDTH];
        for (int j = 0; j < WIDTH; j++) v[j] = numbers[word >> 4 * j & 15u] * scale;
        store_vector(y + i * WIDTH, v);
    }
}
