//! The engine's thread: picks work and does it.

use super::faults::{self, Fault};
use super::graph::GraphRun;
use super::{Core, Engine, Op, Stream};
use crate::codes::{Code, OK};
use crate::memory::crash::{self, Working};
use crate::stats::{Stat, count};
use crate::{driver, settings};
use crate::{environment, memory};
use std::sync::atomic::{AtomicU32, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How far a piece of work came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Done,
    /// Something was done, and something is left.
    Progress,
    /// It waits for something outside.
    Blocked,
}

impl Core {
    /// Streams whose next work need not wait for an event.
    fn ready_heads(&self) -> Vec<u64> {
        let is_ready = |op: &Op| !matches!(op, Op::Wait { event, version } if !event.is_reached(*version));
        self.streams.iter().filter(|(_, s)| s.queue.front().is_some_and(is_ready)).map(|(id, _)| *id).collect()
    }

    fn is_idle(&self) -> bool {
        self.streams.values().all(Stream::is_idle)
    }

    /// Takes one of the streams out of the list. Sometimes all are equal, sometimes one goes on as far as it can: that
    /// finds other missing events.
    fn pick(&mut self, heads: &mut Vec<u64>) -> u64 {
        if self.random().is_multiple_of(16) {
            self.prefer();
        }
        // By place, not by handle: handles differ between runs of a process.
        let key = self.preferred.unwrap_or_else(|| self.random());
        let at = key as usize % heads.len();
        heads.swap_remove(at)
    }

    /// Decides anew whether one of the streams goes first, and which.
    fn prefer(&mut self) {
        self.preferred = Some(self.random()).filter(|key| key % 3 != 0);
    }

    /// Gives up the work of devices that have failed.
    fn clear_failed(&mut self) {
        for s in self.streams.values_mut() {
            if self.sticky.get(&s.device).is_some_and(|code| *code != OK) {
                s.clear();
            }
        }
    }

    fn time_to_hold(&self) -> Duration {
        let longest = Duration::from_micros(environment::number("SOFTGPU_HOLD_US"));
        let held = self.held_since.map_or(longest, |since| since.elapsed());
        if self.is_released || self.waiters > 0 { Duration::ZERO } else { longest.saturating_sub(held) }
    }

    /// Nothing is left to do: the host may not touch device memory, and the next work is held back.
    fn rest(&mut self) {
        self.is_released = false;
        self.held_since = None;
        self.remove_doomed();
        memory::close();
    }
}

impl Engine {
    pub(super) fn run(&self) -> ! {
        memory::open_to_this_thread();
        crash::register_worker();
        let mut core = self.lock();
        let mut n_blocked = 0;
        loop {
            core.clear_failed();
            let mut heads = core.ready_heads();
            if heads.is_empty() {
                if core.is_idle() {
                    core.rest();
                }
                core.is_asleep = true;
                core = self.work.wait(core).expect("no panic while the engine is held");
                continue;
            }
            let held = core.time_to_hold();
            if !held.is_zero() {
                core = self.work.wait_timeout(core, held).expect("no panic while the engine is held").0;
                continue;
            }
            if !core.is_released {
                core.is_released = true;
                core.prefer();
            }
            memory::open();
            let mut got_on = false;
            while !got_on && !heads.is_empty() {
                (core, got_on) = self.advance(core, &mut heads);
            }
            n_blocked = if got_on { 0 } else { n_blocked + 1 };
            if !got_on {
                let pause = Duration::from_micros(20 << u32::min(n_blocked / 16, 3));
                core.is_asleep = true;
                core = self.work.wait_timeout(core, pause).expect("no panic while the engine is held").0;
            }
            core.is_asleep = false;
        }
    }
}

impl Engine {
    /// Tries the next work of one of the streams. Whether something was done.
    fn advance<'a>(&'a self, mut core: MutexGuard<'a, Core>, heads: &mut Vec<u64>) -> (MutexGuard<'a, Core>, bool) {
        let stream = core.pick(heads);
        let Some(s) = core.streams.get_mut(&stream) else { return (core, false) };
        let (device, Some(mut op)) = (s.device, s.queue.pop_front()) else { return (core, false) };
        let seed = core.random();
        drop(core);
        let outcome = self.execute(&mut op, seed);
        core = self.lock();
        // Another device's failure may have emptied the queue meanwhile, never this one's: only this thread sets it.
        match outcome {
            Ok(Step::Done) => {
                drop(op);
                let is_awaited = core.streams.get_mut(&stream).is_some_and(Stream::leave);
                if core.is_idle() {
                    core.rest();
                }
                if is_awaited {
                    self.done.notify_all();
                }
                (core, true)
            }
            Ok(step) => {
                if let Some(s) = core.streams.get_mut(&stream) {
                    s.queue.push_front(op);
                }
                (core, step == Step::Progress)
            }
            Err(code) => {
                core.sticky.insert(device, code);
                core.clear_failed();
                if core.is_idle() {
                    core.rest();
                }
                self.done.notify_all();
                (core, true)
            }
        }
    }

    fn execute(&self, op: &mut Op, seed: u64) -> Result<Step, Code> {
        let _working = (!matches!(op, Op::Graph(_))).then(|| Working::on(op.label()));
        self.fault(op)?;
        match op {
            Op::Kernel(launch) => {
                count(Stat::Kernels);
                run_kernel(|| launch.run(seed))?;
            }
            Op::Execution { run, .. } => run_kernel(|| run(seed))?,
            Op::Copy { to, from, bytes } if faults::copies_are_slow() && is_pinned_copy(*to, *from) => {
                *op = Op::SlowCopy { since: Instant::now(), to: *to, from: *from, bytes: *bytes };
                return Ok(Step::Blocked);
            }
            Op::SlowCopy { since, .. } if faults::is_copy_late(*since) => return Ok(Step::Blocked),
            Op::Copy { to, from, bytes } | Op::SlowCopy { to, from, bytes, .. } => {
                count(Stat::Copies);
                // SAFETY: both ranges lay in allocations when the copy was asked for; a free of them ends the process here.
                unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes) };
            }
            Op::Bytes { to, bytes } => {
                count(Stat::Copies);
                // SAFETY: as for a copy.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), *to as *mut u8, bytes.len()) };
            }
            Op::Fill { to, pattern, width, n } => {
                count(Stat::Copies);
                fill(*to, *pattern, *width, *n);
            }
            Op::Write32 { to, value } => {
                // SAFETY: an aligned word of memory of a device, or mapped memory of the host.
                unsafe { AtomicU32::from_ptr(*to as *mut u32) }.store(*value, Release);
            }
            Op::Record { event, version } => {
                if event.reach(*version) {
                    // A waiter looks at the event with the lock held.
                    drop(self.lock());
                    self.done.notify_all();
                }
            }
            Op::Wait { .. } => {}
            Op::Host { call, data } => {
                count(Stat::HostFunctions);
                memory::close_to_this_thread();
                // SAFETY: the program gave both to cuLaunchHostFunc.
                driver::in_host_function(|| unsafe { call(*data as *mut u8) });
                memory::open_to_this_thread();
            }
            Op::Work { run, .. } => run()?,
            Op::Begin(begin) => {
                *op = Op::Poll(begin());
                return self.execute(op, seed);
            }
            Op::Poll(poll) => {
                let is_done = (poll.lock().expect("a collective does not panic"))()?;
                return Ok(if is_done { Step::Done } else { Step::Blocked });
            }
            Op::Graph(run) => return self.advance_graph(run, seed),
        }
        Ok(Step::Done)
    }

    /// Lets a launch fail or hang if a test asks for it.
    fn fault(&self, op: &mut Op) -> Result<(), Code> {
        if op.kernel().is_some() {
            settings::take_changes();
        }
        match op.kernel().and_then(|kernel| self.lock().faults.on_launch(kernel)) {
            Some(Fault::Error(code)) => return Err(code),
            Some(Fault::Hang) => *op = Op::Poll(Arc::new(Mutex::new(|| Ok(false)))),
            None => {}
        }
        Ok(())
    }

    /// Does one node, in any order that the graph allows.
    fn advance_graph(&self, run: &mut GraphRun, seed: u64) -> Result<Step, Code> {
        if !run.is_first_in_line() {
            return Ok(Step::Blocked);
        }
        let ready = run.ready();
        let n = ready.len();
        for k in 0..n {
            let node = ready[(seed as usize + k) % n];
            let mut op = run.take(node);
            if self.execute(&mut op, seed.rotate_left(17))? == Step::Done {
                run.set_done(node);
                break;
            }
            run.put_back(node, op);
            if k + 1 == n {
                return Ok(Step::Blocked);
            }
        }
        if !run.ready().is_empty() {
            return Ok(Step::Progress);
        }
        run.finish();
        count(Stat::GraphLaunches);
        Ok(Step::Done)
    }
}

/// Whether a copy is between a device and pinned memory of the host.
fn is_pinned_copy(to: usize, from: usize) -> bool {
    let is_device = |kind: memory::Kind| matches!(kind, memory::Kind::Device(_));
    let kinds = [to, from].map(|address| memory::find(address).map(|(_, _, kind)| is_device(kind)));
    matches!(kinds, [Some(to), Some(from)] if to != from)
}

fn run_kernel(run: impl FnOnce() -> Result<(), Code>) -> Result<(), Code> {
    let start = Instant::now();
    run()?;
    if let Some(bytes) = memory::overrun() {
        crash::end_for_overrun(bytes);
    }
    let longer = faults::slowness(start.elapsed());
    if !longer.is_zero() {
        std::thread::sleep(longer);
    }
    Ok(())
}

fn fill(to: usize, pattern: u32, width: usize, n: usize) {
    // SAFETY: the range lay in an allocation when the set was asked for, aligned to its width.
    unsafe {
        match width {
            1 => std::ptr::write_bytes(to as *mut u8, pattern as u8, n),
            2 => std::slice::from_raw_parts_mut(to as *mut u16, n).fill(pattern as u16),
            _ => std::slice::from_raw_parts_mut(to as *mut u32, n).fill(pattern),
        }
    }
}
