//! Files as a whole, and blocks against their published formulas, which are written here from the side of a reader.

use super::tensor_type::TensorType::{self, F16 as HALF, Q4k, Q5k, Q6k, Q8_0};
use super::*;
use half::f16;
use proptest::prelude::*;

const K_TYPES: [TensorType; 3] = [Q4k, Q5k, Q6k];

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Weight `i` of a block: its value, and the distance of levels in its group.
fn weight(kind: TensorType, block: &[u8], i: usize) -> (f32, f32) {
    if kind == Q6k {
        let (half_of_block, place) = (i / 128, i % 128);
        let low = block[64 * half_of_block + place % 64] >> (place / 64 * 4) & 15;
        let high = block[128 + 32 * half_of_block + place % 32] >> (place / 32 * 2) & 3;
        let step = half(block, 208) * f32::from(block[192 + i / 16] as i8);
        return (step * (f32::from(low | high << 4) - 32.0), step.abs());
    }
    let (group, packed) = (i / 32, &block[4..16]);
    let (s, m) = match group {
        0..4 => (packed[group] & 63, packed[4 + group] & 63),
        _ => {
            let both = packed[4 + group];
            (both & 15 | packed[group - 4] >> 6 << 4, both >> 4 | packed[group] >> 6 << 4)
        }
    };
    let (high, low) = block[16..].split_at(if kind == Q5k { 32 } else { 0 });
    let mut q = low[i / 64 * 32 + i % 32] >> (group % 2 * 4) & 15;
    if kind == Q5k {
        q |= (high[i % 32] >> group & 1) << 4;
    }
    let step = half(block, 0) * f32::from(s);
    (step * f32::from(q) - half(block, 2) * f32::from(m), step.abs())
}

fn dequantised(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    let blocks = bytes.chunks(kind.block().1);
    blocks.flat_map(|block| (0..256).map(|i| weight(kind, block, i).0)).collect()
}

fn round_trip(kind: TensorType, values: &[f32]) -> Vec<f32> {
    let bytes = kind.encode(values).unwrap();
    assert_eq!(bytes.len(), values.len() / 256 * kind.block().1);
    dequantised(kind, &bytes)
}

fn rms_distance(x: &[f32], y: &[f32]) -> f64 {
    let squares = x.iter().zip(y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2));
    (squares.sum::<f64>() / x.len() as f64).sqrt()
}

/// Normal numbers of a generator with fixed numbers.
fn normal(n: usize, scale: f32) -> Vec<f32> {
    let mut state = 7u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n).map(|_| scale * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0)).collect()
}

#[test]
fn blocks_of_eight_bits_are_within_half_a_step_of_the_values() {
    let values: Vec<f32> = (0..64).map(|i| ((i * 37) % 101) as f32 / 10.0 - 5.0).collect();

    let bytes = Q8_0.encode(&values).unwrap();

    assert_eq!(bytes.len(), 2 * 34);
    for (block, bytes) in values.chunks(32).zip(bytes.chunks(34)) {
        let d = half(bytes, 0);
        for (x, q) in block.iter().zip(&bytes[2..]) {
            assert!((x - d * f32::from(*q as i8)).abs() <= 0.51 * d + 127.0 * d / 1024.0, "{x} {q}");
        }
    }
    assert_eq!(Q8_0.encode(&[0.0; 32]).unwrap(), [0; 34]);
    assert_eq!(HALF.encode(&[1e6]), Err(1e6));
}

/// The expected numbers are those of the Python package `gguf` 0.19 for the same bytes.
#[test]
fn readers_formulas_are_those_of_llama_cpps_package() {
    let block = |kind: TensorType, factors: &[(usize, f32)]| {
        let mut bytes: Vec<u8> = (0..kind.block().1).map(|i| (i * 73 + 41) as u8).collect();
        for (at, factor) in factors {
            bytes[*at..*at + 2].copy_from_slice(&f16::from_f32(*factor).to_le_bytes());
        }
        bytes
    };
    let shown = |kind, bytes: &[u8]| {
        let values = dequantised(kind, bytes);
        let picked = [0, 33, 70, 127, 128, 191, 222, 255].map(|i| values[i]);
        (picked, values.iter().sum::<f32>(), values.iter().zip(0u16..).map(|(x, i)| x * f32::from(i)).sum::<f32>())
    };

    let four = shown(Q4k, &block(Q4k, &[(0, 0.125), (2, 0.25)]));
    let five = shown(Q5k, &block(Q5k, &[(0, 0.125), (2, 0.25)]));
    let six = shown(Q6k, &block(Q6k, &[(208, 0.125)]));

    assert_eq!(four, ([2.375, -14.5, 57.375, 52.0, 17.375, 63.5, 47.625, -5.75], 5367.0, 779_505.0));
    assert_eq!(five, ([28.375, 35.0, 119.375, 62.0, 59.375, 75.0, 157.625, -5.75], 12457.0, 1_714_307.0));
    assert_eq!(six, ([20.125, -461.25, -4.875, -6.0, -42.875, -48.0, 12.25, 36.0], -1855.5, -201_660.5));
}

#[test]
fn zeros_and_constants_are_kept() {
    for kind in K_TYPES {
        assert_eq!(round_trip(kind, &[0.0; 512]), [0.0; 512], "{kind:?}");
        // Half precision has eleven bits, and fewer for the factors of small weights.
        for (constant, parts) in [(1.0f32, 2000.0), (-300.0, 2000.0), (65000.0, 2000.0), (0.02, 200.0), (-0.02, 200.0)]
        {
            let worst = round_trip(kind, &[constant; 256]).iter().fold(0f32, |w, y| w.max((y - constant).abs()));

            assert!(worst <= constant.abs() / parts, "{kind:?} {constant}: {worst}");
        }
    }
}

/// The bounds are the errors of llama.cpp's own quantiser for normal weights, in standard deviations.
#[test]
fn error_of_normal_weights_is_that_of_their_bits() {
    for scale in [0.02, 1.0, 1000.0] {
        let values = normal(256 * 64, scale);
        for (kind, at_most) in [(Q4k, 0.0717), (Q5k, 0.0363), (Q6k, 0.0178)] {
            let error = rms_distance(&values, &round_trip(kind, &values)) / f64::from(scale);

            assert!(error < at_most && error > 0.9 * at_most, "{kind:?} {scale}: {error}");
        }
    }
}

/// Factors of such weights have few bits in half precision, or none.
#[test]
fn weights_near_the_smallest_factors_lose_no_more_than_a_step() {
    let smallest = f16::from_bits(1).to_f32();
    for scale in [1e-4, 1e-5, 1e-6, 1e-8, 1e-20, 1e-42] {
        let values = normal(1024, scale);
        for (kind, at_most) in [(Q4k, 0.085), (Q5k, 0.046), (Q6k, 0.026)] {
            let error = rms_distance(&values, &round_trip(kind, &values));

            assert!(
                error <= (f64::from(scale) * at_most).max(0.6 * f64::from(smallest)),
                "{kind:?} {scale:e}: {error:e}"
            );
        }
    }
}

#[test]
fn weights_that_are_not_finite_or_beyond_half_precision_are_refused() {
    for kind in [Q8_0, Q4k, Q5k, Q6k] {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, 65520.0, -1e30] {
            let mut values = [0.5; 256];
            values[99] = bad;
            assert_eq!(kind.encode(&values), Err(bad), "{kind:?}");
        }
        assert!(kind.encode(&[f32::NAN; 256]).unwrap_err().is_nan());
    }
}

#[test]
fn number_that_does_not_fit_leaves_no_file_and_is_named_with_its_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let name = "blk.0.attn_q.weight".to_owned();
    let tensor = GgufTensor { name, shape: vec![1, 256], values: Box::new(|| vec![f32::NAN; 256]) };

    let error = write_gguf(&path, &[], &[tensor], Encoding::Q4Km).unwrap_err().to_string();

    assert!(error.contains("NaN in blk.0.attn_q.weight does not fit the type"), "{error}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
}

#[test]
fn file_has_its_header_and_aligned_tensors_and_replaces_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let meta = [("general.architecture".to_owned(), Meta::Text("llama".to_owned()))];
    let tensors = [ones("norm", &[3]), ones("odd", &[2, 5]), ones("w", &[2, 32])];

    write_gguf(&path, &meta, &tensors, Encoding::Q8_0).unwrap();

    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(&bytes[..8], b"GGUF\x03\0\0\0");
    assert_eq!(&bytes[8..24], [3u64.to_le_bytes(), 1u64.to_le_bytes()].concat());
    // The norm in f32, the odd rows in f16, then blocks.
    assert_eq!(bytes.len() % ALIGNMENT as usize, 0);
    assert_eq!(&bytes[bytes.len() - 96 - 64..][..4], 1f32.to_le_bytes());
    let block = [&f16::from_f32(1.0 / 127.0).to_le_bytes()[..], &[127; 32]].concat();
    assert_eq!(&bytes[bytes.len() - 96..][..34], block);
    assert!(write_gguf(&path, &meta, &tensors, Encoding::F16).unwrap_err().to_string().contains("exists"));
}

#[test]
fn mixture_is_written_with_the_type_and_the_place_of_each_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let tensors = [ones("blk.0.attn_q.weight", &[1, 256]), ones("odd", &[1, 32]), ones("output.weight", &[2, 256])];

    write_gguf(&path, &[], &tensors, Encoding::Q4Km).unwrap();

    let bytes = std::fs::read(&path).unwrap();
    let described = |tensor: &GgufTensor<'_>, number: u32, offset: u64| {
        let mut entry = tensor.name.clone().into_bytes();
        entry.extend(2u32.to_le_bytes());
        tensor.shape.iter().rev().for_each(|dim| entry.extend((*dim as u64).to_le_bytes()));
        entry.extend([&number.to_le_bytes()[..], &offset.to_le_bytes()].concat());
        bytes.windows(entry.len()).any(|window| window == entry)
    };
    // 144 bytes of `Q4_K` and 34 of `Q8_0`, each in whole pieces of 32 bytes.
    assert!(described(&tensors[0], 12, 0) && described(&tensors[1], 8, 160) && described(&tensors[2], 14, 224));
    let data = &bytes[bytes.len() - 224 - 448..];
    let close = |values: Vec<f32>| values.iter().all(|x| (x - 1.0).abs() < 1e-3);
    assert!(close(dequantised(Q4k, &data[..144])) && close(dequantised(Q6k, &data[224..][..420])));
}

fn ones(name: &str, shape: &[usize]) -> GgufTensor<'static> {
    let n = shape.iter().product();
    GgufTensor { name: name.to_owned(), shape: shape.to_vec(), values: Box::new(move || vec![1.0; n]) }
}

/// Weights of one block: of one magnitude or of many, of one sign or of both.
fn weights() -> impl Strategy<Value = Vec<f32>> {
    let signed = |magnitude: std::ops::Range<f32>, shift: f32| {
        prop::collection::vec((-1f32..1.0, magnitude), 256).prop_map(move |pairs| {
            pairs.into_iter().map(|(x, magnitude)| (x + shift) * 10f32.powf(magnitude)).collect::<Vec<f32>>()
        })
    };
    prop_oneof![
        signed(-2.0..-1.9, 0.0),
        signed(-8.0..4.0, 0.0),
        signed(0.0..0.1, 1.0),
        signed(0.0..0.1, -3.0),
        signed(-40.0..-20.0, 0.0),
    ]
}

proptest! {
    /// Levels are the nearest ones, and ends are cut off by a step at most. A group has a step of its own in 63 or 127 parts of
    /// the widest one of its block, and a minimum in 63 parts of the lowest one.
    #[test]
    fn no_weight_is_farther_off_than_steps_of_its_block_allow(values in weights()) {
        for kind in K_TYPES {
            let bytes = kind.encode(&values).unwrap();
            let found: Vec<(f32, f32)> = (0..256).map(|i| weight(kind, &bytes, i)).collect();
            let low = values.iter().fold(0f32, |low, x| low.min(*x));
            let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let (top, parts) = match kind { Q4k => (15.0, 63.0), Q5k => (31.0, 63.0), _ => (31.0, 127.0) };
            let widest = if kind == Q6k { largest / top } else { (values.iter().fold(low, |h, x| h.max(*x)) - low) / top };
            let coarse = top * widest / parts + if kind == Q6k { 0.0 } else { low.abs() / parts };

            for (x, (y, step)) in values.iter().zip(found) {
                let at_most = 1.5 * step + coarse + largest / 1000.0 + 64.0 * f16::from_bits(1).to_f32();
                prop_assert!((x - y).abs() <= at_most, "{kind:?}: {x} became {y}, step {step}, {at_most}");
            }
        }
    }

    /// More bits are never worse by more than a trifle, and signs are kept by all weights that do not vanish.
    #[test]
    fn block_with_more_bits_has_the_smaller_error(values in weights()) {
        let [four, five] = [Q4k, Q5k].map(|kind| rms_distance(&values, &round_trip(kind, &values)));
        let smallest = f64::from(f16::from_bits(1).to_f32());

        prop_assert!(five <= 1.02 * four + smallest, "{four} {five}");
    }
}
