//! A warp: registers, and its lanes in groups that are converged.

use crate::alu::{Lanes, WARP};
use crate::memory::clock::{Clock, Together, lanes};
use crate::program::{Pred, Program, Reg};
use std::collections::VecDeque;

/// Lanes that execute together.
#[derive(Clone, Debug)]
pub(super) struct Fragment {
    pub(super) pc: u32,
    pub(super) mask: u32,
    /// Where calls return to.
    pub(super) stack: Vec<u32>,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// Lets others run first: it found a condition unfulfilled.
    Yielded,
    /// Waits for other lanes of the warp to reach the same instruction.
    Converging,
    /// Executes the instruction although other lanes did not reach it.
    Forced,
    /// Waits at a block-wide barrier for the end of a generation.
    Barrier {
        id: u8,
        generation: u64,
    },
}

/// A copy of `cp.async` whose bytes have not been delivered.
#[derive(Clone, Debug)]
pub(super) struct PendingCopy {
    pub(super) to: u64,
    pub(super) len: usize,
    pub(super) bytes: [u8; 16],
}

/// The asynchronous copies of a lane.
#[derive(Clone, Debug, Default)]
pub(super) struct LaneCopies {
    pub(super) open: Vec<PendingCopy>,
    pub(super) groups: VecDeque<Vec<PendingCopy>>,
    /// Bulk groups committed so far.
    pub(super) bulk_groups: u64,
}

pub(super) struct Warp {
    pub(super) index: usize,
    pub(super) regs: Vec<Lanes>,
    pub(super) preds: Vec<u32>,
    /// The carry flags of extended-precision arithmetic.
    pub(super) carry: u32,
    pub(super) fragments: Vec<Fragment>,
    /// The fragment that runs.
    pub(super) current: usize,
    /// Lanes that exist: a block's last warp may have fewer than 32.
    pub(super) started: u32,
    /// Lanes that have not exited.
    pub(super) live: u32,
    /// Memory of each lane, one after the other.
    pub(super) local: Vec<u8>,
    pub(super) local_bytes: usize,
    pub(super) together: Together,
    pub(super) epoch: u32,
    pub(super) copies: Vec<LaneCopies>,
    /// What the warp knew at its last fence; a later atomic publishes it.
    pub(super) fence: Option<Clock>,
    pub(super) n_instrs: u64,
    /// Waits that failed since the last one that did not.
    pub(super) spins: u32,
    /// Registers of `wgmma` that are still being computed, by group.
    pub(super) wgmma: crate::exec::pending::Pending,
}

impl Warp {
    pub(super) fn new(program: &Program, index: usize, live: u32, initial: Vec<(Reg, Lanes)>) -> Warp {
        let mut regs = vec![[0; WARP]; program.n_regs];
        for (reg, lanes) in initial {
            regs[reg as usize] = lanes;
        }
        let mut preds = vec![0; program.n_preds];
        preds[0] = u32::MAX;
        Warp {
            index,
            regs,
            preds,
            carry: 0,
            fragments: vec![Fragment { pc: 0, mask: live, stack: Vec::new(), state: State::Ready }],
            current: 0,
            started: live,
            live,
            local: vec![0; WARP * program.local_bytes],
            local_bytes: program.local_bytes,
            together: Together::default(),
            epoch: 0,
            copies: vec![LaneCopies::default(); WARP],
            fence: None,
            n_instrs: 0,
            spins: 0,
            wgmma: crate::exec::pending::Pending::default(),
        }
    }

    pub(super) fn fragment(&mut self) -> &mut Fragment {
        &mut self.fragments[self.current]
    }

    pub(super) fn reg(&self, reg: Reg) -> &Lanes {
        &self.regs[reg as usize]
    }

    pub(super) fn pred(&self, pred: Pred) -> u32 {
        self.preds[pred.index as usize] ^ if pred.negated { u32::MAX } else { 0 }
    }

    /// Writes a register in some lanes.
    pub(super) fn set(&mut self, reg: Reg, values: &Lanes, exec: u32) {
        let to = &mut self.regs[reg as usize];
        if exec == u32::MAX {
            *to = *values;
            return;
        }
        for lane in lanes(exec) {
            to[lane] = values[lane];
        }
    }

    pub(super) fn set_pred(&mut self, index: u32, values: u32, exec: u32) {
        let to = &mut self.preds[index as usize];
        *to = *to & !exec | values & exec;
    }

    /// Chooses the fragment to run: the one deepest in calls, then the one furthest behind, so that diverged lanes meet again
    /// where their paths join. Returns false if none is ready.
    pub(super) fn pick(&mut self) -> bool {
        if self.fragments.len() == 1 {
            self.current = 0;
            return matches!(self.fragments[0].state, State::Ready | State::Forced);
        }
        let ready = |f: &Fragment| matches!(f.state, State::Ready | State::Forced);
        let key = |f: &Fragment| (usize::MAX - f.stack.len(), f.pc);
        let best = (0..self.fragments.len())
            .filter(|at| ready(&self.fragments[*at]))
            .min_by_key(|at| key(&self.fragments[*at]));
        match best {
            Some(at) => self.current = at,
            None => return false,
        }
        true
    }

    /// Joins the current fragment with those at the same place.
    pub(super) fn merge(&mut self) {
        let mut other = 0;
        while other < self.fragments.len() {
            let (a, b) = (&self.fragments[self.current], &self.fragments[other]);
            let waits = matches!(b.state, State::Barrier { .. }) || matches!(a.state, State::Barrier { .. });
            if other == self.current || a.pc != b.pc || waits || a.stack != b.stack {
                other += 1;
                continue;
            }
            let mask = b.mask;
            self.fragments[self.current].mask |= mask;
            self.fragments[self.current].state = State::Ready;
            self.fragments.swap_remove(other);
            if self.current == self.fragments.len() {
                self.current = other;
            }
            other = 0;
        }
    }
}
