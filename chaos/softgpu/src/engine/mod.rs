//! Streams, events and graphs as real queues, worked off by one thread in any order that events allow.
//!
//! Invariants:
//! - `ENGINE-1`: while no thread of the host waits, work is held back for up to `SOFTGPU_HOLD_US`, so that several orders
//!   are possible however slow the host is.
//! - `ENGINE-2`: which of them is taken depends on the seed only.
//! - `ENGINE-3`: after an error, all work of that device is given up and every call returns the error.

mod event;
pub mod faults;
pub mod graph;
mod op;
pub mod pool;
pub mod stream;
mod worker;

pub use crate::codes::Code;
use crate::codes::OK;
use crate::{environment, memory};
use event::Event;
use faults::Faults;
use graph::{Exec, Graph};
pub use op::{HostFunction, Op, Poll};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Instant;
pub use stream::{Scope, Stream};

const DEVICES_MAX: u32 = 64;

/// Everything behind the lock.
pub struct Core {
    pub streams: BTreeMap<u64, Stream>,
    pub events: BTreeMap<u64, Event>,
    pub graphs: BTreeMap<u64, Graph>,
    pub execs: BTreeMap<u64, Arc<Exec>>,
    pub faults: Faults,
    sticky: BTreeMap<u32, Code>,
    last_id: u64,
    rng: u64,
    /// Which of the streams goes on as far as it can, while one is preferred.
    preferred: Option<u64>,
    /// Threads of the host that wait for the device.
    waiters: usize,
    /// When the first work came after a pause; none while there is no work.
    held_since: Option<Instant>,
    is_released: bool,
    is_asleep: bool,
}

/// The one engine of the process.
pub struct Engine {
    core: Mutex<Core>,
    /// Signalled to the engine's thread.
    work: Condvar,
    /// Signalled to threads of the host.
    done: Condvar,
}

/// Starts the engine at the first call.
pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<&'static Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        memory::crash::install();
        let core = Core {
            streams: (0..DEVICES_MAX).map(|d| (own_stream(d), Stream::new(d, false, 0))).collect(),
            events: BTreeMap::new(),
            graphs: BTreeMap::new(),
            execs: BTreeMap::new(),
            faults: Faults::planned(),
            sticky: BTreeMap::new(),
            last_id: 0x1000,
            rng: seed(),
            preferred: None,
            waiters: 0,
            held_since: None,
            is_released: false,
            is_asleep: false,
        };
        let engine = Engine { core: Mutex::new(core), work: Condvar::new(), done: Condvar::new() };
        let engine: &'static Engine = Box::leak(Box::new(engine));
        let thread = std::thread::Builder::new().name("softgpu".into());
        let work = || {
            let _end = AbortOnPanic;
            engine.run()
        };
        thread.spawn(work).expect("the system has room for one more thread");
        engine
    })
}

/// Ends the process if the engine's thread panics: otherwise the host would wait for it without an end.
pub struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// Takes over a setting that has changed.
pub fn setting_changed(name: &str) {
    let mut core = engine().lock();
    match name {
        "SOFTGPU_SEED" => (core.rng, core.preferred) = (seed(), None),
        "SOFTGPU_FAULT" | "SOFTGPU_HANG" | "SOFTGPU_ALLOC_FAIL" => {
            core.faults = Faults::planned();
            core.sticky.clear();
        }
        _ => {}
    }
}

/// Counters of what exists.
pub fn stat(name: &str) -> Option<u64> {
    let core = engine().lock();
    Some(match name {
        "streams" => core.streams.len() as u64 - u64::from(DEVICES_MAX),
        "events" => core.events.len() as u64,
        "graphs" => core.graphs.len() as u64,
        "graph_execs" => core.execs.len() as u64,
        _ => return None,
    })
}

/// The stream of a device's synchronous calls.
fn own_stream(device: u32) -> u64 {
    0x100 + u64::from(device)
}

fn seed() -> u64 {
    let mut seed = environment::number("SOFTGPU_SEED").wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    next(&mut seed);
    seed
}

fn next(rng: &mut u64) -> u64 {
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    *rng
}

impl Core {
    /// The error that ended a device's work.
    pub fn sticky(&self, device: u32) -> Code {
        self.sticky.get(&device).copied().unwrap_or(OK)
    }

    fn new_id(&mut self) -> u64 {
        self.last_id += 0x10;
        self.last_id
    }

    fn random(&mut self) -> u64 {
        next(&mut self.rng)
    }
}

impl Engine {
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().expect("no panic while the engine is held")
    }
}
