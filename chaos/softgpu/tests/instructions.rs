//! The instructions that the prelude wraps, and arithmetic, against plain code.
#![allow(unsafe_code)]

mod support;

use support::{Gpu, arg, assert_ends_with, in_child};

/// Numbers in [-1, 1) with few bits, so that products and sums are exact.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as f32 / 128.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A [16, k] by rows, B [8, k] by rows (columns of the operand), C [16, 8].
fn product(a: &[f32], b: &[f32], k: usize) -> Vec<f32> {
    (0..128).map(|i| (0..k).map(|p| a[i / 8 * k + p] * b[i % 8 * k + p]).sum()).collect()
}

fn multiply(gpu: &Gpu, load: &str, k: usize) -> (Vec<f32>, Vec<f32>) {
    let (a, b) = (numbers(16 * k, 1), numbers(8 * k, 2));
    let source = format!(
        r#"
extern "C" __global__ void f(const float* a, const float* b, float* c) {{
    int l = threadIdx.x, g = l / 4, t = l % 4;
    float d[4] = {{}};
    {load}
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
}}"#
    );
    let (da, db, dc) = (gpu.put(&a), gpu.put(&b), gpu.alloc(512));
    gpu.launch(gpu.kernel(&source, "f"), gpu.stream, [1, 1, 1], 32, 0, &[arg(&da), arg(&db), arg(&dc)]);
    (gpu.get(dc, 128), product(&a, &b, k))
}

#[test]
fn sums_and_maxima_over_lanes_have_the_bits_of_the_shuffles_that_a_gpu_runs() {
    let gpu = Gpu::new();
    let prelude = include_str!("../../../runtime/cuda/kernels/prelude.cuh");
    // Sums of these depend on their order.
    let values: Vec<f32> = (0..64).map(|i| 1.1f32.powi(i * 37 % 64) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
    for n in [2, 4, 8, 16, 32] {
        let source = format!(
            r#"{prelude}
extern "C" __global__ void f(float* x) {{
    const int i = threadIdx.x;
    const float v = x[i];
    x[i] = lane_sum<{n}>(v);
    x[64 + i] = shuffled_sum<{n}>(v);
    x[128 + i] = lane_max<{n}>(v);
    x[192 + i] = shuffled_max<{n}>(v);
}}"#
        );

        let all = gpu.run(&source, "f", 1, 64, &[&values[..], &[0.0; 192]].concat());

        assert_eq!((&all[..64], &all[128..192]), (&all[64..128], &all[192..]), "{n}");
        for (group, found) in values.chunks(n).zip(all.chunks(n)) {
            let sum: f64 = group.iter().map(|v| f64::from(*v)).sum();
            assert!(
                found.iter().all(|f| (f64::from(*f) - sum).abs() < 1e-4 * sum.abs().max(100.0)),
                "{n}: {sum} {found:?}"
            );
        }
        let max = |group: &[f32]| group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert!(
            values.chunks(n).zip(all[128..192].chunks(n)).all(|(group, found)| found.iter().all(|f| *f == max(group)))
        );
    }
}

#[test]
fn tensor_core_products_have_the_fragments_of_the_manual() {
    let gpu = Gpu::new();
    let half = |ty: &str, pack: &str| {
        format!(
            r#"unsigned ra[4], rb[2];
    for (int i = 0; i < 4; i++) {{ const float* p = a + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8; ra[i] = {pack}(p[0], p[1]); }}
    for (int i = 0; i < 2; i++) {{ const float* p = b + g * 16 + t * 2 + i * 8; rb[i] = {pack}(p[0], p[1]); }}
    mma_m16n8k16({ty}d, ra, rb);"#
        )
    };
    let tf32 = r#"unsigned ra[4], rb[2];
    for (int i = 0; i < 4; i++) ra[i] = to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (int i = 0; i < 2; i++) rb[i] = to_tf32(b[g * 8 + t + i * 4]);
    mma_m16n8k8_tf32(d, ra, rb);"#;

    for (load, k) in [
        (half("", "pack_bf16"), 16),
        (half("bf16{}, ", "pack_bf16"), 16),
        (half("f16{}, ", "pack_f16"), 16),
        (tf32.into(), 8),
    ] {
        let (found, expected) = multiply(&gpu, &load, k);
        assert_eq!(found, expected, "{load}");
    }
}

#[test]
fn matrices_are_loaded_and_stored_by_eights() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(unsigned* x) {
    __shared__ __align__(16) unsigned short s[32][8];
    int l = threadIdx.x;
    for (int j = 0; j < 8; j++) s[l][j] = l * 8 + j;
    __syncthreads();
    unsigned r4[4], t4[4], r2[2], r1[1];
    ldmatrix_x4(r4, s[l]); ldmatrix_x4<true>(t4, s[l]); ldmatrix_x2(r2, s[l % 16]); ldmatrix_x1(r1, s[l % 8]);
    for (int m = 0; m < 4; m++) { x[l * 13 + m] = r4[m]; x[l * 13 + 4 + m] = t4[m]; }
    x[l * 13 + 8] = r2[1]; x[l * 13 + 9] = r1[0];
    __syncthreads();
    stmatrix_x4<true>(s[l], r4);
    __syncthreads();
    x[l * 13 + 10] = s[l][0]; x[l * 13 + 11] = s[l][7]; x[l * 13 + 12] = shared_address(s[1]) - shared_address(s[0]);
}"#;

    let x = gpu.run(source, "f", 1, 32, &[0u32; 32 * 13]);

    for l in 0..32u32 {
        let at = |m: u32, i: u32, j: u32| (m * 8 + i) * 8 + j;
        let pair = |m, transposed: bool| {
            let (i, j) = (l / 4, l % 4 * 2);
            if transposed { at(m, j, i) | at(m, j + 1, i) << 16 } else { at(m, i, j) | at(m, i, j + 1) << 16 }
        };
        let mut expected: Vec<u32> = (0..4).map(|m| pair(m, false)).chain((0..4).map(|m| pair(m, true))).collect();
        expected.extend([pair(1, false), pair(0, false), at(l / 8, 0, l % 8), at(l / 8, 7, l % 8), 16]);
        assert_eq!(x[l as usize * 13..][..13], expected, "lane {l}");
    }
}

#[test]
fn asynchronous_copies_arrive_when_their_group_is_waited_for() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(unsigned* x) {
    __shared__ __align__(16) unsigned s[16];
    cp_async_16(s, x); cp_async_commit();
    cp_async_8(s + 4, x + 4); cp_async_4(s + 6, x + 6, 0); cp_async_16(s + 8, x, 8); cp_async_commit();
    x[8] = s[0]; cp_async_wait<1>(); x[9] = s[0]; x[10] = s[4]; cp_async_wait<0>(); x[11] = s[5]; x[12] = s[6];
    x[13] = s[9]; x[14] = s[10];
}"#;
    let values: Vec<u32> = (0..16).collect();

    let x = gpu.run(source, "f", 1, 1, &values);

    assert_eq!(x[8..15], [u32::MAX, 0, u32::MAX, 5, 0, 1, 0]);
}

#[test]
fn misplaced_asynchronous_copy_is_an_error() {
    for (call, code) in [("cp_async_16(s + 1, x)", 716), ("cp_async_16(x, x)", 717)] {
        let output = in_child("misplaced_asynchronous_copy_is_an_error", &[("CALL", call)], || {
            let gpu = Gpu::new();
            let call = std::env::var("CALL").unwrap();
            let source =
                format!("extern \"C\" __global__ void f(int* x) {{ __shared__ __align__(16) int s[8]; {call}; }}");
            let at = gpu.alloc(64);
            gpu.launch(gpu.kernel(&source, "f"), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
            println!("code {}", gpu.synchronize(gpu.stream));
        });
        assert_ends_with(&output, 0);
        assert!(String::from_utf8_lossy(&output.stdout).contains(&format!("code {code}")), "{output:?}");
    }
}

#[test]
fn conversions_to_halves_round_to_nearest_even() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(float* x) {
    float v = x[threadIdx.x]; unsigned* u = (unsigned*)x;
    u[threadIdx.x] = to_f16(v).bits | (unsigned)to_bf16(v).bits << 16;
}"#;
    let back = r#"
extern "C" __global__ void g(float* x) {
    unsigned short h = threadIdx.x + blockIdx.x * blockDim.x; float v = to_float(f16{h});
    x[h] = v != v ? 0.0f : (float)(to_f16(v).bits != h);
}"#;
    let cases = [
        1.0,
        1.000_488_3,
        1.001_464_8,
        65519.0,
        65520.0,
        -0.0,
        5.960_464_5e-8,
        2.9e-8,
        6.1e-5,
        f32::NAN,
        f32::INFINITY,
    ];

    let x = gpu.run(source, "f", 1, cases.len() as u32, &cases);
    let round_trip = gpu.run(back, "g", 64, 1024, &vec![1f32; 1 << 16]);

    let f16: Vec<u32> = x.iter().map(|v| v.to_bits() & 0xffff).collect();
    assert_eq!(f16, [0x3c00, 0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x8000, 1, 0, 0x03ff, 0x7fff, 0x7c00]);
    assert_eq!(x[10].to_bits() >> 16, 0x7f80);
    assert!(round_trip.iter().all(|v| *v == 0.0));
}

#[test]
fn roundings_that_are_named_are_never_contracted() {
    let gpu = Gpu::new();
    let source = r#"
extern "C" __global__ void f(float* x) {
    float a = x[0], b = x[1], c = x[2];
    x[3] = __fadd_rn(__fmul_rn(a, b), c); x[4] = a * b + c; x[5] = __fmaf_rn(a, b, c);
    x[6] = __frcp_rn(3.0f) + __fsqrt_rn(4.0f) + __fdividef(1.0f, 2.0f) + rsqrtf(4.0f) + __saturatef(7.0f);
    x[7] = max(1, 2u) + min(3.0f, NAN) + __popc(255u) + __clz(1) + __float2int_rn(2.5f) + __float2int_rz(-3e9f) / (1 << 30);
}"#;
    let (a, c) = (1.0 + f32::EPSILON, -1.0 - 2.0 * f32::EPSILON);
    let image = |fmad| gpu.compile(source, &["--gpu-architecture=sm_90", fmad]).unwrap();
    let run = |fmad| {
        let at = gpu.put(&[a, a, c, 0.0, 0.0, 0.0, 0.0, 0.0]);
        gpu.launch(gpu.function(gpu.load(&image(fmad)), "f"), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
        gpu.get::<f32>(at, 8)
    };

    let (separate, fused) = (run("--fmad=false"), run("--fmad=true"));

    let exact = f32::EPSILON * f32::EPSILON;
    assert_eq!((separate[3], separate[4], separate[5]), (0.0, 0.0, exact));
    assert_eq!((fused[3], fused[5]), (0.0, exact));
    assert_eq!((fused[6], fused[7]), (1.0 / 3.0 + 2.0 + 0.5 + 0.5 + 1.0, 2.0 + 3.0 + 8.0 + 31.0 + 2.0 - 2.0));
}
