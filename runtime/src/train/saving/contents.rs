//! What a rank writes into a checkpoint.

use crate::config::JobConfig;
use crate::error::JobError;
use crate::train::state_copy::StateCopy;
use crate::train::verification::Compared;
use crate::train::weights::{self, Tensor};
use phalanx_device::{CollectiveError, Machine};
use phalanx_storage::checkpoint::background::Snapshot;
use phalanx_storage::checkpoint::piece::Piece;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::compile::Compiled;
use std::borrow::Cow;

/// Which parameters the checkpoints of a run hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// All.
    All,
    /// Those that are trained; `base_model` holds the others, and its digests are in the checkpoint.
    Trained,
}

impl Contents {
    pub(crate) fn of(config: &JobConfig) -> Contents {
        if config.model.begins_with_base() { Contents::Trained } else { Contents::All }
    }

    pub(super) fn has(self, tensor: &Tensor) -> bool {
        self == Contents::All || tensor.trainable
    }

    /// The boxes that a rank saves.
    pub(super) fn saved(self, c: &Compiled) -> impl Iterator<Item = Tensor> {
        let parameters = weights::saved_parameters(c).into_iter().filter(move |tensor| self.has(tensor));
        parameters.chain(weights::saved_optimizer_state(c))
    }

    /// Bytes of a rank's copy of its state while a checkpoint is written beside training.
    pub(crate) fn snapshot_bytes(self, c: &Compiled) -> usize {
        self.saved(c).map(|t| t.held.n_elements() * size_of::<f32>()).sum()
    }
}

/// A box of a tensor as it goes into a checkpoint.
pub(super) struct SavedBox<'a> {
    pub(super) name: String,
    /// Shape of the whole tensor.
    pub(super) shape: Vec<usize>,
    pub(super) region: TensorBox,
    pub(super) values: Cow<'a, [f32]>,
    /// The fingerprint of these elements in the state, if known.
    pub(super) fingerprint: Option<u64>,
}

impl SavedBox<'_> {
    pub(super) fn piece(&self) -> Piece<'_> {
        let TensorBox { offset, extent: shape } = &self.region;
        let (bytes, fingerprint) = (bytemuck::cast_slice(&self.values), self.fingerprint);
        Piece { name: &self.name, dtype: Dtype::F32, global_shape: &self.shape, offset, shape, bytes, fingerprint }
    }
}

/// Adds this rank's state to a snapshot: at once from host memory; from the memory of a device through the copy that is
/// returned.
///
/// # Errors
/// When the device has failed.
pub(super) fn copy_to(
    snapshot: &mut Snapshot,
    machine: &dyn Machine,
    c: &Compiled,
    contents: Contents,
    compared: &Compared,
) -> Result<Option<StateCopy>, JobError> {
    let mut runs = Vec::new();
    for tensor in contents.saved(c) {
        let (name, shape, region) = (tensor.name.clone(), tensor.shape.clone(), tensor.held.region.clone());
        let fingerprint = compared.fingerprint(&tensor);
        let header = SavedBox { name, shape, region, values: Cow::Borrowed(&[]), fingerprint };
        if machine.memory().is_some() {
            snapshot.add_later(&header.piece(), tensor.held.n_elements() * size_of::<f32>());
            runs.extend(weights::sources(machine, c, &tensor).map(|run| run.span()));
        } else {
            snapshot.add_from(&header.piece(), |append| {
                weights::visit(machine, c, &tensor, |run| append(bytemuck::cast_slice(run)));
            });
        }
    }
    if runs.is_empty() {
        return Ok(None);
    }
    #[allow(unsafe_code)] // The copy outlives the borrow of the machine.
    // SAFETY: only updates change saved state while a run trains; before the state is written otherwise, a run ends, which
    // ends the copy.
    let copy = unsafe { StateCopy::begin(runs) }.map_err(CollectiveError::from)?;
    Ok(Some(copy))
}
