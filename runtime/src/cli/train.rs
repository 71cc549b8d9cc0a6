//! `phalanx train`.

use super::JobArgs;
use super::cluster::{ClusterArgs, n_slots};
use super::ended::Ended;
use super::event_lines;
use super::push;
use super::signals::stopped_by_signals;
use crate::api::completion::Completion;
use crate::api::embed::program::RankProgram;
use crate::api::sampling::Sampling;
use crate::api::start;
use crate::api::start::Ranks;
use crate::config::JobConfig;
use crate::config::output::Resume;
use crate::console::Console;
use crate::coordinate::rendezvous::Rendezvous;
use crate::data::recognised;
use crate::error::JobError;
use crate::events::{Event, Report, Started};
use crate::shell::quoted;
use crate::train::data_plan;
use crate::train::model_source::ModelSource;
use crate::train::progress::{Progress, Tokenising};
use crate::units::{human_bytes, human_count};
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use std::path::Path;

pub(super) const HELP: &str = "Examples:
  phalanx train my.yaml
  phalanx train my.yaml --learning_rate 1e-4 --max_steps 100
  phalanx train my.yaml --resume_from_checkpoint none --output_dir runs/second

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU (a limit of CPU time)
stop the run after the current step, save a checkpoint and print the command
to resume; before the first step they end it at once. A second Ctrl-C exits at
once.

Exit codes: 0 done, 1 failed, 2 bad input. A run that was stopped before its
last step exits with 0; in a job of Slurm, PBS or LSF (SLURM_JOB_ID, PBS_JOBID
or LSB_JOBID is set) with 75 after a signal and with 3 after `phalanx stop`.

On a cluster, run the same command on every node. Node 0 coordinates the job:
it writes the join string to a file in output_dir that only you can read, so
all nodes must share output_dir, a folder or an object store. If another node
dies, the remaining nodes continue. If node 0 dies, node 1 coordinates.

  srun --ntasks-per-node=1 phalanx train --slurm my.yaml
      Run this in an allocation. Nodes and cores come from SLURM_NODEID,
      SLURM_NNODES, SLURM_JOB_NODELIST and SLURM_CPUS_PER_TASK. SIGTERM to all
      nodes, as before a preemption, saves a checkpoint and ends the job.
      SIGTERM to a node other than node 0 drains that node. By default srun
      ends all tasks when one task dies; to keep the others, add --no-kill
      --kill-on-bad-exit=0.

  MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 RANK=1 \\
    phalanx train --torchrun my.yaml
      Run one process on each of WORLD_SIZE nodes, instead of `torchrun
      --nnodes 2 --node-rank 1 --master-addr …`. If LOCAL_WORLD_SIZE is set,
      WORLD_SIZE and RANK count ranks, as under torchrun. The process of a
      node's first rank then starts all LOCAL_WORLD_SIZE ranks, and the other
      processes exit:
      torchrun --no-python … phalanx train --torchrun my.yaml

  The ranks of the mesh are spread evenly over the nodes; `nproc_per_node` is
  the number of ranks on each node. Without --slurm or --torchrun, these
  variables are ignored.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Write each step and evaluation to standard output as a line of JSON, as in metrics.jsonl, and all else to standard error.
    #[arg(long)]
    json: bool,
    /// Write every event to standard output as a line of JSON, and last how the run ended; for programs.
    #[arg(long, conflicts_with = "json")]
    events: bool,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args, program: &RankProgram, console: &Console) -> Result<Ended, JobError> {
    let lines = (args.json || args.events).then(|| console.out().clone());
    let line_of = if args.events { event_lines::of_event } else { event_lines::of_measurement };
    let console = &if lines.is_some() { console.of_errors() } else { console.clone() };
    // The first process of a container has no default action: an early signal would be lost.
    let control = stopped_by_signals(console, true)?;
    let launch_context = args.cluster.launch_context()?;
    if launch_context.as_ref().is_some_and(|launch_context| !launch_context.is_first) {
        console.say("the first process of this machine starts all its ranks; this process has nothing to do");
        return Ok(Ended::Finished);
    }
    // A single node needs no coordinator on another machine.
    let config = launch_context
        .as_ref()
        .map_or_else(|| args.job.load(), |launch_context| args.cluster.load(&args.job, launch_context))?;
    let launch_context = launch_context.filter(|launch_context| launch_context.n_nodes > 1);
    let upload = push::prepare(&config.output, launch_context.as_ref().is_none_or(|context| context.node == 0))?;
    let (logging_steps, n_threads) = (config.output.logging_steps, config.precision.threads);
    let resumes_the_newest = config.output.resume_from_checkpoint == Resume::Auto;
    let sample = config.output.sample_prompt.clone().map(|prompt| (prompt, config.output.sample_tokens));
    let (mut progress, mut tokenising) = (None, Tokenising::new(console));
    let mut on_event = |event: &Event| {
        tokenising.see(event);
        match (&lines, line_of(event)) {
            (Some(lines), Some(line)) => lines.say(line),
            _ => show(event, &mut progress, logging_steps, console),
        }
    };
    let program = program.executable().clone();
    let report = match &launch_context {
        None => start::run(&config, None, &Ranks::Processes { program, makes_models: false }, &control, &mut on_event)
            .map(Some),
        Some(launch_context) => {
            let (n_slots, patience) = (n_slots(&config)?, args.cluster.patience());
            Rendezvous { config: &config, launch_context, program, n_slots, patience }.run(&control, &mut on_event)
        }
    };
    if let Some(p) = &progress {
        Progress::finish(p);
    }
    let Some(report) = report? else { return Ok(Ended::Finished) };
    if let (true, Some(lines), Some(line)) = (args.events, &lines, event_lines::of_end(&report)) {
        lines.say(line);
        upload.after(report.finished.then_some(report.steps), console)?;
        return Ok(Ended::of(report.finished, control.stops()));
    }
    farewell(&report, args, resumes_the_newest, command_to_try(&config), console);
    upload.after(report.finished.then_some(report.steps), console)?;
    let ended = Ended::of(report.finished, control.stops());
    if let (Some((prompt, n_tokens)), Some(dir)) =
        (sample, report.model_dir.filter(|dir| dir.join("config.json").exists()))
    {
        show_sample(&dir, &prompt, n_tokens, n_threads, console)?;
    }
    Ok(ended)
}

pub(super) fn show(event: &Event, progress: &mut Option<Progress>, logging_steps: u64, console: &Console) {
    match (event, progress.as_mut()) {
        (Event::Started(s), Some(p)) => {
            p.note(&format!("continuing from step {} with {} ranks ({})", s.first_step, s.mesh.size(), s.mesh))
        }
        (Event::Started(s), None) => {
            introduce(s, console);
            *progress = Some(Progress::new(s.total_steps, s.first_step, logging_steps, console));
        }
        (Event::Reference { done, total }, Some(p)) => p.reference(*done, *total),
        (Event::Step(m), Some(p)) => p.step(m),
        (Event::Eval(m), Some(p)) => p.eval(m),
        (Event::Saved { step, path }, Some(p)) => p.note(&format!("saved {:5}  {}", step, path.display())),
        (Event::NotSaved { step, reason }, Some(p)) => {
            p.note(&format!("step {step} was not saved: {reason}; training continues, and the next save tries again"))
        }
        (Event::Note(text), Some(p)) => p.note(text),
        (Event::Note(text), None) => console.say(text),
        _ => {}
    }
}

fn show_sample(
    dir: &Path,
    prompt: &str,
    n_tokens: usize,
    n_threads: Option<usize>,
    console: &Console,
) -> Result<(), JobError> {
    console.say("\nsample:");
    // With greedy sampling a small model repeats itself.
    let sampling = Sampling { temperature: 0.7, top_p: 0.95, ..Sampling::GREEDY };
    let wanted = Completion {
        max_new: n_tokens,
        sampling,
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: false,
        n_top: None,
    };
    let source = ModelSource::find(dir, None)?;
    super::generate::continue_text(&source, prompt, &wanted, n_threads, &mut console.out().clone())
}

fn introduce(s: &Started, console: &Console) {
    let trained = if s.n_trainable == s.n_params {
        String::new()
    } else {
        format!(" ({} trained, {:.2}%)", human_count(s.n_trainable), 100.0 * s.n_trainable as f64 / s.n_params as f64)
    };
    let ranks = if s.mesh.size() > 1 { format!("; {} ranks ({})", s.mesh.size(), s.mesh) } else { String::new() };
    let validation = if s.n_rows.1 > 0 { format!(" + {} for validation", s.n_rows.1) } else { String::new() };
    console.say(format_args!(
        "{} parameters{trained}; {} rows{validation}; {} steps; buffers {}; {} threads{ranks}",
        human_count(s.n_params),
        s.n_rows.0,
        s.total_steps,
        human_bytes(s.buffer_bytes.iter().copied().max().unwrap_or(0)),
        s.n_threads
    ));
    if let Some(path) = &s.resumed_from {
        console.say(format_args!("resuming at step {} from {}", s.first_step, path.display()));
    }
}

/// The command that shows what the model has learnt.
fn command_to_try(config: &JobConfig) -> Next {
    if config.reward.reward_model {
        return Next::Serve;
    }
    let data = data_plan::data_config(config);
    let has_chats = data.is_ok_and(|data| data.datasets.iter().any(recognised::has_messages));
    if has_chats { Next::Chat } else { Next::Generate }
}

/// The command that shows what a trained model does.
#[derive(Clone, Copy, Debug)]
enum Next {
    Chat,
    Generate,
    /// It gives scores.
    Serve,
}

fn farewell(report: &Report, args: &Args, resumes_the_newest: bool, next: Next, console: &Console) {
    if let Some(dir) = &report.model_dir {
        console.say(format_args!("model in {}", dir.display()));
        // A user-defined model exists only in its program.
        if ["config.json", ADAPTER_CONFIG].iter().any(|name| dir.join(name).exists()) {
            let (command, rest) = match next {
                Next::Chat => ("chat", " --prompt '…'"),
                Next::Generate => ("generate", " --prompt '…'"),
                Next::Serve => ("serve", ""),
            };
            console.say(format_args!("try it with:  phalanx {command} {}{rest}", quoted(dir)));
        }
    }
    if !report.finished {
        let command = command_to_resume(args.cluster.flag(), &args.job.config, &args.job.overrides, resumes_the_newest);
        console.say(format_args!("stopped after step {}; resume with:  {command}", report.steps));
    }
}

/// The command that continues from what was saved last, for a shell, wherever this run began.
fn command_to_resume(cluster: &str, config: &Path, overrides: &[String], resumes_the_newest: bool) -> String {
    const KEY: &str = "--resume_from_checkpoint";
    let mut words = vec![config.display().to_string()];
    let mut rest = overrides.iter();
    while let Some(word) = rest.next() {
        let (key, value) = word.split_once('=').map_or((word.as_str(), None), |(key, value)| (key, Some(value)));
        if key != KEY {
            words.push(word.clone());
        } else if value.is_none() {
            rest.next();
        }
    }
    if !resumes_the_newest {
        words.extend([KEY.to_owned(), "auto".to_owned()]);
    }
    let words: Vec<String> = words.iter().map(quoted).collect();
    format!("phalanx train {cluster}{}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_to_resume_continues_from_what_was_saved_last_and_is_quoted_for_a_shell() {
        let command = |overrides: &[&str], resumes_the_newest| {
            let overrides: Vec<String> = overrides.iter().map(|word| (*word).to_owned()).collect();
            command_to_resume("", Path::new("my job.yaml"), &overrides, resumes_the_newest)
        };

        let named = ["--resume_from_checkpoint", "out/checkpoints/step-1", "--max_steps", "5"];
        assert_eq!(command(&named, false), "phalanx train 'my job.yaml' --max_steps 5 --resume_from_checkpoint auto");
        assert_eq!(
            command(&["--resume_from_checkpoint=none", "--output_dir", "a b's"], false),
            r"phalanx train 'my job.yaml' --output_dir 'a b'\''s' --resume_from_checkpoint auto"
        );
        assert_eq!(command(&["--seed", "3"], true), "phalanx train 'my job.yaml' --seed 3");
    }
}
