//! Optimizer state in blocks: 256 numbers of 8 bits with a scale of their own.
//!
//! State in blocks is stored as words of 32 bits, which are elements like any others to everything that keeps, moves, compares or
//! saves state. The blocks of a tensor of the model file follow each other in row-major order; the last one may be shorter. So a
//! block depends only on the tensor, and it has the same bits on every mesh that does not cut it. Small tensors, and tables of
//! embeddings, have one f32 number for each element, as bitsandbytes and the trainer of `transformers` have it.
//!
//! Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, §2.1 (arXiv:2110.02861).

use super::{Param, ParamPart};
use crate::optimizer::{STATE_BLOCK as BLOCK, STATE_WORDS as WORDS};
use std::ops::Range;

/// Tensors with fewer elements are not stored in blocks.
pub const CODED_MIN: usize = 4096;

/// Whether tensors of this many elements can be stacked in one parameter: a shard that begins at a block of the parameter then begins
/// at a block of its tensor.
pub fn can_be_stacked(n_elements: usize) -> bool {
    n_elements < CODED_MIN || n_elements.is_multiple_of(BLOCK)
}

/// Elements whose state is stored alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// Number of elements; only the last block may be short.
    pub n_elements: usize,
    /// In blocks, not as f32 numbers.
    pub is_coded: bool,
}

impl BlockRun {
    /// Words of their state.
    pub const fn n_words(self) -> usize {
        if self.is_coded { words(self.n_elements) } else { self.n_elements }
    }
}

/// How the state of a value's elements is stored. Empty for state without blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// All elements, in order.
    pub runs: Vec<BlockRun>,
}

impl Blocks {
    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.runs.iter().map(|run| run.n_elements).sum()
    }

    /// Words of the state of all elements.
    pub fn n_words(&self) -> usize {
        self.runs.iter().map(|run| run.n_words()).sum()
    }
}

/// A mesh that would leave parts of a block to several ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "optimizer adamw_8bit keeps its state in blocks of {BLOCK} elements, and this mesh divides `{name}`, of shape {shape:?}, \
     within a block; `optimizer: adamw`, or a smaller tensor_parallel_size or dp_shard_size, would fit"
)]
pub struct CutState {
    /// The tensor.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// The state of the elements of a parameter that a rank updates, in words.
pub(super) struct Stored {
    /// The parts of the parameter, counted in words.
    pub(super) parts: Vec<ParamPart>,
    /// The words of the elements that the rank updates.
    pub(super) words: Range<usize>,
}

impl Param {
    /// How the state of the elements that this rank updates is stored.
    ///
    /// # Errors
    /// When the rank would have a part of a block.
    pub fn blocks(&self) -> Result<Blocks, CutState> {
        self.stored_state().map(|(_, blocks)| blocks)
    }

    pub(super) fn stored_state(&self) -> Result<(Stored, Blocks), CutState> {
        let (mut first, mut first_word) = (0, 0);
        let (mut parts, mut blocks) = (Vec::with_capacity(self.parts.len()), Blocks::default());
        let mut updated: Option<Range<usize>> = None;
        for part in &self.parts {
            let cut = || CutState { name: part.name.clone(), shape: part.shape.clone() };
            let n = part.n_elements();
            let is_coded = !self.is_table && part.shape.iter().product::<usize>() >= CODED_MIN;
            let stored = if is_coded { in_words(part).ok_or_else(cut)? } else { part.clone() };
            let n_words = stored.n_elements();
            let place = |at: usize| match is_coded {
                true if at == n => Some(n_words),
                true => at.is_multiple_of(BLOCK).then(|| words(at)),
                false => Some(at),
            };
            let run = [self.updated.start, self.updated.end].map(|at| at.clamp(first, first + n) - first);
            if run[0] < run[1] {
                let [Some(start), Some(end)] = run.map(place) else { return Err(cut()) };
                let here = first_word + start..first_word + end;
                updated = Some(updated.map_or(here.start, |before| before.start)..here.end);
                blocks.runs.push(BlockRun { n_elements: run[1] - run[0], is_coded });
            }
            (first, first_word) = (first + n, first_word + n_words);
            parts.push(stored);
        }
        Ok((Stored { parts, words: updated.unwrap_or(0..0) }, blocks))
    }
}

/// Words of this many elements of a tensor, from its first one on.
const fn words(n_elements: usize) -> usize {
    let rest = n_elements % BLOCK;
    n_elements / BLOCK * WORDS + if rest == 0 { 0 } else { 1 + rest.div_ceil(4) }
}

/// A rank's part of a tensor, counted in words; none if it has a part of a block.
fn in_words(part: &ParamPart) -> Option<ParamPart> {
    let whole: usize = part.shape.iter().product();
    let n_columns = *part.shape.last()?;
    let place = |at: usize| (at.is_multiple_of(BLOCK) || at == whole).then(|| words(at));
    // Rows of whole blocks can be cut along any dim.
    if n_columns.is_multiple_of(BLOCK) {
        let mut stored = part.clone();
        *stored.shape.last_mut()? = words(n_columns);
        if part.dim + 1 == part.shape.len() {
            stored.ranges = part.ranges.iter().map(|r| Some(place(r.start)?..place(r.end)?)).collect::<Option<_>>()?;
        }
        return Some(stored);
    }
    let of_row = whole / part.shape[part.dim];
    let ranges = match part.n_elements() == whole {
        true => std::iter::once(0..words(whole)).collect(),
        false if part.dim > 0 => return None,
        false => {
            let in_words = |r: &Range<usize>| Some(place(r.start * of_row)?..place(r.end * of_row)?);
            part.ranges.iter().map(in_words).collect::<Option<_>>()?
        }
    };
    Some(ParamPart { shape: vec![words(whole)], dim: 0, ranges, ..part.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Init, ValueId};

    fn param(shapes: &[&[usize]]) -> Param {
        let parts = shapes.iter().enumerate().map(|(i, shape)| ParamPart::whole(format!("w{i}"), shape)).collect();
        let mut stacked = shapes[0].to_vec();
        stacked[0] = shapes.iter().map(|shape| shape[0]).sum();
        Param::whole(ValueId(0), &stacked, parts, Init::Zeros)
    }

    fn coded(n_elements: usize) -> BlockRun {
        BlockRun { n_elements, is_coded: true }
    }

    fn plain(n_elements: usize) -> BlockRun {
        BlockRun { n_elements, is_coded: false }
    }

    #[test]
    fn tensors_below_4096_elements_and_tables_are_not_in_blocks() {
        let mixed = param(&[&[64, 64], &[63, 64]]);
        let table = Param { is_table: true, ..param(&[&[64, 64]]) };

        assert_eq!(mixed.blocks().unwrap().runs, [coded(4096), plain(4032)]);
        assert_eq!(mixed.blocks().unwrap().n_words(), 16 * WORDS + 4032);
        assert_eq!(table.blocks().unwrap().runs, [plain(4096)]);
    }

    #[test]
    fn last_block_of_a_tensor_may_be_short() {
        let blocks = param(&[&[4099]]).blocks().unwrap();

        assert_eq!((blocks.runs.as_slice(), blocks.n_words()), (&[coded(4099)][..], 16 * WORDS + 2));
    }

    #[test]
    fn shards_of_whole_blocks_have_the_words_of_their_elements() {
        let mut p = param(&[&[32, 256], &[16, 256]]);
        p.updated = 31 * 256..33 * 256;

        let (stored, blocks) = p.stored_state().unwrap();

        assert_eq!(stored.words, 31 * WORDS..33 * WORDS);
        assert_eq!(blocks.runs, [coded(256), coded(256)]);
        assert_eq!(stored.parts[0].shape, [32, WORDS]);
    }

    #[test]
    fn meshes_that_divide_a_block_are_refused_by_the_name_of_the_tensor() {
        let cut = |shape: &[usize], dim: usize, range: Range<usize>| {
            let mut p = param(&[shape]);
            p.cut(dim, std::slice::from_ref(&range));
            p.blocks().map(|blocks| blocks.runs)
        };
        let refused = |shape: &[usize]| CutState { name: "w0".into(), shape: shape.to_vec() };

        assert_eq!(cut(&[16, 512], 1, 256..512), Ok(vec![coded(4096)]));
        assert_eq!(cut(&[16, 512], 1, 128..384), Err(refused(&[16, 512])));
        assert_eq!(cut(&[512, 16], 0, 16..32), Ok(vec![coded(256)]));
        assert_eq!(cut(&[512, 16], 0, 8..32), Err(refused(&[512, 16])));
        assert_eq!(cut(&[512, 16], 1, 8..16), Err(refused(&[512, 16])));
        assert_eq!(cut(&[30, 10], 1, 3..8), Ok(vec![plain(150)]));
        let mut shard = param(&[&[33, 130], &[64, 130]]);
        shard.updated = 5120..shard.updated.end;
        assert_eq!(shard.blocks(), Err(CutState { name: "w1".into(), shape: vec![64, 130] }));
        assert!(refused(&[3]).to_string().contains("`optimizer: adamw`"));
    }
}
