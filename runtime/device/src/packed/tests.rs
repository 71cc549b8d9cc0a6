use super::*;

const ROWS: usize = 75;
const COLUMNS: usize = 256;

/// A line of the numbers that bitsandbytes computes; `tests/peers/quantised.py` wrote them.
fn golden(name: &str) -> Vec<u32> {
    let lines = include_str!("golden.txt").lines();
    let mut words = lines.map(str::split_whitespace).find_map(|mut line| (line.next() == Some(name)).then_some(line));
    let words = words.as_mut().unwrap_or_else(|| panic!("no line {name}"));
    words.map(|word| u32::from_str_radix(word, 16).unwrap()).collect()
}

/// The weights of `tests/peers/quantised.py`.
fn weights() -> Vec<f32> {
    let number = |i: i64| ((i * 7919 + 13) % 2003 - 1001) as f64 * (1 + (i / 64 * 31) % 7) as f64 / 65536.0;
    (0..(ROWS * COLUMNS) as i64).map(|i| number(i) as f32).collect()
}

fn checksum(words: impl IntoIterator<Item = u32>) -> Vec<u32> {
    vec![words.into_iter().fold(0u32, |total, word| total.wrapping_mul(31).wrapping_add(word))]
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

/// The words of all weights, and their scales.
fn packed(packing: Packing) -> (Vec<u32>, Vec<f32>) {
    let weights = weights();
    let of_scale = weights_of_scale(packing, COLUMNS).unwrap();
    let scales: Vec<f32> = weights.chunks(of_scale).map(|weights| scale_of(packing, weights)).collect();
    let mut words = vec![0; packing.words(weights.len())];
    let blocks = words.chunks_mut(packing.n_words()).zip(weights.chunks(packing.n_weights()));
    for (i, (words, weights)) in blocks.enumerate() {
        pack(packing, weights, scales[i * packing.n_weights() / of_scale], words);
    }
    (words, scales)
}

fn unpacked(packing: Packing, words: &[u32]) -> Vec<f32> {
    let mut numbers = vec![0.0; packing.weights(words.len())];
    unpack(packing, words, &mut numbers);
    numbers
}

/// PyTorch's linspace, from which bitsandbytes makes the numbers of 8 bits, rounds by the width of the CPU's vectors.
const ULPS: u32 = 2;

fn assert_near(found: &[f32], name: &str) {
    let golden = golden(name);
    assert_eq!(found.len(), golden.len());
    for (found, golden) in found.iter().zip(golden) {
        assert!(found.to_bits().abs_diff(golden) <= ULPS, "{name}: {found} differs from {}", f32::from_bits(golden));
    }
}

#[test]
fn numbers_of_dynamic_maps_are_those_of_bitsandbytes() {
    assert_near(&DynamicMap::new(true).numbers, "signed_map");
    assert_near(&DynamicMap::new(false).numbers, "unsigned_map");
}

#[test]
fn codes_of_dynamic_maps_are_those_of_the_nearest_numbers() {
    for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
        let nearest = |x: f32| {
            let distance = |code: &usize| (f64::from(map.numbers[*code]) - f64::from(x)).abs();
            (0..256).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap() as u8
        };
        let of_any_size = (0..40_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9) & 0xbfff_ffff));
        let beside_numbers = map.numbers.iter().flat_map(|x| [x.next_down(), *x, x.next_up()]);
        for x in of_any_size.chain(beside_numbers).filter(|x| x.abs() <= 1.0) {
            assert_eq!(map.code(x), nearest(x), "{x:e}");
        }
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY].map(|x| map.code(x)), [0, 255]);
    }
}

#[test]
fn nf4_has_the_codes_scales_and_numbers_of_bitsandbytes() {
    let packing = Packing::Nf4 { double: false };

    let (words, scales) = packed(packing);

    let of_block = |words: &[u32]| -> Vec<u32> {
        words[1..].iter().flat_map(|word| (0..8).map(move |i| word >> (4 * i) & 15)).collect()
    };
    assert_eq!(checksum(words.chunks(9).flat_map(of_block)), golden("nf4_codes"));
    assert_eq!(bits(&scales), golden("nf4_scales"));
    assert_eq!(checksum(bits(&unpacked(packing, &words))), golden("nf4_numbers"));
}

#[test]
fn scales_of_double_quantisation_are_those_of_bitsandbytes() {
    let (_, mut scales) = packed(Packing::Nf4 { double: true });

    double_quantised(&mut scales);

    assert_near(&scales, "nf4_double_scales");
}

#[test]
fn int8_has_the_codes_scales_and_numbers_of_bitsandbytes() {
    let (words, scales) = packed(Packing::Int8);

    let of_block =
        |words: &[u32]| -> Vec<u32> { words[1..].iter().flat_map(|word| word.to_le_bytes()).map(u32::from).collect() };
    assert_eq!(checksum(words.chunks(17).flat_map(of_block)), golden("int8_codes"));
    assert_eq!(bits(&scales), golden("int8_scales"));
    assert_eq!(checksum(bits(&unpacked(Packing::Int8, &words))), golden("int8_numbers"));
}

#[test]
fn bf16_weights_come_back_rounded_once() {
    let weights = weights();
    let mut words = vec![0; weights.len() / 2];

    for (words, weights) in words.chunks_mut(1).zip(weights.chunks(2)) {
        pack(Packing::Bf16, weights, 0.0, words);
    }

    let rounded: Vec<f32> = weights.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    assert_eq!(unpacked(Packing::Bf16, &words), rounded);
}

#[test]
fn blocks_of_zeros_stay_zeros() {
    for packing in [Packing::Int8, Packing::Nf4 { double: false }] {
        let (zeros, mut words) = (vec![0.0; 64], vec![u32::MAX; packing.n_words()]);

        pack(packing, &zeros, scale_of(packing, &zeros), &mut words);

        assert_eq!(unpacked(packing, &words), zeros);
    }
}
