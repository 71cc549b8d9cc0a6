//! The columns of a microbatch, filled from documents.
//!
//! Legend: B rows of a batch, S tokens of a row; `t` is a position in a row.
//!
//! Invariants:
//! - `COLUMNS-1` `labels[t]` is the id to be predicted at `t`, always of the same document, or [`IGNORED`].
//! - `COLUMNS-2` A token attends to `doc_start[t] ..= t` only, and `positions[t] = t - doc_start[t]`: documents in one row
//!   are isolated.
//! - `COLUMNS-3` Padding is never predicted, and each padding token attends to itself only, which makes it nearly free in
//!   attention.

use super::token_reader::{id_of, is_trained, is_undesirable};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use std::ops::Range;

/// The label of a position at which nothing is predicted.
pub const IGNORED: i32 = -100;

/// The columns of a microbatch that a program asks for; each is `[B, S]`, row after row.
#[derive(Debug)]
pub struct Columns {
    row_len: usize,
    all: Vec<(Column, Vec<i32>)>,
    /// A row as it is stored, before its columns are written, and room for another document.
    stored: Vec<i32>,
    /// How much the tokens of the row count, if a column says so.
    weights: Vec<f32>,
}

impl Columns {
    /// These columns of a batch.
    pub fn new(columns: impl IntoIterator<Item = Column>, batch: BatchShape) -> Columns {
        let all: Vec<(Column, Vec<i32>)> =
            columns.into_iter().map(|column| (column, vec![0; batch.n_tokens()])).collect();
        let has_weights = all.iter().any(|(column, _)| *column == Column::LossWeights);
        let weights = vec![1.0; if has_weights { batch.seq_len } else { 0 }];
        Columns { row_len: batch.seq_len, all, stored: vec![0; 2 * batch.seq_len], weights }
    }

    /// A column; one of f32 as its bits.
    ///
    /// # Panics
    /// When it was not asked for.
    pub fn of(&self, column: Column) -> &[i32] {
        let found = self.all.iter().find(|(other, _)| *other == column);
        found.map(|(_, tokens)| tokens).expect("a column is read only where it was asked for")
    }

    /// Every column.
    pub fn iter(&self) -> impl Iterator<Item = (Column, &[i32])> {
        self.all.iter().map(|(column, tokens)| (*column, &tokens[..]))
    }

    /// Whether it has room for this many rows of this length.
    pub(super) fn fits(&self, n_rows: usize, row_len: usize) -> bool {
        self.row_len == row_len && self.all.iter().all(|(_, tokens)| tokens.len() == n_rows * row_len)
    }

    /// Where the stored tokens of a document go that is at these positions of its row.
    pub(super) fn stored_mut(&mut self, at: Range<usize>) -> &mut [i32] {
        &mut self.stored[at]
    }

    /// Where the weights of these tokens go, if a column says how much they count.
    pub(super) fn weights_mut(&mut self, at: Range<usize>) -> Option<&mut [f32]> {
        self.weights.get_mut(at)
    }

    /// Puts the answer of one stored document behind the prompt of another: the document of the row has `n` tokens, the other one is
    /// behind the row and has `n_other`. Returns the number of tokens, of which a row holds all.
    pub(super) fn answer_with_other(&mut self, n: usize, n_other: usize) -> usize {
        let (own, other) = self.stored.split_at_mut(self.row_len);
        let answer_of = |tokens: &[i32]| tokens.iter().position(|token| is_trained(*token)).unwrap_or(tokens.len());
        let (at, from) = (answer_of(&own[..n]), answer_of(&other[..n_other]));
        let answer = &other[from..n_other.min(from + self.row_len - at)];
        own[at..at + answer.len()].copy_from_slice(answer);
        at + answer.len()
    }

    /// Where the stored tokens of another document go, for [`Columns::answer_with_other`].
    pub(super) fn other_mut(&mut self, n: usize) -> &mut [i32] {
        &mut self.stored[self.row_len..self.row_len + n]
    }

    /// Writes the columns of the document whose stored tokens are at these positions of a row; returns how many are predicted.
    pub(super) fn document(&mut self, row: usize, at: Range<usize>) -> usize {
        let (first, stored) = (row * self.row_len, &self.stored[at.clone()]);
        for (column, tokens) in &mut self.all {
            let out = &mut tokens[first + at.start..first + at.end];
            match column {
                Column::Ids => out.iter_mut().zip(stored).for_each(|(id, token)| *id = id_of(*token)),
                Column::Labels => {
                    let next = stored.iter().skip(1).map(|next| if is_trained(*next) { id_of(*next) } else { IGNORED });
                    out.iter_mut().zip(next.chain([IGNORED])).for_each(|(label, id)| *label = id);
                }
                Column::DesirableLabels => {
                    let is_desirable = |token: i32| is_trained(token) && !is_undesirable(token);
                    let next =
                        stored.iter().skip(1).map(|next| if is_desirable(*next) { id_of(*next) } else { IGNORED });
                    out.iter_mut().zip(next.chain([IGNORED])).for_each(|(label, id)| *label = id);
                }
                Column::LossWeights => {
                    let of_trained =
                        |(token, weight): (&i32, &f32)| if is_trained(*token) { weight.to_bits() as i32 } else { 0 };
                    let next = stored.iter().zip(&self.weights[at.clone()]).skip(1).map(of_trained);
                    out.iter_mut().zip(next.chain([0])).for_each(|(weight, next)| *weight = next);
                }
                Column::NextIds => {
                    let next = stored.iter().skip(1).map(|next| id_of(*next));
                    out.iter_mut().zip(next.chain([IGNORED])).for_each(|(label, id)| *label = id);
                }
                // Which token is the last is known when the row is padded.
                Column::LastId => out.fill(IGNORED),
                Column::Positions => out.iter_mut().zip(0..).for_each(|(position, t)| *position = t),
                Column::DocStart => out.fill(at.start as i32),
                Column::DropoutKeys => {}
            }
        }
        stored.iter().skip(1).filter(|next| is_trained(**next)).count()
    }

    /// Pads a row from this position on. The document before it ends with its last token that is not the id of padding, as in
    /// transformers; a document that is all padding ends with its first token.
    pub(super) fn pad(&mut self, row: usize, from: usize, pad_id: i32) {
        let first = row * self.row_len;
        let last = self.stored[..from].iter().rposition(|token| id_of(*token) != pad_id).unwrap_or(0);
        for (column, tokens) in &mut self.all {
            let out = &mut tokens[first + from..first + self.row_len];
            match column {
                Column::Ids => out.fill(pad_id),
                Column::Labels | Column::DesirableLabels | Column::NextIds => out.fill(IGNORED),
                Column::LastId => {
                    out.fill(IGNORED);
                    tokens[first + last] = id_of(self.stored[last]);
                }
                Column::Positions | Column::LossWeights => out.fill(0),
                Column::DocStart => out.iter_mut().zip(from as i32..).for_each(|(start, t)| *start = t),
                Column::DropoutKeys => {}
            }
        }
    }

    /// Draws the random keys of a row.
    pub(super) fn draw(&mut self, row: usize, of_row: CounterRng) {
        let at = row * self.row_len..(row + 1) * self.row_len;
        for (_, tokens) in self.all.iter_mut().filter(|(column, _)| *column == Column::DropoutKeys) {
            tokens[at.clone()].iter_mut().zip(0..).for_each(|(key, t)| *key = of_row.bits(t) as i32);
        }
    }

    /// Takes these runs of every row of another batch.
    pub(crate) fn cut(&mut self, whole: &Columns, runs: &[Range<usize>]) {
        for ((_, own), (_, whole_rows)) in self.all.iter_mut().zip(&whole.all) {
            own.clear();
            for row in whole_rows.chunks_exact(whole.row_len) {
                runs.iter().for_each(|run| own.extend_from_slice(&row[run.clone()]));
            }
        }
    }

    /// Excludes the labels of rows from `first` on.
    pub(crate) fn ignore(&mut self, first: usize) {
        let is_label = |column: Column| {
            matches!(column, Column::Labels | Column::DesirableLabels | Column::NextIds | Column::LastId)
        };
        for (_, tokens) in self.all.iter_mut().filter(|(column, _)| is_label(*column)) {
            tokens[first * self.row_len..].fill(IGNORED);
        }
    }
}
