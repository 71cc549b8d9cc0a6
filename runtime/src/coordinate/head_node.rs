//! Coordinator and node of a job in one process: of a job of this machine alone, or the first machine of several.

use crate::config::JobConfig;
use crate::control::Control;
use crate::coordinate::sentence::{self, sentence};
use crate::coordinate::serve::{
    CONTROL, Coordinated, Coordinating, CoordinatorEvent, Serve, admission, begin_alone, listen_alone, serve,
};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::{Event, Report};
use crate::node::bootstrap::JobBootstrap;
use crate::node::join::{JoinAs, Leave, Outcome, Part, enter, join};
use crate::train::output_lock::OutputLock;
use crate::train::plan::ModelPlan;
use crate::train::saving::Saving;
use phalanx_actors::control::ControlThread;
use phalanx_actors::events::What;
use phalanx_actors::transport::Downlink;
use phalanx_actors::transport::in_process::{Pair, connect};
use phalanx_actors::trust::join::JoinString;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::incident::Why;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Settings of this machine's ranks.
#[derive(Clone, Debug)]
pub(crate) struct LocalNode {
    pub(crate) program: PathBuf,
    /// Rank processes; there may be none.
    pub(crate) n_slots: u32,
    /// Where ranks of other machines reach them; found out if absent.
    pub(crate) advertise: Option<IpAddr>,
}

/// Coordinates a job of several machines and takes part in it, to its end. `told` gets the join string of the other machines.
pub(crate) fn lead(
    config: &JobConfig,
    model: &ModelPlan,
    how: &Serve,
    here: LocalNode,
    control: &Control,
    told: &mut dyn FnMut(&str),
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let _lock = OutputLock::take(&config.output.output_dir)?;
    let ((joins, joined), (entered, has_entered)) = (channel(), channel());
    let take_part = |is_over: &AtomicBool, on_event: &mut (dyn FnMut(&Event) + Send)| {
        take_part(config, here, joined, entered, is_over, on_event)
    };
    let coordinate = |is_abandoned: &dyn Fn() -> bool, tell: &dyn Fn(&Event)| {
        // Dropped with the last join string, so that a node that never gets one does not wait for it.
        let joins = joins;
        serve(config, model, how, control, is_abandoned, &mut |happened| match happened {
            CoordinatorEvent::Join(string) => {
                let _ = joins.send(string.clone());
                // This machine is the first of the job, so that its leader is here; an error means that it has no ranks.
                let _ = has_entered.recv();
                told(&string);
            }
            CoordinatorEvent::StandsBy => {
                tell(&Event::Note("waiting: another coordinator of this job is active".into()))
            }
            CoordinatorEvent::Event(event) => tell(&Event::Note(sentence(&event))),
        })
    };
    together(config, take_part, coordinate, on_event)
}

/// Coordinates a job of this machine alone and takes part in it, to its end: the same coordinator, supervisor and ranks as
/// over several machines, with a transport inside this process. The caller has locked the job's folder.
pub(crate) fn lead_alone(
    config: &JobConfig,
    model: ModelPlan,
    here: LocalNode,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let term = begin_alone(config, &mut |warning| on_event(&Event::Note(warning)))?;
    let (node, boot) = (NodeId(0), Incarnation(1));
    let (operators, requests) = listen_alone(config, &term)?;
    let Pair { coordinator, inbox, node: uplink, desired_states } = connect(node, boot, WAITING_MAX);
    let thread =
        ControlThread::start("phalanx-control").map_err(ControlPlaneError::cannot("start the control thread"))?;
    let admission = admission(config, &model, Some(here.n_slots));
    let mesh = config.parallel.mesh()?;
    let part = Part {
        job: term.job(),
        node,
        boot,
        bootstrap: JobBootstrap { yaml: config.to_yaml(), secret: Vec::new(), start_from: term.start_from.clone() },
        n_slots: here.n_slots,
        n_threads: config.precision.threads.unwrap_or_else(|| (model.device.available_threads() / mesh.size()).max(1)),
        listen: None,
        program: here.program,
        uplink: Arc::new(uplink),
        desired_states,
    };
    let inboxes = vec![inbox, requests];
    let coordinating = Coordinating::start(config, &model, term, &thread, admission, Arc::new(coordinator), inboxes)?;
    let take_part = |is_over: &AtomicBool, on_event: &mut (dyn FnMut(&Event) + Send)| {
        part.take(config, model, &thread, &|| leaves_once(is_over), on_event)
    };
    let coordinate = |is_abandoned: &dyn Fn() -> bool, tell: &dyn Fn(&Event)| {
        coordinating.follow(control, is_abandoned, &mut |happened| {
            // Of one machine, only what interrupts the steps is worth a line.
            if let CoordinatorEvent::Event(happening) = happened
                && let What::Incident(incident) = &happening.what
                && incident.why != Why::Started
            {
                tell(&Event::Note(sentence::incident(incident)));
            }
        })
    };
    let report = together(config, take_part, coordinate, on_event);
    thread.stop();
    operators.close();
    report
}

/// Messages that may wait between coordinator and supervisor of one process.
const WAITING_MAX: usize = 64;

fn leaves_once(is_over: &AtomicBool) -> Leave {
    if is_over.load(Ordering::Acquire) { Leave::Now } else { Leave::Stay }
}

/// Runs a node beside the coordinator of its job, and says how the job ended.
fn together(
    config: &JobConfig,
    take_part: impl FnOnce(&AtomicBool, &mut (dyn FnMut(&Event) + Send)) -> Result<Outcome, JobError> + Send,
    coordinate: impl FnOnce(&dyn Fn() -> bool, &dyn Fn(&Event)) -> Coordinated,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let on_event = Mutex::new(on_event);
    // Two threads emit events; the lock survives a panic of the callback.
    let tell = |event: &Event| on_event.lock().unwrap_or_else(PoisonError::into_inner)(event);
    let (has_done_its_part, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (status, node) = std::thread::scope(|scope| {
        let node = scope.spawn(|| {
            let outcome = take_part(&is_over, &mut |event| tell(event));
            has_done_its_part.store(outcome.is_ok(), Ordering::Release);
            outcome
        });
        let over = Raise(&is_over);
        let is_abandoned = || node.is_finished() && !has_done_its_part.load(Ordering::Acquire);
        let Coordinated { status, nodes_told } = coordinate(&is_abandoned, &tell);
        if nodes_told {
            // The node ends by itself, once its ranks have.
            std::mem::forget(over);
        } else {
            drop(over);
        }
        (status, node.join())
    });
    // A local failure is the cause of the job's failure.
    let Outcome { report, failure } = node.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    match (report, status) {
        (_, Err(error)) => Err(failure.unwrap_or(error)),
        (Some(report), Ok(_)) => Ok(report),
        (None, Ok(Some(status))) => report_of(config, &status),
        (None, Ok(None)) => Err(JobError::JobFailed("another coordinator has taken over".into())),
    }
}

/// Sets the flag when dropped, even during a panic.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn take_part(
    config: &JobConfig,
    here: LocalNode,
    joined: Receiver<String>,
    entered: Sender<()>,
    is_over: &AtomicBool,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Outcome, JobError> {
    let Ok(string) = joined.recv() else { return Ok(Outcome::default()) };
    if here.n_slots == 0 {
        return Ok(Outcome::default());
    }
    let string: JoinString = string.parse().map_err(ControlPlaneError::JoinString)?;
    let dir = config.output.output_dir.join(CONTROL).join("here");
    let credential = enter(&string, &dir)?;
    // The receiver is gone if the coordinator has failed.
    let _ = entered.send(());
    drop(entered);
    let (n_slots, advertise, program) = (here.n_slots, here.advertise, here.program);
    let how = JoinAs { join: string, credential, dir, n_slots, advertise, program };
    join(how, &|| leaves_once(is_over), on_event)
}

/// The report of a job whose leader was on another machine.
fn report_of(config: &JobConfig, status: &Status) -> Result<Report, JobError> {
    let output = &config.output;
    let saving = Saving::new(output, Vec::new());
    let (checkpoint, _) = saving.find(&crate::config::output::Resume::Auto)?;
    let finished = !status.requests.stop;
    let model_dir = finished.then(|| output.output_dir.join("model"));
    Ok(Report { steps: status.checkpoint.step.0, finished, last: None, checkpoint, model_dir })
}
