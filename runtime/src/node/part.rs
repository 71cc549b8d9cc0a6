//! A node's part in a job: a supervisor on the control thread, and rank processes of the calling thread.

use crate::config::JobConfig;
use crate::config::precision::PrecisionSection;
use crate::control::STOP_PATIENCE;
use crate::devices::choice_of;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::Event;
use crate::frontend::UserModel;
use crate::launch::executable::Executable;
use crate::node::bootstrap::JobBootstrap;
use crate::node::devices;
use crate::node::leave::Leave;
use crate::node::node_loop::{NodeLoop, Outcome};
use crate::node::processes::Node as Processes;
use crate::rank::rank_messages::Begin;
use crate::train::inputs::RunInputs;
use crate::train::plan::ModelPlan;
use phalanx_actors::control::{ControlThread, block_on};
use phalanx_actors::node::{Node, Process};
use phalanx_actors::supervisor::Settings;
use phalanx_actors::transport::Uplink;
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId, Worker};
use phalanx_strategies::elastic::message::DesiredState;
use std::io::Write;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use tokio::sync::mpsc;

/// A node of a job, and the transport to its coordinator.
pub(crate) struct Part {
    pub(crate) job: JobId,
    pub(crate) node: NodeId,
    pub(crate) boot: Incarnation,
    pub(crate) bootstrap: JobBootstrap,
    /// Number of rank processes.
    pub(crate) n_slots: u32,
    /// Threads of each rank.
    pub(crate) n_threads: usize,
    /// What its ranks train on and with.
    pub(crate) inputs: RunInputs,
    /// Address at which ranks of other nodes reach the ranks of this one; `None` if there are no other nodes.
    pub(crate) listen: Option<IpAddr>,
    /// The rank program.
    pub(crate) program: Executable,
    pub(crate) uplink: Arc<dyn Uplink>,
    pub(crate) desired_states: mpsc::Receiver<DesiredState>,
}

impl Part {
    /// Takes part until the job ends or this node is released. The supervisor runs on `thread`; the ranks are children of the
    /// calling thread.
    pub(crate) fn take(
        self,
        config: &JobConfig,
        model: ModelPlan,
        thread: &ControlThread,
        leaves: &dyn Fn() -> Leave,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Outcome, JobError> {
        let Part { job, node, boot, bootstrap, n_slots, inputs, .. } = self;
        let timing = config.elastic.timing();
        let is_alone = self.listen.is_none();
        // Nobody can add ranks to a job on one machine.
        let n_ranks_min = || Ok::<_, JobError>(config.elastic.policy(config.parallel.mesh()?, 1, 0).smallest(None));
        let n_slots_min = if is_alone { n_ranks_min()? as u32 } else { 1 };
        let devices = devices::for_slots(model.device.health(), n_slots);
        let watch = model.device.watch();
        let begin = Begin {
            job,
            worker: Worker::default(),
            assignment: (config.parallel.mesh()?, 0),
            arena_bytes: 0,
            is_successor: false,
            n_threads: self.n_threads,
            yaml: yaml_of_ranks(config, &model),
            listen: self.listen,
            secret: bootstrap.secret,
            peak_flops: model.device.peak_flops(model.spec.precision.is_bf16()),
            start_from: bootstrap.start_from,
            claim: bootstrap.claim,
            timing,
            user_model: model.model.user().map(UserModel::digest),
            inputs,
        };
        let inputs = if is_alone { Vec::new() } else { begin.inputs.of_node() };
        let evaluates = config.data.evaluates();
        let ids = devices.health().iter().map(|device| device.id.clone()).collect();
        let mut processes = Processes::new(node, self.program, model, evaluates, begin, n_slots, ids)?;
        let (commands, taken) = channel();
        let [waker, wakened, polled] = waker().map_err(ControlPlaneError::cannot("make a pair of sockets"))?;
        processes.wake_on(OwnedFd::from(polled));
        let settings = Settings { job, node, boot, n_slots, n_slots_min, devices, inputs, timing };
        let starting =
            Node::start(thread, settings, Arc::clone(&self.uplink), self.desired_states, waking(commands, waker));
        let supervisor = block_on(starting)
            .map_err(ControlPlaneError::cannot("start an event loop"))?
            .map_err(ControlPlaneError::from)?;
        if let Some(watch) = watch {
            devices::watch(watch, supervisor.clone())?;
        }
        let patience = (timing.lease + timing.takeover_grace + timing.disk_patience).max(STOP_PATIENCE);
        NodeLoop::new(processes, supervisor, self.uplink, (taken, wakened), patience, is_alone)
            .run(thread, leaves, on_event)
    }
}

/// The configuration for ranks, which use the kind of device that the node has chosen.
fn yaml_of_ranks(config: &JobConfig, model: &ModelPlan) -> String {
    let precision = PrecisionSection { device: choice_of(&*model.device), ..config.precision.clone() };
    JobConfig { precision, ..config.clone() }.to_yaml()
}

/// Sends commands to the loop of the node, and wakes it.
fn waking(commands: Sender<Process>, waker: UnixStream) -> impl Fn(Process) + Send + 'static {
    move |command| {
        let _ = commands.send(command);
        // If the socket is full, the reader is already being woken.
        let _ = (&waker).write(&[1]);
    }
}

/// A socket that wakes the node loop, the end that the loop drains, and a copy of that end for polling.
fn waker() -> std::io::Result<[UnixStream; 3]> {
    let (waker, wakened) = UnixStream::pair()?;
    waker.set_nonblocking(true)?;
    wakened.set_nonblocking(true)?;
    let polled = wakened.try_clone()?;
    Ok([waker, wakened, polled])
}
