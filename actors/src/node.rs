//! Handle of a supervisor that runs on its own control thread, for programs without actors.

use crate::control::{ControlThread, RunError};
use crate::supervisor::{
    DesiredStateArrived, DrainNode, Examine, Health, JobOver, Kill, MAILBOX_LEN, Outlets, SendReport, Settings,
    Shutdown, Spawn, StatusReport, Supervisor, Tell, WorkerExamined, WorkerExited, WorkerStarted, WorkerUnfit,
};
use crate::transport::{NotSent, Uplink};
use actix::{Actor, Addr, Context, Handler, Message};
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Report};
use phalanx_strategies::elastic::supervisor::Abandonment;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Commands of the supervisor to processes.
#[derive(Clone, Debug)]
pub enum Process {
    /// Start a process on a device of the node, if the node has any; answer with [`Node::started`] or [`Node::exited`].
    Spawn(Worker, Option<u32>),
    /// Kill a process, or cancel its start; answer with [`Node::exited`].
    Kill(Worker),
    /// Find out how long a process has waited for a processor since its last heartbeat, or since the last such command; pass on
    /// the heartbeats that have arrived, then answer with [`Node::examined`].
    Examine(Worker),
    /// Pass a desired state on to a process.
    Tell(Worker, DesiredState),
    /// No process is left, and no process will be started; with a reason if the node cannot take part.
    Shutdown(Option<Abandonment>),
}

/// Handle of a supervisor actor.
#[derive(Clone, Debug)]
pub struct Node {
    supervisor: Addr<Supervisor>,
}

/// An actor that passes commands to a function.
struct Processes<F>(F);

impl<F: Unpin + 'static> Actor for Processes<F> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(MAILBOX_LEN);
    }
}

macro_rules! commands {
    ($($message:ty: $pattern:pat => $command:expr),* $(,)?) => {
        $(impl<F: FnMut(Process) + Unpin + 'static> Handler<$message> for Processes<F> {
            type Result = ();

            fn handle(&mut self, $pattern: $message, _: &mut Context<Self>) {
                (self.0)($command);
            }
        })*
    };
}

commands! {
    Spawn: Spawn { worker, device } => Process::Spawn(worker, device),
    Kill: Kill(worker) => Process::Kill(worker),
    Examine: Examine(worker) => Process::Examine(worker),
    Tell: Tell { worker, desired_state } => Process::Tell(worker, desired_state),
    Shutdown: Shutdown(why) => Process::Shutdown(why),
}

/// Gives reports to the transport: as news if they differ from the last report, else as heartbeats.
struct UplinkActor {
    uplink: Arc<dyn Uplink>,
    last: Option<Report>,
}

impl Actor for UplinkActor {
    type Context = Context<Self>;
}

impl Handler<SendReport> for UplinkActor {
    type Result = ();

    fn handle(&mut self, SendReport(report): SendReport, _: &mut Context<Self>) {
        let is_news = self.last.as_ref().is_none_or(|last| gist(last) != gist(&report));
        let sent = if is_news { self.uplink.news(&report) } else { self.uplink.heartbeat(&report) };
        match sent {
            // An unsent report is still news at the next call.
            Err(NotSent::Full) => tracing::debug!("the transport is full; the next report repeats this one"),
            Err(NotSent::Closed) => tracing::debug!("a report was not sent: the connection is closed"),
            Err(error) => tracing::error!(%error, "cannot send a report"),
            Ok(()) => self.last = Some(report),
        }
    }
}

/// The report without the fields that change in every step.
fn gist(report: &Report) -> Report {
    let members = report.members.iter().map(|member| MemberReport {
        entered: Default::default(),
        progress: Default::default(),
        commit_state: Default::default(),
        ..member.clone()
    });
    let devices = report.devices.iter().map(DeviceHealth::settled).collect();
    Report { number: 0, devices, members: members.collect(), ..report.clone() }
}

impl Node {
    /// Starts a supervisor on `thread` that reports through `uplink`, applies `desired_states` and calls `processes` with
    /// each command to a process. `processes` must not block.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        uplink: Arc<dyn Uplink>,
        mut desired_states: mpsc::Receiver<DesiredState>,
        processes: impl FnMut(Process) + Send + Unpin + 'static,
    ) -> Result<Node, RunError> {
        let start = move |guardian: crate::control::Guardian| async move {
            let processes = guardian.start("outlet to the processes", |_| Processes(processes));
            let uplink_actor = guardian.start("transport to the coordinators", |_| UplinkActor { uplink, last: None });
            let outlets = Outlets {
                spawn: processes.clone().recipient(),
                kill: processes.clone().recipient(),
                examine: processes.clone().recipient(),
                tell: processes.clone().recipient(),
                reports: uplink_actor.recipient(),
                shutdown: processes.recipient(),
            };
            let supervisor = guardian.start("supervisor", |_| Supervisor::new(settings, outlets));
            let receiver = supervisor.clone();
            guardian.spawn("receiver of desired states", async move {
                while let Some(desired_state) = desired_states.recv().await {
                    // Waits while the mailbox is full, so that newer desired states replace older ones at the
                    // coordinator.
                    let _ = receiver.send(DesiredStateArrived(desired_state)).await;
                }
            });
            supervisor
        };
        let supervisor = thread.run(start).await?;
        Ok(Node { supervisor })
    }

    /// Delivers a process's first report. Returns whether the mailbox had room; if not, call it again.
    #[must_use]
    pub fn started(&self, status_report: MemberReport) -> bool {
        self.try_send(WorkerStarted(status_report))
    }

    /// Reports that a process has exited. Returns like [`Node::started`].
    #[must_use]
    pub fn exited(&self, worker: Worker) -> bool {
        self.try_send(WorkerExited(worker))
    }

    /// Reports how long a process has waited for a processor. Returns like [`Node::started`].
    #[must_use]
    pub fn examined(&self, worker: Worker, waited: Duration) -> bool {
        self.try_send(WorkerExamined { worker, waited })
    }

    /// Reports that a process cannot start, and that a restart would fail too. Returns like [`Node::started`].
    #[must_use]
    pub fn cannot_start(&self, worker: Worker, reason: String) -> bool {
        self.try_send(WorkerUnfit { worker, reason })
    }

    /// Delivers a process's heartbeat. Returns whether the mailbox had room; if not, the next heartbeat replaces it.
    pub fn status_report(&self, status_report: MemberReport) -> bool {
        self.try_send(StatusReport(status_report))
    }

    /// Whether the supervisor has ended, so that messages to it are lost.
    pub fn has_ended(&self) -> bool {
        !self.supervisor.connected()
    }

    /// Delivers the latest state of the node's devices. Returns whether the mailbox had room; if not, a later state replaces it.
    pub fn health(&self, latest: Vec<DeviceHealth>) -> bool {
        self.try_send(Health(latest))
    }

    /// Drains the node before its machine is taken away. Returns like [`Node::started`].
    #[must_use]
    pub fn drain(&self) -> bool {
        self.try_send(DrainNode)
    }

    /// Ends the supervisor with its job, whether or not a coordinator has told it. Returns like [`Node::started`].
    #[must_use]
    pub fn over(&self) -> bool {
        self.try_send(JobOver)
    }

    fn try_send<M>(&self, message: M) -> bool
    where
        M: Message<Result = ()> + Send + 'static,
        Supervisor: Handler<M>,
    {
        self.supervisor.try_send(message).is_ok()
    }
}
