//! A device: the factory of machines, and its properties that the runtime queries before a machine exists.

use crate::machine::{AllocError, Backing, Machine};
use crate::shared_memory::Arena;
use crate::thread::ThreadError;
use crate::{Collective, CollectiveError};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::devices::DeviceHealth;
use phalanx_strategies::target::Target;
use std::fmt::Debug;
use std::time::Duration;

/// Waits at most this long for something that happens to a device; then gives the state of all.
pub type HealthWatch = Box<dyn FnMut(Duration) -> Vec<DeviceHealth> + Send>;

/// How far a device is in the work that it does apart from the thread that gives it work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// A number that changes as the device completes work.
    pub completed: u32,
    /// Whether the device has work that is not complete.
    pub is_busy: bool,
    /// The longest time without a change of `completed` that its work is estimated to have.
    pub expected: Duration,
}

/// A kind of device of this machine, such as its processors.
///
/// "Shared memory" is host memory that the ranks of a machine map; a device with its own memory needs none.
pub trait Device: Debug + Send + Sync {
    /// Its name in configurations and reports, such as `cpu`.
    fn name(&self) -> &'static str;

    /// The device as the compiler sees it.
    fn target(&self) -> &dyn Target;

    /// A machine whose regions are each as large as the largest of the programs needs. Constants must agree between the
    /// programs, since they share them.
    ///
    /// # Errors
    /// When the system is out of memory, or the folder for offloaded state cannot be written.
    ///
    /// # Panics
    /// If `on.shared` is too small.
    fn machine(&self, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError>;

    /// As [`Device::machine`], without offloaded state, for [`Machine::succeed`]. Regions that outlast a step and are
    /// not shared are allocated at once.
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
    /// If `memory` has fewer than [`Device::shadow_bytes`] bytes from `first` on.
    fn shadow(&self, programs: &[&Compiled], memory: &Arena, first: usize) -> Box<dyn Machine>;

    /// Bytes that a machine for these programs allocates, known before it exists: [`Machine::allocated_bytes`].
    fn bytes_for(&self, programs: &[&Compiled]) -> usize;

    /// Bytes of the regions that lie in shared memory when a machine gets any.
    fn shared_bytes(&self, programs: &[&Compiled]) -> usize;

    /// Bytes of shared memory that [`Device::shadow`] takes.
    fn shadow_bytes(&self, programs: &[&Compiled]) -> usize;

    /// The regions that outlast a step: bytes, and whether they lie in shared memory when a machine gets any.
    fn lasting_regions(&self, programs: &[&Compiled]) -> [(usize, bool); 3];

    /// A communicator for operands in this device's memory, and for the same group as `host`, a new communicator of host
    /// memory. Every member calls it, at the same point in the order of operations of `host`; members may wait here for
    /// each other.
    ///
    /// # Errors
    /// As operations of `host`, or when the device's library refuses.
    fn communicator(&self, host: Box<dyn Collective>) -> Result<Box<dyn Collective>, CollectiveError> {
        Ok(host)
    }

    /// Opens what a device thread needs, on any thread, so that it is open when the device thread starts. A failure is that of the device
    /// thread.
    fn open_ahead(&self) {}

    /// How far the device is; none if it works on the thread that gives it work. Never waits for the device.
    fn activity(&self) -> Option<Activity> {
        None
    }

    /// Whether the device has failed for this process: its state is lost, and only a new process can use it again.
    fn has_failed(&self) -> bool {
        false
    }

    /// The best rate of matrix products, measured here and now on the calling thread's pool, in FLOP/s.
    fn peak_flops(&self, bf16: bool) -> f64;

    /// Whether bfloat16 products are faster than those of f32.
    fn has_fast_bf16(&self) -> bool;

    /// Name of the matrix engine, for reports.
    fn engine(&self, bf16: bool) -> &'static str;

    /// Number of threads available for computation.
    fn available_threads(&self) -> usize;

    /// The state of the devices among which the ranks of this machine are divided, in a stable order; none if ranks divide
    /// the machine's processors.
    fn health(&self) -> Vec<DeviceHealth> {
        Vec::new()
    }

    /// Watches these devices, without using them, from a thread of the caller; none if there are none.
    fn watch(&self) -> Option<HealthWatch> {
        None
    }

    /// Environment variables of the process of a rank that uses the device with this [`DeviceHealth::id`].
    fn environment(&self, id: &str) -> Vec<(&'static str, String)> {
        let _ = id;
        Vec::new()
    }

    /// Address of the device with this [`DeviceHealth::id`] on the PCI bus, such as `0000:3b:00.0`.
    fn pci_address(&self, id: &str) -> Option<String> {
        let _ = id;
        None
    }

    /// What the user should know about how `n_ranks` ranks of this machine exchange tensors, as a sentence.
    ///
    /// # Errors
    /// Why they cannot exchange tensors in the requested way.
    fn exchange(&self, n_ranks: u32) -> Result<Option<String>, String> {
        let _ = n_ranks;
        Ok(None)
    }

    /// Whether the device has free memory for `n_ranks` ranks of this machine with `bytes` each and for spare processes, as far as that
    /// is known without using it; none if the ranks use the machine's memory. The error names what is needed and what is free.
    fn fits(&self, bytes: u64, n_ranks: u32, n_spares: u32) -> Option<Result<(), String>> {
        let _ = (bytes, n_ranks, n_spares);
        None
    }

    /// Runs `work` on a device thread with `n_threads` compute threads, itself included, and waits for it. Prefer
    /// [`on_device_thread`](trait.Device.html#method.on_device_thread).
    ///
    /// # Errors
    /// When the system refuses the threads; `work` has not started then.
    fn lead(&self, n_threads: usize, work: Box<dyn FnOnce() + Send + '_>) -> Result<(), ThreadError>;
}

impl dyn Device + '_ {
    /// Runs `work` on a new device thread with `n_threads` compute threads, itself included, and waits for it.
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
