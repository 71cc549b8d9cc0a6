//! Rings of pinned memory: copies between the GPU and the host beside programs, each ring on a stream of its own.
//!
//! A copy of the lasting state of a machine is ordered by the machine's [`StateFence`], so that it waits for no program that
//! only reads the state. Anything else is copied after all earlier work of the compute stream. Weights that are split there pass in two
//! parts; when the host gets a slot, its bytes are those of f32 numbers.

use crate::error::CudaError;
use crate::gpu::{Event, Gpu, PinnedPiece, Stream};
use crate::split::{halves, join, split};
use crate::state_fence::{Fences, StateFence};
use phalanx_device::RawBuffer;
use phalanx_device::span::{CopyError, Memory, Ring};
use std::ops::Range;
use std::sync::Arc;

/// Slots begin at multiples of it: whole cache lines, and aligned for every element type.
const ALIGN_BYTES: usize = 64;

#[derive(Debug)]
struct PinnedRing {
    gpu: Arc<Gpu>,
    fences: Arc<Fences>,
    stream: Stream,
    pinned: PinnedPiece,
    slot_bytes: usize,
    slots: Vec<Slot>,
    /// Marks the work of the compute stream that a copy waits for.
    earlier: Event,
    /// Fences of the runs of one copy; kept for its memory.
    around: Vec<Arc<StateFence>>,
    /// For conversions; kept for its memory.
    spare: Vec<u8>,
    /// Fences that this ring holds.
    held: Vec<Arc<StateFence>>,
}

#[derive(Debug)]
struct Slot {
    /// The end of its last copy.
    copied: Arc<Event>,
    is_under_way: bool,
    /// Bytes that are in two parts until the host gets the slot.
    halved: Vec<Range<usize>>,
}

/// The memory of a GPU, with the fences of the machines there.
#[derive(Debug)]
pub(crate) struct GpuMemory {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) fences: Arc<Fences>,
}

impl GpuMemory {
    /// The memory of a GPU without machines.
    pub(crate) fn new(gpu: Arc<Gpu>) -> GpuMemory {
        GpuMemory { gpu, fences: Arc::default() }
    }
}

impl Memory for GpuMemory {
    fn ring(self: Arc<Self>, n_slots: usize, slot_bytes: usize) -> Result<Box<dyn Ring>, CopyError> {
        let (gpu, fences) = (self.gpu.clone(), self.fences.clone());
        Ok(Box::new(PinnedRing::new(gpu, fences, n_slots, slot_bytes).map_err(failed)?))
    }
}

impl PinnedRing {
    /// # Errors
    /// When the host has too little memory, or the GPU has failed.
    fn new(gpu: Arc<Gpu>, fences: Arc<Fences>, n_slots: usize, slot_bytes: usize) -> Result<PinnedRing, CudaError> {
        let slot = |_| Ok(Slot { copied: Arc::new(Event::for_order(&gpu)?), is_under_way: false, halved: Vec::new() });
        let slots = (0..n_slots).map(slot).collect::<Result<_, CudaError>>()?;
        let earlier = Event::for_order(&gpu)?;
        let pinned = gpu.take_pinned(n_slots * slot_bytes.next_multiple_of(ALIGN_BYTES).max(ALIGN_BYTES))?;
        let stream = match gpu.take_stream() {
            Ok(stream) => stream,
            Err(error) => {
                gpu.return_pinned(pinned);
                return Err(error);
            }
        };
        let (around, spare, held) = (Vec::new(), Vec::new(), Vec::new());
        Ok(PinnedRing { gpu, fences, stream, pinned, slot_bytes, slots, earlier, around, spare, held })
    }

    /// Bytes of a slot from `at` on.
    fn place(&self, slot: usize, at: usize, bytes: usize) -> RawBuffer {
        assert!(slot < self.slots.len() && at + bytes <= self.slot_bytes, "bytes {at}..{} of a slot", at + bytes);
        let start = self.pinned.address + slot * self.slot_bytes.next_multiple_of(ALIGN_BYTES);
        RawBuffer::new(std::ptr::with_exposed_provenance_mut(start + at), bytes)
    }

    /// Finds the fences of the machines in whose state the runs lie. Returns whether all lie in such state.
    fn find_fences(&mut self, runs: &[(usize, RawBuffer)]) -> bool {
        self.around.clear();
        let mut are_state = true;
        for (_, run) in runs {
            let address = run.address() as u64;
            if self.around.iter().any(|fence| fence.is_around(address)) {
                continue;
            }
            match self.fences.around(address) {
                Some(fence) => self.around.push(fence),
                None => are_state = false,
            }
        }
        are_state
    }

    /// Makes the ring's stream wait for the compute stream.
    fn after_earlier_work(&self) -> Result<(), CudaError> {
        self.earlier.record(self.gpu.compute)?;
        self.earlier.hold(self.stream)
    }

    /// The copies of a run: addresses, and bytes of the slot.
    fn parts(&mut self, slot: usize, at: usize, run: RawBuffer) -> Vec<(u64, Range<usize>)> {
        let (address, bytes) = (run.address() as u64, at..at + run.bytes());
        match self.around.iter().find_map(|fence| fence.split.parts(address, bytes.len())) {
            Some(parts) => {
                self.slots[slot].halved.push(bytes.clone());
                parts.into_iter().zip(halves(bytes)).collect()
            }
            None => vec![(address, bytes)],
        }
    }

    /// Makes f32 numbers of what is in two parts in a slot whose copies are done.
    fn join_halves(&mut self, slot: usize) {
        for halved in std::mem::take(&mut self.slots[slot].halved) {
            let bytes = self.bytes(slot, halved);
            // SAFETY: no copy accesses the slot, and the host has no borrow of it.
            join(unsafe { &mut *bytes }, &mut self.spare);
        }
    }

    fn bytes(&self, slot: usize, at: Range<usize>) -> *mut [u8] {
        let bytes = self.place(slot, at.start, at.len());
        std::ptr::slice_from_raw_parts_mut(bytes.start(), bytes.bytes())
    }

    fn wait_for(&mut self, slot: usize) -> Result<(), CudaError> {
        if std::mem::take(&mut self.slots[slot].is_under_way) { self.slots[slot].copied.wait() } else { Ok(()) }
    }

    /// As [`Ring::read`]; none if state is freed.
    ///
    /// # Safety
    /// As [`Ring::read`].
    unsafe fn begin_read(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<Option<()>, CudaError> {
        self.gpu.bind()?;
        self.wait_for(slot)?;
        self.slots[slot].halved.clear();
        let are_state = self.find_fences(runs);
        for fence in &self.around {
            if fence.before_copy(self.stream)?.is_none() {
                return Ok(None);
            }
        }
        if !are_state {
            self.after_earlier_work()?;
        }
        self.slots[slot].is_under_way = true;
        for (at, run) in runs {
            for (address, bytes) in self.parts(slot, *at, *run) {
                let to = self.place(slot, bytes.start, bytes.len());
                // SAFETY: the caller's promise; the slot is not touched before its event is reached.
                unsafe { self.gpu.enqueue_read(address, to, self.stream) }?;
            }
        }
        let copied = &self.slots[slot].copied;
        copied.record(self.stream)?;
        self.around.iter().for_each(|fence| fence.after_copy(copied));
        if !self.held.is_empty() {
            // A change may wait for this ring on the host, which is progress and not a hang.
            self.gpu.mark()?;
        }
        Ok(Some(()))
    }

    /// As [`Ring::write`].
    ///
    /// # Safety
    /// As [`Ring::write`].
    unsafe fn begin_write(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        self.find_fences(runs);
        self.wait_for(slot)?;
        self.join_halves(slot);
        self.around.iter().try_for_each(|fence| fence.before_change(&self.gpu))?;
        self.after_earlier_work()?;
        self.slots[slot].is_under_way = true;
        for (at, run) in runs {
            let parts = self.parts(slot, *at, *run);
            if parts.len() > 1 {
                let bytes = self.bytes(slot, *at..*at + run.bytes());
                // SAFETY: no copy accesses the slot, and no part of it was borrowed by the host since.
                split(unsafe { &mut *bytes }, &mut self.spare);
            }
            for (address, bytes) in parts {
                let from = self.place(slot, bytes.start, bytes.len());
                // SAFETY: as in `begin_read`.
                unsafe { self.gpu.enqueue_write(address, from, self.stream) }?;
            }
        }
        let copied = &self.slots[slot].copied;
        copied.record(self.stream)?;
        copied.hold(self.gpu.compute)?;
        self.around.iter().try_for_each(|fence| fence.after_change(&self.gpu))
    }
}

impl Ring for PinnedRing {
    unsafe fn read(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError> {
        // SAFETY: the caller's promise.
        let begun = unsafe { self.begin_read(slot, runs) }.map_err(failed)?;
        begun.ok_or_else(|| CopyError { reason: "the state is about to be freed".to_owned() })
    }

    unsafe fn write(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError> {
        // SAFETY: the caller's promise.
        unsafe { self.begin_write(slot, runs) }.map_err(failed)
    }

    fn wait(&mut self, slot: usize) -> Result<&mut [u8], CopyError> {
        self.wait_for(slot).map_err(failed)?;
        self.join_halves(slot);
        // SAFETY: pinned memory of this ring; no copy accesses the slot.
        Ok(unsafe { &mut *self.bytes(slot, 0..self.slot_bytes) })
    }

    fn hold(&mut self, run: RawBuffer) {
        let fence = self.fences.around(run.address() as u64);
        fence.iter().for_each(|fence| fence.hold());
        self.held.extend(fence);
    }

    fn let_go(&mut self) {
        self.held.drain(..).for_each(|fence| fence.release());
    }
}

impl Drop for PinnedRing {
    /// Waits for its copies: what they access may be freed now. On a failed GPU none is under way.
    fn drop(&mut self) {
        (0..self.slots.len()).for_each(|slot| drop(self.wait_for(slot)));
        self.let_go();
        self.gpu.return_stream(self.stream);
        self.gpu.return_pinned(self.pinned);
    }
}

fn failed(error: CudaError) -> CopyError {
    CopyError { reason: error.to_string() }
}
