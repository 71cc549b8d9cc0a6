//! Event sets: Xid events that settings or a file plant.

use super::{Code, INVALID_ARGUMENT, NOT_SUPPORTED, SUCCESS, TIMEOUT, XID};
use crate::{device, environment};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// How often a wait looks for events.
const PAUSE: Duration = Duration::from_millis(2);

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub device: u32,
    pub xid: u64,
}

/// One event set.
struct Set {
    devices: BTreeSet<u32>,
    has_seen_planned: bool,
    /// Lines of the file that it has seen.
    n_lines: usize,
}

#[derive(Default)]
struct Sets {
    last: usize,
    by_handle: BTreeMap<usize, Set>,
}

fn sets() -> MutexGuard<'static, Sets> {
    static SETS: OnceLock<Mutex<Sets>> = OnceLock::new();
    SETS.get_or_init(Mutex::default).lock().expect("nothing panics here")
}

/// When the first set was made.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Handles are recognisable, and not used twice.
const FIRST_HANDLE: usize = 0xe4e_0000;

/// A new set, without devices. Lines that the file has by now are in the past.
pub fn create() -> usize {
    start();
    let mut sets = sets();
    sets.last += 0x10;
    let handle = FIRST_HANDLE + sets.last;
    sets.by_handle.insert(handle, Set { devices: BTreeSet::new(), has_seen_planned: false, n_lines: lines().len() });
    handle
}

pub fn free(handle: usize) -> Code {
    if sets().by_handle.remove(&handle).is_some() { SUCCESS } else { INVALID_ARGUMENT }
}

/// Adds a device's events of some kinds to a set.
pub fn register(handle: usize, device: u32, kinds: u64) -> Code {
    if kinds & !XID != 0 {
        return NOT_SUPPORTED;
    }
    match sets().by_handle.get_mut(&handle) {
        Some(set) => {
            set.devices.insert(device);
            SUCCESS
        }
        None => INVALID_ARGUMENT,
    }
}

/// Waits for the next event of a set.
pub fn wait(handle: usize, limit: Duration) -> Result<Event, Code> {
    let begun = Instant::now();
    loop {
        if let Some(event) = sets().by_handle.get_mut(&handle).ok_or(INVALID_ARGUMENT)?.next() {
            return Ok(event);
        }
        let left = limit.saturating_sub(begun.elapsed());
        if left.is_zero() {
            return Err(TIMEOUT);
        }
        std::thread::sleep(left.min(PAUSE));
    }
}

impl Set {
    fn next(&mut self) -> Option<Event> {
        if !self.has_seen_planned
            && let Some((xid, after)) = planned()
            && start().elapsed() >= after
        {
            self.has_seen_planned = true;
            if self.devices.contains(&0) {
                return Some(Event { device: 0, xid });
            }
        }
        let lines = lines();
        while self.n_lines < lines.len() {
            let event = parse(&lines[self.n_lines]);
            self.n_lines += 1;
            if let Some(event) = event.filter(|event| self.devices.contains(&event.device)) {
                return Some(event);
            }
        }
        None
    }
}

/// The event that the settings plan.
fn planned() -> Option<(u64, Duration)> {
    let text = environment::text("SOFTGPU_NVML_XID");
    let (xid, after) = text.split_once('@')?;
    Some((xid.parse().ok()?, Duration::from_millis(after.parse().ok()?)))
}

/// Complete lines of the file.
fn lines() -> Vec<String> {
    let path = environment::text("SOFTGPU_NVML_XID_FILE");
    let text = if path.is_empty() { String::new() } else { std::fs::read_to_string(path).unwrap_or_default() };
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(str::to_owned).collect()
}

/// `<code> <device>`, by the device's number in this process.
fn parse(line: &str) -> Option<Event> {
    let (xid, ordinal) = line.split_once(' ')?;
    let device = device::check(ordinal.trim().parse().ok()?).ok()?;
    Some(Event { device, xid: xid.trim().parse().ok()? })
}
