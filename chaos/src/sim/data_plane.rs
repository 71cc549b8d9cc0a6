//! The data plane between ranks: the collectives and votes of a step, and the transfer of state.

use super::Sim;
use super::catch_up::CatchUpPart;
use super::event::{Event, RankEvent};
use super::node::Rank;
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::state;
use phalanx_strategies::elastic::commit::{Version, Vote};
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Worker};
use phalanx_strategies::elastic::message::{Requests, WorldPlan};
use phalanx_strategies::elastic::recovery::{Source, Transfer, shares};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::tree::leaves_of;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The collectives of one step in one world.
pub struct Collective {
    world_plan: Arc<WorldPlan>,
    entered: BTreeSet<Worker>,
    /// Microbatches of each data rank.
    runs: BTreeMap<usize, Range<usize>>,
    pub digest: Option<u64>,
    voted: BTreeSet<Worker>,
    /// Requests of all votes so far.
    requests: Requests,
    committed: bool,
    /// Start of the data partition, if any.
    cut_since: Option<u64>,
}

impl Sim {
    /// A rank has computed its gradients and enters the reduction.
    pub(super) fn enter_collective(&mut self, worker: Worker, generation: Generation, step: Step) {
        let shifted = self.is(Mutation::SameRowsForAll);
        let n_microbatches = self.config.policy.n_microbatches;
        // Stopped ranks do not enter: their own side aborts their collectives.
        let Some(rank) = self.rank(worker) else { return };
        if rank.member.handle_entered(generation, step).is_err() {
            return;
        }
        let Some((world_plan, assignment)) = rank.member.assignment() else { return };
        let world_plan = world_plan.clone();
        let data_rank = world_plan.mesh.coord(assignment).data_rank(&world_plan.mesh);
        let mut run = leaves_of(n_microbatches, world_plan.mesh.data_ranks(), data_rank);
        if shifted {
            run = 0..run.len();
        }
        let collective = self.collectives.entry((generation, step)).or_insert_with(|| Collective {
            world_plan,
            entered: BTreeSet::new(),
            runs: BTreeMap::new(),
            digest: None,
            voted: BTreeSet::new(),
            requests: Requests::default(),
            committed: false,
            cut_since: None,
        });
        collective.entered.insert(worker);
        collective.runs.insert(data_rank, run);
        self.try_collective(generation, step);
    }

    /// Adds a rank's vote.
    pub(super) fn vote(&mut self, worker: Worker, vote: Vote, requests: Requests) {
        let Some(collective) = self.collectives.get_mut(&(vote.generation, vote.step)) else { return };
        collective.voted.insert(worker);
        if collective.committed {
            let requests = collective.requests;
            let what = RankEvent::Committed { generation: vote.generation, step: vote.step, requests };
            self.queue.push(self.now + 100, Event::ToRank { worker, what });
            return;
        }
        collective.requests = collective.requests.and(requests);
        self.try_collective(vote.generation, vote.step);
    }

    /// Completes the reduction, then the vote, once all members take part and are connected.
    pub(super) fn try_collective(&mut self, generation: Generation, step: Step) {
        let majority = self.is(Mutation::CommitOnMajority);
        let Some(collective) = self.collectives.get(&(generation, step)) else { return };
        let n = collective.world_plan.assignments.len();
        let reduces = collective.digest.is_none() && collective.entered.len() == n;
        let enough = if majority { collective.voted.len() * 2 > n } else { collective.voted.len() == n };
        let commits = collective.digest.is_some() && !collective.committed && enough;
        if !reduces && !commits {
            return;
        }
        let world_plan = collective.world_plan.clone();
        if !self.is_connected(&world_plan) {
            self.wait_for_connection(&world_plan, generation, step);
            return;
        }
        if !reduces {
            return match self.have_followed(&world_plan, step) {
                true => self.commit(&world_plan, generation, step),
                false => self.wait_for_catching_up(generation, step),
            };
        }
        match self.catch_up_parts(&world_plan, step) {
            Some(catch_up_parts) => self.reduce(&world_plan, generation, step, catch_up_parts),
            None => self.wait_for_catching_up(generation, step),
        }
    }

    /// Retries the collective; breaks connections after the detection time.
    fn wait_for_connection(&mut self, world_plan: &WorldPlan, generation: Generation, step: Step) {
        let (now, limit) = (self.now, self.config.timing.detection_time.as_micros() as u64);
        self.queue.push(now + 20_000, Event::Collective { generation, step });
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        let since = *collective.cut_since.get_or_insert(now);
        if (since + limit..since + limit + 20_000).contains(&now) {
            self.break_up(world_plan, None);
        }
    }

    /// Breaks the connections of a dead process, as the kernel does; at most three random members of its world detect it.
    pub(super) fn break_connections(&mut self, gone: &Rank) {
        let assignment = gone.member.assignment().map(|(world_plan, _)| world_plan);
        if let Some(world_plan) = assignment.or(gone.member.beside()) {
            self.break_up(&world_plan.clone(), None);
        }
    }

    fn break_up(&mut self, world_plan: &WorldPlan, lost: Option<Worker>) {
        let (generation, members) = (world_plan.generation, world_plan.members().collect::<Vec<Worker>>());
        for _ in 0..self.dice.pick(0..4) {
            let worker = members[self.dice.pick(0..members.len() as u64) as usize];
            let at = self.now + self.dice.pick(100..5_000);
            self.queue.push(at, Event::ToRank { worker, what: RankEvent::Broken { generation, lost } });
        }
    }

    fn reduce(&mut self, world_plan: &WorldPlan, generation: Generation, step: Step, catch_up_parts: Vec<CatchUpPart>) {
        let n = self.config.policy.n_microbatches;
        let pollution = self.note_losses(world_plan, step);
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        // In fast mode, the order of additions, and therefore the bits, depend on the world.
        let world = if self.config.reproducible { 0 } else { generation.0 };
        let digest = state::golden_digest(step) ^ world ^ pollution;
        collective.digest = Some(digest);
        let runs: Vec<Range<usize>> = collective.runs.values().cloned().collect();
        self.observe(&Observation::Reduced(&runs, n));
        for worker in &world_plan.assignments {
            let at = self.now + self.dice.pick(100..4_000);
            let what = RankEvent::Reduced { generation, step, digest };
            self.queue.push(at, Event::ToRank { worker: *worker, what: what.clone() });
            self.perhaps_again(*worker, what);
        }
        let base = Version { step: Step(step.0 - 1), ..world_plan.base };
        for (worker, pieces) in catch_up_parts {
            self.send_to_catching_up(worker, RankEvent::CatchUpPart { generation, step, digest, base, pieces });
        }
    }

    fn commit(&mut self, world_plan: &WorldPlan, generation: Generation, step: Step) {
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        collective.committed = true;
        let requests = collective.requests;
        for worker in &world_plan.assignments {
            let at = self.now + self.dice.pick(50..8_000);
            let what = RankEvent::Committed { generation, step, requests };
            self.queue.push(at, Event::ToRank { worker: *worker, what: what.clone() });
            self.perhaps_again(*worker, what);
        }
        for catch_up in &world_plan.catching_up {
            self.send_to_catching_up(catch_up.worker, RankEvent::Outcome { generation, step });
        }
        // Only the last steps of the last worlds can still be requested.
        let latest = self.world_plan.as_ref().map_or(0, |world_plan| world_plan.generation.0);
        self.collectives.retain(|(of, at), _| of.0 + 8 > latest && (*of != generation || at.0 + 3 > step.0));
    }

    /// Duplicates some messages to a rank, much later.
    pub(super) fn perhaps_again(&mut self, worker: Worker, what: RankEvent) {
        if self.dice.percent(8) {
            let at = self.now + self.dice.pick(10_000..800_000);
            self.queue.push(at, Event::ToRank { worker, what });
        }
    }

    fn is_connected(&self, world_plan: &WorldPlan) -> bool {
        if self.network.cut.is_empty() {
            return true;
        }
        let nodes: BTreeSet<NodeId> = world_plan.members().map(|worker| worker.member.node).collect();
        nodes.iter().all(|a| nodes.iter().all(|b| self.network.connects(*a, *b)))
    }

    /// Fetches a share of a piece of state from a source; retries while the source does not have it.
    pub(super) fn fetch(&mut self, worker: Worker, generation: Generation, base: Version, transfer: Transfer) {
        let (n_atoms, skips) = (self.config.n_atoms, self.is(Mutation::SkipTheLastShare));
        let Some(rank) = self.rank(worker) else { return };
        if rank.member.report().generation != generation {
            return;
        }
        let Some((world_plan, assignment)) = rank.member.assignment() else { return };
        let named = shares(&world_plan.transfers[assignment]).find(|(named, _)| *named == transfer);
        let (_, share) = named.expect("a member fetches only transfers of its world plan");
        let runs = state::asked(transfer, share, n_atoms);
        let pieces = match (transfer.source, transfer.source.sender(transfer.shard)) {
            (_, Some((from, held))) => self.read_memory((worker, from), base, held, &runs),
            (Source::Disk(checkpoint), _) if checkpoint.step == Step(0) => {
                Some(runs.into_iter().flatten().map(|atom| (atom, state::value(state::INITIAL, atom))).collect())
            }
            (Source::Disk(checkpoint), _) => match self.load(checkpoint, &runs) {
                Ok(pieces) => Some(pieces),
                Err(again_at) => {
                    let what = RankEvent::Fetch { generation, base, transfer };
                    return self.queue.push(again_at, Event::ToRank { worker, what });
                }
            },
            _ => None,
        };
        let Some(pieces) = pieces else {
            self.perhaps_give_up(worker, generation, transfer);
            let what = RankEvent::Fetch { generation, base, transfer };
            self.queue.push(self.now + 5_000, Event::ToRank { worker, what });
            return;
        };
        let Some(rank) = self.rank(worker) else { return };
        if transfer.source.sender(transfer.shard).is_some() {
            rank.memory.note_received();
        }
        let skipped = skips && share.part > 0 && share.part + 1 == share.n_parts;
        if rank.member.handle_fetched(generation, transfer).is_ok() && !skipped {
            rank.atoms.extend(pieces);
        }
    }

    /// A member that cannot reach a source reports it after a timeout.
    fn perhaps_give_up(&mut self, worker: Worker, generation: Generation, transfer: Transfer) {
        let Some((from, _)) = transfer.source.sender(transfer.shard) else { return };
        // At 1 % per retry, one every 5 ms, the member gives up after half a second on average.
        if self.network.connects(worker.member.node, from.member.node) || !self.dice.percent(1) {
            return;
        }
        let what = RankEvent::Broken { generation, lost: Some(from) };
        self.queue.push(self.now + 1_000, Event::ToRank { worker, what });
    }

    /// Pieces of a shard from another rank's memory, if the rank has the right state and can be reached.
    pub(super) fn read_memory(
        &mut self,
        (to, from): (Worker, Worker),
        base: Version,
        held: Shard,
        asked: &[Range<u64>],
    ) -> Option<Vec<(u64, u64)>> {
        if !self.network.connects(to.member.node, from.member.node) {
            return None;
        }
        let sender = self.rank(from).filter(|rank| rank.stopped == 0 && rank.member.can_send(base, held))?;
        let found = asked.iter().flat_map(|run| sender.atoms.range(run.clone()));
        Some(found.map(|(atom, value)| (*atom, *value)).collect())
    }
}
