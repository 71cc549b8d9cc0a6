//! Doing many small things at once when there are many.
//!
//! Heartbeats of a thousand nodes arrive every 100 µs. To be woken for one and to sleep again costs several times what
//! it costs to handle it, and so does waking another thread to hand it over. So the listener's thread rests for a moment
//! before it sleeps, if it was woken just before; and heartbeats are handed over by the basket. What comes after a
//! silence is handled immediately, and news never waits for a basket.

use super::listener::{Inbound, Shared};
use phalanx_strategies::elastic::message::Report;
use std::convert::Infallible;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::sync::mpsc::error::TrySendError;

/// How long the thread rests; a message is late by at most that, if there are many.
const REST: Duration = Duration::from_millis(1);
/// It is woken often if it was woken so shortly after it last went to sleep.
const OFTEN: Duration = Duration::from_millis(3);

/// What a thread does each time before it sleeps.
pub(super) fn rest_when_busy() -> impl Fn() + Send + Sync + 'static {
    let last = Mutex::new(Instant::now());
    move || {
        let mut last = last.lock().expect("nobody panics while resting");
        if last.elapsed() < OFTEN {
            std::thread::sleep(REST);
        }
        *last = Instant::now();
    }
}

/// Heartbeats that wait to be handed over.
#[derive(Default)]
pub(super) struct Basket {
    reports: Mutex<Vec<Report>>,
    first: Notify,
}

impl Basket {
    pub(super) fn put(&self, report: Report) {
        let mut reports = self.reports.lock().expect("nobody panics with the basket");
        if reports.is_empty() {
            self.first.notify_one();
        }
        reports.push(report);
    }
}

/// Empties the basket a twentieth of a heartbeat after the first one came; nobody counts on more precision.
pub(super) async fn hand_over(shared: &Shared) -> Infallible {
    let basket = &shared.basket;
    loop {
        basket.first.notified().await;
        tokio::time::sleep(shared.config.timing.heartbeat / 20).await;
        let reports = std::mem::take(&mut *basket.reports.lock().expect("nobody panics with the basket"));
        // Whoever handles them is behind; the next ones say the same.
        if let Err(TrySendError::Full(Inbound::Heartbeats(reports))) =
            shared.inbound.try_send(Inbound::Heartbeats(reports))
        {
            tracing::debug!(n_dropped = reports.len(), "dropped heartbeats");
        }
    }
}
