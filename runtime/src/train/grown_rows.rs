//! First values of an embedding that has more rows than the one in the model's files: the job added tokens.
//!
//! A new row is the mean of the rows in the file, as with `mean_resizing` of transformers. (transformers adds noise of a
//! standard deviation of about 3e-5 of the rows' own, and only if their covariance is positive definite; equal rows part with the
//! first update, since each gets the gradient of its own token.) Source: Hewitt 2021, "Initializing new word embeddings for
//! pretrained language models".

use std::ops::Range;

use phalanx_storage::hf::error::HfError;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::program::Init;
use phalanx_strategies::rng::CounterRng;

/// Rows that are read at a time.
const ROWS_AT_A_TIME: usize = 1024;

/// How many rows embeddings and heads had, and what they have now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grown {
    /// In the files.
    pub(crate) from: usize,
    /// In the job.
    pub(crate) to: usize,
    /// New rows are the mean of the others; else drawn like those of a new model.
    pub(crate) mean: bool,
}

impl Grown {
    /// Whether a tensor of the job has more rows than the one in the file because of the growth.
    pub(crate) fn concerns(&self, in_file: &[usize], in_job: &[usize]) -> bool {
        in_file.first() == Some(&self.from) && in_job.first() == Some(&self.to) && in_file[1..] == in_job[1..]
    }

    /// The values of all new rows of a tensor.
    pub(crate) fn rows(
        &self,
        source: &TensorSource,
        name: &str,
        init: Init,
        rng: CounterRng,
    ) -> Result<NewRows, HfError> {
        let row_len = source.shape(name)?.iter().skip(1).product();
        let first = self.from * row_len;
        if self.mean {
            return Ok(NewRows { first, values: Values::Mean(mean_row(source, name, self.from, row_len)?) });
        }
        let std = match init {
            Init::Normal { std } => std,
            Init::Zeros | Init::Ones | Init::RowLengths(_) => 0.0,
        };
        Ok(NewRows { first, values: Values::Drawn { std, rng } })
    }
}

/// The values of the rows that the file does not have.
pub(crate) struct NewRows {
    /// Index of their first element in the whole tensor.
    first: usize,
    values: Values,
}

enum Values {
    Mean(Vec<f32>),
    Drawn { std: f32, rng: CounterRng },
}

impl NewRows {
    /// The part of a run of elements that the file has, and the part that it does not have.
    pub(crate) fn split(&self, index: usize, at: Range<usize>) -> [(usize, Range<usize>); 2] {
        let n_old = self.first.saturating_sub(index).min(at.len());
        [(index, at.start..at.start + n_old), (index + n_old, at.start + n_old..at.end)]
    }

    /// Fills elements of new rows, of which the first has this index in the whole tensor.
    pub(crate) fn fill(&self, index: usize, out: &mut [f32]) {
        match &self.values {
            Values::Mean(row) => {
                out.iter_mut().zip(index..).for_each(|(x, at)| *x = row[(at - self.first) % row.len()]);
            }
            Values::Drawn { std, rng } => {
                out.iter_mut().zip(index as u64..).for_each(|(x, at)| *x = std * rng.normal(at) as f32);
            }
        }
    }
}

fn mean_row(source: &TensorSource, name: &str, n_rows: usize, row_len: usize) -> Result<Vec<f32>, HfError> {
    let mut sums = vec![0.0f64; row_len];
    let mut rows = vec![0.0f32; ROWS_AT_A_TIME.min(n_rows) * row_len];
    let mut row = 0;
    while row < n_rows {
        let end = (row + ROWS_AT_A_TIME).min(n_rows);
        let rows = &mut rows[..(end - row) * row_len];
        source.read_rows_into(name, row..end, rows)?;
        for values in rows.chunks_exact(row_len) {
            sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        row = end;
    }
    Ok(sums.into_iter().map(|sum| (sum / n_rows as f64) as f32).collect())
}
