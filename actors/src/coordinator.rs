//! The actor shell of a coordinator candidate: owns the clock, the timer, the store and the outlets; decides nothing.
//!
//! Every process that may coordinate runs one. A candidate leads once it wins the lease, and answers operator requests only
//! then. Messages without an awaited answer are sent with `try_send`: the protocol is level-triggered, so a message dropped
//! by a full mailbox is repeated.
//!
//! Invariants:
//! - `COORDINATOR-ACTOR-1` The store's answer goes to the term that asked for it, or is dropped.
//! - `COORDINATOR-ACTOR-2` The store is used in `spawn_blocking`; a failed write of a record is retried until the store
//!   answers. Records are written one at a time, in the order of the decisions.
//! - `COORDINATOR-ACTOR-3` A request is answered once the decision that contains it has taken effect, or once this
//!   candidate no longer leads. A decision takes effect once it is durable; in a job that ends with this process, only the
//!   end of the job has to be durable, and before that the reason of a failure.
//!   An ending in failure is not written to a store that has just been silent, but the same record without it: its first
//!   answer withdraws the failure (`COORDINATOR-23`). A store that stays silent for [`Settings::end_patience`] is not waited for.
//! - `COORDINATOR-ACTOR-4` Checkpoints are listed in `spawn_blocking`, until their store answers, or the term or generation that
//!   asked has ended.

use crate::events::{Event, What, WorldEvent};
use crate::store::{SharedStore, StoreError};
use crate::timer::{Deadlines, Timer, now};
use actix::{Actor, ActorContext, ActorFutureExt, AsyncContext, Context, Handler, Message, Recipient, WrapFuture};
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::coordinator as machine;
use phalanx_strategies::elastic::coordinator::lost_world::NotGone;
use phalanx_strategies::elastic::coordinator::newest_checkpoint::Listing;
use phalanx_strategies::elastic::coordinator::outlook::{Asked, NotDrained, Outlook};
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::{Generation, JobId, NodeId, Term};
use phalanx_strategies::elastic::mesh_choice::{Policy, ResizeError};
use phalanx_strategies::elastic::message::{DesiredState, Ending, Record, Report, Stage, Unsaved};
use phalanx_strategies::elastic::succession::{self, Lease, Succession};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Settings of a coordinator candidate.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The job.
    pub job: JobId,
    /// Number of this candidate, unique among the candidates of the job.
    pub candidate: u32,
    /// A lease that this candidate already holds, and when it was requested; `None` for a candidate that does not lead.
    pub holds: Option<(Lease, Instant)>,
    /// Whether every node of the job ends with this process. If so, no decision needs to survive the process, and only the
    /// job's failure and its end wait for the store.
    pub is_alone: bool,
    /// For how long the end of the job waits for a silent store, before the job ends without its record; `None`: until the store
    /// answers.
    pub end_patience: Option<Duration>,
    /// The user's mesh and limits.
    pub policy: Policy,
    /// All timeouts.
    pub timing: Timing,
}

/// Receivers of a coordinator's messages.
#[derive(Clone, Debug)]
pub struct Outlets {
    /// The transport to the nodes.
    pub desired_states: Recipient<SendDesiredState>,
    /// Receiver of events.
    pub events: Recipient<Event>,
}

/// Finds the newest checkpoint that counts for a listing. The coordinator cannot read checkpoints itself.
#[derive(Clone)]
pub struct Checkpoints(Arc<Find>);

type Find = dyn Fn(Listing) -> Result<Option<Checkpoint>, String> + Send + Sync;

impl Checkpoints {
    /// `find` may block. Its error is logged, and it is called again.
    pub fn new(find: impl Fn(Listing) -> Result<Option<Checkpoint>, String> + Send + Sync + 'static) -> Checkpoints {
        Checkpoints(Arc::new(find))
    }
}

impl fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Checkpoints")
    }
}

/// Sends a desired state to a node. Delivery is not guaranteed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendDesiredState {
    /// The receiver.
    pub node: NodeId,
    /// The desired state.
    pub desired_state: DesiredState,
}

/// A node's report has arrived.
#[derive(Clone, Debug)]
pub struct ReportArrived(pub Report);

/// Requests the status of the job.
#[derive(Clone, Copy, Debug)]
pub struct GetStatus;

/// Requests that the job leave and release a node.
#[derive(Clone, Copy, Debug)]
pub struct Drain(pub NodeId);

/// Requests that the job continue without a node.
#[derive(Clone, Copy, Debug)]
pub struct DeclareGone(pub NodeId);

/// Requests another mesh.
#[derive(Clone, Copy, Debug)]
pub struct Resize(pub Mesh);

/// Requests a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Save;

/// Requests that the job stop after a step, with a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Stop;

/// Ends the job with this reason, although that cannot become durable: the store is gone for good.
#[derive(Clone, Debug)]
pub struct EndWithoutRecord(pub String);

/// Stops the candidate without a message to its peers; a standby takes over once the lease expires.
#[derive(Clone, Copy, Debug)]
pub struct Leave;

/// Why a request has no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Another candidate leads, or no candidate does yet.
    #[error("this coordinator does not lead the job")]
    NotLeading,
    /// Nobody leads, or it is unknown who does, because the store does not answer.
    #[error("this coordinator does not lead the job while {0}; ranks train on, and recovery waits for the store")]
    StoreSilent(String),
    /// The queue of requests that wait for the store is full.
    #[error("{WAITING_MAX} requests already wait to become durable; this one may still take effect: check the status")]
    Busy,
    /// The mesh is invalid.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// The node cannot be drained.
    #[error(transparent)]
    NotDrained(#[from] NotDrained),
    /// The node is not gone.
    #[error(transparent)]
    NotGone(#[from] NotGone),
}

impl Message for SendDesiredState {
    type Result = ();
}

impl Message for ReportArrived {
    type Result = ();
}

impl Message for GetStatus {
    type Result = Result<Status, RequestError>;
}

impl Message for Drain {
    type Result = Result<Outlook, RequestError>;
}

impl Message for DeclareGone {
    type Result = Result<Outlook, RequestError>;
}

impl Message for Resize {
    type Result = Result<Outlook, RequestError>;
}

impl Message for EndWithoutRecord {
    type Result = ();
}

impl Message for Leave {
    type Result = ();
}

impl Message for Save {
    type Result = Result<Outlook, RequestError>;
}

impl Message for Stop {
    type Result = Result<Outlook, RequestError>;
}

/// Runs a candidate's machine while it leads, and waits for the lease while it does not.
pub struct Coordinator {
    settings: Settings,
    store: SharedStore,
    checkpoints: Checkpoints,
    outlets: Outlets,
    succession: Succession,
    /// The term that this candidate has won and not lost.
    term: Option<Term>,
    /// The machine of that term, once the record is read.
    leader: Option<Leader>,
    /// Whether a record is being written, and the latest one that waits for that.
    writes_record: bool,
    next_record: Option<Record>,
    /// Whether the latest write of a record has failed.
    record_fails: bool,
    /// Reply channels of requests that are not durable yet.
    waiting: Vec<(Asked, oneshot::Sender<Result<Outlook, RequestError>>)>,
    /// Since when the store does not answer.
    silence: Option<Silence>,
    /// Since when the record that waits for the store is that of the job's end.
    ends_since: Option<Instant>,
    timer: Timer,
}

/// Requests to the store that got no answer.
struct Silence {
    since: Instant,
    error: StoreError,
    /// How often that was told.
    n_told: u32,
}

/// The time after which a silence is told again, twice as long each time: a job that waits for its store says so, also when its
/// steps are done.
const TOLD_AGAIN: Duration = Duration::from_secs(60);

impl Silence {
    /// When to tell it next, after its begin.
    fn is_due(&self, lease: Duration) -> bool {
        let due = self.n_told.checked_sub(1).map_or(lease, |n_again| TOLD_AGAIN * 2u32.saturating_pow(n_again.min(16)));
        self.since.elapsed() >= due
    }

    fn sentence(&self) -> String {
        format!("its store has not answered for {} s: {}", self.since.elapsed().as_secs(), self.error)
    }
}

/// The machine of a term, and which of its events were sent.
struct Leader {
    term: Term,
    machine: machine::Coordinator,
    announced: Generation,
    nodes_notified: bool,
}

/// The future answer to a request.
type Answer = Pin<Box<dyn Future<Output = Result<Outlook, RequestError>>>>;

/// Requests that may wait for the store at once.
const WAITING_MAX: usize = 64;

/// Mailbox size: one report from each node of a large job at once.
pub const MAILBOX_LEN: usize = 2_048;

impl Coordinator {
    /// Creates a candidate.
    pub fn new(settings: Settings, store: SharedStore, checkpoints: Checkpoints, outlets: Outlets) -> Coordinator {
        let Settings { candidate, timing, holds, .. } = settings;
        let succession = match holds {
            Some((lease, asked)) => Succession::holding(now(), candidate, timing, lease, asked),
            None => Succession::new(now(), candidate, timing),
        };
        let succession = if settings.is_alone { succession.without_successor() } else { succession };
        Coordinator {
            settings,
            store,
            checkpoints,
            outlets,
            succession,
            term: None,
            leader: None,
            writes_record: false,
            next_record: None,
            record_fails: false,
            waiting: vec![],
            silence: None,
            ends_since: None,
            timer: Timer::default(),
        }
    }

    /// Performs all pending commands, then re-arms the timer. Called after each event.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        while let Some(command) = self.succession.poll_command() {
            self.candidate(command, ctx);
        }
        while let Some(command) = self.leader.as_mut().and_then(|leader| leader.machine.poll_command()) {
            self.lead(command, ctx);
        }
        while let Some(command) = self.succession.poll_command() {
            self.candidate(command, ctx);
        }
        if let Some(leader) =
            self.leader.as_mut().filter(|leader| !leader.nodes_notified && leader.machine.all_notified())
        {
            leader.nodes_notified = true;
            self.tell(What::NodesNotified, ctx);
        }
        self.answer();
        let led = self.leader.as_ref().and_then(|leader| leader.machine.poll_timeout());
        let due = [self.succession.poll_timeout(), led].into_iter().flatten().min();
        self.arm(due, ctx);
    }

    fn candidate(&mut self, command: succession::Command, ctx: &mut Context<Self>) {
        match command {
            succession::Command::Read => self.ask_store(ctx, |store| store.read_lease(), Self::lease_read),
            succession::Command::Write { old, new } => {
                let asked = now();
                let done = move |actor: &mut Self, result, ctx: &mut Context<Self>| {
                    actor.lease_written(asked, result, ctx);
                    actor.drive(ctx);
                };
                self.ask_store(ctx, move |store| store.replace_lease(old, new), done);
            }
            succession::Command::Lead(term) => {
                // A leader may begin a later term (`SUCCESSION-6`).
                (self.term, self.leader) = (Some(term), None);
                self.read_record(term, ctx);
            }
            succession::Command::StepDown => {
                if self.term.is_some() {
                    self.tell(What::StepsDown, ctx);
                }
                (self.term, self.leader) = (None, None);
            }
        }
    }

    fn lead(&mut self, command: machine::Command, ctx: &mut Context<Self>) {
        match command {
            machine::Command::Send(node, desired_state) => {
                self.announce(&desired_state, ctx);
                if let Err(error) = self.outlets.desired_states.try_send(SendDesiredState { node, desired_state }) {
                    tracing::debug!(%node, %error, "a desired state was not sent; the next report of the node requests it again");
                }
            }
            machine::Command::Persist(record) => self.persist(record, ctx),
            machine::Command::Resumed(timeline) => {
                tracing::info!(%timeline, "training resumed");
                self.tell(What::Incident((&timeline).into()), ctx);
            }
            machine::Command::Saved(checkpoint) => self.tell(What::Checkpoint(checkpoint), ctx),
            machine::Command::NotSaved(Unsaved { of: checkpoint, reason }) => {
                self.tell(What::NotSaved { checkpoint, reason }, ctx);
            }
            machine::Command::ListCheckpoints(listing) => self.list_checkpoints(listing, ctx),
            machine::Command::Outrun(term) => self.succession.handle_outrun(term),
            machine::Command::Refused(node, reason) => {
                tracing::info!(%node, %reason, "a node is refused");
                self.tell(What::NodeRefused { node, reason }, ctx);
            }
            machine::Command::Mixed(node, text) => self.tell(What::NodeDiffers { node, text }, ctx),
            machine::Command::Ended(ending) => {
                tracing::info!(?ending, "the job is over");
                self.tell(What::Ended { ending }, ctx);
            }
        }
    }

    /// Logs a world when its first desired state is sent.
    fn announce(&mut self, desired_state: &DesiredState, ctx: &mut Context<Self>) {
        let (Some(leader), Some(world_plan)) = (&mut self.leader, &desired_state.world_plan) else { return };
        if desired_state.id.stage == Stage::Form && world_plan.generation > leader.announced {
            leader.announced = world_plan.generation;
            self.tell(What::World(WorldEvent::from(&**world_plan)), ctx);
        }
    }

    /// `COORDINATOR-ACTOR-1`
    fn read_record(&mut self, term: Term, ctx: &mut Context<Self>) {
        self.ask_store(
            ctx,
            |store| store.read_record(),
            move |actor, record, ctx| {
                if actor.term != Some(term) {
                    return;
                }
                match record {
                    Ok(record) => actor.begin(term, record, ctx),
                    Err(error) => {
                        tracing::error!(%error, "cannot read the record; retrying");
                        let pause = actor.settings.timing.lease_renewal;
                        ctx.run_later(pause, move |actor, ctx| actor.read_record(term, ctx));
                    }
                }
            },
        );
    }

    fn begin(&mut self, term: Term, record: Record, ctx: &mut Context<Self>) {
        let Settings { job, policy, timing, .. } = self.settings;
        tracing::info!(%term, generation = record.generation.0, "this coordinator leads");
        let machine = machine::Coordinator::new(now(), job, term, record, policy, timing);
        self.leader = Some(Leader { term, machine, announced: Generation(0), nodes_notified: false });
        self.tell(What::Leads, ctx);
        self.drive(ctx);
    }

    /// `COORDINATOR-ACTOR-1`, `COORDINATOR-ACTOR-4`
    fn list_checkpoints(&mut self, listing: Listing, ctx: &mut Context<Self>) {
        let (term, checkpoints) = (self.term, self.checkpoints.clone());
        let found = tokio::task::spawn_blocking(move || (checkpoints.0)(listing));
        ctx.spawn(found.into_actor(self).map(move |found, actor, ctx| {
            let is_current = |leader: &&mut Leader| leader.machine.record().generation == listing.generation;
            let leader = actor.leader.as_mut().filter(|leader| Some(leader.term) == term).filter(is_current);
            match (leader, found) {
                (None, Ok(_)) => {}
                (Some(leader), Ok(Ok(newest))) => {
                    leader.machine.handle_listed(now(), listing, newest);
                    actor.drive(ctx);
                }
                (Some(_), Ok(Err(error))) => {
                    tracing::warn!(%error, "cannot find the newest checkpoint; retrying");
                    let pause = actor.settings.timing.detection_time;
                    ctx.run_later(pause, move |actor, ctx| {
                        if actor.term == term {
                            actor.list_checkpoints(listing, ctx);
                        }
                    });
                }
                // This actor cannot handle a panic: the thread ends with it.
                (_, Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                (_, Err(_)) => {}
            }
        }));
    }

    fn lease_read(&mut self, result: Result<Lease, StoreError>, ctx: &mut Context<Self>) {
        match result {
            Ok(lease) => self.succession.handle_lease(now(), lease),
            Err(error) => {
                tracing::debug!(%error, "cannot read the lease; retrying");
                self.succession.handle_silence(now());
            }
        }
        self.drive(ctx);
    }

    fn lease_written(
        &mut self,
        asked: Instant,
        result: Result<Result<Lease, Lease>, StoreError>,
        ctx: &mut Context<Self>,
    ) {
        match result {
            Ok(result) => {
                // There may be room for a lease and none for a record.
                let is_back = !self.record_fails && self.end_silence(ctx);
                self.succession.handle_written(now(), asked, result);
                if let Some(leader) = self.leader.as_mut().filter(|_| is_back) {
                    leader.machine.handle_store_back(now());
                }
            }
            // The next try shows whether the lease was written.
            Err(error) => tracing::debug!(%error, "cannot write the lease; retrying"),
        }
    }

    /// Writes a record after the one that is being written, if any. A later record replaces one that still waits.
    fn persist(&mut self, record: Record, ctx: &mut Context<Self>) {
        let waits = self.waits_for(&record);
        if self.writes_record {
            self.next_record = Some(record);
        } else {
            self.write(record, ctx);
        }
        if let Some(leader) = self.leader.as_mut().filter(|_| !waits) {
            leader.machine.handle_persisted(now(), true);
        }
    }

    /// Whether this decision takes effect only once it is durable.
    fn waits_for(&self, record: &Record) -> bool {
        !self.settings.is_alone || record.ending.is_some() || record.failing.is_some()
    }

    /// `COORDINATOR-ACTOR-1`, `COORDINATOR-ACTOR-2`
    fn write(&mut self, record: Record, ctx: &mut Context<Self>) {
        let again = record.clone();
        self.writes_record = true;
        let is_failed = matches!(record.ending, Some(Ending::Failed(_)));
        let is_probe = is_failed && self.silence.as_ref().is_some_and(|silence| silence.n_told > 0);
        let record = if is_probe { Record { ending: None, ..record } } else { record };
        self.ask_store(
            ctx,
            move |store| store.write_record(&record),
            move |actor, result, ctx| {
                actor.writes_record = false;
                actor.record_fails = result.is_err();
                let mut next = actor.next_record.take();
                match result {
                    Ok(accepted) => {
                        let (is_back, waits) = (actor.end_silence(ctx), actor.waits_for(&again));
                        let leader = actor.leader.as_mut().filter(|leader| leader.term == again.term);
                        if let Some(leader) = leader {
                            // What was withdrawn meanwhile has no effect.
                            if waits && leader.machine.awaits(&again) && (!is_probe || !accepted) {
                                leader.machine.handle_persisted(now(), accepted);
                            }
                            if is_back {
                                leader.machine.handle_store_back(now());
                            }
                            if is_probe && leader.machine.awaits(&again) {
                                next = next.or(Some(again));
                            }
                        }
                        if let Some(next) = next {
                            actor.write(next, ctx);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%error, "cannot write the record; retrying");
                        let latest = next.as_ref().unwrap_or(&again);
                        let lost = actor.end_without_store(latest);
                        if let (Some(reason), Some(leader)) = (lost, &mut actor.leader) {
                            leader.machine.handle_store_lost(now(), reason);
                        }
                        actor.writes_record = true;
                        actor.next_record = next;
                        actor.write_later(again, ctx);
                    }
                }
                actor.drive(ctx);
            },
        );
    }

    /// Why the job ends without this record, which the store does not take, if it has waited with its end for too long.
    fn end_without_store(&mut self, record: &Record) -> Option<String> {
        let why = match (&record.ending, &record.failing) {
            (Some(Ending::Failed(why)), _) | (None, Some(why)) => why.clone(),
            (Some(Ending::Finished), _) => "all steps are done, but the end of the job cannot be recorded".into(),
            (None, None) => {
                self.ends_since = None;
                return None;
            }
        };
        let since = (*self.ends_since.get_or_insert_with(now)).max(self.silence.as_ref()?.since);
        let is_due = now().saturating_duration_since(since) >= self.settings.end_patience?;
        is_due.then(|| format!("{why}; {}", self.silence.as_ref().map_or(String::new(), Silence::sentence)))
    }

    /// Writes this record after a pause, or the one that has replaced it by then.
    fn write_later(&mut self, record: Record, ctx: &mut Context<Self>) {
        // Between half of a pause and all of it, so that jobs do not return to a busy store together.
        let pause = self.settings.timing.heartbeat.mul_f64(0.5 + random_share() / 2.0);
        ctx.run_later(pause, move |actor, ctx| {
            actor.writes_record = false;
            let record = actor.next_record.take().unwrap_or(record);
            if actor.leader.as_ref().is_some_and(|leader| leader.term == record.term) {
                actor.write(record, ctx);
            }
        });
    }

    fn ask_store<T: Send + 'static>(
        &self,
        ctx: &mut Context<Self>,
        question: impl FnOnce(&SharedStore) -> Result<T, StoreError> + Send + 'static,
        done: impl FnOnce(&mut Self, Result<T, StoreError>, &mut Context<Self>) + 'static,
    ) {
        let store = self.store.clone();
        let answer = tokio::task::spawn_blocking(move || question(&store));
        ctx.spawn(answer.into_actor(self).map(|answer, actor, ctx| match answer {
            Ok(answer) => {
                if let Err(error) = &answer {
                    actor.note_silence(error, ctx);
                }
                done(actor, answer, ctx);
            }
            // This actor cannot handle a panic of the store: the thread ends with it.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }));
    }

    /// Tells when the store has been silent for longer than a lease.
    fn note_silence(&mut self, error: &StoreError, ctx: &mut Context<Self>) {
        let error = error.clone();
        let Some(silence) = self.silence.take() else {
            tracing::warn!(%error, "the store does not answer; retrying");
            self.silence = Some(Silence { since: now(), error, n_told: 0 });
            return;
        };
        let is_due = silence.is_due(self.settings.timing.lease);
        if is_due {
            self.tell(What::StoreSilent { error: error.to_string() }, ctx);
        }
        self.silence = Some(Silence { error, n_told: silence.n_told + u32::from(is_due), ..silence });
    }

    /// Tells that a silent store has taken a write, and returns whether it was silent for so long that this was told. That it can
    /// be read is not enough.
    fn end_silence(&mut self, ctx: &mut Context<Self>) -> bool {
        let Some(silence) = self.silence.take().filter(|silence| silence.n_told > 0) else { return false };
        let silent_ms = silence.since.elapsed().as_millis() as u64;
        self.tell(What::StoreAnswers { silent_ms }, ctx);
        true
    }

    fn tell(&self, what: What, ctx: &mut Context<Self>) {
        let term = self.term.unwrap_or_default();
        // Events are rare and must not be lost, so this waits for a full mailbox.
        let sent = self.outlets.events.send(Event::now(term, what));
        ctx.spawn(sent.into_actor(self).map(|sent, _, _| {
            if let Err(error) = sent {
                tracing::warn!(%error, "an event was not logged");
            }
        }));
    }

    fn leader(&mut self) -> Result<&mut machine::Coordinator, RequestError> {
        let leads = |leader: &&mut Leader| leader.machine.activity() != machine::Activity::Deposed;
        let silence = &self.silence;
        let refusal = || {
            silence.as_ref().map_or(RequestError::NotLeading, |silence| RequestError::StoreSilent(silence.sentence()))
        };
        self.leader.as_mut().filter(leads).map(|leader| &mut leader.machine).ok_or_else(refusal)
    }

    /// Passes a request to the machine and performs the resulting commands.
    fn request<E: Into<RequestError>>(
        &mut self,
        ctx: &mut Context<Self>,
        asked: Asked,
        request: impl FnOnce(&mut machine::Coordinator) -> Result<(), E>,
    ) -> Answer {
        let accepted = self.leader().and_then(|machine| request(machine).map_err(Into::into));
        let (reply, answer) = oneshot::channel();
        match accepted {
            Ok(()) if self.waiting.len() >= WAITING_MAX => drop(reply.send(Err(RequestError::Busy))),
            Ok(()) => self.waiting.push((asked, reply)),
            Err(error) => drop(reply.send(Err(error))),
        }
        self.drive(ctx);
        // The sender is dropped only with the actor.
        Box::pin(async { answer.await.unwrap_or(Err(RequestError::NotLeading)) })
    }

    /// `COORDINATOR-ACTOR-3`
    fn answer(&mut self) {
        // A job that is over records no requests any more.
        let is_over = |activity| matches!(activity, machine::Activity::Finished | machine::Activity::Failed);
        let waits = |machine: &mut machine::Coordinator| !machine.is_durable() && !is_over(machine.activity());
        if self.waiting.is_empty() || self.leader().is_ok_and(waits) {
            return;
        }
        for (asked, reply) in std::mem::take(&mut self.waiting) {
            // The receiver may be gone.
            let _ = reply.send(self.leader().map(|machine| machine.outlook(asked)));
        }
    }
}

/// A random number between 0 and 1: the standard library seeds each hasher at random.
fn random_share() -> f64 {
    RandomState::new().hash_one(()) as f64 / u64::MAX as f64
}

impl Actor for Coordinator {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.set_mailbox_capacity(MAILBOX_LEN);
        self.succession.handle_timeout(now());
        self.drive(ctx);
    }
}

impl Deadlines for Coordinator {
    fn timer(&mut self) -> &mut Timer {
        &mut self.timer
    }

    fn wake(&mut self, ctx: &mut Context<Self>) {
        self.succession.handle_timeout(now());
        if let Some(leader) = &mut self.leader {
            leader.machine.handle_timeout(now());
        }
        self.drive(ctx);
    }
}

impl Handler<ReportArrived> for Coordinator {
    type Result = ();

    fn handle(&mut self, ReportArrived(report): ReportArrived, ctx: &mut Context<Self>) {
        let Some(leader) = &mut self.leader else { return };
        if let Err(stale) = leader.machine.handle_report(now(), &report) {
            tracing::debug!(node = %report.node, number = report.number, "rejecting a report that {stale}");
        }
        self.drive(ctx);
    }
}

impl Handler<GetStatus> for Coordinator {
    type Result = Result<Status, RequestError>;

    fn handle(&mut self, _: GetStatus, _: &mut Context<Self>) -> Result<Status, RequestError> {
        let mut status = self.leader()?.status(now());
        status.faults.extend(self.silence.as_ref().filter(|silence| silence.n_told > 0).map(Silence::sentence));
        Ok(status)
    }
}

impl Handler<Drain> for Coordinator {
    type Result = Answer;

    fn handle(&mut self, Drain(node): Drain, ctx: &mut Context<Self>) -> Answer {
        self.request(ctx, Asked::Drain(node), |machine| machine.handle_drain(now(), node))
    }
}

impl Handler<DeclareGone> for Coordinator {
    type Result = Answer;

    fn handle(&mut self, DeclareGone(node): DeclareGone, ctx: &mut Context<Self>) -> Answer {
        self.request(ctx, Asked::Change, |machine| machine.handle_gone(now(), node))
    }
}

impl Handler<Resize> for Coordinator {
    type Result = Answer;

    fn handle(&mut self, Resize(mesh): Resize, ctx: &mut Context<Self>) -> Answer {
        self.request(ctx, Asked::Change, |machine| machine.handle_resize(now(), mesh))
    }
}

impl Handler<Save> for Coordinator {
    type Result = Answer;

    fn handle(&mut self, _: Save, ctx: &mut Context<Self>) -> Answer {
        self.request(ctx, Asked::Change, |machine| {
            machine.handle_save(now());
            Ok::<(), RequestError>(())
        })
    }
}

impl Handler<Stop> for Coordinator {
    type Result = Answer;

    fn handle(&mut self, _: Stop, ctx: &mut Context<Self>) -> Answer {
        self.request(ctx, Asked::Stop, |machine| {
            machine.handle_stop(now());
            Ok::<(), RequestError>(())
        })
    }
}

impl Handler<EndWithoutRecord> for Coordinator {
    type Result = ();

    fn handle(&mut self, EndWithoutRecord(reason): EndWithoutRecord, ctx: &mut Context<Self>) {
        match &mut self.leader {
            Some(leader) => leader.machine.handle_store_lost(now(), reason),
            // The nodes are those of another coordinator, or of none.
            None => {
                let ending = Ending::Failed(reason);
                self.tell(What::Ended { ending }, ctx);
                self.tell(What::NodesNotified, ctx);
            }
        }
        self.drive(ctx);
    }
}

impl Handler<Leave> for Coordinator {
    type Result = ();

    fn handle(&mut self, _: Leave, ctx: &mut Context<Self>) {
        // The timer would keep the actor running without an address.
        ctx.stop();
    }
}
