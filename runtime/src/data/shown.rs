//! Samples as text, divided into what is trained on and what is not.

use super::columns::{Columns, IGNORED};
use super::rows::Rows;
use super::token_cache_format::TokenCacheError;
use super::tokenizer::Tokenizer;
use super::tokenizer_error::TokenizerError;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use thiserror::Error;

/// Why samples cannot be shown.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ShowError {
    /// The token cache cannot be read.
    #[error(transparent)]
    Cache(#[from] TokenCacheError),
    /// An id is not in the vocabulary.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A sample that is trained on.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownSample {
    /// Its row, counted from 0.
    pub row: u64,
    /// Its tokens.
    pub n_tokens: usize,
    /// Its tokens that are predicted.
    pub n_predicted: usize,
    /// Pieces of its text, with special tokens, and how much each counts; 0 if it is not predicted.
    pub pieces: Vec<(f32, String)>,
}

const COLUMNS: [Column; 4] = [Column::Ids, Column::Labels, Column::LossWeights, Column::DocStart];

/// The first `n` samples of `rows`.
///
/// # Errors
/// When the tokens cannot be read or have no text.
pub fn first_samples(rows: &Rows, n: usize, tokenizer: &Tokenizer) -> Result<Vec<ShownSample>, ShowError> {
    let mut samples = Vec::new();
    for row in 0..rows.len() as u64 {
        if samples.len() >= n {
            break;
        }
        let shape = BatchShape { n_rows: rows.n_batch_rows(), seq_len: rows.row_len() };
        let mut batch = Columns::new(COLUMNS, shape);
        rows.fill(&[row], CounterRng::new(0), &mut batch)?;
        for at in (0..shape.n_tokens()).step_by(shape.seq_len).take(rows.n_documents()) {
            let of_row = |column| &batch.of(column)[at..at + shape.seq_len];
            let [ids, labels, weights, doc_start] = COLUMNS.map(of_row);
            let mut start = 0;
            while start < ids.len() && samples.len() < n {
                let len = doc_start[start..].iter().take_while(|&&first| first as usize == start).count();
                let end = start + len;
                // Each token of padding is alone, and the last token of a document predicts nothing.
                if labels[start..end].iter().any(|&label| label != IGNORED) {
                    let ids: Vec<u32> = ids[start..end].iter().map(|&id| id as u32).collect();
                    samples.push(shown(row, &ids, &labels[start..end], &weights[start..end], tokenizer)?);
                }
                start = end;
            }
        }
    }
    Ok(samples)
}

fn shown(
    row: u64,
    ids: &[u32],
    labels: &[i32],
    weights: &[i32],
    tokenizer: &Tokenizer,
) -> Result<ShownSample, TokenizerError> {
    let weight = |t: usize| if t > 0 { f32::from_bits(weights[t - 1] as u32) } else { 0.0 };
    let (mut pieces, mut begun) = (Vec::new(), 0);
    for t in 1..=ids.len() {
        if t == ids.len() || weight(t) != weight(begun) {
            // The text of a piece depends on what is before it, so it is the difference of two texts.
            let before = tokenizer.decode_bytes(&ids[..begun], false)?;
            let through = tokenizer.decode_bytes(&ids[..t], false)?;
            let text = through.get(before.len()..).unwrap_or_default();
            pieces.push((weight(begun), String::from_utf8_lossy(text).into_owned()));
            begun = t;
        }
    }
    let n_predicted = labels.iter().filter(|&&label| label != IGNORED).count();
    Ok(ShownSample { row, n_tokens: ids.len(), n_predicted, pieces })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::datasets::DatasetType;
    use crate::data::config::{DataConfig, DatasetConfig};
    use crate::data::prepare::prepare;

    #[test]
    fn samples_are_divided_where_training_begins_and_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.jsonl");
        let record = |n: u32| format!("{{\"instruction\": \"Add {n}.\", \"output\": \"é{n}\"}}\n");
        std::fs::write(&path, (0..5).map(record).collect::<String>()).unwrap();
        let config = DataConfig {
            sample_packing: true,
            ..DataConfig::new(vec![DatasetConfig::new(&path, DatasetType::Alpaca)], 512)
        };
        let rows = prepare(&config, &Tokenizer::bytes(), dir.path(), 264, &|_| Ok(())).unwrap().train;

        let samples = first_samples(&rows, 3, &Tokenizer::bytes()).unwrap();

        assert_eq!(samples.len(), 3);
        for (n, sample) in samples.iter().enumerate() {
            let [(0.0, prompt), (1.0, answer)] = &sample.pieces[..] else { panic!("{:?}", sample.pieces) };
            assert!(prompt.starts_with("<|bos|>") && prompt.contains(&format!("Add {n}.")), "{prompt}");
            assert_eq!(answer, &format!("é{n}<|eos|>"));
            assert_eq!(sample.n_predicted, 4);
        }
    }
}
