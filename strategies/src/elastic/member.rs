//! What a rank does about orders: takes its seat, fetches its state, trains, votes, stops.
//!
//! Invariants:
//! - `B-1` Nothing of an older generation has an effect: no order, no outcome of a step, no fetched state.
//! - `B-2` What a member holds is given up when its world runs, not before: until then another failure may need it.
//! - `B-3` A member runs only with all the state that its seat asks for.
//! - `B-4` All members of a world act on a wish after the same step: wishes travel with the votes, and each acts on what
//!   all votes for a step ask for together.
//! - `B-5` A member is done only when the last step is committed and all that it had to save is durable.
//! - `B-6` A world that is to pause does so after a step that is not saved, at all members after the same one; nothing of
//!   that step is lost.
//! - `B-7` A member is not ready before its device is in the world, also if it lacks nothing: until then what the device is at
//!   in an older world may still touch the memory of its peers there.
//! - `B-8` is in `learning`.

mod learning;

use super::commit::{Promise, Version, Vote};
use super::identity::{Generation, JobId, Stale, Step, Worker, refuse_older};
use super::message::{Broken, FAILURE_LEN_MAX, Formation, MemberPhase, MemberReport, Order, OrderId, Stage, Wishes};
use super::progress::{At, Progress, Wait};
use super::recovery::Transfer;
use super::shadow::Shard;
use super::snapshot::{Checkpoint, Part, writes};
use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

/// What the shell must do next.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Abort all that is under way for earlier generations: collectives, transfers, the open step.
    Abort(Generation),
    /// Apply the open update: the state becomes this one.
    Apply(Version),
    /// Drop the open update.
    Discard,
    /// Free the state of all other shards.
    Keep(Vec<Shard>),
    /// Leave what there was and take the seat, or the guest's place, in this world; answer with [`Member::handle_joined`].
    Join(Generation),
    /// Fetch a piece of the state `base`; answer with [`Member::handle_fetched`].
    Fetch {
        /// For which world.
        generation: Generation,
        /// Which state.
        base: Version,
        /// What from where.
        transfer: Transfer,
    },
    /// Catch up beside the world of this generation; answer with [`Member::handle_learnt`] once all is there, and with
    /// [`Member::handle_followed`] for the gradients of each step.
    Learn(Generation),
    /// Compute the update that leads to this step; answer with [`Member::handle_computed`].
    Compute {
        /// In which world.
        generation: Generation,
        /// Which step.
        step: Step,
    },
    /// Give this vote to all members of the world, and with it what this one has been told that the operator wants.
    Vote(Vote, Wishes),
    /// Copy the state and make a part of a checkpoint durable; answer with [`Member::handle_saved`].
    Save(Part),
    /// All steps are done and all parts durable: do what else belongs to the end; answer with
    /// [`Member::handle_finished`].
    Finish(Generation),
    /// The job is over: end the process.
    Exit,
    /// Tell the supervisor at once: see [`Member::report`].
    Report,
}

/// What a member does by itself as steps go by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Steps between checkpoints; 0 for none but the one at the end and those that are asked for.
    pub save_steps: u64,
    /// The last step; absent if the job goes on until it is stopped.
    pub last_step: Option<Step>,
}

/// A rank process. See the [module](self).
#[derive(Clone, Debug)]
pub struct Member {
    job: JobId,
    worker: Worker,
    pid: Option<u32>,
    address: Option<SocketAddr>,
    schedule: Schedule,
    order: OrderId,
    wishes: Wishes,
    phase: MemberPhase,
    entered: Step,
    progress: Progress,
    broken: Option<Broken>,
    promise: Promise,
    holds: BTreeSet<Shard>,
    seat: Option<Seat>,
    /// The world beside which it catches up.
    beside: Option<Arc<Formation>>,
    saved: Option<Part>,
    failure: Option<String>,
    commands: VecDeque<Command>,
}

#[derive(Clone, Debug)]
struct Seat {
    formation: Arc<Formation>,
    rank: usize,
    /// Whether the device is there.
    joined: bool,
    missing: Vec<Transfer>,
    /// How many of the checkpoints that were asked for are written or being written.
    n_saves: u64,
    /// Parts that are being written.
    saving: Vec<Part>,
}

impl Member {
    /// A process that has just started and has nothing; `address` is where its peers reach its tensors.
    pub fn new(job: JobId, worker: Worker, address: Option<SocketAddr>, schedule: Schedule) -> Member {
        Member {
            job,
            worker,
            pid: None,
            address,
            schedule,
            order: OrderId::default(),
            wishes: Wishes::default(),
            phase: MemberPhase::Stopped,
            entered: Step(0),
            progress: Progress::default(),
            broken: None,
            promise: Promise::default(),
            holds: BTreeSet::new(),
            seat: None,
            beside: None,
            saved: None,
            failure: None,
            commands: VecDeque::new(),
        }
    }

    /// The same, as a process of which the kernel has this number.
    #[must_use]
    pub fn with_pid(self, pid: u32) -> Member {
        Member { pid: Some(pid), ..self }
    }

    /// What it is at.
    pub fn report(&self) -> MemberReport {
        // The own shard first: it is what tells a replica from a shadow.
        let seat = self.seat.as_ref().map(|seat| seat.formation.holds[seat.rank][0]);
        let own = seat.or(self.learner().map(|learner| learner.holds[0]));
        let first = own.filter(|shard| self.holds.contains(shard));
        let rest = self.holds.iter().copied().filter(|shard| Some(*shard) != first);
        MemberReport {
            worker: self.worker,
            pid: self.pid,
            address: self.address,
            hangs: false,
            generation: self.order.generation,
            phase: self.phase,
            entered: self.entered,
            progress: self.progress,
            broken: self.broken.clone(),
            promise: self.promise,
            holds: first.into_iter().chain(rest).collect(),
            saved: self.saved,
            failure: self.failure.clone(),
        }
    }

    /// Which process of which place it is.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// The latest generation that it was told of.
    pub fn generation(&self) -> Generation {
        self.order.generation
    }

    /// What it has been told that the operator wants.
    pub fn wishes(&self) -> Wishes {
        self.wishes
    }

    /// The world in which it has a seat, and its rank.
    pub fn seat(&self) -> Option<(&Arc<Formation>, usize)> {
        self.seat.as_ref().map(|seat| (&seat.formation, seat.rank))
    }

    /// Whether it can send this shard of the state `base`.
    pub fn can_send(&self, base: Version, shard: Shard) -> bool {
        self.promise.applied == Some(base) && self.holds.contains(&shard)
    }

    /// An order of the coordinator.
    ///
    /// # Errors
    /// When it is older than one that was taken up (`B-1`). Nothing has changed.
    pub fn handle_order(&mut self, order: &Order) -> Result<(), Stale> {
        if order.job != self.job {
            return Err(Stale::Job { found: order.job, have: self.job });
        }
        refuse_older(order.id.term, self.order.term, |found, have| Stale::Term { found, have })?;
        refuse_older(order.id.generation, self.order.generation, |found, have| Stale::Generation { found, have })?;
        let begins = order.id.generation > self.order.generation;
        if !begins && order.id.stage < self.order.stage {
            return Err(Stale::Overtaken { found: order.id.stage as u64, have: self.order.stage as u64 });
        }
        let formed = !begins && self.order.stage >= Stage::Form;
        let ends = order.id.stage == Stage::End && (begins || self.order.stage < Stage::End);
        self.order = order.id;
        self.wishes = self.wishes.and(order.wishes);
        if begins || ends {
            self.broken = None;
            self.stop();
        }
        if ends {
            self.commands.push_back(Command::Exit);
        }
        if let Some(formation) = &order.formation {
            if !formed {
                self.take_seat(formation);
            }
            if order.id.stage == Stage::Run {
                self.run();
            }
        }
        Ok(())
    }

    /// Its world cannot go on, though nobody told it so: `lost`, or somebody unknown, cannot be reached.
    ///
    /// # Errors
    /// When it was an older world (`B-1`): that one was to end anyhow.
    pub fn handle_broken(&mut self, generation: Generation, lost: Option<Worker>, reason: &str) -> Result<(), Stale> {
        refuse_older(generation, self.order.generation, |found, have| Stale::Generation { found, have })?;
        if self.phase != MemberPhase::Stopped {
            self.broken = Some(Broken { lost, reason: bounded(reason) });
            self.stop();
        }
        Ok(())
    }

    /// The device has taken its seat in the world of this generation.
    ///
    /// # Errors
    /// When that is an older world (`B-1`).
    pub fn handle_joined(&mut self, generation: Generation) -> Result<(), Stale> {
        refuse_older(generation, self.order.generation, |found, have| Stale::Generation { found, have })?;
        if let Some(seat) = &mut self.seat {
            seat.joined = true;
        }
        self.is_at(At::Computes);
        self.become_ready();
        self.become_ready_to_learn();
        Ok(())
    }

    /// A piece of state has arrived.
    ///
    /// # Errors
    /// When it was fetched for an older generation (`B-1`). It must not be used.
    pub fn handle_fetched(&mut self, generation: Generation, transfer: Transfer) -> Result<(), Stale> {
        refuse_older(generation, self.order.generation, |found, have| Stale::Generation { found, have })?;
        self.is_at(At::Computes);
        let base = match &mut self.seat {
            Some(seat) if self.phase == MemberPhase::Healing => {
                seat.missing.retain(|missing| *missing != transfer);
                if seat.missing.iter().all(|missing| missing.shard != transfer.shard) {
                    self.holds.insert(transfer.shard);
                }
                seat.formation.base
            }
            _ => return Ok(()),
        };
        self.promise.applied = Some(base);
        self.become_ready();
        Ok(())
    }

    /// Its own gradients for `step` are computed and on their way to the others.
    ///
    /// # Errors
    /// When they were computed for an older generation (`B-1`).
    pub fn handle_entered(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        self.entered = step;
        self.is_at(At::Waits(Wait::default()));
        Ok(())
    }

    /// All that the update to `step` needs is at hand; the update is not applied.
    ///
    /// # Errors
    /// When it was computed for an older generation (`B-1`).
    pub fn handle_computed(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        let vote = self.promise.vote(generation, step)?;
        self.is_at(At::Waits(Wait::default()));
        self.commands.push_back(Command::Vote(vote, self.wishes));
        Ok(())
    }

    /// All members of the world have voted for `step`; `wishes` is what any of their votes asked for (`B-4`).
    ///
    /// # Errors
    /// When it is of an older generation (`B-1`): the outcome will be told with the next world.
    pub fn handle_committed(&mut self, generation: Generation, step: Step, wishes: Wishes) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        let version = self.promise.learn(generation, step)?;
        self.is_at(At::Computes);
        self.commands.push_back(Command::Apply(version));
        let seat = self.seat.as_mut().expect("a running member has a seat");
        let asked = wishes.save > seat.n_saves;
        seat.n_saves = seat.n_saves.max(wishes.save);
        let due = self.schedule.save_steps > 0 && step.0.is_multiple_of(self.schedule.save_steps);
        let last = wishes.stop || self.is_last(step);
        if asked || due || last {
            self.save(generation, step);
        } else if wishes.pause == generation {
            // B-6
            (self.phase, self.seat) = (MemberPhase::Paused, None);
            self.is_at(At::Rests);
            self.commands.push_back(Command::Report);
            return Ok(());
        }
        self.go_on(generation, step, last);
        Ok(())
    }

    /// A part of a checkpoint is durable.
    pub fn handle_saved(&mut self, part: Part) {
        // Parts may become durable out of order; the last one must not be forgotten for an older one.
        if self.saved.is_none_or(|saved| saved.of < part.of) {
            self.saved = Some(part);
        }
        self.commands.push_back(Command::Report);
        if let Some(seat) = &mut self.seat {
            let n_before = seat.saving.len();
            seat.saving.retain(|other| *other != part);
            if seat.saving.len() < n_before {
                self.finish_if_saved();
            }
        }
    }

    /// All that belongs to the end is done (`B-5`).
    ///
    /// # Errors
    /// When it was done for an older generation (`B-1`): the end will come again.
    pub fn handle_finished(&mut self, generation: Generation) -> Result<(), Stale> {
        refuse_older(generation, self.order.generation, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::Saving {
            self.phase = MemberPhase::Done;
            self.commands.push_back(Command::Report);
        }
        Ok(())
    }

    /// It cannot go on, and no successor could: the job is to end. The first reason is kept.
    pub fn handle_failed(&mut self, reason: &str) {
        self.failure.get_or_insert_with(|| bounded(reason));
        self.commands.push_back(Command::Report);
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// What its device is at now, as far as the machine can tell.
    fn is_at(&mut self, at: At) {
        self.progress = Progress { ticks: self.progress.ticks + 1, at };
    }

    fn refuse_unless_running(&self, generation: Generation) -> Result<(), Stale> {
        let (found, have) = (generation, self.order.generation);
        refuse_older(found, have, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::Running { Ok(()) } else { Err(Stale::Generation { found, have }) }
    }

    fn is_last(&self, step: Step) -> bool {
        self.schedule.last_step.is_some_and(|last| step >= last)
    }

    /// Makes its part of a checkpoint durable, if it has one.
    fn save(&mut self, generation: Generation, step: Step) {
        let seat = self.seat.as_mut().expect("a running member has a seat");
        if let Some(shard) = writes(&seat.formation, seat.rank) {
            let part = Part { of: Checkpoint { generation, step }, shard };
            seat.saving.push(part);
            self.commands.push_back(Command::Save(part));
        }
    }

    /// What comes after a step.
    fn go_on(&mut self, generation: Generation, step: Step, last: bool) {
        if last {
            self.is_at(At::Stores);
            self.phase = MemberPhase::Saving;
            self.commands.push_back(Command::Report);
            self.finish_if_saved();
        } else {
            self.commands.push_back(Command::Compute { generation, step: step.next() });
        }
    }

    fn finish_if_saved(&mut self) {
        let saved = self.seat.as_ref().is_some_and(|seat| seat.saving.is_empty());
        if self.phase == MemberPhase::Saving && saved {
            self.commands.push_back(Command::Finish(self.order.generation));
        }
    }

    fn stop(&mut self) {
        self.is_at(At::Rests);
        self.commands.push_back(Command::Abort(self.order.generation));
        (self.phase, self.seat, self.beside) = (MemberPhase::Stopped, None, None);
        self.commands.push_back(Command::Report);
    }

    /// The last world's outcome is decided and the next one begins.
    fn take_seat(&mut self, formation: &Arc<Formation>) {
        let before = self.promise.applied;
        if self.promise.settle(formation.base, formation.voted_in) {
            if before != self.promise.applied {
                self.commands.push_back(Command::Apply(formation.base));
            } else {
                self.commands.push_back(Command::Discard);
            }
        } else {
            // State of another step or history is of no use to anybody.
            self.promise.applied = None;
            self.holds.clear();
            self.commands.extend([Command::Discard, Command::Keep(vec![])]);
        }
        let Some(rank) = formation.rank_of(self.worker) else {
            if formation.learner(self.worker).is_some() {
                self.take_place_beside(formation);
            } else if formation.guests.contains(&self.worker) {
                self.phase = MemberPhase::Guest;
                self.commands.push_back(Command::Report);
            }
            return;
        };
        self.promise.entered = formation.generation;
        self.entered = formation.base.step;
        let missing = formation.transfers[rank].clone();
        self.commands.push_back(Command::Join(formation.generation));
        for transfer in &missing {
            let (generation, base) = (formation.generation, formation.base);
            self.commands.push_back(Command::Fetch { generation, base, transfer: *transfer });
        }
        let n_saves = formation.n_saves;
        self.seat = Some(Seat { formation: formation.clone(), rank, joined: false, missing, n_saves, saving: vec![] });
        self.phase = MemberPhase::Healing;
    }

    fn become_ready(&mut self) {
        let Some(seat) = &self.seat else { return };
        let complete = seat.formation.holds[seat.rank].iter().all(|shard| self.holds.contains(shard));
        if self.phase == MemberPhase::Healing && seat.joined && seat.missing.is_empty() && complete {
            self.phase = MemberPhase::Ready;
            self.commands.push_back(Command::Report);
        }
    }

    /// The world in which it has its seat trains. What a later order says of that world is not looked at again.
    fn run(&mut self) {
        // It has had a seat there, and what it holds is needed for the next one.
        if self.broken.is_some() || self.phase == MemberPhase::Paused {
            return;
        }
        if self.beside.is_some() {
            self.learn();
            return;
        }
        let seat = self.seat.as_ref().map(|seat| (seat.formation.clone(), seat.rank));
        match (self.phase, seat) {
            // B-2
            (MemberPhase::Ready, Some((formation, rank))) => {
                self.keep(formation.holds[rank].iter().copied().collect());
                self.phase = MemberPhase::Running;
                self.is_at(At::Computes);
                self.commands.push_back(Command::Report);
                let (generation, step) = (formation.generation, formation.base.step);
                let last = self.is_last(step) || formation.rests;
                if last {
                    // The world before has done the last step, and may not have saved it.
                    self.save(generation, step);
                }
                self.go_on(generation, step, last);
            }
            (MemberPhase::Stopped | MemberPhase::Guest, None) => {
                if !self.holds.is_empty() {
                    self.promise.applied = None;
                    self.keep(BTreeSet::new());
                }
                if self.phase == MemberPhase::Guest {
                    self.phase = MemberPhase::Stopped;
                    self.commands.push_back(Command::Report);
                }
            }
            _ => {}
        }
    }

    fn keep(&mut self, shards: BTreeSet<Shard>) {
        if self.holds != shards {
            self.holds = shards;
            self.commands.push_back(Command::Keep(self.holds.iter().copied().collect()));
        }
    }
}

fn bounded(reason: &str) -> String {
    reason[..reason.floor_char_boundary(FAILURE_LEN_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId, NodeId, Term};
    use crate::elastic::recovery::{Source, from_disk};
    use crate::elastic::shadow::place;
    use crate::mesh::Mesh;

    fn worker(slot: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(slot), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn order(generation: u64, stage: Stage, formation: Option<&Arc<Formation>>) -> Order {
        let id = OrderId { term: Term(1), generation: Generation(generation), stage, revision: 0 };
        let wishes = Wishes::default();
        Order { job: JobId(1), id, formation: formation.cloned(), evict: vec![], wishes, release: None }
    }

    /// Two shards on two nodes, loaded from the initial weights.
    fn formation(generation: u64, seats: [Worker; 2]) -> Arc<Formation> {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let holds = place(&mesh, &seats, true);
        Arc::new(Formation {
            generation: Generation(generation),
            mesh,
            seats: seats.to_vec(),
            learners: vec![],
            guests: vec![],
            addresses: vec![None; 2],
            base: Version { lineage: Generation(generation), step: Step(0) },
            voted_in: Generation(generation),
            transfers: from_disk(&holds, Checkpoint::default()),
            holds,
            n_saves: 0,
            rests: false,
        })
    }

    fn running(formation: &Arc<Formation>) -> Member {
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        let generation = formation.generation;
        member.handle_order(&order(generation.0, Stage::Form, Some(formation))).unwrap();
        member.handle_joined(generation).unwrap();
        for transfer in &formation.transfers[0] {
            member.handle_fetched(generation, *transfer).unwrap();
        }
        member.handle_order(&order(generation.0, Stage::Run, Some(formation))).unwrap();
        while member.poll_command().is_some() {}
        member
    }

    // B-1
    #[test]
    fn after_a_stop_nothing_of_the_old_generation_counts() {
        let mut member = running(&formation(1, [worker(0), worker(1)]));
        member.handle_computed(Generation(1), Step(1)).unwrap();
        member.handle_order(&order(2, Stage::Stop, None)).unwrap();

        assert!(member.handle_committed(Generation(1), Step(1), Wishes::default()).is_err());
        assert!(member.handle_entered(Generation(1), Step(2)).is_err());
        assert!(member.handle_order(&order(1, Stage::Run, Some(&formation(1, [worker(0), worker(1)])))).is_err());
        let vote = Vote { generation: Generation(1), step: Step(1) };
        assert_eq!(member.report().promise.voted, Some(vote), "the vote stands until the outcome is decided");
    }

    // B-2
    #[test]
    fn who_has_no_seat_keeps_its_state_until_the_next_world_runs() {
        let mut member = running(&formation(1, [worker(0), worker(1)]));
        let held = member.report().holds;
        let base = member.report().promise.applied.unwrap();
        let next =
            Arc::new(Formation { base, voted_in: Generation(1), ..(*formation(2, [worker(1), worker(2)])).clone() });

        member.handle_order(&order(2, Stage::Form, Some(&next))).unwrap();
        assert!(member.can_send(base, held[0]));
        member.handle_order(&order(2, Stage::Run, Some(&next))).unwrap();

        assert_eq!(member.report().holds, []);
    }

    #[test]
    fn a_world_is_what_it_was_when_the_seat_was_taken() {
        let formed = formation(1, [worker(0), worker(1)]);
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        member.handle_order(&order(1, Stage::Form, Some(&formed))).unwrap();
        member.handle_joined(Generation(1)).unwrap();
        for transfer in &formed.transfers[0] {
            member.handle_fetched(Generation(1), *transfer).unwrap();
        }
        let base = Version { step: Step(7), ..formed.base };
        let other = Arc::new(Formation { base, seats: vec![], holds: vec![], ..(*formed).clone() });

        member.handle_order(&order(1, Stage::Run, Some(&other))).unwrap();

        let commands: Vec<Command> = std::iter::from_fn(|| member.poll_command()).collect();
        assert_eq!(commands.last(), Some(&Command::Compute { generation: Generation(1), step: Step(1) }));
        assert!(member.handle_computed(Generation(1), Step(1)).is_ok());
    }

    // B-2
    #[test]
    fn who_left_a_broken_world_keeps_its_state_whatever_else_is_said_in_that_world() {
        let formation = formation(1, [worker(0), worker(1)]);
        let mut member = running(&formation);
        let held = member.report().holds;
        let mut wish = order(1, Stage::Run, Some(&formation));
        (wish.wishes.save, wish.id.revision) = (1, 1);

        member.handle_broken(Generation(1), None, "a connection broke").unwrap();
        member.handle_order(&wish).unwrap();

        let report = member.report();
        assert_eq!((report.phase, report.holds.len()), (MemberPhase::Stopped, held.len()));
        assert_eq!(report.broken.unwrap().reason, "a connection broke");
        member.handle_order(&order(2, Stage::Stop, None)).unwrap();
        assert_eq!(member.report().broken, None, "that is over with its world");
    }

    // B-3
    #[test]
    fn a_member_without_all_its_state_does_not_run() {
        let formation = formation(1, [worker(0), worker(1)]);
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        member.handle_order(&order(1, Stage::Form, Some(&formation))).unwrap();
        member.handle_joined(Generation(1)).unwrap();
        let first = formation.transfers[0][0];
        assert!(matches!(first.source, Source::Disk(_)));
        member.handle_fetched(Generation(1), first).unwrap();

        member.handle_order(&order(1, Stage::Run, Some(&formation))).unwrap();

        assert_eq!(member.report().phase, MemberPhase::Healing);
    }

    // B-7
    #[test]
    fn a_member_that_lacks_nothing_is_not_ready_before_its_device_is_in_the_world() {
        let before = formation(1, [worker(0), worker(1)]);
        let mut member = running(&before);
        let transfers = vec![vec![]; 2];
        let (base, voted_in) = (before.base, Generation(1));
        let next = Formation { base, voted_in, transfers, ..(*formation(2, [worker(0), worker(1)])).clone() };

        member.handle_order(&order(2, Stage::Form, Some(&Arc::new(next)))).unwrap();
        assert!(commands(&mut member).contains(&Command::Join(Generation(2))));
        assert_eq!(member.report().phase, MemberPhase::Healing);
        assert!(member.handle_joined(Generation(1)).is_err());
        member.handle_joined(Generation(2)).unwrap();

        assert_eq!(member.report().phase, MemberPhase::Ready);
    }

    fn commands(member: &mut Member) -> Vec<Command> {
        std::iter::from_fn(|| member.poll_command()).collect()
    }

    #[test]
    fn a_guest_says_so_until_the_world_runs() {
        let mut member = running(&formation(1, [worker(0), worker(1)]));
        let base = member.report().promise.applied.unwrap();
        let next = Formation { base, voted_in: Generation(1), ..(*formation(2, [worker(1), worker(2)])).clone() };
        let next = Arc::new(Formation { guests: vec![worker(0)], addresses: vec![None; 3], ..next });

        member.handle_order(&order(2, Stage::Form, Some(&next))).unwrap();
        assert_eq!(member.report().phase, MemberPhase::Guest);
        member.handle_order(&order(2, Stage::Run, Some(&next))).unwrap();

        assert_eq!((member.report().phase, member.report().holds), (MemberPhase::Stopped, vec![]));
    }

    // B-4
    #[test]
    fn a_wish_counts_once_all_votes_have_been_counted_and_not_before() {
        let formation = formation(1, [worker(0), worker(1)]);
        let mut member = running(&formation);
        let wishes = Wishes { save: 1, ..Wishes::default() };
        let mut told = order(1, Stage::Run, Some(&formation));
        (told.wishes, told.id.revision) = (wishes, wishes.revision());

        member.handle_order(&told).unwrap();
        assert_eq!(commands(&mut member), []);
        member.handle_computed(Generation(1), Step(1)).unwrap();
        let vote = Vote { generation: Generation(1), step: Step(1) };
        assert_eq!(commands(&mut member), [Command::Vote(vote, wishes)]);
        member.handle_committed(Generation(1), Step(1), wishes).unwrap();
        assert!(commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))));
        member.handle_computed(Generation(1), Step(2)).unwrap();
        member.handle_committed(Generation(1), Step(2), wishes).unwrap();

        assert!(!commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))), "it was one wish");
    }

    // B-6
    #[test]
    fn a_member_pauses_behind_a_step_that_is_not_saved_and_keeps_what_it_has() {
        let formation = formation(1, [worker(0), worker(1)]);
        let mut member = running(&formation);
        let wishes = Wishes { save: 1, pause: Generation(1), ..Wishes::default() };
        for step in 1..=2 {
            assert_eq!(member.report().phase, MemberPhase::Running);
            member.handle_computed(Generation(1), Step(step)).unwrap();
            member.handle_committed(Generation(1), Step(step), wishes).unwrap();
        }

        let report = member.report();
        assert_eq!((report.phase, report.holds.len()), (MemberPhase::Paused, 2));
        assert_eq!(report.promise.applied.map(|version| version.step), Some(Step(2)));
        assert!(member.handle_computed(Generation(1), Step(3)).is_err());
        let mut later = order(1, Stage::Run, Some(&formation));
        (later.wishes, later.id.revision) = (wishes, wishes.revision());
        member.handle_order(&later).unwrap();
        assert_eq!(member.report().holds.len(), 2, "the next world needs it");
    }

    // B-5
    #[test]
    fn a_member_is_done_when_its_parts_are_durable_and_the_shell_has_finished() {
        let mut member = running(&formation(1, [worker(0), worker(1)]));
        let stop = Wishes { stop: true, ..Wishes::default() };
        member.handle_computed(Generation(1), Step(1)).unwrap();
        member.handle_committed(Generation(1), Step(1), stop).unwrap();

        let finish = Command::Finish(Generation(1));
        let before = commands(&mut member);
        let part = before.iter().find_map(|command| if let Command::Save(part) = command { Some(*part) } else { None });
        assert!(!before.contains(&finish) && member.report().phase == MemberPhase::Saving);
        assert!(!before.iter().any(|command| matches!(command, Command::Compute { .. })));
        member.handle_saved(part.unwrap());
        assert!(commands(&mut member).contains(&finish));
        member.handle_finished(Generation(1)).unwrap();

        assert_eq!(member.report().phase, MemberPhase::Done);
    }

    #[test]
    fn an_older_part_that_is_durable_late_does_not_hide_the_newest() {
        let formation = formation(1, [worker(0), worker(1)]);
        let mut member = running(&formation);
        let part = |step| Part {
            of: Checkpoint { generation: Generation(1), step: Step(step) },
            shard: formation.holds[0][0],
        };

        member.handle_saved(part(20));
        member.handle_saved(part(10));

        assert_eq!(member.report().saved, Some(part(20)));
    }
}
