//! Instructions against the host's arithmetic, through functions that NVRTC compiles to long sequences of them.

mod support;

use phalanx_ptxsim::{Arg, Device, Module};
use support::{assert_clean, bf16, compile, f32s, f64s, numbers, wide};

const ARCHITECTURES: [&str; 2] = ["--gpu-architecture=compute_80", "--gpu-architecture=compute_100a"];

/// Runs a kernel over `n` elements in blocks of 96 threads: arguments are the input, the output and `n`.
fn run(
    module: &Module,
    name: &str,
    device: &mut Device,
    input: phalanx_ptxsim::Ptr,
    output_bytes: usize,
    n: usize,
) -> Vec<u8> {
    let output = device.alloc(output_bytes);
    let args = [Arg::Ptr(input), Arg::Ptr(output), Arg::I32(n as i32)];
    let run = module.kernel(name).unwrap().launch(device, [n.div_ceil(96) as u32, 1, 1], [96, 1, 1], 0, &args).unwrap();
    assert_clean(&run.findings);
    device.bytes(output).to_vec()
}

/// Distance in units of the last place of an f32.
fn ulps(found: f32, expected: f64) -> f64 {
    let rounded = expected as f32;
    if found == rounded || found.is_nan() && rounded.is_nan() {
        return 0.0;
    }
    let ulp = f64::from(rounded.abs().next_up()) - f64::from(rounded.abs());
    (f64::from(found) - expected).abs() / ulp
}

#[test]
fn functions_of_f32_have_the_accuracy_that_cuda_documents() {
    for architecture in ARCHITECTURES {
        let Some(module) = compile("instructions.cu", &[architecture]) else { return };
        let n = 1001;
        let x = numbers(n, 11);
        let mut device = Device::new();
        let input = f32s(&mut device, &x);

        let y = run(&module, "math_f32", &mut device, input, n * 64, n);

        // CUDA Programming Guide, table of maximum errors in ulp; exact results where IEEE 754 requires them.
        let limits = [2.0, 2.0, 2.0, 1.0, 4.0, 2.0, 2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
        for (i, row) in y.chunks_exact(64).enumerate() {
            let (a, p) = (x[i], x[i].abs() + 0.01f32);
            let (da, dp) = (f64::from(a), f64::from(p));
            let expected = [
                f64::from(a * 100.0).sin(),
                f64::from(a * 1e6).cos(),
                f64::from(a * 20.0).exp(),
                dp.ln(),
                dp.powf(f64::from(a * 3.0)),
                f64::from(a * 2.0).tanh(),
                f64::NAN,
                f64::from(a / p),
                f64::from(p.sqrt()),
                1.0 / dp.sqrt(),
                f64::from(a.mul_add(a, -p)),
                f64::from((a * 37.0).round_ties_even()),
                f64::from((a * 37.0).floor()),
                f64::from((a * 37.0) % p),
                da.cbrt(),
                f64::from((a * 1e3).trunc()),
            ];
            for (k, value) in row.chunks_exact(4).enumerate() {
                let found = f32::from_le_bytes(value.try_into().unwrap());
                // Rust has no error function: only its sign and range are checked.
                if k == 6 {
                    assert!(found.abs() <= 1.0 && found * a >= 0.0);
                    continue;
                }
                assert!(
                    ulps(found, expected[k]) <= limits[k] + 0.5,
                    "{architecture} {k} of {a}: {found} {}",
                    expected[k]
                );
            }
        }
    }
}

#[test]
fn functions_of_f64_have_the_accuracy_that_cuda_documents() {
    for architecture in ARCHITECTURES {
        let Some(module) = compile("instructions.cu", &[architecture]) else { return };
        let n = 301;
        let x: Vec<f64> = numbers(n, 12).iter().map(|x| f64::from(*x) * 1.000_000_1).collect();
        let mut device = Device::new();
        let input = f64s(&mut device, &x);

        let y = run(&module, "math_f64", &mut device, input, n * 64, n);

        for (i, row) in y.chunks_exact(64).enumerate() {
            let (a, p) = (x[i], x[i].abs() + 0.01);
            let expected = [
                (a * 1e6).sin(),
                (a * 20.0).exp(),
                p.ln(),
                p.powf(a * 3.0),
                a / p,
                p.sqrt(),
                1.0 / p.sqrt(),
                a.mul_add(a, -p),
            ];
            for (k, value) in row.chunks_exact(8).enumerate() {
                let found = f64::from_le_bytes(value.try_into().unwrap());
                // At most 2 ulp, and one more for the host; quotient, root and fma are exact.
                let tolerance = if [4, 5, 7].contains(&k) { 0.0 } else { 3.0 * f64::EPSILON * expected[k].abs() };
                assert!((found - expected[k]).abs() <= tolerance, "{architecture} {k} of {a}: {found} {}", expected[k]);
            }
        }
    }
}

#[test]
fn integer_instructions_have_the_results_of_the_host() {
    for architecture in ARCHITECTURES {
        let Some(module) = compile("instructions.cu", &[architecture]) else { return };
        let n = 257;
        let x: Vec<u32> =
            numbers(n, 13).iter().zip(numbers(n, 14)).map(|(a, b)| a.to_bits().rotate_left(9) ^ b.to_bits()).collect();
        let mut device = Device::new();
        let input = device.alloc_written(&x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());

        let y = run(&module, "integers", &mut device, input, n * 24 * 8, n);

        for (i, row) in y.chunks_exact(24 * 8).enumerate() {
            let expected = integers(x[i], x[(i + 1) % n] | 1);
            let found: Vec<u64> = row.chunks_exact(8).map(|v| u64::from_le_bytes(v.try_into().unwrap())).collect();
            assert_eq!(found, expected, "{architecture} {:#x} {:#x}", x[i], x[(i + 1) % n] | 1);
        }
    }
}

fn integers(a: u32, b: u32) -> Vec<u64> {
    let (sa, sb) = (a as i32, b as i32);
    let w = u64::from(a) << 32 | u64::from(b);
    let pair = w;
    let bytes: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    let permuted: Vec<u8> = (0..4).map(|k| bytes[(a >> (4 * k) & 7) as usize]).collect();
    let (at, len) = (b & 31, a & 31);
    let field = (u64::from(a) >> at & ((1u64 << len) - 1)) as u32;
    let sign = if len == 0 { 0 } else { a >> (at + len - 1).min(31) & 1 };
    let kept = 32u32.saturating_sub(at).min(len);
    let extended = if kept >= 32 || sign == 0 { field } else { field | u32::MAX << kept };
    let mask = (((1u64 << len) - 1) << at) as u32;
    let inserted = b & !mask | (u64::from(a) << at) as u32 & mask;
    let dot: i32 = (0..4).map(|k| i32::from((a >> (8 * k)) as i8) * i32::from((b >> (8 * k)) as i8)).sum::<i32>() + 7;
    vec![
        u64::from(a / b),
        u64::from((sa / sb) as u32),
        u64::from(a % b),
        u64::from((sa % sb) as u32),
        w / u64::from(b >> 7 | 1),
        (w as i64 / i64::from(sb >> 3 | 1)) as u64,
        w % u64::from(b >> 9 | 1),
        (u64::from(a) * u64::from(b)) >> 32,
        ((i64::from(sa) * i64::from(sb)) >> 32) as u32 as u64,
        ((u128::from(w) * u128::from(w ^ u64::from(a))) >> 64) as u64,
        u64::from(a.count_ones()),
        u64::from((a >> (b & 31)).leading_zeros()),
        u64::from(a.reverse_bits()),
        u64::from(u32::from_le_bytes(permuted.try_into().unwrap())),
        // `__funnelshift_l(lo, hi, n)` is the upper word of `hi:lo << n`.
        ((u64::from(b) << 32 | u64::from(a)) << (a & 31)) >> 32,
        (u64::from(b) << 32 | u64::from(a)) >> (b & 31) & 0xffff_ffff,
        u64::from(field),
        u64::from(extended),
        u64::from(inserted),
        u64::from(dot as u32),
        u64::from((sa >> (b & 31)) as u32),
        u64::from(a >> (b & 31)),
        u64::from((pair >> (a & 63)).leading_zeros()),
        if a == 0 { 0 } else { u64::from(a.trailing_zeros() + 1) },
    ]
}

#[test]
fn collectives_exchange_the_values_of_the_right_lanes() {
    let Some(module) = compile("instructions.cu", &["--gpu-architecture=compute_80"]) else { return };
    let x: Vec<u32> = numbers(32, 15).iter().map(|x| x.to_bits() << 3).collect();
    let mut device = Device::new();
    let input = device.alloc_written(&x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    let output = device.alloc(32 * 12 * 4);
    let kernel = module.kernel("collectives").unwrap();

    let run = kernel.launch(&mut device, [1, 1, 1], [32, 1, 1], 0, &[Arg::Ptr(input), Arg::Ptr(output)]).unwrap();

    assert_clean(&run.findings);
    let ballot = |f: &dyn Fn(u32) -> bool| (0..32).filter(|l| f(x[*l])).fold(0u32, |mask, l| mask | 1 << l);
    for (l, row) in device.bytes(output).chunks_exact(48).enumerate() {
        let found: Vec<u32> = row.chunks_exact(4).map(|v| u32::from_le_bytes(v.try_into().unwrap())).collect();
        let expected = [
            x[5],
            if l >= 3 { x[l - 3] } else { x[l] },
            if l + 7 < 32 { x[l + 7] } else { x[l] },
            x[l ^ 9],
            if l % 8 + 3 < 8 { x[l + 3] } else { x[l] },
            x[l / 16 * 16 + 11],
            ballot(&|v| v & 1 == 1),
            ballot(&|v| v & 3 == x[l] & 3),
            x.iter().fold(0, |a, b| a.wrapping_add(*b)),
            *x.iter().max().unwrap(),
            u32::from(x.iter().any(|v| *v > 0xf000_0000)),
            x.iter().map(|v| *v as i32).min().unwrap() as u32,
        ];
        assert_eq!(found, expected, "lane {l}");
    }
}

#[test]
fn atomics_of_all_threads_take_effect() {
    let Some(module) = compile("instructions.cu", &["--gpu-architecture=compute_80"]) else { return };
    let mut device = Device::new();
    let words: Vec<u8> =
        [0u32, 1000, (-1000i32) as u32, 0, 0, 0, 0, 0].iter().flat_map(|v| v.to_le_bytes()).chain([0; 16]).collect();
    let u = device.alloc_written(&words);
    let (f, d) = (f32s(&mut device, &[1.0]), f64s(&mut device, &[2.0]));
    let w = device.alloc_written(&[0; 8]);
    let kernel = module.kernel("atomics").unwrap();

    let args = [Arg::Ptr(u), Arg::Ptr(f), Arg::Ptr(d), Arg::Ptr(w)];
    let run = kernel.launch(&mut device, [1, 1, 1], [96, 1, 1], 0, &args).unwrap();

    assert_clean(&run.findings);
    let found: Vec<u32> = device.bytes(u).chunks_exact(4).map(|v| u32::from_le_bytes(v.try_into().unwrap())).collect();
    // 96 increments modulo 41.
    assert_eq!(found, [96, 5, 45, u32::MAX, 96 % 41, 9, 0, 4560, 4560, 95, 32, 1]);
    assert_eq!(device.f32s(f), [49.0]);
    assert_eq!(device.bytes(d), 26f64.to_le_bytes());
    assert_eq!(device.bytes(w), (96u64 << 33).to_le_bytes());
}

#[test]
fn sixteen_bit_arithmetic_is_correctly_rounded() {
    for architecture in ["--gpu-architecture=compute_90a", "--gpu-architecture=compute_100a"] {
        let Some(module) = compile("instructions.cu", &[architecture]) else { return };
        let n = 999;
        let x: Vec<f32> = numbers(n, 16).iter().zip(numbers(n, 17)).map(|(a, b)| a * (b * 12.0).exp2()).collect();
        let mut device = Device::new();
        let input = f32s(&mut device, &x);

        let y = run(&module, "halves", &mut device, input, n * 48, n);

        for (i, row) in y.chunks_exact(48).enumerate() {
            let (a, b) = (x[i], x[(i + 1) % n]);
            let found: Vec<u32> = row.chunks_exact(4).map(|v| u32::from_le_bytes(v.try_into().unwrap())).collect();
            let (ha, hb) = (f16_value(found[0]), f16_value(u32::from(f16_bits(f64::from(b)))));
            assert_eq!(found[0], u32::from(f16_bits(f64::from(a))));
            assert_eq!(found[1], u32::from(bf16(a)));
            assert_eq!(found[2], u32::from(f16_bits(ha + hb)), "{ha} + {hb}");
            assert_eq!(found[3], u32::from(f16_bits(ha * hb)), "{ha} * {hb}");
            // Products and sums of numbers of this size are exact in f64.
            assert_eq!(found[4], u32::from(f16_bits(ha * hb + ha)));
            let (ba, bb) = (f64::from(wide(bf16(a))), f64::from(wide(bf16(b))));
            assert_eq!(found[5], u32::from(bf16_of_f64(ba * bb + ba)), "{ba} * {bb} + {ba}");
            assert_eq!(found[6], u32::from(bf16(ba.max(bb) as f32)));
            assert_eq!(found[7], found[0] << 16 | u32::from(f16_bits(f64::from(b))));
            assert_eq!(found[8], u32::from(bf16(a)) << 16 | u32::from(bf16(b)));
            assert_eq!(found[9], u32::from(f16_bits(ha * ha + ha)) << 16 | u32::from(f16_bits(hb * hb + hb)));
            assert_eq!(f64::from(f32::from_bits(found[10])), ha);
            let directed = toward(f64::from(a) + f64::from(b), |exact, near| near > exact, f32::next_down)
                ^ toward(f64::from(a) * f64::from(b), |exact, near| near < exact, f32::next_up);
            let fma = f64::from(a) * f64::from(b) + f64::from(a);
            let fma = toward(
                fma,
                |exact, near| near.abs() > exact.abs(),
                |x| if x > 0.0 { x.next_down() } else { x.next_up() },
            );
            assert_eq!(found[11], directed ^ fma);
        }
    }
}

/// The bits of an f32 rounded in a direction: the nearest, or its neighbour where `wrong` holds.
fn toward(exact: f64, wrong: impl Fn(f64, f64) -> bool, step: impl Fn(f32) -> f32) -> u32 {
    let near = exact as f32;
    if wrong(exact, f64::from(near)) { step(near).to_bits() } else { near.to_bits() }
}

/// The nearest f16 by search: independent of the interpreter's rounding.
fn f16_bits(x: f64) -> u16 {
    let magnitude = x.abs();
    let (mut low, mut high) = (0u16, 0x7c00u16);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if f16_value(u32::from(middle)) <= magnitude { low = middle } else { high = middle }
    }
    let top = if high == 0x7c00 { 65536.0 } else { f16_value(u32::from(high)) };
    let (below, above) = (magnitude - f16_value(u32::from(low)), top - magnitude);
    let nearest = if below < above || below == above && low & 1 == 0 { low } else { high };
    nearest | if x.is_sign_negative() { 0x8000 } else { 0 }
}

fn f16_value(bits: u32) -> f64 {
    let (exponent, fraction) = ((bits >> 10 & 31) as i32, f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 => f64::INFINITY,
        _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 & 1 == 1 { -magnitude } else { magnitude }
}

/// The nearest bf16 of a number that an f32 would round first.
fn bf16_of_f64(x: f64) -> u16 {
    let near = x as f32;
    let below =
        if f64::from(near).abs() > x.abs() { if near > 0.0 { near.next_down() } else { near.next_up() } } else { near };
    // A sticky bit stands for what the f32 lost.
    bf16(f32::from_bits(below.to_bits() | u32::from(f64::from(below) != x)))
}
