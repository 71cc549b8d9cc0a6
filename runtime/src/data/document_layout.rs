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

/// The documents of a file that are trained on. Long ones are cut into rows if `is_cut`, else treated as configured. The documents of a
/// group, such as a pair, are kept or left out together.
pub(super) fn kept(tokens: &TokenFile, config: &DataConfig, is_cut: bool, seen: &mut Seen) -> Result<Kept, TooLong> {
    let n_documents = tokens.documents().len();
    assert!(u32::try_from(n_documents).is_ok(), "{n_documents} documents are more than 32 bits can number");
    let (mut kept, group) = (Kept::default(), config.documents_per_row() as u32);
    for first in (0..n_documents as u32).step_by(group as usize) {
        let documents: Vec<(u32, &[u32])> =
            (first..first + group).map(|document| (document, tokens.document(document, usize::MAX))).collect();
        let has_tokens = documents.iter().all(|(_, all)| !all.is_empty());
        if has_tokens && seen.as_mut().is_some_and(|seen| !seen.insert(digest(&documents))) {
            kept.n_repeated += documents.len();
            continue;
        }
        let longest = documents.iter().map(|(_, all)| all.len()).max().unwrap_or(0);
        if longest > config.sequence_len && !is_cut {
            match config.excess_length_strategy {
                ExcessLength::Error => {
                    return Err(TooLong { line: tokens.documents()[first as usize].line, len: longest });
                }
                ExcessLength::Drop => {
                    kept.n_dropped += documents.len();
                    let (least, most) = kept.dropped_lens.unwrap_or((longest, longest));
                    kept.dropped_lens = Some((least.min(longest), most.max(longest)));
                    continue;
                }
                ExcessLength::Truncate => {
                    kept.n_truncated += documents.iter().filter(|(_, all)| all.len() > config.sequence_len).count();
                }
            }
        }
        kept.n_cut += usize::from(longest > config.sequence_len && is_cut);
        kept.add(&documents, config, if is_cut { usize::MAX } else { 1 });
    }
    Ok(kept)
}

impl Kept {
    /// Adds the first pieces of the documents of a group, those with a token to predict, if every document has one.
    fn add(&mut self, documents: &[(u32, &[u32])], config: &DataConfig, n_pieces: usize) {
        let n_before = self.pieces.len();
        let is_short = |tokens: &[u32]| tokens.len() < config.min_sample_len && has_prediction(tokens);
        let is_one_short = documents.iter().any(|(_, tokens)| is_short(tokens));
        let mut has_all = !is_one_short;
        for (document, tokens) in documents.iter().filter(|_| !is_one_short) {
            let n_others = self.pieces.len();
            for (nth, piece) in (0..).zip(tokens.chunks(config.sequence_len).take(n_pieces)) {
                if has_prediction(piece) {
                    self.pieces.push(Piece { document: *document, nth });
                    self.lens.push(piece.len());
                }
            }
            has_all &= self.pieces.len() > n_others;
        }
        if !has_all {
            self.pieces.truncate(n_before);
            self.lens.truncate(n_before);
            let left_out = if is_one_short { &mut self.n_short } else { &mut self.n_empty };
            *left_out += documents.len();
        }
    }
}

/// A digest of the tokens of documents with their marks for training; 128 bits do not collide by chance.
fn digest(documents: &[(u32, &[u32])]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for (nth, (_, tokens)) in documents.iter().enumerate() {
        // No token is this one, so the border between two documents is one.
        hasher.update(if nth > 0 { &[0xff; 4] } else { &[] }).update(bytemuck::cast_slice(tokens));
    }
    let hash = hasher.finalize();
    std::array::from_fn(|i| hash.as_bytes()[i])
}

/// Whether a token of a document is predicted: not the first, which has no context.
fn has_prediction(tokens: &[u32]) -> bool {
    tokens.iter().skip(1).any(|token| token & TRAINED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_of_a_group_are_left_out_together() {
        const T: u32 = TRAINED;
        let config = DataConfig { min_sample_len: 3, ..DataConfig::new(vec![], 4) };
        let (usual, cut) = ([1, 2, 3 | T], [1, 2, 3, 4, 5 | T]);
        let mut kept = Kept::default();
        let mut add = |documents: [(u32, &[u32]); 2]| kept.add(&documents, &config, 1);

        add([(0, &usual), (1, &cut)]);
        add([(2, &[1, 2, 3]), (3, &usual)]);
        add([(4, &usual), (5, &[1, 2 | T])]);
        add([(6, &usual), (7, &usual)]);

        assert_eq!(kept.pieces.iter().map(|piece| piece.document).collect::<Vec<_>>(), [6, 7]);
        assert_eq!((kept.lens, kept.n_empty, kept.n_short), (vec![3, 3], 4, 2));
    }
}
