//! Batching of heartbeats.
//!
//! Heartbeats of a thousand nodes arrive every 100 µs. Waking up for each heartbeat, or waking another thread to hand it
//! over, costs more than handling it. The listener therefore hands heartbeats over in batches, and while batches are full
//! its thread sleeps for a short interval and then reads everything that has arrived. This delays the news of a large job
//! by at most that interval, and nothing in a small job.

use crate::transport::Inbound;
use phalanx_strategies::elastic::message::Report;
use phalanx_strategies::elastic::timing::Timing;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};

/// A batch of this size makes the listener sleep between batches. At the default timing that happens from 160 nodes on.
const FULL: usize = 8;

/// How long a batch stays open, and how long the thread sleeps.
fn moment(timing: &Timing) -> Duration {
    timing.heartbeat / 20
}

/// Heartbeats that wait to be handed over.
#[derive(Default)]
pub(super) struct Batch {
    reports: Mutex<Vec<Report>>,
    first: Notify,
    /// Whether the last batch was full.
    full: AtomicBool,
}

impl Batch {
    pub(super) fn put(&self, report: Report) {
        let mut reports = self.reports.lock().expect("no holder of this lock panics");
        if reports.is_empty() {
            self.first.notify_one();
        }
        reports.push(report);
    }

    /// Called by the listener's thread before it parks.
    pub(super) fn rest_if_full(&self, timing: &Timing) {
        if self.full.load(Ordering::Relaxed) {
            std::thread::sleep(moment(timing));
        }
    }
}

/// Hands each batch over, one interval after its first heartbeat.
pub(super) async fn hand_over(batch: &Batch, timing: &Timing, inbound: &mpsc::Sender<Inbound>) -> Infallible {
    loop {
        batch.first.notified().await;
        tokio::time::sleep(moment(timing)).await;
        let reports = std::mem::take(&mut *batch.reports.lock().expect("no holder of this lock panics"));
        batch.full.store(reports.len() >= FULL, Ordering::Relaxed);
        // The receiver is behind. Dropping is safe: the next heartbeats repeat the content.
        if let Err(TrySendError::Full(Inbound::Heartbeats(reports))) = inbound.try_send(Inbound::Heartbeats(reports)) {
            tracing::debug!(n_dropped = reports.len(), "dropped heartbeats");
        }
    }
}
