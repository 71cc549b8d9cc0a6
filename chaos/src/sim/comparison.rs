//! Flipped bits, and the comparisons of copies that find them, as rank processes make them.
//!
//! As in a real step, a flipped bit of a weight changes the loss of its replica and the sum of all gradients, so that no state
//! in memory stays that of an undisturbed run.

use super::Sim;
use super::event::{Event, RankEvent};
use crate::dice::Dice;
use crate::environment::EnvironmentFault;
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::plan::{Fault, Plan};
use crate::state;
use phalanx_strategies::elastic::copies::{Claim, Copies, Copy, Difference, Holder};
use phalanx_strategies::elastic::dispute::{Repeated, settle};
use phalanx_strategies::elastic::fingerprint::fingerprint;
use phalanx_strategies::elastic::identity::{Generation, MemberId, Step, Worker};
use phalanx_strategies::elastic::member::Command;
use phalanx_strategies::elastic::message::{MemberPhase, Requests, Settled, WorldPlan};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::{Axis, MeshRank};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The comparisons of a job.
pub struct Comparisons {
    /// Whether copies are compared: only in plans with flipped bits, so that other plans keep their traces.
    is_on: bool,
    /// Draws the times of exchanges.
    dice: Dice,
    /// The ranks of a world that have entered the comparison after a step.
    entered: BTreeMap<(Generation, Step), BTreeSet<Worker>>,
    /// The step after which a bit flipped that may still be in some state.
    flipped: Option<Step>,
}

/// A comparison that a rank has entered, and what it does after it.
#[derive(Clone, Debug)]
pub struct Entered {
    generation: Generation,
    step: Step,
    then: Vec<Command>,
}

/// The boxes of each part of a rank's memory: name and fingerprint.
type Parts = Vec<BTreeMap<u64, u64>>;

impl Comparisons {
    /// The comparisons of a job with this seed and plan.
    pub fn of(seed: u64, plan: &Plan) -> Comparisons {
        let flips = |fault: &Fault| matches!(fault, Fault::Environment(EnvironmentFault::FlipBit { .. }));
        Comparisons {
            is_on: plan.0.iter().any(|planned| flips(&planned.fault)),
            dice: Dice::new(seed, "comparisons"),
            entered: BTreeMap::new(),
            flipped: None,
        }
    }
}

impl Entered {
    /// Whether a command waits for the outcome; it is kept.
    pub fn takes(&mut self, command: &Command) -> bool {
        let waits = matches!(command, Command::Save(_) | Command::Compute { .. } | Command::Finish(_));
        self.then.extend(waits.then(|| command.clone()));
        waits
    }
}

impl Sim {
    /// Flips a bit of a copy that a running rank holds. One at a time: two copies with the same flipped bit agree.
    pub(super) fn flip_bit(&mut self, member: MemberId, piece: u64, bit: u32) {
        let Some(worker) = self.worker_in(member).filter(|_| self.comparisons.flipped.is_none()) else { return };
        let Some(world_plan) = self.world_plan.clone() else { return };
        let n_atoms = self.config.n_atoms;
        let Some(rank) = self.rank(worker).filter(|rank| rank.compares.is_none()) else { return };
        let report = rank.member.report();
        let is_running = (report.generation, report.phase) == (world_plan.generation, MemberPhase::Running);
        let (true, Some(version)) = (is_running && !rank.atoms.is_empty(), report.commit_state.applied) else { return };
        let nth = piece % rank.atoms.len() as u64;
        let (atom, value) = rank.atoms.iter_mut().nth(nth as usize).expect("the index is below the length");
        let atom = *atom;
        let has = |shard: &&Shard| state::atoms(**shard, n_atoms).iter().any(|run| run.contains(&atom));
        let n_copies = world_plan.holds.iter().flatten().filter(has).count();
        // A single copy has nothing to be compared with.
        if n_copies < 2 {
            return;
        }
        *value ^= 1 << (bit % 64);
        let n_independent = self.n_independent(&world_plan, worker, &has);
        self.comparisons.flipped = Some(version.step);
        self.outcome.n_flips += 1;
        let (generation, step) = (world_plan.generation, version.step);
        self.observe(&Observation::Flipped { worker, generation, step, n_independent });
    }

    /// Copies that a majority may consist of, or 0 if this worker's copy is not one of them.
    fn n_independent(&mut self, world_plan: &WorldPlan, worker: Worker, has: &impl Fn(&&Shard) -> bool) -> usize {
        let holders = world_plan.assignments.iter().zip(&world_plan.holds);
        let independent: Vec<(Worker, usize)> = holders
            .filter(|(worker, _)| self.rank(**worker).is_some_and(|rank| !rank.memory.is_received()))
            .map(|(worker, shards)| (*worker, shards.iter().filter(has).count()))
            .collect();
        let counts = independent.iter().any(|(holder, _)| *holder == worker);
        independent.iter().filter(|_| counts).map(|(_, n)| n).sum()
    }

    /// A world begins. State that was saved before a bit flipped is that of an undisturbed run.
    pub(super) fn begin_comparisons(&mut self, world_plan: &WorldPlan) {
        let is_new = world_plan.base.lineage == world_plan.generation;
        self.comparisons.flipped = self.comparisons.flipped.filter(|step| !is_new || world_plan.base.step >= *step);
        self.comparisons.entered.clear();
    }

    /// A rank joins a world, which may repeat disputed steps.
    pub(super) fn begin_memory(&mut self, worker: Worker) {
        let is_on = self.comparisons.is_on;
        let Some(rank) = self.rank(worker).filter(|_| is_on) else { return };
        let disputed = rank.member.assignment().map(|(world_plan, _)| world_plan.disputed.clone());
        rank.memory.begin(disputed.unwrap_or_default());
    }

    /// A rank has committed a step. Without mutations, all ranks of its world decide alike.
    pub(super) fn compare_if_due(&mut self, worker: Worker, generation: Generation, step: Step, requests: Requests) {
        let (save_steps, every) = (self.config.save_steps, self.config.verify_steps);
        let skips_saves = self.is(Mutation::SaveWithoutComparison);
        let Some(rank) = self.nodes[worker.member.node.0 as usize].ranks.get_mut(&worker) else { return };
        let assignment = rank.member.assignment();
        let asked = assignment.is_some_and(|(world_plan, _)| requests.save > world_plan.n_saves) || requests.stop;
        let saves = !skips_saves && (step.0.is_multiple_of(save_steps) || asked);
        let is_due = saves || step.0.is_multiple_of(every) || rank.memory.is_disputed(step);
        if self.comparisons.is_on && is_due && assignment.is_some() {
            rank.compares = Some(Entered { generation, step, then: vec![] });
        }
    }

    /// A world that only saves the state that it begins with compares it first.
    pub(super) fn compare_before_resting(&mut self, worker: Worker) {
        let is_on = self.comparisons.is_on && !self.is(Mutation::SaveWithoutComparison);
        let Some(rank) = self.rank(worker).filter(|_| is_on) else { return };
        let Some((world_plan, _)) = rank.member.assignment() else { return };
        let (generation, step) = (world_plan.generation, world_plan.base.step);
        rank.compares = Some(Entered { generation, step, then: vec![] });
    }

    /// A rank whose state is up to date enters the comparison; the last one completes it.
    pub(super) fn enter_comparison(&mut self, worker: Worker) {
        let Some(rank) = self.rank(worker) else { return };
        let Some(Entered { generation, step, .. }) = rank.compares else { return };
        let Some((world_plan, _)) = rank.member.assignment() else { return };
        let world_plan = world_plan.clone();
        let entered = self.comparisons.entered.entry((generation, step)).or_default();
        if !entered.insert(worker) || entered.len() < world_plan.assignments.len() {
            return;
        }
        if let Some(parts) = self.all_parts(&world_plan) {
            self.complete_comparison(&world_plan, step, &parts);
        }
    }

    /// What all ranks of a world hold; none if one of them has died.
    fn all_parts(&mut self, world_plan: &WorldPlan) -> Option<Vec<Parts>> {
        let (n_atoms, own_only) = (self.config.n_atoms, self.is(Mutation::CompareOwnShardsOnly));
        let all = world_plan.assignments.iter().zip(&world_plan.holds);
        let parts = all.map(|(worker, shards)| {
            let rank = self.rank(*worker)?;
            let of_run = |run: std::ops::Range<u64>| {
                let values = rank.atoms.range(run.clone()).map(|(_, value)| *value);
                let words: Vec<u32> = values.flat_map(|value| [value as u32, (value >> 32) as u32]).collect();
                (run.start, fingerprint(2 * run.start, &words))
            };
            let part = |shard: &Shard| state::atoms(*shard, n_atoms).into_iter().map(of_run).collect();
            Some(shards.iter().take(if own_only { 1 } else { shards.len() }).map(part).collect())
        });
        parts.collect()
    }

    fn complete_comparison(&mut self, world_plan: &WorldPlan, step: Step, parts: &[Parts]) {
        let names = |parts: &Parts| parts.iter().map(|boxes| boxes.keys().copied().collect()).collect();
        let held: Vec<Vec<BTreeSet<u64>>> = parts.iter().map(names).collect();
        let copies = Copies::new(&held);
        let mut digests = vec![0; copies.n_digests()];
        for (rank, parts) in (0..).zip(parts) {
            for (at, digest) in copies.digests(rank, |part, name| parts[part as usize][&name]) {
                digests[at] = digest;
            }
        }
        let differing = copies.differing(&digests);
        if let Some(first) = differing.first() {
            for (rank, worker) in world_plan.assignments.iter().enumerate() {
                let mesh_rank = MeshRank { mesh: world_plan.mesh, rank };
                let Some(rank) = self.rank(*worker) else { continue };
                rank.memory.remember(step, mesh_rank, first, &digests);
            }
            let boxes: BTreeSet<u64> = differing.iter().flat_map(|class| class.boxes.iter().copied()).collect();
            let found = self.difference(world_plan, step, parts, &boxes);
            let worker = |rank: &u32| world_plan.assignments[*rank as usize];
            let suspects: Vec<Worker> = found.suspects.iter().map(worker).collect();
            self.outcome.n_differences += 1;
            self.outcome.n_named += u64::from(!suspects.is_empty());
            self.observe(&Observation::Differs { generation: world_plan.generation, step, suspects: &suspects });
            return self.tell_compared(world_plan, step, Some(Arc::new(found)));
        }
        self.settle_dispute(world_plan, step, &copies, &digests);
        for worker in &world_plan.assignments {
            if let Some(rank) = self.rank(*worker) {
                rank.memory.note_agreement();
            }
        }
        self.tell_compared(world_plan, step, None);
    }

    fn tell_compared(&mut self, world_plan: &WorldPlan, step: Step, found: Option<Arc<Difference>>) {
        for worker in &world_plan.assignments {
            let at = self.now + self.comparisons.dice.pick(50..3_000);
            let what = RankEvent::Compared { generation: world_plan.generation, step, found: found.clone() };
            self.queue.push(at, Event::ToRank { worker: *worker, what });
        }
    }

    /// All copies agree; if they differed after this step in an earlier world, finds out whose copy was wrong.
    fn settle_dispute(&mut self, world_plan: &WorldPlan, step: Step, copies: &Copies, digests: &[u64]) {
        // In fast mode, a repeated step may have other bits.
        if !self.config.reproducible || !world_plan.disputed.contains(&step) {
            return;
        }
        let blames_first = self.is(Mutation::BlameTheFirstHolder);
        let repeated: Vec<(Repeated, Vec<u32>)> = (0..)
            .zip(&world_plan.assignments)
            .map(|(rank, worker)| {
                let mesh_rank = MeshRank { mesh: world_plan.mesh, rank };
                let rank = self.rank(*worker)?;
                Some(rank.memory.repeated(step, mesh_rank, copies, digests))
            })
            .map(Option::unwrap_or_default)
            .collect();
        let all: Vec<Repeated> = repeated.iter().map(|(repeated, _)| *repeated).collect();
        let Some((_, holders)) = repeated.iter().find(|(_, holders)| !holders.is_empty()) else { return };
        let suspect = settle(&world_plan.mesh, step, holders, &all);
        let suspect = if blames_first { holders.first().copied() } else { suspect };
        if let Some(rank) = suspect {
            self.outcome.n_named += 1;
            self.observe(&Observation::Named { worker: world_plan.assignments[rank as usize], step });
        }
        for (worker, (_, holders)) in world_plan.assignments.iter().zip(&repeated) {
            let Some(rank) = self.rank(*worker).filter(|_| !holders.is_empty()) else { continue };
            // Ignored in an older world.
            let _ = rank
                .member
                .handle_settled(world_plan.generation, Settled { step, suspects: suspect.into_iter().collect() });
            self.drive_rank(*worker);
        }
    }

    /// The outcome of a comparison reaches a rank: it goes on, or its world cannot continue.
    pub(super) fn rank_compared(
        &mut self,
        worker: Worker,
        (generation, step): (Generation, Step),
        found: Option<&Difference>,
    ) {
        let keeps = self.is(Mutation::KeepCorruptMemory);
        let Some(rank) = self.rank(worker) else { return };
        let here = |entered: &mut Entered| (entered.generation, entered.step) == (generation, step);
        let Some(Entered { then, .. }) = rank.compares.take_if(here) else { return };
        // Ignored in an older world.
        let _ = match found {
            Some(found) if !keeps => rank.member.handle_corrupt(generation, found.clone(), "copies differ"),
            Some(_) => rank.member.handle_broken(generation, None, "copies differ"),
            None => return then.into_iter().for_each(|command| self.perform_for_rank(worker, command)),
        };
    }

    /// The losses of a step, and what wrong weights add to the sum of its gradients.
    pub(super) fn note_losses(&mut self, world_plan: &WorldPlan, step: Step) -> u64 {
        if !self.comparisons.is_on {
            return 0;
        }
        let n_atoms = self.config.n_atoms;
        let (mut chains, mut losses) = (BTreeSet::new(), BTreeMap::<usize, u64>::new());
        let replica = |rank: usize| world_plan.mesh.coord(rank).on(Axis::DpReplicate);
        for (at, worker) in world_plan.assignments.iter().enumerate() {
            let Some(rank) = self.rank(*worker) else { continue };
            let loss = losses.entry(replica(at)).or_default();
            for run in state::atoms(Shard::of(&world_plan.mesh, at), n_atoms) {
                for (atom, value) in rank.atoms.range(run) {
                    chains.insert(state::chain(*value, *atom));
                    *loss = state::mix(*loss ^ value);
                }
            }
        }
        // Ranks that have left the world know nothing of its losses; with one of them gone, this sum is not what it computed.
        let generation = world_plan.generation;
        let mut is_there = |worker: &Worker| {
            let world = self.rank(*worker).and_then(|rank| rank.member.assignment());
            world.is_some_and(|(world_plan, _)| world_plan.generation == generation)
        };
        if world_plan.assignments.iter().all(&mut is_there) {
            for (at, worker) in world_plan.assignments.iter().enumerate() {
                if let Some(rank) = self.rank(*worker) {
                    rank.memory.note_loss(step, losses[&replica(at)]);
                }
            }
        }
        if chains.len() < 2 { 0 } else { chains.into_iter().fold(0, |sum, chain| state::mix(sum ^ chain)) }
    }

    /// The difference that all ranks report, from the fingerprints of all boxes in doubt.
    fn difference(&mut self, world_plan: &WorldPlan, step: Step, parts: &[Parts], boxes: &BTreeSet<u64>) -> Difference {
        let counts_received = self.is(Mutation::CountReceivedCopies);
        let mut all = Vec::new();
        for ((rank, parts), worker) in (0..).zip(parts).zip(&world_plan.assignments) {
            let is_received = self.rank(*worker).is_some_and(|rank| rank.memory.is_received()) && !counts_received;
            for (part, held) in (0..).zip(parts) {
                let in_doubt = held.iter().filter(|(name, _)| boxes.contains(name));
                all.extend(in_doubt.map(|(name, value)| {
                    let claim = Claim { holder: Holder { rank, part }, value: *value };
                    Copy { name: *name, tensor: format!("run {name}"), claim, is_received }
                }));
            }
        }
        Difference::among(step, all).expect("a class of these boxes differs")
    }
}
