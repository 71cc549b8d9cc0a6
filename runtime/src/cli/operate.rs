//! `phalanx status`, `drain`, `resize`, `save` and `stop`: requests to a running job.

use super::{say, say_json};
use crate::api::embed::running::Resize;
use crate::config::JobConfig;
use crate::config::output::{OutputSection, is_url};
use crate::console::Console;
use crate::coordinate::ask::ask;
use crate::coordinate::past::{self, Past};
use crate::coordinate::sentence::incident;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::control_plane::ControlPlaneError;
use crate::train::metrics::Measured;
use crate::train::output_lock::Preparing;
use crate::train::step_line::{COLUMNS, folded, short_count};
use crate::units::{human_bytes, short_duration};
use comfy_table::{ContentArrangement, Table, presets};
use phalanx_actors::events::IncidentLine;
use phalanx_actors::operator::{Answer, Request};
use phalanx_strategies::elastic::coordinator::status::{NodeStatus, RankStatus, Status};
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::elastic::message::{Ending, MemberPhase};
use phalanx_strategies::elastic::timing::Timing;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

pub(super) const HELP: &str = "Examples:
  phalanx status my.yaml               show nodes, ranks, step and incidents
  phalanx status runs/first --json     the same as JSON
  phalanx save my.yaml                 save a checkpoint, wait until it is there
  phalanx drain my.yaml 2              move its state to other nodes, release it
  phalanx drain my.yaml 2 --gone       continue without it: it will not return
  phalanx resize my.yaml --dp_shard_size 3
  phalanx resize my.yaml --pipeline_parallel_size 2 --dp_shard_size 1
  phalanx stop my.yaml                 save a checkpoint, then end

Name the job by its YAML file or its output folder. The coordinator keeps the
operator's credential in that folder.";

/// The job that a request is for.
#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// The job's YAML file, or its output folder or URL.
    job: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    which: Which,
    /// Print the status as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct DrainArgs {
    #[command(flatten)]
    which: Which,
    /// Number of the node, as shown by `phalanx status`.
    node: u32,
    /// Declare a silent node gone: the job continues at once without it, and its processes may not return.
    #[arg(long)]
    gone: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct ResizeArgs {
    #[command(flatten)]
    which: Which,
    /// Copies of the model; unchanged if omitted.
    #[arg(long = "dp_replicate_size")]
    dp_replicate_size: Option<usize>,
    /// Ranks that share the state of one copy; unchanged if omitted.
    #[arg(long = "dp_shard_size")]
    dp_shard_size: Option<usize>,
    /// Ranks that share each matrix product; unchanged if omitted.
    #[arg(long = "tensor_parallel_size", alias = "tp_size")]
    tensor_parallel_size: Option<usize>,
    /// Ranks that share one sequence; unchanged if omitted.
    #[arg(long = "context_parallel_size", alias = "cp_size")]
    context_parallel_size: Option<usize>,
    /// Ranks that share the layers; unchanged if omitted.
    #[arg(long = "pipeline_parallel_size", alias = "pp_size")]
    pipeline_parallel_size: Option<usize>,
}

impl Which {
    fn output_dir(&self) -> Result<PathBuf, JobError> {
        if self.job.is_dir() || is_url(&self.job) {
            return Ok(self.job.clone());
        }
        Ok(JobConfig::load(&self.job, &[])?.output.output_dir)
    }

    /// The folder of the job's files on this machine.
    fn folder(&self) -> Result<PathBuf, JobError> {
        Ok(OutputSection { output_dir: self.output_dir()?, ..OutputSection::default() }.folder())
    }

    /// How long a coordinator may be silent, as the job's file says.
    fn timing(&self) -> Timing {
        JobConfig::load(&self.job, &[]).map_or_else(|_| Timing::default(), |job| job.elastic.timing())
    }

    /// The answer to a request, or the traces of a job without a coordinator.
    fn ask_or_look(&self, request: &Request) -> Result<Result<Answer, Past>, JobError> {
        let output_dir = self.output_dir()?;
        match ask(&output_dir, request) {
            Ok(answer) => Ok(Ok(answer)),
            Err(_) if Preparing::is_shown(&self.folder()?) => Err(ControlPlaneError::Preparing { output_dir }.into()),
            Err(error) => past::instead_of(error, &output_dir, &self.timing()).map(Err),
        }
    }

    fn ask(&self, request: &Request) -> Result<Answer, JobError> {
        let over = |past: Past| CommandError::NotRunning { what: past.sentence(SystemTime::now()) };
        Ok(self.ask_or_look(request)?.map_err(over)?)
    }

    fn status(&self) -> Result<Status, JobError> {
        status_of(self.ask(&Request::Status)?)
    }

    /// Sends a request whose effect begins at once, or fails if no node is there to carry it out.
    fn request(&self, request: &Request, done: &str) -> Result<(), JobError> {
        let is_deserted = is_deserted(&self.status()?);
        match self.ask(request)? {
            Answer::Refused(reason) => Err(CommandError::Refused { reason }.into()),
            _ if is_deserted => Err(CommandError::NoNodes.into()),
            Answer::NoEffect(why) => Err(CommandError::NoEffect { why }.into()),
            Answer::Later(why) => {
                say(format_args!("recorded; {why}"));
                Ok(())
            }
            Answer::Done | Answer::Status(_) => {
                say(done);
                Ok(())
            }
        }
    }
}

fn status_of(answer: Answer) -> Result<Status, JobError> {
    match answer {
        Answer::Status(status) => Ok(*status),
        Answer::Refused(reason) => Err(CommandError::Refused { reason }.into()),
        Answer::Done | Answer::Later(_) | Answer::NoEffect(_) => Err(CommandError::NoStatus.into()),
    }
}

/// Whether a job has ranks, and none of its nodes is connected.
fn is_deserted(status: &Status) -> bool {
    status.mesh.is_some() && status.nodes.iter().all(|node| node.silent)
}

pub(super) fn status(args: &StatusArgs, console: &Console) -> Result<(), JobError> {
    let columns = console.out().width().map_or(COLUMNS, usize::from);
    let (now, folder) = (SystemTime::now(), args.which.folder()?);
    match args.which.ask_or_look(&Request::Status)? {
        Ok(answer) => {
            let (status, measured) = (status_of(answer)?, Measured::latest(&folder));
            match args.json {
                true => say_json(&as_json(&status, measured.as_ref(), None)?, true),
                false => show(&status, measured.as_ref(), columns),
            }
        }
        Err(past) if args.json => say_json(&as_json(&past.status(now), past.measured.as_ref(), Some(&past))?, true),
        Err(past) => {
            say(folded(&words(&past.sentence(now)), " ", columns));
            if let Some(measured) = &past.measured {
                say(format_args!("loss {:.5} · {} tok/s", measured.last.loss, short_count(measured.last.tokens_per_s)));
            }
            say(past.durable());
        }
    }
    Ok(())
}

/// The status with what the job's file of measurements tells: the last loss and speed, and what is left of the run.
fn as_json(status: &Status, measured: Option<&Measured>, past: Option<&Past>) -> Result<serde_json::Value, JobError> {
    let mut value = serde_json::to_value(status).map_err(CommandError::Encode)?;
    let left = measured.and_then(|m| m.left(status.step.0));
    let added = serde_json::json!({
        "running": past.is_none(),
        "outcome": past.map(Past::outcome),
        "saved_step": status.checkpoint.step,
        "loss": measured.map(|m| m.last.loss),
        "tokens_per_s": measured.map(|m| m.last.tokens_per_s),
        "total_steps": measured.map(|m| m.last.total_steps).filter(|n| *n > 0),
        "steps_left": left.map(|(n_steps, _)| n_steps),
        "eta_s": left.filter(|_| past.is_none()).map(|(_, eta)| eta.as_secs_f64()),
        "last_event_unix_ms": past.and_then(Past::last_event_ms),
    });
    if let (Some(value), serde_json::Value::Object(added)) = (value.as_object_mut(), added) {
        value.extend(added);
        if past.is_some_and(|past| !past.is_over()) {
            value.insert("activity".into(), "not_running".into());
        }
    }
    Ok(value)
}

/// Loss, speed and what is left of the run.
fn progress(measured: &Measured, step: u64, columns: usize) -> String {
    let m = &measured.last;
    let mut parts = vec![format!("loss {:.5}", m.loss), format!("{} tok/s", short_count(m.tokens_per_s))];
    if let Some((n_steps, eta)) = measured.left(step) {
        parts.push(format!("{n_steps} of {} steps left", m.total_steps));
        parts.extend((n_steps > 0).then(|| format!("ETA {}", short_duration(eta))));
    }
    folded(&parts, " · ", columns)
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// A table that is no wider than the terminal.
fn table<const N: usize>(header: [&str; N], columns: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(header);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(columns as u16);
    table
}

pub(super) fn drain(args: &DrainArgs) -> Result<(), JobError> {
    let known = args.which.status()?;
    let node = NodeId(args.node);
    if !known.nodes.iter().any(|other| other.node == node) {
        let nodes = known.nodes.iter().map(|other| other.node.0).collect();
        return Err(CommandError::UnknownNode { node: args.node, nodes }.into());
    }
    if args.gone {
        let done = format!("continuing without {node}; its processes may not return");
        return args.which.request(&Request::DeclareGone(node), &done);
    }
    args.which.request(&Request::Drain(node), &format!("draining {node}; it exits once other nodes hold its state"))
}

pub(super) fn resize(args: &ResizeArgs) -> Result<(), JobError> {
    let Status { wanted: now, mesh: running, .. } = args.which.status()?;
    let change = Resize {
        dp_replicate_size: args.dp_replicate_size,
        dp_shard_size: args.dp_shard_size,
        tensor_parallel_size: args.tensor_parallel_size,
        context_parallel_size: args.context_parallel_size,
        pipeline_parallel_size: args.pipeline_parallel_size,
    };
    let mesh = change.of(now);
    if mesh == now && running == Some(now) {
        return Err(CommandError::SameMesh { mesh: mesh.to_string() }.into());
    }
    args.which.request(
        &Request::Resize(mesh),
        &format!("resizing to {mesh}; `phalanx status` shows when the new mesh is running"),
    )
}

pub(super) fn save(args: &Which) -> Result<(), JobError> {
    // Counted before the request: the job may be over as soon as it has done it.
    let n_asked = args.status()?.requests.save + 1;
    args.request(&Request::Save, "saving a checkpoint after the current step")?;
    let mut waits_for = None;
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let (status, over) = match args.ask_or_look(&Request::Status)? {
            Ok(Answer::Status(status)) => (*status, None),
            // A coordinator that has just lost its lease refuses until it, or its successor, leads again.
            Ok(_) => continue,
            Err(past) => (past.status(SystemTime::now()), Some(past)),
        };
        if let Some(saved) = answer_to_save(&status, over.as_ref(), n_asked) {
            say(format_args!("saved at step {}", saved?));
            return Ok(());
        }
        if is_deserted(&status) {
            return Err(CommandError::NoNodes.into());
        }
        if status.blocked.is_some() && status.blocked != waits_for {
            say(format_args!("waiting: {}", status.blocked.as_deref().unwrap_or_default()));
            waits_for = status.blocked;
        }
    }
}

/// The step that was saved for a request, or why none was; `None` before the answer. `over` is a job that has ended, or was killed.
fn answer_to_save(status: &Status, over: Option<&Past>, n_asked: u64) -> Option<Result<u64, JobError>> {
    if status.n_saves >= n_asked {
        return Some(Ok(status.checkpoint.step.0));
    }
    if let Some(unsaved) = status.unsaved.as_ref().filter(|_| status.n_unsaved >= n_asked) {
        return Some(Err(CommandError::NotSaved { what: unsaved.to_string() }.into()));
    }
    match (&status.ending, over) {
        (Some(Ending::Failed(reason)), _) => Some(Err(JobError::JobFailed(reason.clone()))),
        (_, Some(past)) => Some(Err(CommandError::NotRunning { what: past.sentence(SystemTime::now()) }.into())),
        _ => None,
    }
}

/// Interval of looking for a requested checkpoint.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) fn stop(args: &Which) -> Result<(), JobError> {
    args.request(&Request::Stop, "stopping after the current step; saving a checkpoint")
}

fn show(status: &Status, measured: Option<&Measured>, columns: usize) {
    let activity = serde_json::to_value(status.activity).ok().and_then(|v| v.as_str().map(str::to_owned));
    let mesh = status.mesh.unwrap_or(status.wanted);
    let head = [
        activity.unwrap_or_default().replace('_', " "),
        format!("step {}", status.step.0),
        status.generation.to_string(),
        format!("{} ranks ({mesh})", mesh.size()),
        status.term.to_string(),
    ];
    say(folded(&head, " · ", columns));
    if let Some(measured) = measured {
        say(progress(measured, status.step.0, columns));
    }
    if let Some(why) = &status.blocked {
        say(folded(&words(&format!("waiting: {why}")), " ", columns));
    }
    if status.wanted != mesh {
        say(format_args!("target: {} ranks ({})", status.wanted.size(), status.wanted));
    }
    match &status.ending {
        Some(Ending::Finished) => say("the job is done"),
        Some(Ending::Failed(why)) => say(folded(&words(&format!("the job has failed: {why}")), " ", columns)),
        None => say(durable(status)),
    }
    for fault in &status.faults {
        say(folded(&words(&format!("fault: {fault}")), " ", columns));
    }
    let mut table =
        table(["node", "slot", "pid", "rank", "coord", "state", "entered", "applied", "shadows", "heartbeat"], columns);
    for node in &status.nodes {
        let heard = format!("{} ms ago", node.heard_ago_ms);
        let state = if node.silent {
            " (silent)"
        } else if node.left_out {
            " (unreachable)"
        } else if node.draining {
            " (draining)"
        } else {
            ""
        };
        if node.ranks.is_empty() {
            let name = format!("{}{state}", node.node.0);
            table.add_row([&name, "", "", "", "", "no ranks", "", "", "", &heard]);
        }
        for worker in &node.ranks {
            table.add_row(row(&format!("{}{state}", node.node.0), worker, &heard));
        }
    }
    say(table);
    status.nodes.iter().flat_map(|node| devices(node, columns)).for_each(say);
    for timeline in &status.timelines {
        say(folded(&words(&incident(&IncidentLine::from(timeline))), " ", columns));
    }
}

/// Which state is durable, and since when nothing newer is.
fn durable(status: &Status) -> String {
    let age_s = status.checkpoint_age_ms / 1000;
    match status.checkpoint.step.0 {
        0 => format!("no checkpoint yet, after {age_s} s"),
        step => format!("last checkpoint at step {step}, {age_s} s ago"),
    }
}

/// The devices of a node and the slots that use them, a paragraph each.
fn devices(node: &NodeStatus, columns: usize) -> Vec<String> {
    let shown = |(i, device): (u32, &DeviceHealth)| {
        let users = node.ranks.iter().filter(|rank| rank.device == Some(i));
        let slots: Vec<String> = users.map(|rank| rank.member.slot.to_string()).collect();
        let health = match &device.fault {
            Some(fault) => format!("failed: {fault}"),
            None => device.remarks().unwrap_or_else(|| "good".to_owned()),
        };
        let parts = [
            Some(format!("GPU of node {}", node.node.0)),
            Some(device.id.clone()),
            Some(device.name.clone()),
            Some(format!("slots {}", slots.join(" "))).filter(|_| !slots.is_empty()),
            Some(format!("{} of {}", human_bytes(device.used_bytes), human_bytes(device.total_bytes))),
            device.celsius.map(|celsius| format!("{celsius} °C")),
            Some(health),
        ];
        folded(&parts.into_iter().flatten().collect::<Vec<_>>(), " · ", columns)
    };
    (0u32..).zip(&node.devices).map(shown).collect()
}

fn row(node: &str, worker: &RankStatus, heard: &str) -> [String; 10] {
    let at = worker.coordinate.iter().flatten().filter(|(_, at)| **at > 0);
    let at: Vec<String> = at.map(|(axis, at)| format!("{axis} {at}")).collect();
    let state = match (worker.hangs, worker.phase, worker.rank) {
        (true, ..) => "stuck".to_owned(),
        (_, MemberPhase::Stopped, None) => "spare".to_owned(),
        (_, MemberPhase::CatchingUp, _) if worker.n_own + worker.n_shadows == 0 => "catching up".to_owned(),
        (_, MemberPhase::CatchingUp, _) => "caught up".to_owned(),
        (_, MemberPhase::Running, _) if worker.slow => format!("{}; straggler", worker.at),
        (_, MemberPhase::Running, _) => worker.at.to_string(),
        (_, phase, _) => format!("{phase:?}").to_lowercase(),
    };
    [
        node.to_owned(),
        worker.member.slot.to_string(),
        worker.pid.map_or(String::new(), |pid| pid.to_string()),
        worker.rank.map_or(String::new(), |rank| rank.to_string()),
        at.join(" "),
        state,
        worker.entered.0.to_string(),
        worker.applied.map_or(String::new(), |step| step.0.to_string()),
        if worker.n_shadows > 0 { worker.n_shadows.to_string() } else { String::new() },
        heard.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::elastic::checkpoint::Checkpoint;
    use phalanx_strategies::elastic::identity::{Generation, Step};
    use phalanx_strategies::elastic::message::Record;

    #[test]
    fn requested_checkpoint_of_a_job_that_has_ended_since_counts_as_saved() {
        let checkpoint = Checkpoint { generation: Generation(1), step: Step(30) };
        let record = Record { checkpoint, n_saves: 1, ending: Some(Ending::Finished), ..Record::default() };
        let past = Past::from(record, std::path::Path::new("no folder"));
        let answer = |n_asked| answer_to_save(&past.status(SystemTime::now()), Some(&past), n_asked).unwrap();

        assert_eq!(answer(1).unwrap(), 30);
        assert!(answer(2).unwrap_err().to_string().contains("the job ended"));
    }
}
