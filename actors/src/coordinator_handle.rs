//! Handle of a coordinator that runs on its own control thread, for programs without actors.

use crate::control::{ControlThread, RunError};
use crate::coordinator::{
    Checkpoints, Coordinator, EndWithoutRecord, Outlets, ReportArrived, SendDesiredState, Settings,
};
use crate::events::{Event, What};
use crate::operator::{self, Answer, Request};
use crate::store::SharedStore;
use crate::transport::{Downlink, Inbound, Inbox};
use crate::wire;
use actix::{Actor, Addr, Context, Handler};
use phalanx_strategies::elastic::message::Report;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

/// Handle of a coordinator actor.
#[derive(Clone, Debug)]
pub struct CoordinatorHandle {
    thread: ControlThread,
    coordinator: Addr<Coordinator>,
    admission: Admission,
    /// A fault of this process that does not stop the job, for the status.
    fault: Arc<Mutex<Option<String>>>,
}

/// Checks whether a job can carry out a request. The coordinator cannot check this itself, because it does not hold the
/// model.
#[derive(Clone)]
pub struct Admission(Arc<Check>);

type Check = dyn Fn(&Request) -> Result<(), String> + Send + Sync;

impl Admission {
    /// `check` may block: it runs on its own thread. It is called for requests to resize and to drain.
    pub fn new(check: impl Fn(&Request) -> Result<(), String> + Send + Sync + 'static) -> Admission {
        Admission(Arc::new(check))
    }

    async fn check(&self, request: &Request) -> Result<(), String> {
        if !matches!(request, Request::Resize(_) | Request::Drain(_) | Request::DeclareGone(_)) {
            return Ok(());
        }
        let (reply, answer) = oneshot::channel();
        let (check, request) = (Arc::clone(&self.0), request.clone());
        let thread = std::thread::Builder::new().name("phalanx-admission".into());
        let started = thread.spawn(move || reply.send(check(&request)));
        started.map_err(|error| format!("cannot check the request: {error}"))?;
        answer.await.unwrap_or_else(|_| Err("cannot check the request: the check panicked".into()))
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admission")
    }
}

/// Mailbox size: one desired state for each node of a large job at once.
const DESIRED_STATES_MAX: usize = 2_048;

/// Gives desired states to the transport.
struct Outlet(Arc<dyn Downlink>);

impl Actor for Outlet {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(DESIRED_STATES_MAX);
    }
}

impl Handler<SendDesiredState> for Outlet {
    type Result = ();

    fn handle(&mut self, SendDesiredState { node, desired_state }: SendDesiredState, _: &mut Context<Self>) {
        if let Err(error) = self.0.send_desired_state(node, &desired_state) {
            tracing::debug!(%node, %error, "a desired state was not sent; the next report of the node requests it again");
        }
    }
}

/// Gives events to a function.
struct EventOutlet<F>(F);

impl<F: Unpin + 'static> Actor for EventOutlet<F> {
    type Context = Context<Self>;
}

impl<F: FnMut(&Event) + Unpin + 'static> Handler<Event> for EventOutlet<F> {
    type Result = ();

    fn handle(&mut self, event: Event, _: &mut Context<Self>) {
        (self.0)(&event);
    }
}

impl CoordinatorHandle {
    /// Starts a candidate on `thread` that sends desired states through `downlink`. `events` is called with each event
    /// and must not block. Requests have to pass `admission` first; `checkpoints` finds the newest one. [`CoordinatorHandle::serve`] handles incoming
    /// messages.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn start(
        thread: &ControlThread,
        settings: Settings,
        store: SharedStore,
        checkpoints: Checkpoints,
        admission: Admission,
        downlink: Arc<dyn Downlink>,
        mut events: impl FnMut(&Event) + Send + Unpin + 'static,
    ) -> Result<CoordinatorHandle, RunError> {
        let transport = Arc::clone(&downlink);
        let events = move |event: &Event| {
            match event.what {
                What::Leads => transport.set_leads(true),
                What::StepsDown => transport.set_leads(false),
                _ => {}
            }
            events(event);
        };
        let start = move |guardian: crate::control::Guardian| async move {
            let desired_states = guardian.start("transport to the nodes", |_| Outlet(downlink)).recipient();
            let events = guardian.start("writer of events", |_| EventOutlet(events)).recipient();
            let outlets = Outlets { desired_states, events };
            guardian.start("coordinator", |_| Coordinator::new(settings, store, checkpoints, outlets))
        };
        let coordinator = thread.run(start).await?;
        Ok(CoordinatorHandle { thread: thread.clone(), coordinator, admission, fault: Arc::default() })
    }

    /// Delivers a node's report. A full mailbox drops the report; the next one repeats its content.
    pub fn report(&self, report: Report) {
        if let Err(error) = self.coordinator.try_send(ReportArrived(report)) {
            tracing::debug!(%error, "a report was dropped; the next one repeats it");
        }
    }

    /// Sends a request and waits for its answer.
    pub async fn ask(&self, request: Request) -> Answer {
        if let Err(why) = self.admission.check(&request).await {
            return Answer::Refused(why);
        }
        let answer = operator::answer(&self.coordinator, request).await;
        match answer {
            Answer::Status(mut status) => {
                // Every change is one assignment, also before a panic.
                status.faults.extend(self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone());
                Answer::Status(status)
            }
            other => other,
        }
    }

    /// Ends the job, whose store is gone for good, with this reason.
    pub fn end(&self, reason: String) {
        if let Err(error) = self.coordinator.try_send(EndWithoutRecord(reason)) {
            tracing::warn!(%error, "the end of the job was not handled");
        }
    }

    /// Adds a fault of this process to the status, or removes it.
    pub fn set_fault(&self, fault: Option<String>) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    /// Starts to handle the messages of a transport, until that transport is closed. May be called for several
    /// transports.
    ///
    /// # Errors
    /// When the thread has ended.
    pub async fn serve(&self, mut inbox: Inbox) -> Result<(), RunError> {
        let handle = self.clone();
        let serving = async move {
            while let Some(inbound) = inbox.recv().await {
                handle.take(inbound).await;
            }
        };
        self.thread.run(move |guardian| async move { guardian.spawn("receiver of reports", serving) }).await
    }

    async fn take(&self, inbound: Inbound) {
        match inbound {
            Inbound::Report(report) => {
                // Waiting here lets the listener drop heartbeats and keep other messages.
                let _ = self.coordinator.send(ReportArrived(report)).await;
            }
            // The next heartbeat repeats the content of a dropped one.
            Inbound::Heartbeats(reports) => reports.into_iter().for_each(|report| self.report(report)),
            Inbound::Request { frame, answer } => {
                let handle = self.clone();
                // A task of its own: a request must not delay reports until it is durable.
                tokio::task::spawn_local(async move {
                    let answered = match wire::decode::<Request>(&frame) {
                        Ok(request) => handle.ask(request).await,
                        Err(error) => Answer::Refused(error.to_string()),
                    };
                    if let Ok(frame) = wire::encode(&answered) {
                        let _ = answer.send(frame);
                    }
                });
            }
            Inbound::Connected { node, boot, peer } => tracing::info!(%node, %boot, ?peer, "a node connected"),
            Inbound::Disconnected { node, boot, why } => tracing::info!(%node, %boot, %why, "a node disconnected"),
        }
    }
}
