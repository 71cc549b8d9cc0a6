//! Streams: queues of work, and waiting for them.

use super::graph::Capture;
use super::{Core, Engine, Op};
use crate::codes::{CAPTURE_UNSUPPORTED, Code, INVALID_HANDLE, NOT_READY, OK, refuse};
use std::collections::VecDeque;
use std::sync::MutexGuard;
use std::time::Instant;

/// A stream of the program, or that of the synchronous calls of a device.
pub struct Stream {
    pub device: u32,
    /// Whether it waits for the legacy stream, and the legacy stream for it.
    pub is_blocking: bool,
    pub priority: i32,
    pub queue: VecDeque<Op>,
    entered: u64,
    pub left: u64,
    /// Values of `left` that threads of the host wait for.
    wanted: Vec<u64>,
    pub capture: Option<Capture>,
    /// Destroyed by the program; removed when its work is done.
    is_doomed: bool,
}

/// Whose work is waited for.
#[derive(Clone, Copy)]
pub enum Scope {
    Stream(u64),
    Device(u32),
    /// Those that the legacy stream waits for.
    Blocking(u32),
}

impl Scope {
    fn has(self, id: u64, stream: &Stream) -> bool {
        match self {
            Scope::Stream(s) => s == id,
            Scope::Device(d) => d == stream.device,
            Scope::Blocking(d) => d == stream.device && stream.is_blocking,
        }
    }
}

impl Stream {
    pub fn new(device: u32, is_blocking: bool, priority: i32) -> Stream {
        Stream {
            device,
            is_blocking,
            priority,
            queue: VecDeque::new(),
            entered: 0,
            left: 0,
            wanted: Vec::new(),
            capture: None,
            is_doomed: false,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.left == self.entered
    }

    /// One piece of work is done. Returns whether a thread of the host waited for it.
    pub fn leave(&mut self) -> bool {
        self.left += 1;
        let left = self.left;
        let before = self.wanted.len();
        self.wanted.retain(|w| *w > left);
        self.wanted.len() < before
    }

    /// Gives up all work, after an error.
    pub fn clear(&mut self) {
        for op in self.queue.drain(..) {
            if let Op::Record { event, version } = op {
                event.reach(version);
            }
        }
        self.left = self.entered;
        self.wanted.clear();
    }
}

/// The error for a handle that is no stream.
pub fn not_a_stream(stream: u64) -> Code {
    match stream {
        0..=2 => refuse(INVALID_HANDLE, format_args!("the legacy and per-thread streams are refused: create a stream")),
        _ => INVALID_HANDLE,
    }
}

impl Core {
    pub fn stream(&mut self, stream: u64) -> Result<&mut Stream, Code> {
        let found = self.streams.get_mut(&stream).filter(|s| !s.is_doomed);
        found.ok_or_else(|| not_a_stream(stream))
    }

    /// Removes streams whose end the program asked for.
    pub fn remove_doomed(&mut self) {
        self.streams.retain(|_, s| !(s.is_doomed && s.is_idle()));
    }
}

impl Engine {
    pub fn create_stream(&self, device: u32, is_blocking: bool, priority: i32) -> u64 {
        let mut core = self.lock();
        let id = core.new_id();
        core.streams.insert(id, Stream::new(device, is_blocking, priority));
        id
    }

    /// The stream's work goes on to its end.
    pub fn destroy_stream(&self, stream: u64) -> Result<(), Code> {
        let mut core = self.lock();
        core.stream(stream)?.is_doomed = true;
        if core.streams[&stream].capture.is_some() {
            core.invalidate_capture_of(stream, OK);
        }
        core.remove_doomed();
        Ok(())
    }

    /// Adds work to a stream, or to the graph that is captured from it. Returns 0 or a `CUresult`.
    pub fn submit(&self, stream: u64, op: Op) -> Code {
        self.enqueue(stream, op).err().unwrap_or(OK)
    }

    pub fn enqueue(&self, stream: u64, op: Op) -> Result<(), Code> {
        self.enqueue_locked(self.lock(), stream, op)
    }

    pub(super) fn enqueue_locked(&self, mut core: MutexGuard<'_, Core>, stream: u64, op: Op) -> Result<(), Code> {
        let s = core.stream(stream)?;
        let (device, graph) = (s.device, s.capture.as_ref().map(|c| c.graph));
        if core.sticky(device) != OK {
            return Err(core.sticky(device));
        }
        if let Some(graph) = graph {
            return core.capture(stream, graph, op);
        }
        let s = core.stream(stream)?;
        s.queue.push_back(op);
        s.entered += 1;
        core.held_since.get_or_insert_with(Instant::now);
        if core.is_asleep {
            core.is_asleep = false;
            self.work.notify_one();
        }
        Ok(())
    }

    /// Does work on the device's own stream, behind that of blocking streams, and waits for it.
    pub fn run_synchronously(&self, device: u32, op: Op) -> Result<(), Code> {
        self.lock().check_legacy_call(device)?;
        self.synchronize(Scope::Blocking(device))?;
        let stream = super::own_stream(device);
        self.enqueue(stream, op)?;
        self.synchronize(Scope::Stream(stream))
    }

    /// Waits for all work that streams have now.
    pub fn synchronize(&self, scope: Scope) -> Result<(), Code> {
        let mut core = self.lock();
        if let Scope::Stream(stream) = scope {
            core.stream(stream)?;
        }
        let of_scope: Vec<u64> = core.streams.iter().filter(|(id, s)| scope.has(**id, s)).map(|(id, _)| *id).collect();
        let is_capturing = |id: &&u64| core.streams[*id].capture.is_some();
        if let Some(capturing) = of_scope.iter().find(is_capturing) {
            return Err(core.invalidate_capture_of(*capturing, CAPTURE_UNSUPPORTED));
        }
        let targets: Vec<(u64, u64)> = of_scope.iter().map(|id| (*id, core.streams[id].entered)).collect();
        let device = match scope {
            Scope::Stream(stream) => core.streams[&stream].device,
            Scope::Device(device) | Scope::Blocking(device) => device,
        };
        core.waiters += 1;
        self.work.notify_one();
        let result = loop {
            if core.sticky(device) != OK {
                break Err(core.sticky(device));
            }
            let mut missing = targets.iter().filter(|(id, n)| core.streams.get(id).is_some_and(|s| s.left < *n));
            let Some((id, n)) = missing.next().copied() else { break Ok(()) };
            core.streams.get_mut(&id).expect("it is there").wanted.push(n);
            core = self.done.wait(core).expect("no panic while the engine is held");
        };
        core.waiters -= 1;
        result
    }

    /// Whether a stream has no work: `OK` or `NOT_READY`.
    pub fn query(&self, stream: u64) -> Result<(), Code> {
        let mut core = self.lock();
        let s = core.stream(stream)?;
        let (device, is_idle, is_capturing) = (s.device, s.is_idle(), s.capture.is_some());
        if is_capturing {
            return Err(core.invalidate_capture_of(stream, CAPTURE_UNSUPPORTED));
        }
        match core.sticky(device) {
            OK if is_idle => Ok(()),
            OK => Err(NOT_READY),
            code => Err(code),
        }
    }
}
