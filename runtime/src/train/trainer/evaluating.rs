//! Evaluations of a run in progress, and what follows from them: the best model so far is saved, and a run whose loss falls no
//! more ends early.

use super::{TrainData, Trainer, due};
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::events::{EvalMetrics, Event};
use crate::train::best::Best;
use crate::train::evaluation::Evaluator;
use std::time::Instant;

/// What earlier worlds may have left to do after the step with which a world begins.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unfinished {
    evaluation: bool,
    save: bool,
}

impl Trainer<'_> {
    /// Evaluates if it is due; returns whether the model is the best so far and is to be saved. A run that ends early is told so
    /// here; the vote of the next step ends it on all ranks.
    pub(super) fn evaluate_if_due(
        &mut self,
        data: &TrainData<'_>,
        is_last: bool,
        began: &mut Instant,
        emit: &mut dyn FnMut(Event),
    ) -> Result<bool, JobError> {
        let step = self.state.step;
        let Some(rows) = data.validation.filter(|_| is_last || due(data.eval_steps, step)) else { return Ok(false) };
        let metrics = self.evaluate(rows)?;
        emit(Event::Eval(metrics.clone()));
        // Evaluation reports its own time; the next step begins now.
        *began = Instant::now();
        let rule = self.run.best;
        let is_seen = self.state.best.evaluated == step;
        let is_best = rule.is_on() && !is_seen && self.state.best.see(step, metrics.eval_loss);
        let best = self.state.best;
        if rule.is_on() && best.is_over(rule) && !is_last {
            emit(Event::Note(format!(
                "ending early after the next step: eval_loss is not below {:.5}, that of step {}, for {} evaluations",
                best.loss().unwrap_or(f64::NAN),
                best.step,
                best.n_worse
            )));
        }
        Ok(is_best && rule.keeps_best)
    }

    /// Repeats the evaluation of the current step that an earlier world did not finish or report; returns whether the model is the
    /// best so far and is to be saved.
    pub(super) fn make_up_for_evaluation(
        &mut self,
        data: &TrainData<'_>,
        emit: &mut dyn FnMut(Event),
    ) -> Result<bool, JobError> {
        let (step, rule) = (self.state.step, self.run.best);
        let is_unseen = rule.is_on() && step > 0 && self.state.best.evaluated < step;
        if is_unseen || self.unfinished.evaluation {
            self.evaluate_if_due(data, false, &mut Instant::now(), emit)?;
        }
        let is_best = rule.keeps_best && self.state.best.step == step && self.state.best.loss().is_some();
        Ok(is_best && (is_unseen || self.unfinished.save))
    }

    /// Whether the run ends early.
    pub(crate) fn is_over(&self) -> bool {
        self.state.best.is_over(self.run.best)
    }

    /// The step of the best model, if it is kept and is not the current one.
    pub(crate) fn better_step(&self) -> Option<u64> {
        let Best { step, .. } = self.state.best;
        let is_kept = self.run.best.keeps_best && self.state.best.loss().is_some();
        (is_kept && step != self.state.step).then_some(step)
    }

    /// Agrees on what earlier worlds may have left to do after the current step: its evaluation, if the leader `lacks` it, and its save,
    /// unless the state comes from a checkpoint.
    pub(crate) fn agree_on_unfinished(
        &mut self,
        data: &TrainData<'_>,
        lacks_evaluation: bool,
        is_saved: bool,
    ) -> Result<(), JobError> {
        let evaluation = data.validation.is_some() && self.team.sum(u64::from(lacks_evaluation))? > 0;
        self.unfinished = Unfinished { evaluation, save: !is_saved };
        Ok(())
    }

    /// Agrees on the evaluations so far: a member that has caught up beside a world has not taken part in its evaluations.
    pub(crate) fn agree_on_best(&mut self) -> Result<(), JobError> {
        if !self.run.best.is_on() {
            return Ok(());
        }
        let own = serde_json::to_string(&self.state.best).unwrap_or_default();
        let texts = self.team.gather_texts(own)?;
        let all = texts.iter().filter_map(|text| serde_json::from_str::<Best>(text).ok());
        // All members are at one step, and evaluations of one step are equal.
        self.state.best = all.max_by_key(|best| best.evaluated).unwrap_or(self.state.best);
        Ok(())
    }

    /// Mean loss over all validation rows.
    fn evaluate(&mut self, rows: &Rows) -> Result<EvalMetrics, JobError> {
        let start = Instant::now();
        let Some(c) = &self.programs.eval else {
            return Err(PlanError::NoEvaluation.into());
        };
        let evaluator = Evaluator {
            compiled: c,
            machine: &mut *self.machine,
            models: &mut self.models,
            groups: &mut self.team.groups,
            staging: &mut self.staging,
            mesh_rank: self.team.mesh_rank,
            n_rows: self.plan.batch.n_rows,
        };
        let found = evaluator.over(rows, |_| ())?;
        Ok(EvalMetrics {
            step: self.state.step,
            eval_loss: found.loss(),
            eval_perplexity: found.perplexity(),
            eval_ms: start.elapsed().as_secs_f64() * 1e3,
        })
    }
}
