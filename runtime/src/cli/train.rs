//! `phalanx train`.

use super::{JobArgs, say};
use crate::config::output::Resume;
use crate::generate::Sampling;
use crate::job::{Control, Event, Report, Started};
use crate::train::JobError;
use crate::train::progress::{Progress, Tokenising, human_bytes, human_count};
use crate::train::session::{self, Ranks};
use std::path::Path;
use std::sync::Arc;

pub(super) const HELP: &str = "Examples:
  phalanx train my.yaml
  phalanx train my.yaml --learning_rate 1e-4 --max_steps 100
  phalanx train my.yaml --resume_from_checkpoint none --output_dir runs/second

Ctrl-C finishes the step, saves everything and prints how to go on; a second one ends at once.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let config = args.job.load()?;
    let (logging_steps, n_threads) = (config.output.logging_steps, config.precision.threads);
    let starts_anew = config.output.resume_from_checkpoint == Resume::Never;
    let sample = config.output.sample_prompt.clone().map(|prompt| (prompt, config.output.sample_tokens));
    let control = Arc::new(Control::default());
    stop_on_signal(&control)?;
    let (mut progress, mut tokenising) = (None, Tokenising::default());
    let program = std::env::current_exe().map_err(|source| JobError::Io {
        action: "find",
        path: "the program of this process".into(),
        source,
    })?;
    let report = session::run(&config, None, &Ranks::Processes(program), &control, &mut |event| {
        tokenising.see(event);
        show(event, &mut progress, logging_steps);
    });
    if let Some(p) = &progress {
        Progress::finish(p);
    }
    let report = report?;
    farewell(&report, args, starts_anew);
    match (sample, report.model_dir.filter(|dir| dir.join("config.json").exists())) {
        (Some((prompt, n_tokens)), Some(dir)) => show_sample(&dir, &prompt, n_tokens, n_threads),
        _ => Ok(()),
    }
}

pub(super) fn show(event: &Event, progress: &mut Option<Progress>, logging_steps: u64) {
    match (event, progress.as_mut()) {
        (Event::Started(s), Some(p)) => {
            p.note(&format!("going on from step {} with {} ranks ({})", s.first_step, s.mesh.size(), s.mesh))
        }
        (Event::Started(s), None) => {
            introduce(s);
            *progress = Some(Progress::new(s.total_steps, s.first_step, logging_steps));
        }
        (Event::Step(m), Some(p)) => p.step(m),
        (Event::Eval(m), Some(p)) => p.eval(m),
        (Event::Saved { step, path }, Some(p)) => p.note(&format!("saved {:5}  {}", step, path.display())),
        (Event::Note(text), Some(p)) => p.note(text),
        (Event::Note(text), None) => say(text),
        _ => {}
    }
}

fn show_sample(dir: &Path, prompt: &str, n_tokens: usize, n_threads: Option<usize>) -> Result<(), JobError> {
    say("\nsample:");
    // A small model that always takes the likeliest token repeats itself.
    let sampling = Sampling { temperature: 0.7, top_k: 0, top_p: 0.95, seed: 0 };
    super::generate::continue_text(dir, prompt, n_tokens, sampling, n_threads)
}

fn introduce(s: &Started) {
    let trained = if s.n_trainable == s.n_params {
        String::new()
    } else {
        format!(" ({} trained, {:.2}%)", human_count(s.n_trainable), 100.0 * s.n_trainable as f64 / s.n_params as f64)
    };
    let ranks = if s.mesh.size() > 1 { format!("; {} ranks ({})", s.mesh.size(), s.mesh) } else { String::new() };
    let validation = if s.n_rows.1 > 0 { format!(" + {} for validation", s.n_rows.1) } else { String::new() };
    say(format_args!(
        "{} parameters{trained}; {} rows{validation}; {} steps; buffers {}; {} threads{ranks}",
        human_count(s.n_params),
        s.n_rows.0,
        s.total_steps,
        human_bytes(s.buffer_bytes.iter().copied().max().unwrap_or(0)),
        s.n_threads
    ));
    if let Some(path) = &s.resumed_from {
        say(format_args!("resuming at step {} from {}", s.first_step, path.display()));
    }
}

fn farewell(report: &Report, args: &Args, starts_anew: bool) {
    if let Some(dir) = &report.model_dir {
        say(format_args!("model in {}", dir.display()));
        if dir.join("config.json").exists() {
            say(format_args!("look at it:  phalanx generate {} --prompt '…'", dir.display()));
        }
    }
    if !report.finished {
        let overrides = args.job.overrides.join(" ");
        let mut command = format!("phalanx train {} {overrides}", args.job.config.display()).trim_end().to_string();
        if starts_anew {
            command += " --resume_from_checkpoint auto";
        }
        say(format_args!("stopped after step {}; go on with:  {command}", report.steps));
    }
}

/// The first Ctrl-C or SIGTERM asks the run to stop, the second ends the process as if nobody had listened.
fn stop_on_signal(control: &Arc<Control>) -> Result<(), JobError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let io = |source| JobError::Io { action: "listen for signals of", path: "this process".into(), source };
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map_err(io)?;
    let control = Arc::clone(control);
    let listen = move || {
        let mut seen = signals.forever();
        if seen.next().is_some() {
            control.stop();
            super::say("\nfinishing this step, then saving; once more to end at once");
        }
        if let Some(signal) = seen.next() {
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(io)?;
    Ok(())
}
