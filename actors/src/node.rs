//! A supervisor on its control thread, for programs that have no actors of their own.

use crate::control::{ControlThread, RunError};
use crate::supervisor::{
    DrainNode, Kill, MAILBOX_LEN, OrderArrived, Outlets, SendReport, Settings, Shutdown, Spawn, Supervisor, Tell, Word,
    WorkerExited, WorkerStarted, WorkerUnfit,
};
use crate::transport::{NotSent, Uplink};
use actix::{Actor, Addr, Context, Handler, Message};
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{MemberReport, Order, Report};
use std::sync::Arc;
use tokio::sync::mpsc;

/// What the supervisor wants done with processes.
#[derive(Clone, Debug)]
pub enum Process {
    /// Start one; answer with [`Node::started`], or with [`Node::exited`].
    Spawn(Worker),
    /// Kill one, or the start of one; answer with [`Node::exited`].
    Kill(Worker),
    /// Pass an order on to one.
    Tell(Worker, Order),
    /// None is left and none will be started.
    Shutdown,
}

/// Handle of a supervisor.
#[derive(Clone, Debug)]
pub struct Node {
    supervisor: Addr<Supervisor>,
}

/// Gives commands to a function: the way out of the actors.
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
    Tell: Tell { worker, order } => Process::Tell(worker, order),
    Shutdown: Shutdown => Process::Shutdown,
}

/// Tells heartbeats from news and gives them to the transport.
struct Courier {
    uplink: Arc<dyn Uplink>,
    last: Option<Report>,
}

impl Actor for Courier {
    type Context = Context<Self>;
}

impl Handler<SendReport> for Courier {
    type Result = ();

    fn handle(&mut self, SendReport(report): SendReport, _: &mut Context<Self>) {
        let is_news = self.last.as_ref().is_none_or(|last| gist(last) != gist(&report));
        let sent = if is_news { self.uplink.news(&report) } else { self.uplink.heartbeat(&report) };
        match sent {
            // What was not sent is news still.
            Err(NotSent::Full) => tracing::debug!("a report found no room; the next one repeats it"),
            Err(NotSent::Closed) => tracing::debug!("a report was not sent: the connection is closed"),
            Err(error) => tracing::error!(%error, "a report cannot be sent"),
            Ok(()) => self.last = Some(report),
        }
    }
}

/// A report without what changes as steps go by.
fn gist(report: &Report) -> Report {
    let members = report.members.iter().map(|member| MemberReport {
        entered: Default::default(),
        progress: Default::default(),
        promise: Default::default(),
        ..member.clone()
    });
    Report { number: 0, members: members.collect(), ..report.clone() }
}

impl Node {
    /// Starts a supervisor on `thread` that reports through `uplink`, obeys `orders` and calls `processes` with what is to be
    /// done with processes, which must not block.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        uplink: Arc<dyn Uplink>,
        mut orders: mpsc::Receiver<Order>,
        processes: impl FnMut(Process) + Send + Unpin + 'static,
    ) -> Result<Node, RunError> {
        let start = move |guardian: crate::control::Guardian| async move {
            let processes = guardian.start("way out to the processes", |_| Processes(processes));
            let courier = guardian.start("transport to the coordinators", |_| Courier { uplink, last: None });
            let outlets = Outlets {
                spawn: processes.clone().recipient(),
                kill: processes.clone().recipient(),
                tell: processes.clone().recipient(),
                reports: courier.recipient(),
                shutdown: processes.recipient(),
            };
            let supervisor = guardian.start("supervisor", |_| Supervisor::new(settings, outlets));
            let obeys = supervisor.clone();
            guardian.spawn("receiver of orders", async move {
                while let Some(order) = orders.recv().await {
                    // Waits while the mailbox is full, so that newer orders replace older ones at the coordinator.
                    let _ = obeys.send(OrderArrived(order)).await;
                }
            });
            supervisor
        };
        let supervisor = thread.run(start).await?;
        Ok(Node { supervisor })
    }

    /// A process is up and says this. Whether there was room for it; if not, it is to be said again.
    #[must_use]
    pub fn started(&self, word: MemberReport) -> bool {
        self.say(WorkerStarted(word))
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

    /// A process gives a sign of life; if there is no room for it, the next one will do.
    pub fn word(&self, word: MemberReport) -> bool {
        self.say(Word(word))
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
