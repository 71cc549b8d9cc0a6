//! A supervisor on its control thread, for programs that have no actors of their own.

use crate::control::{ControlThread, RunError};
use crate::supervisor::{
    DrainNode, Kill, MAILBOX_LEN, OrderArrived, Outlets, SendReport, Settings, Shutdown, Spawn, Supervisor, Tell, Word,
    WorkerExited, WorkerStarted,
};
use actix::{Actor, Addr, Context, Handler, Message};
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{MemberReport, Order, Report};
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

/// A report on its way to the coordinators.
#[derive(Clone, Debug)]
pub enum Letter {
    /// It says nothing new but how far ranks are.
    Heartbeat(Report),
    /// It is to arrive.
    News(Report),
}

/// Handle of a supervisor.
#[derive(Clone, Debug)]
pub struct Node {
    thread: ControlThread,
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

/// Tells heartbeats from news and gives them to a function.
struct Courier<F> {
    send: F,
    last: Option<Report>,
}

impl<F: Unpin + 'static> Actor for Courier<F> {
    type Context = Context<Self>;
}

impl<F: FnMut(Letter) + Unpin + 'static> Handler<SendReport> for Courier<F> {
    type Result = ();

    fn handle(&mut self, SendReport(report): SendReport, _: &mut Context<Self>) {
        let is_news = self.last.as_ref().is_none_or(|last| gist(last) != gist(&report));
        self.last = Some(report.clone());
        (self.send)(if is_news { Letter::News(report) } else { Letter::Heartbeat(report) });
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
    /// Starts a supervisor on `thread`. `letters` sends to whichever coordinator there is and may lose heartbeats;
    /// `processes` does what is to be done with processes. Neither may block.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        letters: impl FnMut(Letter) + Send + Unpin + 'static,
        processes: impl FnMut(Process) + Send + Unpin + 'static,
    ) -> Result<Node, RunError> {
        let start = move |guardian: crate::control::Guardian| async move {
            let processes = guardian.start("way out to the processes", |_| Processes(processes));
            let courier = guardian.start("transport to the coordinators", |_| Courier { send: letters, last: None });
            let outlets = Outlets {
                spawn: processes.clone().recipient(),
                kill: processes.clone().recipient(),
                tell: processes.clone().recipient(),
                reports: courier.recipient(),
                shutdown: processes.recipient(),
            };
            guardian.start("supervisor", |_| Supervisor::new(settings, outlets))
        };
        let supervisor = thread.run(start).await?;
        Ok(Node { thread: thread.clone(), supervisor })
    }

    /// A coordinator's order; one that finds no room is given again.
    pub fn order(&self, order: Order) {
        if let Err(error) = self.supervisor.try_send(OrderArrived(order)) {
            tracing::debug!(%error, "an order was not taken; it will be given again");
        }
    }

    /// Takes up orders as they come in, until their sender is gone.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn obey(&self, mut orders: mpsc::Receiver<Order>) -> Result<(), RunError> {
        let supervisor = self.supervisor.clone();
        self.thread
            .run(move |_| async move {
                while let Some(order) = orders.recv().await {
                    let _ = supervisor.send(OrderArrived(order)).await;
                }
            })
            .await
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
