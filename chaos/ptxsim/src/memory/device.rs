//! Global memory.

use super::{Actor, Mode};
use crate::program::Program;
use crate::report::{Kind, Party, Place, Violation};
use std::collections::BTreeMap;

/// An address in the memory of a [`Device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ptr(pub(crate) u64);

impl Ptr {
    /// The address `bytes` bytes behind this one.
    pub fn offset(self, bytes: usize) -> Ptr {
        Ptr(self.0 + bytes as u64)
    }

    /// The address as a kernel sees it, for pointers inside of structs and tables.
    pub fn address(self) -> u64 {
        self.0
    }
}

/// Allocations lie so far apart that an address beyond one, on either side, still names it.
const ALLOCATION_SHIFT: u32 = 40;
const ALLOCATION_START: u64 = 1 << 39;
/// Bit of [`Cell::write_pc`]: the write was atomic.
const ATOMIC: u32 = 1 << 31;

/// Memory of the simulated GPU. It outlives launches.
#[derive(Default)]
pub struct Device {
    allocations: Vec<Allocation>,
    /// Every epoch of every warp since the device was created; stamps name them by position.
    epochs: Vec<Epoch>,
    /// The first epoch of the current launch. Earlier accesses are ordered before it.
    launch_epoch: u32,
    /// Allocations of the variables of modules.
    globals: BTreeMap<(u64, String), usize>,
}

struct Allocation {
    bytes: Vec<u8>,
    written: Vec<bool>,
    cells: Vec<Cell>,
}

/// Shadow of a byte. Stamps are an epoch and a lane; 0 is "never".
#[derive(Clone, Copy, Default)]
struct Cell {
    write: u32,
    write_pc: u32,
    read: u32,
    /// A reader other than the last one, preferably of another block.
    other_read: u32,
}

/// A span of time of a warp.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    block: u32,
    warp: u32,
    clock: u32,
}

impl Device {
    /// A device without memory.
    pub fn new() -> Device {
        Device::default()
    }

    /// Allocates memory that counts as unwritten. Its bytes are 0xFF, NaN in all floating-point types.
    pub fn alloc(&mut self, bytes: usize) -> Ptr {
        self.add(vec![0xff; bytes], false)
    }

    /// Allocates memory with these bytes, which count as written.
    pub fn alloc_written(&mut self, bytes: &[u8]) -> Ptr {
        self.add(bytes.to_vec(), true)
    }

    fn add(&mut self, bytes: Vec<u8>, written: bool) -> Ptr {
        let n = bytes.len();
        self.allocations.push(Allocation { bytes, written: vec![written; n], cells: vec![Cell::default(); n] });
        Ptr(start_of(self.allocations.len() - 1))
    }

    /// The bytes from an address to the end of its allocation.
    ///
    /// # Panics
    /// When the address belongs to no allocation.
    pub fn bytes(&self, at: Ptr) -> &[u8] {
        let (index, byte) = split(at.0);
        &self.allocations[index].bytes[usize::try_from(byte).expect("the address lies before its allocation")..]
    }

    /// Whether each byte from an address to the end of its allocation was written.
    ///
    /// # Panics
    /// When the address belongs to no allocation.
    pub fn written(&self, at: Ptr) -> &[bool] {
        let (index, byte) = split(at.0);
        &self.allocations[index].written[usize::try_from(byte).expect("the address lies before its allocation")..]
    }

    /// Writes bytes from the host.
    ///
    /// # Panics
    /// When the bytes do not fit into the allocation.
    pub fn write(&mut self, at: Ptr, bytes: &[u8]) {
        let (index, byte) = split(at.0);
        let byte = usize::try_from(byte).expect("the address lies before its allocation");
        let allocation = &mut self.allocations[index];
        allocation.bytes[byte..byte + bytes.len()].copy_from_slice(bytes);
        allocation.written[byte..byte + bytes.len()].fill(true);
    }

    /// The little-endian f32 values from an address to the end of its allocation.
    ///
    /// # Panics
    /// When the address belongs to no allocation.
    pub fn f32s(&self, at: Ptr) -> Vec<f32> {
        let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        self.bytes(at).chunks_exact(4).map(value).collect()
    }

    /// The little-endian 16-bit words from an address to the end of its allocation.
    ///
    /// # Panics
    /// When the address belongs to no allocation.
    pub fn u16s(&self, at: Ptr) -> Vec<u16> {
        self.bytes(at).chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    /// The allocation of an address, if any.
    pub(crate) fn allocation(&self, address: u64) -> Option<usize> {
        let (index, _) = split(address);
        (index < self.allocations.len() && address >> 56 == 0).then_some(index)
    }

    /// Starts a launch: everything before is ordered before it. Returns the addresses of the program's variables.
    pub(crate) fn start_launch(&mut self, module: u64, program: &Program) -> Vec<u64> {
        if self.epochs.is_empty() {
            // Stamp 0 means "never".
            self.epochs.push(Epoch { block: 0, warp: 0, clock: 0 });
        }
        self.launch_epoch = self.epochs.len() as u32;
        let mut addresses = Vec::new();
        for var in &program.globals {
            let index = match self.globals.get(&(module, var.name.clone())) {
                Some(index) => *index,
                None => {
                    let mut bytes = var.init.clone();
                    bytes.resize(var.bytes, 0);
                    let (index, _) = split(self.add(bytes, true).0);
                    self.globals.insert((module, var.name.clone()), index);
                    index
                }
            };
            addresses.push(start_of(index));
        }
        addresses
    }

    /// A new epoch of a warp.
    pub(crate) fn new_epoch(&mut self, block: u32, warp: usize, clock: u32) -> u32 {
        assert!(self.epochs.len() < 1 << 27, "a launch has more epochs than stamps can name");
        self.epochs.push(Epoch { block, warp: warp as u32, clock });
        self.epochs.len() as u32 - 1
    }

    /// Checks that `len` bytes lie in an allocation; returns it and the first byte.
    fn locate(&self, address: u64, len: usize) -> Result<(usize, usize), Violation> {
        let (index, byte) = split(address);
        let Some(allocation) = self.allocations.get(index).filter(|_| address >> 56 == 0) else {
            return Err(Violation::new(Kind::OutOfBounds, "").at(Place::Unmapped { address }));
        };
        let bytes = allocation.bytes.len();
        if byte < 0 || byte as usize + len > bytes {
            return Err(Violation::new(Kind::OutOfBounds, "").at(Place::Allocation { index, byte, bytes }));
        }
        Ok((index, byte as usize))
    }

    /// Reads bytes for a lane. The read takes place even if it is a violation, unless it is out of bounds.
    pub(crate) fn read(
        &mut self,
        address: u64,
        to: &mut [u8],
        by: &Actor<'_>,
        lane: usize,
        mode: Mode,
    ) -> Option<Violation> {
        let (index, byte) = match self.locate(address, to.len()) {
            Ok(found) => found,
            Err(violation) => return Some(violation),
        };
        let range = byte..byte + to.len();
        let Device { allocations, epochs, launch_epoch, .. } = self;
        let Allocation { bytes, written, cells } = &mut allocations[index];
        to.copy_from_slice(&bytes[range.clone()]);
        let view = View { epochs, launch_epoch: *launch_epoch, by, lane };
        let stamp = by.epoch << 5 | lane as u32;
        let mut violation = None;
        for (at, (cell, written)) in cells[range.clone()].iter_mut().zip(&written[range]).enumerate() {
            let place = Place::Allocation { index, byte: (byte + at) as i64, bytes: bytes.len() };
            if !written {
                violation.get_or_insert_with(|| Violation::new(Kind::UnwrittenGlobal, "").at(place.clone()));
            }
            if cell.write >> 5 >= *launch_epoch {
                if mode == Mode::NonCoherent {
                    violation.get_or_insert_with(|| Violation {
                        other: Some(view.party(cell.write, cell.write_pc)),
                        ..Violation::new(Kind::NonCoherentRead, "the launch writes these bytes").at(place.clone())
                    });
                }
                let both_atomic = mode == Mode::Atomic && cell.write_pc & ATOMIC != 0;
                if !both_atomic && !view.is_ordered(cell.write) {
                    violation.get_or_insert_with(|| view.race(cell.write, cell.write_pc, true, place));
                }
            }
            if mode != Mode::Atomic && cell.read != stamp {
                view.note_read(cell, stamp);
            }
        }
        violation
    }

    /// Writes bytes for a lane, as [`Device::read`] reads them.
    pub(crate) fn write_by(
        &mut self,
        address: u64,
        from: &[u8],
        by: &Actor<'_>,
        lane: usize,
        mode: Mode,
    ) -> Option<Violation> {
        let (index, byte) = match self.locate(address, from.len()) {
            Ok(found) => found,
            Err(violation) => return Some(violation),
        };
        let range = byte..byte + from.len();
        let Device { allocations, epochs, launch_epoch, .. } = self;
        let Allocation { bytes, written, cells } = &mut allocations[index];
        bytes[range.clone()].copy_from_slice(from);
        written[range.clone()].fill(true);
        let view = View { epochs, launch_epoch: *launch_epoch, by, lane };
        let stamp = by.epoch << 5 | lane as u32;
        let pc = by.pc | if mode == Mode::Atomic { ATOMIC } else { 0 };
        let n = bytes.len();
        let mut violation = None;
        for (at, cell) in cells[range].iter_mut().enumerate() {
            let place = || Place::Allocation { index, byte: (byte + at) as i64, bytes: n };
            let both_atomic = mode == Mode::Atomic && cell.write_pc & ATOMIC != 0;
            if !both_atomic && cell.write != 0 && !view.is_ordered(cell.write) {
                violation.get_or_insert_with(|| view.race(cell.write, cell.write_pc, true, place()));
            }
            for read in [cell.read, cell.other_read] {
                if read != 0 && !view.is_ordered(read) {
                    violation.get_or_insert_with(|| view.race(read, u32::MAX, false, place()));
                }
            }
            (cell.write, cell.write_pc) = (stamp, pc);
        }
        violation
    }

    /// What a report calls an address.
    pub(crate) fn place(&self, address: u64) -> Place {
        let (index, byte) = split(address);
        match self.allocations.get(index).filter(|_| address >> 56 == 0) {
            Some(allocation) => Place::Allocation { index, byte, bytes: allocation.bytes.len() },
            None => Place::Unmapped { address },
        }
    }
}

fn start_of(index: usize) -> u64 {
    ((index as u64 + 1) << ALLOCATION_SHIFT) + ALLOCATION_START
}

/// Allocation and byte of an address; an index beyond all allocations if it belongs to none.
fn split(address: u64) -> (usize, i64) {
    let index = (address >> ALLOCATION_SHIFT) as usize;
    let byte = (address & ((1 << ALLOCATION_SHIFT) - 1)) as i64 - ALLOCATION_START as i64;
    (index.wrapping_sub(1), byte)
}

/// Stamps as a lane sees them.
struct View<'a, 'b> {
    epochs: &'a [Epoch],
    launch_epoch: u32,
    by: &'a Actor<'b>,
    lane: usize,
}

impl View<'_, '_> {
    /// Whether an access happened before the lane's access now.
    fn is_ordered(&self, stamp: u32) -> bool {
        if stamp >> 5 < self.launch_epoch {
            return true;
        }
        let then = self.epochs[(stamp >> 5) as usize];
        let warp = then.warp as usize;
        if then.block != self.by.block {
            return self.by.clock.of_block(then.block, warp) >= then.clock;
        }
        if warp == self.by.warp {
            return self.by.same_warp_ordered(self.lane, (stamp & 31) as usize, then.clock);
        }
        self.by.clock.of(warp) >= then.clock
    }

    /// Keeps the last reader, and another one that is as foreign as possible.
    fn note_read(&self, cell: &mut Cell, stamp: u32) {
        let epoch = |stamp: u32| self.epochs[(stamp >> 5) as usize];
        let is_current = |stamp: u32| stamp >> 5 >= self.launch_epoch;
        if is_current(cell.read) {
            let last = epoch(cell.read);
            let other_is_foreign = is_current(cell.other_read) && epoch(cell.other_read).block != self.by.block;
            let same_warp = last.block == self.by.block && last.warp as usize == self.by.warp;
            let keeps_foreign = last.block == self.by.block && other_is_foreign;
            if !same_warp && !keeps_foreign {
                cell.other_read = cell.read;
            }
        }
        cell.read = stamp;
    }

    fn party(&self, stamp: u32, pc: u32) -> Party {
        let then = self.epochs[(stamp >> 5) as usize];
        let pc = (pc != u32::MAX).then_some(pc & !ATOMIC);
        Party { block: then.block, thread: then.warp * 32 + (stamp & 31), pc, is_write: true }
    }

    fn race(&self, stamp: u32, pc: u32, is_write: bool, place: Place) -> Violation {
        let other = Some(Party { is_write, ..self.party(stamp, pc) });
        Violation { other, ..Violation::new(Kind::GlobalRace, "").at(place) }
    }
}
