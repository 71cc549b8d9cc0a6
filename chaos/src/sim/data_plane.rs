//! What happens between ranks: the collectives of a step with its vote, and the transfer of state.

use super::Sim;
use super::event::{Event, RankEvent};
use super::learners::Lesson;
use super::node::Rank;
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::state;
use phalanx_strategies::elastic::commit::{Version, Vote};
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Worker};
use phalanx_strategies::elastic::message::{Formation, Wishes};
use phalanx_strategies::elastic::recovery::{Source, Transfer, shares};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::tree::leaves_of;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The collectives of one step in one world.
pub struct Collective {
    formation: Arc<Formation>,
    entered: BTreeSet<Worker>,
    /// Microbatches of each data rank.
    runs: BTreeMap<usize, Range<usize>>,
    pub digest: Option<u64>,
    voted: BTreeSet<Worker>,
    /// What any of the votes asks for.
    wishes: Wishes,
    committed: bool,
    /// Since when tensors do not pass.
    cut_since: Option<u64>,
}

impl Sim {
    /// A rank has computed its gradients and enters the reduction.
    pub(super) fn enter_collective(&mut self, worker: Worker, generation: Generation, step: Step) {
        let shifted = self.is(Mutation::SameRowsForAll);
        let n_microbatches = self.config.policy.n_microbatches;
        // Stopped ranks do not enter: their collectives are aborted on their side, whatever others do.
        let Some(rank) = self.rank(worker) else { return };
        if rank.member.handle_entered(generation, step).is_err() {
            return;
        }
        let Some((formation, seat)) = rank.member.seat() else { return };
        let formation = formation.clone();
        let data_rank = formation.mesh.coord(seat).data_rank(&formation.mesh);
        let mut run = leaves_of(n_microbatches, formation.mesh.data_ranks(), data_rank);
        if shifted {
            run = 0..run.len();
        }
        let collective = self.collectives.entry((generation, step)).or_insert_with(|| Collective {
            formation,
            entered: BTreeSet::new(),
            runs: BTreeMap::new(),
            digest: None,
            voted: BTreeSet::new(),
            wishes: Wishes::default(),
            committed: false,
            cut_since: None,
        });
        collective.entered.insert(worker);
        collective.runs.insert(data_rank, run);
        self.try_collective(generation, step);
    }

    /// A rank's vote reaches the others.
    pub(super) fn vote(&mut self, worker: Worker, vote: Vote, wishes: Wishes) {
        let Some(collective) = self.collectives.get_mut(&(vote.generation, vote.step)) else { return };
        collective.voted.insert(worker);
        if collective.committed {
            let wishes = collective.wishes;
            let what = RankEvent::Committed { generation: vote.generation, step: vote.step, wishes };
            self.queue.push(self.now + 100, Event::ToRank { worker, what });
            return;
        }
        collective.wishes = collective.wishes.and(wishes);
        self.try_collective(vote.generation, vote.step);
    }

    /// Completes the reduction, then the vote, once all are there and tensors pass.
    pub(super) fn try_collective(&mut self, generation: Generation, step: Step) {
        let majority = self.is(Mutation::CommitOnMajority);
        let Some(collective) = self.collectives.get(&(generation, step)) else { return };
        let n = collective.formation.seats.len();
        let reduces = collective.digest.is_none() && collective.entered.len() == n;
        let enough = if majority { collective.voted.len() * 2 > n } else { collective.voted.len() == n };
        let commits = collective.digest.is_some() && !collective.committed && enough;
        if !reduces && !commits {
            return;
        }
        let formation = collective.formation.clone();
        if !self.is_connected(&formation) {
            self.wait_for_connection(&formation, generation, step);
            return;
        }
        if !reduces {
            return match self.have_followed(&formation, step) {
                true => self.commit(&formation, generation, step),
                false => self.wait_for_learners(generation, step),
            };
        }
        match self.lessons(&formation, step) {
            Some(lessons) => self.reduce(&formation, generation, step, lessons),
            None => self.wait_for_learners(generation, step),
        }
    }

    /// What is not acknowledged for too long breaks a connection.
    fn wait_for_connection(&mut self, formation: &Formation, generation: Generation, step: Step) {
        let (now, limit) = (self.now, self.config.timing.detection_time.as_micros() as u64);
        self.queue.push(now + 20_000, Event::Collective { generation, step });
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        let since = *collective.cut_since.get_or_insert(now);
        if (since + limit..since + limit + 20_000).contains(&now) {
            self.break_up(formation, None);
        }
    }

    /// A process is gone: the kernel closes its connections, and few of its peers find that before anything else.
    pub(super) fn break_connections(&mut self, gone: &Rank) {
        let seat = gone.member.seat().map(|(formation, _)| formation);
        if let Some(formation) = seat.or(gone.member.beside()) {
            self.break_up(&formation.clone(), None);
        }
    }

    fn break_up(&mut self, formation: &Formation, lost: Option<Worker>) {
        let (generation, members) = (formation.generation, formation.members().collect::<Vec<Worker>>());
        for _ in 0..self.dice.pick(0..4) {
            let worker = members[self.dice.pick(0..members.len() as u64) as usize];
            let at = self.now + self.dice.pick(100..5_000);
            self.queue.push(at, Event::ToRank { worker, what: RankEvent::Broken { generation, lost } });
        }
    }

    fn reduce(&mut self, formation: &Formation, generation: Generation, step: Step, lessons: Vec<Lesson>) {
        let n = self.config.policy.n_microbatches;
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        // In fast mode the order of additions, and so the bits, depend on the world.
        let world = if self.config.reproducible { 0 } else { generation.0 };
        let digest = state::golden_digest(step) ^ world;
        collective.digest = Some(digest);
        let runs: Vec<Range<usize>> = collective.runs.values().cloned().collect();
        self.observe(&Observation::Reduced(&runs, n));
        for worker in &formation.seats {
            let at = self.now + self.dice.pick(100..4_000);
            let what = RankEvent::Reduced { generation, step, digest };
            self.queue.push(at, Event::ToRank { worker: *worker, what: what.clone() });
            self.perhaps_again(*worker, what);
        }
        let base = Version { step: Step(step.0 - 1), ..formation.base };
        for (worker, pieces) in lessons {
            self.tell_learner(worker, RankEvent::Lesson { generation, step, digest, base, pieces });
        }
    }

    fn commit(&mut self, formation: &Formation, generation: Generation, step: Step) {
        let Some(collective) = self.collectives.get_mut(&(generation, step)) else { return };
        collective.committed = true;
        let wishes = collective.wishes;
        for worker in &formation.seats {
            let at = self.now + self.dice.pick(50..8_000);
            let what = RankEvent::Committed { generation, step, wishes };
            self.queue.push(at, Event::ToRank { worker: *worker, what: what.clone() });
            self.perhaps_again(*worker, what);
        }
        for learner in &formation.learners {
            self.tell_learner(learner.worker, RankEvent::Outcome { generation, step });
        }
        // What anybody may still ask for is of the last worlds, and of each of them of the last steps.
        let latest = self.formation.as_ref().map_or(0, |formation| formation.generation.0);
        self.collectives.retain(|(of, at), _| of.0 + 8 > latest && (*of != generation || at.0 + 3 > step.0));
    }

    /// Some of what a rank was told reaches it again, much later.
    pub(super) fn perhaps_again(&mut self, worker: Worker, what: RankEvent) {
        if self.dice.percent(8) {
            let at = self.now + self.dice.pick(10_000..800_000);
            self.queue.push(at, Event::ToRank { worker, what });
        }
    }

    fn is_connected(&self, formation: &Formation) -> bool {
        if self.network.cut.is_empty() {
            return true;
        }
        let nodes: BTreeSet<NodeId> = formation.members().map(|worker| worker.member.node).collect();
        nodes.iter().all(|a| nodes.iter().all(|b| self.network.connects(*a, *b)))
    }

    /// A rank asks a source for its share of a piece of state; if that is not there yet, it asks again.
    pub(super) fn fetch(&mut self, worker: Worker, generation: Generation, base: Version, transfer: Transfer) {
        let (n_atoms, skips) = (self.config.n_atoms, self.is(Mutation::SkipTheLastShare));
        let Some(rank) = self.rank(worker) else { return };
        if rank.member.report().generation != generation {
            return;
        }
        let Some((formation, seat)) = rank.member.seat() else { return };
        let named = shares(&formation.transfers[seat]).find(|(named, _)| *named == transfer);
        let (_, share) = named.expect("a member fetches what its formation names");
        let runs = state::asked(transfer, share, n_atoms);
        let pieces = match (transfer.source, transfer.source.sender(transfer.shard)) {
            (_, Some((from, held))) => self.read_memory((worker, from), base, held, &runs),
            (Source::Disk(checkpoint), _) if checkpoint.step == Step(0) => {
                Some(runs.into_iter().flatten().map(|atom| (atom, state::value(state::INITIAL, atom))).collect())
            }
            (Source::Disk(checkpoint), _) => Some(self.store.load(checkpoint, &runs)),
            _ => None,
        };
        let Some(pieces) = pieces else {
            self.perhaps_give_up(worker, generation, transfer);
            let what = RankEvent::Fetch { generation, base, transfer };
            self.queue.push(self.now + 5_000, Event::ToRank { worker, what });
            return;
        };
        let Some(rank) = self.rank(worker) else { return };
        let skipped = skips && share.part > 0 && share.part + 1 == share.n_parts;
        if rank.member.handle_fetched(generation, transfer).is_ok() && !skipped {
            rank.atoms.extend(pieces);
        }
    }

    /// Who cannot reach a source says so after a while.
    fn perhaps_give_up(&mut self, worker: Worker, generation: Generation, transfer: Transfer) {
        let Some((from, _)) = transfer.source.sender(transfer.shard) else { return };
        // Asked again every five milliseconds, it gives up after a second or so.
        if self.network.connects(worker.member.node, from.member.node) || !self.dice.percent(1) {
            return;
        }
        let what = RankEvent::Broken { generation, lost: Some(from) };
        self.queue.push(self.now + 1_000, Event::ToRank { worker, what });
    }

    /// Pieces of a shard that another rank has, if it has the right state and can be reached.
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
