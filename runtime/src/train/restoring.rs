//! Tensors of a checkpoint, read into a machine.
//!
//! A run in bf16 holds frozen matrices beside adapters as words of two bf16 numbers. A checkpoint of a run in another number format,
//! or of an early version, has them as f32. Each form is read as the other one: rounding gives the numbers that products in bf16
//! use of the f32 ones.

use super::weights::{self, Tensor};
use phalanx_device::span::STAGING_BYTES;
use phalanx_device::{Machine, packed};
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::Packing;
use rayon::prelude::*;

/// How a checkpoint holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As the machine does.
    Same,
    /// As f32; the machine holds words of bf16.
    Wide,
    /// As words of bf16; the machine holds f32.
    Narrow,
}

/// How a checkpoint holds a tensor of a machine, unless their shapes differ.
///
/// # Errors
/// When the checkpoint has no such tensor.
pub(super) fn form(checkpoint: &Checkpoint, tensor: &Tensor, c: &Compiled) -> Result<Option<Form>, CheckpointError> {
    let (found, ours) = (&checkpoint.tensor(&tensor.name)?.shape, &tensor.shape);
    if found == ours {
        return Ok(Some(Form::Same));
    }
    let (&[rows, columns], &[n_rows, n_columns]) = (&found[..], &ours[..]) else { return Ok(None) };
    let packing = c.program.param_of(tensor.value).and_then(|param| param.packing);
    let (form, words, weights) = match packing {
        Some(Packing::Bf16) => (Form::Wide, n_columns, columns),
        None if !tensor.trainable => (Form::Narrow, columns, n_columns),
        _ => return Ok(None),
    };
    Ok((rows == n_rows && weights == Packing::Bf16.weights(words)).then_some(form))
}

/// Reads one tensor of a checkpoint into the machine.
///
/// # Errors
/// When the checkpoint has no such tensor, or cannot be read.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    machine: &mut dyn Machine,
    c: &Compiled,
) -> Result<(), CheckpointError> {
    // Reading a box tells how the shapes differ, if they do.
    let form = form(checkpoint, tensor, c)?.unwrap_or(Form::Same);
    let held = &tensor.held;
    let is_plain = form == Form::Same && tensor.elements.len() == held.n_elements();
    if let Some(bytes) = machine.host_mut(c, tensor.value).filter(|_| is_plain) {
        let width = size_of::<f32>();
        let to = &mut bytes[tensor.elements.start * width..tensor.elements.end * width];
        return checkpoint.read_into(&tensor.name, &held.region, to);
    }
    let mut staging = Vec::new();
    for slab in slabs(&held.region) {
        staging.resize(slab.n_elements(), 0.0f32);
        read_box(checkpoint, &tensor.name, form, &slab, &mut staging)?;
        let mut first = 0;
        for run in held.runs_of(&slab) {
            machine.write(c, tensor.value, run.start, &staging[first..first + run.len()]);
            first += run.len();
        }
    }
    Ok(())
}

/// Whether a checkpoint has the elements of a tensor that the machine holds.
///
/// # Errors
/// As [`read`].
pub(super) fn is_equal(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    machine: &dyn Machine,
    c: &Compiled,
) -> Result<bool, CheckpointError> {
    let form = form(checkpoint, tensor, c)?.unwrap_or(Form::Same);
    let mut saved = vec![0.0f32; tensor.held.n_elements()];
    read_box(checkpoint, &tensor.name, form, &tensor.held.region, &mut saved)?;
    let held = weights::packed(machine, c, tensor);
    Ok(bytemuck::cast_slice::<f32, u8>(&saved) == bytemuck::cast_slice::<f32, u8>(&held))
}

/// Reads a box of the machine's form.
fn read_box(
    checkpoint: &Checkpoint,
    name: &str,
    form: Form,
    region: &TensorBox,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    match form {
        Form::Same => checkpoint.read_into(name, region, bytemuck::cast_slice_mut(out)),
        Form::Wide => read_rounded(checkpoint, name, region, bytemuck::cast_slice_mut(out)),
        Form::Narrow => read_widened(checkpoint, name, region, out),
    }
}

/// Reads a box of words from a tensor of f32.
fn read_rounded(
    checkpoint: &Checkpoint,
    name: &str,
    region: &TensorBox,
    out: &mut [u32],
) -> Result<(), CheckpointError> {
    let mut of_weights = region.clone();
    (of_weights.offset[1], of_weights.extent[1]) =
        (Packing::Bf16.weights(region.offset[1]), Packing::Bf16.weights(region.extent[1]));
    let mut weights = vec![0.0f32; of_weights.n_elements()];
    checkpoint.read_into(name, &of_weights, bytemuck::cast_slice_mut(&mut weights))?;
    let pairs = weights.par_chunks(Packing::Bf16.n_weights());
    out.par_chunks_mut(1).zip(pairs).for_each(|(word, pair)| packed::pack(Packing::Bf16, pair, 0.0, word));
    Ok(())
}

/// Reads a box of f32 from a tensor of words.
fn read_widened(
    checkpoint: &Checkpoint,
    name: &str,
    region: &TensorBox,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    // A rank's columns may begin or end within a word.
    let (first, end) = (region.offset[1] / 2, (region.offset[1] + region.extent[1]).div_ceil(2));
    let mut of_words = region.clone();
    (of_words.offset[1], of_words.extent[1]) = (first, end - first);
    let mut words = vec![0u32; of_words.n_elements()];
    checkpoint.read_into(name, &of_words, bytemuck::cast_slice_mut(&mut words))?;
    let skipped = region.offset[1] - Packing::Bf16.weights(first);
    let rows = out.par_chunks_mut(region.extent[1]).zip(words.par_chunks(end - first));
    rows.for_each(|(out, words)| {
        let mut weights = vec![0.0f32; Packing::Bf16.weights(words.len())];
        packed::unpack(Packing::Bf16, words, &mut weights);
        out.copy_from_slice(&weights[skipped..skipped + out.len()]);
    });
    Ok(())
}

/// Splits a box into whole rows of its first dim, each part at most as large as the staging buffer unless one row is
/// larger.
fn slabs(region: &TensorBox) -> Vec<TensorBox> {
    let Some(n_rows) = region.extent.first().copied() else { return vec![region.clone()] };
    let row_bytes = region.extent[1..].iter().product::<usize>().max(1) * size_of::<f32>();
    let n_at_once = (STAGING_BYTES / row_bytes).max(1);
    let slab = |first: usize| {
        let mut slab = region.clone();
        slab.offset[0] += first;
        slab.extent[0] = n_at_once.min(n_rows - first);
        slab
    };
    (0..n_rows).step_by(n_at_once).map(slab).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices;
    use phalanx_device::{Backing, Device};
    use phalanx_storage::checkpoint::writer::{CheckpointMeta, CheckpointWriter, Piece};
    use phalanx_storage::hf::dtype::Dtype;
    use phalanx_strategies::compile::{Parallel, StepSpec, compile_step};
    use phalanx_strategies::mesh::{Mesh, MeshRank};
    use phalanx_strategies::model::{BatchShape, Head, HfConfig, ModelConfig};
    use phalanx_strategies::optimizer::{OptimizerSpec, Sgd};
    use phalanx_strategies::passes::lora::LoraSpec;
    use phalanx_strategies::passes::precision::Precision;
    use phalanx_strategies::passes::recompute::Recompute;
    use phalanx_strategies::program::Program;
    use serde_json::json;
    use std::collections::BTreeMap;

    /// A step with adapters, of a model in which two tensor-parallel ranks have 17 columns of a matrix each.
    fn compiled(device: &dyn Device, mesh_rank: MeshRank, precision: Precision) -> Compiled {
        let config = json!({
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 34, "num_hidden_layers": 2, "vocab_size": 24,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        });
        let model = ModelConfig::try_from(&serde_json::from_value::<HfConfig>(config).unwrap()).unwrap();
        let target_modules = vec!["q_proj".into()];
        let spec = StepSpec {
            n_microbatches: 2,
            precision,
            recompute: Recompute::None,
            lora: Some(LoraSpec { rank: 2, alpha: 2.0, target_modules, ..LoraSpec::default() }),
            optimizer: OptimizerSpec::Sgd(Sgd::default()),
            max_grad_norm: None,
            offload_optimizer: false,
            parallel: Parallel::default(),
        };
        let forward = model.forward(BatchShape { n_rows: 1, seq_len: 8 }, Head::Loss).unwrap();
        compile_step(Program { mesh_rank, ..forward }, &spec, device.target()).unwrap()
    }

    /// Element `i` of a tensor, between two numbers of bf16.
    fn element(name: &str, i: usize) -> f32 {
        0.1 + ((i * 7 + name.len() * 13) % 251) as f32
    }

    /// What a machine holds of the frozen tensors after reading a checkpoint: name and index of a weight, its number.
    fn held(checkpoint: &Checkpoint, mesh_rank: MeshRank, precision: Precision) -> BTreeMap<(String, usize), f32> {
        let device = devices::host();
        let c = compiled(&*device, mesh_rank, precision);
        let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
        let mut found = BTreeMap::new();
        for tensor in weights::parameters(&c).iter().filter(|tensor| !tensor.trainable) {
            read(checkpoint, tensor, &mut *machine, &c).unwrap();
            assert!(is_equal(checkpoint, tensor, &*machine, &c).unwrap());
            let elements = weights::elements(&*machine, &c, tensor);
            let is_packed = c.program.param_of(tensor.value).unwrap().packing.is_some();
            for (index, at) in tensor.runs().flat_map(|(index, at)| (index..).zip(at)) {
                let mut pair = [elements[at]; 2];
                if is_packed {
                    packed::unpack(Packing::Bf16, &[elements[at].to_bits()], &mut pair);
                }
                let n = if is_packed { 2 } else { 1 };
                found.extend((0..n).map(|i| ((tensor.name.clone(), n * index + i), pair[i])));
            }
        }
        found
    }

    /// A checkpoint of the frozen tensors, as a run on one rank saves them.
    fn saved(precision: Precision, dir: &std::path::Path) -> Checkpoint {
        let c = compiled(&*devices::host(), MeshRank::default(), precision);
        let bytes = |tensor: &Tensor| -> Vec<u8> {
            let is_packed = c.program.param_of(tensor.value).unwrap().packing.is_some();
            let word = |i: usize| {
                let mut words = [element(&tensor.name, i).to_bits()];
                if is_packed {
                    let pair = [2 * i, 2 * i + 1].map(|i| element(&tensor.name, i));
                    packed::pack(Packing::Bf16, &pair, 0.0, &mut words);
                }
                words[0]
            };
            (0..tensor.shape.iter().product()).flat_map(|i| word(i).to_le_bytes()).collect()
        };
        let tensors = weights::parameters(&c);
        let frozen = tensors.iter().filter(|tensor| !tensor.trainable).map(|tensor| (tensor, bytes(tensor)));
        let frozen: Vec<(&Tensor, Vec<u8>)> = frozen.collect();
        let pieces: Vec<Piece<'_>> =
            frozen.iter().map(|(t, bytes)| Piece::whole(&t.name, Dtype::F32, &t.shape, bytes)).collect();
        let meta = CheckpointMeta {
            job: "job".into(),
            step: 1,
            generation: 0,
            mesh: BTreeMap::new(),
            verified: false,
            compared: false,
        };
        let id = CheckpointWriter::at(dir).unwrap().save(&meta, &pieces, &[]).unwrap();
        Checkpoint::open(&id.path).unwrap()
    }

    #[test]
    fn frozen_weights_in_one_form_are_read_in_the_other_on_every_mesh() {
        let dir = tempfile::tempdir().unwrap();
        let [wide, narrow] = [(Precision::F32, "wide"), (Precision::Bf16, "narrow")]
            .map(|(precision, name)| saved(precision, &dir.path().join(name)));
        let meshes = [Mesh::ONE, Mesh { tp: 2, ..Mesh::ONE }, Mesh { pp: 2, dp_shard: 3, ..Mesh::ONE }];
        let rounded = held(&narrow, MeshRank::default(), Precision::Bf16);

        for mesh in meshes {
            let all = |checkpoint, precision| -> BTreeMap<_, _> {
                (0..mesh.size()).flat_map(|rank| held(checkpoint, MeshRank { mesh, rank }, precision)).collect()
            };

            assert!(all(&narrow, Precision::F32) == rounded, "{mesh}");
            assert!(all(&narrow, Precision::Bf16) == rounded, "{mesh}");
            let in_bf16 = all(&wide, Precision::Bf16);
            // Of a cut matrix each rank has 17 columns, so it holds f32.
            let is_cut = |name: &str| mesh.tp > 1 && name.ends_with("down_proj.weight");
            let differ = |(key, number): (&(String, usize), &f32)| in_bf16[key] != *number && !is_cut(&key.0);
            let n_other = rounded.iter().filter(|entry| differ(*entry)).count();
            assert!(in_bf16.len() == rounded.len() && n_other == 0, "{n_other} on {mesh}");
        }
    }

    #[test]
    fn other_shapes_and_trained_weights_have_no_other_form() {
        let dir = tempfile::tempdir().unwrap();
        let wide = saved(Precision::F32, dir.path());
        let c = compiled(&*devices::host(), MeshRank::default(), Precision::Bf16);
        let tensors = weights::parameters(&c);
        let q = tensors.iter().find(|tensor| tensor.name.ends_with("q_proj.weight")).unwrap();
        let with = |shape: &[usize], trainable| Tensor { shape: shape.to_vec(), trainable, ..q.clone() };

        assert_eq!(form(&wide, q, &c), Ok(Some(Form::Wide)));
        assert_eq!(form(&wide, &with(&[32, 15], false), &c), Ok(None));
        assert_eq!(form(&wide, &with(&[16, 16], false), &c), Ok(None));
        let whole = compiled(&*devices::host(), MeshRank::default(), Precision::F32);
        let twice = |trainable| form(&wide, &with(&[32, 64], trainable), &whole);
        assert_eq!((twice(false), twice(true)), (Ok(Some(Form::Narrow)), Ok(None)));
    }
}
