//! Handle of a supervisor that runs on its own control thread, for programs without actors.

use crate::control::{ControlThread, RunError};
use crate::supervisor::{
    DesiredStateArrived, DrainNode, Kill, MAILBOX_LEN, Outlets, SendReport, Settings, Shutdown, Spawn, StatusReport,
    Supervisor, Tell, WorkerExited, WorkerStarted, WorkerUnfit,
};
use crate::transport::{NotSent, Uplink};
use actix::{Actor, Addr, Context, Handler, Message};
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Report};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Commands of the supervisor for processes.
#[derive(Clone, Debug)]
pub enum Process {
    /// Start one; answer with [`Node::started`], or with [`Node::exited`].
    Spawn(Worker),
    /// Kill one, or the start of one; answer with [`Node::exited`].
    Kill(Worker),
    /// Pass a desired state on to one.
    Tell(Worker, DesiredState),
    /// None is left and none will be started.
    Shutdown,
}

/// Handle of a supervisor's actor.
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
    Spawn: Spawn(worker) => Process::Spawn(worker),
    Kill: Kill(worker) => Process::Kill(worker),
    Tell: Tell { worker, desired_state } => Process::Tell(worker, desired_state),
    Shutdown: Shutdown => Process::Shutdown,
}

/// Tells heartbeats from news and gives them to the transport.
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
            // What was not sent is news still.
            Err(NotSent::Full) => tracing::debug!("a report found no room; the next one repeats it"),
            Err(NotSent::Closed) => tracing::debug!("a report was not sent: the connection is closed"),
            Err(error) => tracing::error!(%error, "cannot send a report"),
            Ok(()) => self.last = Some(report),
        }
    }
}

/// A report without the fields that change in every step.
fn gist(report: &Report) -> Report {
    let members = report.members.iter().map(|member| MemberReport {
        entered: Default::default(),
        progress: Default::default(),
        commit_state: Default::default(),
        ..member.clone()
    });
    Report { number: 0, members: members.collect(), ..report.clone() }
}

impl Node {
    /// Starts a supervisor on `thread` that reports through `uplink`, obeys `desired_states` and calls `processes` with
    /// what is to be done with processes, which must not block.
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
            let processes = guardian.start("way out to the processes", |_| Processes(processes));
            let uplink_actor = guardian.start("transport to the coordinators", |_| UplinkActor { uplink, last: None });
            let outlets = Outlets {
                spawn: processes.clone().recipient(),
                kill: processes.clone().recipient(),
                tell: processes.clone().recipient(),
                reports: uplink_actor.recipient(),
                shutdown: processes.recipient(),
            };
            let supervisor = guardian.start("supervisor", |_| Supervisor::new(settings, outlets));
            let obeys = supervisor.clone();
            guardian.spawn("receiver of desired states", async move {
                while let Some(desired_state) = desired_states.recv().await {
                    // Waits while the mailbox is full, so that newer desired states replace older ones at the
                    // coordinator.
                    let _ = obeys.send(DesiredStateArrived(desired_state)).await;
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
        self.say(WorkerStarted(status_report))
    }

    /// A process is gone; as [`Node::started`].
    #[must_use]
    pub fn exited(&self, worker: Worker) -> bool {
        self.say(WorkerExited(worker))
    }

    /// A process that has not begun cannot, and no successor could; as [`Node::started`].
    #[must_use]
    pub fn cannot_start(&self, worker: Worker, reason: String) -> bool {
        self.say(WorkerUnfit { worker, reason })
    }

    /// A process gives a heartbeat; if there is no room for it, the next one will do.
    pub fn status_report(&self, status_report: MemberReport) -> bool {
        self.say(StatusReport(status_report))
    }

    /// The machine is about to be taken away.
    #[must_use]
    pub fn drain(&self) -> bool {
        self.say(DrainNode)
    }

    fn say<M>(&self, message: M) -> bool
    where
        M: Message<Result = ()> + Send + 'static,
        Supervisor: Handler<M>,
    {
        self.supervisor.try_send(message).is_ok()
    }
}
