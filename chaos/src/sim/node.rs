//! Nodes: a supervisor, its rank processes, and the messages between them.

use super::catch_up::{CatchUpProgress, retain};
use super::comparison::Entered;
use super::event::{Event, RankEvent};
use super::{JOB, Sim};
use crate::invariants::Observation;
use crate::mutation::Mutation;
use crate::plan::{Fault, Planned};
use crate::state;
use phalanx_strategies::elastic::checkpoint::Part;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::devices::{DeviceHealth, Devices};
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, MemberId, NodeId, Step, Worker};
use phalanx_strategies::elastic::member::{self, Member};
use phalanx_strategies::elastic::message::{DesiredState, MemberPhase, MemberReport, Requests, Stage};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::supervisor::{self, Supervisor};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Instant;

/// A machine.
pub struct Node {
    pub id: NodeId,
    n_boots: u64,
    pub supervisor: Option<Supervisor>,
    timer_at: Option<u64>,
    /// Processes that were killed before they ran.
    killed_starts: BTreeSet<Worker>,
    pub ranks: BTreeMap<Worker, Rank>,
    /// Number of faults that let no process start.
    pub fails_starts: u32,
    /// Slowdown of each slow slot.
    pub slow: BTreeMap<u32, u64>,
    /// Number of faults that suspend the machine, and the events that wait meanwhile.
    pub suspended: u32,
    pub waiting: Vec<Event>,
    /// The data set that its ranks read; the job's is 0.
    pub data_set: u64,
}

/// A rank process.
pub struct Rank {
    pub member: Member,
    pub atoms: BTreeMap<u64, u64>,
    /// The update for which the member has voted.
    pub open: Option<(Generation, Step, u64)>,
    /// The comparison whose outcome it awaits.
    pub compares: Option<Entered>,
    /// What it computed, for steps whose copies differed.
    pub memory: Memory,
    pub catch_up_parts: CatchUpProgress,
    /// Number of faults that stop the process, and the events that wait meanwhile.
    pub stopped: u32,
    pub waiting: Vec<RankEvent>,
    /// Number of those faults that only take the processor away, and until when its waits are known to its supervisor.
    pub starved: u32,
    pub examined: Instant,
    /// Arrival times of the last local messages, which stay in order.
    last_status_report: u64,
    last_desired_state: u64,
}

impl Rank {
    /// Whether the rank has all pieces of a shard.
    fn has_all(&self, shard: Shard, n_atoms: u64) -> bool {
        let has = |run: Range<u64>| self.atoms.range(run.clone()).count() as u64 == run.end - run.start;
        state::atoms(shard, n_atoms).into_iter().all(has)
    }

    /// Applies the open update to all pieces.
    pub fn update(&mut self) {
        if let Some((_, _, digest)) = self.open.take() {
            for (atom, value) in &mut self.atoms {
                *value = state::update(*value, *atom, digest);
            }
        }
    }
}

impl Node {
    pub fn new(id: u32) -> Node {
        Node {
            id: NodeId(id),
            n_boots: 0,
            supervisor: None,
            timer_at: None,
            killed_starts: BTreeSet::new(),
            ranks: BTreeMap::new(),
            fails_starts: 0,
            slow: BTreeMap::new(),
            suspended: 0,
            waiting: vec![],
            data_set: 0,
        }
    }

    /// The process that runs in a slot.
    pub fn worker_in(&self, slot: u32) -> Option<Worker> {
        self.ranks.keys().find(|worker| worker.member.slot == slot).copied()
    }

    pub fn boot(&self) -> Incarnation {
        Incarnation(self.n_boots * 1_000_000)
    }
}

impl Sim {
    pub(super) fn rank(&mut self, worker: Worker) -> Option<&mut Rank> {
        self.nodes[worker.member.node.0 as usize].ranks.get_mut(&worker)
    }

    pub(super) fn start_node(&mut self, i: usize) {
        let (now, slots, timing) = (self.node_now(i), self.config.n_slots, self.config.timing);
        let inputs = self.inputs_of(i);
        let node = &mut self.nodes[i];
        if node.supervisor.is_some() || self.lost.contains(&node.id) {
            return;
        }
        node.n_boots += 1;
        node.timer_at = None;
        let device = |i| DeviceHealth { id: format!("device {i}"), ..DeviceHealth::default() };
        // As many devices beside those of the slots as may still fail: a lost slot would be missing in the end.
        let fails = |planned: &&Planned| matches!(planned.fault, Fault::FailDevice { .. });
        let n_spare = self.plan.iter().filter(fails).count() as u32;
        let devices = Devices::new((0..slots + n_spare).map(device).collect(), slots);
        let supervisor = Supervisor::new(now, JOB, node.id, node.boot(), slots, timing);
        node.supervisor = Some(supervisor.with_devices(devices, 1).with_inputs(inputs));
        let (id, boot, data_set) = (node.id, node.boot(), node.data_set);
        self.observe(&Observation::NodeStarted { node: id, boot, data_set });
        self.drive_node(i);
    }

    pub(super) fn node_timer(&mut self, i: usize, boot: Incarnation) {
        if self.nodes[i].boot() != boot || self.nodes[i].supervisor.is_none() {
            return;
        }
        self.nodes[i].timer_at = None;
        let now = self.node_now(i);
        let node = &mut self.nodes[i];
        let supervisor = node.supervisor.as_mut().expect("checked above");
        // Running ranks publish their progress in shared memory; the supervisor reads it when a report is due.
        for rank in node.ranks.values().filter(|rank| rank.stopped == 0) {
            supervisor.handle_status_report(now, rank.member.report());
        }
        supervisor.handle_timeout(now);
        self.drive_node(i);
    }

    pub(super) fn desired_state_arrives(&mut self, i: usize, mut desired_state: DesiredState) {
        let now = self.node_now(i);
        let fenced = !self.is(Mutation::ForgetFencing);
        let Some(supervisor) = &mut self.nodes[i].supervisor else { return };
        let before = supervisor.desired_state_id();
        let term = desired_state.id.term;
        if !fenced {
            desired_state.id.term = desired_state.id.term.max(before.term);
        }
        let (id, evicts) = (desired_state.id, !desired_state.evict.is_empty());
        if supervisor.handle_desired_state(now, desired_state).is_err() {
            return;
        }
        // A node that is refused does not take up anything.
        let is_taken = id != before && supervisor.desired_state_id() == id;
        self.mark(1, i as u64, id.generation.0);
        let node = self.nodes[i].id;
        if is_taken {
            self.observe(&Observation::DesiredStateTaken { node, before, desired_state: id });
        }
        if evicts {
            self.observe(&Observation::Evicted { node, term });
        }
        self.drive_node(i);
    }

    pub(super) fn worker_starts(&mut self, worker: Worker) {
        let i = worker.member.node.0 as usize;
        let (now, schedule) = (self.node_now(i), self.config.schedule());
        let node = &mut self.nodes[i];
        // The machine may have died meanwhile.
        if node.supervisor.is_none() || worker.incarnation < node.boot() {
            return;
        }
        let is_killed = node.killed_starts.remove(&worker);
        if is_killed || node.fails_starts > 0 {
            if is_killed || !self.is(Mutation::ForgetFailedStarts) {
                self.worker_exited(worker);
            }
            return;
        }
        let member = Member::new(JOB, worker, None, schedule);
        let status_report = member.report();
        let rank = Rank {
            member,
            atoms: BTreeMap::new(),
            open: None,
            compares: None,
            memory: Memory::default(),
            catch_up_parts: CatchUpProgress::default(),
            stopped: 0,
            waiting: vec![],
            starved: 0,
            examined: now,
            last_status_report: 0,
            last_desired_state: 0,
        };
        node.ranks.insert(worker, rank);
        node.supervisor.as_mut().expect("checked above").handle_started(now, status_report);
        self.drive_node(i);
    }

    pub(super) fn worker_exited(&mut self, worker: Worker) {
        let i = worker.member.node.0 as usize;
        let now = self.node_now(i);
        if let Some(supervisor) = &mut self.nodes[i].supervisor {
            supervisor.handle_exited(now, worker);
            self.drive_node(i);
        }
    }

    pub(super) fn status_report_arrives(&mut self, status_report: MemberReport) {
        let i = status_report.worker.member.node.0 as usize;
        let now = self.node_now(i);
        if let Some(supervisor) = &mut self.nodes[i].supervisor {
            supervisor.handle_status_report(now, status_report);
            self.drive_node(i);
        }
    }

    /// Kills a process; the kernel notifies its supervisor.
    pub(super) fn kill_worker(&mut self, worker: Worker) {
        let i = worker.member.node.0 as usize;
        if let Some(rank) = self.nodes[i].ranks.remove(&worker) {
            self.break_connections(&rank);
            let at = self.now + self.dice.pick(200..3_000);
            self.queue.push(at, Event::WorkerExited { worker });
        }
    }

    pub(super) fn kill_node(&mut self, i: usize, back_after_ms: u64) {
        let node = &mut self.nodes[i];
        let id = node.id;
        let ranks = std::mem::take(&mut node.ranks);
        ranks.values().for_each(|rank| self.break_connections(rank));
        self.switch_on(i);
        let node = &mut self.nodes[i];
        // A drained node may have ended already.
        if node.supervisor.take().is_some() {
            self.observe(&Observation::Disturbed { node: id, lasts: false });
        }
        self.queue.push(self.now + back_after_ms * 1_000, Event::NodeStarts { node: i });
    }

    pub(super) fn drive_node(&mut self, i: usize) {
        while let Some(command) = self.nodes[i].supervisor.as_mut().and_then(Supervisor::poll_command) {
            match command {
                supervisor::Command::Send(report) => self.send_report(i, report),
                supervisor::Command::Spawn(worker) => {
                    let supervisor = self.nodes[i].supervisor.as_ref().expect("it has just given a command");
                    let device = supervisor.device_of(worker.member.slot).map(|i| &supervisor.health()[i as usize]);
                    if device.is_none_or(|device| device.fault.is_some()) {
                        self.violate("devices", format!("{worker} starts on a failed device"));
                    }
                    let at = self.now + self.config.spawn_ms * 1_000 + self.dice.pick(0..20_000);
                    self.queue.push(at, Event::WorkerStarts { worker });
                }
                supervisor::Command::Kill(worker) if self.rank(worker).is_some() => {
                    let supervisor = self.nodes[i].supervisor.as_ref().expect("it has just given a command");
                    let device = supervisor.device_of(worker.member.slot).map(|i| &supervisor.health()[i as usize]);
                    if device.is_some_and(|device| device.fault.is_some()) {
                        // The fault takes effect now: the rank may have gone on since its device failed.
                        self.observe(&Observation::Disturbed { node: worker.member.node, lasts: false });
                    }
                    self.kill_worker(worker);
                }
                supervisor::Command::Kill(worker) => {
                    self.nodes[i].killed_starts.insert(worker);
                }
                supervisor::Command::Examine(worker) => self.examine(i, worker),
                supervisor::Command::Tell(worker, desired_state) => {
                    let at = self.now + self.dice.pick(20..300);
                    let Some(rank) = self.rank(worker) else { continue };
                    rank.last_desired_state = at.max(rank.last_desired_state + 1);
                    let at = rank.last_desired_state;
                    self.queue.push(at, Event::ToRank { worker, what: RankEvent::DesiredState(desired_state) });
                }
                supervisor::Command::Shutdown | supervisor::Command::Abandon(_) => {
                    let node = &mut self.nodes[i];
                    if !node.ranks.is_empty() {
                        self.violate("ending", format!("node {} is shut down with running processes", i));
                    }
                    self.nodes[i].supervisor = None;
                }
            }
        }
        self.arm_node(i);
    }

    /// A process that is stopped waits for no processor.
    fn examine(&mut self, i: usize, worker: Worker) {
        let now = self.node_now(i);
        let starved = self.rank(worker).filter(|rank| rank.starved > 0 && rank.starved == rank.stopped);
        let since = starved.map(|rank| std::mem::replace(&mut rank.examined, now));
        let waited = since.map(|since| now.saturating_duration_since(since)).unwrap_or_default();
        let supervisor = self.nodes[i].supervisor.as_mut().expect("it has just given a command");
        supervisor.handle_examined(now, worker, waited);
    }

    pub(super) fn arm_node(&mut self, i: usize) {
        let due = self.nodes[i].supervisor.as_ref().and_then(Supervisor::poll_timeout);
        let Some(due) = due.and_then(|due| self.when(&self.clocks.nodes[i], due)) else { return };
        let node = &mut self.nodes[i];
        if node.timer_at.is_none_or(|at| due < at) {
            node.timer_at = Some(due);
            let boot = node.boot();
            self.queue.push(due.max(self.now), Event::NodeTimer { node: i, boot });
        }
    }

    pub(super) fn rank_gets(&mut self, worker: Worker, what: RankEvent) {
        let Some(rank) = self.rank(worker) else { return };
        if rank.stopped > 0 {
            rank.waiting.push(what);
            return;
        }
        match what {
            RankEvent::DesiredState(desired_state) => self.rank_desired_state(worker, &desired_state),
            RankEvent::Computed { generation, step } => self.enter_collective(worker, generation, step),
            RankEvent::Reduced { generation, step, digest } => self.rank_reduced(worker, generation, step, digest),
            RankEvent::Committed { generation, step, requests } => {
                self.rank_committed(worker, generation, step, requests)
            }
            RankEvent::Compared { generation, step, found } => {
                self.rank_compared(worker, (generation, step), found.as_deref());
            }
            RankEvent::CatchUpPart { generation, step, digest, base, pieces } => {
                self.rank_got_catch_up_part(worker, (generation, step), (base, pieces), digest);
            }
            RankEvent::Outcome { generation, step } => self.rank_got_outcome(worker, generation, step),
            RankEvent::Finished { generation } => {
                // Stale if another world has begun; the next world then requests it again.
                let _ = rank.member.handle_finished(generation);
            }
            RankEvent::Broken { generation, lost } => {
                // Ignored in an older world.
                let _ = rank.member.handle_broken(generation, lost, "a connection broke");
            }
            RankEvent::JoinedWorld { generation } => {
                // Ignored in an older world.
                if rank.member.handle_joined(generation).is_ok() {
                    self.observe(&Observation::JoinedWorld { worker, generation });
                }
            }
            RankEvent::Fetch { generation, base, transfer } => self.fetch(worker, generation, base, transfer),
            RankEvent::Saved { part, atoms } => {
                self.rank_saved(worker, part, atoms);
            }
        }
        self.drive_rank(worker);
        self.enter_comparison(worker);
    }

    fn rank_desired_state(&mut self, worker: Worker, desired_state: &DesiredState) {
        let early = self.is(Mutation::FreeStateEarly);
        let n_atoms = self.config.n_atoms;
        let Some(rank) = self.rank(worker) else { return };
        let before = rank.member.phase();
        let accepted = rank.member.handle_desired_state(desired_state).is_ok();
        let rests = (before, rank.member.phase()) == (MemberPhase::Ready, MemberPhase::Saving);
        if let (true, true, Some(world_plan)) =
            (accepted, early && desired_state.id.stage == Stage::Form, &desired_state.world_plan)
        {
            let keep = world_plan.rank_of(worker).map_or(vec![], |rank| world_plan.holds[rank].clone());
            retain(rank, &keep, n_atoms);
        }
        if rests {
            self.compare_before_resting(worker);
        }
    }

    fn rank_reduced(&mut self, worker: Worker, generation: Generation, step: Step, digest: u64) {
        let stale = self.is(Mutation::AcceptStaleGeneration);
        let Some(rank) = self.rank(worker) else { return };
        let report = rank.member.report();
        let next = report.commit_state.voted.is_none()
            && report.commit_state.applied.is_some_and(|version| version.step.next() == step);
        let latest = report.generation;
        // Within a world, the step identifies a late copy.
        if next && rank.member.handle_computed(if stale { latest } else { generation }, step).is_ok() {
            rank.open = Some((latest, step, digest));
            self.observe(&Observation::Voted { worker, generation, latest, step });
        }
    }

    fn rank_committed(&mut self, worker: Worker, generation: Generation, step: Step, requests: Requests) {
        let hearsay = self.is(Mutation::ActOnHearsay);
        let Some(rank) = self.rank(worker) else { return };
        let requests = if hearsay { rank.member.requests() } else { requests };
        let open = rank.open.filter(|open| (open.0, open.1) == (generation, step));
        if rank.member.handle_committed(generation, step, requests).is_ok()
            && let Some((_, _, digest)) = open
        {
            self.note_committed(worker, generation, step, digest);
            self.compare_if_due(worker, generation, step, requests);
        }
    }

    /// Records that a member has received the commit of a step.
    pub(super) fn note_committed(&mut self, worker: Worker, generation: Generation, step: Step, digest: u64) {
        let lineage = self.world_plan.as_ref().map(|world_plan| world_plan.base.lineage);
        let Some(rank) = self.rank(worker) else { return };
        let report = rank.member.report();
        // The job has returned to a checkpoint, but this member has not received the new world: its commits belong to an
        // abandoned lineage.
        if report.commit_state.applied.map(|version| version.lineage) != lineage {
            return;
        }
        self.step = self.step.max(step);
        self.mark(2, u64::from(worker.member.node.0) << 32 | u64::from(worker.member.slot), step.0);
        self.observe(&Observation::Committed { worker, generation, latest: report.generation, step, digest });
    }

    /// Performs a member's commands.
    pub(super) fn drive_rank(&mut self, worker: Worker) {
        while let Some(rank) = self.rank(worker)
            && let Some(command) = rank.member.poll_command()
        {
            if !rank.compares.as_mut().is_some_and(|entered| entered.takes(&command)) {
                self.perform_for_rank(worker, command);
            }
        }
    }

    /// Performs a command of a member.
    pub(super) fn perform_for_rank(&mut self, worker: Worker, command: member::Command) {
        let n_atoms = self.config.n_atoms;
        match command {
            member::Command::Abort(_) => {
                let Some(rank) = self.rank(worker) else { return };
                rank.compares = None;
                let held = rank.member.report().holds;
                retain(rank, &held, n_atoms);
            }
            member::Command::Apply(version) => self.apply(worker, version),
            member::Command::Discard => {
                let Some(rank) = self.rank(worker) else { return };
                rank.open = None;
            }
            member::Command::Keep(shards) => {
                let Some(rank) = self.rank(worker) else { return };
                retain(rank, &shards, n_atoms);
            }
            member::Command::Join(generation) => {
                self.begin_memory(worker);
                let at = self.now + self.dice.pick(100..10_000);
                let early = self.is(Mutation::ReadyOnTheWay);
                let Some(rank) = self.rank(worker).filter(|_| early) else {
                    self.queue.push(at, Event::ToRank { worker, what: RankEvent::JoinedWorld { generation } });
                    return;
                };
                let _ = rank.member.handle_joined(generation);
            }
            member::Command::Fetch { generation, base, transfer } => {
                let at = self.now + self.dice.pick(500..20_000);
                let what = RankEvent::Fetch { generation, base, transfer };
                self.queue.push(at, Event::ToRank { worker, what });
            }
            member::Command::CatchUp(_) => self.begin_catch_up(worker),
            member::Command::Compute { generation, step } => {
                let slow = self.nodes[worker.member.node.0 as usize].slow.get(&worker.member.slot).copied();
                let time = self.config.step_ms * self.dice.pick(900..1_100) * slow.unwrap_or(1);
                let what = RankEvent::Computed { generation, step };
                self.queue.push(self.now + time, Event::ToRank { worker, what });
                let assignment = self.rank(worker).and_then(|rank| rank.member.assignment());
                if let Some(world_plan) = assignment.map(|(world_plan, _)| world_plan.clone()) {
                    self.observe(&Observation::Computes { worker, world_plan: &world_plan });
                }
            }
            member::Command::Vote(vote, requests) => self.vote(worker, vote, requests),
            member::Command::Finish(generation) => {
                let at = self.now + self.dice.pick(1_000..50_000);
                self.queue.push(at, Event::ToRank { worker, what: RankEvent::Finished { generation } });
            }
            member::Command::Exit => self.kill_worker(worker),
            member::Command::Save(part) => self.begin_save(worker, part),
            member::Command::Report => self.send_status_report(worker),
        }
    }

    fn begin_save(&mut self, worker: Worker, part: Part) {
        let at = self.now + self.dice.pick(5_000..80_000);
        let runs = state::atoms(part.shard, self.config.n_atoms);
        let Some(rank) = self.rank(worker) else { return };
        let atoms = runs.into_iter().flat_map(|run| rank.atoms.range(run));
        let atoms = atoms.map(|(atom, value)| (*atom, *value)).collect();
        self.queue.push(at, Event::ToRank { worker, what: RankEvent::Saved { part, atoms } });
    }

    fn send_status_report(&mut self, worker: Worker) {
        let at = self.now + self.dice.pick(20..300);
        let Some(rank) = self.rank(worker) else { return };
        rank.last_status_report = at.max(rank.last_status_report + 1);
        let (at, status_report) = (rank.last_status_report, rank.member.report());
        if status_report.phase == MemberPhase::Ready {
            self.note_ready(&status_report);
        }
        self.queue.push(at, Event::StatusReportArrives { status_report: Box::new(status_report) });
    }

    /// Applies the open update to the state.
    fn apply(&mut self, worker: Worker, version: Version) {
        let Some(rank) = self.rank(worker) else { return };
        rank.update();
        self.observe_state(worker, version);
    }

    /// Checks and observes a member's state.
    pub(super) fn observe_state(&mut self, worker: Worker, version: Version) {
        let n_atoms = self.config.n_atoms;
        let Some(rank) = self.rank(worker) else { return };
        let atoms: Vec<(u64, u64)> = rank.atoms.iter().map(|(atom, value)| (*atom, *value)).collect();
        let held: BTreeSet<Shard> = rank.member.report().holds.into_iter().collect();
        let whole = held.iter().all(|shard| rank.has_all(*shard, n_atoms));
        if !whole {
            self.violate("golden state", format!("{worker} does not have all pieces of its reported shards"));
        }
        self.observe(&Observation::State { worker, version, atoms: &atoms });
    }

    /// Counts ready members. Once all members of the last world are ready, shows all memories to the invariants.
    fn note_ready(&mut self, status_report: &MemberReport) {
        let Some(world_plan) = self.world_plan.clone().filter(|f| f.generation == status_report.generation) else {
            return;
        };
        self.ready.insert(status_report.worker);
        let n_members = world_plan.assignments.len() + world_plan.catching_up.len();
        // A ready member may have died since.
        if self.ready.len() < n_members || world_plan.members().take(n_members).any(|w| self.rank(w).is_none()) {
            return;
        }
        let n_atoms = self.config.n_atoms;
        let mut copies: BTreeMap<Shard, Vec<Worker>> = BTreeMap::new();
        for rank in 0..world_plan.assignments.len() {
            copies.entry(Shard::of(&world_plan.mesh, rank)).or_default();
        }
        for worker in world_plan.members().take(n_members) {
            let Some(rank) = self.rank(worker) else { continue };
            let here = rank.member.report().holds;
            for shard in here.into_iter().filter(|shard| rank.has_all(*shard, n_atoms)) {
                copies.entry(shard).or_default().push(worker);
            }
        }
        let current: BTreeSet<Shard> =
            (0..world_plan.assignments.len()).map(|r| Shard::of(&world_plan.mesh, r)).collect();
        copies.retain(|shard, _| current.contains(shard));
        self.observe(&Observation::Healed(&world_plan, copies.into_iter().collect()));
    }

    /// The process in a slot, if any.
    pub(super) fn worker_in(&self, member: MemberId) -> Option<Worker> {
        self.nodes[member.node.0 as usize].worker_in(member.slot)
    }
}
