//! The commands of a whole program: consecutive instructions that do not depend on each other share launches.
//!
//! Launches that cover runs of elements (`Launch::has_runs`) are merged: updates of the parameters, sums of squares of the
//! gradients, and conversions. A launch of many runs has the bits of a launch for each, because a run has the same blocks in both. Times of merged
//! instructions count for the first one.

use super::{Engines, Lowering, lower};
use crate::command::{Buffer, Command, Launch};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, ValueId};
use std::ops::Range;

/// The commands of all instructions.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    /// First command of each instruction, and the number of commands.
    pub(crate) starts: Vec<usize>,
    /// Whether an instruction's commands are with those of an earlier one, which a run must include.
    pub(crate) is_merged: Vec<bool>,
    pub(crate) commands: Vec<Command>,
}

/// Consecutive instructions that do not depend on each other, and have launches of runs only.
#[derive(Debug, Default)]
struct Group {
    launches: Vec<Launch>,
    n_instrs: usize,
    /// Bytes of scratch that they use; each has its own.
    scratch_taken: usize,
    read: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

/// Lowers all instructions; `place` is the address of a value, `scratch` that of the scratch, `engines` how an instruction's
/// attention runs. Nothing is merged across phases.
pub(crate) fn lower_all(
    c: &Compiled,
    place: impl Fn(ValueId) -> u64,
    scratch: u64,
    engines: impl Fn(&Instr) -> Engines,
) -> Commands {
    let scratch_bytes = c.layout.scratch.1;
    let (mut all, mut group) = (Commands::default(), Group::default());
    for (i, instr) in c.program.instrs.iter().enumerate() {
        if i == c.phases.apply || i == c.phases.gather {
            all.push_group(&mut group);
        }
        let engines = engines(instr);
        let next = lower(&c.program, instr, &place, scratch + group.scratch_taken as u64, engines);
        if group.accepts(&next, scratch_bytes) {
            group.join(next);
            continue;
        }
        all.push_group(&mut group);
        // Again, because now it has the whole scratch.
        let alone = lower(&c.program, instr, &place, scratch, engines);
        if group.accepts(&alone, scratch_bytes) {
            group.join(alone);
            continue;
        }
        let (commands, taken) = alone.finish();
        assert!(taken <= scratch_bytes, "{} takes {taken} bytes of scratch of {scratch_bytes}", instr.op.name());
        all.push(commands);
    }
    all.push_group(&mut group);
    all.starts.push(all.commands.len());
    all
}

impl Commands {
    fn push(&mut self, commands: Vec<Command>) {
        self.starts.push(self.commands.len());
        self.is_merged.push(false);
        self.commands.extend(commands);
    }

    /// Appends a group: its launches belong to its first instruction.
    fn push_group(&mut self, group: &mut Group) {
        let Group { launches, n_instrs, .. } = std::mem::take(group);
        for i in 0..n_instrs {
            self.starts.push(self.commands.len() + if i == 0 { 0 } else { launches.len() });
            self.is_merged.push(i > 0);
        }
        self.commands.extend(launches.into_iter().map(Command::Launch));
    }
}

impl Group {
    /// Whether an instruction's launches may run together with those of the group, in any order.
    fn accepts(&self, next: &Lowering, scratch_bytes: usize) -> bool {
        let is_launch_of_runs = |command: &Command| matches!(command, Command::Launch(launch) if launch.has_runs());
        let meets = |buffers: &[Buffer], ranges: &[Range<u64>]| {
            buffers
                .iter()
                .map(bytes_of)
                .any(|own| ranges.iter().any(|other| own.start < other.end && other.start < own.end))
        };
        !next.commands.is_empty()
            && next.commands.iter().all(is_launch_of_runs)
            && self.scratch_taken + next.taken_bytes() <= scratch_bytes
            && !meets(&next.reads, &self.written)
            && !meets(&next.writes, &self.written)
            && !meets(&next.writes, &self.read)
    }

    fn join(&mut self, next: Lowering) {
        self.n_instrs += 1;
        self.scratch_taken += next.taken_bytes();
        self.read.extend(next.reads.iter().map(bytes_of));
        self.written.extend(next.writes.iter().map(bytes_of));
        // A launch stays behind the earlier ones of its instruction.
        let mut first = 0;
        for command in next.commands {
            let Command::Launch(launch) = command else { unreachable!("only launches are accepted") };
            match self.launches[first..].iter_mut().position(|earlier| earlier.absorb(&launch)) {
                Some(i) => first += i + 1,
                None => {
                    self.launches.push(launch);
                    first = self.launches.len();
                }
            }
        }
    }
}

fn bytes_of(buffer: &Buffer) -> Range<u64> {
    buffer.address..buffer.address + buffer.bytes() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::step::{compiled, llama_1b};
    use phalanx_strategies::mesh::MeshRank;
    use phalanx_strategies::model::BatchShape;
    use phalanx_strategies::optimizer::{AdamW, Lion, OptimizerSpec, Sgd};
    use phalanx_strategies::passes::commit::StepPhases;
    use phalanx_strategies::passes::memory::memory;
    use phalanx_strategies::passes::precision::Precision;
    use phalanx_strategies::program::op;
    use phalanx_strategies::program::{DType, Kind, Op, Phase, Program, Site};
    use phalanx_strategies::target::Nowhere;

    /// The step of Llama 3.2 1B.
    fn step_of_1b(optimizer: OptimizerSpec) -> Compiled {
        let batch = BatchShape { n_rows: 2, seq_len: 4096 };
        compiled(&llama_1b(), batch, MeshRank::default(), Precision::Bf16, optimizer)
    }

    /// An address for each value, as in one allocation for each region.
    fn place(c: &Compiled) -> impl Fn(ValueId) -> u64 {
        |v| {
            let location = c.layout.locations[v.0 as usize].unwrap();
            (location.region as u64 + 1) << 44 | location.offset as u64
        }
    }

    const SCRATCH: u64 = 1 << 50;

    /// Launches of an instruction's kernels, merged and one by one; also instructions of the kind.
    fn launches(c: &Compiled, is_it: fn(&Op) -> bool) -> (usize, usize, usize) {
        let all = lower_all(c, place(c), SCRATCH, |_| Engines::WIDE);
        let of = |i: usize| all.starts[i + 1] - all.starts[i];
        let instrs = || (0..c.program.instrs.len()).filter(|i| is_it(&c.program.instrs[*i].op));
        let alone =
            |i: usize| lower(&c.program, &c.program.instrs[i], place(c), SCRATCH, Engines::WIDE).finish().0.len();
        (instrs().map(of).sum(), instrs().map(alone).sum(), instrs().count())
    }

    #[test]
    fn updates_of_a_1b_model_are_one_launch_for_each_weight_decay() {
        let adamw = OptimizerSpec::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
        let sgd = OptimizerSpec::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 });
        let lion = OptimizerSpec::Lion(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 });
        for (rule, n_launches) in [(adamw, 2), (sgd, 2), (lion, 2)] {
            let c = step_of_1b(rule);

            let (merged, alone, n_instrs) = launches(&c, |op| matches!(op, Op::Update(_)));

            assert_eq!((merged, alone, n_instrs), (n_launches, 98, 98), "{}", rule.name());
        }
    }

    #[test]
    fn sums_of_squares_of_a_1b_model_are_one_launch_for_each_stage() {
        let c = step_of_1b(OptimizerSpec::AdamW(AdamW::default()));

        let (merged, alone, n_instrs) = launches(&c, |op| matches!(op, Op::SumSquares(_)));

        assert_eq!((merged, alone, n_instrs), (2, 163, 98));
    }

    #[test]
    fn conversions_side_by_side_share_launches() {
        let mut p = Program::default();
        let site = Site { phase: Phase::Forward, block: None, microbatch: 0 };
        let value = |p: &mut Program, dtype, kind| p.add_value("", &[8, 8], dtype, kind);
        let dtypes = (0..40).map(|i| if i < 35 { DType::Bf16 } else { DType::F16 });
        let converted: Vec<ValueId> = dtypes.map(|dtype| value(&mut p, dtype, Kind::Activation)).collect();
        for y in &converted {
            let x = value(&mut p, DType::F32, Kind::Parameter);
            p.push(Op::Cast(op::Cast), vec![x], vec![*y], site);
        }
        let z = value(&mut p, DType::F32, Kind::Output);
        converted.iter().for_each(|y| p.push(Op::Add(op::Add), vec![*y, *y], vec![z], site));
        let layout = memory(&p, &Nowhere::default());
        let end = p.instrs.len();
        let c = Compiled::new(p, layout, StepPhases { apply: end, gather: end, end });

        let (merged, alone, n_instrs) = launches(&c, |op| matches!(op, Op::Cast(_)));

        // A launch has room for 32 conversions of one kind.
        assert_eq!((merged, alone, n_instrs), (3, 40, 40));
    }

    #[test]
    fn merged_instructions_keep_their_runs_and_cross_no_phase() {
        let c = step_of_1b(OptimizerSpec::AdamW(AdamW::default()));

        let all = lower_all(&c, place(&c), SCRATCH, |_| Engines::WIDE);

        assert_eq!((all.starts.len(), all.is_merged.len()), (c.program.instrs.len() + 1, c.program.instrs.len()));
        assert!(!all.is_merged[c.phases.apply] && all.starts.is_sorted());
        let of_commands = |commands: &[Command]| commands.iter().map(blocks).sum::<usize>();
        let alone = |instr| of_commands(&lower(&c.program, instr, place(&c), SCRATCH, Engines::WIDE).finish().0);
        assert_eq!(of_commands(&all.commands), c.program.instrs.iter().map(alone).sum::<usize>());
    }

    #[test]
    fn instruction_that_depends_on_another_one_runs_after_it() {
        let mut c = step_of_1b(OptimizerSpec::AdamW(AdamW::default()));
        let first = c.phases.apply;
        let again = c.program.instrs[first].clone();
        c.program.instrs.insert(first + 1, again);
        (c.phases.gather, c.phases.end) = (c.phases.gather + 1, c.phases.end + 1);

        let all = lower_all(&c, place(&c), SCRATCH, |_| Engines::WIDE);

        assert_eq!(all.is_merged[first..first + 3], [false, false, true]);
    }

    /// Blocks of a launch of runs.
    fn blocks(command: &Command) -> usize {
        match command {
            Command::Launch(launch) if launch.has_runs() => launch.grid[0] as usize,
            _ => 0,
        }
    }
}
