//! The state machine of a rank process: takes its rank, fetches its state, trains, votes, stops.
//!
//! Invariants:
//! - `MEMBER-1` Nothing from an older generation takes effect: no desired state, no step outcome, no fetched state.
//! - `MEMBER-2` A member drops superseded state when its new world runs, not before: until then another failure may
//!   need it.
//! - `MEMBER-3` A member runs only with the complete state of its rank.
//! - `MEMBER-4` All members of a world act on a request after the same step: requests travel with the votes, and each
//!   member acts on the union of the requests in all votes for a step.
//! - `MEMBER-5` A member is done only when the last step is committed and all its checkpoint parts are durable.
//! - `MEMBER-6` All members of a pausing world stop after the same step and keep its state, without saving it.
//! - `MEMBER-7` A member is not ready before its device has joined the world, even if its state is complete: until then
//!   an operation of an older world may still access the memory of its peers.
//! - `MEMBER-8` is in `catching_up`.

mod catching_up;
mod command;

pub use command::Command;

use super::commit::{CommitState, Version};
use super::identity::{Generation, JobId, Stale, Step, Worker, refuse_older};
use super::message::{
    Broken, DesiredState, DesiredStateId, FAILURE_LEN_MAX, MemberPhase, MemberReport, Requests, Stage, WorldPlan,
};
use super::progress::{At, Progress, Wait};
use super::recovery::Transfer;
use super::shadow::Shard;
use super::snapshot::{Checkpoint, Part, writes};
use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

/// When a member saves and stops without a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Steps between checkpoints; 0 for only the last one and requested ones.
    pub save_steps: u64,
    /// The last step; absent if the job runs until it is stopped.
    pub last_step: Option<Step>,
}

/// State machine of a rank process. See the [module](self).
#[derive(Clone, Debug)]
pub struct Member {
    job: JobId,
    worker: Worker,
    pid: Option<u32>,
    address: Option<SocketAddr>,
    schedule: Schedule,
    desired_state: DesiredStateId,
    requests: Requests,
    phase: MemberPhase,
    entered: Step,
    progress: Progress,
    broken: Option<Broken>,
    commit_state: CommitState,
    holds: BTreeSet<Shard>,
    assignment: Option<RankAssignment>,
    /// The plan of the world beside which it catches up.
    beside: Option<Arc<WorldPlan>>,
    saved: Option<Part>,
    failure: Option<String>,
    commands: VecDeque<Command>,
}

#[derive(Clone, Debug)]
struct RankAssignment {
    world_plan: Arc<WorldPlan>,
    rank: usize,
    /// Whether the device has joined the world.
    joined: bool,
    missing: Vec<Transfer>,
    /// Number of requested checkpoints that are written or being written.
    n_saves: u64,
    /// Parts that are being written.
    saving: Vec<Part>,
}

impl Member {
    /// A new process without state; `address` is where peers reach its tensors.
    pub fn new(job: JobId, worker: Worker, address: Option<SocketAddr>, schedule: Schedule) -> Member {
        Member {
            job,
            worker,
            pid: None,
            address,
            schedule,
            desired_state: DesiredStateId::default(),
            requests: Requests::default(),
            phase: MemberPhase::Stopped,
            entered: Step(0),
            progress: Progress::default(),
            broken: None,
            commit_state: CommitState::default(),
            holds: BTreeSet::new(),
            assignment: None,
            beside: None,
            saved: None,
            failure: None,
            commands: VecDeque::new(),
        }
    }

    /// Sets the process id.
    #[must_use]
    pub fn with_pid(self, pid: u32) -> Member {
        Member { pid: Some(pid), ..self }
    }

    /// The member's status report.
    pub fn report(&self) -> MemberReport {
        // The rank's own shard comes first, which distinguishes a replica from a shadow.
        let assignment = self.assignment.as_ref().map(|assignment| assignment.world_plan.holds[assignment.rank][0]);
        let own = assignment.or(self.catch_up().map(|catch_up| catch_up.holds[0]));
        let first = own.filter(|shard| self.holds.contains(shard));
        let rest = self.holds.iter().copied().filter(|shard| Some(*shard) != first);
        MemberReport {
            worker: self.worker,
            pid: self.pid,
            address: self.address,
            device: None,
            hangs: false,
            generation: self.desired_state.generation,
            phase: self.phase,
            entered: self.entered,
            progress: self.progress,
            broken: self.broken.clone(),
            commit_state: self.commit_state,
            holds: first.into_iter().chain(rest).collect(),
            saved: self.saved,
            failure: self.failure.clone(),
        }
    }

    /// Its phase in the latest generation.
    pub fn phase(&self) -> MemberPhase {
        self.phase
    }

    /// Its identity.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// The latest generation announced to it.
    pub fn generation(&self) -> Generation {
        self.desired_state.generation
    }

    /// The operator requests known to this member.
    pub fn requests(&self) -> Requests {
        self.requests
    }

    /// The plan of the world in which it has a rank, and that rank.
    pub fn assignment(&self) -> Option<(&Arc<WorldPlan>, usize)> {
        self.assignment.as_ref().map(|assignment| (&assignment.world_plan, assignment.rank))
    }

    /// Whether it can send this shard of the state `base`.
    pub fn can_send(&self, base: Version, shard: Shard) -> bool {
        self.commit_state.applied == Some(base) && self.holds.contains(&shard)
    }

    /// Whether a desired state would end this member's world. Everything that the world has done so far must be handled
    /// before that desired state.
    ///
    /// # Errors
    /// When the desired state is older than the current one (`MEMBER-1`).
    pub fn ends_world(&self, desired_state: &DesiredState) -> Result<bool, Stale> {
        let (id, own) = (desired_state.id, self.desired_state);
        if desired_state.job != self.job {
            return Err(Stale::Job { found: desired_state.job, have: self.job });
        }
        refuse_older(id.term, own.term, |found, have| Stale::Term { found, have })?;
        refuse_older(id.generation, own.generation, |found, have| Stale::Generation { found, have })?;
        let begins = id.generation > own.generation;
        if !begins && id.stage < own.stage {
            return Err(Stale::Overtaken { found: id.stage as u64, have: own.stage as u64 });
        }
        Ok(begins || id.stage == Stage::End && own.stage < Stage::End)
    }

    /// Handles a desired state from the coordinator.
    ///
    /// # Errors
    /// When the desired state is older than the current one (`MEMBER-1`). Nothing has changed.
    pub fn handle_desired_state(&mut self, desired_state: &DesiredState) -> Result<(), Stale> {
        let ends_world = self.ends_world(desired_state)?;
        let begins = desired_state.id.generation > self.desired_state.generation;
        let formed = !begins && self.desired_state.stage >= Stage::Form;
        let ends = ends_world && desired_state.id.stage == Stage::End;
        self.desired_state = desired_state.id;
        self.requests = self.requests.and(desired_state.requests);
        if ends_world {
            self.broken = None;
            self.stop();
        }
        if ends {
            self.commands.push_back(Command::Exit);
        }
        if let Some(world_plan) = &desired_state.world_plan {
            if !formed {
                self.take_rank(world_plan);
            }
            if desired_state.id.stage == Stage::Run {
                self.run();
            }
        }
        Ok(())
    }

    /// Reports that its world cannot continue because `lost`, or an unknown peer, cannot be reached.
    ///
    /// # Errors
    /// When the world is an older one (`MEMBER-1`), which was ending anyway.
    pub fn handle_broken(&mut self, generation: Generation, lost: Option<Worker>, reason: &str) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        if self.phase != MemberPhase::Stopped {
            self.broken = Some(Broken { lost, reason: bounded(reason) });
            self.stop();
        }
        Ok(())
    }

    /// The device has joined the world of this generation.
    ///
    /// # Errors
    /// When that is an older world (`MEMBER-1`).
    pub fn handle_joined(&mut self, generation: Generation) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        if let Some(assignment) = &mut self.assignment {
            assignment.joined = true;
        }
        self.is_at(At::Computes);
        self.become_ready();
        self.become_ready_to_catch_up();
        Ok(())
    }

    /// A piece of state has arrived.
    ///
    /// # Errors
    /// When it was fetched for an older generation (`MEMBER-1`). It must not be used.
    pub fn handle_fetched(&mut self, generation: Generation, transfer: Transfer) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        self.is_at(At::Computes);
        let base = match &mut self.assignment {
            Some(assignment) if self.phase == MemberPhase::Healing => {
                assignment.missing.retain(|missing| *missing != transfer);
                if assignment.missing.iter().all(|missing| missing.shard != transfer.shard) {
                    self.holds.insert(transfer.shard);
                }
                assignment.world_plan.base
            }
            _ => return Ok(()),
        };
        self.commit_state.applied = Some(base);
        self.become_ready();
        Ok(())
    }

    /// Its own gradients for `step` are computed and being sent to its peers.
    ///
    /// # Errors
    /// When they were computed for an older generation (`MEMBER-1`).
    pub fn handle_entered(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        self.entered = step;
        self.is_at(At::Waits(Wait::default()));
        Ok(())
    }

    /// Everything that the update to `step` needs has arrived; the update is not applied.
    ///
    /// # Errors
    /// When it was computed for an older generation (`MEMBER-1`).
    pub fn handle_computed(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        let vote = self.commit_state.vote(generation, step)?;
        self.is_at(At::Waits(Wait::default()));
        self.commands.push_back(Command::Vote(vote, self.requests));
        Ok(())
    }

    /// All members of the world have voted for `step`; `requests` is the union of the votes' requests (`MEMBER-4`).
    ///
    /// # Errors
    /// When it is of an older generation (`MEMBER-1`): the next world plan will carry the outcome.
    pub fn handle_committed(&mut self, generation: Generation, step: Step, requests: Requests) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        let version = self.commit_state.commit(generation, step)?;
        self.is_at(At::Computes);
        self.commands.push_back(Command::Apply(version));
        let assignment = self.assignment.as_mut().expect("a running member has a rank");
        let asked = requests.save > assignment.n_saves;
        assignment.n_saves = assignment.n_saves.max(requests.save);
        let due = self.schedule.save_steps > 0 && step.0.is_multiple_of(self.schedule.save_steps);
        let last = requests.stop || self.is_last(step);
        if asked || due || last {
            self.save(generation, step);
        } else if requests.pause == generation {
            // MEMBER-6
            (self.phase, self.assignment) = (MemberPhase::Paused, None);
            self.is_at(At::Idle);
            self.commands.push_back(Command::Report);
            return Ok(());
        }
        self.go_on(generation, step, last);
        Ok(())
    }

    /// A part of a checkpoint is durable.
    pub fn handle_saved(&mut self, part: Part) {
        // Parts may become durable out of order; an older part must not replace the latest.
        if self.saved.is_none_or(|saved| saved.of < part.of) {
            self.saved = Some(part);
        }
        self.commands.push_back(Command::Report);
        if let Some(assignment) = &mut self.assignment {
            let n_before = assignment.saving.len();
            assignment.saving.retain(|other| *other != part);
            if assignment.saving.len() < n_before {
                self.finish_if_saved();
            }
        }
    }

    /// The shell has done everything that the end requires (`MEMBER-5`).
    ///
    /// # Errors
    /// When it was done for an older generation (`MEMBER-1`): the end will come again.
    pub fn handle_finished(&mut self, generation: Generation) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::Saving {
            self.phase = MemberPhase::Done;
            self.commands.push_back(Command::Report);
        }
        Ok(())
    }

    /// Handles a permanent failure, which ends the job because a successor would fail, too. The first reason is kept.
    pub fn handle_failed(&mut self, reason: &str) {
        self.failure.get_or_insert_with(|| bounded(reason));
        self.commands.push_back(Command::Report);
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// Records what the device is doing, as far as this machine can tell.
    fn is_at(&mut self, at: At) {
        self.progress = Progress { ticks: self.progress.ticks + 1, at };
    }

    fn refuse_unless_running(&self, generation: Generation) -> Result<(), Stale> {
        let (found, have) = (generation, self.desired_state.generation);
        refuse_older(found, have, |found, have| Stale::Generation { found, have })?;
        if self.phase == MemberPhase::Running { Ok(()) } else { Err(Stale::Generation { found, have }) }
    }

    fn is_last(&self, step: Step) -> bool {
        self.schedule.last_step.is_some_and(|last| step >= last)
    }

    /// Makes its part of a checkpoint durable, if it has one.
    fn save(&mut self, generation: Generation, step: Step) {
        let assignment = self.assignment.as_mut().expect("a running member has a rank");
        if let Some(shard) = writes(&assignment.world_plan, assignment.rank) {
            let part = Part { of: Checkpoint { generation, step }, shard };
            assignment.saving.push(part);
            self.commands.push_back(Command::Save(part));
        }
    }

    /// Continues after a step.
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
        let saved = self.assignment.as_ref().is_some_and(|assignment| assignment.saving.is_empty());
        if self.phase == MemberPhase::Saving && saved {
            self.commands.push_back(Command::Finish(self.desired_state.generation));
        }
    }

    fn stop(&mut self) {
        self.is_at(At::Idle);
        self.commands.push_back(Command::Abort(self.desired_state.generation));
        (self.phase, self.assignment, self.beside) = (MemberPhase::Stopped, None, None);
        self.commands.push_back(Command::Report);
    }

    /// Applies the outcome of the last world and begins the next one.
    fn take_rank(&mut self, world_plan: &Arc<WorldPlan>) {
        let before = self.commit_state.applied;
        if self.commit_state.settle(world_plan.base, world_plan.voted_in) {
            if before != self.commit_state.applied {
                self.commands.push_back(Command::Apply(world_plan.base));
            } else {
                self.commands.push_back(Command::Discard);
            }
        } else {
            // State of another step or lineage is useless.
            self.commit_state.applied = None;
            self.holds.clear();
            self.commands.extend([Command::Discard, Command::Keep(vec![])]);
        }
        let Some(rank) = world_plan.rank_of(self.worker) else {
            if world_plan.catch_up(self.worker).is_some() {
                self.join_beside(world_plan);
            } else if world_plan.guests.contains(&self.worker) {
                self.phase = MemberPhase::Guest;
                self.commands.push_back(Command::Report);
            }
            return;
        };
        self.commit_state.entered = world_plan.generation;
        self.entered = world_plan.base.step;
        let missing = world_plan.transfers[rank].clone();
        self.commands.push_back(Command::Join(world_plan.generation));
        for transfer in &missing {
            let (generation, base) = (world_plan.generation, world_plan.base);
            self.commands.push_back(Command::Fetch { generation, base, transfer: *transfer });
        }
        let n_saves = world_plan.n_saves;
        self.assignment = Some(RankAssignment {
            world_plan: world_plan.clone(),
            rank,
            joined: false,
            missing,
            n_saves,
            saving: vec![],
        });
        self.phase = MemberPhase::Healing;
    }

    fn become_ready(&mut self) {
        let Some(assignment) = &self.assignment else { return };
        let complete = assignment.world_plan.holds[assignment.rank].iter().all(|shard| self.holds.contains(shard));
        if self.phase == MemberPhase::Healing && assignment.joined && assignment.missing.is_empty() && complete {
            self.phase = MemberPhase::Ready;
            self.commands.push_back(Command::Report);
        }
    }

    /// Starts training. The member keeps the plan under which it took its rank and ignores the plans of later messages.
    fn run(&mut self) {
        // The member has left this world's steps, and the next world needs its state.
        if self.broken.is_some() || self.phase == MemberPhase::Paused {
            return;
        }
        if self.beside.is_some() {
            self.start_catch_up();
            return;
        }
        let assignment = self.assignment.as_ref().map(|assignment| (assignment.world_plan.clone(), assignment.rank));
        match (self.phase, assignment) {
            // MEMBER-2
            (MemberPhase::Ready, Some((world_plan, rank))) => {
                self.keep(world_plan.holds[rank].iter().copied().collect());
                self.phase = MemberPhase::Running;
                self.is_at(At::Computes);
                self.commands.push_back(Command::Report);
                let (generation, step) = (world_plan.generation, world_plan.base.step);
                let last = self.is_last(step) || world_plan.rests;
                if last {
                    // The previous world has committed the last step, but may not have saved it.
                    self.save(generation, step);
                }
                self.go_on(generation, step, last);
            }
            (MemberPhase::Stopped | MemberPhase::Guest, None) => {
                if !self.holds.is_empty() {
                    self.commit_state.applied = None;
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
    use crate::elastic::commit::Vote;
    use crate::elastic::identity::{Incarnation, MemberId, NodeId, Term};
    use crate::elastic::recovery::{Source, from_disk};
    use crate::elastic::shadow::place;
    use crate::mesh::Mesh;

    fn worker(slot: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(slot), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn desired_state(generation: u64, stage: Stage, world_plan: Option<&Arc<WorldPlan>>) -> DesiredState {
        let id = DesiredStateId { term: Term(1), generation: Generation(generation), stage, revision: 0 };
        let requests = Requests::default();
        DesiredState {
            job: JobId(1),
            id,
            world_plan: world_plan.cloned(),
            evict: vec![],
            requests,
            release: None,
            refused: None,
        }
    }

    /// Two shards on two nodes, loaded from the initial weights.
    fn world_plan(generation: u64, assignments: [Worker; 2]) -> Arc<WorldPlan> {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let holds = place(&mesh, &assignments, true);
        Arc::new(WorldPlan {
            generation: Generation(generation),
            mesh,
            assignments: assignments.to_vec(),
            catching_up: vec![],
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

    fn running(world_plan: &Arc<WorldPlan>) -> Member {
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        let generation = world_plan.generation;
        member.handle_desired_state(&desired_state(generation.0, Stage::Form, Some(world_plan))).unwrap();
        member.handle_joined(generation).unwrap();
        for transfer in &world_plan.transfers[0] {
            member.handle_fetched(generation, *transfer).unwrap();
        }
        member.handle_desired_state(&desired_state(generation.0, Stage::Run, Some(world_plan))).unwrap();
        while member.poll_command().is_some() {}
        member
    }

    // MEMBER-1
    #[test]
    fn stopped_member_rejects_messages_of_the_old_generation() {
        let mut member = running(&world_plan(1, [worker(0), worker(1)]));
        member.handle_computed(Generation(1), Step(1)).unwrap();
        member.handle_desired_state(&desired_state(2, Stage::Stop, None)).unwrap();

        assert!(member.handle_committed(Generation(1), Step(1), Requests::default()).is_err());
        assert!(member.handle_entered(Generation(1), Step(2)).is_err());
        assert!(
            member
                .handle_desired_state(&desired_state(1, Stage::Run, Some(&world_plan(1, [worker(0), worker(1)]))))
                .is_err()
        );
        let vote = Vote { generation: Generation(1), step: Step(1) };
        assert_eq!(member.report().commit_state.voted, Some(vote), "the vote stands until the outcome is decided");
    }

    // MEMBER-2
    #[test]
    fn member_without_a_rank_keeps_its_state_until_the_next_world_runs() {
        let mut member = running(&world_plan(1, [worker(0), worker(1)]));
        let held = member.report().holds;
        let base = member.report().commit_state.applied.unwrap();
        let next =
            Arc::new(WorldPlan { base, voted_in: Generation(1), ..(*world_plan(2, [worker(1), worker(2)])).clone() });

        member.handle_desired_state(&desired_state(2, Stage::Form, Some(&next))).unwrap();
        assert!(member.can_send(base, held[0]));
        member.handle_desired_state(&desired_state(2, Stage::Run, Some(&next))).unwrap();

        assert_eq!(member.report().holds, []);
    }

    #[test]
    fn member_keeps_the_plan_under_which_it_took_its_rank() {
        let formed = world_plan(1, [worker(0), worker(1)]);
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        member.handle_desired_state(&desired_state(1, Stage::Form, Some(&formed))).unwrap();
        member.handle_joined(Generation(1)).unwrap();
        for transfer in &formed.transfers[0] {
            member.handle_fetched(Generation(1), *transfer).unwrap();
        }
        let base = Version { step: Step(7), ..formed.base };
        let other = Arc::new(WorldPlan { base, assignments: vec![], holds: vec![], ..(*formed).clone() });

        member.handle_desired_state(&desired_state(1, Stage::Run, Some(&other))).unwrap();

        let commands: Vec<Command> = std::iter::from_fn(|| member.poll_command()).collect();
        assert_eq!(commands.last(), Some(&Command::Compute { generation: Generation(1), step: Step(1) }));
        assert!(member.handle_computed(Generation(1), Step(1)).is_ok());
    }

    // MEMBER-2
    #[test]
    fn member_that_left_a_broken_world_keeps_its_state() {
        let world_plan = world_plan(1, [worker(0), worker(1)]);
        let mut member = running(&world_plan);
        let held = member.report().holds;
        let mut request = desired_state(1, Stage::Run, Some(&world_plan));
        (request.requests.save, request.id.revision) = (1, 1);

        member.handle_broken(Generation(1), None, "a connection broke").unwrap();
        member.handle_desired_state(&request).unwrap();

        let report = member.report();
        assert_eq!((report.phase, report.holds.len()), (MemberPhase::Stopped, held.len()));
        assert_eq!(report.broken.unwrap().reason, "a connection broke");
        member.handle_desired_state(&desired_state(2, Stage::Stop, None)).unwrap();
        assert_eq!(member.report().broken, None, "the failure ends with its world");
    }

    // MEMBER-3
    #[test]
    fn member_without_all_its_state_does_not_run() {
        let world_plan = world_plan(1, [worker(0), worker(1)]);
        let mut member = Member::new(JobId(1), worker(0), None, Schedule::default());
        member.handle_desired_state(&desired_state(1, Stage::Form, Some(&world_plan))).unwrap();
        member.handle_joined(Generation(1)).unwrap();
        let first = world_plan.transfers[0][0];
        assert!(matches!(first.source, Source::Disk(_)));
        member.handle_fetched(Generation(1), first).unwrap();

        member.handle_desired_state(&desired_state(1, Stage::Run, Some(&world_plan))).unwrap();

        assert_eq!(member.report().phase, MemberPhase::Healing);
    }

    // MEMBER-7
    #[test]
    fn member_with_all_its_state_is_not_ready_before_its_device_joins_the_world() {
        let before = world_plan(1, [worker(0), worker(1)]);
        let mut member = running(&before);
        let transfers = vec![vec![]; 2];
        let (base, voted_in) = (before.base, Generation(1));
        let next = WorldPlan { base, voted_in, transfers, ..(*world_plan(2, [worker(0), worker(1)])).clone() };

        member.handle_desired_state(&desired_state(2, Stage::Form, Some(&Arc::new(next)))).unwrap();
        assert!(commands(&mut member).contains(&Command::Join(Generation(2))));
        before.transfers[0].iter().for_each(|transfer| member.handle_fetched(Generation(2), *transfer).unwrap());
        assert_eq!(member.report().phase, MemberPhase::Healing);
        assert!(member.handle_joined(Generation(1)).is_err());
        member.handle_joined(Generation(2)).unwrap();

        assert_eq!(member.report().phase, MemberPhase::Ready);
    }

    fn commands(member: &mut Member) -> Vec<Command> {
        std::iter::from_fn(|| member.poll_command()).collect()
    }

    #[test]
    fn guest_reports_its_phase_until_the_world_runs() {
        let mut member = running(&world_plan(1, [worker(0), worker(1)]));
        let base = member.report().commit_state.applied.unwrap();
        let next = WorldPlan { base, voted_in: Generation(1), ..(*world_plan(2, [worker(1), worker(2)])).clone() };
        let next = Arc::new(WorldPlan { guests: vec![worker(0)], addresses: vec![None; 3], ..next });

        member.handle_desired_state(&desired_state(2, Stage::Form, Some(&next))).unwrap();
        assert_eq!(member.report().phase, MemberPhase::Guest);
        member.handle_desired_state(&desired_state(2, Stage::Run, Some(&next))).unwrap();

        assert_eq!((member.report().phase, member.report().holds), (MemberPhase::Stopped, vec![]));
    }

    // MEMBER-4
    #[test]
    fn request_takes_effect_only_after_all_votes_are_counted() {
        let world_plan = world_plan(1, [worker(0), worker(1)]);
        let mut member = running(&world_plan);
        let requests = Requests { save: 1, ..Requests::default() };
        let mut request = desired_state(1, Stage::Run, Some(&world_plan));
        (request.requests, request.id.revision) = (requests, requests.revision());

        member.handle_desired_state(&request).unwrap();
        assert_eq!(commands(&mut member), []);
        member.handle_computed(Generation(1), Step(1)).unwrap();
        let vote = Vote { generation: Generation(1), step: Step(1) };
        assert_eq!(commands(&mut member), [Command::Vote(vote, requests)]);
        member.handle_committed(Generation(1), Step(1), requests).unwrap();
        assert!(commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))));
        member.handle_computed(Generation(1), Step(2)).unwrap();
        member.handle_committed(Generation(1), Step(2), requests).unwrap();

        assert!(
            !commands(&mut member).iter().any(|command| matches!(command, Command::Save(_))),
            "one request, one checkpoint"
        );
    }

    // MEMBER-6
    #[test]
    fn member_pauses_behind_an_unsaved_step_and_keeps_its_state() {
        let world_plan = world_plan(1, [worker(0), worker(1)]);
        let mut member = running(&world_plan);
        let requests = Requests { save: 1, pause: Generation(1), ..Requests::default() };
        for step in 1..=2 {
            assert_eq!(member.report().phase, MemberPhase::Running);
            member.handle_computed(Generation(1), Step(step)).unwrap();
            member.handle_committed(Generation(1), Step(step), requests).unwrap();
        }

        let report = member.report();
        assert_eq!((report.phase, report.holds.len()), (MemberPhase::Paused, 2));
        assert_eq!(report.commit_state.applied.map(|version| version.step), Some(Step(2)));
        assert!(member.handle_computed(Generation(1), Step(3)).is_err());
        let mut later = desired_state(1, Stage::Run, Some(&world_plan));
        (later.requests, later.id.revision) = (requests, requests.revision());
        member.handle_desired_state(&later).unwrap();
        assert_eq!(member.report().holds.len(), 2, "the next world needs the state");
    }

    // MEMBER-5
    #[test]
    fn member_is_done_when_its_parts_are_durable_and_the_shell_has_finished() {
        let mut member = running(&world_plan(1, [worker(0), worker(1)]));
        let stop = Requests { stop: true, ..Requests::default() };
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
    fn older_part_that_becomes_durable_late_does_not_replace_the_newest() {
        let world_plan = world_plan(1, [worker(0), worker(1)]);
        let mut member = running(&world_plan);
        let part = |step| Part {
            of: Checkpoint { generation: Generation(1), step: Step(step) },
            shard: world_plan.holds[0][0],
        };

        member.handle_saved(part(20));
        member.handle_saved(part(10));

        assert_eq!(member.report().saved, Some(part(20)));
    }
}
