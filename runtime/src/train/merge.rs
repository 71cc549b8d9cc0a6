//! Adds adapters into the weights that they adapt.
//!
//! `W += s B A` (`W^T` where the model stores `[in, out]`), summed in f64; with DoRA, rows are then scaled to the lengths `m`.
//! `W` of an embedding is `[vocabulary, out]`, and `B` may have a bias, which is scaled too. Modules that were trained whole replace
//! those of the base model.
//!
//! Sources: Hu et al. 2021, LoRA, §4.1 (arXiv:2106.09685); Liu et al. 2024, DoRA, §4.1 (arXiv:2402.09353), with the lengths of
//! rows as PEFT computes them.

use super::adapter_settings::AdapterSettings;
use super::weights::{self, Tensor};
use crate::error::JobError;
use crate::error::merge::MergeError;
use phalanx_device::Machine;
use phalanx_storage::hf::adapter::ADAPTER_WEIGHTS;
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::reference::is_copy;
use phalanx_strategies::program::Op;
use rayon::prelude::*;
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
    settings: AdapterSettings,
}

const PREFIX: &str = "base_model.model.";

impl AdapterWeights {
    /// Opens an adapter and reads its settings.
    ///
    /// # Errors
    /// When it cannot be read, or computes something that this build does not.
    pub(crate) fn open(dir: &Path) -> Result<AdapterWeights, JobError> {
        let settings = AdapterSettings::read(dir)?;
        let source = TensorSource::open_file(&dir.join(ADAPTER_WEIGHTS))?;
        Ok(AdapterWeights { dir: dir.to_owned(), source, settings })
    }

    /// Rows of the embedding or head that the adapter has whole: as many as its job had tokens.
    pub(crate) fn vocabulary(&self) -> Option<usize> {
        const MODULES: [&str; 3] = ["embed_tokens", "wte", "lm_head"];
        let is_vocabulary = |name: &&str| {
            let path = name.strip_suffix(".weight").map(|path| path.strip_suffix(".base_layer").unwrap_or(path));
            path.is_some_and(|path| MODULES.contains(&path.rsplit('.').next().unwrap_or_default()))
        };
        let rows = |name: &str| self.source.shape(name).ok()?.first().copied();
        self.source.names().filter(is_vocabulary).filter_map(rows).max()
    }

    /// Whether it belongs to a model that gives scores.
    pub(crate) fn is_classifier(&self) -> bool {
        self.settings.is_classifier
    }

    fn unfit(&self, tensor: &str, why: impl Into<String>) -> JobError {
        MergeError::Tensor { dir: self.dir.clone(), tensor: tensor.to_owned(), why: why.into() }.into()
    }

    fn lacks(&self, tensor: &str, why: &'static str) -> JobError {
        MergeError::Lacks { dir: self.dir.clone(), tensor: tensor.to_owned(), why }.into()
    }

    /// A tensor of this shape.
    fn read(&self, name: &str, fits: impl FnOnce(&[usize]) -> bool) -> Result<Vec<f32>, JobError> {
        let shape = self.source.shape(name)?;
        if !fits(shape) {
            return Err(self.unfit(name, format!("its shape is {shape:?}")));
        }
        let mut values = vec![0.0; shape.iter().product()];
        self.source.read_into(name, &mut values)?;
        Ok(values)
    }
}

/// Merges an adapter into the weights of a machine, whose program has none.
///
/// # Errors
/// When a tensor of the adapter has no place in the model or another shape, or is missing; the weights are then those of neither.
pub(crate) fn merge(machine: &mut dyn Machine, c: &Compiled, adapter: &AdapterWeights) -> Result<(), JobError> {
    let left = adapter.source.names().map(str::to_owned).collect();
    let mut merge = Merge { machine, c, adapter, left };
    // A reference is the model without adapters.
    for tensor in weights::parameters(c).into_iter().filter(|tensor| !is_copy(&tensor.name)) {
        merge.replace(&tensor)?;
        match tensor.name.strip_suffix(".weight") {
            Some(module) => merge.add_product(module, &tensor)?,
            None => merge.add_bias(&tensor)?,
        }
    }
    match merge.left.first() {
        None => Ok(()),
        Some(tensor) => Err(adapter.unfit(tensor, "the model has no such module, or it is not merged")),
    }
}

/// A merge that is going on.
struct Merge<'a> {
    machine: &'a mut dyn Machine,
    c: &'a Compiled,
    adapter: &'a AdapterWeights,
    /// Tensors of the adapter that were not used yet.
    left: BTreeSet<String>,
}

impl Merge<'_> {
    /// Takes a whole tensor from the adapter: of a module that was trained whole, or of an adapted one, whose own weights PEFT
    /// stores beside the adapters of embeddings and heads.
    fn replace(&mut self, tensor: &Tensor) -> Result<(), JobError> {
        let (module, kind) = tensor.name.rsplit_once('.').unwrap_or((&tensor.name, ""));
        let is_saved = self.adapter.settings.saves(module);
        let whole = format!("{PREFIX}{}", tensor.name);
        let names = [whole.clone(), format!("{PREFIX}{module}.base_layer.{kind}")];
        let Some(name) = names.iter().find(|name| self.left.remove(*name)) else {
            return match is_saved {
                true => Err(self.adapter.lacks(&whole, "modules_to_save names its module")),
                false => Ok(()),
            };
        };
        if is_saved {
            self.check_untied(name, tensor)?;
        }
        let values = self.adapter.read(name, |shape| shape == tensor.shape)?;
        weights::unpack_from_whole(self.machine, self.c, tensor, &values);
        Ok(())
    }

    fn add_product(&mut self, module: &str, tensor: &Tensor) -> Result<(), JobError> {
        let Some(matrices) = self.matrices(module, tensor)? else { return Ok(()) };
        let Matrices { a, b, is_table } = matrices;
        let transposed = is_table || is_stored_in_out(self.c, tensor);
        let &[rows, columns] = tensor.shape.as_slice() else {
            return Err(self.adapter.unfit(&a, "its module has no matrix"));
        };
        let (n_out, n_in) = if transposed { (columns, rows) } else { (rows, columns) };
        let adapter = self.adapter;
        let rank = adapter.settings.rank_of(module);
        for (name, expected) in [(&a, [rank, n_in]), (&b, [n_out, rank])] {
            let shape = adapter.source.shape(name)?;
            if shape != expected {
                let why = format!("its shape is {shape:?}, and that of rank {rank} is {expected:?}");
                return Err(adapter.unfit(name, why));
            }
        }
        let [a, b] = [a, b].map(|name| adapter.read(&name, |_| true));
        let magnitude = self.magnitude(module, n_out)?;
        let scale = adapter.settings.scale_of(module);
        let low_rank = LowRank { a: &a?, b: &b?, scale, magnitude: magnitude.as_deref() };
        let mut weight = weights::packed(self.machine, self.c, tensor).into_owned();
        low_rank.add_to(&mut weight, n_out, n_in, transposed);
        weights::unpack_from_whole(self.machine, self.c, tensor, &weight);
        Ok(())
    }

    /// Names of the matrices of a module, if it has some.
    fn matrices(&mut self, module: &str, tensor: &Tensor) -> Result<Option<Matrices>, JobError> {
        let named = |part: &str| format!("{PREFIX}{module}.{part}");
        let is_table = is_table(self.c, tensor);
        let [a, b] = match is_table {
            true => ["lora_embedding_A", "lora_embedding_B"].map(named),
            false => ["lora_A.weight", "lora_B.weight"].map(named),
        };
        let adapter = self.adapter;
        let adapts = adapter.settings.adapts(module);
        let can_be_adapted = tensor.shape.len() == 2;
        match (self.left.remove(&a), self.left.remove(&b)) {
            (false, false) if adapts == Some(true) && can_be_adapted => {
                Err(adapter.lacks(&a, "target_modules names its module"))
            }
            (false, false) => Ok(None),
            (true, true) if adapts == Some(false) => {
                Err(adapter.unfit(&a, "target_modules and the keys beside it leave out its module"))
            }
            (true, true) => {
                if is_table {
                    self.check_untied(&a, tensor)?;
                }
                Ok(Some(Matrices { a, b, is_table }))
            }
            (true, false) => Err(adapter.lacks(&b, "it has the other matrix")),
            (false, true) => Err(adapter.lacks(&a, "it has the other matrix")),
        }
    }

    /// The lengths of the rows of an adapted module.
    fn magnitude(&mut self, module: &str, n_out: usize) -> Result<Option<Vec<f32>>, JobError> {
        let name = format!("{PREFIX}{module}.lora_magnitude_vector");
        let with_weight = format!("{name}.weight");
        let found = [name.clone(), with_weight].into_iter().find(|name| self.left.remove(name));
        match (found, self.adapter.settings.use_dora) {
            (None, false) => Ok(None),
            (None, true) => Err(self.adapter.lacks(&name, "`use_dora` is true")),
            (Some(name), false) => Err(self.adapter.unfit(&name, "`use_dora` is not true")),
            (Some(name), true) => self.adapter.read(&name, |shape| shape.iter().product::<usize>() == n_out).map(Some),
        }
    }

    /// Adds the bias of a module's matrix B.
    fn add_bias(&mut self, tensor: &Tensor) -> Result<(), JobError> {
        let Some(module) = tensor.name.strip_suffix(".bias") else { return Ok(()) };
        let name = format!("{PREFIX}{module}.lora_B.bias");
        if !self.left.remove(&name) {
            return Ok(());
        }
        if !self.adapter.settings.lora_bias {
            return Err(self.adapter.unfit(&name, "`lora_bias` is not true"));
        }
        let added = self.adapter.read(&name, |shape| shape == tensor.shape)?;
        let scale = self.adapter.settings.scale_of(module);
        let mut bias = weights::packed(self.machine, self.c, tensor).into_owned();
        bias.iter_mut()
            .zip(added)
            .for_each(|(bias, added)| *bias = (f64::from(*bias) + scale * f64::from(added)) as f32);
        weights::unpack_from_whole(self.machine, self.c, tensor, &bias);
        Ok(())
    }

    /// PEFT changes the embedding and leaves the head as it is, which one weight for both cannot do.
    fn check_untied(&self, name: &str, tensor: &Tensor) -> Result<(), JobError> {
        match is_table(self.c, tensor) && is_weight(self.c, tensor) {
            true => Err(self.adapter.unfit(name, "the model also uses this weight as its head")),
            false => Ok(()),
        }
    }
}

/// Names of the two matrices of a module.
struct Matrices {
    a: String,
    b: String,
    /// The module is an embedding.
    is_table: bool,
}

/// Whether a tensor is the table of an embedding.
fn is_table(c: &Compiled, w: &Tensor) -> bool {
    c.program.instrs.iter().any(|i| matches!(i.op, Op::Embedding(_)) && i.reads.get(1) == Some(&w.value))
}

/// Whether a product uses a tensor.
fn is_weight(c: &Compiled, w: &Tensor) -> bool {
    c.program.instrs.iter().any(|i| matches!(i.op, Op::MatMul(_)) && i.reads.get(1) == Some(&w.value))
}

/// Whether the product that uses a weight takes it as `[in, out]`.
pub(crate) fn is_stored_in_out(c: &Compiled, w: &Tensor) -> bool {
    let uses = c.program.instrs.iter().find(|i| matches!(i.op, Op::MatMul(_)) && i.reads.get(1) == Some(&w.value));
    matches!(uses.map(|i| &i.op), Some(Op::MatMul(m)) if !m.trans_b)
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod adapter_tests;

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
