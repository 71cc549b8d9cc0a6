//! Samples of the training data that are held out for validation: documents, or what is cut from them. They are chosen before rows are
//! packed, so that a number of samples is that number however many a row holds.

use super::document_layout::Piece;
use super::packing::Packing;
use super::prepare_error::PrepareError;
use super::rows::{Layout, Part, RowStore, Rows, Weight};
use phalanx_strategies::sampler::Permutation;
use std::sync::Arc;

/// Which of `n` samples are held out, chosen by `seed`.
fn chosen(n: usize, val_set_size: f64, seed: u64) -> Result<Vec<bool>, PrepareError> {
    /// Beyond any epoch, so that the choice is independent of the orders that the sampler uses.
    const STREAM: u64 = u64::MAX;
    assert!(u32::try_from(n).is_ok(), "{n} samples are more than 32 bits can number");
    // A share of few samples is at least one.
    let wanted = if val_set_size < 1.0 { (n as f64 * val_set_size).max(1.0) } else { val_set_size };
    let n_validation = (wanted as usize).min(n);
    let n_train = n - n_validation;
    if n_validation == 0 || n_train == 0 {
        return Err(PrepareError::Split { val_set_size, n_samples: n, n_validation, n_train });
    }
    let order = Permutation::new(n as u64, seed, STREAM);
    let mut is_held_out = vec![false; n];
    for nth in 0..n_validation as u64 {
        is_held_out[order.apply(nth) as usize] = true;
    }
    Ok(is_held_out)
}

/// Divides rows of one sample each; both sets keep the order of the files.
///
/// # Errors
/// When one side would be empty.
pub(super) fn of_rows(store: Arc<RowStore>, val_set_size: f64, seed: u64) -> Result<(Rows, Rows), PrepareError> {
    let is_held_out = chosen(store.len(), val_set_size, seed)?;
    let select =
        |side: bool| (0..store.len() as u32).filter(|&row| is_held_out[row as usize] == side).collect::<Arc<[u32]>>();
    let (train, validation) = (select(false), select(true));
    Ok((Rows::new(Arc::clone(&store), Some(train)), Rows::new(store, Some(validation))))
}

/// One side of files that are divided before they are packed: its rows, and the weights of the files that have some.
#[derive(Default)]
pub(super) struct Side {
    pub(super) parts: Vec<Part>,
    pub(super) weights: Vec<Weight>,
}

/// Both sides.
pub(super) struct Divided {
    pub(super) train: Side,
    pub(super) validation: Side,
    /// The rows of each file, on both.
    pub(super) n_rows: Vec<usize>,
}

/// Divides files whose rows have one sample each, and packs the samples of either side. `lens` are the tokens of the samples of a file.
///
/// # Errors
/// When one side would be empty.
pub(super) fn of_samples(
    files: Vec<(Part, Vec<usize>, Weight)>,
    val_set_size: f64,
    seed: u64,
    pack: impl Fn(&[(u32, usize)]) -> Packing,
) -> Result<Divided, PrepareError> {
    let n_samples = files.iter().map(|(part, ..)| part.n_rows()).sum();
    let is_held_out = chosen(n_samples, val_set_size, seed)?;
    let (mut train, mut validation, mut n_rows) = (Side::default(), Side::default(), Vec::new());
    let mut first = 0;
    for (part, lens, weight) in files {
        let n = part.n_rows();
        let (pieces, is_text) = match part.layout {
            // Its rows are full.
            Layout::Cut { .. } => ((0..n as u32).map(|nth| Piece { document: 0, nth }).collect(), true),
            Layout::Documents(_, pieces) => (pieces, false),
        };
        n_rows.push(0);
        for (side, is_of_side) in [(&mut train, false), (&mut validation, true)] {
            let numbers = (0..n).filter(|number| is_held_out[first + number] == is_of_side);
            let packing = if is_text {
                Packing::one_per_row(numbers.map(|number| number as u32).collect())
            } else {
                pack(&numbers.map(|number| (number as u32, lens[number])).collect::<Vec<_>>())
            };
            if packing.len() > 0 {
                *n_rows.last_mut().expect("it has this file") += packing.len();
                let layout = Layout::Documents(packing, pieces.clone());
                side.parts.push(Part { tokens: Arc::clone(&part.tokens), layout });
                side.weights.push(weight);
            }
        }
        first += n;
    }
    Ok(Divided { train, validation, n_rows })
}
