//! Output for people while a job runs: a progress bar with ETA on a terminal, plain lines otherwise.

use crate::events::{EvalMetrics, Event, StepMetrics};
use crate::units::{human_bytes, human_duration};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Shows steps, evaluations and messages.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    logging_steps: u64,
    total_steps: u64,
    n_shown: u64,
}

impl Progress {
    /// Shows a bar if standard error is a terminal, and a line for every `logging_steps`-th step.
    pub fn new(total_steps: u64, first_step: u64, logging_steps: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total_steps).with_position(first_step);
            let style = ProgressStyle::with_template("{bar:32} {pos}/{len} [{elapsed_precise} < {eta_precise}] {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.reset_eta();
            bar
        });
        Progress { bar, logging_steps: logging_steps.max(1), total_steps, n_shown: 0 }
    }

    /// Shows a finished step.
    pub fn step(&mut self, m: &StepMetrics) {
        let last = m.step == self.total_steps;
        if self.n_shown == 0 || last || m.step.is_multiple_of(self.logging_steps) {
            self.line(&step_line(m));
        }
        self.n_shown += 1;
        if let Some(bar) = &self.bar {
            bar.set_position(m.step);
            bar.set_message(format!("loss {:.4}  {:.0} tok/s", m.loss, m.tokens_per_s));
        }
    }

    /// Shows a finished evaluation.
    pub fn eval(&self, m: &EvalMetrics) {
        self.line(&format!(
            "eval  {:5}  loss {:8.5}  perplexity {:.2}  ({})",
            m.step,
            m.eval_loss,
            m.eval_perplexity,
            human_duration(Duration::from_secs_f64(m.eval_ms / 1e3))
        ));
    }

    /// Shows a message about the run.
    pub fn note(&self, text: &str) {
        self.line(text);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| write_line(text)),
            None => write_line(text),
        }
    }
}

/// A bar while files are tokenised, on a terminal; small files finish before it would appear.
#[derive(Debug, Default)]
pub struct Tokenising {
    bar: Option<(PathBuf, ProgressBar)>,
}

/// Size from which a file gets a bar.
const WATCHED_BYTES: u64 = 1 << 20;

impl Tokenising {
    /// Handles an event: progress moves the bar, any other event removes it.
    pub fn see(&mut self, event: &Event) {
        let Event::Preparing { path, done_bytes, total_bytes } = event else {
            if let Some((_, bar)) = self.bar.take() {
                bar.finish_and_clear();
            }
            return;
        };
        if *total_bytes < WATCHED_BYTES || !std::io::stderr().is_terminal() {
            return;
        }
        if self.bar.as_ref().is_none_or(|(shown, _)| shown != path) {
            let style = ProgressStyle::with_template("tokenising {msg} {bar:32} {bytes}/{total_bytes} [{eta} left]");
            let bar = ProgressBar::new(*total_bytes).with_message(path.display().to_string());
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar = Some((path.clone(), bar));
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_position(*done_bytes);
        }
    }
}

/// Ignores errors: a closed pipe (`| head`) must not stop a training run.
fn write_line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The step line.
pub fn step_line(m: &StepMetrics) -> String {
    let scale = m.loss_scale.map(|s| format!("  loss_scale {s:.0}")).unwrap_or_default();
    let ranks = m.collective_pct.map(|pct| format!("  collectives {pct:.1}%")).unwrap_or_default();
    let slowest = m.slowest_rank.map(|rank| format!(" (slowest rank {rank})")).unwrap_or_default();
    format!(
        "step {:5}  loss {:8.5}  grad_norm {:8.4}  lr {:.3e}  {:6.0} tok/s  mfu {:4.1}%  mem {}  data {:.1}%{ranks}{slowest}{scale}",
        m.step,
        m.loss,
        m.grad_norm,
        m.lr,
        m.tokens_per_s,
        m.mfu_pct,
        human_bytes(m.memory_bytes),
        m.data_wait_pct
    )
}
