//! mbarriers: barriers in shared memory that count arrivals and bytes of asynchronous copies.
//!
//! The interpreter keeps them beside the shared memory, by address. Each has a copy engine: an agent of its own for race
//! detection, whose writes are known to those only who waited for the phase in which the copy completed.

use super::block::Block;
use super::flow::Flow;
use super::warp::{State, Warp};
use crate::alu::WARP;
use crate::memory::Mode;
use crate::memory::clock::{Clock, lanes};
use crate::program::{Address, MbarrierOp};
use crate::report::{Kind, Violation};

#[derive(Debug)]
pub(crate) struct Mbarrier {
    /// Arrivals of a phase.
    expected: u64,
    /// Arrivals missing in the current phase.
    pending: u64,
    /// Bytes that copies must still deliver in the current phase.
    transaction: i64,
    pub(super) phase: u64,
    /// What those who arrived in the current phase knew.
    gathering: Clock,
    /// What was known at the end of the last phase.
    complete: Clock,
    agent: usize,
    agent_time: u32,
}

impl Mbarrier {
    /// Ends the phase if nothing is missing.
    fn advance(&mut self) {
        if self.pending == 0 && self.transaction == 0 {
            self.phase += 1;
            self.pending = self.expected;
            self.complete.join(&std::mem::take(&mut self.gathering));
        }
    }
}

impl Block<'_, '_> {
    pub(super) fn mbarrier(&mut self, warp: &mut Warp, op: &MbarrierOp, address: Address, exec: u32) -> Flow {
        if let MbarrierOp::Wait { result, state, parity } = op {
            return self.wait(warp, (*result, *state, *parity), address, exec);
        }
        let mut states = [0u64; WARP];
        for lane in lanes(exec) {
            let at = self.barrier_address(warp, address, lane);
            match op {
                MbarrierOp::Init { count } => self.init(warp, lane, at, warp.reg(*count)[lane] & 0xffff_ffff),
                MbarrierOp::Invalidate => {
                    self.mbarriers.remove(&at);
                }
                MbarrierOp::ExpectTransaction { bytes } => {
                    let bytes = warp.reg(*bytes)[lane] as u32;
                    if let Some(barrier) = self.known(warp, lane, at) {
                        barrier.transaction += i64::from(bytes);
                    }
                }
                MbarrierOp::Arrive { count, transaction_bytes, drop, .. } => {
                    let count = count.map_or(1, |reg| warp.reg(reg)[lane] & 0xffff_ffff);
                    let bytes = transaction_bytes.map_or(0, |reg| warp.reg(reg)[lane] as u32);
                    states[lane] = self.arrive(warp, lane, at, count, bytes, *drop);
                }
                MbarrierOp::Wait { .. } => {}
            }
        }
        if let MbarrierOp::Arrive { state: Some(state), .. } = op {
            warp.set(*state, &states, exec);
        }
        if matches!(op, MbarrierOp::Arrive { .. }) {
            self.tick(warp);
        }
        Flow::Next
    }

    pub(super) fn barrier_address(&self, warp: &Warp, address: Address, lane: usize) -> u64 {
        self.address_of(warp, address, lane) & 0xffff_ffff
    }

    fn init(&mut self, warp: &mut Warp, lane: usize, at: u64, count: u64) {
        let violation = self.write_lane(warp, lane, crate::types::Space::Shared, at, &[0; 8], Mode::Plain);
        self.note(warp, lane, violation);
        let agent = self.n_agents;
        self.n_agents += 1;
        let barrier = Mbarrier {
            expected: count,
            pending: count,
            transaction: 0,
            phase: 0,
            gathering: Clock::default(),
            complete: Clock::default(),
            agent,
            agent_time: 0,
        };
        self.mbarriers.insert(at, barrier);
    }

    /// The mbarrier at an address, whose initialisation must be ordered before this use.
    fn known(&mut self, warp: &Warp, lane: usize, at: u64) -> Option<&mut Mbarrier> {
        let actor = Self::actor(&self.clocks, self.index, warp);
        let violation = self.shared.read(at, &mut [0; 8], &actor, lane, Mode::Atomic);
        if !self.mbarriers.contains_key(&at) {
            self.find(warp, lane, Violation::new(Kind::Mbarrier, "no mbarrier was initialised at this address"));
            return None;
        }
        self.note(warp, lane, violation);
        self.mbarriers.get_mut(&at)
    }

    fn arrive(&mut self, warp: &Warp, lane: usize, at: u64, count: u64, bytes: u32, drop: bool) -> u64 {
        let clock = self.clocks[warp.index].clone();
        let Some(barrier) = self.known(warp, lane, at) else { return 0 };
        let phase = barrier.phase;
        barrier.gathering.join(&clock);
        barrier.transaction += i64::from(bytes);
        let excess = barrier.pending < count;
        barrier.pending = barrier.pending.saturating_sub(count);
        if drop {
            barrier.expected = barrier.expected.saturating_sub(count);
        }
        barrier.advance();
        if excess {
            self.find(warp, lane, Violation::new(Kind::Mbarrier, "more arrivals in a phase than the mbarrier expects"));
        }
        phase
    }

    fn wait(
        &mut self,
        warp: &mut Warp,
        (result, state, parity): (u32, Option<u32>, Option<u32>),
        address: Address,
        exec: u32,
    ) -> Flow {
        let mut complete = 0u32;
        for lane in lanes(exec) {
            let at = self.barrier_address(warp, address, lane);
            let state = state.map(|reg| warp.reg(reg)[lane]);
            let parity = parity.map(|reg| warp.reg(reg)[lane] & 1);
            let index = warp.index;
            let Some(barrier) = self.known(warp, lane, at) else { continue };
            let done = match (state, parity) {
                (Some(state), _) => barrier.phase > state,
                (None, parity) => barrier.phase & 1 != parity.unwrap_or(0),
            };
            if done {
                complete |= 1 << lane;
                let clock = barrier.complete.clone();
                self.clocks[index].join(&clock);
            }
        }
        warp.set_pred(result, complete, exec);
        if complete == exec {
            warp.spins = 0;
            return Flow::Next;
        }
        // Whoever completes the phase must run first.
        warp.spins += 1;
        let fragment = warp.fragment();
        fragment.pc += 1;
        fragment.state = State::Yielded;
        Flow::Done
    }

    /// Notes that a copy will complete on an mbarrier; returns the engine and the time of its writes.
    pub(super) fn start_transaction(&mut self, warp: &Warp, lane: usize, at: u64) -> Option<(usize, u32)> {
        let barrier = self.known(warp, lane, at)?;
        barrier.agent_time += 1;
        Some((barrier.agent, barrier.agent_time))
    }

    /// Notes that a copy delivered its bytes.
    pub(super) fn complete_transaction(&mut self, at: u64, bytes: u64) {
        if let Some(barrier) = self.mbarriers.get_mut(&at) {
            let (agent, time) = (barrier.agent, barrier.agent_time);
            barrier.gathering.set(agent, time);
            barrier.transaction -= bytes as i64;
            barrier.advance();
        }
    }

    /// An arrival by the copies of a thread: without `no_increment`, it adds the arrival that it then makes.
    pub(super) fn arrive_by_copies(&mut self, warp: &Warp, lane: usize, at: u64, no_increment: bool) {
        let Some(barrier) = self.known(warp, lane, at) else { return };
        let (agent, time) = (barrier.agent, barrier.agent_time);
        // The arrival orders the copies, but nothing else that the thread did.
        barrier.gathering.set(agent, time);
        if no_increment {
            barrier.pending = barrier.pending.saturating_sub(1);
        }
        barrier.advance();
    }
}
