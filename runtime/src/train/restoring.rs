//! Tensors of a checkpoint, read into a machine.
//!
//! A run in bf16 or FP8 holds frozen matrices beside adapters as words of two bf16 or four e4m3 numbers. A checkpoint of a run in another
//! number format, or of an early version, has them in another form. Each form is read as the other ones: rounding gives the numbers that
//! the run's products use of those in the checkpoint.

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
    /// In words of this packing, or as f32; the machine holds it in the other way that is named.
    Other {
        /// In the checkpoint.
        there: Option<Packing>,
        /// In the machine.
        here: Option<Packing>,
    },
}

/// Packings whose words each have numbers alone, without scales.
const OF_NUMBERS: [Packing; 2] = [Packing::Bf16, Packing::E4m3];

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
    let here = c.program.param_of(tensor.value).and_then(|param| param.packing);
    let is_convertible = here.map_or(!tensor.trainable, |packing| OF_NUMBERS.contains(&packing));
    if rows != n_rows || !is_convertible {
        return Ok(None);
    }
    let weights = here.map_or(n_columns, |packing| packing.weights(n_columns));
    let fits = |there: &Option<Packing>| match there {
        None => weights == columns,
        Some(packing) => packing.has_blocks(0, weights) && packing.words(weights) == columns,
    };
    let there = [None].into_iter().chain(OF_NUMBERS.map(Some)).find(fits);
    Ok(there.map(|there| Form::Other { there, here }))
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
        Form::Other { there, here } => read_converted(checkpoint, name, there, here, region, out),
    }
}

/// Reads a box of a tensor in the machine's form from one in another form.
fn read_converted(
    checkpoint: &Checkpoint,
    name: &str,
    there: Option<Packing>,
    here: Option<Packing>,
    region: &TensorBox,
    out: &mut [f32],
) -> Result<(), CheckpointError> {
    let weights_of = |n: usize| here.map_or(n, |packing| packing.weights(n));
    let (start, n_columns) = (weights_of(region.offset[1]), weights_of(region.extent[1]));
    // A rank's columns may begin or end within a word.
    let of_word = there.map_or(1, Packing::n_weights);
    let (first, end) = (start / of_word, (start + n_columns).div_ceil(of_word));
    let mut stored = region.clone();
    (stored.offset[1], stored.extent[1]) = (first, end - first);
    let mut words = vec![0u32; stored.n_elements()];
    checkpoint.read_into(name, &stored, bytemuck::cast_slice_mut(&mut words))?;
    let skipped = start - first * of_word;
    let rows = out.par_chunks_mut(region.extent[1]).zip(words.par_chunks(end - first));
    rows.for_each(|(out, words)| {
        let mut weights = vec![0.0f32; words.len() * of_word];
        match there {
            Some(packing) => packed::unpack(packing, words, &mut weights),
            None => weights.copy_from_slice(bytemuck::cast_slice(words)),
        }
        let weights = &weights[skipped..skipped + n_columns];
        match here {
            Some(packing) => {
                let blocks = bytemuck::cast_slice_mut(out).chunks_mut(packing.n_words());
                let each = blocks.zip(weights.chunks(packing.n_weights()));
                each.for_each(|(words, block)| packed::pack(packing, block, 0.0, words));
            }
            None => out.copy_from_slice(weights),
        }
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
    use phalanx_storage::checkpoint::checkpoint_meta::CheckpointMeta;
    use phalanx_storage::checkpoint::piece::Piece;
    use phalanx_storage::checkpoint::writer::CheckpointWriter;
    use phalanx_storage::hf::dtype::Dtype;
    use phalanx_strategies::compile::{Offload, Parallel, StepSpec, compile_step};
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
            offload: Offload::default(),
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
            let packing = c.program.param_of(tensor.value).unwrap().packing;
            for (index, at) in tensor.runs().flat_map(|(index, at)| (index..).zip(at)) {
                let mut numbers = vec![elements[at]; packing.map_or(1, Packing::n_weights)];
                if let Some(packing) = packing {
                    packed::unpack(packing, &[elements[at].to_bits()], &mut numbers);
                }
                let first = index * numbers.len();
                found.extend((first..).zip(numbers).map(|(i, number)| ((tensor.name.clone(), i), number)));
            }
        }
        found
    }

    /// A checkpoint of the frozen tensors, as a run on one rank saves them.
    fn saved(precision: Precision, dir: &std::path::Path) -> Checkpoint {
        let c = compiled(&*devices::host(), MeshRank::default(), precision);
        let bytes = |tensor: &Tensor| -> Vec<u8> {
            let packing = c.program.param_of(tensor.value).unwrap().packing;
            let word = |i: usize| {
                let mut words = [element(&tensor.name, i).to_bits()];
                if let Some(packing) = packing {
                    let n = packing.n_weights();
                    let numbers: Vec<f32> = (n * i..n * (i + 1)).map(|i| element(&tensor.name, i)).collect();
                    packed::pack(packing, &numbers, 0.0, &mut words);
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

    /// Each rank of a mesh that cuts vectors computes in bf16, and holds the same numbers.
    #[test]
    fn frozen_weights_in_fp8_are_read_in_every_form_and_rounded_from_each() {
        let dir = tempfile::tempdir().unwrap();
        let of = |precision, name: &str| saved(precision, &dir.path().join(name));
        let (bf16, fp8) = (of(Precision::Bf16, "bf16"), of(Precision::Fp8, "fp8"));
        let rounded = held(&fp8, MeshRank::default(), Precision::Fp8);
        let is_fp8 = |(name, _): &&(String, usize)| name.contains("self_attn");

        let [back, from_bf16] = [(&fp8, Precision::Bf16), (&bf16, Precision::Fp8)]
            .map(|(checkpoint, precision)| held(checkpoint, MeshRank::default(), precision));

        assert!(back == rounded && from_bf16 == rounded);
        assert!(rounded != held(&bf16, MeshRank::default(), Precision::Bf16));
        let mesh = Mesh { tp: 2, ..Mesh::ONE };
        let cut: BTreeMap<_, _> = (0..2).flat_map(|rank| held(&fp8, MeshRank { mesh, rank }, Precision::Fp8)).collect();
        let n_other = rounded.keys().filter(is_fp8).filter(|key| cut[*key] != rounded[*key]).count();
        assert_eq!((n_other, rounded.keys().filter(is_fp8).count() > 0), (0, true));
    }

    #[test]
    fn other_shapes_and_trained_weights_have_no_other_form() {
        let dir = tempfile::tempdir().unwrap();
        let wide = saved(Precision::F32, dir.path());
        let c = compiled(&*devices::host(), MeshRank::default(), Precision::Bf16);
        let tensors = weights::parameters(&c);
        let q = tensors.iter().find(|tensor| tensor.name.ends_with("q_proj.weight")).unwrap();
        let with = |shape: &[usize], trainable| Tensor { shape: shape.to_vec(), trainable, ..q.clone() };

        let (f32, bf16) = (None, Some(Packing::Bf16));
        assert_eq!(form(&wide, q, &c), Ok(Some(Form::Other { there: f32, here: bf16 })));
        assert_eq!(form(&wide, &with(&[32, 15], false), &c), Ok(None));
        assert_eq!(form(&wide, &with(&[16, 16], false), &c), Ok(None));
        let whole = compiled(&*devices::host(), MeshRank::default(), Precision::F32);
        let twice = |trainable| form(&wide, &with(&[32, 64], trainable), &whole);
        assert_eq!((twice(false), twice(true)), (Ok(Some(Form::Other { there: bf16, here: f32 })), Ok(None)));
    }
}
