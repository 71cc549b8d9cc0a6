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
//! - `MEMBER-6` All members of a pausing world stop after the same step and keep its state, without saving it, even if a
//!   save is due after this step: the next world continues from it.
//! - `MEMBER-7` A member is not ready before its device has joined the world, even if its state is complete: until then
//!   an operation of an older world may still access the memory of its peers.
//! - `MEMBER-8` is in `catching_up`.

mod catching_up;
mod command;

pub use command::Command;

use super::checkpoint::{Checkpoint, Part};
use super::commit::{CommitState, Version};
use super::copies::Difference;
use super::identity::{Generation, JobId, Stale, Step, Worker, refuse_older};
use super::message::{
    Broken, DesiredState, DesiredStateId, FAILURE_LEN_MAX, MemberPhase, MemberReport, NotFinite, Requests, Settled,
    Stage, Unsaved, WorldPlan, printable,
};
use super::progress::{At, Progress, Wait};
use super::recovery::Transfer;
use super::shadow::Shard;
use super::snapshot::writes;
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
    settled: Option<Settled>,
    commit_state: CommitState,
    holds: BTreeSet<Shard>,
    assignment: Option<RankAssignment>,
    /// The plan of the world beside which it catches up.
    beside: Option<Arc<WorldPlan>>,
    saved: Option<Part>,
    unsaved: Option<Unsaved>,
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
            settled: None,
            commit_state: CommitState::default(),
            holds: BTreeSet::new(),
            assignment: None,
            beside: None,
            saved: None,
            unsaved: None,
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
            settled: self.settled.clone(),
            commit_state: self.commit_state,
            holds: first.into_iter().chain(rest).collect(),
            saved: self.saved,
            unsaved: self.unsaved.clone(),
            failure: self.failure.clone(),
            fault: None,
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
            (self.broken, self.settled) = (None, None);
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
            self.broken = Some(Broken { lost, corrupt: None, not_finite: None, reason: bounded(reason) });
            self.stop();
        }
        Ok(())
    }

    /// Reports that copies of the world's state differ, so that none of them may be used.
    ///
    /// # Errors
    /// As [`Member::handle_broken`].
    pub fn handle_corrupt(&mut self, generation: Generation, found: Difference, reason: &str) -> Result<(), Stale> {
        self.handle_broken(generation, None, reason)?;
        if let Some(broken) = &mut self.broken {
            broken.corrupt = Some(Box::new(found));
        }
        Ok(())
    }

    /// Reports that the loss or gradient of a step is not finite, although the copies of the state agree.
    ///
    /// # Errors
    /// As [`Member::handle_broken`].
    pub fn handle_not_finite(&mut self, generation: Generation, found: NotFinite, reason: &str) -> Result<(), Stale> {
        self.handle_broken(generation, None, reason)?;
        if let Some(broken) = &mut self.broken {
            broken.not_finite = Some(found);
        }
        Ok(())
    }

    /// Reports that all copies agree after a step at which they differed before.
    ///
    /// # Errors
    /// When the world is an older one (`MEMBER-1`).
    pub fn handle_settled(&mut self, generation: Generation, settled: Settled) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        self.settled = Some(settled);
        self.commands.push_back(Command::Report);
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
        if asked || last {
            self.save(generation, step);
        } else if requests.pause == generation {
            // MEMBER-6: with a save at every step, or saves that take as long as the steps between them, no other step would do.
            (self.phase, self.assignment) = (MemberPhase::Paused, None);
            self.is_at(At::Idle);
            self.commands.push_back(Command::Report);
            return Ok(());
        } else if due {
            self.save(generation, step);
        }
        self.go_on(generation, step, last);
        Ok(())
    }

    /// All members have agreed to stop after a step that they have applied: what follows it, such as an evaluation, would take too
    /// long (`MEMBER-4`).
    ///
    /// # Errors
    /// When it is of an older generation (`MEMBER-1`).
    pub fn handle_stopped(&mut self, generation: Generation, step: Step) -> Result<(), Stale> {
        self.refuse_unless_running(generation)?;
        self.save(generation, step);
        self.go_on(generation, step, true);
        Ok(())
    }

    /// A part of a checkpoint is durable. It takes the place of parts of older checkpoints, which may have failed.
    pub fn handle_saved(&mut self, part: Part) {
        // Parts may become durable out of order; an older part must not replace the latest.
        if self.saved.is_none_or(|saved| saved.of < part.of) {
            self.saved = Some(part);
        }
        self.commands.push_back(Command::Report);
        if let Some(assignment) = &mut self.assignment {
            let n_before = assignment.saving.len();
            assignment.saving.retain(|other| other.of > part.of);
            if assignment.saving.len() < n_before {
                self.finish_if_saved();
            }
        }
    }

    /// The world could not save the checkpoint of a step, for this reason.
    ///
    /// # Errors
    /// When the world is an older one (`MEMBER-1`).
    pub fn handle_unsaved(&mut self, generation: Generation, step: Step, reason: &str) -> Result<(), Stale> {
        refuse_older(generation, self.desired_state.generation, |found, have| Stale::Generation { found, have })?;
        self.unsaved = Some(Unsaved { of: Checkpoint { generation, step }, reason: bounded(reason) });
        self.commands.push_back(Command::Report);
        Ok(())
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
            if assignment.saving.contains(&part) {
                return;
            }
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

    /// Applies the outcome of the last world and begins the next one. What failed in an earlier world is not done again there:
    /// a job that fails only saves.
    fn take_rank(&mut self, world_plan: &Arc<WorldPlan>) {
        self.failure = None;
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
    let mut reason = printable(reason);
    reason.truncate(reason.floor_char_boundary(FAILURE_LEN_MAX));
    reason
}

#[cfg(test)]
mod tests;
