//! Memory of devices and pinned memory of the host: between guard pages, poisoned, and closed to the host's threads.
//!
//! Invariants:
//! - `MEM-1`: an allocation's end lies less than 256 bytes before a guard page, and the bytes between are watched.
//! - `MEM-2`: address space is never used twice, so any use after a free is noticed.

pub mod arena;
pub mod crash;
mod guard;

use crate::codes::{ALREADY_REGISTERED, Code, INVALID_VALUE, NOT_REGISTERED, OUT_OF_MEMORY};
use crate::environment;
pub use guard::{close, close_to_this_thread, open, open_to_this_thread};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

const PAGE: usize = 4096;
const GUARD: usize = 64 << 10;
const ALIGN: usize = 256;
const POISON: u8 = 0xff;

/// What an allocation is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Memory of a device.
    Device(u32),
    /// Page-locked memory of the host, allocated by the driver; devices can use its address.
    Pinned,
    /// Memory of the program that it registered; `mapped`: devices can use its address.
    Registered { mapped: bool },
}

struct Piece {
    map: usize,
    mapped_bytes: usize,
    bytes: usize,
    live: bool,
    kind: Kind,
}

#[derive(Default)]
struct Pieces {
    by_start: BTreeMap<usize, Piece>,
    /// For the message of a crash.
    freed: BTreeMap<usize, Piece>,
    used: BTreeMap<u32, usize>,
    /// The most bytes of a device so far.
    peak: usize,
    /// Whether the engine works, in the mode `idle`.
    is_open: bool,
}

impl Piece {
    fn is_live_device(&self) -> bool {
        self.live && matches!(self.kind, Kind::Device(_))
    }
}

impl Pieces {
    fn containing(&self, address: usize) -> Option<(usize, &Piece)> {
        let (start, piece) = self.by_start.range(..=address).next_back()?;
        (piece.live && address < start + piece.bytes).then_some((*start, piece))
    }

    /// Leaves the most bytes so far where the settings say.
    fn note_peak(&mut self, used: usize) {
        let folder = environment::text("SOFTGPU_PEAKS");
        if used > self.peak && !folder.is_empty() {
            self.peak = used;
            let file = std::path::Path::new(&folder).join(std::process::id().to_string());
            let _ = std::fs::write(file, used.to_string());
        }
    }
}

static PIECES: Mutex<Pieces> = Mutex::new(Pieces {
    by_start: BTreeMap::new(),
    freed: BTreeMap::new(),
    used: BTreeMap::new(),
    peak: 0,
    is_open: false,
});

fn pieces() -> MutexGuard<'static, Pieces> {
    PIECES.lock().expect("no panic while memory is held")
}

/// Allocates and poisons.
pub fn alloc(bytes: usize, kind: Kind) -> Result<usize, Code> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut pieces = pieces();
    if let Kind::Device(device) = kind {
        let used = pieces.used.entry(device).or_default();
        if bytes > total().saturating_sub(*used + taken()) {
            return Err(OUT_OF_MEMORY);
        }
        *used += bytes;
        let used = *used;
        pieces.note_peak(used);
    }
    let padded = bytes.next_multiple_of(ALIGN);
    let inner = padded.next_multiple_of(PAGE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping; only its inner part is written.
    unsafe {
        let map = libc::mmap(std::ptr::null_mut(), inner + 2 * GUARD, libc::PROT_NONE, flags, -1, 0);
        if map == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        let at = map as usize + GUARD;
        libc::mprotect(at as _, inner, libc::PROT_READ | libc::PROT_WRITE);
        let start = at + inner - padded;
        std::ptr::write_bytes(start as *mut u8, POISON, padded);
        if let Kind::Device(_) = kind {
            guard::protect_new(at, inner, pieces.is_open);
        }
        let piece = Piece { map: map as usize, mapped_bytes: inner + 2 * GUARD, bytes, live: true, kind };
        pieces.by_start.insert(start, piece);
        Ok(start)
    }
}

/// Frees an allocation of device memory or of pinned memory.
pub fn free(start: usize, is_device: bool) -> Result<(), Code> {
    let mut pieces = pieces();
    let is_such = |p: &Piece| match p.kind {
        Kind::Device(_) => is_device,
        Kind::Pinned => !is_device,
        Kind::Registered { .. } => false,
    };
    if !pieces.by_start.get(&start).is_some_and(is_such) {
        return Err(INVALID_VALUE);
    }
    let piece = pieces.by_start.remove(&start).expect("it was there");
    // SAFETY: the mapping is this module's; its contents are given up.
    unsafe {
        libc::madvise(piece.map as _, piece.mapped_bytes, libc::MADV_DONTNEED);
        libc::mprotect(piece.map as _, piece.mapped_bytes, libc::PROT_NONE);
    }
    if let Kind::Device(device) = piece.kind {
        *pieces.used.entry(device).or_default() -= piece.bytes;
    }
    pieces.freed.insert(start, Piece { live: false, ..piece });
    Ok(())
}

/// Registers memory of the program as pinned.
pub fn register(start: usize, bytes: usize, mapped: bool) -> Result<(), Code> {
    let mut pieces = pieces();
    let before = pieces.by_start.range(..start + bytes).next_back();
    if before.is_some_and(|(at, p)| p.live && at + p.bytes > start) {
        return Err(ALREADY_REGISTERED);
    }
    let piece = Piece { map: start, mapped_bytes: bytes, bytes, live: true, kind: Kind::Registered { mapped } };
    pieces.by_start.insert(start, piece);
    Ok(())
}

/// Undoes [`register`].
pub fn unregister(start: usize) -> Result<(), Code> {
    let mut pieces = pieces();
    let is_registered = pieces.by_start.get(&start).is_some_and(|p| matches!(p.kind, Kind::Registered { .. }));
    if !is_registered {
        return Err(NOT_REGISTERED);
    }
    pieces.by_start.remove(&start);
    Ok(())
}

/// Bytes of memory of each device.
pub fn total() -> usize {
    environment::number("SOFTGPU_MEMORY") as usize
}

/// Bytes of each device that other processes have taken.
pub fn taken() -> usize {
    environment::number("SOFTGPU_TAKEN") as usize
}

/// Bytes allocated on a device.
pub fn used(device: u32) -> usize {
    pieces().used.get(&device).copied().unwrap_or(0)
}

/// What a live address belongs to: its allocation's start, bytes and kind.
pub fn find(address: usize) -> Option<(usize, usize, Kind)> {
    pieces().containing(address).map(|(start, p)| (start, p.bytes, p.kind))
}

/// Whether all of a range lies in one live allocation of device memory.
pub fn is_device(address: usize, bytes: usize) -> bool {
    find(address).is_some_and(|(start, n, kind)| matches!(kind, Kind::Device(_)) && bytes <= start + n - address)
}

/// Whether an address is pinned; an error if only a part of the range is.
pub fn is_pinned(address: usize, bytes: usize) -> Result<bool, Code> {
    match find(address) {
        Some((_, _, Kind::Device(_))) => Err(INVALID_VALUE),
        Some((start, n, _)) if bytes > start + n - address => Err(INVALID_VALUE),
        found => Ok(found.is_some()),
    }
}

/// Whether devices can write a word of the host or a device there.
pub fn is_device_accessible(address: usize, bytes: usize) -> bool {
    find(address)
        .is_some_and(|(start, n, kind)| kind != Kind::Registered { mapped: false } && bytes <= start + n - address)
}

/// The first allocation of a device behind whose end something was written: its bytes.
pub fn overrun() -> Option<usize> {
    let pieces = pieces();
    let overrun = |start: usize, p: &Piece| {
        let slack = start + p.bytes..(start + p.bytes).next_multiple_of(ALIGN);
        // SAFETY: the bytes behind a live allocation are mapped, and open to the engine.
        slack.into_iter().any(|at| unsafe { (at as *const u8).read_volatile() } != POISON)
    };
    let mut live = pieces.by_start.iter().filter(|(_, p)| p.is_live_device());
    live.find(|(start, p)| overrun(**start, p)).map(|(_, p)| p.bytes)
}

/// What an address is, for the message of a crash. Takes no lock that the crashed thread may hold.
fn describe(address: usize) -> Option<String> {
    let Ok(pieces) = PIECES.try_lock() else { return Some("unknown memory".into()) };
    let in_map = |p: &Piece| (p.map..p.map + p.mapped_bytes).contains(&address);
    let (start, p) = pieces.by_start.iter().chain(&pieces.freed).find(|(_, p)| in_map(p))?;
    let what = match p.kind {
        Kind::Device(device) => format!("an allocation of {} on device {device}", p.bytes),
        _ => format!("a pinned allocation of {}", p.bytes),
    };
    Some(format!("byte {} of {what}{}", address as i64 - *start as i64, if p.live { "" } else { ", freed" }))
}

/// Counters of what exists.
pub fn stat(name: &str) -> Option<u64> {
    let pieces = pieces();
    let live = pieces.by_start.values().filter(|p| p.live);
    Some(match name {
        "device_allocations" => live.filter(|p| p.is_live_device()).count() as u64,
        "pinned_allocations" => live.filter(|p| p.kind == Kind::Pinned).count() as u64,
        "device_bytes" => pieces.used.values().sum::<usize>() as u64,
        _ => return None,
    })
}
