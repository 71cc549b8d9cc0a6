//! Packed weights: which words hold which numbers. See [`Packing`] for the forms.
//!
//! The numbers are those of bitsandbytes: `tests/peers/quantised.py` compares them.

mod dynamic;

pub use dynamic::{DynamicMap, double_quantised};

use crate::e4m3;
use crate::float::Float;
use half::{bf16, f16};
use phalanx_strategies::program::Packing;
use phalanx_strategies::program::packing::E4M3_STEP;

/// The sixteen numbers of NF4. Source: Dettmers et al. 2023, QLoRA, appendix E (arXiv:2305.14314).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Scales below this one count as this one, so that a block of zeros has a reciprocal.
const SCALE_MIN: f32 = 1e-38;
/// `1 / 127`, rounded to f32.
const INT8_STEP: f32 = 1.0 / 127.0;

/// Weights that have a scale in common, in a matrix of this many columns; none have one in bf16 and in FP8.
pub const fn weights_of_scale(packing: Packing, n_columns: usize) -> Option<usize> {
    match packing {
        Packing::Bf16 | Packing::E4m3 => None,
        Packing::Int8 => Some(n_columns),
        Packing::Nf4 { .. } => Some(64),
    }
}

/// The scale of weights that have one in common: their largest magnitude.
pub fn scale_of(packing: Packing, weights: &[f32]) -> f32 {
    let stored = |x: f32| if packing == Packing::Int8 { f16::from_f32(x).to_f32() } else { x };
    weights.iter().fold(0.0, |scale, x| stored(*x).abs().max(scale))
}

/// Packs one block.
///
/// # Panics
/// If the numbers of weights and words are not those of a block.
pub fn pack(packing: Packing, weights: &[f32], scale: f32, words: &mut [u32]) {
    assert!((weights.len(), words.len()) == (packing.n_weights(), packing.n_words()));
    match packing {
        Packing::Bf16 => {
            let bits = |x: f32| u32::from(<bf16 as Float>::from_f32(x).to_bits());
            words[0] = bits(weights[0]) | bits(weights[1]) << 16;
        }
        Packing::E4m3 => {
            // As devices do that round bf16 copies.
            let code = |x: f32| e4m3::encode(Float::to_f32(<bf16 as Float>::from_f32(x)) / E4M3_STEP);
            words[0] = u32::from_le_bytes([0, 1, 2, 3].map(|i| code(weights[i])));
        }
        Packing::Int8 => {
            let factor = 127.0 / scale.max(SCALE_MIN);
            // Weights pass through half precision, as in LLM.int8().
            let code = |x: f32| (f16::from_f32(x).to_f32() * factor).round_ties_even() as i8;
            let byte = |x: f32| u32::from(code(x).cast_unsigned());
            words[0] = scale.to_bits();
            for (word, weights) in words[1..].iter_mut().zip(weights.chunks_exact(4)) {
                *word = weights.iter().rev().fold(0, |word, x| word << 8 | byte(*x));
            }
        }
        Packing::Nf4 { .. } => {
            let factor = 1.0 / scale.max(SCALE_MIN);
            words[0] = scale.to_bits();
            for (word, weights) in words[1..].iter_mut().zip(weights.chunks_exact(8)) {
                *word = weights.iter().rev().fold(0, |word, x| word << 4 | nf4_code(x * factor));
            }
        }
    }
}

/// Replaces the scale of a packed block.
pub fn set_scale(words: &mut [u32], scale: f32) {
    words[0] = scale.to_bits();
}

/// The code of the nearest number of NF4; the lower one of two that are as near.
fn nf4_code(x: f32) -> u32 {
    let is_above = |pair: &&[f32]| x > f32::midpoint(pair[0], pair[1]);
    NF4.windows(2).filter(is_above).count() as u32
}

/// Unpacks whole blocks.
///
/// # Panics
/// If the numbers of words and weights are not those of the same number of blocks.
pub fn unpack<T: Float>(packing: Packing, words: &[u32], weights: &mut [T]) {
    assert!(packing.words(weights.len()) == words.len() && packing.has_blocks(0, weights.len()));
    let blocks = words.chunks_exact(packing.n_words()).zip(weights.chunks_exact_mut(packing.n_weights()));
    match packing {
        Packing::Bf16 => {
            for (words, weights) in blocks {
                weights[0] = T::from_f32(f32::from_bits(words[0] << 16));
                weights[1] = T::from_f32(f32::from_bits(words[0] & 0xffff_0000));
            }
        }
        Packing::E4m3 => {
            for (words, weights) in blocks {
                let numbers = words[0].to_le_bytes().map(|bits| T::from_f32(e4m3::decode(bits) * E4M3_STEP));
                weights.copy_from_slice(&numbers);
            }
        }
        Packing::Int8 => {
            for (words, weights) in blocks {
                let scale = f32::from_bits(words[0]);
                for (word, weights) in words[1..].iter().zip(weights.chunks_exact_mut(4)) {
                    for (byte, weight) in word.to_le_bytes().into_iter().zip(weights) {
                        *weight = T::from_f32(f32::from(byte.cast_signed()) * scale * INT8_STEP);
                    }
                }
            }
        }
        Packing::Nf4 { .. } => {
            for (words, weights) in blocks {
                let scale = f32::from_bits(words[0]);
                let table = NF4.map(|x| T::from_f32(x * scale));
                for (word, weights) in words[1..].iter().zip(weights.chunks_exact_mut(8)) {
                    for (i, weight) in weights.iter_mut().enumerate() {
                        *weight = table[(word >> (4 * i) & 15) as usize];
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
