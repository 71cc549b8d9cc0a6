//! Coordinator and node in one process: for a job on this machine alone, or on the first of several machines.

use crate::config::JobConfig;
use crate::control::Control;
use crate::control_place::CONTROL;
use crate::coordinate::listening::{admission, listen_alone};
use crate::coordinate::sentence::{self, sentence};
use crate::coordinate::serve::{Coordinating, CoordinatorEvent, serve};
use crate::coordinate::serving::Serve;
use crate::coordinate::term::begin_alone;
use crate::coordinate::together::{Over, together};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::{Event, Report};
use crate::launch::executable::Executable;
use crate::node::bootstrap::JobBootstrap;
use crate::node::enrolment::enter;
use crate::node::folder::NodeFolder;
use crate::node::join::{JoinAs, join};
use crate::node::node_loop::Outcome;
use crate::node::part::Part;
use crate::train::inputs::RunInputs;
use crate::train::output_lock::OutputLock;
use crate::train::plan::ModelPlan;
use phalanx_actors::control::ControlThread;
use phalanx_actors::events::What;
use phalanx_actors::transport::Downlink;
use phalanx_actors::transport::in_process::{Pair, connect};
use phalanx_actors::trust::join::JoinString;
use phalanx_actors::trust::name::{Name, Role};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::incident::Why;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Settings of this machine's ranks.
#[derive(Clone, Debug)]
pub(crate) struct LocalNode {
    pub(crate) program: Executable,
    /// Number of rank processes, possibly 0.
    pub(crate) n_slots: u32,
    /// Address at which ranks of other machines reach them; detected if absent.
    pub(crate) advertise: Option<IpAddr>,
}

/// Coordinates a job on several machines, with a node of it here, to its end. `on_join` gets the join string.
pub(crate) fn lead(
    config: &JobConfig,
    model: &ModelPlan,
    how: &Serve,
    here: LocalNode,
    control: &Control,
    on_join: &mut dyn FnMut(&str),
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let lock = OutputLock::take(&config.output.folder())?;
    let ((joins, joined), (entered, has_entered)) = (channel(), channel());
    let take_part = |over: &Over, on_event: &mut (dyn FnMut(&Event) + Send)| {
        take_part(config, here, joined, entered, over, on_event)
    };
    let coordinate = |is_abandoned: &dyn Fn() -> bool, tell: &dyn Fn(&Event)| {
        // Dropped at the end, so that the local node does not wait for a join string that never comes.
        let joins = joins;
        serve(config, model, how, Some(lock), control, is_abandoned, &mut |happened| match happened {
            CoordinatorEvent::Join(string) => {
                let _ = joins.send(string.clone());
                // This machine joins first, so that the leader is here; an error means that it has no ranks.
                let _ = has_entered.recv();
                on_join(&string);
            }
            CoordinatorEvent::StandsBy => {
                tell(&Event::Note("waiting: another coordinator of this job is active".into()))
            }
            CoordinatorEvent::Event(event) => tell(&Event::Note(sentence(&event))),
        })
    };
    together(config, &control.bell, take_part, coordinate, on_event)
}

/// Coordinates a job on this machine alone, with its node, to its end. Coordinator, supervisor and ranks are the same as
/// on several machines, with a transport inside this process. `lock` is that of the job's folder.
pub(crate) fn lead_alone(
    config: &JobConfig,
    model: ModelPlan,
    inputs: RunInputs,
    here: LocalNode,
    lock: &OutputLock,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let mut term = begin_alone(config, &inputs, lock, &mut |warning| on_event(&Event::Note(warning)))?;
    let (node, boot) = (NodeId(0), Incarnation(1));
    let (operators, requests) = listen_alone(config, &mut term)?;
    let Pair { coordinator, inbox, node: uplink, desired_states } = connect(node, boot, WAITING_MAX);
    let thread =
        ControlThread::start("phalanx-control").map_err(ControlPlaneError::cannot("start the control thread"))?;
    let admission = admission(config, &model, Some(here.n_slots));
    let mesh = config.parallel.mesh()?;
    let part = Part {
        job: term.job(),
        node,
        boot,
        bootstrap: JobBootstrap {
            yaml: config.to_yaml(),
            secret: Vec::new(),
            start_from: term.start_from.clone(),
            claim: term.claim(),
        },
        n_slots: here.n_slots,
        n_threads: config.precision.threads.unwrap_or_else(|| (model.device.available_threads() / mesh.size()).max(1)),
        inputs,
        listen: None,
        program: here.program,
        uplink: Arc::new(uplink),
        desired_states,
    };
    let inboxes = vec![inbox, requests];
    let coordinating =
        Coordinating::start(config, &model, term, &thread, admission, Arc::new(coordinator), inboxes, &control.bell)?;
    let take_part = |over: &Over, on_event: &mut (dyn FnMut(&Event) + Send)| {
        part.take(config, model, &thread, &|| over.leave(node), on_event)
    };
    let coordinate = |is_abandoned: &dyn Fn() -> bool, tell: &dyn Fn(&Event)| {
        coordinating.follow(control, is_abandoned, &mut |happened| {
            // On one machine, only what interrupts the steps, or keeps the job from its end, gets a line.
            let CoordinatorEvent::Event(happening) = happened else { return };
            match &happening.what {
                What::Incident(incident) if incident.why != Why::Started => {
                    tell(&Event::Note(sentence::incident(incident)));
                }
                What::StoreSilent { .. } | What::StoreAnswers { .. } => tell(&Event::Note(sentence(&happening))),
                _ => {}
            }
        })
    };
    let report = together(config, &control.bell, take_part, coordinate, on_event);
    thread.stop();
    operators.close();
    report
}

/// Capacity of the queue between coordinator and supervisor in one process.
const WAITING_MAX: usize = 64;

fn take_part(
    config: &JobConfig,
    here: LocalNode,
    joined: Receiver<String>,
    entered: Sender<()>,
    over: &Over,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Outcome, JobError> {
    let Ok(string) = joined.recv() else { return Ok(Outcome::default()) };
    if here.n_slots == 0 {
        return Ok(Outcome::default());
    }
    let string: JoinString = string.parse().map_err(ControlPlaneError::JoinString)?;
    let folder = NodeFolder::lock(&config.output.folder().join(CONTROL).join("here"))?;
    let credential = enter(&string, &folder)?;
    let Name { role: Role::Node { node, .. }, .. } = credential.certified().name else {
        return Err(ControlPlaneError::NotANode.into());
    };
    // The receiver is gone if the coordinator has failed.
    let _ = entered.send(());
    drop(entered);
    let (n_slots, advertise, program) = (here.n_slots, here.advertise, here.program);
    let how = JoinAs { join: string, credential, folder, n_slots, advertise, program };
    join(how, &|| over.leave(node), on_event)
}
