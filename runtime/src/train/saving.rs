//! Checkpoints of a run: what belongs to its state, and from which one it goes on.

use super::error::JobError;
use super::export::JOB_YAML;
use super::team::Team;
use super::weights::{self, Tensor};
use crate::checkpoint::catalog::latest_valid;
use crate::checkpoint::reader::Checkpoint;
use crate::checkpoint::region::Region;
use crate::checkpoint::writer::{CheckpointMeta, CheckpointWriter, Piece, Seat};
use crate::config::output::Resume;
use crate::cpu::CpuMachine;
use crate::hf::dtype::Dtype;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::loss_scale::LossScale;
use phalanx_strategies::mesh::Axis;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Where a run is, besides its weights: all that the next step depends on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    /// Steps that were completed.
    pub(crate) step: u64,
    /// Updates that were made: fp16 runs leave some out.
    pub(crate) n_updates: u64,
    pub(crate) loss_scale: LossScale,
}

/// Name of the extra that holds [`TrainerState`].
const STATE: &str = "trainer.json";

/// Saves and restores the state of one run.
pub(crate) struct Saving {
    root: PathBuf,
    job: String,
    keep: Option<usize>,
    /// Files that make a checkpoint self-contained: configuration, model configuration, tokenizer.
    extras: Vec<(String, Vec<u8>)>,
}

/// A box of a tensor as it goes into a checkpoint.
struct SavedBox<'a> {
    name: String,
    /// Shape of the whole tensor, offset and extent of the box.
    dims: [Vec<u64>; 3],
    values: Cow<'a, [f32]>,
}

impl SavedBox<'_> {
    fn piece(&self) -> Piece<'_> {
        let [global_shape, offset, shape] = &self.dims;
        let bytes = bytemuck::cast_slice(&self.values);
        Piece { name: &self.name, dtype: Dtype::F32, global_shape, offset, shape, bytes }
    }
}

impl Saving {
    pub(crate) fn new(output_dir: &Path, keep: Option<usize>, extras: Vec<(String, Vec<u8>)>) -> Saving {
        let job = output_dir.file_name().map_or("job".into(), |n| n.to_string_lossy().into_owned());
        Saving { root: output_dir.join("checkpoints"), job, keep, extras }
    }

    /// The checkpoint to go on from, with a sentence about each that was passed over.
    pub(crate) fn find(&self, resume: &Resume) -> Result<(Option<PathBuf>, Vec<String>), JobError> {
        match resume {
            Resume::Never => Ok((None, Vec::new())),
            Resume::Auto => {
                let (found, skipped) = latest_valid(&self.root)?;
                let warn = |s: crate::checkpoint::catalog::Skipped| {
                    format!("skipped checkpoint {}: {}", s.path.display(), s.reason)
                };
                Ok((found.map(|c| c.id().path.clone()), skipped.into_iter().map(warn).collect()))
            }
            Resume::Path(path) => Ok((Some(path.clone()), Vec::new())),
        }
    }

    /// Files that make a checkpoint self-contained.
    pub(crate) fn extras(&self) -> &[(String, Vec<u8>)] {
        &self.extras
    }

    pub(crate) fn save(
        &self,
        machine: &CpuMachine,
        c: &Compiled,
        state: &TrainerState,
        team: &mut Team,
    ) -> Result<PathBuf, JobError> {
        let saved = weights::saved_parameters(c).into_iter().chain(weights::saved_optimizer_state(c));
        let boxes: Vec<SavedBox<'_>> = saved
            .map(|t| {
                let dims = [&t.shape, &t.held.offset, &t.held.extent].map(|d| d.iter().map(|n| *n as u64).collect());
                SavedBox { dims, values: weights::packed(machine, c, &t), name: t.name }
            })
            .collect();
        let pieces: Vec<Piece<'_>> = boxes.iter().map(SavedBox::piece).collect();
        let state_json = serde_json::to_vec_pretty(state).map_err(|e| JobError::Unusable(e.to_string()))?;
        let mut extras: Vec<(&str, &[u8])> = Vec::new();
        if team.leads() {
            extras.push((STATE, &state_json));
            extras.extend(self.extras.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())));
        }
        let sizes = team.place.mesh;
        let mesh = Axis::ALL.map(|axis| (axis.name().to_string(), sizes.axis(axis) as u64));
        let meta =
            CheckpointMeta { job: self.job.clone(), step: state.step, generation: 0, mesh: BTreeMap::from(mesh) };
        let writer = CheckpointWriter::new(&self.root);
        let seat = Seat { writer: team.place.rank as u32, n_writers: team.n_ranks() as u32 };
        let id = writer.save_together(&meta, seat, &pieces, &extras, |value| team.sum(value))?;
        if let Some(keep) = self.keep.filter(|_| team.leads()) {
            writer.retain(keep)?;
        }
        Ok(id.path)
    }

    pub(crate) fn restore(
        &self,
        path: &Path,
        machine: &mut CpuMachine,
        c: &Compiled,
    ) -> Result<(TrainerState, Vec<String>), JobError> {
        let checkpoint = Checkpoint::open(path)?;
        let mismatch = |reason: String| JobError::Mismatch { path: path.to_owned(), reason };
        for tensor in weights::parameters(c).iter().chain(&weights::optimizer_state(c)) {
            let found = &checkpoint.tensor(&tensor.name).map_err(|e| mismatch(e.to_string()))?.shape;
            if !found.iter().copied().eq(tensor.shape.iter().map(|n| *n as u64)) {
                let (name, ours) = (&tensor.name, &tensor.shape);
                return Err(mismatch(format!("`{name}` has shape {found:?} there and {ours:?} here")));
            }
            read(&checkpoint, tensor, machine, c).map_err(|reason| mismatch(reason.to_string()))?;
        }
        let state = checkpoint.extra(STATE)?;
        let state = serde_json::from_slice(&state).map_err(|e| mismatch(format!("{STATE}: {e}")))?;
        let then = checkpoint.extra(JOB_YAML).unwrap_or_default();
        let now = self.extras.iter().find(|(name, _)| name == JOB_YAML).map(|(_, bytes)| bytes.as_slice());
        Ok((state, changed_keys(&then, now.unwrap_or_default())))
    }
}

/// Keys of the configuration that differ from those that the checkpoint was saved under: a run that goes on with them
/// is not the run that was begun, and a person should know.
fn changed_keys(then: &[u8], now: &[u8]) -> Vec<String> {
    type Keys = BTreeMap<String, serde_yaml_ng::Value>;
    let parse = |yaml: &[u8]| serde_yaml_ng::from_slice::<Keys>(yaml).unwrap_or_default();
    let (then, now) = (parse(then), parse(now));
    // Where results go and what is shown does not change what is computed.
    let shown =
        ["output_dir", "resume_from_checkpoint", "logging_steps", "save_steps", "save_total_limit", "threads", "trace"];
    let keys: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    keys.into_iter().filter(|k| !shown.contains(&k.as_str()) && then.get(*k) != now.get(*k)).cloned().collect()
}

/// Reads one tensor of a checkpoint into its place.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    machine: &mut CpuMachine,
    c: &Compiled,
) -> Result<(), crate::checkpoint::error::CheckpointError> {
    let dims = |d: &[usize]| d.iter().map(|n| *n as u64).collect();
    let region = Region { offset: dims(&tensor.held.offset), shape: dims(&tensor.held.extent) };
    if tensor.elements.len() == tensor.held.n_elements() {
        let elements = &mut machine.write::<f32>(c, tensor.value)[tensor.elements.clone()];
        return checkpoint.read_into(&tensor.name, &region, bytemuck::cast_slice_mut(elements));
    }
    let mut values = vec![0.0f32; tensor.held.n_elements()];
    checkpoint.read_into(&tensor.name, &region, bytemuck::cast_slice_mut(&mut values))?;
    weights::unpack(machine, c, tensor, &values);
    Ok(())
}
