//! Where a step turns: everything before the first update leaves weights and optimizer state as they are, so that a step
//! can be given up until all ranks have said that they have what its update needs.
//!
//! The pass moves whatever does not depend on an update in front of all updates, and collectives over updated weights
//! behind all of them. The order within each of the three parts stays.
//!
//! Source: Gray and Lamport 2006, Consensus on Transaction Commit, §3 (two-phase commit: prepare, then commit).

use crate::program::{Instr, Op, Program, ValueId};
use std::collections::BTreeSet;
use std::ops::Range;

/// The three parts of a step, as ranges of its instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// First instruction that updates state.
    pub update: usize,
    /// First instruction behind the updates.
    pub spread: usize,
    /// Number of instructions.
    pub end: usize,
}

impl Turn {
    /// Computes what the update needs; changes no state.
    pub const fn prepare(&self) -> Range<usize> {
        0..self.update
    }

    /// Updates this rank's part of the state, without any other rank.
    pub const fn update(&self) -> Range<usize> {
        self.update..self.spread
    }

    /// Gives each rank the updated weights that others keep for it. Repeated, it changes nothing.
    pub const fn spread(&self) -> Range<usize> {
        self.spread..self.end
    }
}

/// Puts the instructions into the three parts.
pub fn commit(program: &mut Program) -> Turn {
    let mut updated: BTreeSet<ValueId> = BTreeSet::new();
    let (mut prepare, mut update, mut spread) = (Vec::new(), Vec::new(), Vec::new());
    for instr in std::mem::take(&mut program.instrs) {
        let depends = instr.reads.iter().any(|v| updated.contains(v));
        if depends && matches!(instr.op, Op::Start(_) | Op::Await(_)) {
            spread.push(instr);
        } else if depends || writes_state(program, &instr) {
            updated.extend(&instr.writes);
            update.push(instr);
        } else {
            prepare.push(instr);
        }
    }
    let turn = Turn {
        update: prepare.len(),
        spread: prepare.len() + update.len(),
        end: prepare.len() + update.len() + spread.len(),
    };
    program.instrs = prepare.into_iter().chain(update).chain(spread).collect();
    turn
}

fn writes_state(program: &Program, instr: &Instr) -> bool {
    instr.writes.iter().any(|v| program.value(*v).kind.is_state())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Group};
    use crate::program::{Collective, CollectiveKind, DType, Kind, Phase, Site};

    #[test]
    fn only_updates_lie_between_what_they_need_and_what_spreads_them() {
        let mut program = Program::default();
        let weight = program.add_value("weight", &[4], DType::F32, Kind::Parameter);
        let other = program.add_value("other", &[4], DType::F32, Kind::Parameter);
        let grad = program.add_value("grad", &[4], DType::F32, Kind::Gradient);
        let out = program.add_value("out", &[4], DType::F32, Kind::Output);
        let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
        let c = Collective::new(CollectiveKind::AllGather, Group::over(&[Axis::DpShard]));
        program.push(Op::Add, vec![weight, grad], vec![weight], site);
        program.push(Op::Start(c), vec![weight], vec![weight], site);
        program.push(Op::Await(c), vec![weight], vec![], site);
        program.push(Op::Add, vec![grad, grad], vec![out], site);
        program.push(Op::Add, vec![other, out], vec![other], site);

        let turn = commit(&mut program);

        let part =
            |range: Range<usize>| -> Vec<&Vec<ValueId>> { program.instrs[range].iter().map(|i| &i.writes).collect() };
        assert_eq!(part(turn.prepare()), [&vec![out]]);
        assert_eq!(part(turn.update()), [&vec![weight], &vec![other]]);
        assert_eq!(part(turn.spread()), [&vec![weight], &vec![]]);
    }
}
