//! Doing many small things at once when there are many.
//!
//! Heartbeats of a thousand nodes arrive every 100 µs. To be woken for one and to sleep again costs more than to handle
//! it, and so does waking another thread to hand it over. So heartbeats are handed over by the basket, and while baskets
//! are full the listener's thread rests for a moment before it sleeps: what arrives meanwhile is read at once. News of
//! a large job is late by at most that moment; in a small one nothing waits.

use super::listener::Shared;
use crate::transport::Inbound;
use phalanx_strategies::elastic::message::Report;
use phalanx_strategies::elastic::timing::Timing;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::mpsc::error::TrySendError;

/// With so many heartbeats in a basket it is worth while to rest. At the default timing that is from 160 nodes on.
const FULL: usize = 8;

/// How long a basket is open, and how long the thread rests. Nobody counts on more precision.
fn moment(timing: &Timing) -> Duration {
    timing.heartbeat / 20
}

/// Heartbeats that wait to be handed over.
#[derive(Default)]
pub(super) struct Basket {
    reports: Mutex<Vec<Report>>,
    first: Notify,
    /// Whether the last one was.
    full: AtomicBool,
}

impl Basket {
    pub(super) fn put(&self, report: Report) {
        let mut reports = self.reports.lock().expect("nobody panics with the basket");
        if reports.is_empty() {
            self.first.notify_one();
        }
        reports.push(report);
    }

    /// What the listener's thread does before it sleeps.
    pub(super) fn rest_if_full(&self, timing: &Timing) {
        if self.full.load(Ordering::Relaxed) {
            std::thread::sleep(moment(timing));
        }
    }
}

/// Empties the basket a moment after the first heartbeat came.
pub(super) async fn hand_over(shared: &Shared) -> Infallible {
    let basket = &shared.basket;
    loop {
        basket.first.notified().await;
        tokio::time::sleep(moment(&shared.config.timing)).await;
        let reports = std::mem::take(&mut *basket.reports.lock().expect("nobody panics with the basket"));
        basket.full.store(reports.len() >= FULL, Ordering::Relaxed);
        // Whoever handles them is behind; the next ones say the same.
        if let Err(TrySendError::Full(Inbound::Heartbeats(reports))) =
            shared.inbound.try_send(Inbound::Heartbeats(reports))
        {
            tracing::debug!(n_dropped = reports.len(), "dropped heartbeats");
        }
    }
}
