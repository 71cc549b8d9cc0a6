//! The coordinator of a multi-node job, in its own process: it has no tensors and no devices, and its successor can
//! rebuild its state from the store and the nodes' reports.

use crate::checkpoint_claim::CheckpointClaim;
use crate::config::JobConfig;
use crate::control::{Bell, Control, STOP_PATIENCE};
use crate::control_place::{ControlPlace, JOB};
use crate::coordinate::event_log::EventLog;
use crate::coordinate::folder_mark::FolderMark;
use crate::coordinate::listening::{admission, open};
use crate::coordinate::patience::patiently;
use crate::coordinate::serving::{Serve, write_address};
use crate::coordinate::silent_stop::SilentStop;
use crate::coordinate::standby::ALONE;
use crate::coordinate::term::{Term, as_snapshot, take_over};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::train::output_lock::OutputLock;
use crate::train::plan::ModelPlan;
use crate::train::programs::state_bytes;
use phalanx_actors::control::{ControlThread, RunError, block_on};
use phalanx_actors::coordinator::{Checkpoints, Settings};
use phalanx_actors::coordinator_handle::{Admission, CoordinatorHandle};
use phalanx_actors::events::{Event, What};
use phalanx_actors::operator::{Answer, Request};
use phalanx_actors::transport::{Downlink, Inbox};
use phalanx_actors::trust::join::Address;
use phalanx_storage::checkpoint::catalog::{Skipped, latest_after};
use phalanx_strategies::elastic::coordinator::newest_checkpoint::Listing;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use phalanx_strategies::elastic::mesh_choice::Policy;
use phalanx_strategies::elastic::message::Ending;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Events of a coordinator for its caller.
pub(crate) enum CoordinatorEvent {
    /// The join string.
    Join(String),
    /// Another coordinator is active; this one stands by.
    StandsBy,
    /// An event of the job.
    Event(Event),
}

/// Coordinates a job on several machines to its end. Returns its last status, unless another coordinator has taken over.
/// `lock` is that of the job's folder, if the caller has taken it. Polls `is_abandoned`: once it is true, the job is stopped,
/// without waiting when no node is left.
pub(crate) fn serve(
    config: &JobConfig,
    model: &ModelPlan,
    serve: &Serve,
    lock: Option<OutputLock>,
    control: &Control,
    is_abandoned: &dyn Fn() -> bool,
    tell: &mut dyn FnMut(CoordinatorEvent),
) -> Coordinated {
    let served = try_serve(config, model, serve, lock, control, is_abandoned, tell);
    served.unwrap_or_else(|error| Coordinated { status: Err(error), notified: Vec::new() })
}

fn try_serve(
    config: &JobConfig,
    model: &ModelPlan,
    serve: &Serve,
    lock: Option<OutputLock>,
    control: &Control,
    is_abandoned: &dyn Fn() -> bool,
    tell: &mut dyn FnMut(CoordinatorEvent),
) -> Result<Coordinated, JobError> {
    let stops = || control.stops() && !serve.is_beside_node || is_abandoned();
    let Some(mut term) = take_over(config, serve, lock, &stops, &mut || tell(CoordinatorEvent::StandsBy))? else {
        return Ok(Coordinated { status: Ok(None), notified: Vec::new() });
    };
    let (listener, inbox, invitation) = patiently(&term.place, &stops, || open(config, serve, &term))?;
    term.addresses.clone_from(&invitation.addresses);
    tell(CoordinatorEvent::Join(invitation.to_string()));
    let thread =
        ControlThread::start("phalanx-control").map_err(ControlPlaneError::cannot("start the control thread"))?;
    let admission = admission(config, model, None);
    let coordinating =
        Coordinating::start(config, model, term, &thread, admission, Arc::new(listener), vec![inbox], &control.bell)?;
    let outcome = coordinating.follow(control, is_abandoned, tell);
    thread.stop();
    Ok(outcome)
}

/// A coordinated job.
pub(super) struct Coordinating<'a> {
    handle: CoordinatorHandle,
    thread: &'a ControlThread,
    downlink: Arc<dyn Downlink>,
    events: Receiver<Event>,
    log: EventLog,
    ending: Option<Ending>,
    /// Whether all nodes have been notified of the end of the job.
    nodes_notified: bool,
    /// The file that shows whose the folder is.
    mark: Option<FolderMark>,
    place: ControlPlace,
    addresses: Vec<Address>,
    publishing: Publishing,
    stop: SilentStop,
    claim: Option<CheckpointClaim>,
    _lock: Option<OutputLock>,
}

/// Whose addresses nodes and operators find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publishing {
    /// This coordinator's.
    Done,
    /// Perhaps those of a coordinator that leads in its place.
    OfAnother,
    /// This coordinator leads again, and has to publish its own.
    Due,
}

/// Sends the coordinator's events to the thread that follows the job, and wakes it, also when the coordinator is gone.
struct Happened {
    sender: Sender<Event>,
    /// Dropped after the sender.
    end: RingsWhenDropped,
}

struct RingsWhenDropped(Arc<Bell>);

impl Happened {
    fn tell(&self, event: &Event) {
        // The receiver is gone once the job is over.
        let _ = self.sender.send(event.clone());
        self.end.0.ring();
    }
}

impl Drop for RingsWhenDropped {
    fn drop(&mut self) {
        self.0.ring();
    }
}

/// How the coordination of a job ended.
pub(crate) struct Coordinated {
    /// The last status of the job; `None` if another coordinator has taken over.
    pub(crate) status: Result<Option<Box<Status>>, JobError>,
    /// The nodes that have been notified of the end of the job, so that they exit by themselves. A node that had not reported when
    /// the job ended is none of them.
    pub(super) notified: Vec<NodeId>,
}

impl<'a> Coordinating<'a> {
    /// Starts the coordinator of `term` on `thread`. Desired states leave through `downlink`; reports and requests arrive
    /// through `inboxes`.
    ///
    /// # Errors
    /// When the thread has ended, or the job's files cannot be written.
    pub(super) fn start(
        config: &JobConfig,
        model: &ModelPlan,
        term: Term,
        thread: &'a ControlThread,
        admission: Admission,
        downlink: Arc<dyn Downlink>,
        inboxes: Vec<Inbox>,
        bell: &Arc<Bell>,
    ) -> Result<Coordinating<'a>, JobError> {
        let log = EventLog::open(&config.output.folder());
        let policy = config.elastic.policy(config.parallel.mesh()?, model.n_microbatches, state_bytes(model)?);
        let policy = Policy { one_model: config.parallel.reproducible, ..policy };
        let Term { job, store, candidate, lease, place, addresses, claim, lock, .. } = term;
        let mark = (!config.output.is_remote()).then(|| FolderMark { path: place.path(JOB), job });
        let checkpoints = newest_checkpoint(config.output.checkpoints());
        let (holds, is_alone, timing) = (Some(lease.take()), candidate == ALONE, config.elastic.timing());
        // Room on a disk may be made at any time; a bucket that is gone does not come back.
        let end_patience = config.output.is_remote().then_some(STORE_PATIENCE);
        let settings = Settings { job, candidate, holds, is_alone, end_patience, policy, timing };
        let (sender, events) = channel();
        let happened = Happened { sender, end: RingsWhenDropped(Arc::clone(bell)) };
        let starting = async {
            let tell = move |event: &Event| happened.tell(event);
            let downlink = Arc::clone(&downlink);
            let handle =
                CoordinatorHandle::start(thread, settings, store, checkpoints, admission, downlink, tell).await?;
            for inbox in inboxes {
                handle.serve(inbox).await?;
            }
            Ok::<CoordinatorHandle, RunError>(handle)
        };
        let handle = block_on(starting)
            .map_err(ControlPlaneError::cannot("start an event loop"))?
            .map_err(ControlPlaneError::from)?;
        Ok(Coordinating {
            handle,
            thread,
            downlink,
            events,
            log,
            ending: None,
            nodes_notified: false,
            mark,
            place,
            addresses,
            publishing: Publishing::Done,
            stop: SilentStop::default(),
            claim,
            _lock: lock,
        })
    }

    /// Follows the job to its end, then closes the transport to its nodes.
    pub(super) fn follow(
        mut self,
        control: &Control,
        is_abandoned: &dyn Fn() -> bool,
        tell: &mut dyn FnMut(CoordinatorEvent),
    ) -> Coordinated {
        let status = self.run(control, is_abandoned, tell);
        let notified = if self.nodes_notified { self.known_nodes() } else { Vec::new() };
        control.close();
        self.downlink.close();
        Coordinated { status, notified }
    }

    fn run(
        &mut self,
        control: &Control,
        is_abandoned: &dyn Fn() -> bool,
        tell: &mut dyn FnMut(CoordinatorEvent),
    ) -> Result<Option<Box<Status>>, JobError> {
        let (mut is_stopping, mut is_open, mut n_saves) = (false, false, 0);
        loop {
            let is_abandoned = is_abandoned();
            let stops = control.stops() || is_abandoned;
            self.give_up_if_silent(stops);
            if is_open && !is_stopping && self.ending.is_none() && stops {
                let answer = self.ask(Request::Stop)?;
                // A coordinator that has just lost its lease gets the request again once it has the lease back.
                is_stopping = answer.is_durable();
                tracing::info!(?answer, "requested a stop");
            }
            if is_open && n_saves < control.saves.load(Ordering::Acquire) && self.ask(Request::Save)?.is_durable() {
                n_saves += 1;
            }
            self.end_if_displaced();
            if is_abandoned && self.downlink.connected().is_empty() {
                return Err(JobError::JobFailed("no node is left".into()));
            }
            while let Some((request, answer)) = control.next_asked() {
                // The requester may have gone.
                let _ = answer.send(self.ask(request)?);
            }
            if let Some(Err(panicked)) = self.thread.has_ended() {
                return Err(JobError::JobFailed(panicked.to_string()));
            }
            self.tell_faults();
            self.publish_again();
            match self.events.try_recv() {
                Ok(event) => {
                    self.log.write(&event);
                    // The coordinator answers from now on.
                    if matches!(event.what, What::Leads) && !std::mem::replace(&mut is_open, true) {
                        control.open();
                    }
                    self.note(&event.what);
                    tell(CoordinatorEvent::Event(event));
                    if self.nodes_notified {
                        break;
                    }
                }
                Err(TryRecvError::Empty) => control.bell.wait(POLL_INTERVAL),
                Err(TryRecvError::Disconnected) => {
                    self.end_of_thread()?;
                    break;
                }
            }
        }
        self.final_status()
    }

    /// How the job was when it finished; `None` if it goes on under another coordinator.
    fn final_status(&mut self) -> Result<Option<Box<Status>>, JobError> {
        match self.ending.take() {
            Some(Ending::Failed(why)) => Err(JobError::JobFailed(why)),
            Some(Ending::Finished) => match self.ask(Request::Status)? {
                Answer::Status(status) => Ok(Some(status)),
                other => Err(JobError::JobFailed(format!("the coordinator sent no final status: {other:?}"))),
            },
            None => Ok(None),
        }
    }

    /// Ends a job whose folder, or whose checkpoints, another job has.
    fn end_if_displaced(&mut self) {
        let of_folder = self.mark.as_ref().and_then(FolderMark::loss);
        let Some(reason) = of_folder.or_else(|| self.claim.as_ref().and_then(CheckpointClaim::loss)) else { return };
        // Once: the nodes are told that the job is over.
        (self.mark, self.claim) = (None, None);
        self.handle.end(reason);
    }

    /// Notes what an event changes for the loop.
    fn note(&mut self, what: &What) {
        match what {
            What::StepsDown => self.publishing = Publishing::OfAnother,
            What::StoreSilent { error } => self.stop.note_silence(Instant::now(), error),
            What::StoreAnswers { .. } => self.stop.note_answer(),
            What::Ended { ending } => self.ending = Some(ending.clone()),
            What::NodesNotified => self.nodes_notified = true,
            What::Leads if self.publishing == Publishing::OfAnother => self.publishing = Publishing::Due,
            _ => {}
        }
    }

    /// Tells when the job's history cannot be written.
    fn tell_faults(&mut self) {
        if let Some(fault) = self.log.new_fault() {
            tracing::warn!(fault = fault.as_deref().unwrap_or("none: all lines are written"), "the job's history");
            self.handle.set_fault(fault);
        }
    }

    /// Publishes the addresses of a coordinator that leads again: those of another one may be published.
    fn publish_again(&mut self) {
        if self.publishing != Publishing::Due {
            return;
        }
        match write_address(&self.place, &self.addresses) {
            Ok(()) => self.publishing = Publishing::Done,
            Err(error) => tracing::warn!(%error, "cannot publish the address of this coordinator; retrying"),
        }
    }

    /// Ends a job that is to stop without its record, once its store has been silent for too long.
    fn give_up_if_silent(&mut self, stops: bool) {
        if stops {
            self.stop.note_request(Instant::now());
        }
        let Some(error) = self.stop.gives_up(Instant::now()).filter(|_| self.ending.is_none()) else { return };
        let lost = match self.ask(Request::Status) {
            Ok(Answer::Status(status)) if status.step > status.checkpoint.step => {
                format!("steps {} to {} are lost", status.checkpoint.step.0 + 1, status.step.0)
            }
            Ok(Answer::Status(_)) => "no step is lost".into(),
            _ => "steps after the last checkpoint are lost unless another coordinator takes over".into(),
        };
        let seconds = STOP_PATIENCE.as_secs();
        let reason = format!("stopped without its store, which has not answered for {seconds} s: {error}; {lost}");
        // A rank's failure on the same disk is told instead of the job's end.
        tracing::error!("{reason}");
        self.handle.end(reason);
    }

    /// The nodes that have reported and are not silent.
    fn known_nodes(&self) -> Vec<NodeId> {
        match self.ask(Request::Status) {
            Ok(Answer::Status(status)) => {
                status.nodes.iter().filter(|node| !node.silent).map(|node| node.node).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The panic that ended the control thread, if one did.
    fn end_of_thread(&self) -> Result<(), JobError> {
        let ended = block_on(async { tokio::time::timeout(END_PATIENCE, self.thread.ended()).await });
        match ended.map_err(ControlPlaneError::cannot("start an event loop"))? {
            Ok(Err(panicked)) => Err(JobError::JobFailed(panicked.to_string())),
            Ok(Ok(())) | Err(_) => Ok(()),
        }
    }

    fn ask(&self, request: Request) -> Result<Answer, JobError> {
        let asking = async { tokio::time::timeout(ANSWER_PATIENCE, self.handle.ask(request)).await };
        let answered = block_on(asking).map_err(ControlPlaneError::cannot("start an event loop"))?;
        let late = "the request is not durable yet, and may still take effect: check the status";
        Ok(answered.unwrap_or_else(|_| Answer::Refused(late.into())))
    }
}

/// Interval of checks beside those at each ring of the bell, for a control thread that panicked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How long a request may take to become durable before this thread goes on without its answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// How long the end of a job waits for an object store that is silent; outages of some minutes are common.
const STORE_PATIENCE: Duration = Duration::from_secs(600);

/// How long the control thread may take to end after its actors are gone.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Finds the newest checkpoint of a run that verifies, wherever its members have died after they had committed it.
fn newest_checkpoint(root: PathBuf) -> Checkpoints {
    Checkpoints::new(move |Listing { first, after, .. }| {
        let listed = (!root.is_file()).then(|| latest_after(&root, after.0, first.0)).transpose();
        let (found, skipped) = listed.map_err(|error| error.to_string())?.unwrap_or_default();
        for Skipped { path, reason } in skipped {
            tracing::warn!(path = %path.display(), %reason, "skipped a checkpoint");
        }
        Ok(found.map(|found| as_snapshot(found.id())))
    })
}
