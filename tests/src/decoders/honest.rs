//! A small job that delivers messages at once, as a source of meaningful messages.

use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::coordinator::{Command, Coordinator};
use phalanx_strategies::elastic::devices::{DeviceHealth, Devices};
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::member::{self, Member, Schedule};
use phalanx_strategies::elastic::mesh_choice::{INCIDENTS_MAX, Policy};
use phalanx_strategies::elastic::message::{DesiredState, Record, Report};
use phalanx_strategies::elastic::supervisor::{self, Supervisor};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

pub(super) const JOB: JobId = JobId(1);
pub(super) const SCHEDULE: Schedule = Schedule { save_steps: 2, last_step: Some(Step(5)) };

/// The messages of the job.
pub(super) struct Messages {
    pub(super) reports: Vec<Report>,
    pub(super) desired_states: Vec<DesiredState>,
    pub(super) records: Vec<Record>,
    pub(super) status: Status,
}

/// Two shards, each on two nodes.
pub(super) fn policy() -> Policy {
    Policy {
        wanted: Mesh { dp_shard: 2, ..Mesh::ONE },
        dp_replicate_min: 1,
        dp_shard_min: 1,
        replace_patience: Duration::ZERO,
        n_microbatches: 8,
        uneven: true,
        evict_stragglers: true,
        shadows: true,
        incidents_max: INCIDENTS_MAX,
        one_model: false,
        state_bytes: 0,
        rest_bytes_max: 0,
    }
}

struct Job {
    now: Instant,
    coordinator: Coordinator,
    nodes: BTreeMap<NodeId, Supervisor>,
    members: BTreeMap<Worker, Member>,
    /// Votes for the step that is not committed yet.
    votes: VecDeque<member::Command>,
    messages: Messages,
}

/// Runs the job for a while; one node dies meanwhile.
pub(super) fn job() -> Messages {
    let now = Instant::now();
    let coordinator = Coordinator::new(now, JOB, Term(1), Record::default(), policy(), Timing::default());
    let health = |i| DeviceHealth { id: format!("GPU-{i}"), name: "G".to_owned(), ..DeviceHealth::default() };
    let node = |id| {
        let supervisor = Supervisor::new(now, JOB, NodeId(id), Incarnation(1_000), 1, Timing::default());
        // The last node differs from the others and is refused.
        let n_devices = if id < 3 { 2 } else { 0 };
        (NodeId(id), supervisor.with_devices(Devices::new((0..n_devices).map(health).collect(), 1), 1))
    };
    let status = coordinator.status(now);
    let messages = Messages { reports: vec![], desired_states: vec![], records: vec![], status };
    let (nodes, members) = ((0..4).map(node).collect(), BTreeMap::new());
    let mut job = Job { now, coordinator, nodes, members, votes: VecDeque::new(), messages };
    for tick in 0..400 {
        if tick == 40 {
            job.nodes.remove(&NodeId(1));
            job.members.retain(|worker, _| worker.member.node != NodeId(1));
        }
        if tick == 10
            && let Some(supervisor) = job.nodes.get_mut(&NodeId(2))
        {
            supervisor.handle_health(job.now, vec![DeviceHealth { fault: Some("Xid 79".to_owned()), ..health(0) }]);
        }
        job.tick();
    }
    job.messages.status = job.coordinator.status(job.now);
    // The first reports include every kind.
    job.messages.reports.truncate(60);
    job.messages
}

impl Job {
    fn tick(&mut self) {
        self.now += Duration::from_millis(20);
        self.coordinator.handle_timeout(self.now);
        self.nodes.values_mut().for_each(|supervisor| supervisor.handle_timeout(self.now));
        for _ in 0..20 {
            self.deliver();
        }
        let all = self.coordinator.record().world_plan.as_ref().map_or(0, |world_plan| world_plan.assignments.len());
        if self.votes.len() >= all {
            for command in std::mem::take(&mut self.votes) {
                let member::Command::Vote(vote, requests) = command else { continue };
                for member in self.members.values_mut() {
                    let _ = member.handle_committed(vote.generation, vote.step, requests);
                }
            }
        }
    }

    fn deliver(&mut self) {
        while let Some(command) = self.coordinator.poll_command() {
            match command {
                Command::Send(node, desired_state) => {
                    self.messages.desired_states.push(desired_state.clone());
                    self.nodes
                        .get_mut(&node)
                        .map(|supervisor| supervisor.handle_desired_state(self.now, desired_state));
                }
                Command::Persist(record) => {
                    self.messages.records.push(record);
                    self.coordinator.handle_persisted(self.now, true);
                }
                Command::Resumed(_) | Command::Saved(_) | Command::Ended(_) => {}
                Command::ListCheckpoints(listing) => self.coordinator.handle_listed(self.now, listing, None),
                Command::Refused(..) | Command::Mixed(..) | Command::NotSaved(..) | Command::Outrun(..) => {}
            }
        }
        for supervisor in self.nodes.values_mut() {
            while let Some(command) = supervisor.poll_command() {
                match command {
                    supervisor::Command::Send(report) => {
                        let _ = self.coordinator.handle_report(self.now, &report);
                        self.messages.reports.push(report);
                    }
                    supervisor::Command::Spawn(worker) => {
                        let member = Member::new(JOB, worker, Some(([127, 0, 0, 1], 4000).into()), SCHEDULE);
                        supervisor.handle_started(self.now, member.report());
                        self.members.insert(worker, member);
                    }
                    supervisor::Command::Tell(worker, desired_state) => {
                        self.members.get_mut(&worker).map(|member| member.handle_desired_state(&desired_state));
                    }
                    supervisor::Command::Examine(worker) => {
                        supervisor.handle_examined(self.now, worker, Duration::ZERO)
                    }
                    supervisor::Command::Kill(_) | supervisor::Command::Shutdown | supervisor::Command::Abandon(_) => {}
                }
            }
        }
        for (worker, member) in &mut self.members {
            while let Some(command) = member.poll_command() {
                perform(member, command, &mut self.votes);
            }
            self.nodes
                .get_mut(&worker.member.node)
                .into_iter()
                .for_each(|s| s.handle_status_report(self.now, member.report()));
        }
    }
}

/// Acts as the shell of a member; the caller counts votes.
pub(super) fn perform(member: &mut Member, command: member::Command, votes: &mut VecDeque<member::Command>) {
    use member::Command::{
        Abort, Apply, CatchUp, Compute, Discard, Exit, Fetch, Finish, Join, Keep, Report, Save, Vote,
    };
    match command {
        Join(generation) => drop(member.handle_joined(generation)),
        Fetch { generation, transfer, .. } => drop(member.handle_fetched(generation, transfer)),
        Compute { generation, step } => {
            let _ = member.handle_entered(generation, step);
            let _ = member.handle_computed(generation, step);
        }
        Save(part) => member.handle_saved(part),
        Finish(generation) => drop(member.handle_finished(generation)),
        Vote(..) => votes.push_back(command),
        Abort(_) | Apply(_) | Discard | Keep(_) | CatchUp(_) | Exit | Report => {}
    }
}
