//! Frozen weights in packed form: packed while they are loaded, and unpacked for an export.

use super::weights::{self, Tensor, within};
use phalanx_device::{Machine, packed};
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::Packing;
use rayon::prelude::*;
use std::ops::Range;

/// Most weights that are read at once, unless a row has more.
const PIECE: usize = 1 << 20;

/// Reads weights of a tensor; the arguments are the index of the first one and where they go.
pub(super) type ReadWeights<'a, E> = dyn FnMut(usize, &mut [f32]) -> Result<(), E> + 'a;

/// Fills a box of a packed tensor. A rank reads whole rows of what it holds; the scales of double quantisation are relative to
/// their mean over the whole tensor, so it reads all of that once.
///
/// # Errors
/// The first one of `read`.
pub(super) fn fill<E>(
    machine: &mut dyn Machine,
    c: &Compiled,
    tensor: &Tensor,
    packing: Packing,
    read: &mut ReadWeights<'_, E>,
) -> Result<(), E> {
    let mut packer = Packer { packing, n_columns: packing.weights(tensor.shape[1]), scales: Vec::new(), read };
    if packing == (Packing::Nf4 { double: true }) {
        packer.find_scales(tensor.shape[0])?;
    }
    let runs: Vec<(usize, Range<usize>)> = tensor.runs().collect();
    machine.try_edit(c, tensor.value, tensor.elements.clone(), |first, out: &mut [u32]| {
        within(&runs, first..first + out.len()).try_for_each(|(index, at)| packer.pack_run(index, &mut out[at]))
    })
}

/// All weights of a tensor of this shape, packed and unpacked again.
///
/// # Errors
/// The first one of `read`.
pub(super) fn rounded<E>(
    packing: Packing,
    [n_rows, n_columns]: [usize; 2],
    read: &mut ReadWeights<'_, E>,
) -> Result<Vec<f32>, E> {
    let mut packer = Packer { packing, n_columns, scales: Vec::new(), read };
    if packing == (Packing::Nf4 { double: true }) {
        packer.find_scales(n_rows)?;
    }
    let mut words = vec![0; packing.words(n_rows * n_columns)];
    packer.pack_run(0, &mut words)?;
    let mut weights = vec![0.0; n_rows * n_columns];
    packed::unpack(packing, &words, &mut weights);
    Ok(weights)
}

struct Packer<'a, 'r, E> {
    packing: Packing,
    n_columns: usize,
    /// The double quantised scales of all blocks, if the form has them.
    scales: Vec<f32>,
    read: &'a mut ReadWeights<'r, E>,
}

impl<E> Packer<'_, '_, E> {
    const fn rows_of_piece(&self) -> usize {
        let rows = PIECE / self.n_columns;
        if rows == 0 { 1 } else { rows }
    }

    fn rows(&mut self, rows: Range<usize>) -> Result<Vec<f32>, E> {
        let mut weights = vec![0.0; rows.len() * self.n_columns];
        (self.read)(rows.start * self.n_columns, &mut weights)?;
        Ok(weights)
    }

    fn find_scales(&mut self, n_rows: usize) -> Result<(), E> {
        for first in (0..n_rows).step_by(self.rows_of_piece()) {
            let weights = self.rows(first..(first + self.rows_of_piece()).min(n_rows))?;
            let packing = self.packing;
            let scale = |block: &[f32]| packed::scale_of(packing, block);
            self.scales.par_extend(weights.par_chunks(packing.n_weights()).map(scale));
        }
        packed::double_quantised(&mut self.scales);
        Ok(())
    }

    /// Packs the words from `index` on of the whole tensor.
    fn pack_run(&mut self, index: usize, out: &mut [u32]) -> Result<(), E> {
        let n_words = self.packing.words(self.n_columns);
        let end = index + out.len();
        let last_row = end.div_ceil(n_words);
        for first in (index / n_words..last_row).step_by(self.rows_of_piece()) {
            let rows = first..(first + self.rows_of_piece()).min(last_row);
            let weights = self.rows(rows.clone())?;
            let words = pack_rows(self.packing, self.n_columns, &weights, &self.scales, rows.start);
            let (from, to) = ((rows.start * n_words).max(index), (rows.end * n_words).min(end));
            out[from - index..to - index]
                .copy_from_slice(&words[from - rows.start * n_words..to - rows.start * n_words]);
        }
        Ok(())
    }
}

/// Packs whole rows, from `first_row` of the tensor on; `scales`, unless empty, has the scales of all blocks of the tensor.
fn pack_rows(packing: Packing, n_columns: usize, weights: &[f32], scales: &[f32], first_row: usize) -> Vec<u32> {
    let of_scale = packed::weights_of_scale(packing, n_columns).unwrap_or(n_columns);
    let (n_blocks, blocks_of_scale) = (n_columns / packing.n_weights(), of_scale / packing.n_weights());
    let mut words = vec![0; packing.words(weights.len())];
    let rows = words.par_chunks_mut(packing.words(n_columns)).zip(weights.par_chunks(n_columns));
    rows.enumerate().for_each(|(row, (words, weights))| {
        let blocks = words.chunks_mut(packing.n_words()).zip(weights.chunks(packing.n_weights()));
        let mut scale = 0.0;
        for (i, (words, block)) in blocks.enumerate() {
            if i.is_multiple_of(blocks_of_scale) {
                scale = packed::scale_of(packing, &weights[i * packing.n_weights()..][..of_scale]);
            }
            packed::pack(packing, block, scale, words);
            if let Some(scale) = scales.get((first_row + row) * n_blocks + i) {
                packed::set_scale(words, *scale);
            }
        }
    });
    words
}

/// Reads a tensor that a checkpoint holds packed into a machine that holds it as f32.
///
/// # Errors
/// When the checkpoint has no such tensor, or it cannot be read.
pub(super) fn read_unpacked(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    packing: Packing,
    machine: &mut dyn Machine,
    c: &Compiled,
) -> Result<(), CheckpointError> {
    let region = TensorBox::whole(&[tensor.shape[0], packing.words(tensor.shape[1])]);
    let mut words = vec![0u32; region.n_elements()];
    checkpoint.read_into(&tensor.name, &region, bytemuck::cast_slice_mut(&mut words))?;
    let mut whole = vec![0.0f32; packing.weights(words.len())];
    packed::unpack(packing, &words, &mut whole);
    weights::unpack_from_whole(machine, c, tensor, &whole);
    Ok(())
}
