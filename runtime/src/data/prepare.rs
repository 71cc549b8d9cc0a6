//! From the data section of the configuration to rows for training and rows for validation.

pub use super::prepare_error::PrepareError;
pub use super::summary::Summary;

use super::config::DataConfig;
use super::held_out::{self, Divided, Side};
use super::preparer::{Loaded, Preparer, packed, row_shape, sources};
use super::rows::{Part, RowStore, Rows};
use super::sources::Purpose;
use super::tokenize::OnProgress;
use super::tokenizer::Tokenizer;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// The prepared data of a job.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Rows to train on.
    pub train: Rows,
    /// Rows to evaluate on: those of `test_datasets`, or rows held out from `train`, if there are any.
    pub validation: Option<Rows>,
    /// The result for each file, in the order of `datasets` and then of `test_datasets`; of a stream, for its first file.
    pub summaries: Vec<Summary>,
    /// A digest of the tokens of each file of `datasets` and of their marks for prediction.
    pub digests: Vec<[u8; 32]>,
    /// The same of `test_datasets`.
    pub test_digests: Vec<[u8; 32]>,
}

/// Tokenises the data sets of `config`, or takes their tokens from `cache_dir`, and lays them into rows.
///
/// `vocab_size` is the model's. `progress` is called now and then while a file is tokenised, on the calling thread. The same
/// data gives the same rows, whatever the machine or the number of threads.
///
/// # Errors
/// When the section, a file or a record cannot be used; the message names it and what is supported. Tokens of files
/// finished before stay in the cache.
pub fn prepare(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
    vocab_size: usize,
    progress: OnProgress<'_>,
) -> Result<Prepared, PrepareError> {
    config.validate()?;
    let of_purpose = |datasets, purpose| {
        let sources = sources(datasets, purpose, config.seed)?;
        Ok::<_, PrepareError>(Preparer::new(
            sources,
            Cow::Borrowed(config),
            Cow::Borrowed(tokenizer),
            cache_dir,
            vocab_size,
        ))
    };
    let pad = tokenizer.padding(vocab_size);
    let store = |parts| {
        let store = RowStore::new(parts, row_shape(config, pad));
        match u32::try_from(store.len()) {
            Ok(_) => Ok(Arc::new(store)),
            Err(_) => Err(PrepareError::TooManyRows { n_rows: store.len() }),
        }
    };
    let training = of_purpose(&config.datasets, Purpose::Training)?.holding_out();
    let (train, mut validation, mut summaries, digests) = match config.stream_rows {
        None => divided(config, training.all(progress)?, &store)?,
        Some(n_rows) => {
            let (stream, summary, digest) = training.into_stream(n_rows, pad, progress)?;
            (Rows::streamed(stream), None, vec![summary], vec![digest])
        }
    };
    let mut test_digests = Vec::new();
    if !config.test_datasets.is_empty() {
        let test = of_purpose(&config.test_datasets, Purpose::Evaluation)?.all(progress)?;
        validation = Some(Rows::new(store(test.parts)?, None).weighted(&test.weights, config.seed));
        summaries.extend(test.summaries);
        test_digests = test.digests;
    }
    Ok(Prepared { train, validation, summaries, digests, test_digests })
}

/// Rows to train on, and those of the same files that are held out of it, with a summary and a digest of each file.
type Halves = (Rows, Option<Rows>, Vec<Summary>, Vec<[u8; 32]>);

/// Holds out the share of the samples that `config` asks for.
fn divided(
    config: &DataConfig,
    loaded: Loaded,
    store: &dyn Fn(Vec<Part>) -> Result<Arc<RowStore>, PrepareError>,
) -> Result<Halves, PrepareError> {
    let Loaded { parts, lens, weights, mut summaries, digests } = loaded;
    let (train, validation) = match (config.val_set_size, config.sample_packing) {
        (0.0, _) => (Rows::new(store(parts)?, None).weighted(&weights, config.seed), None),
        (size, false) => {
            let (train, validation) = held_out::of_rows(store(parts)?, size, config.seed)?;
            (train.weighted(&weights, config.seed), Some(validation))
        }
        (size, true) => {
            let files = parts.into_iter().zip(lens).zip(weights);
            let files = files.map(|((part, lens), weight)| (part, lens, weight)).collect();
            let pack = |lens: &[(u32, usize)]| packed(lens, config);
            let Divided { train, validation, n_rows } = held_out::of_samples(files, size, config.seed, pack)?;
            summaries.iter_mut().zip(n_rows).for_each(|(summary, n_rows)| summary.n_rows = n_rows);
            let Side { parts, weights } = train;
            let train = Rows::new(store(parts)?, None).weighted(&weights, config.seed);
            (train, Some(Rows::new(store(validation.parts)?, None)))
        }
    };
    Ok((train, validation, summaries, digests))
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
