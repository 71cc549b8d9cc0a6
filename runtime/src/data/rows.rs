//! Rows of token ids, and batches copied from them.
//!
//! Legend: B rows of a batch, S tokens of a row.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use phalanx_strategies::objective::{Counts, SecondRow, Unit};
use phalanx_strategies::rng::CounterRng;
use phalanx_strategies::sampler::Permutation;

use super::columns::Columns;
use super::document_layout::Piece;
use super::packing::Packing;
use super::prepare_error::PrepareError;
use super::stream::Stream;
use super::token_cache_format::TokenCacheError;
use super::token_reader::TokenReader;

/// The first of the streams that choose rows by weight, downwards, among those of a seed; orders of epochs count upwards.
const WEIGHTS: u64 = u64::MAX - 2;

/// The rows of one data file.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) tokens: Arc<TokenReader>,
    pub(crate) layout: Layout,
}

/// How the tokens of a file are divided into rows.
#[derive(Debug)]
pub(crate) enum Layout {
    /// One long text, cut every S tokens.
    Cut { n_rows: usize },
    /// Documents or pieces of them, each of at most S tokens; the packing numbers these.
    Documents(Packing, Vec<Piece>),
}

impl Part {
    pub(crate) fn n_rows(&self) -> usize {
        match &self.layout {
            Layout::Cut { n_rows } => *n_rows,
            Layout::Documents(packing, _) => packing.len(),
        }
    }

    /// Calls `each` with the tokens of the documents of a row in order.
    fn for_each_document(
        &self,
        row: usize,
        row_len: usize,
        mut each: impl FnMut(Range<u64>) -> Result<(), TokenCacheError>,
    ) -> Result<(), TokenCacheError> {
        match &self.layout {
            Layout::Cut { .. } => each((row * row_len) as u64..((row + 1) * row_len) as u64),
            Layout::Documents(packing, pieces) => packing.row(row).iter().try_for_each(|&number| {
                let Piece { document, nth } = pieces[number as usize];
                let tokens = self.tokens.document(document, usize::MAX)?;
                let start = tokens.start + u64::from(nth) * row_len as u64;
                each(start..tokens.end.min(start + row_len as u64))
            }),
        }
    }
}

/// All rows of the files of a job, in their order. The parts of a stream are added while others read; nobody waits for a lock.
#[derive(Debug)]
pub(crate) struct RowStore {
    /// Filled from the front.
    parts: Box<[OnceLock<Placed>]>,
    n_ready: AtomicUsize,
    shape: RowShape,
    /// Log-probabilities of the documents of every row under a frozen reference, once they are known.
    reference: OnceLock<Box<[f64]>>,
}

/// What a row of the store becomes in a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowShape {
    /// Tokens of a row of the batch.
    pub(crate) len: usize,
    /// The second row of the batch that it becomes, if there is one.
    pub(crate) second: Option<SecondRow>,
    /// Id of tokens behind the documents.
    pub(crate) pad_id: u32,
}

#[derive(Debug)]
struct Placed {
    part: Part,
    /// Number of rows up to and including this part.
    end: usize,
}

impl RowStore {
    pub(crate) fn new(parts: Vec<Part>, shape: RowShape) -> Self {
        let store = Self::growing(parts.len(), shape);
        parts.into_iter().for_each(|part| store.push(part));
        store
    }

    /// A store to which this many parts can be added.
    pub(crate) fn growing(n_parts_max: usize, shape: RowShape) -> Self {
        let parts = (0..n_parts_max).map(|_| OnceLock::new()).collect();
        Self { parts, n_ready: AtomicUsize::new(0), shape, reference: OnceLock::new() }
    }

    /// Adds a part; only one thread may add.
    ///
    /// # Panics
    /// When the store is full.
    pub(crate) fn push(&self, part: Part) {
        let (nth, end) = (self.n_ready.load(Ordering::Acquire), self.len() + part.n_rows());
        assert!(self.parts[nth].set(Placed { part, end }).is_ok(), "two threads add parts");
        self.n_ready.store(nth + 1, Ordering::Release);
    }

    /// The rows that are there.
    pub(crate) fn len(&self) -> usize {
        self.end(self.n_ready.load(Ordering::Acquire))
    }

    /// The rows of each part that is there.
    pub(crate) fn rows_of_parts(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.n_ready.load(Ordering::Acquire)).map(|nth| self.end(nth)..self.end(nth + 1))
    }

    /// The number of the part with a row, and its rows.
    pub(crate) fn part_of(&self, row: usize) -> (usize, Range<usize>) {
        let n_ready = self.n_ready.load(Ordering::Acquire);
        let nth = self.parts[..n_ready].partition_point(|part| placed(part).end <= row);
        (nth, self.end(nth)..self.end(nth + 1))
    }

    /// Number of rows of the first parts.
    fn end(&self, n_parts: usize) -> usize {
        n_parts.checked_sub(1).map_or(0, |last| placed(&self.parts[last]).end)
    }
}

fn placed(part: &OnceLock<Placed>) -> &Placed {
    part.get().expect("parts are added from the front")
}

/// A set of rows to draw batches from. Cloning is cheap: the tokens stay on disk.
#[derive(Debug, Clone)]
pub struct Rows {
    store: Arc<RowStore>,
    order: Order,
}

/// Which row of the store has a number.
#[derive(Debug, Clone)]
enum Order {
    /// That of the store.
    AsStored,
    /// Of these rows of the store.
    Selected(Arc<[u32]>),
    /// Of the rows of each part as often as its weight says, part after part.
    Weighted(Arc<[WeightedPart]>),
    /// That of a stream; its rows are numbered without an end.
    Stream(Arc<Stream>),
}

/// How often the rows of a data set are visited in an epoch; each of its files is a part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Weight {
    /// Number of the data set.
    pub(crate) dataset: usize,
    pub(crate) n_visits: f64,
}

impl Weight {
    /// Of the first `n` rows of the data set, those that are visited once more than the others.
    fn n_more(self, n: usize) -> usize {
        let n_more = (self.n_visits.fract() * n as f64).round() as usize;
        // A small weight of a small data set is at least one row.
        if self.n_visits < 1.0 { n_more.max(1).min(n) } else { n_more }
    }
}

/// The rows of a part and how often they are visited. Memory does not grow with the weight.
#[derive(Debug)]
struct WeightedPart {
    rows: Vec<u32>,
    /// Visits of each row.
    n_times: u64,
    /// Rows that are visited once more.
    more: Vec<u32>,
    /// Visits of this part and those before it.
    end: u64,
}

impl WeightedPart {
    const fn n_visits(&self) -> u64 {
        self.rows.len() as u64 * self.n_times + self.more.len() as u64
    }

    /// The row of a visit.
    fn row(&self, nth: u64) -> u32 {
        let n_whole = self.rows.len() as u64 * self.n_times;
        match nth.checked_sub(n_whole) {
            Some(nth) => self.more[nth as usize],
            None => self.rows[(nth % self.rows.len() as u64) as usize],
        }
    }
}

impl Rows {
    pub(crate) fn new(store: Arc<RowStore>, selected: Option<Arc<[u32]>>) -> Self {
        Self { store, order: selected.map_or(Order::AsStored, Order::Selected) }
    }

    pub(crate) fn streamed(stream: Arc<Stream>) -> Self {
        Self { store: Arc::clone(stream.store()), order: Order::Stream(stream) }
    }

    /// The stream that the rows come from, if they do.
    pub(crate) fn stream(&self) -> Option<&Arc<Stream>> {
        match &self.order {
            Order::Stream(stream) => Some(stream),
            Order::AsStored | Order::Selected(_) | Order::Weighted(_) => None,
        }
    }

    /// Whether all rows with numbers up to this one can be read; those of a stream can be when they are prepared.
    ///
    /// # Errors
    /// When a row before it cannot be prepared.
    pub fn are_ready(&self, last: u64) -> Result<bool, PrepareError> {
        self.stream().map_or(Ok(true), |stream| stream.has(last))
    }

    /// These rows, those of each part as often as the weight of its data set says: 2 for each twice, 0.5 for a random half. The parts of
    /// a data set follow each other.
    pub(crate) fn weighted(self, weights: &[Weight], seed: u64) -> Self {
        if weights.iter().all(|weight| weight.n_visits == 1.0) {
            return self;
        }
        let all: Vec<u32> = match &self.order {
            Order::Selected(rows) => rows.to_vec(),
            Order::AsStored | Order::Weighted(_) | Order::Stream(_) => (0..self.store.len() as u32).collect(),
        };
        let (mut parts, mut end) = (Vec::new(), 0);
        // The data set of the last part, and its rows so far.
        let mut so_far = (0, 0);
        for (part, (rows, &weight)) in self.store.rows_of_parts().zip(weights).enumerate() {
            let of_part = &all[all.partition_point(|&row| (row as usize) < rows.start)..];
            let rows = &of_part[..of_part.partition_point(|&row| (row as usize) < rows.end)];
            let before = if so_far.0 == weight.dataset { so_far.1 } else { 0 };
            so_far = (weight.dataset, before + rows.len());
            let n_more = weight.n_more(so_far.1) - weight.n_more(before);
            let order = Permutation::new(rows.len() as u64, seed, WEIGHTS - part as u64);
            let mut more: Vec<u32> = (0..n_more as u64).map(|nth| rows[order.apply(nth) as usize]).collect();
            more.sort_unstable();
            let mut part = WeightedPart { rows: rows.to_vec(), n_times: weight.n_visits as u64, more, end: 0 };
            end += part.n_visits();
            part.end = end;
            parts.push(part);
        }
        Self { store: self.store, order: Order::Weighted(parts.into()) }
    }

    /// The number of rows; of a stream, of those that are prepared.
    pub fn len(&self) -> usize {
        match &self.order {
            Order::Selected(rows) => rows.len(),
            Order::Weighted(parts) => parts.last().map_or(0, |part| part.end as usize),
            Order::AsStored | Order::Stream(_) => self.store.len(),
        }
    }

    /// The number of rows; of a stream, of those that its run trains on, however many are prepared.
    pub(crate) fn n_of_run(&self) -> usize {
        self.stream().map_or(self.len(), |stream| stream.n_needed() as usize)
    }

    /// Whether there is no row; [`super::prepare::prepare`] never returns such a set.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens per row, S.
    pub fn row_len(&self) -> usize {
        self.store.shape.len
    }

    /// Rows of a batch that each row takes: two of a pair.
    pub fn n_batch_rows(&self) -> usize {
        1 + usize::from(self.store.shape.second.is_some())
    }

    /// Those of them that are documents of the data.
    pub(crate) fn n_documents(&self) -> usize {
        if self.store.shape.second == Some(SecondRow::Rejected) { 2 } else { 1 }
    }

    /// All rows of the store, in its order.
    pub(crate) fn of_store(&self) -> Rows {
        Rows::new(Arc::clone(&self.store), None)
    }

    /// Whether both are rows of one store.
    pub(crate) fn has_store_of(&self, other: &Rows) -> bool {
        Arc::ptr_eq(&self.store, &other.store)
    }

    /// The log-probabilities of all documents of the store under a frozen reference, nats, if they are known.
    pub(crate) fn reference(&self) -> Option<&[f64]> {
        self.store.reference.get().map(|sums| &**sums)
    }

    /// Makes them known, for every set of rows of the store. Later calls have no effect.
    ///
    /// # Panics
    /// If there are fewer or more than documents.
    pub(crate) fn set_reference(&self, sums: Vec<f64>) {
        assert_eq!(sums.len(), self.store.len() * self.n_batch_rows(), "one number for each document");
        let _known = self.store.reference.set(sums.into());
    }

    /// Copies the log-probabilities of the documents of these rows; the others of `to` stay as they are.
    ///
    /// # Panics
    /// If they are not known, or a row does not exist.
    pub(crate) fn fill_reference(&self, rows: &[u64], to: &mut [f64]) {
        let (known, n) = (self.reference().expect("they are computed before the first step"), self.n_batch_rows());
        for (&row, to) in rows.iter().zip(to.chunks_exact_mut(n)) {
            let first = self.stored(row) * n;
            to.copy_from_slice(&known[first..first + n]);
        }
    }

    /// Copies the rows numbered `rows` (B of them) into `batch`, of B times [`Rows::n_batch_rows`] rows, and returns how many tokens
    /// are predicted. Random keys are drawn from `draws` by row and position. Allocates nothing.
    ///
    /// # Errors
    /// When the token cache cannot be read, for example because another program has truncated it.
    ///
    /// # Panics
    /// When a row does not exist, one of a stream is not ready, or the batch is for another number of rows or tokens.
    pub fn fill(&self, rows: &[u64], draws: CounterRng, batch: &mut Columns) -> Result<usize, TokenCacheError> {
        let (RowShape { len, pad_id, .. }, n_rows) = (self.store.shape, self.n_batch_rows());
        assert!(batch.fits(rows.len() * n_rows, len), "{} rows of {len} do not fit into {batch:?}", rows.len());
        let mut n_predicted = 0;
        for (nth, &number) in rows.iter().enumerate() {
            let (part, row) = self.place(number);
            let (first, mut filled, mut used) = (nth * n_rows, 0, 0);
            part.for_each_document(row, len, |tokens| {
                let end = used + (tokens.end - tokens.start) as usize;
                part.tokens.read(tokens.start, batch.stored_mut(used..end))?;
                if let Some(weights) = batch.weights_mut(used..end) {
                    part.tokens.read_weights(tokens.start, weights)?;
                }
                n_predicted += batch.document(first + filled, used..end);
                used = end;
                if n_rows > 1 {
                    batch.pad(first + filled, std::mem::take(&mut used), pad_id as i32);
                    filled += 1;
                }
                Ok(())
            })?;
            match self.store.shape.second {
                None => batch.pad(first, used, pad_id as i32),
                Some(SecondRow::Mismatched) => {
                    let before = rows[(nth + rows.len() - 1) % rows.len()];
                    let n = self.read_mismatched(number, before, batch)?;
                    batch.document(first + 1, 0..n);
                    batch.pad(first + 1, n, pad_id as i32);
                }
                Some(SecondRow::Rejected) => {}
            }
            (0..n_rows).for_each(|i| batch.draw(first + i, draws.fork(number * n_rows as u64 + i as u64)));
        }
        Ok(n_predicted)
    }

    /// Stores the prompt of one row with the answer of another; returns the number of tokens.
    fn read_mismatched(&self, own: u64, other: u64, batch: &mut Columns) -> Result<usize, TokenCacheError> {
        let [mut n, mut n_other] = [0, 0];
        let (part, row) = self.place(own);
        part.for_each_document(row, self.row_len(), |tokens| {
            n = (tokens.end - tokens.start) as usize;
            part.tokens.read(tokens.start, batch.stored_mut(0..n))
        })?;
        let (part, row) = self.place(other);
        part.for_each_document(row, self.row_len(), |tokens| {
            n_other = (tokens.end - tokens.start) as usize;
            part.tokens.read(tokens.start, batch.other_mut(n_other))
        })?;
        Ok(batch.answer_with_other(n, n_other))
    }

    /// What is in `rows`, by which the parts of the loss of a whole step are divided.
    ///
    /// # Errors
    /// As [`Rows::fill`].
    ///
    /// # Panics
    /// When a row does not exist.
    pub fn counts(&self, rows: &[u64]) -> Result<Counts, TokenCacheError> {
        let mut counts = Counts::default();
        counts.add(Unit::Sample, rows.len() as u64);
        for &row in rows {
            let (part, row) = self.place(row);
            let mut is_first = true;
            part.for_each_document(row, self.store.shape.len, |tokens| {
                let len = tokens.end - tokens.start;
                let counted = part.tokens.counted(tokens.clone())?;
                let n_predicted = counted.n_predicted as u64;
                counts.add(Unit::Token, n_predicted);
                counts.add(Unit::Weight, part.tokens.weight(tokens, n_predicted)?);
                let label = if counted.is_undesirable { Unit::Undesirable } else { Unit::Desirable };
                counts.add(label, 1);
                if std::mem::take(&mut is_first) {
                    counts.add(Unit::ChosenToken, n_predicted);
                    counts.add(Unit::ChosenText, len.saturating_sub(1));
                }
                Ok(())
            })?;
        }
        Ok(counts)
    }

    /// The number of predicted tokens in `rows`.
    ///
    /// # Errors
    /// As [`Rows::fill`].
    ///
    /// # Panics
    /// As [`Rows::counts`].
    pub fn n_predicted(&self, rows: &[u64]) -> Result<usize, TokenCacheError> {
        Ok(self.counts(rows)?.number(Unit::Token) as usize)
    }

    /// The number in the store of a row.
    fn stored(&self, row: u64) -> usize {
        match &self.order {
            Order::AsStored => row as usize,
            Order::Selected(rows) => rows[row as usize] as usize,
            Order::Weighted(parts) => {
                let part = &parts[parts.partition_point(|part| part.end <= row)];
                part.row(row - (part.end - part.n_visits())) as usize
            }
            Order::Stream(stream) => stream.row_at(row),
        }
    }

    fn place(&self, row: u64) -> (&Part, usize) {
        let row = self.stored(row);
        assert!(row < self.store.len(), "row {row} of a set of {}", self.store.len());
        let (nth, rows) = self.store.part_of(row);
        (&placed(&self.store.parts[nth]).part, row - rows.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::columns::IGNORED;
    use crate::data::token_cache::TokenWriter;
    use crate::data::token_cache_format::{TRAINED, UNDESIRABLE};
    use phalanx_strategies::model::BatchShape;
    use phalanx_strategies::program::Column;
    use std::collections::HashSet;
    use std::os::fd::AsRawFd;

    const S: usize = 8;
    const SHAPE: RowShape = RowShape { len: S, second: None, pad_id: 0 };

    const OF_DOCUMENTS: [Column; 4] = [Column::Ids, Column::Labels, Column::Positions, Column::DocStart];

    struct Filled {
        ids: Vec<i32>,
        labels: Vec<i32>,
        positions: Vec<i32>,
        doc_start: Vec<i32>,
        n_predicted: usize,
    }

    fn columns(n_rows: usize) -> Columns {
        Columns::new(OF_DOCUMENTS, BatchShape { n_rows, seq_len: S })
    }

    /// Twice into the same columns, so that nothing of other rows is left.
    fn filled(rows: &Rows, wanted: &[u64]) -> Filled {
        let mut batch = columns(wanted.len());
        let others: Vec<u64> = wanted.iter().rev().copied().collect();
        rows.fill(&others, CounterRng::new(0), &mut batch).unwrap();
        let n_predicted = rows.fill(wanted, CounterRng::new(0), &mut batch).unwrap();
        assert_eq!(n_predicted, rows.n_predicted(wanted).unwrap());
        let [ids, labels, positions, doc_start] = OF_DOCUMENTS.map(|column| batch.of(column).to_vec());
        Filled { ids, labels, positions, doc_start, n_predicted }
    }

    fn part(documents: &[&[u32]], layout: Layout) -> Part {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::create(dir.path(), &[0; 32]).unwrap();
        for (nth, tokens) in documents.iter().enumerate() {
            writer.push(tokens, &[]).unwrap();
            writer.end_document(nth as u64 + 1);
        }
        Part { tokens: Arc::new(writer.finish().unwrap().into_reader()), layout }
    }

    /// Documents that are not cut.
    fn whole(packing: Packing, n: u32) -> Layout {
        Layout::Documents(packing, (0..n).map(|document| Piece { document, nth: 0 }).collect())
    }

    fn rows(parts: Vec<Part>) -> Rows {
        Rows::new(Arc::new(RowStore::new(parts, SHAPE)), None)
    }

    const T: u32 = TRAINED;

    // COLUMNS-1, COLUMNS-2, COLUMNS-3
    #[test]
    fn packed_documents_are_isolated_and_padding_is_not_predicted() {
        let packing = Packing::best_fit(&[(0, 3), (1, 3)], S);
        let rows = rows(vec![part(&[&[1, 5 | T, 2 | T], &[1, 6, 7 | T]], whole(packing, 2))]);

        let batch = filled(&rows, &[0]);

        assert_eq!(batch.ids, [1, 5, 2, 1, 6, 7, 0, 0]);
        assert_eq!(batch.labels, [5, 2, IGNORED, IGNORED, 7, IGNORED, IGNORED, IGNORED]);
        assert_eq!(batch.positions, [0, 1, 2, 0, 1, 2, 0, 0]);
        assert_eq!(batch.doc_start, [0, 0, 0, 3, 3, 3, 6, 7]);
        assert_eq!(batch.n_predicted, 3);
    }

    /// A weight belongs to the token that is predicted.
    #[test]
    fn weights_are_those_of_labels_and_their_sum_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::create(dir.path(), &[0; 32]).unwrap();
        for (tokens, weights) in [([1 | T, 5 | T, 2 | T], [8.0, 0.5, 3.0f32]), ([1, 6, 7 | T], [1.0, 9.0, 0.25])] {
            writer.push(&tokens, &weights.map(f32::to_bits)).unwrap();
            writer.end_document(1);
        }
        let tokens = Arc::new(writer.finish().unwrap().into_reader());
        let layout = whole(Packing::best_fit(&[(0, 3), (1, 3)], S), 2);
        let rows =
            rows(vec![Part { tokens, layout }, part(&[&[1, 5 | T, 6 | T]], whole(Packing::one_per_row(vec![0]), 1))]);
        let mut batch = Columns::new([Column::LossWeights], BatchShape { n_rows: 2, seq_len: S });

        for wanted in [[1, 0], [0, 1]] {
            rows.fill(&wanted, CounterRng::new(0), &mut batch).unwrap();
        }

        let weights: Vec<f32> = batch.of(Column::LossWeights).iter().map(|bits| f32::from_bits(*bits as u32)).collect();
        assert_eq!(weights[..S], [0.5, 3.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0]);
        assert_eq!(weights[S..], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let sums = [[0], [1]].map(|row| rows.counts(&row).unwrap().of(Unit::Weight));
        assert_eq!(sums, [3.75, 2.0]);
    }

    #[test]
    fn cut_text_predicts_all_but_the_last_position_of_each_row() {
        let tokens: Vec<u32> = (1..=17).map(|id| id | T).collect();
        let rows = rows(vec![part(&[&tokens], Layout::Cut { n_rows: 2 })]);

        let batch = filled(&rows, &[1, 0]);

        assert_eq!(batch.ids, [9, 10, 11, 12, 13, 14, 15, 16, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(batch.labels[..8], [10, 11, 12, 13, 14, 15, 16, IGNORED]);
        assert_eq!(batch.positions[8..], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(batch.doc_start, [0; 16]);
        assert_eq!(batch.n_predicted, 14);
    }

    #[test]
    fn long_document_is_truncated_to_its_row() {
        let tokens: Vec<u32> = (1..=20).map(|id| id | T).collect();
        let rows = rows(vec![part(&[&[3], &tokens], whole(Packing::one_per_row(vec![1]), 2))]);

        let batch = filled(&rows, &[0]);

        assert_eq!(batch.ids, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(batch.n_predicted, 7);
    }

    #[test]
    fn pieces_of_a_long_document_are_rows_of_their_own() {
        let tokens: Vec<u32> = (1..=20).map(|id| id | T).collect();
        let pieces = [0, 1, 2].map(|nth| Piece { document: 1, nth }).to_vec();
        let layout = Layout::Documents(Packing::one_per_row(vec![0, 1, 2]), pieces);
        let rows = rows(vec![part(&[&[3], &tokens], layout)]);

        let batch = filled(&rows, &[1, 2]);

        assert_eq!(batch.ids, [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 0, 0, 0, 0]);
        assert_eq!((batch.n_predicted, batch.positions[8]), (7 + 3, 0));
    }

    #[test]
    fn documents_of_a_pair_are_two_rows_of_the_batch_with_random_keys_of_their_own() {
        let documents: [&[u32]; 4] = [&[1, 5 | T, 2 | T], &[1, 6, 7 | T, 8 | T], &[3, 4 | T], &[3, 9 | T]];
        let packing = Packing::groups(4, 2);
        let shape = RowShape { second: Some(SecondRow::Rejected), ..SHAPE };
        let rows = Rows::new(Arc::new(RowStore::new(vec![part(&documents, whole(packing, 4))], shape)), None);
        let all = OF_DOCUMENTS.into_iter().chain([Column::DropoutKeys]);
        let mut batch = Columns::new(all, BatchShape { n_rows: 4, seq_len: S });

        let n_predicted = rows.fill(&[1, 0], CounterRng::new(3), &mut batch).unwrap();

        assert_eq!((rows.len(), n_predicted), (2, 6));
        let counts = rows.counts(&[1, 0]).unwrap();
        let numbers = [Unit::Token, Unit::Sample, Unit::ChosenToken, Unit::ChosenText].map(|unit| counts.number(unit));
        assert_eq!(numbers, [6, 2, 3, 3]);
        let ids = batch.of(Column::Ids);
        assert_eq!(ids[..16], [3, 4, 0, 0, 0, 0, 0, 0, 3, 9, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ids[16..], [1, 5, 2, 0, 0, 0, 0, 0, 1, 6, 7, 8, 0, 0, 0, 0]);
        assert_eq!(batch.of(Column::Labels)[24..27], [IGNORED, 7, 8]);
        let keys: HashSet<&[i32]> = batch.of(Column::DropoutKeys).chunks(S).collect();
        assert_eq!(keys.len(), 4);
    }

    #[test]
    fn prompt_with_the_answer_of_the_sample_before_it_is_the_second_row() {
        const U: u32 = T | UNDESIRABLE;
        let documents: [&[u32]; 3] = [&[1, 5, 6 | T], &[2, 7 | U, 8 | U], &[3, 4, 9, 9, 9, 9, 9, 10 | T]];
        let shape = RowShape { second: Some(SecondRow::Mismatched), ..SHAPE };
        let layout = whole(Packing::one_per_row((0..3).collect()), 3);
        let rows = Rows::new(Arc::new(RowStore::new(vec![part(&documents, layout)], shape)), None);
        let mut batch =
            Columns::new([Column::Ids, Column::Labels, Column::DesirableLabels], BatchShape { n_rows: 6, seq_len: S });

        rows.fill(&[0, 1, 2], CounterRng::new(0), &mut batch).unwrap();

        let row = |column: Column, row: usize| batch.of(column)[row * S..(row + 1) * S].to_vec();
        assert_eq!(row(Column::Ids, 2), [2, 7, 8, 0, 0, 0, 0, 0]);
        assert_eq!(row(Column::Ids, 1), [1, 5, 10, 0, 0, 0, 0, 0]);
        assert_eq!(row(Column::Ids, 3), [2, 6, 0, 0, 0, 0, 0, 0]);
        // What exceeds the row is cut.
        assert_eq!(row(Column::Ids, 5), [3, 4, 9, 9, 9, 9, 9, 7]);
        assert_eq!(row(Column::Labels, 1)[..3], [IGNORED, 10, IGNORED]);
        assert_eq!(row(Column::Labels, 2)[..3], [7, 8, IGNORED]);
        assert_eq!(row(Column::DesirableLabels, 2), [IGNORED; S]);
        assert_eq!(row(Column::DesirableLabels, 0)[..3], [IGNORED, 6, IGNORED]);
        let counts = rows.counts(&[0, 1, 2]).unwrap();
        assert_eq!(
            [Unit::Sample, Unit::Undesirable, Unit::Desirable, Unit::Token].map(|unit| counts.number(unit)),
            [3, 1, 2, 4]
        );
    }

    #[test]
    fn truncated_token_cache_is_an_error_that_names_it() {
        let part = part(&[&[1; 4096], &[5; 4096]], whole(Packing::one_per_row(vec![0, 1]), 2));
        let path = part.tokens.path.clone();
        let file = std::fs::File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", part.tokens.file().unwrap().as_raw_fd()));
        let rows = rows(vec![part]);
        file.unwrap().set_len(200).unwrap();

        let counted = rows.n_predicted(&[1]);
        let filled = rows.fill(&[1], CounterRng::new(0), &mut columns(1));

        for error in [counted.unwrap_err(), filled.unwrap_err()] {
            assert!(matches!(&error, TokenCacheError::Io { action: "read", path: p, .. } if *p == path), "{error}");
        }
    }

    #[test]
    fn files_follow_each_other_and_a_selection_renumbers_rows() {
        let store = Arc::new(RowStore::new(
            vec![
                part(&[&[1, 2], &[3, 4]], whole(Packing::one_per_row(vec![0, 1]), 2)),
                part(&[&[5; 8]], Layout::Cut { n_rows: 1 }),
            ],
            SHAPE,
        ));
        let all = Rows::new(Arc::clone(&store), None);
        let some = Rows::new(store, Some([0, 2].into()));

        assert_eq!((all.len(), some.len()), (3, 2));
        assert_eq!(filled(&all, &[1, 2]).ids, [3, 4, 0, 0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5]);
        assert_eq!(filled(&some, &[1]).ids, [5; 8]);
    }

    #[test]
    fn weights_repeat_rows_or_choose_some_of_them() {
        let documents: Vec<Vec<u32>> = (0..10).map(|i| vec![i, 1]).collect();
        let documents: Vec<&[u32]> = documents.iter().map(Vec::as_slice).collect();
        let layout = || whole(Packing::one_per_row((0..10).collect()), 10);
        let store = Arc::new(RowStore::new((0..3).map(|_| part(&documents, layout())).collect(), SHAPE));
        let held_out = [3, 14, 25];
        let train = (0..30).filter(|row| !held_out.contains(&(*row as usize))).collect();

        let rows = Rows::new(store, Some(train));
        let weights = |of_parts: [f64; 3]| [0, 1, 2].map(|i| Weight { dataset: i, n_visits: of_parts[i] });
        let many = rows.clone().weighted(&weights([1.0, 10_000.0, 0.35]), 42);
        let rows = rows.weighted(&weights([1.0, 2.0, 0.35]), 42);

        let selected: Vec<usize> = (0..rows.len() as u64).map(|row| rows.stored(row)).collect();
        let count = |rows: std::ops::Range<usize>| selected.iter().filter(|row| rows.contains(row)).count();
        assert_eq!([count(0..10), count(10..20), count(20..30)], [9, 18, 3]);
        assert!(selected.iter().all(|row| !held_out.contains(row)));
        assert!((10..20).filter(|row| *row != 14).all(|row| selected.iter().filter(|r| **r == row).count() == 2));
        assert_eq!((many.len(), many.stored(90_008), many.stored(90_009)), (9 + 90_000 + 3, 19, selected[27]));
    }
    #[test]
    fn share_of_a_data_set_is_of_all_its_files_together() {
        let files = || (0..40).map(|i| part(&[&[i, 1], &[i, 2]], whole(Packing::one_per_row(vec![0, 1]), 2)));
        let rows = |n_visits: [f64; 2]| {
            let weights: Vec<Weight> =
                (0..40).map(|i| Weight { dataset: i / 30, n_visits: n_visits[i / 30] }).collect();
            let rows = Rows::new(Arc::new(RowStore::new(files().collect(), SHAPE)), None).weighted(&weights, 42);
            (0..rows.len() as u64).map(|row| rows.stored(row)).collect::<Vec<_>>()
        };

        let n_of = |rows: Vec<usize>| [rows.iter().filter(|row| **row < 60).count(), rows.len()];
        assert_eq!(n_of(rows([0.1, 2.0])), [6, 6 + 40]);
        assert_eq!(n_of(rows([1.25, 0.001])), [75, 75 + 1]);
    }
}
