//! Which documents of a data file are trained on, and which parts of long ones.

use std::collections::HashSet;

use super::config::DataConfig;
use super::token_cache::TokenFile;
use super::token_cache_format::TRAINED;
use crate::config::datasets::ExcessLength;

/// A document, or the part of it that begins at token `nth * sequence_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) document: u32,
    pub(crate) nth: u32,
}

/// The documents that are kept, and counts of the others.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// In file order.
    pub(super) pieces: Vec<Piece>,
    /// Tokens of each piece, at most `sequence_len`.
    pub(super) lens: Vec<usize>,
    pub(super) n_empty: usize,
    pub(super) n_dropped: usize,
    /// Tokens of the shortest and the longest document that was dropped as too long.
    pub(super) dropped_lens: Option<(usize, usize)>,
    pub(super) n_short: usize,
    pub(super) n_repeated: usize,
    pub(super) n_truncated: usize,
    pub(super) n_cut: usize,
}

/// A document that does not fit, where that is an error.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong {
    pub(super) line: u64,
    pub(super) len: usize,
}

/// Documents that were met, if each is kept only once.
pub(super) type Seen = Option<HashSet<[u8; 16]>>;

/// The documents of a file that are trained on. Long ones are cut into rows if `is_cut`, else treated as configured.
pub(super) fn kept(tokens: &TokenFile, config: &DataConfig, is_cut: bool, seen: &mut Seen) -> Result<Kept, TooLong> {
    let row_len = config.sequence_len;
    let n_documents = tokens.documents().len();
    assert!(u32::try_from(n_documents).is_ok(), "{n_documents} documents are more than 32 bits can number");
    let mut kept = Kept::default();
    for document in 0..n_documents as u32 {
        let all = tokens.document(document, usize::MAX);
        if !all.is_empty() && seen.as_mut().is_some_and(|seen| !seen.insert(digest(all))) {
            kept.n_repeated += 1;
            continue;
        }
        if all.len() > row_len && !is_cut {
            match config.excess_length_strategy {
                ExcessLength::Error => {
                    let line = tokens.documents()[document as usize].line;
                    return Err(TooLong { line, len: all.len() });
                }
                ExcessLength::Drop => {
                    kept.n_dropped += 1;
                    let (least, most) = kept.dropped_lens.unwrap_or((all.len(), all.len()));
                    kept.dropped_lens = Some((least.min(all.len()), most.max(all.len())));
                    continue;
                }
                ExcessLength::Truncate => kept.n_truncated += 1,
            }
        }
        kept.n_cut += usize::from(all.len() > row_len && is_cut);
        kept.add(document, all, config, if is_cut { usize::MAX } else { 1 });
    }
    Ok(kept)
}

impl Kept {
    /// Adds the first pieces of a document, those with a token to predict.
    fn add(&mut self, document: u32, tokens: &[u32], config: &DataConfig, n_pieces: usize) {
        let n_before = self.pieces.len();
        let is_short = tokens.len() < config.min_sample_len && has_prediction(tokens);
        for (nth, piece) in (0..).zip(tokens.chunks(config.sequence_len).take(n_pieces)) {
            if !is_short && has_prediction(piece) {
                self.pieces.push(Piece { document, nth });
                self.lens.push(piece.len());
            }
        }
        match self.pieces.len() == n_before {
            true if is_short => self.n_short += 1,
            true => self.n_empty += 1,
            false => {}
        }
    }
}

/// A digest of the tokens with their marks for training; 128 bits do not collide by chance.
fn digest(tokens: &[u32]) -> [u8; 16] {
    let hash = blake3::hash(bytemuck::cast_slice(tokens));
    std::array::from_fn(|i| hash.as_bytes()[i])
}

/// Whether a token of a document is predicted: not the first, which has no context.
fn has_prediction(tokens: &[u32]) -> bool {
    tokens.iter().skip(1).any(|token| token & TRAINED != 0)
}
