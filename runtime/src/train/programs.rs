//! The compiled programs of a rank.

use super::plan::ModelPlan;
use crate::error::JobError;
use phalanx_device::{AllocError, Backing, Device, Machine};
use phalanx_strategies::compile::{Compiled, StepSpec, compile_forward, compile_step};
use phalanx_strategies::mesh::MeshRank;
use phalanx_strategies::passes::lora::lora;
use phalanx_strategies::program::Program;
use std::sync::Arc;

/// The programs of a run.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) train: Compiled,
    /// Forward pass over one microbatch, for validation rows.
    pub(crate) eval: Option<Compiled>,
    /// Forward pass over one microbatch before the first step, for an objective that computes the log-probabilities of its reference once.
    pub(crate) reference: Option<Compiled>,
    /// Elements of all parameters of the whole model, and of its trained parameters.
    pub(crate) n_params: (usize, usize),
    /// The device for which they were compiled.
    pub(crate) device: Arc<dyn Device>,
}

impl Programs {
    /// Compiles the programs of the rank at `mesh_rank`.
    pub(crate) fn compile(plan: &ModelPlan, mesh_rank: MeshRank, evaluates: bool) -> Result<Programs, JobError> {
        let mut forward = plan.forward()?;
        forward.mesh_rank = mesh_rank;
        let (spec, device) = (plan.spec_on(mesh_rank.mesh), Arc::clone(&plan.device));
        let without_gradients = |mut forward: Program| {
            forward.mesh_rank = mesh_rank;
            compile_forward(forward, &spec, device.target())
        };
        let eval = evaluates.then(|| without_gradients(forward.clone())).transpose()?;
        let reference = plan.reference()?.map(without_gradients).transpose()?;
        let whole = whole_model(&forward, &spec);
        let n_params = (whole.n_params(), whole.n_trainable());
        Ok(Programs { train: compile_step(forward, &spec, device.target())?, eval, reference, n_params, device })
    }

    /// A machine for them; one that takes over the memory of `before` and what outlasts a step in it, if there is one.
    ///
    /// # Errors
    /// When there is not enough memory, or the folder for offloaded state cannot be written.
    pub(crate) fn machine(
        &self,
        before: Option<Box<dyn Machine>>,
        on: &Backing<'_>,
    ) -> Result<Box<dyn Machine>, AllocError> {
        match before {
            Some(before) => before.succeed(&self.all(), on),
            None => self.device.machine(&self.all(), on),
        }
    }

    pub(crate) fn all(&self) -> Vec<&Compiled> {
        [Some(&self.train), self.eval.as_ref(), self.reference.as_ref()].into_iter().flatten().collect()
    }

    /// Bytes that a machine for them allocates.
    pub(crate) fn bytes(&self) -> u64 {
        self.device.bytes_for(&self.all()) as u64
    }

    /// Bytes of these in memory that ranks share.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.device.shared_bytes(&self.all())
    }
}

/// Bytes of all state that updates change: trained weights and optimizer state.
pub(crate) fn state_bytes(plan: &ModelPlan) -> Result<u64, JobError> {
    let whole = whole_model(&plan.forward()?, &plan.spec);
    let trained = whole.params.iter().filter(|param| param.trainable);
    let n_values: usize = trained.map(|param| param.updated.len() + param.n_state(&plan.spec.optimizer)).sum();
    Ok((n_values * size_of::<f32>()) as u64)
}

/// The model on a single rank, including adapters.
fn whole_model(forward: &Program, spec: &StepSpec) -> Program {
    let mut whole = forward.clone();
    if let Some(adapters) = &spec.lora {
        // Compiling the step reports adapters that do not fit.
        let _ = lora(&mut whole, adapters);
    }
    whole
}
