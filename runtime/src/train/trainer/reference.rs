//! Log-probabilities of a frozen reference that are computed once. The model before the first step is the reference, so whoever begins a
//! run computes them, with all ranks of its mesh; later worlds have them from a rank, or from the checkpoint that they continue from.

use super::{TrainData, Trainer};
use crate::control::Control;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::events::Event;
use crate::train::evaluation::Evaluator;
use crate::train::reference_file;
use crate::train::saving::Saving;
use crate::train::team::Team;
use phalanx_strategies::mesh::Axis;
use phalanx_strategies::program::Role;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time between two reports of how far the computation is.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

impl Trainer<'_> {
    /// Makes them known to this rank, and a part of all checkpoints to come. Returns whether a request to stop has ended it.
    ///
    /// # Errors
    /// When the run has begun and no rank has them, they are not finite, or a peer is lost.
    pub(super) fn know_reference(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        control: &Control,
        emit: &mut dyn FnMut(Event),
    ) -> Result<bool, JobError> {
        if self.keep_reference(data, saving)? {
            return Ok(false);
        }
        if self.state.step > 0 {
            return Err(PlanError::ReferenceNotComputed { step: self.state.step }.into());
        }
        for rows in sets(data).iter().filter(|rows| rows.reference().is_none()) {
            let Some(own) = self.own_reference(rows, control, emit)? else {
                self.member.as_mut().map_or(Ok(()), |member| member.stopped(self.state.step))?;
                return Ok(true);
            };
            let sums = self.summed(own)?;
            rows.set_reference(sums);
        }
        self.keep_reference(data, saving)?;
        Ok(false)
    }

    /// Shares what any rank has, and makes it a part of all checkpoints to come once it is whole; returns whether it is, as it always is
    /// for objectives that compute none.
    ///
    /// # Errors
    /// When a peer is lost.
    pub(crate) fn keep_reference(&mut self, data: &TrainData<'_>, saving: &mut Saving) -> Result<bool, JobError> {
        if !self.plan.objective.has_computed_reference() {
            return Ok(true);
        }
        let (sets, mut is_whole) = (sets(data), true);
        if let Some(file) = self.restored_reference.take() {
            reference_file::decode(&file, &sets);
        }
        for rows in &sets {
            let holders = self.team.gather(u64::from(rows.reference().is_some()))?;
            let Some(holder) = holders.iter().position(|has| *has > 0) else {
                is_whole = false;
                continue;
            };
            if holders.contains(&0) {
                let own = rows.reference().filter(|_| holder == self.team.mesh_rank.rank);
                let sums = own.map_or_else(|| vec![0.0; rows.len() * rows.n_batch_rows()], <[f64]>::to_vec);
                let sums = self.summed(sums)?;
                rows.set_reference(sums);
            }
        }
        if is_whole {
            saving.set_extra(reference_file::NAME, reference_file::encode(&sets));
        }
        Ok(is_whole)
    }

    /// The log-probabilities of all ranks, from those of each.
    fn summed(&mut self, mut sums: Vec<f64>) -> Result<Vec<f64>, JobError> {
        self.team.add_up(&mut sums)?;
        match sums.iter().all(|sum| sum.is_finite()) {
            true => Ok(sums),
            false => Err(JobError::NonFinite {
                step: 0,
                what: "a log-probability of the reference",
                parameter: "the sums of answers".into(),
                last_good: 0,
            }),
        }
    }

    /// Log-probabilities of the documents that this rank computes, 0 for all others; `None` if a request to stop has ended it.
    fn own_reference(
        &mut self,
        rows: &Rows,
        control: &Control,
        emit: &mut dyn FnMut(Event),
    ) -> Result<Option<Vec<f64>>, JobError> {
        let programs = &self.programs;
        let compiled = programs.reference.as_ref().expect("it is compiled with the step that reads its results");
        let (began, mut reported, total) = (Instant::now(), Instant::now(), rows.len());
        emit(Event::Reference { done: 0, total });
        let n = rows.n_batch_rows();
        let mut sums = vec![0.0; total * n];
        // Ranks that share rows have the same sums.
        let counts = [Axis::Cp, Axis::Tp].into_iter().all(|axis| self.team.mesh_rank.on(axis) == 0);
        let evaluator = Evaluator {
            compiled,
            machine: &mut *self.machine,
            models: &mut self.models,
            staging: &mut self.staging,
            team: &mut self.team,
            objective: &self.plan.objective,
            n_samples: self.plan.n_samples(),
        };
        let mut goes_on = |done, team: &mut Team| {
            if reported.elapsed() >= REPORT_INTERVAL {
                reported = Instant::now();
                emit(Event::Reference { done, total });
            }
            Ok(team.sum(u64::from(control.stop.load(Ordering::Acquire)))? == 0)
        };
        let is_whole = evaluator.microbatches(rows, &mut goes_on, |_, own, c, machine| {
            let Some(value) = c.program.bound(Role::Reference).next().filter(|_| counts) else { return Ok(()) };
            let found = machine.read::<f64>(c, value);
            for (&row, of_row) in own.iter().zip(found.chunks_exact(n)) {
                sums[row as usize * n..][..n].copy_from_slice(of_row);
            }
            Ok(())
        })?;
        let seconds = began.elapsed().as_secs_f64();
        emit(Event::Note(match is_whole {
            true => {
                format!("the log-probabilities of the reference were computed in {seconds:.1} s, for {total} samples")
            }
            false => {
                "the run is to stop before its first step, and has computed nothing that could be saved".to_owned()
            }
        }));
        Ok(is_whole.then_some(sums))
    }
}

/// The rows whose reference is computed: those of each store once.
fn sets(data: &TrainData<'_>) -> Vec<Rows> {
    let others = data.validation.filter(|rows| !rows.has_store_of(data.train));
    std::iter::once(data.train).chain(others).map(Rows::of_store).collect()
}
