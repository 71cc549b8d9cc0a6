//! Whether a job can run: its mesh fits its model, and its buffers fit this machine.

use super::plan::{self, ModelPlan};
use super::saving::Saving;
use crate::config::JobConfig;
use crate::error::JobError;
use crate::error::fit::FitError;
use crate::memory_limit;
use crate::train::programs::Programs;
use phalanx_device::Device;
use phalanx_device::world::LOCAL_RANKS_MAX;
use phalanx_device::world::RANKS_MAX;
use phalanx_storage::hf::staging::refuse_foreign;
use phalanx_strategies::mesh::{Axis, Coord, Mesh, MeshRank};
use std::path::Path;
use std::sync::Arc;

/// Checks everything in a configuration that needs neither the data nor the machines that will run it.
pub(crate) fn check(config: &JobConfig) -> Result<ModelPlan, JobError> {
    let tokenizer = plan::tokenizer(config)?;
    let model = plan::model_plan(config, &tokenizer)?;
    fits(&model, config.parallel.mesh()?, config.data.evaluates())?;
    check_output(config)?;
    create_dir(&config.output.folder())?;
    Ok(model)
}

/// Checks before the first step that checkpoints and the trained model can be written where the job wants them.
///
/// # Errors
/// When the store does not answer, the checkpoint to resume from is invalid, or the folder for the model holds foreign files: found
/// at the last step, those would cost the export.
pub(crate) fn check_output(config: &JobConfig) -> Result<(), JobError> {
    Saving::new(config, Vec::new()).check(&config.output.resume_from_checkpoint)?;
    Ok(refuse_foreign(&config.output.folder().join("model"))?)
}

/// Checks that a model can be trained on a mesh by compiling one rank of each stage: ranks that differ on other axes differ
/// only in sizes. Returns the bytes that all ranks need together.
///
/// # Errors
/// Why it cannot.
pub(crate) fn fits(model: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<u64, JobError> {
    check_axes(model, mesh)?;
    let n_ranks = mesh.checked_size().filter(|n| *n <= RANKS_MAX as usize).ok_or(FitError::Size { mesh })?;
    let mut bytes = 0;
    for stage in 0..mesh.pp {
        let rank = mesh.rank(Coord::default().with(Axis::Pp, stage));
        let programs = Programs::compile(model, MeshRank { mesh, rank }, evaluates)?;
        bytes += programs.bytes() * (n_ranks / mesh.pp) as u64;
    }
    Ok(bytes)
}

/// As [`fits`], for a job with a number of rank processes on this machine.
pub(crate) fn fits_here(model: &ModelPlan, mesh: Mesh, evaluates: bool, n_slots: u32) -> Result<(), JobError> {
    let needed = fits(model, mesh, evaluates)?;
    if mesh.size() > n_slots as usize {
        return Err(FitError::Slots { mesh, n_slots }.into());
    }
    if model.device.fits(0, 1, 0).is_some() {
        // The job itself uses the devices' memory, so their free memory tells nothing.
        return Ok(());
    }
    let n_spares = n_slots as u64 - mesh.size() as u64;
    check_bytes(needed.saturating_add((needed / mesh.size() as u64).saturating_mul(n_spares)))
}

/// Refuses a mesh that does not fit the model or one machine.
pub(crate) fn check_ranks(model: &ModelPlan, mesh: Mesh) -> Result<(), JobError> {
    check_axes(model, mesh)?;
    if mesh.size() > LOCAL_RANKS_MAX as usize {
        return Err(FitError::Machine { mesh }.into());
    }
    Ok(())
}

fn check_axes(model: &ModelPlan, mesh: Mesh) -> Result<(), JobError> {
    if model.model.known().is_none() && (mesh.pp, mesh.cp, mesh.tp) != (1, 1, 1) {
        return Err(FitError::UserDefined { mesh }.into());
    }
    Ok(())
}

/// Refuses a step that needs more memory than this machine or its device has: the system would overcommit and kill the run
/// later. A spare process needs as much memory of the host as a rank, and of a GPU what the device tells.
pub(crate) fn check_memory(device: &dyn Device, ranks: &[Arc<Programs>], n_spares: usize) -> Result<(), JobError> {
    let bytes = || ranks.iter().map(|programs| programs.bytes());
    if let Some(fits) = device.fits(bytes().max().unwrap_or(0), ranks.len() as u32, n_spares as u32) {
        return fits.map_err(JobError::NoRoomOnGpu);
    }
    check_bytes(bytes().sum::<u64>().saturating_add(bytes().max().unwrap_or(0).saturating_mul(n_spares as u64)))
}

fn check_bytes(needed: u64) -> Result<(), JobError> {
    // If the system does not report its memory, the allocation itself decides.
    let Ok(mut system) = sysinfo::System::new() else { return Ok(()) };
    system.refresh_memory();
    let present = memory_limit::usable(system.total_memory());
    if present > 0 && needed > present { Err(JobError::TooLarge { needed, present }) } else { Ok(()) }
}

pub(crate) fn create_dir(dir: &Path) -> Result<(), JobError> {
    std::fs::create_dir_all(dir).map_err(|source| JobError::Io { action: "create", path: dir.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use crate::devices::software_gpu::SoftwareGpu;
    use phalanx_device::Device;

    #[test]
    fn spare_on_the_only_gpu_needs_a_context_and_no_buffers() {
        let gpu = SoftwareGpu::take().open();
        // Of 4 GiB.
        let fits = |gib: u64, n_ranks, n_spares| gpu.fits(gib << 30, n_ranks, n_spares).unwrap().is_ok();

        let of_spares =
            [(3, 1, 1), (4, 1, 0), (4, 1, 1), (3, 1, 2)].map(|(gib, ranks, spares)| fits(gib, ranks, spares));

        assert_eq!(of_spares, [true, true, false, false]);
        assert!(!fits(3, 2, 0));
    }
}
