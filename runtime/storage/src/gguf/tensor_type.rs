//! The types of tensors: their numbers in a file, and the bytes of values.
//!
//! Source: ggml-org/ggml, `enum ggml_type` of include/ggml.h; blocks of `Q8_0` as in its `quantize_row_q8_0_ref`.

use super::fit::BLOCK;
use super::{affine, symmetric};
use half::{bf16, f16};
use phalanx_device::float::Float;
use rayon::prelude::*;

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4k,
    Q5k,
    Q6k,
}

/// Values of a block of `Q8_0`.
const BLOCK_8: usize = 32;

impl TensorType {
    /// Its number in a file.
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Q4k => 12,
            Self::Q5k => 13,
            Self::Q6k => 14,
            Self::Bf16 => 30,
        }
    }

    /// Values and bytes of a block, which never spans two rows.
    pub(super) const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (BLOCK_8, 2 + BLOCK_8),
            Self::Q4k => (BLOCK, 4 + 12 + BLOCK / 2),
            Self::Q5k => (BLOCK, 4 + 12 + BLOCK / 2 + BLOCK / 8),
            Self::Q6k => (BLOCK, BLOCK / 2 + BLOCK / 4 + 16 + 2),
        }
    }

    pub(super) const fn bytes_of(self, n_elements: usize) -> u64 {
        let (values, bytes) = self.block();
        (n_elements / values * bytes) as u64
    }

    /// The bytes of values, or the first one that becomes infinite or is not a number.
    pub(super) fn encode(self, values: &[f32]) -> Result<Vec<u8>, f32> {
        let limit = match self {
            Self::F32 => f32::INFINITY,
            Self::Bf16 => f32::from_bits(0x7f7f_8000),
            Self::F16 | Self::Q8_0 | Self::Q4k | Self::Q5k | Self::Q6k => 65520.0,
        };
        if let Some(bad) = values.iter().find(|x| x.is_nan() || x.abs() >= limit) {
            return Err(*bad);
        }
        let mut bytes = Vec::with_capacity(self.bytes_of(values.len()) as usize);
        match self {
            Self::F32 => values.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
            Self::F16 => values.iter().for_each(|x| bytes.extend_from_slice(&f16::from_f32(*x).to_le_bytes())),
            Self::Bf16 => {
                values.iter().for_each(|x| bytes.extend_from_slice(&<bf16 as Float>::from_f32(*x).to_le_bytes()));
            }
            Self::Q8_0 => values.chunks(BLOCK_8).for_each(|block| quantise(block, &mut bytes)),
            Self::Q4k => self.in_blocks(values, &mut bytes, affine::quantise::<4>),
            Self::Q5k => self.in_blocks(values, &mut bytes, affine::quantise::<5>),
            Self::Q6k => self.in_blocks(values, &mut bytes, symmetric::quantise),
        }
        Ok(bytes)
    }

    /// Blocks of 256 values, on all threads: one takes about 50 ns for a value.
    fn in_blocks(self, values: &[f32], bytes: &mut Vec<u8>, quantise: impl Fn(&[f32; BLOCK], &mut [u8]) + Sync) {
        bytes.resize(self.bytes_of(values.len()) as usize, 0);
        let (blocks, rest) = values.as_chunks::<BLOCK>();
        assert!(rest.is_empty(), "rows are made of whole blocks");
        bytes.par_chunks_mut(self.block().1).zip(blocks).with_min_len(64).for_each(|(to, block)| quantise(block, to));
    }
}

/// `q = round(x / d)` with `d = max|x| / 127`.
fn quantise(block: &[f32], to: &mut Vec<u8>) {
    let d = block.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    to.extend_from_slice(&f16::from_f32(d).to_le_bytes());
    to.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
}
