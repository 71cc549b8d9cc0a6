//! A node and the coordinator of its job in one process, until both have ended.

use crate::config::JobConfig;
use crate::config::output::Resume;
use crate::control::Bell;
use crate::coordinate::serve::Coordinated;
use crate::error::JobError;
use crate::events::{Event, Report};
use crate::node::leave::Leave;
use crate::node::node_loop::Outcome;
use crate::train::saving::Saving;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::identity::NodeId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The end of the coordination, once it has ended: the nodes that were notified of it.
#[derive(Debug, Default)]
pub(super) struct Over(OnceLock<Vec<NodeId>>);

impl Over {
    /// Whether the node stays: a notified node exits by itself, after its ranks.
    pub(super) fn leave(&self, node: NodeId) -> Leave {
        match self.0.get() {
            Some(notified) if !notified.contains(&node) => Leave::Now,
            _ => Leave::Stay,
        }
    }
}

/// Tells the node that the coordination has ended, even by a panic.
struct TellsOver<'a>(&'a Over);

impl Drop for TellsOver<'_> {
    fn drop(&mut self) {
        // Unless it was set with the notified nodes.
        let _ = self.0.0.set(Vec::new());
    }
}

/// Runs a node and the coordinator of its job concurrently, and returns the outcome of the job. The end of the node rings the
/// coordinator's bell.
pub(super) fn together(
    config: &JobConfig,
    bell: &Bell,
    take_part: impl FnOnce(&Over, &mut (dyn FnMut(&Event) + Send)) -> Result<Outcome, JobError> + Send,
    coordinate: impl FnOnce(&dyn Fn() -> bool, &dyn Fn(&Event)) -> Coordinated,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let on_event = Mutex::new(on_event);
    // Two threads emit events; a panic of the callback poisons the lock, which stays usable.
    let tell = |event: &Event| on_event.lock().unwrap_or_else(PoisonError::into_inner)(event);
    let [has_succeeded, has_ended] = [const { AtomicBool::new(false) }; 2];
    let over = Over::default();
    let (status, node) = std::thread::scope(|scope| {
        let node = scope.spawn(|| {
            let _end = Raise { flag: &has_ended, bell };
            let outcome = take_part(&over, &mut |event| tell(event));
            has_succeeded.store(outcome.is_ok(), Ordering::Release);
            outcome
        });
        let tells_over = TellsOver(&over);
        let is_abandoned = || has_ended.load(Ordering::Acquire) && !has_succeeded.load(Ordering::Acquire);
        let Coordinated { status, notified } = coordinate(&is_abandoned, &tell);
        // Nobody has set it before.
        let _ = over.0.set(notified);
        drop(tells_over);
        (status, node.join())
    });
    // A local failure is the cause of the job's failure.
    let Outcome { report, failure } = node.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    match (report, status) {
        (_, Err(error)) => Err(failure.unwrap_or(error)),
        (Some(report), Ok(_)) => Ok(report),
        (None, Ok(Some(status))) => report_of(config, &status),
        (None, Ok(None)) => Err(JobError::JobFailed("another coordinator has taken over".into())),
    }
}

/// Sets the flag and rings the bell when dropped, even during a panic.
struct Raise<'a> {
    flag: &'a AtomicBool,
    bell: &'a Bell,
}

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.flag.store(true, Ordering::Release);
        self.bell.ring();
    }
}

/// The report of a job whose leader was on another machine.
pub(super) fn report_of(config: &JobConfig, status: &Status) -> Result<Report, JobError> {
    let output = &config.output;
    let saving = Saving::new(config, Vec::new());
    let (checkpoint, _) = saving.find(&Resume::Auto, config.elastic.verify_steps)?;
    let finished = !status.requests.stop;
    let model_dir = finished.then(|| output.folder().join("model"));
    Ok(Report { steps: status.checkpoint.step.0, finished, last: None, checkpoint, model_dir })
}
