//! Combines the programs of ranks into a world: traces of what each rank computes, starts and awaits.
//!
//! Ranks are compiled one by one, or one for each pipeline stage: ranks of a stage hold different parts of the same
//! tensors, and collectives are described by whole tensors, so they are the same. Ranks of a stage differ in the positions
//! of awaits, the lengths of uneven parts, and the sums of key/value heads that several tensor-parallel ranks hold.

use crate::mesh::{Axis, Coord, Group, Mesh, MeshRank};
use crate::program::{Collective, CollectiveKind, Instr, Op, Phase, Program, op};
use crate::world::{
    self, GroupId, GroupSlot, Kind, Post, Rank, Span, Step, Tensor, TraceId, What, WorldError, WorldTraces,
};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The steps of one rank, and the kinds of groups that they use.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Its steps; [`GroupSlot`] counts `groups`.
    pub steps: Vec<Step>,
    /// Kinds of groups, in the order of their first use.
    pub groups: Vec<Group>,
}

/// Which ranks are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// Every rank.
    All,
    /// The last rank of each pipeline stage, which represents the others: where a whole does not divide evenly, the last
    /// part is the largest.
    OfEachStage,
    /// The ranks of each pipeline stage that are first or last on every other axis; the first represents those between.
    AtEdges,
}

impl Ranks {
    /// The rank whose program represents that of `rank`.
    pub fn representative(self, mesh: &Mesh, rank: usize) -> usize {
        let at = mesh.coord(rank);
        let position = |axis: Axis| {
            let (last, own) = (mesh.axis(axis) - 1, at.on(axis));
            match self {
                _ if axis == Axis::Pp => own,
                Ranks::All => own,
                Ranks::OfEachStage => last,
                Ranks::AtEdges => {
                    if own == last {
                        last
                    } else {
                        0
                    }
                }
            }
        };
        mesh.rank(Axis::ALL.into_iter().fold(Coord::default(), |to, axis| to.with(axis, position(axis))))
    }

    /// The ranks that represent others, ascending.
    pub fn representatives(self, mesh: &Mesh) -> BTreeSet<usize> {
        (0..mesh.size()).map(|rank| self.representative(mesh, rank)).collect()
    }
}

impl Trace {
    /// The collectives of a program, without the time in between.
    pub fn of(program: &Program) -> Trace {
        Trace::timed(program, |_| None)
    }

    /// As [`Trace::of`], with the time of each instruction; `None` omits the instruction.
    pub fn timed(program: &Program, seconds: impl Fn(&Instr) -> Option<Duration>) -> Trace {
        let mut trace = Trace { steps: Vec::new(), groups: Vec::new() };
        for instr in &program.instrs {
            match &instr.op {
                Op::Start(op::Start(c)) => {
                    let post = trace.post(program, c, instr);
                    trace.steps.push(Step::Start(post));
                }
                Op::Await(op::Await(c)) => {
                    let collective = trace.collective(c);
                    trace.steps.push(Step::Await(collective));
                }
                op => trace.steps.extend(seconds(instr).map(|cost| Step::Compute {
                    name: op.name(),
                    microbatch: microbatch(instr),
                    cost,
                })),
            }
        }
        trace
    }

    /// The spans of a measured run, one instruction after the other from `began` on: computation, and the waiting time for
    /// each collective. The names are those of a simulated step.
    pub fn measured(program: &Program, began: Duration, timings: &[Duration]) -> Vec<Span> {
        let mut trace = Trace { steps: Vec::new(), groups: Vec::new() };
        let mut size_bytes: BTreeMap<world::Collective, u64> = BTreeMap::new();
        let (mut spans, mut end) = (Vec::new(), began);
        for (instr, took) in program.instrs.iter().zip(timings) {
            let start = end;
            end += *took;
            let what = match &instr.op {
                Op::Start(op::Start(c)) => {
                    let post = trace.post(program, c, instr);
                    size_bytes.insert(post.collective, post.size_bytes());
                    continue;
                }
                Op::Await(op::Await(c)) => {
                    let collective = trace.collective(c);
                    let pair = matches!(collective.kind, Kind::Send { .. } | Kind::Recv { .. });
                    let n_members = if pair { 2 } else { program.mesh_rank.group_size(c.group) };
                    let size_bytes = size_bytes.get(&collective).copied().unwrap_or(0);
                    What::Collective { collective, n_members, size_bytes }
                }
                op => What::Compute { name: op.name(), microbatch: microbatch(instr) },
            };
            spans.push(Span { what, start, end });
        }
        spans
    }

    fn post(&mut self, program: &Program, c: &Collective, instr: &Instr) -> Post {
        // The side that has the whole.
        let whole = match c.kind {
            CollectiveKind::AllGather | CollectiveKind::Recv { .. } | CollectiveKind::Broadcast { .. } => &instr.writes,
            _ => &instr.reads,
        };
        let tensor = |v| {
            let value = program.value(v);
            Tensor { n_elements: value.n_elements() as u64, dtype: value.dtype }
        };
        Post { collective: self.collective(c), tensors: whole.iter().map(|v| tensor(*v)).collect() }
    }

    fn collective(&mut self, c: &Collective) -> world::Collective {
        let slot = self.groups.iter().position(|g| *g == c.group).unwrap_or_else(|| {
            self.groups.push(c.group);
            self.groups.len() - 1
        });
        let (kind, group) = (kind(c.kind), GroupSlot(slot as u32));
        world::Collective { kind, group, sequence: c.sequence, unit: c.unit as u64 }
    }
}

/// The microbatch that an instruction works on, if any.
fn microbatch(instr: &Instr) -> Option<u32> {
    (instr.site.phase != Phase::Optimizer).then_some(instr.site.microbatch)
}

const fn kind(kind: CollectiveKind) -> Kind {
    match kind {
        CollectiveKind::AllReduce => Kind::AllReduce,
        CollectiveKind::ReduceScatter => Kind::ReduceScatter,
        CollectiveKind::AllGather => Kind::AllGather,
        CollectiveKind::AllToAll => Kind::AllToAll,
        CollectiveKind::Broadcast { root } => Kind::Broadcast { root },
        CollectiveKind::Send { to, channel } => Kind::Send { to, channel },
        CollectiveKind::Recv { from, channel } => Kind::Recv { from, channel },
        CollectiveKind::Shift { by } => Kind::Shift { by },
    }
}

/// The world of all ranks of a mesh.
///
/// # Errors
/// Errors of `trace`.
pub fn world<E>(
    mesh: Mesh,
    ranks: Ranks,
    mut trace: impl FnMut(MeshRank) -> Result<Trace, E>,
) -> Result<WorldTraces, E> {
    let mut world = WorldTraces::new();
    let mut known: BTreeMap<usize, (TraceId, Vec<Group>)> = BTreeMap::new();
    let mut bound = Bound { mesh, of_rank: BTreeMap::new() };
    for rank in 0..mesh.size() {
        let like = ranks.representative(&mesh, rank);
        let (id, kinds) = match known.entry(like) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let trace = trace(MeshRank { mesh, rank: like })?;
                new.insert((world.trace(trace.steps), trace.groups))
            }
        };
        let groups = kinds.iter().map(|kind| bound.group(&mut world, *kind, rank)).collect();
        world.rank(*id, groups);
    }
    Ok(world)
}

/// Compiles every rank of a mesh and checks that the ranks together run to the end, and that their starts have a common
/// order.
///
/// # Errors
/// Errors of `compile`, and faults of the world.
pub fn verify_world<E: From<WorldError>>(
    mesh: Mesh,
    mut compile: impl FnMut(MeshRank) -> Result<Program, E>,
) -> Result<(), E> {
    let world = world(mesh, Ranks::All, |mesh_rank| compile(mesh_rank).map(|program| Trace::of(&program)))?;
    world.verify()?;
    Ok(world.verify_launches()?)
}

/// The groups of a world by kind and rank. Kinds stay separate even if they have the same members: each numbers its own
/// collectives.
struct Bound {
    mesh: Mesh,
    of_rank: BTreeMap<Group, Vec<Option<GroupId>>>,
}

impl Bound {
    fn group(&mut self, world: &mut WorldTraces, kind: Group, rank: usize) -> GroupId {
        let of_rank = self.of_rank.entry(kind).or_insert_with(|| vec![None; self.mesh.size()]);
        if let Some(id) = of_rank[rank] {
            return id;
        }
        let members = self.mesh.members(kind, rank);
        let id = world.separate_group(members.iter().map(|m| Rank(*m as u32)).collect());
        members.into_iter().for_each(|m| of_rank[m] = Some(id));
        id
    }
}
