//! Waiting of a rank: until the awaited operation is done, the rank advances all operations that it has started.
//!
//! Two members may finish operations of two groups in opposite orders. If waiting for one operation did not advance the
//! others, two ranks could deadlock; so every wait of a rank drives all of its streams.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::wakeup::Wakeup;
use phalanx_device::CollectiveError;

/// Streams of one communicator.
pub(super) trait Advance: Send {
    /// Makes all progress that is possible without waiting.
    ///
    /// # Errors
    /// The error that ends the streams; every later call returns the same error.
    fn advance(&mut self) -> Result<(), CollectiveError>;
}

/// Access to the wake-up on which a rank sleeps.
pub(super) trait HasWakeup: Send + Sync {
    /// The wake-up.
    fn wakeup(&self) -> &Wakeup;
}

/// All streams of one rank, and the wake-up on which it sleeps.
pub(super) struct Engine {
    streams: Mutex<Vec<Arc<Mutex<dyn Advance>>>>,
    wakeup: Arc<dyn HasWakeup>,
    n_spins_on_core: u32,
}

/// Polls of the awaited operation between two polls of the other streams.
const SPINS_AT_ONE: u32 = 64;
/// Polls without yielding the core: a few microseconds, enough for most peers that run on cores of their own.
const SPINS_ON_CORE: u32 = 64;
/// Polls that each yield the core: a peer may be waiting for it. If two ranks share a core, sleeping and waking takes
/// several times as long.
const SPINS_OFF_CORE: u32 = 64;

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("n_spins_on_core", &self.n_spins_on_core).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine for one of `n_ranks` ranks on this machine.
    pub(super) fn new(wakeup: Arc<dyn HasWakeup>, n_ranks: u32) -> Engine {
        // With fewer cores than ranks, polling keeps the awaited rank from running.
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_spins_on_core = if n_ranks as usize <= n_cores { SPINS_ON_CORE } else { 1 };
        Engine { streams: Mutex::default(), wakeup, n_spins_on_core }
    }

    /// Adds streams that every wait drives.
    pub(super) fn add(&self, streams: Arc<Mutex<dyn Advance>>) {
        lock(&self.streams).push(streams);
    }

    /// Waits until `is_done` returns true or fails. `before_sleep` is called once before the first sleep.
    pub(super) fn wait(
        &self,
        mut is_done: impl FnMut() -> Result<bool, CollectiveError>,
        before_sleep: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        let mut before_sleep = Some(before_sleep);
        loop {
            for n_spins in 1..=self.n_spins_on_core + SPINS_OFF_CORE {
                if is_done()? {
                    return Ok(());
                }
                if n_spins % SPINS_AT_ONE == 0 {
                    self.advance_all();
                }
                if n_spins < self.n_spins_on_core { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            if let Some(call) = before_sleep.take() {
                call();
            }
            let permit = self.wakeup.wakeup().prepare_to_sleep();
            self.advance_all();
            if is_done()? {
                return Ok(());
            }
            let _ = permit.sleep();
        }
    }

    /// Advances all streams. A failing stream aborts the world, which ends all waits, and keeps its own error for the
    /// caller that finishes its operations.
    fn advance_all(&self) {
        for streams in lock(&self.streams).iter() {
            let _ = lock(streams).advance();
        }
    }
}

/// Locks state and ignores poisoning: a panic aborts the world.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
