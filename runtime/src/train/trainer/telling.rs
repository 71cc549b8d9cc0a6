//! What a trainer tells of its run and of each step.

use super::{Outcome, Trainer};
use crate::error::JobError;
use crate::events::{Event, Started, StepMetrics};
use phalanx_strategies::loss_scale::LossScale;
use phalanx_strategies::objective::Unit;
use std::io::Read;
use std::path::PathBuf;

impl Trainer<'_> {
    /// Tells of a step, and of its trace if it has one.
    pub(super) fn tell(&mut self, step: u64, o: &Outcome, emit: &mut dyn FnMut(Event)) -> Result<(), JobError> {
        tracing::debug!(step = step + 1, loss_sum = o.sums[0], grad_norm = o.grad_norm, "step");
        emit(Event::Step(self.metrics(step, o)));
        let trace = self.trace.take_if(|trace| trace.step == step);
        if let Some(note) = trace.map_or(Ok(None), |t| t.write(&self.programs.train, &mut self.team))? {
            emit(Event::Note(note));
        }
        Ok(())
    }

    pub(super) fn metrics(&mut self, step: u64, o: &Outcome) -> StepMetrics {
        let n_batch_rows = self.rows.len() * self.plan.objective.rows_per_sample();
        let tokens = (n_batch_rows * self.plan.batch.seq_len) as f64;
        StepMetrics {
            step: step + 1,
            total_steps: self.run.total_steps,
            loss: self.report.loss(&o.sums, &o.counts),
            grad_norm: o.grad_norm,
            lr: self.run.schedule.learning_rate(step),
            tokens_per_s: tokens / o.step_s,
            step_ms: o.step_s * 1e3,
            epoch: self.sampler.epochs_after(step + 1),
            predicted_tokens: o.counts.number(Unit::Token),
            mfu_pct: self.peak.share_pct(self.model_flops / o.step_s),
            // A device's own memory is what limits a job on it.
            memory_bytes: match self.machine.memory() {
                Some(_) => self.machine.allocated_bytes() as u64,
                None => resident_bytes(self.team.memory().map(|_| self.bytes_in_shared())),
            },
            data_wait_pct: 100.0 * o.data_wait_s / o.step_s,
            scalars: self.report.scalars(&o.sums, &o.counts),
            loss_scale: (self.run.loss_scale != LossScale::OFF).then_some(self.state.loss_scale.scale),
            collective_pct: (self.team.n_ranks() > 1).then(|| 100.0 * o.collective_s / o.step_s),
            verify_pct: o.verify_s.map(|verify_s| 100.0 * verify_s / o.step_s),
            stalled_steps: None,
            slowest_rank: None,
        }
    }

    /// Steps so far, and how many of them updated the weights: in fp16, a step whose gradient overflows does not.
    pub(crate) fn n_steps_and_updates(&self) -> (u64, u64) {
        (self.state.step, self.state.n_updates)
    }

    /// Bytes that the ranks allocated for their programs, by rank.
    pub(crate) fn buffer_bytes(&mut self) -> Result<Vec<u64>, JobError> {
        Ok(self.team.gather(self.machine.allocated_bytes() as u64)?)
    }

    fn bytes_in_shared(&self) -> usize {
        let machines = std::iter::once(&self.machine).chain(self.shadows.iter().map(|shadow| &shadow.machine));
        machines.map(|machine| machine.bytes_in_shared()).sum()
    }

    /// Describes the run as it starts or resumes.
    pub(crate) fn started(
        &self,
        n_rows: (usize, usize),
        n_threads: usize,
        buffer_bytes: Vec<u64>,
        resumed_from: Option<PathBuf>,
    ) -> Started {
        Started {
            mesh: self.team.mesh_rank.mesh,
            first_step: self.state.step,
            total_steps: self.run.total_steps,
            n_trainable: self.programs.n_params.1,
            n_params: self.programs.n_params.0,
            n_rows,
            buffer_bytes,
            n_threads,
            resumed_from,
        }
    }
}

/// Resident memory of this process, from the kernel; 0 if unknown. Shared memory counts for the rank that owns it, whose
/// `shared` bytes are all in use; the kernel counts it for every process that touched it.
fn resident_bytes(shared: Option<usize>) -> u64 {
    // Read in place, so that a step allocates nothing.
    let mut bytes = [0; 256];
    let n = std::fs::File::open("/proc/self/statm").and_then(|mut file| file.read(&mut bytes)).unwrap_or(0);
    let statm = str::from_utf8(&bytes[..n]).unwrap_or_default();
    let mut pages = statm.split_whitespace().skip(1).map(|p| p.parse::<u64>().unwrap_or(0));
    let (resident, of_others) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    match shared {
        None => resident * 4096,
        Some(own) => resident.saturating_sub(of_others) * 4096 + own as u64,
    }
}
