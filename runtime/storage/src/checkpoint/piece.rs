//! A box of a tensor that a writer saves.

use crate::hf::dtype::Dtype;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::elastic::fingerprint::fingerprint;

/// A box of a tensor, or a whole one, to be saved.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The tensor: letters, digits, dots, underscores and hyphens.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub global_shape: &'a [usize],
    /// Where the box starts.
    pub offset: &'a [usize],
    /// The shape of the box.
    pub shape: &'a [usize],
    /// The elements of the box, row-major, little-endian.
    pub bytes: &'a [u8],
    /// The fingerprint of the elements in the state that is saved, if known; of elements of 32 bits. What is written must have
    /// the same.
    pub fingerprint: Option<u64>,
}

/// Offsets of a whole tensor: as many zeros as any tensor has dims.
pub(super) const ORIGIN: [usize; 8] = [0; 8];

impl<'a> Piece<'a> {
    /// A whole tensor.
    ///
    /// # Panics
    /// When it has more than 8 dims.
    pub fn whole(name: &'a str, dtype: Dtype, shape: &'a [usize], bytes: &'a [u8]) -> Self {
        Self { name, dtype, global_shape: shape, offset: &ORIGIN[..shape.len()], shape, bytes, fingerprint: None }
    }

    /// The fingerprint of its bytes, which are elements of 32 bits; see [`phalanx_strategies::elastic::fingerprint`].
    pub(super) fn written_fingerprint(&self) -> u64 {
        let region = TensorBox { offset: self.offset.to_vec(), extent: self.shape.to_vec() };
        let mut sum = 0u64;
        let mut words = [0u32; 1024];
        for run in region.runs(&TensorBox::whole(self.global_shape), &region) {
            let bytes = &self.bytes[4 * run.to..4 * (run.to + run.len)];
            for (i, block) in bytes.chunks(4 * words.len()).enumerate() {
                let words = &mut words[..block.len() / 4];
                let from = block.as_chunks::<4>().0;
                words.iter_mut().zip(from).for_each(|(word, bytes)| *word = u32::from_le_bytes(*bytes));
                sum = sum.wrapping_add(fingerprint((run.from + 1024 * i) as u64, words));
            }
        }
        sum
    }
}
