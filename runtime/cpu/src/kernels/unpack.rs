//! Packed weights as numbers.

use super::parallel::CHUNK;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;
use phalanx_device::packed;
use phalanx_strategies::program::Packing;

/// `out` = the weights that are packed in `words`.
///
/// # Shapes
/// `words: [R, W]`, `out: [R, C]`; rows are whole blocks.
///
/// # Panics
/// If the numbers of words and weights are not those of the same number of blocks.
pub fn unpack<T: Float>(packing: Packing, words: &[u32], out: &mut [T]) {
    assert_eq!(packing.words(out.len()), words.len());
    let len = CHUNK / packing.n_weights() * packing.n_weights();
    let tasks = out.par_chunks_mut(len).zip(words.par_chunks(packing.words(len)));
    tasks.for_each(|(out, words)| packed::unpack(packing, words, out));
}
