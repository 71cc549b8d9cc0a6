//! Exchange of values between the lanes of a warp.

use super::atomic::apply;
use super::block::Block;
use super::flow::Flow;
use super::warp::Warp;
use crate::alu::{Lanes, WARP};
use crate::memory::clock::lanes;
use crate::program::{Op, Reg, ShuffleMode, Vote};
use crate::report::{Kind, Violation};
use crate::types::mask_of;

impl Block<'_, '_> {
    pub(super) fn collective(&mut self, warp: &mut Warp, op: &Op, exec: u32) -> Flow {
        let mask = match op {
            Op::ActiveMask { dst } => {
                warp.set(*dst, &[u64::from(exec); WARP], exec);
                return Flow::Next;
            }
            Op::Shuffle { mask, .. }
            | Op::Vote { mask, .. }
            | Op::Match { mask, .. }
            | Op::Redux { mask, .. }
            | Op::Elect { mask, .. }
            | Op::WarpBarrier { mask } => *mask,
            _ => return Flow::Next,
        };
        let Some(exec) = self.members(warp, mask, exec) else { return Flow::Done };
        match op {
            Op::Shuffle { mode, dst, valid, src, by, clamp, .. } => {
                self.shuffle(warp, (*mode, *dst, *valid), [*src, *by, *clamp], exec);
            }
            Op::Vote { vote, dst, dst_pred, src, .. } => {
                let holds = warp.pred(*src) & exec;
                let answer = match vote {
                    Vote::All => holds == exec,
                    Vote::Any => holds != 0,
                    Vote::Uniform => holds == exec || holds == 0,
                    Vote::Ballot => false,
                };
                warp.set(*dst, &[u64::from(holds); WARP], exec);
                warp.set_pred(*dst_pred, if answer { u32::MAX } else { 0 }, exec);
            }
            Op::Match { all, dst, valid, src, bytes, .. } => {
                let values = warp.reg(*src).map(|v| v & mask_of(*bytes));
                let (out, holds) = matching(&values, exec, *all);
                warp.set(*dst, &out, exec);
                warp.set_pred(*valid, holds, exec);
            }
            Op::Redux { op, ty, dst, src, .. } => {
                let values = *warp.reg(*src);
                let total = lanes(exec).map(|lane| values[lane]).reduce(|a, b| apply(*op, *ty, a, b, 0));
                warp.set(*dst, &[total.unwrap_or(0) & mask_of(ty.bytes()); WARP], exec);
            }
            Op::Elect { dst, pred, .. } => {
                let leader = exec.trailing_zeros();
                warp.set(*dst, &[u64::from(leader); WARP], exec);
                warp.set_pred(*pred, 1 << leader, exec);
            }
            _ => {}
        }
        Flow::Next
    }

    /// The lanes that take part, once all that the mask names are here. Wrong masks are reported.
    fn members(&mut self, warp: &mut Warp, mask: Reg, exec: u32) -> Option<u32> {
        let first = exec.trailing_zeros() as usize;
        let mask = warp.reg(mask)[first] as u32;
        let missing = self.converge(warp, mask)?;
        if missing != 0 {
            self.find_first(warp, exec, Kind::LaneMask, "lanes that the mask names are elsewhere or have exited");
        } else if mask & warp.fragment().mask & !exec != 0 {
            self.find_first(
                warp,
                exec,
                Kind::LaneMask,
                "lanes that the mask names skip the instruction by their predicate",
            );
        } else if exec & !mask != 0 {
            self.find_first(warp, exec & !mask, Kind::LaneMask, "the mask does not name the lane that executes it");
        }
        Some(exec)
    }

    fn shuffle(
        &mut self,
        warp: &mut Warp,
        (mode, dst, valid): (ShuffleMode, Reg, u32),
        [src, by, clamp]: [Reg; 3],
        exec: u32,
    ) {
        let (values, by, clamp) = (*warp.reg(src), *warp.reg(by), *warp.reg(clamp));
        let mut out: Lanes = values.map(|v| v & 0xffff_ffff);
        let mut in_range = 0u32;
        let mut from_absent = None;
        for lane in lanes(exec) {
            let (by, clamp) = ((by[lane] & 31) as i32, clamp[lane]);
            let segment = (clamp >> 8 & 31) as i32;
            let (clamp, lane_i) = ((clamp & 31) as i32, lane as i32);
            let highest = (lane_i & segment) | (clamp & !segment);
            let lowest = lane_i & segment;
            let (from, ok) = match mode {
                ShuffleMode::Up => (lane_i - by, lane_i - by >= highest),
                ShuffleMode::Down => (lane_i + by, lane_i + by <= highest),
                ShuffleMode::Butterfly => (lane_i ^ by, (lane_i ^ by) <= highest),
                ShuffleMode::Index => (lowest | (by & !segment), (lowest | (by & !segment)) <= highest),
            };
            if !ok {
                continue;
            }
            in_range |= 1 << lane;
            let from = from as usize & (WARP - 1);
            out[lane] = values[from] & 0xffff_ffff;
            if exec >> from & 1 == 0 {
                from_absent.get_or_insert(lane);
            }
        }
        if let Some(lane) = from_absent {
            let note = "the value comes from a lane that does not take part";
            self.find(warp, lane, Violation::new(Kind::LaneMask, note));
        }
        warp.set(dst, &out, exec);
        warp.set_pred(valid, in_range, exec);
    }
}

/// For each lane, the lanes with the same value; or all lanes if all have it.
fn matching(values: &Lanes, exec: u32, all: bool) -> (Lanes, u32) {
    let same = |lane: usize| lanes(exec).filter(|l| values[*l] == values[lane]).fold(0u32, |mask, l| mask | 1 << l);
    if !all {
        return (std::array::from_fn(|lane| u64::from(same(lane))), u32::MAX);
    }
    let first = exec.trailing_zeros() as usize & (WARP - 1);
    let holds = same(first) == exec;
    ([if holds { u64::from(exec) } else { 0 }; WARP], if holds { u32::MAX } else { 0 })
}
