//! A block: its warps, its shared memory, and the order in which the warps run.

use super::barrier::BlockBarrier;
use super::mbarrier::Mbarrier;
use super::warp::{State, Warp};
use crate::alu::WARP;
use crate::memory::Actor;
use crate::memory::clock::{Clock, lanes};
use crate::memory::device::Device;
use crate::memory::shared::Shared;
use crate::program::{BlockPlace, Initial, Program};
use crate::report::{Kind, Report, Violation};
use std::collections::BTreeMap;

/// Failed waits of a warp after which it counts as waiting for nothing.
const SPINS_MAX: u32 = 1000;
/// Instructions that a warp executes at most before another one runs.
const QUANTUM_MAX: u64 = 128;

/// Limits of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Instructions of a warp.
    pub(crate) instructions_max: u64,
}

/// What the blocks of a launch share.
pub(crate) struct Launch<'a> {
    pub(crate) program: &'a Program,
    pub(crate) device: &'a mut Device,
    pub(crate) report: Report<'a>,
    pub(crate) params: &'a [u8],
    /// Addresses of the program's variables.
    pub(crate) globals: Vec<u64>,
    /// What warps knew when they published at an address, by an atomic after a fence.
    pub(crate) published: BTreeMap<u64, Vec<(u32, Clock)>>,
    pub(crate) limits: Limits,
    pub(crate) random: u64,
    pub(crate) n_lane_instrs: u64,
    pub(crate) aborted: bool,
}

impl Launch<'_> {
    /// The next number of the launch's sequence. Source: Vigna 2016, xorshift64*.
    pub(crate) fn next_random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
}

pub(crate) struct Block<'a, 'b> {
    pub(super) launch: &'b mut Launch<'a>,
    pub(super) program: &'a Program,
    pub(super) place: BlockPlace,
    /// Linear index in the grid.
    pub(super) index: u32,
    pub(super) shared: Shared,
    /// What each warp knows.
    pub(super) clocks: Vec<Clock>,
    pub(super) barriers: Vec<BlockBarrier>,
    pub(super) mbarriers: BTreeMap<u64, Mbarrier>,
    /// Copy engines, numbered after the warps: one for each mbarrier.
    pub(super) n_agents: usize,
    /// Threads that have not exited.
    pub(super) n_live: u32,
    n_warps: usize,
}

impl<'a, 'b> Block<'a, 'b> {
    pub(crate) fn new(launch: &'b mut Launch<'a>, place: BlockPlace) -> Block<'a, 'b> {
        let [x, y, z] = place.block;
        let n_threads = x * y * z;
        let n_warps = n_threads.div_ceil(WARP as u32) as usize;
        let index = place.index[0] + place.grid[0] * (place.index[1] + place.grid[1] * place.index[2]);
        Block {
            program: launch.program,
            shared: Shared::new(place.shared_bytes, n_warps),
            launch,
            place,
            index,
            clocks: vec![Clock::default(); n_warps],
            barriers: (0..16).map(|_| BlockBarrier::default()).collect(),
            mbarriers: BTreeMap::new(),
            n_agents: n_warps,
            n_live: n_threads,
            n_warps,
        }
    }

    /// Runs all warps to their end, or until none can go on.
    pub(crate) fn run(&mut self) {
        let mut warps: Vec<Warp> = (0..self.n_warps).map(|index| self.new_warp(index)).collect();
        while !self.launch.aborted {
            let mut progress = false;
            let start = self.launch.next_random() as usize;
            for turn in 0..warps.len() {
                let warp = (start + turn) % warps.len();
                progress |= self.run_warp(&mut warps[warp]);
            }
            warps.retain(|warp| !warp.fragments.is_empty());
            if warps.is_empty() {
                return;
            }
            if !progress && !self.release_stuck(&mut warps) {
                return;
            }
        }
    }

    fn new_warp(&mut self, index: usize) -> Warp {
        let [x, y, z] = self.place.block;
        let n = (x * y * z) as usize - index * WARP;
        let live = if n >= WARP { u32::MAX } else { (1 << n) - 1 };
        let dynamic_shared = self.program.shared_static_bytes.next_multiple_of(self.program.shared_align) as i64;
        let value = |initial: Initial| match initial {
            Initial::Bits(bits) => [bits; WARP],
            Initial::Special(special) => special.lanes(&self.place, index),
            Initial::Global(var, offset) => [(self.launch.globals[var] as i64 + offset) as u64; WARP],
            Initial::DynamicShared(offset) => [(dynamic_shared + offset) as u64; WARP],
        };
        let initial = self.program.initial.iter().map(|(reg, initial)| (*reg, value(*initial))).collect();
        let mut warp = Warp::new(self.program, index, live, initial);
        self.tick(&mut warp);
        warp
    }

    /// Advances the clock of a warp: later accesses are not covered by what others learned so far.
    pub(super) fn tick(&mut self, warp: &mut Warp) {
        let now = self.clocks[warp.index].of(warp.index) + 1;
        self.clocks[warp.index].set(warp.index, now);
        warp.epoch = self.launch.device.new_epoch(self.index, warp.index, now);
    }

    /// Runs a warp for a while; false if it could not execute anything.
    fn run_warp(&mut self, warp: &mut Warp) -> bool {
        let quantum = 1 + self.launch.next_random() % QUANTUM_MAX;
        self.wake(warp);
        let mut progress = false;
        for _ in 0..quantum {
            if !warp.pick() {
                break;
            }
            self.step(warp);
            warp.n_instrs += 1;
            if warp.n_instrs > self.launch.limits.instructions_max {
                let note = "the warp executed as many instructions as the launch allows; is this loop infinite?";
                self.find(warp, 0, Violation::new(Kind::InstructionLimit, note));
                self.launch.aborted = true;
            }
            if warp.fragments.is_empty() || self.launch.aborted {
                return true;
            }
            if warp.fragments.len() > 1 {
                warp.merge();
            }
            progress |= warp.spins < SPINS_MAX;
        }
        progress
    }

    /// Continues fragments whose barrier is complete, and those that yielded; decides divergence that cannot resolve itself.
    fn wake(&mut self, warp: &mut Warp) {
        for at in 0..warp.fragments.len() {
            match warp.fragments[at].state {
                State::Yielded => warp.fragments[at].state = State::Ready,
                State::Barrier { id, generation } if self.barriers[usize::from(id)].generation > generation => {
                    warp.current = at;
                    self.leave_barrier(warp, usize::from(id));
                }
                _ => {}
            }
        }
        if warp.fragments.len() > 1 {
            warp.current = 0;
            warp.merge();
        }
        if !warp.fragments.is_empty() && warp.fragments.iter().all(|f| f.state == State::Converging) {
            force_first(warp);
        }
    }

    /// Nothing can run: reports why and lets something continue. Returns false if there is nothing to continue.
    fn release_stuck(&mut self, warps: &mut [Warp]) -> bool {
        if let Some(warp) = warps.iter_mut().find(|w| w.fragments.iter().any(|f| f.state == State::Converging)) {
            force_first(warp);
            return true;
        }
        for warp in warps.iter_mut() {
            let waiting = warp.fragments.iter().position(|f| matches!(f.state, State::Barrier { .. }));
            let Some(at) = waiting else { continue };
            let State::Barrier { id, .. } = warp.fragments[at].state else { continue };
            warp.current = at;
            let lane = warp.fragments[at].mask.trailing_zeros() as usize;
            let note = "other threads of the block never reach this barrier";
            self.find(warp, lane, Violation::new(Kind::BarrierDivergence, note));
            self.complete_barrier(usize::from(id));
            return true;
        }
        if let Some(warp) = warps.first_mut() {
            warp.current = 0;
            let lane = warp.fragments[0].mask.trailing_zeros() as usize;
            let note = "all threads of the block wait, and none can end the wait";
            self.find(warp, lane, Violation::new(Kind::Deadlock, note));
        }
        false
    }

    /// Who accesses memory now.
    pub(super) fn actor<'w>(clocks: &'w [Clock], index: u32, warp: &'w Warp) -> Actor<'w> {
        let fragment = &warp.fragments[warp.current];
        Actor {
            block: index,
            warp: warp.index,
            epoch: warp.epoch,
            clock: &clocks[warp.index],
            together: &warp.together,
            fragment: fragment.mask,
            pc: fragment.pc,
        }
    }

    /// Reports a violation of a lane at its current instruction.
    pub(super) fn find(&mut self, warp: &Warp, lane: usize, violation: Violation) {
        let pc = warp.fragments[warp.current].pc;
        self.launch.report.add(violation, pc, &self.place, (warp.index * WARP + lane) as u32);
    }

    /// Reports for the first of some lanes.
    pub(super) fn find_first(&mut self, warp: &Warp, mask: u32, kind: Kind, note: &'static str) {
        if let Some(lane) = lanes(mask).next() {
            self.find(warp, lane, Violation::new(kind, note));
        }
    }
}

/// Lets the fragment furthest behind continue alone.
fn force_first(warp: &mut Warp) {
    let waiting = warp.fragments.iter_mut().filter(|f| f.state == State::Converging);
    if let Some(first) = waiting.min_by_key(|f| (usize::MAX - f.stack.len(), f.pc)) {
        first.state = State::Forced;
    }
}
