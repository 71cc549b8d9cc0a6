//! Shared memory of a block.

use super::{Actor, Mode};
use crate::report::{Kind, Party, Place, Violation};

const WRITTEN: u8 = 1;
const ATOMIC: u8 = 2;
/// An asynchronous copy into the byte has not been waited for.
const ARRIVING: u8 = 4;
/// Written by ordinary instructions since the last proxy fence.
const GENERIC: u8 = 8;

/// Shared memory with its shadow.
pub(crate) struct Shared {
    bytes: Vec<u8>,
    cells: Vec<Cell>,
    /// When each warp last read each byte.
    reads: Vec<u32>,
    n_warps: usize,
    /// Ranges that copies out of shared memory still read, with the warp that started them.
    pub(crate) outgoing: Vec<Outgoing>,
}

/// A copy out of shared memory that may still read its source.
pub(crate) struct Outgoing {
    pub(crate) warp: usize,
    pub(crate) lane: usize,
    /// Number of its group, by thread.
    pub(crate) group: u64,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) pc: u32,
}

/// Shadow of a byte: its last write, and the last of its reads.
#[derive(Clone, Copy, Default)]
struct Cell {
    write_time: u32,
    write_pc: u32,
    read_pc: u32,
    /// A warp, or a copy engine beyond them.
    writer: u16,
    write_lane: u8,
    read_lane: u8,
    flags: u8,
}

impl Shared {
    pub(crate) fn new(bytes: usize, n_warps: usize) -> Shared {
        Shared {
            bytes: vec![0xff; bytes],
            cells: vec![Cell::default(); bytes],
            reads: vec![0; bytes * n_warps],
            n_warps,
            outgoing: Vec::new(),
        }
    }

    fn check(&self, at: u64, len: usize) -> Result<usize, Violation> {
        let end = at.checked_add(len as u64);
        if end.is_none_or(|end| end > self.bytes.len() as u64) {
            let place = Place::Shared { byte: at as usize, variable: None };
            return Err(Violation::new(Kind::OutOfBounds, "beyond the shared memory of the block").at(place));
        }
        Ok(at as usize)
    }

    /// Reads bytes for a lane. The read takes place even if it is a violation, unless it is out of bounds.
    pub(crate) fn read(
        &mut self,
        at: u64,
        to: &mut [u8],
        by: &Actor<'_>,
        lane: usize,
        mode: Mode,
    ) -> Option<Violation> {
        let start = match self.check(at, to.len()) {
            Ok(start) => start,
            Err(violation) => return Some(violation),
        };
        to.copy_from_slice(&self.bytes[start..start + to.len()]);
        let now = by.clock.of(by.warp);
        let mut violation = None;
        for at in start..start + to.len() {
            let cell = &mut self.cells[at];
            let both_atomic = mode == Mode::Atomic && cell.flags & ATOMIC != 0;
            if cell.flags & WRITTEN == 0 || cell.flags & ARRIVING != 0 {
                let cell = *cell;
                violation.get_or_insert_with(|| self.unreadable(at, cell, by));
            } else if !both_atomic && !write_is_ordered(cell, by, lane) {
                let cell = *cell;
                violation.get_or_insert_with(|| self.written_by(at, cell, by));
            }
            if mode != Mode::Atomic {
                let cell = &mut self.cells[at];
                (cell.read_pc, cell.read_lane) = (by.pc, lane as u8);
                self.reads[at * self.n_warps + by.warp] = now;
            }
        }
        violation
    }

    /// A violation by an access that is not ordered after the last write.
    fn written_by(&self, at: usize, cell: Cell, by: &Actor<'_>) -> Violation {
        if usize::from(cell.writer) < self.n_warps {
            return race(at, by, cell.writer, cell.write_lane, cell.write_pc, true);
        }
        let other =
            Party { block: by.block, thread: u32::from(cell.write_lane), pc: Some(cell.write_pc), is_write: true };
        let note = "the thread has not waited for the mbarrier of the copy into these bytes";
        let place = Place::Shared { byte: at, variable: None };
        Violation { other: Some(other), ..Violation::new(Kind::CopyInFlight, note).at(place) }
    }

    fn unreadable(&self, at: usize, cell: Cell, by: &Actor<'_>) -> Violation {
        let place = Place::Shared { byte: at, variable: None };
        if cell.flags & ARRIVING == 0 {
            return Violation::new(Kind::UnwrittenShared, "").at(place);
        }
        let other = Party {
            block: by.block,
            thread: thread(cell.writer, cell.write_lane),
            pc: Some(cell.write_pc),
            is_write: true,
        };
        let note = "the asynchronous copy into these bytes has not been waited for";
        Violation { other: Some(other), ..Violation::new(Kind::CopyInFlight, note).at(place) }
    }

    /// Writes bytes for a lane, as [`Shared::read`] reads them.
    pub(crate) fn write(&mut self, at: u64, from: &[u8], by: &Actor<'_>, lane: usize, mode: Mode) -> Option<Violation> {
        let violation = self.claim(at, from.len(), by, lane, mode, GENERIC);
        if let Ok(start) = self.check(at, from.len()) {
            self.bytes[start..start + from.len()].copy_from_slice(from);
        }
        violation
    }

    /// Marks bytes as the target of an asynchronous copy, which counts as a write now and at its end.
    pub(crate) fn start_copy(&mut self, at: u64, len: usize, by: &Actor<'_>, lane: usize) -> Option<Violation> {
        self.claim(at, len, by, lane, Mode::Plain, ARRIVING)
    }

    /// Checks a write of a lane against all earlier accesses, and records it.
    fn claim(&mut self, at: u64, len: usize, by: &Actor<'_>, lane: usize, mode: Mode, flag: u8) -> Option<Violation> {
        let start = match self.check(at, len) {
            Ok(start) => start,
            Err(violation) => return Some(violation),
        };
        let now = by.clock.of(by.warp);
        let mut violation = self.outgoing_conflict(start, start + len, by);
        for at in start..start + len {
            let cell = self.cells[at];
            let both_atomic = mode == Mode::Atomic && cell.flags & ATOMIC != 0;
            if cell.flags & ARRIVING != 0 {
                violation.get_or_insert_with(|| self.unreadable(at, cell, by));
            } else if cell.write_time != 0 && !both_atomic && !write_is_ordered(&cell, by, lane) {
                violation.get_or_insert_with(|| self.written_by(at, cell, by));
            }
            let reads = &self.reads[at * self.n_warps..][..self.n_warps];
            for (warp, read) in reads.iter().enumerate() {
                let is_ordered = match warp == by.warp {
                    true => by.same_warp_ordered(lane, usize::from(cell.read_lane), *read),
                    false => by.clock.of(warp) >= *read,
                };
                if *read != 0 && !is_ordered {
                    violation.get_or_insert_with(|| race(at, by, warp as u16, cell.read_lane, cell.read_pc, false));
                }
            }
            let atomic = if mode == Mode::Atomic { ATOMIC } else { 0 };
            self.cells[at] = Cell {
                write_time: now,
                write_pc: by.pc,
                writer: by.warp as u16,
                write_lane: lane as u8,
                flags: WRITTEN | atomic | flag,
                ..cell
            };
        }
        violation
    }

    /// Delivers the bytes of a copy, as a write of `agent` at `time`: a warp that waited for its own copy, or a copy engine.
    pub(crate) fn finish_copy(&mut self, at: u64, from: &[u8], agent: usize, time: u32) {
        let Ok(start) = self.check(at, from.len()) else { return };
        self.bytes[start..start + from.len()].copy_from_slice(from);
        for cell in &mut self.cells[start..start + from.len()] {
            cell.flags = WRITTEN;
            (cell.writer, cell.write_time) = (agent as u16, time);
        }
    }

    /// Whether a write would overtake a copy out of shared memory.
    fn outgoing_conflict(&self, from: usize, to: usize, by: &Actor<'_>) -> Option<Violation> {
        let copy = self.outgoing.iter().find(|o| o.from < to && from < o.to)?;
        let note = "an asynchronous copy out of these bytes has not been waited for";
        let other =
            Party { block: by.block, thread: (copy.warp * 32 + copy.lane) as u32, pc: Some(copy.pc), is_write: false };
        let place = Place::Shared { byte: from.max(copy.from), variable: None };
        Some(Violation { other: Some(other), ..Violation::new(Kind::CopyInFlight, note).at(place) })
    }

    /// Reads bytes for the asynchronous proxy: like a lane, and after a proxy fence only.
    pub(crate) fn read_by_proxy(&mut self, at: u64, to: &mut [u8], by: &Actor<'_>, lane: usize) -> Option<Violation> {
        let violation = self.read(at, to, by, lane, Mode::Plain);
        let start = self.check(at, to.len()).ok()?;
        let unfenced = (start..start + to.len()).find(|at| self.cells[*at].flags & GENERIC != 0);
        violation.or_else(|| {
            let place = Place::Shared { byte: unfenced?, variable: None };
            let note = "written by ordinary stores without `fence.proxy.async` before this read";
            Some(Violation::new(Kind::ProxyFence, note).at(place))
        })
    }

    /// Makes the ordinary writes of a warp, and those that it knows of, visible to the asynchronous proxy.
    pub(crate) fn proxy_fence(&mut self, by: &Actor<'_>) {
        for cell in &mut self.cells {
            let own = usize::from(cell.writer) == by.warp;
            if cell.flags & GENERIC != 0 && (own || by.clock.of(usize::from(cell.writer)) >= cell.write_time) {
                cell.flags &= !GENERIC;
            }
        }
    }
}

fn write_is_ordered(cell: &Cell, by: &Actor<'_>, lane: usize) -> bool {
    let writer = usize::from(cell.writer);
    if writer == by.warp {
        return by.same_warp_ordered(lane, usize::from(cell.write_lane), cell.write_time);
    }
    by.clock.of(writer) >= cell.write_time
}

fn thread(warp: u16, lane: u8) -> u32 {
    u32::from(warp) * 32 + u32::from(lane)
}

fn race(at: usize, by: &Actor<'_>, warp: u16, lane: u8, pc: u32, is_write: bool) -> Violation {
    let other = Some(Party { block: by.block, thread: thread(warp, lane), pc: Some(pc), is_write });
    let place = Place::Shared { byte: at, variable: None };
    Violation { other, ..Violation::new(Kind::SharedRace, "").at(place) }
}
