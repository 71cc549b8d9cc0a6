//! Catching up: with the gradients of each step, a member receives a part of the previous step's state.

use super::Sim;
use super::event::{Event, RankEvent};
use super::node::Rank;
use crate::mutation::Mutation;
use crate::state;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Step, Worker};
use phalanx_strategies::elastic::message::{CatchUp, MemberPhase, WorldPlan};
use phalanx_strategies::elastic::recovery::{Share, shares};
use phalanx_strategies::elastic::shadow::Shard;

/// Progress of a catching-up rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct CatchUpProgress {
    /// The step of the awaited gradients; all earlier updates are applied.
    awaits: Step,
    /// Received parts of the state.
    n_taken: u32,
    /// Arrival time of the last message: messages on one connection stay in order.
    last: u64,
}

/// State pieces that a catching-up member receives with a step.
pub type CatchUpPart = (Worker, Vec<(u64, u64)>);

impl Sim {
    /// A rank begins to catch up. It frees pieces of an older state, which would not have the version of those it receives.
    pub(super) fn begin_catch_up(&mut self, worker: Worker) {
        let n_atoms = self.config.n_atoms;
        let Some(rank) = self.rank(worker) else { return };
        let held = rank.member.report().holds;
        retain(rank, &held, n_atoms);
        let base = rank.member.beside().map(|world_plan| world_plan.base.step).unwrap_or_default();
        rank.catch_up_parts = CatchUpProgress { awaits: base.next(), ..CatchUpProgress::default() };
    }

    /// The parts for the catching-up members of a world with a step; none unless all these members can receive.
    pub(super) fn catch_up_parts(&mut self, world_plan: &WorldPlan, step: Step) -> Option<Vec<CatchUpPart>> {
        world_plan.catching_up.iter().map(|catch_up| self.catch_up_part(world_plan, catch_up, step)).collect()
    }

    fn catch_up_part(&mut self, world_plan: &WorldPlan, catch_up: &CatchUp, step: Step) -> Option<CatchUpPart> {
        let (n_atoms, n_parts) = (self.config.n_atoms, self.config.n_catch_up_parts);
        let rank = self.rank(catch_up.worker).filter(|rank| rank.stopped == 0 && rank.catch_up_parts.awaits == step)?;
        let report = rank.member.report();
        if (report.generation, report.phase) != (world_plan.generation, MemberPhase::CatchingUp) {
            return None;
        }
        let part = rank.catch_up_parts.n_taken;
        let mut pieces = vec![];
        for (transfer, share) in shares(&catch_up.transfers).filter(|_| part < n_parts) {
            let (from, held) =
                transfer.source.sender(transfer.shard).expect("catching-up members receive state from memory");
            let asked = state::share(&state::asked(transfer, share, n_atoms), Share { part, n_parts });
            pieces.extend(self.read_memory((catch_up.worker, from), before(step, world_plan.base), held, &asked)?);
        }
        Some((catch_up.worker, pieces))
    }

    /// Whether all catching-up members of a world have the gradients of a step. The vote waits for this.
    pub(super) fn have_followed(&mut self, world_plan: &WorldPlan, step: Step) -> bool {
        if self.is(Mutation::LeaveCatchingUpBehind) {
            return true;
        }
        let generation = world_plan.generation;
        let has = |sim: &mut Sim, worker| {
            let open = sim.rank(worker).and_then(|rank| rank.open);
            open.is_some_and(|(of, at, _)| (of, at) == (generation, step))
        };
        world_plan.catching_up.iter().all(|catch_up| has(self, catch_up.worker))
    }

    /// Retries the collective until the catching-up members are ready or another world follows.
    pub(super) fn wait_for_catching_up(&mut self, generation: Generation, step: Step) {
        if self.world_plan.as_ref().is_some_and(|latest| latest.generation <= generation) {
            self.queue.push(self.now + 5_000, Event::Collective { generation, step });
        }
    }

    pub(super) fn send_to_catching_up(&mut self, worker: Worker, what: RankEvent) {
        let at = self.now + self.dice.pick(100..self.config.catch_up_part_us);
        let Some(rank) = self.rank(worker) else { return };
        rank.catch_up_parts.last = at.max(rank.catch_up_parts.last + 1);
        let at = rank.catch_up_parts.last;
        self.queue.push(at, Event::ToRank { worker, what: what.clone() });
        self.perhaps_again(worker, what);
    }

    /// Handles the gradients of a step, and `pieces` of the state `base` before it.
    pub(super) fn rank_got_catch_up_part(
        &mut self,
        worker: Worker,
        (generation, step): (Generation, Step),
        (base, pieces): (Version, Vec<(u64, u64)>),
        digest: u64,
    ) {
        let (n_parts, soon) = (self.config.n_catch_up_parts, self.is(Mutation::CaughtUpTooSoon));
        let Some(rank) = self.rank(worker) else { return };
        // Within a world, the step identifies a late copy.
        if rank.catch_up_parts.awaits != step || rank.open.is_some_and(|open| (open.0, open.1) == (generation, step)) {
            return;
        }
        let n_taken = rank.catch_up_parts.n_taken + 1;
        let is_incomplete = rank.member.catch_up().is_some_and(|catch_up| !catch_up.transfers.is_empty());
        let all = is_incomplete && (n_taken == n_parts || (soon && n_taken + 1 == n_parts));
        if all && rank.member.handle_caught_up(generation, base).is_err() {
            return;
        }
        if rank.member.handle_followed(generation, step).is_err() {
            return;
        }
        rank.atoms.extend(pieces);
        rank.memory.note_received();
        rank.catch_up_parts.n_taken = n_taken;
        rank.open = Some((generation, step, digest));
        if all {
            self.observe_state(worker, base);
        }
    }

    /// Handles the commit of a step whose gradients a catching-up member has.
    pub(super) fn rank_got_outcome(&mut self, worker: Worker, generation: Generation, step: Step) {
        let skips = self.is(Mutation::SkipACatchUpPart);
        let Some(rank) = self.rank(worker) else { return };
        let Some((_, _, digest)) = rank.open.filter(|open| open.1 == step) else { return };
        if rank.member.handle_outcome(generation, step).is_err() {
            return;
        }
        rank.catch_up_parts.awaits = step.next();
        if rank.member.report().commit_state.applied.is_some() {
            self.note_committed(worker, generation, step, digest);
        } else if skips {
            rank.open = None;
        } else {
            rank.update();
        }
    }
}

/// The state that a step begins from.
fn before(step: Step, base: Version) -> Version {
    Version { step: Step(step.0 - 1), ..base }
}

/// Frees all state except these shards.
pub fn retain(rank: &mut Rank, shards: &[Shard], n_atoms: u64) {
    let ranges: Vec<_> = shards.iter().flat_map(|shard| state::atoms(*shard, n_atoms)).collect();
    rank.atoms.retain(|atom, _| ranges.iter().any(|range| range.contains(atom)));
}
