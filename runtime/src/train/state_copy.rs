//! A copy of a rank's state out of the memory of its device, while the next step computes.
//!
//! The state does not change before the next update, which the device holds back until the copy is complete. The copy passes
//! through a few slots of host memory, so it takes little of it however large the state is.
#![allow(unsafe_code)] // The copy reads memory that another thread trains with; the device keeps the two apart.

use phalanx_device::span::{CopyError, STAGING_BYTES, Span, chunks};
use phalanx_device::staging::Staging;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Slots, so that the device copies while the host writes.
const SLOTS: usize = 4;

pub(crate) struct StateCopy {
    staging: Staging,
    chunks: Vec<Vec<Span>>,
    /// Chunks whose copies have begun.
    n_begun: usize,
    is_cancelled: Arc<AtomicBool>,
}

/// See [`StateCopy::cancel`].
#[derive(Debug)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl StateCopy {
    /// Begins to copy the runs, which lie in the lasting state of one machine.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Safety
    /// Until the copy is dropped, nothing but updates of the machine changes the runs. The machine may be dropped earlier.
    pub(crate) unsafe fn begin(runs: Vec<Span>) -> Result<StateCopy, CopyError> {
        let chunks = chunks(runs, STAGING_BYTES);
        let slot_bytes = chunks.first().map_or(0, |chunk| chunk.iter().map(Span::bytes).sum());
        let mut staging = Staging::new(chunks.iter().flatten(), SLOTS.min(chunks.len().max(1)), slot_bytes)?;
        if let Some(first) = chunks.first() {
            staging.hold(&first[0]);
        }
        let mut copy = StateCopy { staging, chunks, n_begun: 0, is_cancelled: Arc::default() };
        for _ in 0..SLOTS {
            copy.begin_next()?;
        }
        Ok(copy)
    }

    /// Dropping it ends the copy early, with an error.
    pub(crate) fn cancel(&self) -> Cancel {
        Cancel(self.is_cancelled.clone())
    }

    /// Begins to copy the next chunk, if there is one. After the last one, updates wait on the device only.
    fn begin_next(&mut self) -> Result<(), CopyError> {
        let Some(chunk) = self.chunks.get(self.n_begun) else { return Ok(()) };
        if self.is_cancelled.load(Ordering::Acquire) {
            return Err(CopyError { reason: "the run has ended".to_owned() });
        }
        // SAFETY: by the contract of `begin`; the staging is held, or refuses runs whose machine is dropped.
        unsafe { self.staging.gather(self.n_begun % SLOTS, chunk) }?;
        self.n_begun += 1;
        if self.n_begun == self.chunks.len() {
            self.staging.let_go();
        }
        Ok(())
    }

    /// Passes the bytes of all runs to `see`, in order.
    ///
    /// # Errors
    /// When the device fails, or the copy is cancelled.
    pub(crate) fn finish(mut self, mut see: impl FnMut(&[u8])) -> Result<(), CopyError> {
        for i in 0..self.chunks.len() {
            let n_bytes = self.chunks[i].iter().map(Span::bytes).sum();
            see(&self.staging.bytes(i % SLOTS)?[..n_bytes]);
            self.begin_next()?;
        }
        Ok(())
    }
}
