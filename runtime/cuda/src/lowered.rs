//! A lowered program: the commands of its instructions, ready to be enqueued.
//!
//! Commands between collectives form *segments*. A segment runs eagerly once, because libraries prepare themselves in their first
//! call, which a capture does not allow; then it is captured, and from then on launched as a graph.

use crate::command::{Command, Launch, Ready};
use crate::cudnn::Packing;
use crate::error::CudaError;
use crate::gpu::{Gpu, Stream};
use crate::graph::Graph;
use crate::kernels::CompileError;
use crate::lower::{Commands, Engines, is_reproducible, lower_all};
use crate::product::Choice;
use crate::shared::Shared;
use phalanx_strategies::compile::{Compiled, Identity};
use phalanx_strategies::passes::memory::{Layout, Region};
use phalanx_strategies::program::{Instr, Op, Program, ValueId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Segments of fewer commands are enqueued one by one: the launch of a graph costs about as much.
const GRAPH_COMMANDS_MIN: usize = 4;
/// Most instructions of a segment: a rank that leaves its world waits for the segments that it has launched.
const GRAPH_INSTRS_MAX: usize = 128;
/// Commands, and their estimated time, between two marks of the GPU's progress. A mark costs the GPU one or two microseconds,
/// and one that comes late looks like a hang.
const MARK_COMMANDS: usize = 16;
const MARK_TIME: Duration = Duration::from_millis(20);

/// The regions that outlast a step.
pub(crate) const LASTING: [Region; 3] = [Region::Parameters, Region::OptimizerState, Region::Offloaded];

#[derive(Debug)]
pub(crate) struct Lowered {
    identity: Identity,
    program: Program,
    layout: Layout,
    /// The batches for which it was lowered.
    packing: Packing,
    /// First command of each instruction, and the number of commands.
    starts: Vec<usize>,
    is_merged: Vec<bool>,
    /// The marks of the GPU's progress, before their instructions.
    marks: Vec<Option<Ready>>,
    /// Which instructions write state that outlasts a step.
    changes_state: Vec<bool>,
    commands: Vec<Ready>,
    /// In the order of their instructions.
    segments: Vec<Segment>,
}

/// Consecutive instructions of one phase without collectives.
#[derive(Debug)]
struct Segment {
    instrs: Range<usize>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Never run.
    New,
    /// Run once.
    Prepared,
    Captured(Graph),
    /// Not a graph: the driver has refused it.
    Refused,
}

impl Lowered {
    /// Lowers a program for batches of a packing. Its values are at `place`, its scratch at `scratch`; `engines` tells what
    /// the GPU does for an instruction. With `may_run`, products may be run to find their fastest algorithms.
    ///
    /// # Errors
    /// When a kernel cannot be compiled, or the library refuses a product.
    ///
    /// # Safety
    /// The memory of all values is this GPU's. With `may_run`, nothing needs the contents of values that live within a step, other than
    /// inputs.
    pub(crate) unsafe fn new(
        shared: &Shared,
        c: &Compiled,
        packing: Packing,
        place: impl Fn(ValueId) -> u64,
        scratch: u64,
        engines: impl Fn(&Instr) -> Engines,
        may_run: bool,
    ) -> Result<Lowered, CompileError> {
        let Commands { starts, is_merged, commands } = lower_all(c, place, scratch, engines);
        let choice = match choice_of(&c.program) {
            Choice::Known if may_run => Choice::Fastest,
            choice => choice,
        };
        // SAFETY: the caller's contract; products write neither inputs nor what outlasts a step.
        let ready = |command| unsafe { shared.ready(command, choice) };
        let commands = commands.into_iter().map(ready).collect::<Result<_, _>>()?;
        let segment = |instrs| Segment { instrs, state: State::New };
        let segments = segments(c).into_iter().filter(|s| starts[s.end] - starts[s.start] >= GRAPH_COMMANDS_MIN);
        let segments = segments.map(segment).collect();
        let (program, layout) = (c.program.clone(), c.layout.clone());
        let outlasts = |v: &ValueId| layout.locations[v.0 as usize].is_some_and(|at| LASTING.contains(&at.region));
        let changes_state = program.instrs.iter().map(|instr| instr.writes.iter().any(outlasts)).collect();
        let identity = c.identity.clone();
        let times = program.instrs.iter().map(|instr| shared.gpu.rates.time_of(&program, instr));
        let (is_marked, between_marks) = marks(&starts, times);
        shared.gpu.expect(between_marks);
        let mark = |(i, is_marked): (u32, bool)| {
            // SAFETY: the word is the GPU's.
            is_marked
                .then(|| unsafe { shared.ready(Command::Launch(Launch::of_place(&shared.gpu, i)), Choice::First) })
                .transpose()
        };
        let marks = (0..).zip(is_marked).map(mark).collect::<Result<_, _>>()?;
        Ok(Lowered { identity, program, layout, packing, starts, is_merged, marks, changes_state, commands, segments })
    }

    /// Which of these programs a compiled program is, for batches of a packing. One that was compiled again is the one that it equals.
    pub(crate) fn find(all: &mut [Lowered], c: &Compiled, packing: Packing) -> Option<usize> {
        let same = all.iter().position(|lowered| lowered.packing == packing && lowered.identity == c.identity);
        same.or_else(|| {
            let is_equal = |lowered: &Lowered| {
                lowered.packing == packing && lowered.program == c.program && lowered.layout == c.layout
            };
            let equal = all.iter().position(is_equal)?;
            all[equal].identity = c.identity.clone();
            Some(equal)
        })
    }

    /// # Panics
    /// If the range cuts through instructions whose commands are merged.
    pub(crate) fn check(&self, part: &Range<usize>) {
        let cuts = |i: usize| !part.is_empty() && self.is_merged.get(i).is_some_and(|is_merged| *is_merged);
        assert!(!cuts(part.start) && !cuts(part.end), "the range {part:?} cuts through merged instructions");
    }

    /// The segment that begins at an instruction and ends before or at `end`.
    pub(crate) fn segment(&self, first: usize, end: usize) -> Option<usize> {
        let found = self.segments.binary_search_by_key(&first, |segment| segment.instrs.start).ok();
        found.filter(|i| self.segments[*i].instrs.end <= end)
    }

    /// The instructions of a segment.
    pub(crate) fn instrs(&self, segment: usize) -> Range<usize> {
        self.segments[segment].instrs.clone()
    }

    /// Whether one of these instructions changes state that outlasts a step.
    pub(crate) fn changes_state(&self, instrs: Range<usize>) -> bool {
        self.changes_state[instrs].contains(&true)
    }

    /// Whether the GPU marks its progress before an instruction.
    pub(crate) fn is_marked(&self, instr: usize) -> bool {
        self.marks[instr].is_some()
    }

    /// Segments that run as graphs.
    #[cfg(test)]
    pub(crate) fn n_graphs(&self) -> usize {
        self.segments.iter().filter(|segment| matches!(segment.state, State::Captured(_))).count()
    }

    /// Enqueues the commands of instructions one by one, with marks of progress between them.
    ///
    /// # Errors
    /// When a library or the GPU fails.
    ///
    /// # Safety
    /// The commands' memory is this GPU's, and only work of the stream accesses it.
    pub(crate) unsafe fn enqueue(
        &self,
        shared: &Shared,
        instrs: Range<usize>,
        stream: Stream,
    ) -> Result<(), CudaError> {
        for i in instrs.clone() {
            let mark = self.marks[i].as_ref().filter(|_| i > instrs.start);
            let commands = &self.commands[self.starts[i]..self.starts[i + 1]];
            // SAFETY: the caller's contract.
            mark.into_iter().chain(commands).try_for_each(|command| unsafe { shared.enqueue(command, stream) })?;
        }
        Ok(())
    }

    /// Enqueues a segment on the compute stream: as a graph, from its second run on. `capture` is a stream without work.
    ///
    /// # Errors
    /// When a library or the GPU fails. A refused capture is no error: the segment stays eager.
    ///
    /// # Safety
    /// As [`Lowered::enqueue`].
    pub(crate) unsafe fn run_segment(
        &mut self,
        shared: &Shared,
        gpu: &Arc<Gpu>,
        segment: usize,
        capture: Stream,
    ) -> Result<(), CudaError> {
        let instrs = self.instrs(segment);
        if let State::Prepared = self.segments[segment].state {
            // SAFETY: the stream of a capture runs nothing; the graph runs on the compute stream.
            let captured =
                Graph::capture(gpu, capture, |stream| unsafe { self.enqueue(shared, instrs.clone(), stream) });
            self.segments[segment].state = captured.map_or_else(|error| self.refuse(&error), State::Captured);
        }
        let state = &mut self.segments[segment].state;
        if let State::New = state {
            *state = State::Prepared;
        }
        match state {
            // SAFETY: the caller's contract.
            State::Captured(graph) => unsafe { graph.launch(gpu.compute) },
            // SAFETY: the caller's contract.
            _ => unsafe { self.enqueue(shared, instrs, gpu.compute) },
        }
    }

    /// Warns once that the program runs without graphs.
    fn refuse(&self, error: &CudaError) -> State {
        if !self.segments.iter().any(|segment| matches!(segment.state, State::Refused)) {
            tracing::warn!(%error, "the program runs without CUDA graphs, which costs some time for each launch");
        }
        State::Refused
    }
}

/// Whether sums of products may have any order, so that each process may choose the fastest algorithms: the program is not
/// reproducible, and no other rank computes the same product and relies on its bits, as tensor-parallel ranks do.
fn has_free_order(program: &Program) -> bool {
    !is_reproducible(program) && program.mesh_rank.mesh.tp == 1
}

/// Which algorithms the products of a program have, without running any.
pub(crate) fn choice_of(program: &Program) -> Choice {
    if has_free_order(program) { Choice::Known } else { Choice::First }
}

/// Before which instructions the GPU marks its progress, and the longest estimated time between two marks. `starts` are the first
/// commands of instructions, `times` their estimated durations.
fn marks(starts: &[usize], times: impl Iterator<Item = Duration>) -> (Vec<bool>, Duration) {
    let (mut n_commands, mut since, mut longest) = (MARK_COMMANDS, Duration::ZERO, Duration::ZERO);
    let mark = |(i, time): (usize, Duration)| {
        let own = starts[i + 1] - starts[i];
        let is_marked = own > 0 && (n_commands + own > MARK_COMMANDS || since + time > MARK_TIME);
        (n_commands, since) = if is_marked { (own, time) } else { (n_commands + own, since + time) };
        longest = longest.max(since);
        is_marked
    };
    (times.enumerate().map(mark).collect(), longest)
}

/// The longest runs of instructions that are commands on the GPU alone, within a phase.
fn segments(c: &Compiled) -> Vec<Range<usize>> {
    let instrs = &c.program.instrs;
    let is_command = |i: usize| !matches!(instrs[i].op, Op::Start(_) | Op::Await(_) | Op::Opaque(_));
    let mut segments: Vec<Range<usize>> = Vec::new();
    for i in (0..instrs.len()).filter(|i| is_command(*i)) {
        let is_boundary = i == c.phases.apply || i == c.phases.gather;
        match segments.last_mut() {
            Some(last) if last.end == i && last.len() < GRAPH_INSTRS_MAX && !is_boundary => last.end = i + 1,
            _ => segments.push(i..i + 1),
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::mesh::{Mesh, MeshRank};
    use phalanx_strategies::program::op;
    use phalanx_strategies::program::{DType, Kind, Phase, Site};

    #[test]
    fn marks_are_few_commands_and_little_time_apart() {
        let n_commands = [1, 15, 1, 0, 0, 2, 40, 1, 1];
        let starts: Vec<usize> = (0..=n_commands.len()).map(|i| n_commands[..i].iter().sum()).collect();
        let ms = Duration::from_millis;
        let times = [0, 1, 0, 0, 0, 300, 1, 15, 10].map(ms);

        let (is_marked, longest) = marks(&starts, times.into_iter());

        assert_eq!(is_marked, [true, false, true, false, false, true, true, true, true]);
        assert_eq!(longest, ms(300));
    }

    #[test]
    fn order_of_sums_is_free_unless_a_program_is_reproducible_or_tensor_parallel() {
        let program = |mesh, is_tree: bool| {
            let mut p = Program { mesh_rank: MeshRank { mesh, rank: 0 }, ..Program::default() };
            let x = p.add_value("x", &[2, 8], DType::F32, Kind::Activation);
            let op = if is_tree { Op::TreeSum(op::TreeSum { n_leaves: 2, n_ranks: 1 }) } else { Op::Cast(op::Cast) };
            p.push(op, vec![x], vec![x], Site { phase: Phase::Backward, block: None, microbatch: 0 });
            p
        };
        let meshes = [Mesh::ONE, Mesh { dp_shard: 2, ..Mesh::ONE }, Mesh { tp: 2, ..Mesh::ONE }];

        let free = meshes.map(|mesh| [false, true].map(|is_tree| has_free_order(&program(mesh, is_tree))));

        assert_eq!(free, [[true, false], [true, false], [false, false]]);
    }
}
