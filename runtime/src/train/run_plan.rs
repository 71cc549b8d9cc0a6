//! The length of a run, its learning rates, and when it saves and evaluates.

use crate::config::JobConfig;
use crate::config::elastic::VerifySteps;
use crate::config::output::BestRule;
use crate::config::schedule::LrScheduler;
use crate::config::steps::interval;
use crate::data::rows::Rows;
use crate::error::JobError;
use phalanx_strategies::loss_scale::LossScale;
use phalanx_strategies::sampler::Sampler;
use phalanx_strategies::schedule::{Schedule, Shape};

/// Learning rate, length, times of saving and evaluating, and loss scale of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunPlan {
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Steps of the run.
    pub total_steps: u64,
    /// Steps between two checkpoints; if absent, there is one at the end.
    pub save_steps: Option<u64>,
    /// Steps between two evaluations; if absent, there is one at the end.
    pub eval_steps: Option<u64>,
    /// Loss scale at the start.
    pub loss_scale: LossScale,
    /// How often all copies of the state are compared.
    pub verify_steps: VerifySteps,
    /// What evaluations decide.
    pub best: BestRule,
}

/// Learning rate, length, times of saving and evaluating, and loss scale of a run over `n_rows` rows.
pub fn run_plan(config: &JobConfig, n_rows: u64) -> RunPlan {
    let s = &config.schedule;
    let batch_rows = config.sequences_per_step();
    let by_epochs = s
        .num_epochs
        .filter(|_| !config.data.streaming)
        .map(|epochs| (epochs * n_rows as f64 / batch_rows as f64).ceil() as u64);
    let total_steps = [s.max_steps, by_epochs].into_iter().flatten().min().unwrap_or(1).max(1);
    let shape = match s.lr_scheduler {
        LrScheduler::Constant => Shape::Constant,
        LrScheduler::Linear => Shape::Linear,
        LrScheduler::Cosine => Shape::Cosine,
        LrScheduler::WarmupStableDecay => {
            Shape::Wsd { decay_steps: (total_steps as f64 * s.decay_share()).ceil() as u64 }
        }
    };
    let min_ratio = if shape == Shape::Cosine { s.cosine_min_lr_ratio } else { 0.0 };
    let schedule = Schedule {
        peak: s.peak_learning_rate(batch_rows),
        min_ratio,
        warmup_steps: s.warmup_steps_of(total_steps),
        total_steps,
        shape,
    };
    // As `transformers` does, an epoch of a stream is a share of `max_steps`.
    let epoch_steps = match config.data.streaming {
        true => total_steps as f64 / s.num_epochs.unwrap_or(1.0),
        false => n_rows as f64 / batch_rows as f64,
    };
    let (output, data) = (&config.output, &config.data);
    RunPlan {
        schedule,
        total_steps,
        save_steps: interval(output.save_steps, output.saves_per_epoch, epoch_steps, total_steps),
        eval_steps: interval(data.eval_steps, data.evals_per_epoch, epoch_steps, total_steps),
        loss_scale: loss_scale(config),
        verify_steps: config.elastic.verify_steps,
        best: output.best_rule(),
    }
}

/// Length and schedule of a run over these rows, and the rows of each step.
pub(crate) fn run_over(config: &JobConfig, rows: &Rows) -> Result<(RunPlan, Sampler), JobError> {
    // A stream has its own order, and no last row.
    let (n_rows, shuffle) = match rows.stream() {
        Some(_) => (u64::MAX, false),
        None => (rows.len() as u64, config.data.shuffle),
    };
    let sampler = Sampler::new(config.output.seed, n_rows, config.sequences_per_step() as u64, shuffle)?;
    Ok((run_plan(config, n_rows), sampler))
}

fn loss_scale(config: &JobConfig) -> LossScale {
    let p = &config.precision;
    match (p.fp16, p.loss_scale) {
        (false, _) => LossScale::OFF,
        (true, Some(scale)) => LossScale { scale, ..LossScale::OFF },
        (true, None) => LossScale {
            scale: p.initial_loss_scale,
            good_steps: 0,
            window: Some(p.loss_scale_window),
            min: p.min_loss_scale,
        },
    }
}
