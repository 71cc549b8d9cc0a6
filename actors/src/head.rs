//! A coordinator on its control thread, for programs that have no actors of their own.

use crate::control::{ControlThread, RunError};
use crate::coordinator::{Coordinator, Outlets, ReportArrived, SendOrder, Settings};
use crate::events::Event;
use crate::operator::{self, Answer, Request};
use crate::store::SharedStore;
use crate::transport::{Downlink, Inbound, Inbox};
use crate::wire;
use actix::{Actor, Addr, Context, Handler};
use phalanx_strategies::elastic::message::Report;
use std::fmt;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Handle of a coordinator.
#[derive(Clone, Debug)]
pub struct Head {
    thread: ControlThread,
    coordinator: Addr<Coordinator>,
    admission: Admission,
}

/// Whether a job can do at all what is asked of it, or why not: what a coordinator, which does not know the model, cannot
/// tell.
#[derive(Clone)]
pub struct Admission(Arc<Check>);

type Check = dyn Fn(&Request) -> Result<(), String> + Send + Sync;

impl Admission {
    /// `check` may take its time: it runs on a thread of its own. It is asked about other meshes and about nodes that are to
    /// leave.
    pub fn new(check: impl Fn(&Request) -> Result<(), String> + Send + Sync + 'static) -> Admission {
        Admission(Arc::new(check))
    }

    async fn check(&self, request: &Request) -> Result<(), String> {
        if !matches!(request, Request::Resize(_) | Request::Drain(_)) {
            return Ok(());
        }
        let (tell, told) = oneshot::channel();
        let (check, request) = (Arc::clone(&self.0), request.clone());
        let thread = std::thread::Builder::new().name("phalanx-admission".into());
        let started = thread.spawn(move || tell.send(check(&request)));
        started.map_err(|error| format!("the request could not be checked: {error}"))?;
        told.await.unwrap_or_else(|_| Err("the request could not be checked".into()))
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admission")
    }
}

/// Orders that wait for the transport; one for each of so many nodes may be given at once.
const ORDERS_MAX: usize = 2_048;

/// Gives orders to the transport.
struct Outlet(Arc<dyn Downlink>);

impl Actor for Outlet {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(ORDERS_MAX);
    }
}

impl Handler<SendOrder> for Outlet {
    type Result = ();

    fn handle(&mut self, SendOrder { node, order }: SendOrder, _: &mut Context<Self>) {
        if let Err(error) = self.0.order(node, &order) {
            tracing::debug!(%node, %error, "an order was not sent; the node's next report asks for it again");
        }
    }
}

/// Gives events to a function.
struct Scribe<F>(F);

impl<F: Unpin + 'static> Actor for Scribe<F> {
    type Context = Context<Self>;
}

impl<F: FnMut(&Event) + Unpin + 'static> Handler<Event> for Scribe<F> {
    type Result = ();

    fn handle(&mut self, event: Event, _: &mut Context<Self>) {
        (self.0)(&event);
    }
}

impl Head {
    /// Starts a candidate on `thread` that sends orders through `downlink`. `events` is called with what happens and must
    /// not block. What is asked has to pass `admission` first. What comes in is taken up by [`Head::serve`].
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        store: SharedStore,
        admission: Admission,
        downlink: Arc<dyn Downlink>,
        events: impl FnMut(&Event) + Send + Unpin + 'static,
    ) -> Result<Head, RunError> {
        let start = move |guardian: crate::control::Guardian| async move {
            let orders = guardian.start("transport to the nodes", |_| Outlet(downlink)).recipient();
            let events = guardian.start("writer of events", |_| Scribe(events)).recipient();
            let outlets = Outlets { orders, events };
            guardian.start("coordinator", |_| Coordinator::new(settings, store, outlets))
        };
        let coordinator = thread.run(start).await?;
        Ok(Head { thread: thread.clone(), coordinator, admission })
    }

    /// A node's report has arrived. One that finds no room is lost; the next one says it all again.
    pub fn report(&self, report: Report) {
        if let Err(error) = self.coordinator.try_send(ReportArrived(report)) {
            tracing::debug!(%error, "a report was not taken; the next one says it all again");
        }
    }

    /// Asks something.
    pub async fn ask(&self, request: Request) -> Answer {
        if let Err(why) = self.admission.check(&request).await {
            return Answer::Refused(why);
        }
        operator::answer(&self.coordinator, request).await
    }

    /// From now on serves what comes in through this transport, until that is closed. There may be several.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn serve(&self, mut inbox: Inbox) -> Result<(), RunError> {
        let head = self.clone();
        let serving = async move {
            while let Some(inbound) = inbox.recv().await {
                head.take(inbound).await;
            }
        };
        self.thread.run(move |guardian| async move { guardian.spawn("receiver of reports", serving) }).await
    }

    async fn take(&self, inbound: Inbound) {
        match inbound {
            Inbound::Report(report) => {
                // Back-pressure reaches the listener, which drops heartbeats and keeps the rest.
                let _ = self.coordinator.send(ReportArrived(report)).await;
            }
            // Reports that find no room are lost; the next ones say it all again.
            Inbound::Heartbeats(reports) => reports.into_iter().for_each(|report| self.report(report)),
            Inbound::Request { frame, answer } => {
                let head = self.clone();
                // Beside the reports: a request waits until it is durable.
                tokio::task::spawn_local(async move {
                    let said = match wire::decode::<Request>(&frame) {
                        Ok(request) => head.ask(request).await,
                        Err(error) => Answer::Refused(error.to_string()),
                    };
                    if let Ok(frame) = wire::encode(&said) {
                        let _ = answer.send(frame);
                    }
                });
            }
            Inbound::Connected { node, boot, peer } => tracing::info!(%node, %boot, ?peer, "a node is connected"),
            Inbound::Disconnected { node, boot, why } => tracing::info!(%node, %boot, %why, "a node is not connected"),
        }
    }
}
