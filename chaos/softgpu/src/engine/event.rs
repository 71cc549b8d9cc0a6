//! Events: each record makes a new version; a stream or the host waits for the latest one.

use super::{Core, Engine, Op};
use crate::codes::{CAPTURED_EVENT, Code, INVALID_HANDLE, NOT_READY, OK};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What work that records or awaits an event shares with it; outlives `cuEventDestroy`.
#[derive(Default)]
pub struct EventState {
    reached: AtomicU64,
    /// Whether a thread of the host waits for it.
    is_wanted: AtomicBool,
    time: Mutex<Option<Instant>>,
}

/// An event of the program.
pub struct Event {
    pub device: u32,
    has_time: bool,
    version: u64,
    state: Arc<EventState>,
    /// The graph and its last nodes, if the latest record was part of a capture.
    pub captured: Option<(u64, Vec<usize>)>,
}

impl EventState {
    pub fn is_reached(&self, version: u64) -> bool {
        self.reached.load(SeqCst) >= version
    }

    /// Returns whether the host waits for it.
    pub fn reach(&self, version: u64) -> bool {
        if self.reached.fetch_max(version, SeqCst) < version {
            *self.time.lock().expect("nothing panics here") = Some(Instant::now());
        }
        self.is_wanted.swap(false, SeqCst)
    }
}

impl Engine {
    pub fn create_event(&self, device: u32, has_time: bool) -> u64 {
        let mut core = self.lock();
        let id = core.new_id();
        core.events.insert(id, Event { device, has_time, version: 0, state: Arc::default(), captured: None });
        id
    }

    pub fn destroy_event(&self, event: u64) -> Result<(), Code> {
        self.lock().events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    /// Records in a stream, or marks a place of the graph that is captured from it.
    pub fn record(&self, event: u64, stream: u64) -> Result<(), Code> {
        let mut core = self.lock();
        let s = core.streams.get(&stream).ok_or_else(|| super::stream::not_a_stream(stream))?;
        let (device, captured) = (s.device, s.capture.as_ref().map(|c| (c.graph, c.last.clone())));
        if let Some((graph, _)) = &captured {
            core.check_valid_capture(*graph)?;
        }
        let e = core.events.get_mut(&event).filter(|e| e.device == device).ok_or(INVALID_HANDLE)?;
        e.captured = captured;
        if e.captured.is_some() {
            return Ok(());
        }
        e.version += 1;
        let op = Op::Record { event: e.state.clone(), version: e.version };
        self.enqueue_locked(core, stream, op)
    }

    /// Makes a stream wait for an event, or joins the graph that the event was captured into.
    pub fn wait_event(&self, stream: u64, event: u64) -> Result<(), Code> {
        let mut core = self.lock();
        let e = core.events.get(&event).ok_or(INVALID_HANDLE)?;
        let (captured, version, state) = (e.captured.clone(), e.version, e.state.clone());
        let is_capturing = core.stream(stream)?.capture.is_some();
        match captured {
            Some((graph, last)) => core.join_capture(stream, graph, &last),
            None if is_capturing => Err(core.invalidate_capture_of(stream, crate::codes::CAPTURE_ISOLATION)),
            None if version == 0 => Ok(()),
            None => self.enqueue_locked(core, stream, Op::Wait { event: state, version }),
        }
    }

    /// `NOT_READY`, or waits.
    pub fn await_event(&self, event: u64, blocks: bool) -> Code {
        let mut core = self.lock();
        let Some(e) = core.events.get(&event) else { return INVALID_HANDLE };
        if e.captured.is_some() {
            return CAPTURED_EVENT;
        }
        let (version, state, device) = (e.version, e.state.clone(), e.device);
        core.waiters += usize::from(blocks);
        if blocks {
            self.work.notify_one();
        }
        let code = loop {
            if core.sticky(device) != OK {
                break core.sticky(device);
            }
            if state.is_reached(version) {
                break OK;
            }
            if !blocks {
                return NOT_READY;
            }
            state.is_wanted.store(true, SeqCst);
            core = self.done.wait(core).expect("no panic while the engine is held");
        };
        core.waiters -= usize::from(blocks);
        code
    }

    /// Milliseconds between two events.
    pub fn elapsed(&self, from: u64, to: u64) -> Result<f32, Code> {
        let core = self.lock();
        let time = |event| time_of(&core, event);
        let (from, to) = (time(from)?, time(to)?);
        let sign = if to < from { -1.0 } else { 1.0 };
        let between = to.max(from) - to.min(from);
        Ok(sign * between.as_secs_f32() * 1e3)
    }
}

fn time_of(core: &Core, event: u64) -> Result<Instant, Code> {
    let e = core.events.get(&event).filter(|e| e.has_time && e.version > 0).ok_or(INVALID_HANDLE)?;
    if e.captured.is_some() {
        return Err(CAPTURED_EVENT);
    }
    let time = *e.state.time.lock().expect("nothing panics here");
    time.filter(|_| e.state.is_reached(e.version)).ok_or(NOT_READY)
}
