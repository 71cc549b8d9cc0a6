//! Buffers of the host through which runs of any memory pass, in turn.
#![allow(unsafe_code)] // The caller vouches for the memory of the runs.

use crate::span::{CopyError, Ring, STAGING_BYTES, Span, SpanMut, SpanRef};
use crate::{CollectiveError, RawBuffer};

/// Slots of equal size: of a [`Ring`] if any run lies in the memory of a device, which then copies while the host uses other
/// slots; else of memory that grows when it is first used.
#[derive(Debug)]
pub struct Staging {
    slots: Slots,
    slot_bytes: usize,
    /// The runs of one copy that lie in the memory of a device.
    on_device: Vec<(usize, RawBuffer)>,
}

#[derive(Debug)]
enum Slots {
    Host(Vec<Vec<f32>>),
    Device(Box<dyn Ring>),
}

/// A ring, and the runs for it with their places in a slot.
type OnDevice<'a> = Option<(&'a mut dyn Ring, &'a [(usize, RawBuffer)])>;

impl Staging {
    /// Slots for these runs: `n_slots` of `slot_bytes` bytes each, a multiple of 4. All runs in the memory of a device are on
    /// the same device.
    ///
    /// # Errors
    /// See [`Memory::ring`](crate::span::Memory::ring).
    pub fn new<'a>(
        runs: impl IntoIterator<Item = &'a Span>,
        n_slots: usize,
        slot_bytes: usize,
    ) -> Result<Staging, CopyError> {
        let slots = match runs.into_iter().find_map(Span::memory) {
            Some(memory) => Slots::Device(memory.clone().ring(n_slots, slot_bytes)?),
            None => Slots::Host(vec![Vec::new(); n_slots]),
        };
        Ok(Staging { slots, slot_bytes, on_device: Vec::new() })
    }

    /// Begins to copy runs to a slot, one behind the other.
    ///
    /// # Errors
    /// See [`Ring::read`].
    ///
    /// # Safety
    /// The runs are borrowed for reading until [`Staging::bytes`] returns for the slot, or the slots are dropped.
    ///
    /// # Panics
    /// If the runs exceed the slot.
    pub unsafe fn gather(&mut self, slot: usize, runs: &[Span]) -> Result<(), CopyError> {
        // SAFETY: the caller's promise; slots are apart from all runs.
        let copy = |slot: &mut [u8], run: RawBuffer| unsafe {
            std::ptr::copy_nonoverlapping(run.start(), slot.as_mut_ptr(), slot.len());
        };
        let Some((ring, runs)) = self.split(slot, runs, copy)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { ring.read(slot, runs) }
    }

    /// Begins to copy the bytes of a slot to runs, in order. The machine's later work finds them there.
    ///
    /// # Errors
    /// See [`Ring::write`].
    ///
    /// # Safety
    /// The runs are borrowed for writing until [`Staging::bytes`] returns for the slot, or the slots are dropped.
    ///
    /// # Panics
    /// If the runs exceed the slot.
    pub unsafe fn scatter(&mut self, slot: usize, runs: &[Span]) -> Result<(), CopyError> {
        // SAFETY: as in `gather`.
        let copy = |slot: &mut [u8], run: RawBuffer| unsafe {
            std::ptr::copy_nonoverlapping(slot.as_ptr(), run.start(), slot.len());
        };
        let Some((ring, runs)) = self.split(slot, runs, copy)? else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe { ring.write(slot, runs) }
    }

    /// Calls `copy` with the runs in host memory and their places in a slot. Returns the ring for the other runs, if there are
    /// any.
    fn split(
        &mut self,
        slot: usize,
        runs: &[Span],
        copy: impl Fn(&mut [u8], RawBuffer),
    ) -> Result<OnDevice<'_>, CopyError> {
        self.on_device.clear();
        let mut at = 0;
        for run in runs {
            let here = at..at + run.bytes();
            at = here.end;
            if run.is_on_host() {
                copy(&mut self.bytes(slot)?[here], run.buffer());
            } else {
                self.on_device.push((here.start, run.buffer()));
            }
        }
        match &mut self.slots {
            _ if self.on_device.is_empty() => Ok(None),
            Slots::Device(ring) => Ok(Some((&mut **ring, &self.on_device))),
            Slots::Host(_) => panic!("slots of the host are for runs in its memory"),
        }
    }

    /// All bytes of a slot, after the copies that have begun there.
    ///
    /// # Errors
    /// See [`Ring::wait`].
    pub fn bytes(&mut self, slot: usize) -> Result<&mut [u8], CopyError> {
        match &mut self.slots {
            Slots::Device(ring) => ring.wait(slot),
            Slots::Host(slots) => {
                slots[slot].resize(self.slot_bytes / size_of::<f32>(), 0.0);
                Ok(bytemuck::cast_slice_mut(&mut slots[slot]))
            }
        }
    }

    /// See [`Ring::hold`].
    pub fn hold(&mut self, run: &Span) {
        if let Slots::Device(ring) = &mut self.slots {
            ring.hold(run.buffer());
        }
    }

    /// See [`Ring::let_go`].
    pub fn let_go(&mut self) {
        if let Slots::Device(ring) = &mut self.slots {
            ring.let_go();
        }
    }
}

impl From<CopyError> for CollectiveError {
    fn from(CopyError { reason }: CopyError) -> CollectiveError {
        CollectiveError::Device { reason }
    }
}

/// Slots of a copy between two places of a device's memory.
const COPY_SLOTS: usize = 2;

/// Copies runs to runs of other lengths, in order; through staging unless the host can access both runs.
///
/// # Errors
/// When the device fails.
///
/// # Panics
/// If `to` has more bytes than `from`.
pub fn copy(from: &[SpanRef<'_>], to: &[SpanMut<'_>]) -> Result<(), CopyError> {
    let mut staging = None;
    let mut slots = (0..COPY_SLOTS).cycle();
    let mut runs = from.iter().map(SpanRef::span);
    let mut rest: Option<Span> = None;
    for room in to.iter().map(SpanMut::span) {
        let mut at = 0;
        while at < room.bytes() {
            let now = match rest.take().filter(|rest| rest.bytes() > 0) {
                Some(rest) => rest,
                None => {
                    rest = Some(runs.next().expect("`from` has at least as many bytes as `to`"));
                    continue;
                }
            };
            let n = now.bytes().min(room.bytes() - at).min(STAGING_BYTES);
            let pair = [now.slice(0..n), room.slice(at..at + n)];
            // SAFETY: the caller borrows both, one of them mutably, so they do not overlap; dropping the staging waits.
            unsafe { copy_piece(&pair, &mut staging, slots.next().expect("a cycle has no end")) }?;
            rest = Some(now.slice(n..now.bytes()));
            at += n;
        }
    }
    Ok(())
}

/// Copies a run to another one of the same length.
///
/// # Safety
/// The first run is borrowed for reading and the second for writing until the staging is dropped; they do not overlap.
unsafe fn copy_piece([from, to]: &[Span; 2], staging: &mut Option<Staging>, slot: usize) -> Result<(), CopyError> {
    if from.is_on_host() && to.is_on_host() {
        // SAFETY: the caller's contract.
        unsafe { std::ptr::copy_nonoverlapping(from.buffer().start(), to.buffer().start(), to.bytes()) };
        return Ok(());
    }
    let staging = match staging {
        Some(staging) => staging,
        None => staging.insert(Staging::new([from, to], COPY_SLOTS, STAGING_BYTES)?),
    };
    // SAFETY: the caller's contract. Copies of a ring are done in the order in which they begin.
    unsafe {
        staging.gather(slot, std::slice::from_ref(from))?;
        staging.scatter(slot, std::slice::from_ref(to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut<T>(mut all: T, lengths: &[usize], len: impl Fn(&T) -> usize, split: impl Fn(T, usize) -> (T, T)) -> Vec<T> {
        let mut runs = Vec::new();
        for n in lengths {
            let n = (*n).min(len(&all));
            let (run, rest) = split(all, n);
            runs.push(run);
            all = rest;
        }
        runs.push(all);
        runs
    }

    proptest! {
        #[test]
        fn copy_preserves_the_bytes_for_any_run_lengths_of_both_sides(
            n in 0usize..300, sent in prop::collection::vec(0usize..60, 0..9), came in prop::collection::vec(0usize..60, 0..9),
        ) {
            let from: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let mut to = vec![-1.0f32; n];
            let sources: Vec<SpanRef<'_>> = cut(&from[..], &sent, |s| s.len(), |s, n| s.split_at(n)).into_iter().map(SpanRef::from).collect();
            let rooms: Vec<SpanMut<'_>> = cut(&mut to[..], &came, |s| s.len(), |s, n| s.split_at_mut(n)).into_iter().map(SpanMut::from).collect();

            copy(&sources, &rooms).unwrap();

            prop_assert_eq!(to, from);
        }
    }
}
