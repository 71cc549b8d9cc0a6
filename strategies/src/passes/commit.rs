//! The phases of a step: everything before the first update leaves weights and optimizer state unchanged, so a step can
//! be discarded until all ranks have voted for it.
//!
//! The pass moves instructions that do not depend on an update before all updates, and collectives over updated weights
//! after all updates. The sequence within each phase is kept.
//!
//! Source: Gray and Lamport 2006, Consensus on Transaction Commit, §3 (two-phase commit: prepare, then commit).

use crate::program::{Instr, Kind, Op, Program, ValueId};
use std::collections::BTreeSet;
use std::ops::Range;

/// The three phases of a step, as ranges of its instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepPhases {
    /// First instruction of the apply phase.
    pub apply: usize,
    /// First instruction of the gather phase.
    pub gather: usize,
    /// Number of instructions.
    pub end: usize,
}

impl StepPhases {
    /// The compute phase: everything the update needs; changes no state.
    pub const fn compute(&self) -> Range<usize> {
        0..self.apply
    }

    /// The apply phase: updates this rank's part of the state, without communication.
    pub const fn apply(&self) -> Range<usize> {
        self.apply..self.gather
    }

    /// The gather phase: distributes the updated weights. Idempotent.
    pub const fn gather(&self) -> Range<usize> {
        self.gather..self.end
    }
}

/// Splits the instructions into the three phases.
pub fn commit(program: &mut Program) -> StepPhases {
    let mut updated: BTreeSet<ValueId> = BTreeSet::new();
    let (mut compute, mut apply, mut gather) = (Vec::new(), Vec::new(), Vec::new());
    for instr in std::mem::take(&mut program.instrs) {
        let depends = instr.reads.iter().any(|v| updated.contains(&program.storage(*v)));
        if depends && matches!(instr.op, Op::Start(_) | Op::Await(_)) {
            gather.push(instr);
        } else if depends || writes_state(program, &instr) {
            updated.extend(&instr.writes);
            apply.push(instr);
        } else {
            compute.push(instr);
        }
    }
    let phases = StepPhases {
        apply: compute.len(),
        gather: compute.len() + apply.len(),
        end: compute.len() + apply.len() + gather.len(),
    };
    program.instrs = compute.into_iter().chain(apply).chain(gather).collect();
    phases
}

fn writes_state(program: &Program, instr: &Instr) -> bool {
    // A step without updates may leave a cache in any state: a token is written before it is read.
    let is_committed = |kind: Kind| kind.is_state() && kind != Kind::Cache;
    instr.writes.iter().any(|v| is_committed(program.value(*v).kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Group};
    use crate::program::op;
    use crate::program::{Collective, CollectiveKind, DType, Phase, Site};

    #[test]
    fn apply_phase_contains_only_updates() {
        let mut program = Program::default();
        let weight = program.add_value("weight", &[4], DType::F32, Kind::Parameter);
        let other = program.add_value("other", &[4], DType::F32, Kind::Parameter);
        let grad = program.add_value("grad", &[4], DType::F32, Kind::Gradient);
        let out = program.add_value("out", &[4], DType::F32, Kind::Output);
        let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
        let c = Collective::new(CollectiveKind::AllGather, Group::over(&[Axis::DpShard]));
        program.push(Op::Add(op::Add), vec![weight, grad], vec![weight], site);
        program.push(Op::Start(op::Start(c)), vec![weight], vec![weight], site);
        program.push(Op::Await(op::Await(c)), vec![weight], vec![], site);
        program.push(Op::Add(op::Add), vec![grad, grad], vec![out], site);
        program.push(Op::Add(op::Add), vec![other, out], vec![other], site);

        let phases = commit(&mut program);

        let part =
            |range: Range<usize>| -> Vec<&Vec<ValueId>> { program.instrs[range].iter().map(|i| &i.writes).collect() };
        assert_eq!(part(phases.compute()), [&vec![out]]);
        assert_eq!(part(phases.apply()), [&vec![weight], &vec![other]]);
        assert_eq!(part(phases.gather()), [&vec![weight], &vec![]]);
    }
}
