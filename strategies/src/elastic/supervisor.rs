//! The supervisor of a node, in its own process: starts ranks, detects dead and hung ones, and reports for all of them.
//!
//! Invariants:
//! - `SUPERVISOR-1` A report is sent at once when a rank starts, dies, hangs or changes its phase, and at every
//!   heartbeat.
//! - `SUPERVISOR-2` Desired states of an older term or generation are rejected.
//! - `SUPERVISOR-3` Each slot has at most one process; a successor starts only after the predecessor is gone.
//! - `SUPERVISOR-4` A rank that reported that it is done, or a permanent failure, gets no successor; its last status stays
//!   in the reports. If a later world needs the slot of a done rank, that rank gets a successor.
//! - `SUPERVISOR-5` A supervisor whose job is over, or whose node is released, starts no further process and shuts down
//!   once all its processes are gone, after a last report.
//! - `SUPERVISOR-6` Processes that end before their first status report are restarted with exponential backoff.
//! - `SUPERVISOR-7` A suspension of the supervisor does not count as silence of its ranks.
//! - `SUPERVISOR-8` A process that cannot start for a reason that any successor would share, such as the user's input,
//!   gets no successor; its reason is reported at once and ends the job.
//! - `SUPERVISOR-9` No process starts on a failed device. A rank whose device fails is reported with the fault, so that the
//!   coordinator evicts it for that reason; the supervisor kills it if no coordinator has done so within the suspicion time.
//!   Its successor gets another device; without a free one the slot stays empty.
//! - `SUPERVISOR-10` A node that is refused, or has too few slots with a device left, kills its processes and ends with the
//!   reason.
//! - `SUPERVISOR-11` The end of a job is a state, not a message: a supervisor that finds the job over ends as if a coordinator
//!   had told it so. A node that is asked to leave before any coordinator has told it something leaves at once, since its ranks
//!   hold no state.
//! - `SUPERVISOR-12` Time that a rank waits for a processor does not count as its silence, up to `stuck` after its last
//!   heartbeat. Ending such a rank would lose its work and give its successor no more processors. Since a supervisor sees
//!   only the silence, it has the process examined before it reports a hang.

use super::devices::{DeviceHealth, Devices};
use super::identity::{Incarnation, JobId, MemberId, NodeId, Stale, Worker, refuse_older};
use super::inputs::Input;
use super::member::{Member, Schedule};
use super::message::{DesiredState, DesiredStateId, MemberPhase, MemberReport, Report, Stage, printable};
use super::timing::Timing;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Commands for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Send to the coordinator; it need not arrive.
    Send(Report),
    /// Start a process; answer with [`Supervisor::handle_started`] or [`Supervisor::handle_exited`].
    Spawn(Worker),
    /// Kill a process, or the start of one; answer with [`Supervisor::handle_exited`].
    Kill(Worker),
    /// Find out how long the process has waited for a processor since its last heartbeat, or since it was examined after
    /// that; pass on all heartbeats that have arrived, then answer with [`Supervisor::handle_examined`].
    Examine(Worker),
    /// Pass a desired state on to a rank.
    Tell(Worker, DesiredState),
    /// No process is left and none will be started: send the pending reports and exit.
    Shutdown,
    /// As [`Command::Shutdown`], because this node cannot take part.
    Abandon(Abandonment),
}

/// Why a node cannot take part in a job (`SUPERVISOR-10`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Abandonment {
    /// The coordinator refuses it, for this reason.
    Refused(String),
    /// Too many of its devices have failed; the faults.
    NoDevices(Vec<String>),
}

/// The state of a node: its slots, what runs in them, and what it last reported.
#[derive(Clone, Debug)]
pub struct Supervisor {
    job: JobId,
    node: NodeId,
    boot: Incarnation,
    timing: Timing,
    number: u64,
    desired_state: Option<DesiredState>,
    draining: bool,
    leaving: Option<Leaving>,
    slots: Vec<Slot>,
    devices: Devices,
    inputs: Vec<Input>,
    /// The node abandons the job with fewer slots than this.
    n_slots_min: u32,
    abandons: Option<Abandonment>,
    next_heartbeat: Instant,
    commands: VecDeque<Command>,
}

#[derive(Clone, Debug)]
struct Slot {
    worker: Worker,
    /// Its latest status report and the time of arrival; none before the first one.
    status_report: Option<(MemberReport, Instant)>,
    /// Whether it was reported to hang.
    hangs: bool,
    /// How long it has waited for a processor since its latest status report, as far as it was examined (`SUPERVISOR-12`).
    waited: Duration,
    /// Whether it is being examined.
    is_examined: bool,
    /// Whether a kill was requested.
    kill_requested: bool,
    /// Whether the process is gone and has no successor (`SUPERVISOR-4`).
    gone: bool,
    /// Number of processes in a row that ended before their first status report, and when the next one is started
    /// (`SUPERVISOR-6`).
    n_failed_starts: u32,
    start_at: Option<Instant>,
    /// When the process is killed, because its device has failed (`SUPERVISOR-9`).
    kill_at: Option<Instant>,
}

/// Longest pause before another start, in heartbeats of a rank.
const START_PAUSE_MAX: u32 = 128;

/// The end of a supervisor (`SUPERVISOR-5`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// Processes may exit by themselves until then.
    Until(Instant),
    /// Processes are being killed.
    Killing,
    /// All processes are gone.
    Gone,
}

impl Supervisor {
    /// A node with slots for `n_slots` ranks; starts a process in each.
    pub fn new(now: Instant, job: JobId, node: NodeId, boot: Incarnation, n_slots: u32, timing: Timing) -> Supervisor {
        let worker = |slot| Worker { member: MemberId { node, slot }, incarnation: boot };
        let slots: Vec<Slot> = (0..n_slots).map(|slot| Slot::new(worker(slot))).collect();
        let commands = slots.iter().map(|slot| Command::Spawn(slot.worker)).collect();
        Supervisor {
            job,
            node,
            boot,
            timing,
            number: 0,
            desired_state: None,
            draining: false,
            leaving: None,
            slots,
            devices: Devices::default(),
            inputs: Vec::new(),
            n_slots_min: 1,
            abandons: None,
            next_heartbeat: now,
            commands,
        }
    }

    /// Before its first command: the node has these devices, and abandons the job with fewer than `n_slots_min` slots.
    #[must_use]
    pub fn with_devices(self, devices: Devices, n_slots_min: u32) -> Supervisor {
        Supervisor { devices, n_slots_min, ..self }
    }

    /// Before its first command: the node trains on and with these.
    #[must_use]
    pub fn with_inputs(self, inputs: Vec<Input>) -> Supervisor {
        Supervisor { inputs, ..self }
    }

    /// The device of a slot; none if its rank uses the node's processors.
    pub fn device_of(&self, slot: u32) -> Option<u32> {
        self.devices.of(slot)
    }

    /// State of the node's devices.
    pub fn health(&self) -> &[DeviceHealth] {
        self.devices.health()
    }

    /// Handles a process's first status report.
    pub fn handle_started(&mut self, now: Instant, status_report: MemberReport) {
        let leaving = self.leaving;
        let Some(slot) = self.slot(status_report.worker) else { return };
        if leaving.is_some() {
            // The end came while the process was starting.
            slot.kill_requested = true;
            self.commands.push_back(Command::Kill(status_report.worker));
            return;
        }
        slot.status_report = Some((status_report.clone(), now));
        if let Some(desired_state) = &self.desired_state {
            self.commands.push_back(Command::Tell(status_report.worker, desired_state.clone()));
        }
        self.report(now);
    }

    /// Handles a process that cannot start for a reason that any successor would share (`SUPERVISOR-8`). A process that
    /// has sent a status report reports its failure itself.
    pub fn handle_unfit(&mut self, now: Instant, worker: Worker, reason: &str) {
        if self.slot(worker).is_some_and(|slot| slot.status_report.is_none()) {
            let mut member = Member::new(self.job, worker, None, Schedule::default());
            member.handle_failed(reason);
            self.handle_started(now, member.report());
        }
    }

    /// A process has exited, as reported by the kernel.
    pub fn handle_exited(&mut self, now: Instant, worker: Worker) {
        let (leaving, generation) = (self.leaving, self.desired_state_id().generation);
        let Some(slot) = self.slot(worker) else { return };
        // SUPERVISOR-4. A later world may have been announced, or the rank evicted, while it ended by itself.
        let rests = |(status_report, _): &(MemberReport, Instant)| {
            let is_done = status_report.phase == MemberPhase::Done && status_report.generation >= generation;
            is_done || status_report.failure.is_some()
        };
        if leaving.is_some() {
            self.slots.retain(|slot| slot.worker != worker);
            self.leave_if_empty(now);
        } else if slot.status_report.as_ref().is_some_and(rests) {
            slot.gone = true;
        } else {
            self.start_successor(now, worker);
            // A node that abandons the job has reported that already.
            if self.leaving.is_none() {
                self.report(now);
            }
        }
    }

    /// Handles the state of the node's devices (`SUPERVISOR-9`).
    pub fn handle_health(&mut self, now: Instant, latest: Vec<DeviceHealth>) {
        let is_news = self.devices.handle_health(latest);
        if self.leaving.is_none() {
            for slot in &mut self.slots {
                let is_failed = self.devices.fault_of(slot.worker.member.slot).is_some();
                if !is_failed || slot.gone || slot.kill_requested || slot.kill_at.is_some() || slot.start_at.is_some() {
                    continue;
                }
                if slot.status_report.is_some() {
                    slot.kill_at = Some(now + self.timing.suspicion);
                } else {
                    slot.kill_requested = true;
                    self.commands.push_back(Command::Kill(slot.worker));
                }
            }
        }
        if is_news {
            self.report(now);
        }
    }

    /// Handles a rank's heartbeat.
    pub fn handle_status_report(&mut self, now: Instant, status_report: MemberReport) {
        let Some(slot) = self.slot(status_report.worker) else { return };
        let Some((last, _)) = &slot.status_report else { return };
        let state = |status_report: &MemberReport| (status_report.generation, status_report.phase, status_report.saved);
        let news = state(last) != state(&status_report)
            || last.failure != status_report.failure
            || last.settled != status_report.settled
            || last.unsaved != status_report.unsaved
            || last.holds != status_report.holds;
        slot.status_report = Some((status_report, now));
        (slot.waited, slot.is_examined) = (Duration::ZERO, false);
        let returns = std::mem::replace(&mut slot.hangs, false);
        if news || returns {
            self.report(now);
        }
    }

    /// Handles the answer to [`Command::Examine`]. A wait that is shorter than the supervisor's own delays explains no silence.
    pub fn handle_examined(&mut self, now: Instant, worker: Worker, waited: Duration) {
        let least = self.timing.life / 2;
        // A heartbeat that has arrived since then is the better answer.
        let Some(slot) = self.slot(worker).filter(|slot| slot.is_examined && !slot.gone) else { return };
        slot.is_examined = false;
        if waited >= least {
            slot.waited += waited;
        } else {
            slot.hangs = true;
            self.report(now);
        }
    }

    /// Handles a desired state from a coordinator.
    ///
    /// # Errors
    /// When it is older than the current one (`SUPERVISOR-2`). Nothing has changed.
    pub fn handle_desired_state(&mut self, now: Instant, desired_state: DesiredState) -> Result<(), Stale> {
        self.handle_timeout(now);
        if desired_state.job != self.job {
            return Err(Stale::Job { found: desired_state.job, have: self.job });
        }
        if let Some(refusal) = desired_state.refused.as_ref().filter(|refusal| refusal.boot == self.boot) {
            self.abandon(now, Abandonment::Refused(printable(&refusal.reason)));
            return Ok(());
        }
        let have = self.desired_state_id();
        refuse_older(desired_state.id.term, have.term, |found, have| Stale::Term { found, have })?;
        refuse_older(desired_state.id.generation, have.generation, |found, have| Stale::Generation { found, have })?;
        if desired_state.id < have {
            return Err(Stale::Overtaken { found: desired_state.id.stage as u64, have: have.stage as u64 });
        }
        for slot in &mut self.slots {
            if desired_state.evict.contains(&slot.worker) && !std::mem::replace(&mut slot.kill_requested, true) {
                self.commands.push_back(Command::Kill(slot.worker));
            }
        }
        if desired_state.id > have || self.desired_state.is_none() {
            self.take_up(now, desired_state.clone());
        }
        if desired_state.release == Some(self.boot) && self.leaving.is_none() {
            self.draining = true;
            self.kill_all(now);
        }
        Ok(())
    }

    /// The machine is about to be preempted.
    pub fn handle_drain(&mut self, now: Instant) {
        self.draining = true;
        if self.desired_state.is_none() {
            self.handle_over(now);
        } else {
            self.report(now);
        }
    }

    /// The job is over, or no coordinator is left to release this node (`SUPERVISOR-11`).
    pub fn handle_over(&mut self, now: Instant) {
        if self.leaving.is_some() {
            return;
        }
        let known = self.desired_state.as_ref();
        let end = DesiredState {
            job: self.job,
            id: DesiredStateId { stage: Stage::End, ..self.desired_state_id() },
            world_plan: None,
            evict: Vec::new(),
            requests: known.map(|known| known.requests).unwrap_or_default(),
            release: None,
            refused: None,
        };
        self.take_up(now, end);
    }

    /// Handles all expired timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.forgive_own_sleep(now);
        match self.leaving {
            Some(Leaving::Gone) => return,
            Some(Leaving::Until(until)) if now >= until => self.kill_all(now),
            _ => {}
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.kill_at.is_some_and(|at| now >= at)) {
            slot.kill_at = None;
            if !std::mem::replace(&mut slot.kill_requested, true) {
                self.commands.push_back(Command::Kill(slot.worker));
            }
        }
        while let Some(i) = self.slots.iter().position(|slot| slot.start_at.is_some_and(|at| now >= at)) {
            self.slots[i].start_at = None;
            self.spawn(now, self.slots[i].worker);
        }
        let is_news = self.examine_silent_ranks(now);
        if now >= self.next_heartbeat || is_news {
            self.report(now);
        }
    }

    /// `SUPERVISOR-12`. Returns whether a rank hangs: one that has been silent for too long whatever the reason, or that nobody
    /// has examined.
    fn examine_silent_ranks(&mut self, now: Instant) -> bool {
        let mut found = false;
        for i in 0..self.slots.len() {
            if self.suspected_at(&self.slots[i]).is_none_or(|at| now < at) {
                continue;
            }
            let stuck = self.timing.stuck;
            let slot = &mut self.slots[i];
            if slot.status_report.as_ref().is_some_and(|(_, heard)| now >= *heard + stuck) {
                (slot.hangs, found) = (true, true);
            } else {
                slot.is_examined = true;
                self.commands.push_back(Command::Examine(slot.worker));
            }
        }
        found
    }

    /// `SUPERVISOR-7`
    fn forgive_own_sleep(&mut self, now: Instant) {
        let late = self.poll_timeout().map(|due| now.saturating_duration_since(due)).unwrap_or_default();
        if late >= self.timing.life / 2 {
            let status_reports = self.slots.iter_mut().filter_map(|slot| slot.status_report.as_mut());
            status_reports.for_each(|(_, heard)| *heard += late);
        }
    }

    /// When a rank without a heartbeat is examined, or reported as hung, unless it was already.
    fn suspected_at(&self, slot: &Slot) -> Option<Instant> {
        let (_, heard) = slot.status_report.as_ref().filter(|_| !slot.gone && !slot.hangs)?;
        let patience = if slot.is_examined { self.timing.stuck } else { self.timing.suspicion + slot.waited };
        Some(*heard + patience.min(self.timing.stuck))
    }

    /// When to call [`Supervisor::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.leaving {
            Some(Leaving::Gone) => None,
            Some(Leaving::Until(until)) => Some(until.min(self.next_heartbeat)),
            _ => {
                let starts = self.slots.iter().filter_map(|slot| slot.start_at.or(slot.kill_at));
                let suspicions = self.slots.iter().filter_map(|slot| self.suspected_at(slot));
                starts.chain(suspicions).chain([self.next_heartbeat]).min()
            }
        }
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// The latest desired state that it has accepted.
    pub fn desired_state_id(&self) -> DesiredStateId {
        self.desired_state.as_ref().map(|desired_state| desired_state.id).unwrap_or_default()
    }

    fn take_up(&mut self, now: Instant, desired_state: DesiredState) {
        let (generation, ends) = (desired_state.id.generation, desired_state.id.stage == Stage::End);
        for slot in self.slots.iter().filter(|slot| slot.status_report.is_some() && !slot.gone) {
            self.commands.push_back(Command::Tell(slot.worker, desired_state.clone()));
        }
        self.desired_state = Some(desired_state);
        if self.leaving.is_some() {
            return;
        }
        if ends {
            self.leaving = Some(Leaving::Until(now + self.timing.stop_grace));
            self.slots.retain(|slot| !slot.gone && slot.start_at.is_none());
            let unstarted = self.slots.iter_mut().filter(|slot| slot.status_report.is_none());
            self.commands.extend(unstarted.map(|slot| {
                slot.kill_requested = true;
                Command::Kill(slot.worker)
            }));
            self.leave_if_empty(now);
            return;
        }
        // SUPERVISOR-4
        let older = |(status_report, _): &(MemberReport, Instant)| {
            status_report.generation < generation && status_report.failure.is_none()
        };
        let wanted = self.slots.iter().filter(|slot| slot.gone && slot.status_report.as_ref().is_some_and(older));
        let wanted: Vec<Worker> = wanted.map(|slot| slot.worker).collect();
        for worker in wanted {
            self.start_successor(now, worker);
            if self.leaving.is_none() {
                self.report(now);
            }
        }
    }

    /// `SUPERVISOR-3`, `SUPERVISOR-6`
    fn start_successor(&mut self, now: Instant, worker: Worker) {
        let successor = Worker { incarnation: worker.incarnation.next(), ..worker };
        let least = self.timing.life;
        let Some(slot) = self.slot(worker) else { return };
        // The first failed start has no pause: that process may have been killed while it started.
        let n_failed_starts = if slot.status_report.is_some() { 0 } else { slot.n_failed_starts + 1 };
        *slot = Slot { n_failed_starts, ..Slot::new(successor) };
        if n_failed_starts > 1 {
            let pause = least * 2u32.saturating_pow(n_failed_starts - 1).min(START_PAUSE_MAX);
            slot.start_at = Some(now + pause);
        } else {
            self.spawn(now, successor);
        }
    }

    /// Starts a process unless its slot has no device left (`SUPERVISOR-9`).
    fn spawn(&mut self, now: Instant, worker: Worker) {
        if self.devices.replace(worker.member.slot) {
            self.commands.push_back(Command::Spawn(worker));
            return;
        }
        if let Some(slot) = self.slot(worker) {
            slot.gone = true;
        }
        let is_lost = |slot: &&Slot| self.devices.fault_of(slot.worker.member.slot).is_some() && slot.gone;
        let n_left = self.slots.len() - self.slots.iter().filter(is_lost).count();
        if n_left < self.n_slots_min as usize {
            let faults = self.devices.health().iter().filter(|device| device.fault.is_some());
            let faults = faults.filter_map(DeviceHealth::complaint).collect();
            self.abandon(now, Abandonment::NoDevices(faults));
        }
    }

    /// `SUPERVISOR-10`
    fn abandon(&mut self, now: Instant, why: Abandonment) {
        if self.leaving.is_none() {
            self.abandons = Some(why);
            self.draining = true;
            self.kill_all(now);
        }
    }

    /// `SUPERVISOR-5`
    fn kill_all(&mut self, now: Instant) {
        self.leaving = Some(Leaving::Killing);
        self.slots.retain(|slot| !slot.gone && slot.start_at.is_none());
        for slot in &mut self.slots {
            if !std::mem::replace(&mut slot.kill_requested, true) {
                self.commands.push_back(Command::Kill(slot.worker));
            }
        }
        self.leave_if_empty(now);
    }

    fn leave_if_empty(&mut self, now: Instant) {
        self.report(now);
        if self.slots.is_empty() {
            self.leaving = Some(Leaving::Gone);
            self.commands.push_back(self.abandons.take().map_or(Command::Shutdown, Command::Abandon));
        }
    }

    fn slot(&mut self, worker: Worker) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.worker == worker)
    }

    fn report(&mut self, now: Instant) {
        self.number += 1;
        self.next_heartbeat = now + self.timing.heartbeat;
        let members = self.slots.iter().filter_map(|slot| {
            let (status_report, _) = slot.status_report.as_ref()?;
            let device = self.devices.of(slot.worker.member.slot);
            Some(MemberReport { hangs: slot.hangs && !slot.gone, device, ..status_report.clone() })
        });
        let members = members.collect();
        let report = Report {
            job: self.job,
            node: self.node,
            boot: self.boot,
            number: self.number,
            desired_state: self.desired_state_id(),
            draining: self.draining,
            devices: self.devices.health().to_vec(),
            inputs: self.inputs.clone(),
            n_failed_starts: self.slots.iter().map(|slot| slot.n_failed_starts).max().unwrap_or_default(),
            members,
        };
        self.commands.push_back(Command::Send(report));
    }
}

impl Slot {
    fn new(worker: Worker) -> Slot {
        Slot {
            worker,
            status_report: None,
            hangs: false,
            waited: Duration::ZERO,
            is_examined: false,
            kill_requested: false,
            gone: false,
            n_failed_starts: 0,
            start_at: None,
            kill_at: None,
        }
    }
}

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod end_tests;
#[cfg(test)]
mod silence_tests;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Generation, Step, Term};
    use crate::elastic::message::{Requests, Settled};
    use crate::elastic::shadow::Shard;
    use std::time::Duration;

    pub(super) fn drain(supervisor: &mut Supervisor) -> Vec<Command> {
        std::iter::from_fn(|| supervisor.poll_command()).collect()
    }

    pub(super) fn reports(commands: Vec<Command>) -> Vec<Report> {
        commands.into_iter().filter_map(|c| if let Command::Send(report) = c { Some(report) } else { None }).collect()
    }

    pub(super) fn started(now: Instant) -> (Supervisor, Worker, MemberReport) {
        let mut supervisor = Supervisor::new(now, JobId(1), NodeId(0), Incarnation(5), 1, Timing::default());
        let commands = drain(&mut supervisor);
        let [Command::Spawn(worker)] = commands[..] else { panic!("{commands:?}") };
        let status_report = Member::new(JobId(1), worker, None, Schedule::default()).report();
        supervisor.handle_started(now, status_report.clone());
        drain(&mut supervisor);
        (supervisor, worker, status_report)
    }

    pub(super) fn stop(term: u64, generation: u64, evict: Vec<Worker>) -> DesiredState {
        let id =
            DesiredStateId { term: Term(term), generation: Generation(generation), stage: Stage::Stop, revision: 0 };
        DesiredState {
            job: JobId(1),
            id,
            world_plan: None,
            evict,
            requests: Requests::default(),
            release: None,
            refused: None,
        }
    }

    // SUPERVISOR-1, SUPERVISOR-3
    #[test]
    fn death_is_reported_at_once_and_a_successor_started() {
        let now = Instant::now();
        let (mut supervisor, worker, _) = started(now);

        supervisor.handle_exited(now, worker);

        let commands = drain(&mut supervisor);
        let successor = Worker { incarnation: Incarnation(6), ..worker };
        assert_eq!(commands[0], Command::Spawn(successor));
        assert_eq!(reports(commands)[0].members, []);
        supervisor.handle_exited(now, worker);
        assert_eq!(drain(&mut supervisor), [], "the end of one process is handled once");
    }

    #[test]
    fn caught_up_rank_is_reported_at_once() {
        let now = Instant::now();
        let (mut supervisor, _, status_report) = started(now);
        let catching_up = in_phase(&status_report, MemberPhase::CatchingUp);
        supervisor.handle_status_report(now, catching_up.clone());
        drain(&mut supervisor);

        supervisor.handle_status_report(now, catching_up.clone());
        assert_eq!(drain(&mut supervisor), [], "an unchanged status is not reported at once");
        supervisor.handle_status_report(now, MemberReport { holds: vec![Shard::WHOLE], ..catching_up });

        assert_eq!(reports(drain(&mut supervisor))[0].members[0].holds, [Shard::WHOLE]);
    }

    // SUPERVISOR-2
    #[test]
    fn desired_states_of_an_old_coordinator_or_world_are_rejected() {
        let now = Instant::now();
        let (mut supervisor, worker, _) = started(now);
        supervisor.handle_desired_state(now, stop(2, 5, vec![])).unwrap();
        drain(&mut supervisor);

        assert!(matches!(supervisor.handle_desired_state(now, stop(1, 9, vec![worker])), Err(Stale::Term { .. })));
        assert!(matches!(
            supervisor.handle_desired_state(now, stop(3, 4, vec![worker])),
            Err(Stale::Generation { .. })
        ));
        assert_eq!(drain(&mut supervisor), []);
    }

    #[test]
    fn eviction_kills_only_the_named_process_and_only_once() {
        let now = Instant::now();
        let (mut supervisor, worker, _) = started(now);
        let other = Worker { incarnation: Incarnation(4), ..worker };

        supervisor.handle_desired_state(now, stop(1, 1, vec![other])).unwrap();
        supervisor.handle_desired_state(now, stop(1, 1, vec![worker])).unwrap();
        supervisor.handle_desired_state(now, stop(1, 1, vec![worker])).unwrap();

        let kills = drain(&mut supervisor).into_iter().filter(|command| matches!(command, Command::Kill(_)));
        assert_eq!(kills.collect::<Vec<_>>(), [Command::Kill(worker)]);
    }

    fn in_phase(status_report: &MemberReport, phase: MemberPhase) -> MemberReport {
        MemberReport { phase, ..status_report.clone() }
    }

    // SUPERVISOR-4
    #[test]
    fn finished_worker_is_not_restarted_until_a_later_world_needs_its_slot() {
        let now = Instant::now();
        let (mut supervisor, worker, status_report) = started(now);
        supervisor.handle_status_report(now, in_phase(&status_report, MemberPhase::Done));
        drain(&mut supervisor);

        supervisor.handle_exited(now, worker);
        supervisor.handle_timeout(now + Duration::from_secs(1));
        let commands = drain(&mut supervisor);
        assert!(!commands.contains(&Command::Spawn(Worker { incarnation: Incarnation(6), ..worker })), "{commands:?}");
        let reported = &reports(commands)[0].members[0];
        assert_eq!((reported.phase, reported.hangs), (MemberPhase::Done, false));

        supervisor.handle_desired_state(now, stop(1, 1, vec![])).unwrap();
        let successor = Worker { incarnation: Incarnation(6), ..worker };
        assert!(drain(&mut supervisor).contains(&Command::Spawn(successor)));
    }

    // SUPERVISOR-4
    #[test]
    fn finished_worker_that_is_evicted_before_it_has_exited_gets_a_successor() {
        let now = Instant::now();
        let (mut supervisor, worker, status_report) = started(now);
        supervisor.handle_status_report(now, in_phase(&status_report, MemberPhase::Done));
        supervisor.handle_desired_state(now, stop(1, 1, vec![worker])).unwrap();
        drain(&mut supervisor);

        supervisor.handle_exited(now, worker);

        let commands = drain(&mut supervisor);
        assert!(commands.contains(&Command::Spawn(Worker { incarnation: Incarnation(6), ..worker })), "{commands:?}");
        assert_eq!(reports(commands)[0].members, [], "the coordinator learns of its end at once");
    }

    #[test]
    fn outcome_of_a_repeated_step_is_reported_at_once() {
        let now = Instant::now();
        let (mut supervisor, _, status_report) = started(now);
        let settled = Some(Settled { step: Step(4), suspects: vec![1] });

        supervisor.handle_status_report(now, MemberReport { settled: settled.clone(), ..status_report });

        assert_eq!(reports(drain(&mut supervisor))[0].members[0].settled, settled);
    }

    // SUPERVISOR-4
    #[test]
    fn permanently_failed_worker_is_reported_and_not_restarted() {
        let now = Instant::now();
        let (mut supervisor, worker, status_report) = started(now);
        supervisor.handle_status_report(now, MemberReport { failure: Some("loss is NaN".into()), ..status_report });
        assert_eq!(reports(drain(&mut supervisor)).len(), 1);

        supervisor.handle_exited(now, worker);
        supervisor.handle_desired_state(now, stop(1, 1, vec![])).unwrap();

        assert!(drain(&mut supervisor).iter().all(|command| !matches!(command, Command::Spawn(_))));
    }

    // SUPERVISOR-8
    #[test]
    fn process_that_cannot_start_is_reported_with_its_reason_and_not_restarted() {
        let now = Instant::now();
        let mut supervisor = Supervisor::new(now, JobId(1), NodeId(0), Incarnation(5), 1, Timing::default());
        let Some(Command::Spawn(worker)) = supervisor.poll_command() else { panic!("nothing is started") };

        supervisor.handle_unfit(now, worker, "no such model");
        supervisor.handle_exited(now, worker);
        supervisor.handle_timeout(now + Duration::from_secs(10));

        let commands = drain(&mut supervisor);
        assert!(commands.iter().all(|command| !matches!(command, Command::Spawn(_))), "{commands:?}");
        let reported = &reports(commands)[0].members[0];
        assert_eq!((reported.worker, reported.failure.as_deref()), (worker, Some("no such model")));
    }

    // SUPERVISOR-8
    #[test]
    fn started_process_does_not_count_as_unfit() {
        let now = Instant::now();
        let (mut supervisor, worker, _) = started(now);

        supervisor.handle_unfit(now, worker, "no such model");
        supervisor.handle_exited(now, worker);

        assert!(drain(&mut supervisor).iter().any(|command| matches!(command, Command::Spawn(_))));
    }

    // SUPERVISOR-6
    #[test]
    fn processes_that_die_before_their_first_report_restart_with_backoff() {
        let start = Instant::now();
        let mut supervisor = Supervisor::new(start, JobId(1), NodeId(0), Incarnation(5), 1, Timing::default());
        let mut n_starts = 0;

        for ms in 0..10_000 {
            let now = start + Duration::from_millis(ms);
            supervisor.handle_timeout(now);
            for command in drain(&mut supervisor) {
                if let Command::Spawn(worker) = command {
                    n_starts += 1;
                    supervisor.handle_exited(now, worker);
                }
            }
        }

        assert!((5..12).contains(&n_starts), "{n_starts} starts in ten seconds");
    }
}
