//! A device: what makes machines, and what the rest of the runtime asks of it before there is one.

use crate::machine::{AllocError, Backing, Machine};
use crate::shared_memory::Arena;
use crate::thread::ThreadError;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::target::Target;
use std::fmt::Debug;

/// A kind of device of this machine, such as its processors.
///
/// Where it says "shared memory" it means memory of the host that the ranks of a machine map: a device whose memory is its
/// own needs none.
pub trait Device: Debug + Send + Sync {
    /// Its name in configurations and reports, such as `cpu`.
    fn name(&self) -> &'static str;

    /// The device as the compiler sees it.
    fn target(&self) -> &dyn Target;

    /// A machine whose regions are each as large as the largest of the programs needs. Constants must agree between the
    /// programs, since they share them.
    ///
    /// # Errors
    /// When the system has not enough memory, or the folder for offloaded state cannot be written.
    ///
    /// # Panics
    /// If `on.shared` is too small.
    fn machine(&self, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError>;

    /// As [`Device::machine`], without what is offloaded, for [`Machine::succeed`]: what outlasts a step and is not shared is
    /// taken from the system at once.
    ///
    /// # Errors
    /// As [`Device::machine`].
    ///
    /// # Panics
    /// As [`Device::machine`].
    fn warm(&self, programs: &[&Compiled], shared: &Arena) -> Result<Box<dyn Machine>, AllocError>;

    /// A machine for shadows: it runs updates only, in shared memory from `first` on; see [`Device::shadow_bytes`].
    ///
    /// # Panics
    /// If there is not so much of it.
    fn shadow(&self, programs: &[&Compiled], memory: &Arena, first: usize) -> Box<dyn Machine>;

    /// Bytes that a machine for these programs allocates, known before it exists: [`Machine::allocated_bytes`].
    fn bytes_for(&self, programs: &[&Compiled]) -> usize;

    /// Bytes of the regions that lie in shared memory where a machine gets any.
    fn shared_bytes(&self, programs: &[&Compiled]) -> usize;

    /// Bytes of shared memory that [`Device::shadow`] takes.
    fn shadow_bytes(&self, programs: &[&Compiled]) -> usize;

    /// The regions of what outlasts a step: bytes, and whether they lie in shared memory where a machine gets any.
    fn lasting_regions(&self, programs: &[&Compiled]) -> [(usize, bool); 3];

    /// The best rate of matrix products, measured here and now on the calling thread's pool, in FLOP/s.
    fn peak_flops(&self, bf16: bool) -> f64;

    /// Whether bfloat16 products are faster than those of f32.
    fn has_fast_bf16(&self) -> bool;

    /// What multiplies matrices, for reports.
    fn engine(&self, bf16: bool) -> &'static str;

    /// Threads that may compute.
    fn available_threads(&self) -> usize;

    /// Does `work` on a device thread with so many threads that compute, itself included, and waits for it. Use
    /// [`on_device_thread`](trait.Device.html#method.on_device_thread).
    ///
    /// # Errors
    /// When the system refuses the threads; `work` was not begun then.
    fn lead(&self, n_threads: usize, work: Box<dyn FnOnce() + Send + '_>) -> Result<(), ThreadError>;
}

impl dyn Device + '_ {
    /// Does `work` on a new device thread with so many threads that compute, itself included, and waits for it.
    ///
    /// # Errors
    /// When the system refuses the threads.
    pub fn on_device_thread<R: Send>(
        &self,
        n_threads: usize,
        work: impl FnOnce() -> R + Send,
    ) -> Result<R, ThreadError> {
        let mut result = None;
        self.lead(n_threads, Box::new(|| result = Some(work())))?;
        Ok(result.expect("a device thread ends when its work is done"))
    }
}
