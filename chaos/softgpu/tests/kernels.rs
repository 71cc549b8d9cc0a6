//! What kernels see: barriers, warps, shared memory, atomics, limits.
#![allow(unsafe_code)]

mod support;

use std::collections::BTreeSet;
use support::{Gpu, P, arg, assert_ends_with, cu, in_child};

const BLOCK_SUM: &str = r#"
template <class T> __device__ T block_sum(T v) {
    __shared__ T parts[32];
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(~0u, v, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    SYNC
    T sum = 0;
    for (unsigned w = 0; w < blockDim.x / 32; w++) sum += parts[w];
    return sum;
}
extern "C" __global__ void __launch_bounds__(256) sum(float* x) {
    float s = block_sum((float)threadIdx.x);
    double d = block_sum(1.0);
    x[blockIdx.x * blockDim.x + threadIdx.x] = s + d;
}
"#;

#[test]
fn barriers_and_shuffles_give_the_sum_of_a_block_with_every_seed() {
    let gpu = Gpu::new();
    let source = BLOCK_SUM.replace("SYNC", "__syncthreads();");

    for seed in ["1", "2", "3"] {
        gpu.set("SOFTGPU_SEED", seed);

        let x = gpu.run(&source, "sum", 4, 256, &[0f32; 1024]);

        assert_eq!(x, [255.0 * 128.0 + 256.0; 1024]);
    }
}

#[test]
fn missing_barrier_shows_as_poison_of_shared_memory() {
    let gpu = Gpu::new();

    let x = gpu.run(&BLOCK_SUM.replace("SYNC", ""), "sum", 4, 256, &[0f32; 1024]);

    assert!(x.iter().any(|v| v.is_nan()));
}

#[test]
fn shared_memory_is_poison_at_the_start_of_each_block() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void look(unsigned* x) {
    __shared__ unsigned fixed[4]; extern __shared__ unsigned open[];
    x[blockIdx.x * 2] = fixed[1]; x[blockIdx.x * 2 + 1] = open[1];
    fixed[1] = open[1] = 0;
}"#;
    let at = gpu.put(&[0u32; 16]);

    gpu.launch(gpu.kernel(source, "look"), gpu.stream, [8, 1, 1], 1, 64, &[arg(&at)]);

    assert_eq!(gpu.get::<u32>(at, 16), [u32::MAX; 16]);
}

#[test]
fn shared_variables_of_different_templates_and_declarations_are_different() {
    let gpu = Gpu::new();
    let source = r#"
#define TILE(T, name) __shared__ __align__(16) T name[4], name##_2
template <int N> __device__ int* own() { TILE(int, mine); mine[0] = N; mine_2 = 7; return mine; }
extern "C" __global__ void f(int* x) {
    int *a = own<1>(), *b = own<2>(), *c = own<1>();
    x[0] = a[0]; x[1] = b[0]; x[2] = a == c; x[3] = a != b; x[4] = (unsigned long long)b % 16 == 0;
}"#;

    assert_eq!(gpu.run(source, "f", 1, 1, &[0i32; 5]), [1, 2, 1, 1, 1]);
}

#[test]
fn barrier_that_not_all_threads_reach_is_an_error_with_the_kernels_name() {
    let body = || {
        let gpu = Gpu::new();
        let source = r#"extern "C" __global__ void stuck(int* x) { if (threadIdx.x < 40) __syncthreads(); else __syncwarp(); *x = 1; }"#;
        let at = gpu.put(&[0i32]);
        gpu.launch(gpu.kernel(source, "stuck"), gpu.stream, [1, 1, 1], 64, 0, &[arg(&at)]);
        assert_eq!(gpu.synchronize(gpu.stream), 719);
    };
    let output = in_child("barrier_that_not_all_threads_reach_is_an_error_with_the_kernels_name", &[], body);

    let stderr = assert_ends_with(&output, 0);

    assert!(
        stderr.contains("kernel stuck: block (0, 0, 0) cannot go on: of 64 threads 40 wait at a barrier, 24 in a warp"),
        "{stderr}"
    );
}

#[test]
fn threads_that_have_returned_do_not_count_at_barriers_and_in_warps() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(int* x) {
    if (threadIdx.x >= 48) return;
    int all = __syncthreads_count(threadIdx.x % 2);
    int warp = __reduce_add_sync(~0u, 1);
    __syncthreads();
    x[threadIdx.x] = all * 100 + warp;
}"#;

    let x = gpu.run(source, "f", 1, 128, &[0i32; 48]);

    assert!(x[..32].iter().all(|v| *v == 2432) && x[32..].iter().all(|v| *v == 2416), "{x:?}");
}

#[test]
fn warp_operations_follow_the_manual() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(int* x) {
    int l = threadIdx.x, *to = x + l * 12;
    to[0] = __shfl_sync(~0u, l, 5); to[1] = __shfl_sync(~0u, l, 9, 8); to[2] = __shfl_up_sync(~0u, l, 3);
    to[3] = __shfl_down_sync(~0u, l, 3, 16); to[4] = __shfl_xor_sync(~0u, l, 1); to[5] = __ballot_sync(~0u, l % 3 == 0);
    to[6] = __any_sync(~0u, l == 7) + 2 * __all_sync(~0u, l < 32) + 4 * __all_sync(~0u, l < 31);
    to[7] = __match_any_sync(~0u, l / 8); to[8] = __reduce_max_sync(~0u, l); to[9] = __reduce_xor_sync(~0u, 1u << l);
    if (l < 16) to[10] = __shfl_xor_sync(0xffffu, l, 3); else to[10] = __shfl_down_sync(0xffff0000u, l, 1);
    to[11] = (int)(__shfl_xor_sync(~0u, (double)l, 2) * 10);
}"#;

    let x = gpu.run(source, "f", 1, 32, &[0i32; 32 * 12]);

    for l in 0..32i32 {
        let expected = [
            5,
            l / 8 * 8 + 1,
            if l < 3 { l } else { l - 3 },
            if l % 16 < 13 { l + 3 } else { l },
            l ^ 1,
            0x4924_9249,
            3,
            0xff << (l / 8 * 8),
            31,
            -1,
            if l < 16 { l ^ 3 } else { (l + 1).min(31) },
            (l ^ 2) * 10,
        ];
        assert_eq!(x[l as usize * 12..][..12], expected, "lane {l}");
    }
}

#[test]
fn value_of_a_lane_that_takes_no_part_is_poison() {
    let gpu = Gpu::new();
    let source = r#"extern "C" __global__ void f(float* x) { x[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 16); }"#;

    let x = gpu.run(source, "f", 1, 24, &[0f32; 24]);

    assert!(x[..8].iter().all(|v| *v == 1.0) && x[8..16].iter().all(|v| v.is_nan()), "{x:?}");
}

#[test]
fn order_of_threads_follows_the_seed() {
    // Long enough for a compilation between the copy and the launch: each pause of the engine takes random numbers.
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "60000000")]);
    let source = r#"extern "C" __global__ void f(int* x) { x[1 + atomicAdd(x, 1)] = blockIdx.x * 64 + threadIdx.x; }"#;
    gpu.set("SOFTGPU_THREADS", "1");
    let run = |seed: &str| {
        gpu.set("SOFTGPU_SEED", seed);
        gpu.run(source, "f", 8, 64, &[0i32; 513])
    };

    let (one, two, again) = (run("1"), run("2"), run("1"));
    let all: BTreeSet<i32> = one[1..].iter().copied().collect();

    assert_eq!((&one, all.len()), (&again, 512));
    assert_ne!(one, two);
}

#[test]
fn atomics_lose_nothing_on_several_threads() {
    let gpu = Gpu::with(&[("SOFTGPU_THREADS", "4")]);
    let source = r#"
extern "C" __global__ void f(unsigned long long* x) {
    atomicAdd((int*)x, 1); atomicAdd((float*)(x + 1), 1.0f); atomicAdd((double*)(x + 2), 1.0); atomicAdd(x + 3, 1ull);
    atomicMax((int*)(x + 4), (int)(blockIdx.x * 256 + threadIdx.x)); atomicMin((unsigned*)(x + 5), threadIdx.x);
    for (unsigned old = *(unsigned*)(x + 6), seen; (seen = atomicCAS((unsigned*)(x + 6), old, old + 1)) != old; old = seen);
    atomicOr((unsigned*)(x + 7), 1u << threadIdx.x % 32); atomicInc((unsigned*)(x + 8), 99u);
}"#;
    let mut start = [0u64; 9];
    start[5] = 1000;

    let x = gpu.run(source, "f", 64, 256, &start);

    let n = 64 * 256;
    assert_eq!((x[0], f32::from_bits(x[1] as u32), f64::from_bits(x[2]), x[3]), (n, n as f32, n as f64, n));
    assert_eq!(x[4..], [n - 1, 0, n, 0xffff_ffff, n % 100]);
}

#[test]
fn lock_between_threads_of_a_block_makes_progress() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(int* x) {
    while (atomicCAS(x, 0, 1) != 0);
    int n = x[1]; __nanosleep(10); x[1] = n + 1;
    __threadfence(); atomicExch(x, 0);
}"#;

    assert_eq!(gpu.run(source, "f", 1, 128, &[0i32; 2]), [0, 128]);
}

#[test]
fn trap_and_assertion_end_the_launch_with_their_codes() {
    for (statement, code, text) in [
        ("__trap()", 719, "__trap()"),
        ("assert(threadIdx.x < 7)", 710, "test.cu:1: assertion `threadIdx.x < 7` failed"),
    ] {
        let test = "trap_and_assertion_end_the_launch_with_their_codes";
        let output = in_child(test, &[("STATEMENT", statement)], || {
            let gpu = Gpu::new();
            let source = format!("extern \"C\" __global__ void f() {{ {}; }}", std::env::var("STATEMENT").unwrap());
            gpu.launch(gpu.kernel(&source, "f"), gpu.stream, [1, 1, 1], 8, 0, &[]);
            println!("code {}", gpu.synchronize(gpu.stream));
        });

        let stderr = assert_ends_with(&output, 0);

        assert!(String::from_utf8_lossy(&output.stdout).contains(&format!("code {code}")), "{output:?}");
        assert!(stderr.contains(text), "{stderr}");
    }
}

#[test]
fn write_behind_a_shared_variable_is_an_error() {
    for (statement, what) in [("fixed[4] = 0;", "a shared variable"), ("open[4] = 0;", "its dynamic shared memory")] {
        let test = "write_behind_a_shared_variable_is_an_error";
        let output = in_child(test, &[("STATEMENT", statement)], || {
            let gpu = Gpu::new();
            let source = format!(
                "extern \"C\" __global__ void f(volatile int* x) {{ __shared__ int fixed[4]; extern __shared__ int open[]; *x = fixed[0]; {} }}",
                std::env::var("STATEMENT").unwrap()
            );
            let at = gpu.alloc(4);
            gpu.launch(gpu.kernel(&source, "f"), gpu.stream, [1, 1, 1], 1, 16, &[arg(&at)]);
            assert_eq!(gpu.synchronize(gpu.stream), 700);
        });

        let stderr = assert_ends_with(&output, 0);

        assert!(stderr.contains(what), "{stderr}");
    }
}

#[test]
fn access_far_outside_of_shared_memory_ends_the_process() {
    let output = in_child("access_far_outside_of_shared_memory_ends_the_process", &[], || {
        let gpu = Gpu::new();
        let source = r#"extern "C" __global__ void f(int n) { extern __shared__ int open[]; open[n] = 0; }"#;
        gpu.launch(gpu.kernel(source, "f"), gpu.stream, [1, 1, 1], 1, 1024, &[arg(&256i32)]);
        gpu.sync();
    });

    let stderr = assert_ends_with(&output, 87);

    assert!(stderr.contains("kernel f touched") && stderr.contains("outside of a block's shared memory"), "{stderr}");
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    let gpu = Gpu::new();
    let source = r#"extern "C" __global__ void __launch_bounds__(128, 2) f() {} extern "C" __global__ void g() {}"#;
    let module = gpu.module(source);
    let (f, g) = (gpu.function(module, "f"), gpu.function(module, "g"));
    let go = |f, grid, block, dynamic| gpu.launch_block(f, gpu.stream, grid, block, dynamic, &[]);

    let wrong = [
        go(f, [1, 1, 1], [129, 1, 1], 0),
        go(g, [1, 1, 1], [1025, 1, 1], 0),
        go(g, [1, 1, 1], [1, 1, 65], 0),
        go(g, [0, 1, 1], [1, 1, 1], 0),
        go(g, [1, 65536, 1], [1, 1, 1], 0),
        go(g, [1, 1, 1], [1, 1, 1], (48 << 10) + 1),
        go(g, [1, 1, 1], [0, 1, 1], 0),
    ];
    let right =
        [go(f, [1, 1, 1], [128, 1, 1], 0), go(g, [70000, 1, 1], [1, 1, 1], 48 << 10), go(g, [1, 1, 1], [16, 64, 1], 0)];

    assert_eq!((wrong, right), ([1; 7], [0; 3]));
    gpu.sync();
}

#[test]
fn more_shared_memory_has_to_be_asked_for() {
    let gpu = Gpu::new();
    let source = r#"extern "C" __global__ void f(int* x) { extern __shared__ int s[]; s[50000] = 5; *x = s[50000]; }"#;
    let (f, at) = (gpu.kernel(source, "f"), gpu.alloc(4));
    let ask = |bytes: i32| cu!(gpu, cuFuncSetAttribute(f => P, 8 => i32, bytes => i32));

    let codes = [ask(300 << 10), ask(200 << 10), cu!(gpu, cuFuncSetAttribute(f => P, 77 => i32, 0 => i32))];
    let launched = gpu.launch(f, gpu.stream, [1, 1, 1], 1, 200 << 10, &[arg(&at)]);
    let mut bounds = [0i32; 2];
    for (value, attribute) in bounds.iter_mut().zip([0, 8]) {
        assert_eq!(cu!(gpu, cuFuncGetAttribute(std::ptr::from_mut(value) => *mut i32, attribute => i32, f => P)), 0);
    }

    assert_eq!((codes, launched, bounds), ([1, 0, 1], 0, [1024, 200 << 10]));
    assert_eq!(gpu.get::<i32>(at, 1), [5]);
}

#[test]
fn arguments_of_all_sizes_arrive() {
    #[repr(C, align(64))]
    struct Table {
        values: [u32; 1000],
    }
    let gpu = Gpu::new();
    let source = r#"
struct alignas(64) Table { unsigned values[1000]; };
extern "C" __global__ void f(unsigned char a, const __grid_constant__ Table t, double d, short s, float4 v, unsigned long long* x) {
    x[0] = a; x[1] = t.values[0] + t.values[999]; x[2] = (unsigned long long)d; x[3] = s; x[4] = (unsigned long long)(v.x + v.w); x[5] = (size_t)&t % 64;
}"#;
    let mut table = Table { values: [0; 1000] };
    (table.values[0], table.values[999]) = (7, 70_000);
    let at = gpu.alloc(48);
    let args = [arg(&200u8), arg(&table), arg(&3.5f64), arg(&-1i16), arg(&[1f32, 0.0, 0.0, 2.0]), arg(&at)];

    assert_eq!(gpu.launch(gpu.kernel(source, "f"), gpu.stream, [1, 1, 1], 1, 0, &args), 0);

    assert_eq!(gpu.get::<u64>(at, 6), [200, 70_007, 3, u64::MAX, 3, 0]);
}

#[test]
fn launch_with_attributes_knows_which_change_nothing() {
    #[repr(C)]
    struct Config {
        dims: [u32; 7],
        stream: P,
        attributes: *const [u32; 18],
        n: u32,
    }
    let gpu = Gpu::new();
    let f = gpu.kernel(r#"extern "C" __global__ void f(int* x) { atomicAdd(x, 1); }"#, "f");
    let at = gpu.put(&[0i32]);
    let go = |id: u32, value: u32| {
        let mut attribute = [0u32; 18];
        attribute[0] = id;
        attribute[2..5].fill(value);
        let config = Config { dims: [2, 1, 1, 4, 1, 1, 0], stream: gpu.stream, attributes: &raw const attribute, n: 1 };
        let (args, none) = ([arg(&at)], std::ptr::null_mut::<P>());
        cu!(gpu, cuLaunchKernelEx(&raw const config => *const Config, f => P, args.as_ptr().cast_mut() => *mut P, none => *mut P))
    };

    let codes = [go(8, 1), go(4, 1), go(4, 2), go(2, 1)];

    assert_eq!((codes, gpu.get::<i32>(at, 1)), ([0, 0, 801, 801], vec![16]));
}
