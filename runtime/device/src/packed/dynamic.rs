//! Numbers of 8 bits with a dynamic exponent, and the scales of double quantisation.

use std::sync::LazyLock;

/// Scales that are quantised together.
const BLOCK: usize = 256;

/// The 256 numbers that 8 bits stand for, ascending: the leading bits are an exponent of 10, and the others a fraction, the more
/// of them the larger the number. Source: Dettmers 2015 (arXiv:1511.04561), with the numbers of bitsandbytes.
#[derive(Clone, Debug)]
pub struct DynamicMap {
    /// The numbers.
    pub numbers: [f32; 256],
    /// The middle between each number and the next; infinity after the last one.
    middles: [f32; 256],
    /// The code of the least of the numbers that share their 16 leading bits.
    of_leading_bits: Box<[u8; 1 << 16]>,
}

static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

impl DynamicMap {
    /// The map for values of either sign.
    pub fn signed() -> &'static DynamicMap {
        &SIGNED
    }

    /// The map for values that are not negative.
    pub fn unsigned() -> &'static DynamicMap {
        &UNSIGNED
    }

    /// The numbers for values of either sign, or for those that are not negative.
    pub fn new(is_signed: bool) -> DynamicMap {
        let mut numbers = vec![0.0, 1.0];
        for exponent in 0..7u32 {
            let n_fractions = 1usize << (exponent + u32::from(!is_signed));
            let power = 10f64.powi(exponent as i32 - 6) as f32;
            for fraction in fractions(n_fractions) {
                numbers.push(power * fraction);
                if is_signed {
                    numbers.push(-power * fraction);
                }
            }
        }
        numbers.sort_by(f32::total_cmp);
        let numbers: [f32; 256] = numbers.try_into().expect("1 + 2 + ... + 64 fractions, twice, and two more");
        let middle = |i: usize| numbers.get(i + 1).map_or(f32::INFINITY, |next| f32::midpoint(numbers[i], *next));
        let middles = std::array::from_fn(middle);
        let mut of_leading_bits = Box::new([0; 1 << 16]);
        for (leading, code) in (0..).zip(of_leading_bits.iter_mut()) {
            let [first, last] = [leading << 16, leading << 16 | 0xffff].map(f32::from_bits);
            *code = middles.partition_point(|middle| *middle < first.min(last)) as u8;
        }
        DynamicMap { numbers, middles, of_leading_bits }
    }

    /// The index of the number nearest to `x`; of the lower one of two that are as near.
    pub fn code(&self, x: f32) -> u8 {
        let mut code = self.of_leading_bits[(x.to_bits() >> 16) as usize];
        while self.middles[code as usize] < x {
            code += 1;
        }
        code
    }
}

/// The middles of `n` equal parts of 0.1 to 1.
fn fractions(n: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / n as f32;
    // Counted from the nearer end, as PyTorch's linspace does.
    let bound = |i: usize| if i < n.div_ceil(2) { 0.1 + step * i as f32 } else { 1.0 - step * (n - i) as f32 };
    (0..n).map(|i| (bound(i) + bound(i + 1)) / 2.0).collect()
}

/// Rounds the scales of a tensor to 8 bits: their mean is subtracted, and each 256 of the rest have a scale of their own.
/// Source: Dettmers et al. 2023, QLoRA, §3 (arXiv:2305.14314).
pub fn double_quantised(scales: &mut [f32]) {
    let sum: f64 = scales.iter().map(|x| f64::from(*x)).sum();
    let mean = (sum / scales.len().max(1) as f64) as f32;
    for block in scales.chunks_mut(BLOCK) {
        let largest = block.iter().fold(0.0f32, |largest, x| (x - mean).abs().max(largest));
        let factor = 1.0 / largest.max(f32::MIN_POSITIVE);
        for x in block {
            *x = SIGNED.numbers[usize::from(SIGNED.code((*x - mean) * factor))] * largest + mean;
        }
    }
}
