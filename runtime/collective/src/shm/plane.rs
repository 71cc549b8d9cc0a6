//! State that all streams of one rank share: the control memory, the arenas of all ranks, and the staging area.
#![allow(unsafe_code)] // Staged tensors are copied to and from raw memory.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::control::Control;
use super::staging::Staging;
use crate::engine::{HasWakeup, lock};
use crate::wakeup::Wakeup;
use phalanx_device::shared_memory::SharedMemory;
use phalanx_device::{CollectiveError, RawBuffer};

/// One rank's view of its machine.
#[derive(Debug)]
pub(super) struct Plane {
    pub control: Arc<Control>,
    /// By rank.
    pub arenas: Vec<Arc<SharedMemory>>,
    pub rank: u32,
    staging: Mutex<Staging>,
}

/// A piece of the staging area that replaces a buffer outside the arena.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    range: Range<usize>,
    /// Destination of its bytes when the operation is complete.
    copy_to: Option<RawBuffer>,
}

impl Plane {
    /// The view of `rank`; the first `staging_bytes` of its arena are the staging area.
    pub(super) fn new(control: Arc<Control>, arenas: Vec<Arc<SharedMemory>>, rank: u32, staging_bytes: usize) -> Plane {
        Plane { control, arenas, rank, staging: Mutex::new(Staging::new(staging_bytes)) }
    }

    /// Offset of a buffer in this rank's arena, if it lies there.
    pub(super) fn offset_of(&self, buffer: RawBuffer) -> Option<u64> {
        if buffer.bytes() == 0 {
            return Some(0);
        }
        self.arenas[self.rank as usize].offset_of(buffer.address(), buffer.bytes())
    }

    /// Address of bytes in the arena of `rank`, at an offset from that rank.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if they exceed the arena or the offset is not a multiple of `align`.
    pub(super) fn peer(&self, rank: u32, at: u64, bytes: usize, align: usize) -> Result<*mut u8, CollectiveError> {
        if bytes == 0 {
            return Ok(std::ptr::without_provenance_mut(align));
        }
        self.arenas[rank as usize].checked(at, bytes, align)
    }

    /// Takes a piece of the staging area, fills it with `from`, and returns its offset.
    ///
    /// # Errors
    /// [`CollectiveError::StagingFull`].
    pub(super) fn stage(
        &self,
        bytes: usize,
        from: Option<RawBuffer>,
        copy_to: Option<RawBuffer>,
        pieces: &mut Vec<Piece>,
    ) -> Result<u64, CollectiveError> {
        let mut staging = lock(&self.staging);
        let range = staging
            .take(bytes)
            .ok_or(CollectiveError::StagingFull { wanted_bytes: bytes as u64, free_bytes: staging.largest() as u64 })?;
        drop(staging);
        let start = range.start;
        if let Some(from) = from {
            // SAFETY: the caller of `start` guarantees that `from` is readable; the piece is exclusively ours and at
            // least as long.
            unsafe { std::ptr::copy_nonoverlapping(from.start(), self.staged(start), from.bytes()) };
        }
        pieces.push(Piece { range, copy_to });
        Ok(start as u64)
    }

    /// Frees pieces; with `is_complete`, copies their results out first.
    pub(super) fn release(&self, pieces: &mut Vec<Piece>, is_complete: bool) {
        for piece in pieces.drain(..) {
            if let Some(to) = piece.copy_to.filter(|_| is_complete) {
                // SAFETY: the caller of `start` guarantees that `to` is writable; peers no longer access the piece.
                unsafe { std::ptr::copy_nonoverlapping(self.staged(piece.range.start), to.start(), to.bytes()) };
            }
            lock(&self.staging).give(piece.range);
        }
    }

    fn staged(&self, at: usize) -> *mut u8 {
        // SAFETY: the staging area lies at the start of the arena.
        unsafe { self.arenas[self.rank as usize].base().add(at) }
    }
}

/// The wake-up of a rank in control memory.
pub(super) struct ControlWakeup(pub Arc<Control>, pub u32);

impl HasWakeup for ControlWakeup {
    fn wakeup(&self) -> &Wakeup {
        self.0.wakeup(self.1)
    }
}
