//! Evaluations of a run in progress, and what follows from them: the best model so far is saved, and a run whose loss falls no
//! more ends early.

use super::{TrainData, Trainer, due};
use crate::control::Control;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::events::{EvalMetrics, Event};
use crate::train::best::Best;
use crate::train::evaluation::Evaluator;
use crate::train::saving::Saving;
use crate::train::team::Team;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What earlier worlds may have left to do after the step with which a world begins.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unfinished {
    evaluation: bool,
    save: bool,
}

/// What ends an evaluation before its last row. It may take far longer than whoever asks a run to stop waits for it; the resumed run
/// makes up for it.
#[derive(Clone, Copy)]
pub(super) enum Ends<'a> {
    Never,
    /// The run is to stop already.
    Now,
    /// Any rank that is asked to stop.
    Asked(&'a Control),
}

impl<'a> Ends<'a> {
    pub(super) fn on(stop: bool, control: &'a Control) -> Ends<'a> {
        if stop { Ends::Now } else { Ends::Asked(control) }
    }
}

/// What an evaluation has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evaluated {
    /// The model is the best so far, and is to be saved as such.
    Best,
    /// Anything else, or no evaluation was due.
    Seen,
    /// A request to stop has ended it.
    Ended,
}

impl Trainer<'_> {
    /// Evaluates if it is due, unless a request to stop `ends` it; returns whether the model is the best so far and is to be saved. A run that ends early is told so
    /// here; the vote of the next step ends it on all ranks.
    pub(super) fn evaluate_if_due(
        &mut self,
        data: &TrainData<'_>,
        is_last: bool,
        ends: Ends<'_>,
        began: &mut Instant,
        emit: &mut dyn FnMut(Event),
    ) -> Result<Evaluated, JobError> {
        let step = self.state.step;
        let Some(rows) = data.validation.filter(|_| is_last || due(data.eval_steps, step)) else {
            return Ok(Evaluated::Seen);
        };
        let Some(metrics) = self.evaluate(rows, ends)? else {
            // Once its last step is done, the model matters more, and there is no run to resume.
            emit(Event::Note(if step == self.run.total_steps {
                format!(
                    "the evaluation after step {step} is left out, because the run is to stop; `phalanx eval` makes up for it"
                )
            } else {
                format!("the evaluation after step {step} is left to the resumed run, because this one is to stop")
            }));
            return Ok(Evaluated::Ended);
        };
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
        Ok(if is_best && rule.keeps_best { Evaluated::Best } else { Evaluated::Seen })
    }

    /// Repeats the evaluation of the current step that an earlier world did not finish or report, and saves the model if it is the
    /// best so far. Returns whether the run stops before its next step, because a request to stop has ended the evaluation.
    pub(super) fn make_up_for_evaluation(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        control: &Control,
        emit: &mut dyn FnMut(Event),
    ) -> Result<bool, JobError> {
        let (step, rule) = (self.state.step, self.run.best);
        let is_unseen = rule.is_on() && step > 0 && self.state.best.evaluated < step;
        if (is_unseen || self.unfinished.evaluation)
            && self.evaluate_if_due(data, false, Ends::Asked(control), &mut Instant::now(), emit)? == Evaluated::Ended
            && step < self.run.total_steps
        {
            self.member.as_mut().map_or(Ok(()), |member| member.stopped(step))?;
            self.verify_if_due(true, 1.0)?;
            self.save_due(saving, true, data.checkpoint_required, emit)?;
            return Ok(true);
        }
        let is_best = rule.keeps_best && self.state.best.step == step && self.state.best.loss().is_some();
        if is_best && (is_unseen || self.unfinished.save) {
            self.save_due(saving, false, data.checkpoint_required, emit)?;
            self.wait_for_best(saving, data.checkpoint_required, emit)?;
        }
        Ok(false)
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

    /// Mean loss over all validation rows; `None` if a request to stop ends the evaluation.
    fn evaluate(&mut self, rows: &Rows, ends: Ends<'_>) -> Result<Option<EvalMetrics>, JobError> {
        let start = Instant::now();
        if matches!(ends, Ends::Now) {
            return Ok(None);
        }
        let Some(c) = &self.programs.eval else {
            return Err(PlanError::NoEvaluation.into());
        };
        let evaluator = Evaluator {
            compiled: c,
            machine: &mut *self.machine,
            models: &mut self.models,
            staging: &mut self.staging,
            team: &mut self.team,
            objective: &self.plan.objective,
            n_samples: self.plan.n_samples(),
        };
        // All ranks end it after the same microbatch.
        let mut goes_on = |_, team: &mut Team| match ends {
            Ends::Asked(control) => Ok(team.sum(u64::from(control.stop.load(Ordering::Acquire)))? == 0),
            Ends::Now | Ends::Never => Ok(true),
        };
        let Some(found) = evaluator.over(rows, &mut goes_on)? else { return Ok(None) };
        Ok(Some(EvalMetrics {
            step: self.state.step,
            eval_loss: found.loss(),
            eval_perplexity: found.perplexity(),
            scalars: found.scalars(),
            eval_ms: start.elapsed().as_secs_f64() * 1e3,
        }))
    }
}
