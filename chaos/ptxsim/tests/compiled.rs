//! Kernels compiled by the real NVRTC, at odd shapes, against f64.

mod support;

use phalanx_ptxsim::{Arg, Device, Kind, Options, Run};
use support::{assert_clean, bf16, bf16s, compile, f32s, f64s, numbers, wide};

const ARCHITECTURES: [&str; 3] =
    ["--gpu-architecture=compute_80", "--gpu-architecture=compute_90a", "--gpu-architecture=compute_100a"];

#[test]
fn rms_norm_equals_f64_within_bf16_rounding() {
    for architecture in ARCHITECTURES {
        let Some(module) = compile("train.cu", &[architecture]) else { return };
        let (rows, n) = (5, 323);
        let (x, gain) = (numbers(rows * n, 1), numbers(n, 2));
        let mut device = Device::new();
        let (dx, dgain) = (f32s(&mut device, &x), f32s(&mut device, &gain));
        let (y, rstd) = (device.alloc(rows * n * 2), device.alloc(rows * 4));
        let args = [Arg::Ptr(dx), Arg::Ptr(dgain), Arg::Ptr(y), Arg::Ptr(rstd), Arg::I32(n as i32), Arg::F32(1e-5)];

        let kernel = module.kernel("rms_norm").unwrap();
        let run = kernel.launch(&mut device, [rows as u32, 1, 1], [256, 1, 1], 0, &args).unwrap();

        assert_clean(&run.findings);
        let y = device.u16s(y);
        for (at, y) in y.iter().enumerate() {
            let row = &x[at / n * n..][..n];
            let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
            let expected = f64::from(row[at % n]) / (squares / n as f64 + 1e-5).sqrt() * f64::from(gain[at % n]);
            // Half a unit in the last place of bf16, and the f32 sum.
            assert!(
                (f64::from(wide(*y)) - expected).abs() <= expected.abs() * 0.0041 + 1e-7,
                "{at}: {} {expected}",
                wide(*y)
            );
        }
    }
}

#[test]
fn adamw_has_the_bits_of_the_formula_in_f32() {
    let Some(module) = compile("train.cu", &["--gpu-architecture=compute_80", "--fmad=false"]) else { return };
    let n = 1003;
    let (p, m, g) = (numbers(n, 3), numbers(n, 4), numbers(n, 6));
    let v: Vec<f32> = numbers(n, 5).iter().map(|v| v.abs()).collect();
    let (beta1, beta2, eps, decay) = (0.9, 0.95, 1e-8, 0.1);
    let hyper = [3e-4, 1.0 - 0.9f64.powi(3), 1.0 - 0.95f64.powi(3)];
    let mut device = Device::new();
    let state = [&p, &m, &v, &g].map(|values| f32s(&mut device, values));
    let (dhyper, dscale) = (f64s(&mut device, &hyper), f64s(&mut device, &[0.7]));
    let args = [
        Arg::Ptr(state[0]),
        Arg::Ptr(state[1]),
        Arg::Ptr(state[2]),
        Arg::Ptr(state[3]),
        Arg::Ptr(dhyper),
        Arg::Ptr(dscale),
        Arg::F64(beta1),
        Arg::F64(beta2),
        Arg::F64(eps),
        Arg::F64(decay),
        Arg::U32(n as u32),
    ];

    let run = module.kernel("adamw").unwrap().launch(&mut device, [2, 1, 1], [256, 1, 1], 0, &args).unwrap();

    assert_clean(&run.findings);
    let scale = 0.7f64 as f32;
    let (step, root) = ((hyper[0] / hyper[1]) as f32, (1.0 / hyper[2].sqrt()) as f32);
    for (at, found) in device.f32s(state[0]).iter().enumerate() {
        let g = g[at] * scale;
        let m = beta1 as f32 * m[at] + (1.0 - beta1) as f32 * g;
        let v = beta2 as f32 * v[at] + (1.0 - beta2) as f32 * g * g;
        let expected = p[at] * (1.0 - hyper[0] * decay) as f32 - step * m / (v.sqrt() * root + eps as f32);
        assert_eq!(found.to_bits(), expected.to_bits(), "{at}");
    }
}

/// The product kernel with `m` and `n` multiples of 64, `k` of 32.
fn product(options: &[&str], seed: u64) -> Option<(Run, f64)> {
    let module = compile("train.cu", options)?;
    let (m, n, k) = (64, 128, 96);
    let (a, b) = (numbers(m * k, 7), numbers(n * k, 8));
    let mut device = Device::new();
    let (da, db, dc) = (bf16s(&mut device, &a), bf16s(&mut device, &b), device.alloc(m * n * 4));
    let args = [Arg::Ptr(da), Arg::Ptr(db), Arg::Ptr(dc), Arg::I32(m as i32), Arg::I32(n as i32), Arg::I32(k as i32)];
    let kernel = module.kernel("product_nt").unwrap().with(Options { seed, ..Options::default() });

    let run =
        kernel.launch(&mut device, [n as u32 / 64, m as u32 / 64, 1], [128, 1, 1], 2 * 128 * 40 * 2, &args).unwrap();

    let worst = device.f32s(dc).into_iter().enumerate().map(|(at, found)| {
        let value = |x: f32| f64::from(wide(bf16(x)));
        let expected: f64 = (0..k).map(|i| value(a[at / n * k + i]) * value(b[at % n * k + i])).sum();
        (f64::from(found) - expected).abs()
    });
    let worst = worst.fold(0.0, f64::max);
    Some((run, worst))
}

#[test]
fn tensor_core_product_equals_f64_and_is_free_of_findings() {
    for architecture in ARCHITECTURES {
        for seed in 1..4 {
            let Some((run, worst)) = product(&[architecture], seed) else { return };
            assert_clean(&run.findings);
            assert!(worst < 2e-5, "{worst}");
        }
    }
}

#[test]
fn product_without_its_second_barrier_races_at_the_copy() {
    for seed in 1..6 {
        let Some((run, _)) = product(&["--gpu-architecture=compute_80", "-DPLANT_RACE"], seed) else { return };
        let race = run.findings.iter().find(|f| matches!(f.kind, Kind::SharedRace | Kind::CopyInFlight));
        let race = race.unwrap_or_else(|| panic!("seed {seed}: {:?}", run.findings));
        // Which of the two accesses comes second depends on the seed. The copy is a function of the prelude, called in the
        // lambda `load` of the kernel.
        let sites = [&race.site, race.other.as_ref().unwrap().site.as_ref().unwrap()];
        let copy = sites
            .into_iter()
            .find(|site| site.instruction.starts_with("cp.async"))
            .expect("the copy is one of the two");
        assert_eq!(
            (copy.file.as_str(), copy.inlined_at.as_ref().unwrap()),
            ("prelude.cuh", &("train.cu".to_owned(), 38))
        );
    }
}

#[test]
fn flash_attention_equals_f64_for_documents_and_grouped_heads() {
    for architecture in ARCHITECTURES {
        let Some(module) = compile("attention.cu", &[architecture]) else { return };
        let (batch, seq, heads, kv_heads, d) = (2usize, 192usize, 4usize, 2usize, 64usize);
        let (tokens, columns) = (batch * seq, (heads + 2 * kv_heads) * d);
        let qkv = numbers(tokens * columns, 9);
        let starts: Vec<u32> =
            (0..tokens).map(|t| [0, 70, 131].into_iter().filter(|s| *s <= t % seq).max().unwrap() as u32).collect();
        let mut device = Device::new();
        let dqkv = bf16s(&mut device, &qkv);
        let dstarts = device.alloc_written(&starts.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>());
        let (o, lse) = (device.alloc(tokens * heads * d * 2), device.alloc(tokens * heads * 4));
        let scale = 0.125f32;
        let args = [
            Arg::Ptr(dqkv),
            Arg::Ptr(dstarts),
            Arg::Ptr(o),
            Arg::Ptr(lse),
            Arg::I32(seq as i32),
            Arg::I32(heads as i32),
            Arg::I32(kv_heads as i32),
            Arg::F32(scale),
        ];
        let kernel = module.kernel("attention").unwrap();

        let run = kernel
            .launch(&mut device, [seq as u32 / 64, heads as u32, batch as u32], [128, 1, 1], 5 * 64 * 72 * 2, &args)
            .unwrap();

        assert_clean(&run.findings);
        let at = |token: usize, column: usize| f64::from(wide(bf16(qkv[token * columns + column])));
        let (o, lse) = (device.u16s(o), device.f32s(lse));
        for token in (0..tokens).step_by(7) {
            let (row0, t) = (token / seq * seq, token % seq);
            for head in 0..heads {
                let kv = head / (heads / kv_heads);
                let score = |key: usize| {
                    let dot: f64 = (0..d).map(|i| at(token, head * d + i) * at(row0 + key, (heads + kv) * d + i)).sum();
                    dot * f64::from(scale)
                };
                let scores: Vec<f64> = (starts[token] as usize..=t).map(score).collect();
                let total: f64 = scores.iter().map(|s| s.exp()).sum();
                assert!((f64::from(lse[token * heads + head]) - total.ln()).abs() < 1e-5);
                for i in 0..d {
                    let value = |k: usize| at(row0 + starts[token] as usize + k, (heads + kv_heads + kv) * d + i);
                    let expected: f64 = scores.iter().enumerate().map(|(k, s)| s.exp() / total * value(k)).sum();
                    let found = f64::from(wide(o[(token * heads + head) * d + i]));
                    // Probabilities and results are rounded to bf16.
                    assert!(
                        (found - expected).abs() < 8e-3,
                        "token {token} head {head} column {i}: {found} {expected}"
                    );
                }
            }
        }
    }
}
