//! Who catches up while others train: with the gradients of each step it is sent some of the state of the step before.

use super::Sim;
use super::event::{Event, RankEvent};
use super::node::retain;
use crate::mutation::Mutation;
use crate::state;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Step, Worker};
use phalanx_strategies::elastic::message::{Formation, Learner, MemberPhase};
use phalanx_strategies::elastic::recovery::{Share, shares};

/// How far a rank is that catches up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lessons {
    /// The step whose gradients it waits for; it has applied all updates before.
    awaits: Step,
    /// Parts of the state that have come.
    n_taken: u32,
    /// What comes over one connection does not overtake.
    last: u64,
}

/// What a learner is sent with a step.
pub type Lesson = (Worker, Vec<(u64, u64)>);

impl Sim {
    /// The world trains, and a rank begins to catch up. Pieces of an older state would not be as new as those that come.
    pub(super) fn begin_to_learn(&mut self, worker: Worker) {
        let n_atoms = self.config.n_atoms;
        let Some(rank) = self.rank(worker) else { return };
        let held = rank.member.report().holds;
        retain(rank, &held, n_atoms);
        let base = rank.member.beside().map(|formation| formation.base.step).unwrap_or_default();
        rank.lessons = Lessons { awaits: base.next(), ..Lessons::default() };
    }

    /// What the learners of a world are sent with a step, if all of them are there to take it.
    pub(super) fn lessons(&mut self, formation: &Formation, step: Step) -> Option<Vec<Lesson>> {
        formation.learners.iter().map(|learner| self.lesson(formation, learner, step)).collect()
    }

    fn lesson(&mut self, formation: &Formation, learner: &Learner, step: Step) -> Option<Lesson> {
        let (n_atoms, n_parts) = (self.config.n_atoms, self.config.n_lessons);
        let rank = self.rank(learner.worker).filter(|rank| rank.stopped == 0 && rank.lessons.awaits == step)?;
        let report = rank.member.report();
        if (report.generation, report.phase) != (formation.generation, MemberPhase::Learning) {
            return None;
        }
        let part = rank.lessons.n_taken;
        let mut pieces = vec![];
        for (transfer, share) in shares(&learner.transfers).filter(|_| part < n_parts) {
            let (from, held) = transfer.source.sender(transfer.shard).expect("learners are sent state from memory");
            let asked = state::share(&state::asked(transfer, share, n_atoms), Share { part, n_parts });
            pieces.extend(self.read_memory((learner.worker, from), before(step, formation.base), held, &asked)?);
        }
        Some((learner.worker, pieces))
    }

    /// Whether all learners of a world have the gradients of a step: nobody votes before.
    pub(super) fn have_followed(&mut self, formation: &Formation, step: Step) -> bool {
        if self.is(Mutation::LeaveLearnersBehind) {
            return true;
        }
        let generation = formation.generation;
        let has = |sim: &mut Sim, worker| {
            let open = sim.rank(worker).and_then(|rank| rank.open);
            open.is_some_and(|(of, at, _)| (of, at) == (generation, step))
        };
        formation.learners.iter().all(|learner| has(self, learner.worker))
    }

    /// Those who train wait for a learner as for each other, until another world follows.
    pub(super) fn wait_for_learners(&mut self, generation: Generation, step: Step) {
        if self.formation.as_ref().is_some_and(|latest| latest.generation <= generation) {
            self.queue.push(self.now + 5_000, Event::Collective { generation, step });
        }
    }

    pub(super) fn tell_learner(&mut self, worker: Worker, what: RankEvent) {
        let at = self.now + self.dice.pick(100..self.config.lesson_us);
        let Some(rank) = self.rank(worker) else { return };
        rank.lessons.last = at.max(rank.lessons.last + 1);
        let at = rank.lessons.last;
        self.queue.push(at, Event::ToRank { worker, what: what.clone() });
        self.perhaps_again(worker, what);
    }

    /// Gradients of a step have come, and `pieces` of the state `base` before it.
    pub(super) fn rank_taught(
        &mut self,
        worker: Worker,
        (generation, step): (Generation, Step),
        (base, pieces): (Version, Vec<(u64, u64)>),
        digest: u64,
    ) {
        let (n_parts, soon) = (self.config.n_lessons, self.is(Mutation::LearntTooSoon));
        let Some(rank) = self.rank(worker) else { return };
        // Of the same world a late copy is told by its step, which the shell has counted on.
        if rank.lessons.awaits != step || rank.open.is_some_and(|open| (open.0, open.1) == (generation, step)) {
            return;
        }
        let n_taken = rank.lessons.n_taken + 1;
        let lacks = rank.member.learner().is_some_and(|learner| !learner.transfers.is_empty());
        let all = lacks && (n_taken == n_parts || (soon && n_taken + 1 == n_parts));
        if all && rank.member.handle_learnt(generation, base).is_err() {
            return;
        }
        if rank.member.handle_followed(generation, step).is_err() {
            return;
        }
        rank.atoms.extend(pieces);
        rank.lessons.n_taken = n_taken;
        rank.open = Some((generation, step, digest));
        if all {
            self.observe_state(worker, base);
        }
    }

    /// The step that a learner has the gradients of is committed.
    pub(super) fn rank_told(&mut self, worker: Worker, generation: Generation, step: Step) {
        let skips = self.is(Mutation::SkipALesson);
        let Some(rank) = self.rank(worker) else { return };
        let Some((_, _, digest)) = rank.open.filter(|open| open.1 == step) else { return };
        if rank.member.handle_outcome(generation, step).is_err() {
            return;
        }
        rank.lessons.awaits = step.next();
        if rank.member.report().promise.applied.is_some() {
            self.note_learnt(worker, generation, step, digest);
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
