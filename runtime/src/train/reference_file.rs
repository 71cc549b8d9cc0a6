//! The file of a checkpoint with the log-probabilities of a reference that were computed before the first step.
//!
//! For each set of rows, in little-endian words of 8 bytes: the length of its rows, the number of its documents, and the log-probability
//! of each, nats.

use crate::data::rows::Rows;

/// Name of the file.
pub(crate) const NAME: &str = "reference.bin";

const WORD: usize = size_of::<u64>();

/// The file of these sets, whose log-probabilities are known.
pub(crate) fn encode(sets: &[Rows]) -> Vec<u8> {
    let mut file = Vec::new();
    for rows in sets {
        let known = rows.reference().unwrap_or_default();
        [rows.row_len(), known.len()].iter().for_each(|n| file.extend_from_slice(&(*n as u64).to_le_bytes()));
        known.iter().for_each(|sum| file.extend_from_slice(&sum.to_le_bytes()));
    }
    file
}

/// Makes the log-probabilities of a file known to the sets that it is for: those of other rows are left out.
pub(crate) fn decode(file: &[u8], sets: &[Rows]) {
    let mut words = file.chunks_exact(WORD).map(|word| word.try_into().expect("a word"));
    for rows in sets {
        let mut number = || words.next().map(u64::from_le_bytes);
        let (Some(row_len), Some(n)) = (number(), number()) else { return };
        let known: Vec<f64> = words.by_ref().take(n as usize).map(f64::from_le_bytes).collect();
        let fits = row_len == rows.row_len() as u64 && known.len() == rows.len() * rows.n_batch_rows();
        if fits && known.len() as u64 == n {
            rows.set_reference(known);
        }
    }
}
