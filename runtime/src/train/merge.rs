//! Adds adapters into the weights that they adapt.
//!
//! `W += s B A` (`W^T` where the model stores `[in, out]`), summed in f64; with DoRA, rows are then scaled to the lengths `m`.
//! Modules that were trained whole replace those of the base model.
//!
//! Sources: Hu et al. 2021, LoRA, §4.1 (arXiv:2106.09685); Liu et al. 2024, DoRA, §4.1 (arXiv:2402.09353), with the lengths of
//! rows as PEFT computes them.

use super::weights::{self, Tensor};
use crate::error::JobError;
use crate::error::merge::MergeError;
use fancy_regex::Regex;
use phalanx_device::Machine;
use phalanx_storage::hf::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::Op;
use rayon::prelude::*;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The matrices of one adapted module.
pub(crate) struct LowRank<'a> {
    /// `[rank, in]`.
    pub(crate) a: &'a [f32],
    /// `[out, rank]`.
    pub(crate) b: &'a [f32],
    /// Factor of the product.
    pub(crate) scale: f64,
    /// Lengths of the rows of the sum, with DoRA.
    pub(crate) magnitude: Option<&'a [f32]>,
}

impl LowRank<'_> {
    /// Merges into a whole weight: `[out, in]`, or `[in, out]` if `transposed`.
    pub(crate) fn add_to(&self, weight: &mut [f32], n_out: usize, n_in: usize, transposed: bool) {
        let rank = self.b.len() / n_out.max(1);
        let stored_columns = if transposed { n_out } else { n_in };
        weight.par_chunks_mut(stored_columns.max(1)).enumerate().for_each(|(row, weight)| {
            let mut sums = vec![0f64; weight.len()];
            for r in 0..rank {
                for (column, sum) in sums.iter_mut().enumerate() {
                    let (o, i) = if transposed { (column, row) } else { (row, column) };
                    *sum += f64::from(self.b[o * rank + r]) * f64::from(self.a[r * n_in + i]);
                }
            }
            for (w, sum) in weight.iter_mut().zip(sums) {
                *w = (f64::from(*w) + self.scale * sum) as f32;
            }
        });
        let Some(magnitude) = self.magnitude else { return };
        let at = |o: usize, i: usize| if transposed { i * n_out + o } else { o * n_in + i };
        for (o, magnitude) in magnitude.iter().enumerate() {
            let squares: f64 = (0..n_in).map(|i| f64::from(weight[at(o, i)]).powi(2)).sum();
            let factor = f64::from(*magnitude) / squares.sqrt();
            (0..n_in).for_each(|i| weight[at(o, i)] = (f64::from(weight[at(o, i)]) * factor) as f32);
        }
    }
}

/// An adapter directory of PEFT, or of an earlier run.
pub(crate) struct AdapterWeights {
    dir: PathBuf,
    source: TensorSource,
    /// A numerator of the scale for modules whose paths match, before the common one.
    alphas: Vec<(Regex, f64)>,
    alpha: f64,
    use_rslora: bool,
}

const PREFIX: &str = "base_model.model.";

impl AdapterWeights {
    /// Opens an adapter and reads its settings.
    ///
    /// # Errors
    /// When it cannot be read, or is of a kind that cannot be merged.
    pub(crate) fn open(dir: &Path) -> Result<AdapterWeights, JobError> {
        let config = read_json(&dir.join(ADAPTER_CONFIG))?;
        let refuse = |key: &'static str, wanted: &'static str| {
            let found = config[key].to_string().chars().take(60).collect();
            JobError::from(MergeError::Setting { dir: dir.to_owned(), key, found, wanted })
        };
        if config["peft_type"] != "LORA" {
            return Err(refuse("peft_type", "but only \"LORA\" can be merged"));
        }
        if config["alora_invocation_tokens"].is_array() {
            return Err(refuse("alora_invocation_tokens", "and an adapter that is active at times cannot be merged"));
        }
        let patterns = config["alpha_pattern"].as_object().into_iter().flatten();
        let alphas = patterns.map(|(key, alpha)| {
            // As PEFT: the pattern is the end of a module's path.
            let regex = Regex::new(&format!(r"\A(?:.*\.)?(?:{key})\z")).ok();
            regex
                .zip(alpha.as_f64())
                .ok_or_else(|| refuse("alpha_pattern", "which is no table of patterns and numbers"))
        });
        Ok(AdapterWeights {
            dir: dir.to_owned(),
            alphas: alphas.collect::<Result<_, _>>()?,
            alpha: config["lora_alpha"].as_f64().unwrap_or(8.0),
            use_rslora: config["use_rslora"] == Value::Bool(true),
            source: TensorSource::open_file(&dir.join(ADAPTER_WEIGHTS))?,
        })
    }

    fn scale(&self, module: &str, rank: usize) -> f64 {
        let own = self.alphas.iter().find(|(regex, _)| regex.is_match(module).unwrap_or(false));
        let rank = rank as f64;
        own.map_or(self.alpha, |(_, alpha)| *alpha) / if self.use_rslora { rank.sqrt() } else { rank }
    }

    fn unfit(&self, tensor: &str, why: impl Into<String>) -> MergeError {
        MergeError::Tensor { dir: self.dir.clone(), tensor: tensor.to_owned(), why: why.into() }
    }

    /// A tensor of this shape.
    fn read(&self, name: &str, fits: impl FnOnce(&[usize]) -> bool) -> Result<Vec<f32>, JobError> {
        let shape = self.source.shape(name)?;
        if !fits(shape) {
            return Err(self.unfit(name, format!("its shape is {shape:?}")).into());
        }
        let mut values = vec![0.0; shape.iter().product()];
        self.source.read_into(name, &mut values)?;
        Ok(values)
    }
}

/// Merges an adapter into the weights of a machine, whose program has none.
///
/// # Errors
/// When a tensor of the adapter has no place in the model or another shape; the weights are then those of neither.
pub(crate) fn merge(machine: &mut dyn Machine, c: &Compiled, adapter: &AdapterWeights) -> Result<(), JobError> {
    let mut left: BTreeSet<String> = adapter.source.names().map(str::to_owned).collect();
    for tensor in weights::parameters(c) {
        let whole = format!("{PREFIX}{}", tensor.name);
        if left.remove(&whole) {
            let values = adapter.read(&whole, |shape| shape == tensor.shape)?;
            weights::unpack_from_whole(machine, c, &tensor, &values);
        }
        let Some(module) = tensor.name.strip_suffix(".weight") else { continue };
        let [a, b, m] =
            ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"].map(|part| format!("{PREFIX}{module}.{part}"));
        if !left.remove(&a) {
            continue;
        }
        left.remove(&b);
        let transposed = is_stored_in_out(c, &tensor);
        let &[rows, columns] = tensor.shape.as_slice() else {
            return Err(adapter.unfit(&a, "its module has no matrix").into());
        };
        let (n_out, n_in) = if transposed { (columns, rows) } else { (rows, columns) };
        let a_values = adapter.read(&a, |shape| shape.len() == 2 && shape[1] == n_in)?;
        let rank = a_values.len() / n_in.max(1);
        let b_values = adapter.read(&b, |shape| shape == [n_out, rank])?;
        let magnitude = match left.remove(&m) {
            true => Some(adapter.read(&m, |shape| shape.iter().product::<usize>() == n_out)?),
            false => None,
        };
        let scale = adapter.scale(module, rank);
        let low_rank = LowRank { a: &a_values, b: &b_values, scale, magnitude: magnitude.as_deref() };
        let mut weight = weights::packed(machine, c, &tensor).into_owned();
        low_rank.add_to(&mut weight, n_out, n_in, transposed);
        weights::unpack_from_whole(machine, c, &tensor, &weight);
    }
    match left.first() {
        None => Ok(()),
        Some(tensor) => Err(adapter.unfit(tensor, "the model has no such module, or it is not merged").into()),
    }
}

/// Whether the product that uses a weight takes it as `[in, out]`.
pub(crate) fn is_stored_in_out(c: &Compiled, w: &Tensor) -> bool {
    let uses = c.program.instrs.iter().find(|i| matches!(i.op, Op::MatMul(_)) && i.reads.get(1) == Some(&w.value));
    matches!(uses.map(|i| &i.op), Some(Op::MatMul(m)) if !m.trans_b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_rank_product_is_added_in_both_orientations_and_rows_get_their_lengths() {
        // W = [[1, 2, 3], [4, 5, 6]], B A = [[1], [2]] [[1, 0, -1]].
        let low_rank = LowRank { a: &[1.0, 0.0, -1.0], b: &[1.0, 2.0], scale: 0.5, magnitude: None };
        let mut weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut transposed = [1.0, 4.0, 2.0, 5.0, 3.0, 6.0];

        low_rank.add_to(&mut weight, 2, 3, false);
        low_rank.add_to(&mut transposed, 2, 3, true);

        assert_eq!(weight, [1.5, 2.0, 2.5, 5.0, 5.0, 5.0]);
        assert_eq!(transposed, [1.5, 5.0, 2.0, 5.0, 2.5, 5.0]);
        let with_lengths = LowRank { magnitude: Some(&[2.0, 3.0]), scale: 0.0, ..low_rank };
        with_lengths.add_to(&mut weight, 2, 3, false);
        for (row, length) in weight.chunks(3).zip([2.0f32, 3.0]) {
            assert!((row.iter().map(|x| x * x).sum::<f32>().sqrt() - length).abs() < 1e-6, "{row:?}");
        }
    }
}
