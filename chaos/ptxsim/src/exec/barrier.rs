//! Block-wide barriers. Each has 16 instances, and each completes generation after generation.

use super::block::Block;
use super::flow::Flow;
use super::warp::{State, Warp};
use crate::alu::WARP;
use crate::memory::clock::Clock;
use crate::program::{Barrier, BarrierReduction, Op};
use crate::report::Kind;

#[derive(Default)]
pub(super) struct BlockBarrier {
    /// Completed so far.
    pub(super) generation: u64,
    /// Threads that arrived, as they are counted against an explicit number: whole warps count 32.
    threads: u32,
    /// Lanes that arrived.
    lanes: u32,
    /// The explicit number of threads, if the first to arrive gave one.
    expected: Option<u32>,
    /// What those who arrived knew.
    clock: Clock,
    /// Warps that wait, and learn at the end what all knew.
    waiting: Vec<usize>,
    /// Lanes whose predicate holds, for a reduction.
    count: u32,
    /// The count of the last generation, and its lanes.
    last: (u32, u32),
}

impl Block<'_, '_> {
    pub(super) fn barrier(&mut self, warp: &mut Warp, barrier: &Barrier, exec: u32) -> Flow {
        let lane = exec.trailing_zeros() as usize;
        let id = warp.reg(barrier.id)[lane] as usize;
        if id >= self.barriers.len() {
            self.find_first(warp, exec, Kind::OutOfBounds, "a block has 16 barriers");
            return Flow::Next;
        }
        if barrier.aligned {
            let mask = warp.fragment().mask;
            if exec != mask {
                let note = "lanes of the warp skip an aligned barrier by their predicate";
                self.find_first(warp, exec, Kind::BarrierDivergence, note);
            }
            match self.converge(warp, u32::MAX) {
                None => return Flow::Done,
                Some(0) => {}
                Some(_) => {
                    let note = "other lanes of the warp do not reach this aligned barrier";
                    self.find_first(warp, exec, Kind::BarrierDivergence, note);
                }
            }
        }
        let whole = exec == warp.live;
        let expected = barrier.threads.map(|reg| warp.reg(reg)[lane] as u32);
        let holds = barrier.reduction.map_or(0, |(_, pred)| warp.pred(pred) & exec);
        let state = &mut self.barriers[id];
        if state.lanes > 0 && state.expected != expected {
            let note = "threads at the same barrier expect different numbers of threads";
            self.find_first(warp, exec, Kind::BarrierDivergence, note);
        }
        let state = &mut self.barriers[id];
        state.expected = expected;
        state.threads += if whole { WARP as u32 } else { exec.count_ones() };
        state.lanes += exec.count_ones();
        state.count += holds.count_ones();
        state.clock.join(&self.clocks[warp.index]);
        let generation = state.generation;
        if barrier.arrive_only {
            self.tick(warp);
            self.complete_barriers();
            return Flow::Next;
        }
        state.waiting.push(warp.index);
        warp.fragment().state = State::Barrier { id: id as u8, generation };
        self.tick(warp);
        self.complete_barriers();
        if self.barriers[id].generation > generation {
            self.leave_barrier(warp, id);
        }
        Flow::Done
    }

    /// Completes the barriers that everyone reached; lanes that exited are not waited for.
    pub(super) fn complete_barriers(&mut self) {
        for id in 0..self.barriers.len() {
            let state = &self.barriers[id];
            let complete = match state.expected {
                Some(expected) => state.threads >= expected,
                None => state.lanes >= self.n_live,
            };
            if state.lanes > 0 && complete {
                self.complete_barrier(id);
            }
        }
    }

    /// Ends the generation of a barrier: those who wait learn what all who arrived knew.
    pub(super) fn complete_barrier(&mut self, id: usize) {
        let state = std::mem::take(&mut self.barriers[id]);
        for warp in &state.waiting {
            self.clocks[*warp].join(&state.clock);
        }
        self.barriers[id] = BlockBarrier {
            generation: state.generation + 1,
            last: (state.count, state.lanes),
            ..BlockBarrier::default()
        };
    }

    /// Continues the current fragment behind its barrier.
    pub(super) fn leave_barrier(&mut self, warp: &mut Warp, id: usize) {
        let program = self.program;
        let fragment = warp.fragment();
        let mask = fragment.mask;
        fragment.state = State::Ready;
        let Op::Barrier(barrier) = &program.instrs[fragment.pc as usize].op else { return };
        fragment.pc += 1;
        let (count, lanes) = self.barriers[id].last;
        let value = match barrier.reduction {
            None => return,
            Some((BarrierReduction::PopCount, _)) => u64::from(count),
            Some((BarrierReduction::And, _)) => u64::from(count == lanes),
            Some((BarrierReduction::Or, _)) => u64::from(count > 0),
        };
        if let Some(dst) = barrier.dst {
            warp.set(dst, &[value; WARP], mask);
        }
        if let Some(dst) = barrier.dst_pred {
            warp.set_pred(dst, if value != 0 { u32::MAX } else { 0 }, mask);
        }
    }
}
