//! Checks one writer's pieces before gigabytes of them are written.

use std::collections::{BTreeMap, BTreeSet};

use super::error::CheckpointError;
use super::format::is_name;
use super::piece::Piece;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::boxes::tiling::{are_disjoint, tiles_exactly};

/// Checks the pieces and extras of one writer. The pieces of a single writer must tile every tensor; with several
/// writers, the commit checks for holes.
pub(super) fn check(pieces: &[Piece<'_>], extras: &[(&str, &[u8])], is_alone: bool) -> Result<(), CheckpointError> {
    let bad = |name: &str, reason| Err(CheckpointError::BadPiece { name: name.to_owned(), reason });
    let mut tensors: BTreeMap<&str, (&Piece<'_>, Vec<TensorBox>)> = BTreeMap::new();
    for piece in pieces {
        let (first, regions) = tensors.entry(piece.name).or_insert((piece, Vec::new()));
        if !is_name(piece.name) {
            return bad(piece.name, "names have 1 to 128 letters, digits, dots, underscores and hyphens");
        }
        if (first.dtype, first.global_shape) != (piece.dtype, piece.global_shape) {
            return bad(piece.name, "its pieces differ in type or global shape");
        }
        if piece.dtype.bytes_of(piece.shape) != Some(piece.bytes.len() as u64) {
            return bad(piece.name, "the shape of a piece does not match its bytes");
        }
        if !piece.bytes.is_empty() {
            regions.push(TensorBox { offset: piece.offset.to_vec(), extent: piece.shape.to_vec() });
        }
    }
    for (name, (first, regions)) in &tensors {
        let fits = if is_alone { tiles_exactly } else { are_disjoint };
        if !fits(first.global_shape, regions) {
            return bad(name, if is_alone { "its pieces leave a hole or overlap" } else { "its pieces overlap" });
        }
    }
    let mut names = BTreeSet::new();
    for (name, content) in extras {
        if !is_name(name) || name.len() > 100 || !names.insert(name) {
            return bad(name, "extras have distinct names of 1 to 100 letters, digits, dots, underscores and hyphens");
        }
        if content.len() as u64 > EXTRA_BYTES_MAX {
            return bad(name, "it is too large for an extra");
        }
    }
    Ok(())
}

/// An extra is a small file; tokenizers of large vocabularies have some tens of megabytes.
pub(super) const EXTRA_BYTES_MAX: u64 = 256 << 20;
