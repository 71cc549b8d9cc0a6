//! The operands of attention: queries, keys and values as stored, and their visibility.
//!
//! Legend: `t` query token, `j` key token, both counted over the local tokens of the row; *index*: position of a token
//! in the whole row of the batch.

use super::Heads;
use super::attention_shape::{PartShape, Shape};
use super::strided::VECTOR;
use super::tile::{Multiplier, pack};
use phalanx_device::float::Float;
use std::ops::Range;

/// Queries and keys of a tile of scores.
pub(super) const BLOCK: usize = 64;

/// Indexes of the tokens of all rows.
#[derive(Clone, Copy)]
pub(super) enum Index<'a> {
    /// The whole row is local: token `t` has index `t`.
    Whole,
    /// One index for each token.
    Given(&'a [i32]),
}

impl Index<'_> {
    /// Indexes of the `n` tokens from `start` on, in a row that begins at `row_start`.
    fn block(&self, row_start: usize, start: usize, n: usize) -> [i32; BLOCK] {
        match self {
            Index::Whole => std::array::from_fn(|i| (start + i) as i32),
            Index::Given(index) => {
                let mut block = [0; BLOCK];
                block[..n].copy_from_slice(&index[row_start + start..][..n]);
                block
            }
        }
    }
}

/// The indexes that each query of a block sees: `from[i] ..= to[i]`; empty for columns beyond the block.
pub(super) struct Visible {
    pub from: [i32; BLOCK],
    pub to: [i32; BLOCK],
    // The union and the intersection of what the queries see.
    any: (i32, i32),
    all: (i32, i32),
}

/// The visible share of a tile of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cover {
    Nothing,
    Some,
    Everything,
}

impl Visible {
    fn new(window: Option<usize>, q_index: &[i32], doc_start: &[i32]) -> Visible {
        let (mut any, mut all) = ((i32::MAX, i32::MIN), (i32::MIN, i32::MAX));
        let (mut from, mut to) = ([i32::MAX; BLOCK], [i32::MIN; BLOCK]);
        for (i, (index, start)) in q_index.iter().zip(doc_start).enumerate() {
            let of_window = window.map_or(i64::MIN, |w| *index as i64 + 1 - w as i64);
            (from[i], to[i]) = (of_window.max(*start as i64) as i32, *index);
            any = (any.0.min(from[i]), any.1.max(to[i]));
            all = (all.0.max(from[i]), all.1.min(to[i]));
        }
        Visible { from, to, any, all }
    }

    /// The visible share of keys with these indexes; `Some` if neither `Nothing` nor `Everything` is certain.
    pub fn cover(&self, keys: &[i32]) -> Cover {
        let (first, last) = range_of(keys);
        if last < self.any.0 || first > self.any.1 {
            Cover::Nothing
        } else if first >= self.all.0 && last <= self.all.1 {
            Cover::Everything
        } else {
            Cover::Some
        }
    }
}

/// The least and the greatest index.
fn range_of(index: &[i32]) -> (i32, i32) {
    index.iter().fold((i32::MAX, i32::MIN), |(least, greatest), i| (least.min(*i), greatest.max(*i)))
}

/// Inputs of attention. Queries are the first `H D` columns of the rows of `q`, keys and values the last `2 K D`
/// columns of the rows of `kv`, for packed qkv and bare blocks.
pub(super) struct Operands<'a, T> {
    pub shape: PartShape,
    /// Rows of the batch.
    pub n_rows: usize,
    q: &'a [T],
    q_columns: usize,
    kv: &'a [T],
    kv_columns: usize,
    q_index: Index<'a>,
    kv_index: Index<'a>,
    doc_start: &'a [i32],
}

impl<'a, T: Float> Operands<'a, T> {
    /// The operands of attention over whole rows.
    pub fn of_rows(shape: &Shape, qkv: &'a [T], doc_start: &'a [i32]) -> Operands<'a, T> {
        assert!(qkv.len() == doc_start.len() * shape.heads.columns() && shape.window != Some(0));
        for (token, start) in doc_start.iter().enumerate() {
            let t = token % shape.seq_len;
            assert!(usize::try_from(*start).is_ok_and(|start| start <= t), "token {t} does not see itself");
        }
        Operands::new(shape.as_part(), qkv, qkv, (Index::Whole, Index::Whole), doc_start)
    }

    pub fn new(
        shape: PartShape,
        q: &'a [T],
        kv: &'a [T],
        (q_index, kv_index): (Index<'a>, Index<'a>),
        doc_start: &'a [i32],
    ) -> Operands<'a, T> {
        // A part may have no queries; then the keys determine the number of rows.
        let n_rows = match kv_index {
            Index::Given(index) if shape.n_queries == 0 => index.len() / shape.n_keys.max(1),
            _ => doc_start.len() / shape.n_queries.max(1),
        };
        let (n_queries, n_keys) = (n_rows * shape.n_queries, n_rows * shape.n_keys);
        assert_eq!(doc_start.len(), n_queries, "every query has a document start");
        for (index, n) in [(q_index, n_queries), (kv_index, n_keys)] {
            assert!(matches!(index, Index::Whole) || matches!(index, Index::Given(index) if index.len() == n));
        }
        let Heads { n_heads, n_kv_heads, head_dim } = shape.heads;
        let q_columns = columns_of(q.len(), n_queries, n_heads * head_dim);
        let kv_columns = columns_of(kv.len(), n_keys, 2 * n_kv_heads * head_dim);
        Operands { shape, n_rows, q, q_columns, kv, kv_columns, q_index, kv_index, doc_start }
    }

    /// The visibility of the `n` queries from `t0` on.
    pub fn visible(&self, row: usize, t0: usize, n: usize) -> Visible {
        let row_start = row * self.shape.n_queries;
        let index = self.q_index.block(row_start, t0, n);
        Visible::new(self.shape.window, &index[..n], &self.doc_start[row_start + t0..][..n])
    }

    /// The range of keys that may contain keys visible to a block of queries.
    pub fn candidates(&self, visible: &Visible) -> Range<usize> {
        match self.kv_index {
            Index::Whole => visible.any.0 as usize..(visible.any.1 as usize + 1).min(self.shape.n_keys),
            Index::Given(_) => 0..self.shape.n_keys,
        }
    }

    /// Indexes of a block of keys.
    pub fn key_indexes(&self, row: usize, j0: usize, n: usize) -> [i32; BLOCK] {
        self.kv_index.block(row * self.shape.n_keys, j0, n)
    }

    /// Whether any query of the row may see any local key.
    pub fn sees_anything(&self, row: usize) -> bool {
        let PartShape { n_queries, n_keys, .. } = self.shape;
        match self.kv_index {
            Index::Whole => true,
            Index::Given(_) if n_keys == 0 => false,
            Index::Given(index) => {
                let (first, last) = range_of(&index[row * n_keys..][..n_keys]);
                let mut blocks = (0..n_queries).step_by(BLOCK);
                blocks
                    .any(|t0| self.visible(row, t0, BLOCK.min(n_queries - t0)).cover(&[first, last]) != Cover::Nothing)
            }
        }
    }

    /// Copies `n` queries of a head, times a factor, to rows of the padded width.
    pub fn pack_queries(&self, row: usize, head: usize, t0: usize, n: usize, factor: f32, to: &mut [f32]) {
        let (d, first) = (self.shape.heads.head_dim, row * self.shape.n_queries + t0);
        let from = &self.q[first * self.q_columns + head * d..];
        pack(from, self.q_columns, n, d, factor, to, self.shape.padded_dim());
    }

    /// Copies `n` keys, and as many values, of a key/value head to rows of the padded width.
    pub fn pack_keys(&self, row: usize, kv_head: usize, j0: usize, n: usize, k: &mut [f32], v: &mut [f32]) {
        let Heads { n_kv_heads, head_dim: d, .. } = self.shape.heads;
        let start = (row * self.shape.n_keys + j0) * self.kv_columns;
        for (to, blocks) in [(k, 2), (v, 1)] {
            let column = key_column(self.kv_columns, self.shape.heads, kv_head) + (2 - blocks) * n_kv_heads * d;
            pack(&self.kv[start + column..], self.kv_columns, n, d, 1.0, to, self.shape.padded_dim());
        }
    }
}

impl PartShape {
    pub(super) fn padded_dim(&self) -> usize {
        self.heads.head_dim.next_multiple_of(VECTOR)
    }

    /// Length of the scratch of the products of a task.
    pub(super) fn packed_len(&self) -> usize {
        Multiplier::scratch_len(self.padded_dim().max(BLOCK))
    }
}

/// First column of a key head in a row of `n_columns` that ends with keys and values; its value is `K D` further.
pub(super) fn key_column(n_columns: usize, heads: Heads, kv_head: usize) -> usize {
    n_columns - (2 * heads.n_kv_heads - kv_head) * heads.head_dim
}

/// Columns of a matrix of `len` elements in `n` rows.
pub(super) fn columns_of(len: usize, n: usize, least: usize) -> usize {
    let n_columns = len.checked_div(n).unwrap_or(least);
    assert!(
        n_columns >= least && len == n * n_columns,
        "{len} elements do not divide into {n} rows of at least {least} columns"
    );
    n_columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cover_agrees_with_the_visibility_of_each_pair(
            queries in proptest::collection::vec((0i32..60, 0i32..60), 1..5),
            keys in proptest::collection::vec(0i32..60, 1..5), window in proptest::option::of(1usize..40),
        ) {
            let (index, doc_start): (Vec<i32>, Vec<i32>) = queries.iter().map(|(a, b)| (*a.max(b), *a.min(b))).unzip();
            let visible = Visible::new(window, &index, &doc_start);

            let cover = visible.cover(&keys);

            let sees = |i: usize, j: &i32| {
                doc_start[i] <= *j && *j <= index[i] && window.is_none_or(|w| *j > index[i] - w as i32)
            };
            let seen = (0..index.len()).flat_map(|i| keys.iter().map(move |j| sees(i, j)));
            let (n_seen, n) = (seen.filter(|seen| *seen).count(), index.len() * keys.len());
            // Key indexes may have gaps, so `Some` is always allowed; the other covers are exact.
            prop_assert!(cover != Cover::Nothing || n_seen == 0);
            prop_assert_eq!(cover == Cover::Everything, n_seen == n);
        }
    }
}
