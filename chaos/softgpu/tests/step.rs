//! A step as that of a model with 270 thousand parameters on 256 tokens: how long its launches take.
#![allow(unsafe_code)]

mod support;

use std::time::Duration;
use support::{Gpu, arg};

/// Kernels in the style of the real ones: row statistics over a block, flat updates, a product with tensor cores.
const SOURCE: &str = r#"
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float parts[32];
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(~0u, v, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    float s = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
    for (int by = 16; by; by >>= 1) s += __shfl_xor_sync(~0u, s, by);
    return s;
}
extern "C" __global__ void __launch_bounds__(256) norm(const float* x, bf16* y, int n) {
    const float* row = x + (size_t)blockIdx.x * n;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i] * row[i];
    float r = 1.0f / sqrtf(block_sum(sum) / n + 1e-5f);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[(size_t)blockIdx.x * n + i] = to_bf16(row[i] * r);
}
extern "C" __global__ void __launch_bounds__(256) update(float* p, float* m, float* v, const float* g, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        m[i] = 0.9f * m[i] + 0.1f * g[i]; v[i] = 0.95f * v[i] + 0.05f * g[i] * g[i];
        p[i] = p[i] - 0.001f * m[i] / (sqrtf(v[i]) + 1e-8f);
    }
}
extern "C" __global__ void __launch_bounds__(128) product(const bf16* a, const bf16* b, float* c, int n, int k) {
    DYNAMIC_SHARED(bf16, tiles);
    const int PITCH = 40;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
    float acc[8][4] = {};
    for (int k0 = 0; k0 < k; k0 += 32) {
        for (int i = threadIdx.x; i < 512; i += 128) {
            const bf16* from = i < 256 ? a + (size_t)(row0 + i / 4) * k : b + (size_t)(col0 + (i - 256) / 4) * k;
            cp_async_16(tiles + i / 4 * PITCH + i % 4 * 8, from + k0 + i % 4 * 8);
        }
        cp_async_commit(); cp_async_wait<0>();
        __syncthreads();
        const bf16 *ta = tiles, *tb = ta + 64 * PITCH;
        for (int kk = 0; kk < 32; kk += 16) {
            unsigned ra[4];
            ldmatrix_x4(ra, ta + (warp * 16 + lane % 16) * PITCH + kk + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                unsigned rb[4];
                ldmatrix_x4(rb, tb + (j * 16 + lane % 8 + lane / 16 * 8) * PITCH + kk + lane / 8 % 2 * 8);
                unsigned b0[2] = {rb[0], rb[1]}, b1[2] = {rb[2], rb[3]};
                mma_m16n8k16(bf16{}, acc[2 * j], ra, b0);
                mma_m16n8k16(bf16{}, acc[2 * j + 1], ra, b1);
            }
        }
        __syncthreads();
    }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++) c[(size_t)(row0 + warp * 16 + lane / 4 + i / 2 * 8) * n + col0 + j * 8 + lane % 4 * 2 + i % 2] = acc[j][i];
}
"#;

/// Processor time of the whole process.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<u64> =
        stat.rsplit_once(')').unwrap().1.split_whitespace().map(|w| w.parse().unwrap_or(0)).collect();
    Duration::from_millis((fields[11] + fields[12]) * 10)
}

#[test]
fn step_of_a_small_model_takes_less_than_a_second_of_one_core() {
    let gpu = Gpu::new();
    let module = gpu.module(SOURCE);
    let [norm, update, product] = ["norm", "update", "product"].map(|n| gpu.function(module, n));
    let (x, y, c) = (gpu.put(&vec![1f32; 256 * 64]), gpu.alloc(256 * 64 * 2), gpu.alloc(256 * 192 * 4));
    let states = [0; 4].map(|_: i32| gpu.put(&vec![0.5f32; 10_000]));
    let (a, b) = (gpu.put(&vec![0x3f80u16; 256 * 192]), gpu.put(&vec![0x3f80u16; 192 * 192]));
    let n = 10_000u32;
    let step = || {
        for _ in 0..109 {
            gpu.launch(norm, gpu.stream, [256, 1, 1], 64, 0, &[arg(&x), arg(&y), arg(&64i32)]);
        }
        for _ in 0..10 {
            gpu.launch(
                product,
                gpu.stream,
                [3, 4, 1],
                128,
                128 * 40 * 2,
                &[arg(&a), arg(&b), arg(&c), arg(&192i32), arg(&192i32)],
            );
        }
        for _ in 0..54 {
            let [p, m, v, g] = &states;
            gpu.launch(update, gpu.stream, [8, 1, 1], 256, 0, &[arg(p), arg(m), arg(v), arg(g), arg(&n)]);
        }
        gpu.sync();
    };
    step();

    let before = processor_time();
    step();
    let took = processor_time() - before;

    println!("{took:?} of processor time");
    assert_eq!(gpu.get::<f32>(c, 256 * 192), vec![192f32; 256 * 192]);
    assert!(took < Duration::from_millis(1600), "{took:?}");
}
