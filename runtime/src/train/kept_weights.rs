//! Whether a run continues with all that a checkpoint's run has trained.

use super::architecture::smallest;
use super::plan::ModelPlan;
use crate::error::JobError;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::passes::lora::lora;
use std::collections::BTreeSet;

/// Refuses a checkpoint with weights for which the run has no place, such as adapters of layers that it does not adapt.
///
/// # Errors
/// Names the first of these weights.
pub(super) fn check(plan: &ModelPlan, checkpoint: &Checkpoint) -> Result<(), JobError> {
    let mut whole = smallest(&plan.model)?;
    if plan.spec.lora.as_ref().is_some_and(|spec| lora(&mut whole, spec).is_err()) {
        // Compiling the step has reported it.
        return Ok(());
    }
    let own: BTreeSet<&str> =
        whole.params.iter().flat_map(|param| &param.parts).map(|part| part.name.as_str()).collect();
    let saved = &checkpoint.contents().tensors;
    // `exp_avg.NAME` is state of the optimizer, which has its place beside the weight.
    let is_state = |name: &str| name.split_once('.').is_some_and(|(_, weight)| saved.contains_key(weight));
    let Some(left) = saved.keys().find(|name| !own.contains(name.as_str()) && !is_state(name)) else { return Ok(()) };
    let reason = format!(
        "its run trained `{left}`, for which this run has no place, so that it would be lost; export the checkpoint, with --merge if \
         it has adapters, and name the export as `base_model`"
    );
    Err(JobError::Mismatch { path: checkpoint.id().path.clone(), reason })
}
