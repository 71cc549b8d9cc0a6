//! The mean loss of a model over rows.

use super::staging::{Staging, inputs};
use super::team::Team;
use crate::data::prepare::PrepareError;
use crate::data::rows::Rows;
use crate::error::JobError;
use phalanx_device::{Machine, OpaqueModel, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::mesh::Axis;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::objective::{Counts, Objective, Report, Sums, Unit};
use phalanx_strategies::program::Role;
use phalanx_strategies::rng::CounterRng;
use std::collections::BTreeMap;

/// The loss of a model over rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Evaluation {
    report: Report,
    /// Sums of the parts of the loss, and of what the objective reports beside it.
    sums: Sums,
    pub(crate) counts: Counts,
}

impl Evaluation {
    /// Mean loss: negative log-likelihood of tokens, nats, or that of an objective over pairs.
    pub(crate) fn loss(&self) -> f64 {
        self.report.loss(&self.sums, &self.counts)
    }

    /// `exp(loss)` of a likelihood.
    pub(crate) fn perplexity(&self) -> Option<f64> {
        (self.report.units == [Unit::Token]).then(|| self.loss().exp())
    }

    /// What the objective reports beside its loss, by name.
    pub(crate) fn scalars(&self) -> BTreeMap<String, f64> {
        self.report.scalars(&self.sums, &self.counts)
    }
}

/// What evaluates rows: a forward program, with the weights in its machine.
pub(super) struct Evaluator<'a> {
    pub(super) compiled: &'a Compiled,
    pub(super) machine: &'a mut dyn Machine,
    pub(super) models: &'a mut [Box<dyn OpaqueModel>],
    pub(super) staging: &'a mut Staging,
    pub(super) team: &'a mut Team,
    pub(super) objective: &'a Objective,
    /// Samples of a microbatch: rows of the data.
    pub(super) n_samples: usize,
}

impl Evaluator<'_> {
    /// The loss over all rows. After each microbatch, `goes_on` is called with the number of rows so far; if it is false for all ranks,
    /// there is no loss.
    ///
    /// # Errors
    /// When the token cache cannot be read, or a peer is lost.
    pub(super) fn over(self, rows: &Rows, goes_on: GoesOn<'_>) -> Result<Option<Evaluation>, JobError> {
        let report = self.objective.report();
        let sums = Sums::filled(0.0, report.n_sums());
        let mut found = Evaluation { report, sums, counts: Counts::default() };
        let is_whole = self.microbatches(rows, goes_on, |all, _, c, machine| {
            found.counts += rows.counts(all).map_err(PrepareError::from)?;
            let sums = c.program.bound(Role::LossSum).next().map(|v| machine.read::<f64>(c, v).to_vec());
            let sums = sums.unwrap_or_else(|| vec![f64::NAN; found.sums.len()]);
            found.sums.iter_mut().zip(sums).for_each(|(all, own)| *all += own);
            Ok(())
        })?;
        Ok(is_whole.then_some(found))
    }

    /// Runs the program over all rows. After each microbatch, `see` gets the numbers of the rows of all ranks and of this rank, and the
    /// machine. The last microbatch is filled up with rows whose labels do not count. Returns whether it went on to the end.
    ///
    /// # Errors
    /// As [`Evaluator::over`].
    pub(super) fn microbatches(
        self,
        rows: &Rows,
        goes_on: GoesOn<'_>,
        mut see: impl FnMut(&[u64], &[u64], &Compiled, &dyn Machine) -> Result<(), JobError>,
    ) -> Result<bool, JobError> {
        let Evaluator { compiled: c, machine, models, staging, team, n_samples: n_rows, .. } = self;
        let mesh_rank = team.mesh_rank;
        let inputs = inputs(c);
        let data_ranks = mesh_rank.mesh.data_ranks();
        let data_rank = mesh_rank.mesh.coord(mesh_rank.rank).data_rank(&mesh_rank.mesh);
        for first in (0..rows.len()).step_by(n_rows * data_ranks) {
            let end = rows.len().min(first + n_rows * data_ranks);
            let all: Vec<u64> = (first as u64..end as u64).collect();
            // The last row fills the rest of the microbatch; labels of these copies do not count.
            let own: Vec<usize> = (0..n_rows).map(|i| first + data_rank * n_rows + i).collect();
            let indices: Vec<u64> = own.iter().map(|i| (*i).min(end - 1) as u64).collect();
            let n_own = own.iter().filter(|i| **i < end).count();
            if let Some(inputs) = inputs.first().filter(|i| !i.is_empty()) {
                staging.fill(rows, &indices, mesh_rank.on(Axis::Cp), CounterRng::new(0))?;
                staging.ignore(n_own * rows.n_batch_rows());
                staging.copy_to(machine, c, inputs);
            }
            machine.run(c, 0..c.program.instrs.len(), &mut Run { groups: &mut team.groups, models, timings: None })?;
            see(&all, &indices[..n_own], c, machine)?;
            if !goes_on(end, team)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Whether an evaluation goes on after this number of rows; all ranks say the same.
pub(super) type GoesOn<'a> = &'a mut dyn FnMut(usize, &mut Team) -> Result<bool, JobError>;

/// The loss over `rows` on one rank, with the weights in the machine. After each microbatch, `done` is called with the number of rows
/// so far.
///
/// # Errors
/// When the token cache cannot be read, or the device has failed.
pub(super) fn evaluated_alone(
    compiled: &Compiled,
    machine: &mut dyn Machine,
    (objective, batch): (&Objective, BatchShape),
    rows: &Rows,
    done: &mut dyn FnMut(usize),
) -> Result<Evaluation, JobError> {
    let evaluator = Evaluator {
        compiled,
        machine,
        models: &mut [],
        staging: &mut Staging::of(&[compiled], batch, 1),
        team: &mut Team::alone(),
        objective,
        n_samples: batch.n_rows / objective.rows_per_sample(),
    };
    let found = evaluator.over(rows, &mut |n_rows, _| {
        done(n_rows);
        Ok(true)
    })?;
    Ok(found.expect("it goes on"))
}
