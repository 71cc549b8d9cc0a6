//! How tensor-parallel ranks share an operation: which columns of its operands and results a rank has.

use crate::program::collective::part;
use std::ops::Range;

/// A range of columns, and whether neighbouring ranks hold the same range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: Range<usize>,
    pub(crate) copied: bool,
}

/// Columns of one dim that a rank has, in order.
pub(crate) type Pieces = Vec<Piece>;

/// Ranks that share an operation, seen from one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ranks {
    /// Number of ranks.
    pub(crate) tp: usize,
    /// Position of this rank.
    pub(crate) me: usize,
}

impl Ranks {
    /// This rank's part of an extent.
    ///
    /// # Errors
    /// If the extent is smaller than the number of ranks.
    pub(crate) fn evenly(&self, what: &'static str, extent: usize) -> Result<Pieces, Unshared> {
        if extent < self.tp {
            return Err(Unshared::TooFew { what, extent });
        }
        Ok(vec![Piece { range: part(extent, 1, self.tp, self.me), copied: false }])
    }
}

/// A run of operations in which each rank has some columns, and which ends at an operation on heads, columns or the vocabulary.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    /// This rank's columns of the operation's first operand.
    pub(crate) operand: Pieces,
    /// This rank's columns of its first result; `None` if every rank has all of it.
    pub(crate) result: Option<Pieces>,
    /// Number of neighbouring ranks that hold the same key/value head.
    pub(crate) run: usize,
}

/// Why ranks cannot share an operation.
#[derive(Clone, Debug)]
pub(crate) enum Unshared {
    /// Heads that cannot be shared.
    Heads { n_heads: usize, n_kv_heads: usize, fits: Vec<usize> },
    /// Fewer columns than ranks.
    TooFew { what: &'static str, extent: usize },
    /// An operation that is never shared.
    Never(&'static str),
}

/// What a rank has of an operand.
#[derive(Clone, Debug)]
pub(crate) enum Share {
    /// These columns of a value.
    Columns(Pieces),
    /// These pieces of a dim of a parameter.
    Param { dim: usize, pieces: Pieces },
}

/// How an operation reads its operand if a rank has only some of the operand's columns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reading {
    /// Column by column: it has the same columns of the result.
    ByColumn,
    /// It multiplies by the part of a weight along this dim, and the products of all ranks are summed.
    Product { weight: usize, dim: usize },
}

/// The pieces that lie in a range, counted from its start.
pub(crate) fn inside(pieces: &Pieces, range: Range<usize>) -> Pieces {
    let clamp = |x: usize| x.clamp(range.start, range.end) - range.start;
    let cut = pieces.iter().map(|p| Piece { range: clamp(p.range.start)..clamp(p.range.end), ..*p });
    cut.filter(|p| !p.range.is_empty()).collect()
}

/// Whether `tp` ranks can share these heads: key/value heads evenly, or each head by the same number of ranks.
pub(crate) fn heads_fit(n_heads: usize, n_kv_heads: usize, tp: usize) -> bool {
    n_heads.is_multiple_of(tp) && (n_kv_heads.is_multiple_of(tp) || tp.is_multiple_of(n_kv_heads))
}
