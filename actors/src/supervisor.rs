//! The actor shell of a node's supervisor: owns the clock, the timer and the outlets; decides nothing.
//!
//! Another actor starts and kills the processes and passes messages to them; it answers with [`WorkerStarted`],
//! [`StatusReport`] and [`WorkerExited`]. Messages to it must not be lost or reordered, so the supervisor waits for a full
//! mailbox. Messages to the coordinator may be lost, since the next report repeats them.

use crate::timer::{Deadlines, Timer, now};
use actix::{Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, Recipient, WrapFuture};
use phalanx_strategies::elastic::devices::{DeviceHealth, Devices};
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId, Worker};
use phalanx_strategies::elastic::inputs::Input;
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Report};
use phalanx_strategies::elastic::supervisor::{self as machine, Abandonment};
use phalanx_strategies::elastic::timing::Timing;
use std::time::Duration;

/// Settings of a supervisor.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The job.
    pub job: JobId,
    /// The node.
    pub node: NodeId,
    /// Incarnation of this supervisor.
    pub boot: Incarnation,
    /// Number of slots for rank processes.
    pub n_slots: u32,
    /// Fewest slots with which the node stays in the job.
    pub n_slots_min: u32,
    /// Its devices, with a place for each slot.
    pub devices: Devices,
    /// What its ranks train on and with; none if no other node can join the job.
    pub inputs: Vec<Input>,
    /// All timeouts.
    pub timing: Timing,
}

/// Receivers of a supervisor's messages.
#[derive(Clone, Debug)]
pub struct Outlets {
    /// Starts processes.
    pub spawn: Recipient<Spawn>,
    /// Kills processes.
    pub kill: Recipient<Kill>,
    /// Examines processes.
    pub examine: Recipient<Examine>,
    /// Passes desired states to processes.
    pub tell: Recipient<Tell>,
    /// The transport to the coordinators.
    pub reports: Recipient<SendReport>,
    /// Receiver of the shutdown, once no process is left to supervise.
    pub shutdown: Recipient<Shutdown>,
}

/// Start a process; the answer is [`WorkerStarted`] or [`WorkerExited`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spawn {
    /// The worker of the process.
    pub worker: Worker,
    /// The device that it uses, among those of its node, if the node has any.
    pub device: Option<u32>,
}

/// Kill a process, or cancel its start; the answer is [`WorkerExited`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kill(pub Worker);

/// Find out how long a process has waited for a processor since its last heartbeat, or since the last such message; the answer is
/// [`WorkerExamined`], after the heartbeats that have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Examine(pub Worker);

/// Pass a desired state on to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tell {
    /// The receiver.
    pub worker: Worker,
    /// The desired state.
    pub desired_state: DesiredState,
}

/// Sends a report to every reachable coordinator. Delivery is not guaranteed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendReport(pub Report);

/// No process is left to supervise: send the waiting reports, and end; with a reason if the node cannot take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shutdown(pub Option<Abandonment>);

/// A coordinator's desired state has arrived.
#[derive(Clone, Debug)]
pub struct DesiredStateArrived(pub DesiredState);

/// A process's first status report.
#[derive(Clone, Debug)]
pub struct WorkerStarted(pub MemberReport);

/// A process has exited, as reported by the kernel.
#[derive(Clone, Copy, Debug)]
pub struct WorkerExited(pub Worker);

/// The answer to [`Examine`].
#[derive(Clone, Copy, Debug)]
pub struct WorkerExamined {
    /// The worker of the process.
    pub worker: Worker,
    /// How long it has waited for a processor.
    pub waited: Duration,
}

/// A process cannot start, and a restart would fail too.
#[derive(Clone, Debug)]
pub struct WorkerUnfit {
    /// The worker of the process.
    pub worker: Worker,
    /// Reason of the failed start.
    pub reason: String,
}

/// A heartbeat of a process.
#[derive(Clone, Debug)]
pub struct StatusReport(pub MemberReport);

/// The latest state of the node's devices.
#[derive(Clone, Debug)]
pub struct Health(pub Vec<DeviceHealth>);

/// Drains the node, because its machine is about to be taken away.
#[derive(Clone, Copy, Debug)]
pub struct DrainNode;

/// The job is over, or no coordinator is left to release the node.
#[derive(Clone, Copy, Debug)]
pub struct JobOver;

macro_rules! notifications {
    ($($message:ident),*) => {
        $(impl Message for $message {
            type Result = ();
        })*
    };
}

notifications!(
    Spawn,
    Kill,
    Examine,
    Tell,
    SendReport,
    Shutdown,
    DesiredStateArrived,
    WorkerStarted,
    WorkerUnfit,
    WorkerExited,
    WorkerExamined,
    StatusReport,
    Health,
    DrainNode,
    JobOver
);

/// Runs a node's machine: passes events to it in the order of their arrival, and carries out its commands.
pub struct Supervisor {
    machine: machine::Supervisor,
    outlets: Outlets,
    timer: Timer,
}

/// Mailbox size: messages of processes, and desired states.
pub const MAILBOX_LEN: usize = 256;

impl Supervisor {
    /// Creates the supervisor of a node, which starts a process in each slot at once.
    pub fn new(settings: Settings, outlets: Outlets) -> Supervisor {
        let Settings { job, node, boot, n_slots, n_slots_min, devices, inputs, timing } = settings;
        let machine = machine::Supervisor::new(now(), job, node, boot, n_slots, timing);
        let machine = machine.with_devices(devices, n_slots_min).with_inputs(inputs);
        Supervisor { machine, outlets, timer: Timer::default() }
    }

    /// Performs all pending commands, then re-arms the timer. Called after each event.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        while let Some(command) = self.machine.poll_command() {
            match command {
                machine::Command::Send(report) => {
                    if let Err(error) = self.outlets.reports.try_send(SendReport(report)) {
                        tracing::debug!(%error, "a report was not sent; the next one repeats it");
                    }
                }
                machine::Command::Spawn(worker) => {
                    let device = self.machine.device_of(worker.member.slot);
                    self.pass_on(&self.outlets.spawn, Spawn { worker, device }, ctx)
                }
                machine::Command::Examine(worker) => self.pass_on(&self.outlets.examine, Examine(worker), ctx),
                machine::Command::Kill(worker) => self.pass_on(&self.outlets.kill, Kill(worker), ctx),
                machine::Command::Tell(worker, desired_state) => {
                    self.pass_on(&self.outlets.tell, Tell { worker, desired_state }, ctx)
                }
                machine::Command::Shutdown => self.pass_on(&self.outlets.shutdown, Shutdown(None), ctx),
                machine::Command::Abandon(why) => self.pass_on(&self.outlets.shutdown, Shutdown(Some(why)), ctx),
            }
        }
        self.arm(self.machine.poll_timeout(), ctx);
    }

    fn pass_on<M>(&self, to: &Recipient<M>, message: M, ctx: &mut Context<Self>)
    where
        M: Message<Result = ()> + Send + 'static,
    {
        ctx.spawn(to.send(message).into_actor(self).map(|passed, _, _| {
            if let Err(error) = passed {
                tracing::warn!(%error, "messages to processes are lost because their actor has stopped");
            }
        }));
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(MAILBOX_LEN);
        self.drive(ctx);
    }
}

impl Deadlines for Supervisor {
    fn timer(&mut self) -> &mut Timer {
        &mut self.timer
    }

    fn wake(&mut self, ctx: &mut Context<Self>) {
        self.machine.handle_timeout(now());
        self.drive(ctx);
    }
}

impl Handler<DesiredStateArrived> for Supervisor {
    type Result = ();

    fn handle(&mut self, DesiredStateArrived(desired_state): DesiredStateArrived, ctx: &mut Context<Self>) {
        if let Err(stale) = self.machine.handle_desired_state(now(), desired_state) {
            tracing::debug!("rejecting a desired state that {stale}");
        }
        self.drive(ctx);
    }
}

impl Handler<WorkerStarted> for Supervisor {
    type Result = ();

    fn handle(&mut self, WorkerStarted(status_report): WorkerStarted, ctx: &mut Context<Self>) {
        self.machine.handle_started(now(), status_report);
        self.drive(ctx);
    }
}

impl Handler<WorkerExited> for Supervisor {
    type Result = ();

    fn handle(&mut self, WorkerExited(worker): WorkerExited, ctx: &mut Context<Self>) {
        self.machine.handle_exited(now(), worker);
        self.drive(ctx);
    }
}

impl Handler<WorkerExamined> for Supervisor {
    type Result = ();

    fn handle(&mut self, WorkerExamined { worker, waited }: WorkerExamined, ctx: &mut Context<Self>) {
        self.machine.handle_examined(now(), worker, waited);
        self.drive(ctx);
    }
}

impl Handler<WorkerUnfit> for Supervisor {
    type Result = ();

    fn handle(&mut self, WorkerUnfit { worker, reason }: WorkerUnfit, ctx: &mut Context<Self>) {
        self.machine.handle_unfit(now(), worker, &reason);
        self.drive(ctx);
    }
}

impl Handler<StatusReport> for Supervisor {
    type Result = ();

    fn handle(&mut self, StatusReport(status_report): StatusReport, ctx: &mut Context<Self>) {
        self.machine.handle_status_report(now(), status_report);
        self.drive(ctx);
    }
}

impl Handler<Health> for Supervisor {
    type Result = ();

    fn handle(&mut self, Health(latest): Health, ctx: &mut Context<Self>) {
        self.machine.handle_health(now(), latest);
        self.drive(ctx);
    }
}

impl Handler<DrainNode> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: DrainNode, ctx: &mut Context<Self>) {
        self.machine.handle_drain(now());
        self.drive(ctx);
    }
}

impl Handler<JobOver> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: JobOver, ctx: &mut Context<Self>) {
        self.machine.handle_over(now());
        self.drive(ctx);
    }
}
