//! One instruction of one fragment.

use super::block::Block;
use super::flow::Flow;
use super::warp::{Fragment, State, Warp};
use crate::alu::{Alu, WARP};
use crate::memory::clock::lanes;
use crate::program::{Instr, Op};
use crate::report::{Kind, Violation};

impl<'a> Block<'a, '_> {
    /// Executes the next instruction of the warp's current fragment.
    pub(super) fn step(&mut self, warp: &mut Warp) {
        let (pc, mask) = {
            let fragment = warp.fragment();
            (fragment.pc, fragment.mask)
        };
        let instr: &'a Instr = &self.program.instrs[pc as usize];
        let exec = mask & warp.pred(instr.guard);
        self.launch.n_lane_instrs += u64::from(exec.count_ones());
        if exec == 0 {
            warp.fragment().pc += 1;
            return;
        }
        if !warp.wgmma.is_empty() {
            self.check_pending(warp, &instr.op, exec);
        }
        if let Op::Alu { f, dst, src } = &instr.op {
            let mut out = [0; WARP];
            let [a, b, c] = src.map(|reg| &warp.regs[reg as usize]);
            match f {
                Alu::One(f) => f(a, &mut out),
                Alu::Two(f) => f(a, b, &mut out),
                Alu::Three(f) => f(a, b, c, &mut out),
            }
            warp.set(*dst, &out, exec);
            warp.fragment().pc += 1;
            return;
        }
        if self.execute(warp, &instr.op, exec) == Flow::Next {
            let fragment = warp.fragment();
            fragment.pc += 1;
            fragment.state = State::Ready;
        }
    }

    /// Reports the use of a register that a product of the warp group still writes.
    fn check_pending(&mut self, warp: &mut Warp, op: &Op, exec: u32) {
        let pc = warp.fragment().pc as usize;
        // Compilers copy accumulators from one virtual register to the next, which costs no instruction in the end.
        if let Op::Alu { dst, src, .. } = op
            && self.program.text[pc].starts_with("mov.")
        {
            return warp.wgmma.copied(src[0], *dst);
        }
        let used = match op {
            Op::Alu { dst, src, .. } => src.iter().chain([dst]).any(|reg| warp.wgmma.uses(*reg)),
            Op::Store(access) => access.regs.iter().any(|reg| warp.wgmma.uses(*reg)),
            Op::Load(access) => access.regs.iter().any(|reg| warp.wgmma.uses(*reg)),
            _ => false,
        };
        if used {
            self.find_first(warp, exec, Kind::PendingRegister, "`wgmma.wait_group` must come first");
        }
    }

    fn execute(&mut self, warp: &mut Warp, op: &'a Op, exec: u32) -> Flow {
        match op {
            Op::Branch { target } => return self.branch(warp, exec, *target),
            Op::BranchIndexed { targets, index } => return self.branch_indexed(warp, exec, targets, *index),
            Op::Call { target } => {
                self.split(warp, exec);
                let fragment = warp.fragment();
                fragment.stack.push(fragment.pc + 1);
                fragment.pc = *target;
                return Flow::Done;
            }
            Op::Return => return self.ret(warp, exec),
            Op::Exit => return self.exit(warp, exec),
            Op::Trap => {
                self.find_first(warp, exec, Kind::Trap, "");
                self.launch.aborted = true;
                return Flow::Done;
            }
            Op::Yield => {
                let fragment = warp.fragment();
                fragment.pc += 1;
                fragment.state = State::Yielded;
                return Flow::Done;
            }
            Op::Shuffle { .. }
            | Op::Vote { .. }
            | Op::Match { .. }
            | Op::Redux { .. }
            | Op::Elect { .. }
            | Op::WarpBarrier { .. }
            | Op::ActiveMask { .. } => return self.collective(warp, op, exec),
            Op::Barrier(barrier) => return self.barrier(warp, barrier, exec),
            Op::Mbarrier(op, address) => return self.mbarrier(warp, op, *address, exec),
            Op::Mma(mma) => return self.mma(warp, mma, exec),
            Op::Matrix(access) => return self.matrix(warp, access, exec),
            Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => {
                return self.wgmma(warp, op, exec);
            }
            Op::Copy(copy) => self.copy(warp, copy, exec),
            Op::Load(access) => self.load(warp, access, exec),
            Op::Store(access) => self.store(warp, access, exec),
            Op::Atom(atom) => self.atom(warp, atom, exec),
            Op::Fence { releases } => {
                if *releases {
                    warp.fence = Some(self.clocks[warp.index].clone());
                }
                self.tick(warp);
            }
            Op::ProxyFence => {
                let actor = Self::actor(&self.clocks, self.index, warp);
                self.shared.proxy_fence(&actor);
            }
            Op::Clock { dst } => {
                let now = [self.launch.n_lane_instrs; WARP];
                warp.set(*dst, &now, exec);
            }
            _ => super::scalar::scalar(warp, op, exec),
        }
        Flow::Next
    }

    /// Splits the current fragment so that it has only the lanes of `exec`; the others continue behind the instruction.
    fn split(&mut self, warp: &mut Warp, exec: u32) {
        let fragment = warp.fragment().clone();
        let rest = fragment.mask & !exec;
        if rest == 0 {
            return;
        }
        warp.fragment().mask = exec;
        let pc = fragment.pc + 1;
        warp.fragments.push(Fragment { pc, mask: rest, state: State::Ready, ..fragment });
        self.part(warp, exec, rest);
    }

    fn part(&mut self, warp: &mut Warp, a: u32, b: u32) {
        let now = self.clocks[warp.index].of(warp.index);
        warp.together.part(a, b, now);
        self.tick(warp);
    }

    fn branch(&mut self, warp: &mut Warp, exec: u32, target: u32) -> Flow {
        self.split(warp, exec);
        warp.fragment().pc = target;
        Flow::Done
    }

    fn branch_indexed(&mut self, warp: &mut Warp, exec: u32, targets: &[u32], index: u32) -> Flow {
        self.split(warp, exec);
        let indices = *warp.reg(index);
        let mut rest = exec;
        while rest != 0 {
            let chosen = indices[rest.trailing_zeros() as usize];
            let same = lanes(rest).filter(|l| indices[*l] == chosen).fold(0, |mask, lane| mask | 1 << lane);
            let Some(target) = targets.get(chosen as usize) else {
                self.find_first(warp, same, Kind::OutOfBounds, "the index of the branch exceeds its list of targets");
                self.launch.aborted = true;
                return Flow::Done;
            };
            rest &= !same;
            if rest != 0 {
                let stack = warp.fragment().stack.clone();
                warp.fragments.push(Fragment { pc: *target, mask: same, stack, state: State::Ready });
                warp.fragment().mask = rest;
                self.part(warp, same, rest);
            } else {
                warp.fragment().pc = *target;
            }
        }
        Flow::Done
    }

    fn ret(&mut self, warp: &mut Warp, exec: u32) -> Flow {
        if warp.fragment().stack.is_empty() {
            return self.exit(warp, exec);
        }
        self.split(warp, exec);
        let fragment = warp.fragment();
        fragment.pc = fragment.stack.pop().expect("the stack was just checked");
        Flow::Done
    }

    fn exit(&mut self, warp: &mut Warp, exec: u32) -> Flow {
        self.split(warp, exec);
        warp.live &= !exec;
        let at = warp.current;
        warp.fragments.swap_remove(at);
        warp.current = 0;
        self.n_live -= exec.count_ones();
        self.complete_barriers();
        Flow::Done
    }

    /// Whether the lanes that take part are all here. If not, the fragment waits for them, until it is forced to go on. Returns
    /// the lanes that are missing: at other instructions, or exited.
    pub(super) fn converge(&mut self, warp: &mut Warp, wanted: u32) -> Option<u32> {
        let absent = wanted & !warp.fragment().mask;
        if absent & warp.live != 0 && warp.fragment().state != State::Forced {
            warp.fragment().state = State::Converging;
            return None;
        }
        Some(absent & warp.started)
    }

    /// Reports the violation of a lane, if there is one.
    pub(super) fn note(&mut self, warp: &Warp, lane: usize, violation: Option<Violation>) {
        if let Some(violation) = violation {
            self.find(warp, lane, violation);
        }
    }
}
