//! The order between programs that change the lasting state of a machine and copies of that state, which go on beside other
//! programs.
//!
//! Invariants:
//! - `STATE-FENCE-1` A copy has the state after its last change. It waits for that change on the GPU, and for nothing that the
//!   compute stream does later.
//! - `STATE-FENCE-2` A change waits for all earlier copies: on the GPU for those that have begun, on the host for those that a
//!   hold has announced.
//! - `STATE-FENCE-3` State is freed after all copies. From then on no copy of it begins.

use crate::error::CudaError;
use crate::gpu::{Event, Gpu, Stream};
use crate::split::SplitWeights;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct StateFence {
    /// Addresses of the state.
    regions: Vec<Range<u64>>,
    /// The weights that are stored in two parts there.
    pub(crate) split: SplitWeights,
    order: Mutex<Order>,
    /// Signalled when a hold ends.
    let_go: Condvar,
}

#[derive(Debug)]
struct Order {
    /// The end of the last change, on the compute stream.
    changed: Event,
    /// The ends of copies that no change has waited for.
    copied: Vec<Arc<Event>>,
    n_holds: usize,
    is_closed: bool,
}

impl StateFence {
    /// A fence around state that earlier work of the compute stream has filled.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn new(gpu: &Arc<Gpu>, regions: Vec<Range<u64>>, split: SplitWeights) -> Result<StateFence, CudaError> {
        let changed = Event::for_order(gpu)?;
        changed.record(gpu.compute)?;
        let order = Order { changed, copied: Vec::new(), n_holds: 0, is_closed: false };
        Ok(StateFence { regions, split, order: Mutex::new(order), let_go: Condvar::new() })
    }

    /// Whether the state has this address.
    pub(crate) fn is_around(&self, address: u64) -> bool {
        self.regions.iter().any(|region| region.contains(&address))
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a stream wait for the last change. None if the state is freed.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn before_copy(&self, stream: Stream) -> Result<Option<()>, CudaError> {
        let order = self.order();
        if order.is_closed {
            return Ok(None);
        }
        order.changed.hold(stream).map(Some)
    }

    /// The next change waits for what this event marks.
    pub(crate) fn after_copy(&self, copied: &Arc<Event>) {
        let mut order = self.order();
        if !order.copied.iter().any(|event| Arc::ptr_eq(event, copied)) {
            order.copied.push(copied.clone());
        }
    }

    /// Waits until no more copies are announced, and makes the compute stream wait for those that have begun.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn before_change(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let order = self.order();
        let mut order =
            self.let_go.wait_while(order, |order| order.n_holds > 0).unwrap_or_else(PoisonError::into_inner);
        order.copied.drain(..).try_for_each(|copied| copied.hold(gpu.compute))
    }

    /// The compute stream has all of a change.
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn after_change(&self, gpu: &Gpu) -> Result<(), CudaError> {
        self.order().changed.record(gpu.compute)
    }

    /// Changes wait until [`StateFence::release`].
    pub(crate) fn hold(&self) {
        self.order().n_holds += 1;
    }

    /// Ends a hold.
    pub(crate) fn release(&self) {
        self.order().n_holds -= 1;
        self.let_go.notify_all();
    }

    /// Lets no more copies begin, waits until those that hold the state have seen it, and makes the compute stream wait for
    /// those that have begun. A failed GPU is about to lose the state anyway.
    fn close(&self, gpu: &Gpu) {
        self.order().is_closed = true;
        let _ = gpu.bind().and_then(|()| self.before_change(gpu));
    }
}

/// The fences of all machines on one GPU.
#[derive(Debug, Default)]
pub(crate) struct Fences(Mutex<Vec<Arc<StateFence>>>);

impl Fences {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<StateFence>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fence around the state that has this address.
    pub(crate) fn around(&self, address: u64) -> Option<Arc<StateFence>> {
        self.all().iter().find(|fence| fence.is_around(address)).cloned()
    }
}

/// The fence of a machine, known to the GPU until the machine ends. Drop it before the state is freed.
#[derive(Debug)]
pub(crate) struct OwnedFence {
    gpu: Arc<Gpu>,
    fences: Arc<Fences>,
    fence: Arc<StateFence>,
}

impl OwnedFence {
    /// As [`StateFence::new`].
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        fences: &Arc<Fences>,
        regions: Vec<Range<u64>>,
        split: SplitWeights,
    ) -> Result<OwnedFence, CudaError> {
        let fence = Arc::new(StateFence::new(gpu, regions, split)?);
        fences.all().push(fence.clone());
        Ok(OwnedFence { gpu: gpu.clone(), fences: fences.clone(), fence })
    }
}

impl std::ops::Deref for OwnedFence {
    type Target = StateFence;

    fn deref(&self) -> &StateFence {
        &self.fence
    }
}

impl Drop for OwnedFence {
    fn drop(&mut self) {
        self.fence.close(&self.gpu);
        self.fences.all().retain(|fence| !Arc::ptr_eq(fence, &self.fence));
    }
}
