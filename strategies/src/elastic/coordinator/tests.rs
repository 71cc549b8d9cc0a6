//! Tests of the composition: a coordinator, supervisors and members, connected without delay or loss. The simulator of
//! `phalanx-chaos` covers delays, losses and deaths.

mod corruption;
mod devices;
mod failing;
mod growth;
mod inputs;
mod lost_world;
mod newest_checkpoint;
mod quarantine;
mod spares;
mod stopping;

use super::*;
use crate::elastic::checkpoint::Part;
use crate::elastic::commit::Version;
use crate::elastic::devices::{DeviceHealth, Devices};
use crate::elastic::identity::{Generation, Incarnation, MemberId, Step, Worker};
use crate::elastic::member::{self, Member, Schedule};
use crate::elastic::mesh_choice::INCIDENTS_MAX;
use crate::elastic::message::{MemberPhase, Requests, WorldPlan};
use crate::elastic::progress::At;
use crate::elastic::snapshot::Manifests;
use crate::elastic::supervisor::{self, Supervisor};
use crate::mesh::Mesh;
use std::collections::BTreeMap;
use std::time::Duration;

/// A job that delivers every message at once; a step takes one tick of ten milliseconds.
struct Job {
    now: Instant,
    coordinator: Coordinator,
    policy: Policy,
    schedule: Schedule,
    nodes: BTreeMap<NodeId, Supervisor>,
    members: BTreeMap<Worker, Member>,
    votes: BTreeMap<(Generation, Step), (BTreeSet<Worker>, Requests)>,
    /// Steps that are being computed.
    open: Vec<(Worker, Generation, Step)>,
    /// All parts of checkpoints that were written.
    saved: Vec<Part>,
    /// The store of checkpoints: parts of the latest world's, the newest committed one, and whether a listing gets no answer.
    parts: Manifests,
    on_disk: Option<Checkpoint>,
    disk_is_silent: bool,
    listings: Vec<Listing>,
    /// Whether members die after they have saved, before they report it.
    dies_saved: bool,
    /// The last step for which all members have voted.
    committed: Step,
    ended: Option<Ending>,
    /// Nodes that were refused, and nodes with other devices.
    refused: Vec<(NodeId, String)>,
    mixed: Vec<(NodeId, String)>,
    /// Node whose processes die when they start to compute.
    crashing: Option<NodeId>,
    /// Whether state transfers never finish.
    stuck: bool,
    /// Whether processes end before their first status report.
    failed_starts: bool,
    /// Whether members fail when they save.
    refuses_to_save: bool,
    /// The records that the store does not take.
    refuses_record: fn(&Record) -> bool,
    /// Whether checkpoints fail and training goes on; those that did.
    disk_is_full: bool,
    unsaved: Vec<Unsaved>,
    /// Member whose device does not finish its step.
    frozen: Option<Worker>,
    /// Member whose device takes four ticks for a step instead of one.
    slow: Option<MemberId>,
    n_ticks: u64,
    /// Steps behind which members paused.
    paused_behind: BTreeSet<Step>,
}

const TICK: Duration = Duration::from_millis(10);

fn policy(wanted: Mesh) -> Policy {
    Policy {
        wanted,
        dp_replicate_min: 1,
        dp_shard_min: 1,
        replace_patience: Duration::ZERO,
        n_microbatches: 8,
        uneven: true,
        evict_stragglers: true,
        shadows: true,
        incidents_max: INCIDENTS_MAX,
        one_model: false,
        state_bytes: 1_000,
        rest_bytes_max: 1_000,
    }
}

fn shards(dp_shard: usize) -> Mesh {
    Mesh { dp_shard, ..Mesh::ONE }
}

impl Job {
    fn start(wanted: Mesh, n_nodes: u32, schedule: Schedule) -> Job {
        let now = Instant::now();
        let policy = policy(wanted);
        let coordinator = Coordinator::new(now, JobId(1), Term(1), Record::default(), policy, Timing::default());
        let mut job = Job {
            now,
            coordinator,
            policy,
            schedule,
            nodes: BTreeMap::new(),
            members: BTreeMap::new(),
            votes: BTreeMap::new(),
            open: vec![],
            saved: vec![],
            parts: Manifests::default(),
            on_disk: None,
            disk_is_silent: false,
            listings: vec![],
            dies_saved: false,
            committed: Step(0),
            ended: None,
            refused: vec![],
            mixed: vec![],
            crashing: None,
            stuck: false,
            failed_starts: false,
            refuses_to_save: false,
            refuses_record: |_| false,
            disk_is_full: false,
            unsaved: vec![],
            frozen: None,
            slow: None,
            n_ticks: 0,
            paused_behind: BTreeSet::new(),
        };
        (0..n_nodes).for_each(|node| job.start_node(node));
        job
    }

    fn start_node(&mut self, node: u32) {
        let boot = Incarnation(1_000 + 1_000 * self.now.elapsed().as_secs());
        let supervisor = Supervisor::new(self.now, JobId(1), NodeId(node), boot, 1, Timing::default());
        self.nodes.insert(NodeId(node), supervisor);
    }

    /// Starts another coordinator from the durable record.
    fn succeed(&mut self) {
        let record = self.coordinator.record().clone();
        let term = record.term.next();
        self.coordinator = Coordinator::new(self.now, JobId(1), term, record, self.policy, Timing::default());
    }

    fn tick(&mut self) {
        self.now += TICK;
        self.n_ticks += 1;
        self.coordinator.handle_timeout(self.now);
        if !self.disk_is_silent {
            self.list_checkpoints();
        }
        for (node, supervisor) in &mut self.nodes {
            for (_, member) in self.members.iter().filter(|(worker, _)| worker.member.node == *node) {
                supervisor.handle_status_report(self.now, member.report());
            }
            supervisor.handle_timeout(self.now);
        }
        while self.deliver() {}
        for (worker, generation, step) in std::mem::take(&mut self.open) {
            let is_slow = self.slow == Some(worker.member) && !self.n_ticks.is_multiple_of(4);
            if self.frozen == Some(worker) || is_slow {
                self.open.push((worker, generation, step));
                continue;
            }
            let Some(member) = self.members.get_mut(&worker) else { continue };
            let _ = member.handle_entered(generation, step);
            let _ = member.handle_computed(generation, step);
        }
        while self.deliver() {}
    }

    fn run_until(&mut self, what: &str, done: impl Fn(&Job) -> bool) {
        for _ in 0..8_000 {
            if done(self) {
                return;
            }
            self.tick();
        }
        panic!("{what} did not happen: {:#?}", self.coordinator.status(self.now));
    }

    fn run_for(&mut self, ticks: usize) {
        (0..ticks).for_each(|_| self.tick());
    }

    /// Executes all pending commands. Returns whether there were any.
    fn deliver(&mut self) -> bool {
        let mut any = false;
        while let Some(command) = self.coordinator.poll_command() {
            any = true;
            match command {
                Command::Send(node, desired_state) => {
                    if let Some(supervisor) = self.nodes.get_mut(&node) {
                        let _ = supervisor.handle_desired_state(self.now, desired_state);
                    }
                }
                Command::Persist(record) => self.persist(&record),
                Command::ListCheckpoints(listing) => self.listings.push(listing),
                Command::Ended(ending) => self.ended = Some(ending),
                Command::Refused(node, reason) => self.refused.push((node, reason)),
                Command::Mixed(node, text) => self.mixed.push((node, text)),
                Command::Resumed(_) | Command::Saved(_) | Command::Outrun(_) => {}
                Command::NotSaved(unsaved) => self.unsaved.push(unsaved),
            }
        }
        let ids: Vec<NodeId> = self.nodes.keys().copied().collect();
        for id in ids {
            while let Some(command) = self.nodes.get_mut(&id).and_then(Supervisor::poll_command) {
                any = true;
                self.supervise(id, command);
            }
        }
        let workers: Vec<Worker> = self.members.keys().copied().collect();
        for worker in workers {
            while let Some(command) = self.members.get_mut(&worker).and_then(Member::poll_command) {
                any = true;
                self.perform(worker, command);
            }
        }
        any
    }

    fn supervise(&mut self, id: NodeId, command: supervisor::Command) {
        let Some(supervisor) = self.nodes.get_mut(&id) else { return };
        match command {
            supervisor::Command::Send(report) => {
                let _ = self.coordinator.handle_report(self.now, &report);
            }
            supervisor::Command::Spawn(worker) if self.failed_starts => supervisor.handle_exited(self.now, worker),
            supervisor::Command::Spawn(worker) => {
                let member = Member::new(JobId(1), worker, None, self.schedule);
                supervisor.handle_started(self.now, member.report());
                self.members.insert(worker, member);
            }
            supervisor::Command::Kill(worker) => self.kill(worker),
            supervisor::Command::Examine(worker) => supervisor.handle_examined(self.now, worker, Duration::ZERO),
            supervisor::Command::Tell(worker, desired_state) => {
                if let Some(member) = self.members.get_mut(&worker) {
                    let _ = member.handle_desired_state(&desired_state);
                }
            }
            supervisor::Command::Shutdown | supervisor::Command::Abandon(_) => drop(self.nodes.remove(&id)),
        }
    }

    fn perform(&mut self, worker: Worker, command: member::Command) {
        let Some(member) = self.members.get_mut(&worker) else { return };
        match command {
            member::Command::Join(_) | member::Command::Fetch { .. } if self.stuck => {}
            member::Command::Join(generation) => drop(member.handle_joined(generation)),
            member::Command::Fetch { generation, transfer, .. } => {
                let _ = member.handle_fetched(generation, transfer);
            }
            member::Command::Compute { .. } if self.crashing == Some(worker.member.node) => self.kill(worker),
            member::Command::Compute { generation, step } => self.open.push((worker, generation, step)),
            member::Command::Vote(vote, requests) => self.vote(worker, vote.generation, vote.step, requests),
            member::Command::Save(_) if self.refuses_to_save => member.handle_failed("cannot save"),
            member::Command::Save(part) if self.disk_is_full => {
                let _ = member.handle_unsaved(part.of.generation, part.of.step, "no space left");
            }
            member::Command::Save(part) => {
                self.saved.push(part);
                self.on_disk = self.parts.handle_part(part).or(self.on_disk);
                if self.dies_saved { self.kill(worker) } else { member.handle_saved(part) }
            }
            member::Command::Finish(generation) => {
                let _ = member.handle_finished(generation);
            }
            member::Command::Exit => self.kill(worker),
            member::Command::Report => {
                let status_report = member.report();
                if status_report.phase == MemberPhase::Paused {
                    self.paused_behind.extend(status_report.commit_state.applied.map(|version| version.step));
                }
                if let Some(supervisor) = self.nodes.get_mut(&worker.member.node) {
                    supervisor.handle_status_report(self.now, status_report);
                }
            }
            member::Command::Abort(_)
            | member::Command::CatchUp(_)
            | member::Command::Apply(_)
            | member::Command::Discard
            | member::Command::Keep(_) => {}
        }
    }

    fn vote(&mut self, worker: Worker, generation: Generation, step: Step, requests: Requests) {
        let (voted, all) = self.votes.entry((generation, step)).or_default();
        voted.insert(worker);
        *all = all.and(requests);
        let assignments =
            self.members.values().find_map(|m| m.assignment().map(|(f, _)| f).filter(|f| f.generation == generation));
        let assignments = assignments.map(|world_plan| world_plan.assignments.clone()).unwrap_or_default();
        if assignments.iter().all(|assignment| voted.contains(assignment)) {
            self.committed = self.committed.max(step);
            let all = *all;
            let frozen = self.frozen;
            let catches_up = |m: &&mut Member| m.beside().is_some_and(|f| f.generation == generation);
            for catch_up in self.members.values_mut().filter(catches_up).filter(|m| Some(m.worker()) != frozen) {
                // The missing state has arrived with the gradients of the previous step.
                let base = catch_up.beside().map(|world_plan| world_plan.base).unwrap_or_default();
                if catch_up.report().holds.is_empty() && step.0 >= base.step.0 + 5 {
                    catch_up.handle_caught_up(generation, Version { step: Step(step.0 - 1), ..base }).unwrap();
                }
                catch_up.handle_followed(generation, step).unwrap();
                catch_up.handle_outcome(generation, step).unwrap();
            }
            for assignment in assignments {
                if let Some(member) = self.members.get_mut(&assignment) {
                    let _ = member.handle_committed(generation, step, all);
                }
            }
        }
    }

    fn kill(&mut self, worker: Worker) {
        if self.members.remove(&worker).is_some()
            && let Some(supervisor) = self.nodes.get_mut(&worker.member.node)
        {
            supervisor.handle_exited(self.now, worker);
        }
    }

    fn running(&self, mesh: Mesh) -> bool {
        let formed = self.coordinator.record().world_plan.as_ref().is_some_and(|world_plan| world_plan.mesh == mesh);
        formed && self.coordinator.activity() == Activity::Running && self.coordinator.incident.is_none()
    }

    fn step(&self) -> Step {
        self.coordinator.status(self.now).step
    }

    fn worker_on(&self, node: u32) -> Worker {
        *self.members.keys().find(|worker| worker.member.node == NodeId(node)).unwrap()
    }
}

fn until(last_step: u64) -> Schedule {
    Schedule { save_steps: 0, last_step: Some(Step(last_step)) }
}

// COORDINATOR-7, MEMBER-5
#[test]
fn job_ends_when_all_ranks_are_done_and_the_last_step_is_saved() {
    let mut job = Job::start(shards(2), 2, until(20));

    job.run_until("the end", |job| job.coordinator.all_notified() && job.nodes.is_empty());

    assert_eq!((job.ended, job.coordinator.activity()), (Some(Ending::Finished), Activity::Finished));
    assert_eq!(job.coordinator.record().checkpoint.step, Step(20));
    assert!(job.members.is_empty());
    assert_eq!(job.committed, Step(20));
}

/// Under load a coordinator may lose its lease at any time, also when its job has ended.
// COORDINATOR-7
#[test]
fn successor_of_an_ended_job_notifies_nodes_that_it_has_not_heard() {
    let mut job = Job::start(shards(2), 2, until(20));
    job.run_until("the ending", |job| job.coordinator.record().ending.is_some());

    job.succeed();
    assert!(!job.coordinator.all_notified(), "no node has reported yet");
    job.run_until("the end", |job| job.coordinator.all_notified());
    job.run_until("the end of the nodes", |job| job.nodes.is_empty());

    assert_eq!(job.coordinator.activity(), Activity::Finished);
}

// COORDINATOR-7
#[test]
fn successor_of_an_ended_job_waits_no_longer_than_its_grace_for_nodes_that_are_gone() {
    let mut job = Job::start(shards(2), 2, until(20));
    job.run_until("the ending", |job| job.coordinator.record().ending.is_some());
    job.nodes.clear();

    job.succeed();
    let since = job.now;
    job.run_until("the end", |job| job.coordinator.all_notified());

    assert!(job.now >= since + Timing::default().takeover_grace);
}

// MEMBER-4
#[test]
fn members_stop_after_the_same_step_and_save_it() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.coordinator.handle_stop(job.now);
    job.run_until("the end", |job| job.nodes.is_empty());

    let steps: BTreeSet<Step> = job.saved.iter().map(|part| part.of.step).collect();
    assert_eq!((job.saved.len(), steps.len()), (3, 1));
    assert_eq!(job.coordinator.record().checkpoint.step, *steps.first().unwrap());
    assert_eq!(job.ended, Some(Ending::Finished));
}

// COORDINATOR-7
#[test]
fn job_without_members_stops_when_its_state_is_saved() {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    job.run_until("waiting", |job| job.coordinator.activity() == Activity::Regrouping);

    job.coordinator.handle_stop(job.now);
    job.run_until("the end", |job| job.ended.is_some());

    assert_eq!(job.ended, Some(Ending::Finished));
}

// COORDINATOR-7
#[test]
fn job_stopped_during_recovery_saves_its_state_and_trains_no_further_step() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let worker = job.worker_on(1);

    job.coordinator.policy.replace_patience = Duration::from_secs(1);
    job.stuck = true;
    job.kill(worker);
    job.run_until("healing", |job| job.coordinator.activity() == Activity::Healing);
    job.coordinator.handle_stop(job.now);
    let worker = job.worker_on(1);
    job.kill(worker);
    job.stuck = false;
    let committed = job.committed;
    job.run_until("the end", |job| job.nodes.is_empty());

    assert_eq!((job.ended, job.committed), (Some(Ending::Finished), committed));
    assert_eq!(job.coordinator.record().checkpoint.step, committed);
}

// COORDINATOR-7
#[test]
fn job_ends_and_names_the_node_when_its_processes_fail_to_start() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.failed_starts = true;

    job.run_until("the job's failure", |job| job.ended.is_some());

    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.ended) };
    let (node, rest) = reason.split_once(": ").unwrap();
    assert!(["node 0", "node 1"].contains(&node), "{reason}");
    assert!(rest.contains(" processes in a row ended before their first status report"), "{reason}");
}

// MEMBER-4, COORDINATOR-6
#[test]
fn requested_checkpoint_is_saved_by_the_next_world_after_a_loss() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.coordinator.handle_save(job.now);
    let worker = job.worker_on(1);
    job.kill(worker);
    job.run_until("a checkpoint", |job| job.coordinator.record().n_saves == 1);
    let saved = job.saved.clone();
    job.run_for(50);

    assert!(job.coordinator.record().checkpoint.step >= Step(5));
    assert_eq!(job.saved, saved, "one request, one checkpoint");
    let age_ms = |later_ms| job.coordinator.status(job.now + Duration::from_millis(later_ms)).checkpoint_age_ms;
    assert_eq!(age_ms(5_000), age_ms(0) + 5_000, "nothing newer is durable since then");
    assert!(age_ms(0) < 60_000, "{} ms since the checkpoint", age_ms(0));
}

// COORDINATOR-6
#[test]
fn requests_survive_the_coordinator() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    job.coordinator.handle_stop(job.now);
    let Some(Command::Persist(record)) = job.coordinator.poll_command() else { panic!("nothing is written") };
    assert!(record.requests.stop);
    job.coordinator.handle_persisted(job.now, true);

    job.succeed();
    job.run_until("the end", |job| job.nodes.is_empty());

    assert_eq!(job.ended, Some(Ending::Finished));
}

// COORDINATOR-6
#[test]
fn drained_node_is_released_without_loss_and_takes_part_again_after_a_new_start() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let before = job.step();

    job.coordinator.handle_drain(job.now, NodeId(1)).unwrap();
    job.run_until("the node's release", |job| !job.nodes.contains_key(&NodeId(1)));

    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    assert_eq!((world_plan.mesh.dp_shard, world_plan.base.lineage), (2, Generation(1)), "no state came from disk");
    assert!(world_plan.base.step >= before);
    assert!(world_plan.guests.iter().all(|guest| guest.member.node == NodeId(1)));
    assert_eq!(world_plan.addresses.len(), world_plan.assignments.len() + world_plan.guests.len());
    job.succeed();
    job.start_node(1);
    job.run_until("the whole mesh", |job| job.running(shards(3)));
    assert!(job.nodes.contains_key(&NodeId(1)) && job.coordinator.record().drained.is_empty());
}

#[test]
fn draining_node_loses_its_rank_and_shuts_down() {
    let mut job = Job::start(shards(2), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let node = job.coordinator.record().world_plan.as_ref().unwrap().assignments[0].member.node;

    let now = job.now;
    job.nodes.get_mut(&node).unwrap().handle_drain(now);
    job.run_until("the node's release", |job| !job.nodes.contains_key(&node));

    job.run_until("the spare has its rank", |job| job.running(shards(2)));
    assert!(!job.coordinator.membership.any_silent());
}

// COORDINATOR-8
#[test]
fn committed_step_is_saved_when_all_nodes_drain_and_new_nodes_continue_from_it() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    let now = job.now;
    job.nodes.values_mut().for_each(|supervisor| supervisor.handle_drain(now));
    job.run_until("the release of all nodes", |job| job.nodes.is_empty());

    let committed = job.committed;
    let record = job.coordinator.record();
    assert_eq!((record.checkpoint.step, record.world_plan.clone()), (committed, None));
    assert!(matches!(job.coordinator.blocked(), Some(Blocked::TooFew { .. })), "{:?}", job.coordinator.blocked());
    assert_eq!(job.ended, None);
    job.succeed();
    (7..9).for_each(|node| job.start_node(node));
    job.run_until("training", |job| job.running(shards(2)));
    assert_eq!(job.coordinator.record().world_plan.as_ref().unwrap().base.step, committed);
    assert_eq!(job.coordinator.timelines[0].cause.why, Why::Drains, "the drain and the restart are one incident");
}

// COORDINATOR-7
#[test]
fn stopped_job_continues_from_its_checkpoint_when_its_record_is_reopened() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    job.coordinator.handle_stop(job.now);
    job.run_until("the end", |job| job.nodes.is_empty());
    let saved = job.coordinator.record().checkpoint.step;

    let record = Record { term: Term(2), ..job.coordinator.record().clone().reopened() };
    job.coordinator = Coordinator::new(job.now, JobId(1), Term(2), record, job.policy, Timing::default());
    (7..9).for_each(|node| job.start_node(node));
    job.run_until("training", |job| job.running(shards(2)) && job.step() > saved);

    assert_eq!(job.coordinator.record().world_plan.as_ref().unwrap().base.step, saved);
}

// COORDINATOR-6
#[test]
fn larger_mesh_forms_once_enough_members_are_present_and_a_smaller_one_at_once() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.coordinator.handle_resize(job.now, shards(3)).unwrap();
    job.run_for(20);
    assert!(job.running(shards(2)));
    let blocked = job.coordinator.blocked().unwrap();
    assert_eq!(blocked.to_string(), "the requested mesh needs 3 members, 2 are present");
    job.start_node(2);
    job.run_until("three shards", |job| job.running(shards(3)));
    job.coordinator.handle_resize(job.now, shards(1)).unwrap();
    job.run_until("one shard", |job| job.running(shards(1)));

    assert_eq!(job.coordinator.blocked(), None);
    let whys: Vec<Why> = job.coordinator.timelines.iter().map(|timeline| timeline.cause.why).collect();
    assert_eq!(whys, [Why::Started, Why::Resized, Why::Resized]);
    job.succeed();
    job.run_for(200);
    assert!(job.running(shards(1)), "the requested mesh outlives the coordinator");
}

// MESH-CHOICE-1
#[test]
fn job_resizes_to_any_mesh_and_survives_a_loss_while_it_waits_for_members() {
    let mut job = Job::start(shards(4), 4, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    let chain = [
        Mesh { tp: 2, dp_shard: 2, ..Mesh::ONE },
        Mesh { pp: 2, tp: 2, ..Mesh::ONE },
        Mesh { cp: 2, dp_shard: 2, ..Mesh::ONE },
        Mesh { dp_replicate: 2, pp: 2, ..Mesh::ONE },
    ];
    for mesh in chain {
        let before = job.step();
        job.coordinator.handle_resize(job.now, mesh).unwrap();
        job.run_until("the mesh", |job| job.running(mesh));
        job.run_until("steps in the mesh", |job| job.step() > before.next());
    }
    let too_large = Mesh { pp: 5, ..Mesh::ONE };
    job.coordinator.handle_resize(job.now, too_large).unwrap();
    let lost = job.coordinator.record().world_plan.as_ref().unwrap().assignments[3];
    job.kill(lost);
    job.run_until("the same cut with fewer copies", |job| job.running(Mesh { pp: 2, ..Mesh::ONE }));

    let blocked = job.coordinator.blocked().unwrap();
    assert!(blocked.to_string().starts_with("the requested mesh needs 5 members"), "{blocked}");
    (4..6).for_each(|node| job.start_node(node));
    job.run_until("five stages", |job| job.running(too_large));
}

#[test]
fn rejected_mesh_changes_nothing() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    assert!(job.coordinator.handle_resize(job.now, Mesh { tp: 0, ..Mesh::ONE }).is_err());

    assert_eq!(job.coordinator.poll_command(), None);
}

// COORDINATOR-3
#[test]
fn guests_keep_the_state_when_all_ranks_die_before_they_train() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let before = job.step();

    job.stuck = true;
    job.coordinator.handle_resize(job.now, shards(1)).unwrap();
    job.run_until("healing", |job| job.coordinator.activity() == Activity::Healing);
    let assignment = job.coordinator.record().world_plan.as_ref().unwrap().assignments[0];
    job.stuck = false;
    job.kill(assignment);
    job.run_until("one shard", |job| job.running(shards(1)));

    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    assert_eq!((world_plan.generation, world_plan.base.lineage), (Generation(3), Generation(1)), "not from disk");
    assert!(world_plan.base.step >= before);
}

// COORDINATOR-7
#[test]
fn permanent_failure_of_a_member_ends_the_job_with_the_first_reason() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    let (first, second) = (job.worker_on(0), job.worker_on(1));
    job.members.get_mut(&first).unwrap().handle_failed(&format!("loss is NaN{}", "!".repeat(10_000)));
    job.tick();
    if let Some(member) = job.members.get_mut(&second) {
        member.handle_failed("the other has gone");
    }
    job.run_until("the end", |job| job.nodes.is_empty());

    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.ended) };
    assert!(reason.starts_with(&format!("{first}: loss is NaN!")) && reason.len() < 600, "{reason}");
    job.succeed();
    assert_eq!(job.coordinator.activity(), Activity::Failed);
    assert!(matches!(job.coordinator.poll_command(), Some(Command::Ended(Ending::Failed(_)))));
}

// COORDINATOR-7
#[test]
fn only_crashes_in_a_row_without_a_step_end_the_job() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    for _ in 0..2 * INCIDENTS_MAX {
        let step = job.step();
        job.run_until("a step", |job| job.running(shards(2)) && job.step() > step);
        let worker = job.worker_on(0);
        job.kill(worker);
        job.run_for(5);
    }
    assert_eq!(job.ended, None);

    job.crashing = Some(NodeId(0));
    job.run_until("the job's failure", |job| job.ended.is_some());

    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.coordinator.status(job.now)) };
    assert!(reason.contains(" crashes in a row") && reason.contains("node 0 slot 0"), "{reason}");
}

#[test]
fn status_lists_ranks_states_and_incidents() {
    let mut job = Job::start(shards(2), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    let status = job.coordinator.status(job.now + Duration::from_millis(30));

    assert_eq!((status.activity, status.mesh, status.nodes.len()), (Activity::Running, Some(shards(2)), 3));
    let assigned: Vec<_> = status.nodes.iter().flat_map(|node| &node.ranks).filter(|w| w.rank.is_some()).collect();
    assert_eq!(assigned.len(), 2);
    for worker in assigned {
        assert_eq!((worker.phase, worker.n_own, worker.n_shadows), (MemberPhase::Running, 1, 1));
        assert_eq!(worker.coordinate.as_ref().unwrap()["dp_shard"], worker.rank.unwrap());
        assert!(worker.applied.unwrap() >= Step(4));
    }
    assert!(status.nodes.iter().all(|node| !node.silent && node.heard_ago_ms >= 30));
    assert_eq!(status.timelines[0].cause.why, Why::Started);
}

/// The latest closed incident.
fn last_incident(job: &Job) -> Timeline {
    job.coordinator.status(job.now).timelines.pop().unwrap()
}

// `progress` PROGRESS-1
#[test]
fn stuck_device_is_replaced_and_waiting_devices_are_not() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let worker = job.worker_on(1);
    let others: Vec<Worker> = job.members.keys().copied().filter(|other| *other != worker).collect();

    job.frozen = Some(worker);
    job.run_until("a successor", |job| !job.members.contains_key(&worker) && job.running(shards(3)));

    let incident = last_incident(&job);
    assert_eq!(incident.cause, Cause { culprit: Culprit::Worker(worker), why: Why::Straggles });
    assert!(incident.detail.as_ref().is_some_and(|detail| detail.contains("2 waiting for all ranks")), "{incident}");
    assert!(others.iter().all(|other| job.members.contains_key(other)));
}

// `straggler` STRAGGLER-1, STRAGGLER-2
#[test]
fn slow_device_is_replaced_by_a_spare_and_an_equally_slow_spare_stays() {
    let mut job = Job::start(shards(3), 4, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let slow = job.worker_on(1);

    job.slow = Some(slow.member);
    job.run_for(1_000);
    job.run_until("a replacement", |job| !job.members.contains_key(&slow) && job.running(shards(3)));

    let incident = last_incident(&job);
    assert_eq!(incident.cause, Cause { culprit: Culprit::Worker(slow), why: Why::Straggles });
    assert!(incident.detail.as_ref().is_some_and(|detail| detail.contains("no other rank in more than")), "{incident}");
    let world_plan = job.coordinator.record().world_plan.clone().unwrap();
    let rank = world_plan
        .assignments
        .iter()
        .position(|assignment| assignment.member.node == NodeId(3))
        .unwrap_or_else(|| panic!("{:?} {incident}", world_plan.assignments));
    let replacement = world_plan.assignments[rank];

    job.slow = Some(replacement.member);
    let is_slow = |job: &Job| {
        let nodes = job.coordinator.status(job.now).nodes;
        nodes.iter().flat_map(|node| &node.ranks).any(|worker| worker.member == replacement.member && worker.slow)
    };
    job.run_for(1_000);
    job.run_until("a slow replacement", is_slow);
    job.run_for(200);

    assert!(job.members.contains_key(&replacement), "the rank's work is slow, not the device");
}

// `straggler` STRAGGLER-2
#[test]
fn slow_device_without_a_spare_is_reported_and_keeps_its_rank() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let slow = job.worker_on(1);

    job.slow = Some(slow.member);
    job.run_for(1_000);
    let is_slow = |job: &Job| job.coordinator.status(job.now).nodes[1].ranks[0].slow;
    job.run_until("a straggler in the status", is_slow);
    job.run_for(200);

    assert!(job.members.contains_key(&slow) && job.running(shards(3)));
}

// COORDINATOR-9
#[test]
fn one_of_two_partitioned_nodes_is_left_out_until_the_retry() {
    let mut job = Job::start(shards(3), 3, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let (worker, lost) = (job.worker_on(0), job.worker_on(2));
    let (generation, committed) = (job.coordinator.record().generation, job.committed);

    job.members.get_mut(&worker).unwrap().handle_broken(generation, Some(lost), "timed out").unwrap();
    job.run_until("a world without one of them", |job| job.running(shards(2)));
    let incident = last_incident(&job);
    let assignments = job.coordinator.record().world_plan.as_ref().unwrap().assignments.clone();
    job.run_until("a world of all", |job| job.running(shards(3)));

    assert_eq!(incident.cause, Cause { culprit: Culprit::Worker(lost), why: Why::Unreachable });
    assert!(incident.detail.as_ref().is_some_and(|detail| detail.ends_with("timed out")), "{incident}");
    assert!(!assignments.contains(&lost) && incident.step >= committed);
}
