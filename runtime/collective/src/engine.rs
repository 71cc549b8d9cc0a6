//! How a rank waits: it does its share of everything that it has started until what it waits for has come.
//!
//! Two members may finish operations of two groups in opposite orders. If waiting for one operation did nothing for the
//! other, both would wait for ever; so every wait of a rank drives all of its streams.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::bell::Bell;
use phalanx_device::CollectiveError;

/// Streams of one communicator.
pub(super) trait Advance: Send {
    /// Does what can be done without waiting.
    ///
    /// # Errors
    /// Whatever keeps this from ever being done; the same again at every later call.
    fn advance(&mut self) -> Result<(), CollectiveError>;
}

/// What a rank sleeps on, wherever it lies.
pub(super) trait HasBell: Send + Sync {
    /// The bell.
    fn bell(&self) -> &Bell;
}

/// All streams of one rank, and what it sleeps on.
pub(super) struct Engine {
    streams: Mutex<Vec<Arc<Mutex<dyn Advance>>>>,
    bell: Arc<dyn HasBell>,
    n_looks_on_core: u32,
}

/// Between two looks at the other streams, so many at what the rank waits for.
const LOOKS_AT_ONE: u32 = 64;
/// Looks with the core kept: a few microseconds, in which most peers come that run on a core of their own.
const LOOKS_ON_CORE: u32 = 64;
/// Looks after each of which the core is offered to others: a peer may be waiting for this very core. Where two ranks
/// share one, sleeping and being woken takes several times as long.
const LOOKS_OFF_CORE: u32 = 64;

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("n_looks_on_core", &self.n_looks_on_core).finish_non_exhaustive()
    }
}

impl Engine {
    /// An engine of one of `n_ranks` on this machine.
    pub(super) fn new(bell: Arc<dyn HasBell>, n_ranks: u32) -> Engine {
        // With fewer cores than ranks whoever looks on keeps the awaited rank from running.
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_looks_on_core = if n_ranks as usize <= n_cores { LOOKS_ON_CORE } else { 1 };
        Engine { streams: Mutex::default(), bell, n_looks_on_core }
    }

    /// Adds streams that waits are to drive.
    pub(super) fn add(&self, streams: Arc<Mutex<dyn Advance>>) {
        lock(&self.streams).push(streams);
    }

    /// Waits until `is_done` says so or fails. `before_sleep` is called once before the first sleep.
    pub(super) fn wait(
        &self,
        mut is_done: impl FnMut() -> Result<bool, CollectiveError>,
        before_sleep: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        let mut before_sleep = Some(before_sleep);
        loop {
            for n_looks in 1..=self.n_looks_on_core + LOOKS_OFF_CORE {
                if is_done()? {
                    return Ok(());
                }
                if n_looks % LOOKS_AT_ONE == 0 {
                    self.advance_all();
                }
                if n_looks < self.n_looks_on_core { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            if let Some(call) = before_sleep.take() {
                call();
            }
            let dozing = self.bell.bell().doze();
            self.advance_all();
            if is_done()? {
                return Ok(());
            }
            dozing.sleep();
        }
    }

    /// Does what can be done for all streams. A stream that fails aborts the world, which whoever waits is told, and
    /// keeps its own error for whoever finishes its operations.
    fn advance_all(&self) {
        for streams in lock(&self.streams).iter() {
            let _ = lock(streams).advance();
        }
    }
}

/// Locks state that stays usable if a thread panicked with it: a panic aborts the world.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
