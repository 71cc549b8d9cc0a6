//! A coordinator on its control thread, for programs that have no actors of their own.

use crate::control::{ControlThread, RunError};
use crate::coordinator::{Coordinator, Outlets, ReportArrived, SendOrder, Settings};
use crate::events::Event;
use crate::operator::{self, Answer, Request};
use crate::quic::listener::Inbound;
use crate::store::SharedStore;
use crate::wire;
use actix::{Actor, Addr, Context, Handler};
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::elastic::message::{Order, Report};
use phalanx_strategies::mesh::Mesh;
use std::fmt;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Handle of a coordinator.
#[derive(Clone, Debug)]
pub struct Head {
    thread: ControlThread,
    coordinator: Addr<Coordinator>,
    fits: Fits,
}

/// Whether a job can run on a mesh at all, or why not: what a coordinator, which does not know the model, cannot tell.
#[derive(Clone)]
pub struct Fits(Arc<dyn Fn(Mesh) -> Result<(), String> + Send + Sync>);

impl Fits {
    /// `check` may take its time: it runs on a thread of its own.
    pub fn new(check: impl Fn(Mesh) -> Result<(), String> + Send + Sync + 'static) -> Fits {
        Fits(Arc::new(check))
    }

    async fn check(&self, mesh: Mesh) -> Result<(), String> {
        let (tell, told) = oneshot::channel();
        let check = Arc::clone(&self.0);
        let thread = std::thread::Builder::new().name("phalanx-fits".into());
        let started = thread.spawn(move || tell.send(check(mesh)));
        started.map_err(|error| format!("{mesh} could not be checked: {error}"))?;
        told.await.unwrap_or_else(|_| Err(format!("{mesh} could not be checked")))
    }
}

impl fmt::Debug for Fits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fits")
    }
}

/// Orders that wait for the transport; one for each of so many nodes may be given at once.
const ORDERS_MAX: usize = 2_048;

/// Gives what it gets to a function: the way out of the actors.
struct Outlet<F>(F, usize);

impl<F: Unpin + 'static> Actor for Outlet<F> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(self.1);
    }
}

impl<F: FnMut(NodeId, &Order) + Unpin + 'static> Handler<SendOrder> for Outlet<F> {
    type Result = ();

    fn handle(&mut self, SendOrder { node, order }: SendOrder, _: &mut Context<Self>) {
        (self.0)(node, &order);
    }
}

/// As [`Outlet`], for what happens.
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
    /// Starts a candidate on `thread`. `orders` sends an order to a node and may lose it; `events` is told what happens.
    /// Neither may block. Meshes that are asked for have to pass `fits` first.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        store: SharedStore,
        fits: Fits,
        orders: impl FnMut(NodeId, &Order) + Send + Unpin + 'static,
        events: impl FnMut(&Event) + Send + Unpin + 'static,
    ) -> Result<Head, RunError> {
        let start = move |guardian: crate::control::Guardian| async move {
            let orders = guardian.start("transport to the nodes", |_| Outlet(orders, ORDERS_MAX)).recipient();
            let events = guardian.start("writer of events", |_| Scribe(events)).recipient();
            let outlets = Outlets { orders, events };
            guardian.start("coordinator", |_| Coordinator::new(settings, store, outlets))
        };
        let coordinator = thread.run(start).await?;
        Ok(Head { thread: thread.clone(), coordinator, fits })
    }

    /// A node's report has arrived. One that finds no room is lost; the next one says it all again.
    pub fn report(&self, report: Report) {
        if let Err(error) = self.coordinator.try_send(ReportArrived(report)) {
            tracing::debug!(%error, "a report was not taken; the next one says it all again");
        }
    }

    /// Asks something.
    pub async fn ask(&self, request: Request) -> Answer {
        if let Request::Resize(mesh) = &request
            && let Err(why) = self.fits.check(*mesh).await
        {
            return Answer::Refused(why);
        }
        operator::answer(&self.coordinator, request).await
    }

    /// Serves what comes in through a listener, until that is closed.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn serve(&self, mut inbound: mpsc::Receiver<Inbound>) -> Result<(), RunError> {
        let head = self.clone();
        self.thread
            .run(move |_| async move {
                while let Some(inbound) = inbound.recv().await {
                    head.take(inbound).await;
                }
            })
            .await
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
            Inbound::Connected { node, boot, peer } => tracing::info!(%node, %boot, %peer, "a node is connected"),
            Inbound::Disconnected { node, boot, why } => tracing::info!(%node, %boot, %why, "a node is not connected"),
        }
    }
}
