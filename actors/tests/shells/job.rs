//! A job of actors in virtual time: real shells and machines with a simulated network, simulated processes and no
//! tensors.

use actix::{Actor, Addr, AsyncContext, Context, Handler, Recipient};
use phalanx_actors::coordinator::{self, Checkpoints, Coordinator, GetStatus, Leave, ReportArrived, SendDesiredState};
use phalanx_actors::events::{Event, IncidentLine, What};
use phalanx_actors::store::{SharedStore, memory::Memory};
use phalanx_actors::supervisor::{
    self, DesiredStateArrived, Examine, Kill, SendReport, Shutdown, Spawn, StatusReport, Supervisor, Tell,
    WorkerExamined, WorkerExited, WorkerStarted,
};
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::commit::Vote;
use phalanx_strategies::elastic::coordinator::Activity;
use phalanx_strategies::elastic::coordinator::status::Status;
use phalanx_strategies::elastic::devices::Devices;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, NodeId, Step, Worker};
use phalanx_strategies::elastic::member::{Command, Member, Schedule};
use phalanx_strategies::elastic::mesh_choice::{INCIDENTS_MAX, Policy};
use phalanx_strategies::elastic::message::{MemberReport, Requests};
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::mesh::Mesh;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A test's handle of the job.
pub struct Job {
    policy: Policy,
    is_alone: bool,
    end_patience: Option<Duration>,
    pub store: SharedStore,
    checkpoints: Checkpoints,
    /// What the store of checkpoints answers: errors first.
    pub on_disk: Arc<Mutex<Vec<Result<Checkpoint, String>>>>,
    pub coordinators: Vec<Addr<Coordinator>>,
    network: Addr<Network>,
    events: Addr<Log>,
    pub plane: Rc<RefCell<Plane>>,
}

/// State shared by all ranks: the members, their votes and the events.
#[derive(Default)]
pub struct Plane {
    schedule: Schedule,
    members: BTreeMap<Worker, Member>,
    computing: BTreeSet<(Worker, Generation, Step)>,
    votes: BTreeMap<(Generation, Step), (BTreeSet<Worker>, Requests)>,
    supervisors: BTreeMap<NodeId, Addr<Supervisor>>,
    /// Nodes whose supervisor has ended.
    pub down: BTreeSet<NodeId>,
    pub events: Vec<Event>,
}

const JOB: JobId = JobId(7);
const STEP: Duration = Duration::from_millis(10);

/// Runs a test on one thread, in virtual time.
pub fn simulate(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// A mesh of `dp_shard` shards.
pub fn shards(dp_shard: usize) -> Mesh {
    Mesh { dp_shard, ..Mesh::ONE }
}

impl Job {
    /// Starts a coordinator, and nodes with one slot each.
    pub async fn start(mesh: Mesh, n_nodes: u32, schedule: Schedule) -> Job {
        Job::start_on(Arc::new(Memory::default()), false, mesh, n_nodes, schedule).await
    }

    /// Starts a job on this store, whose nodes end with the coordinator if it `is_alone`.
    pub async fn start_on(store: SharedStore, is_alone: bool, mesh: Mesh, n_nodes: u32, schedule: Schedule) -> Job {
        Job::start_with(store, is_alone, None, mesh, n_nodes, schedule).await
    }

    /// As [`Job::start_on`]; the end of the job waits for a silent store for as long as given.
    pub async fn start_with(
        store: SharedStore,
        is_alone: bool,
        end_patience: Option<Duration>,
        mesh: Mesh,
        n_nodes: u32,
        schedule: Schedule,
    ) -> Job {
        let plane = Rc::new(RefCell::new(Plane { schedule, ..Plane::default() }));
        let policy = Policy {
            wanted: mesh,
            dp_replicate_min: 1,
            dp_shard_min: 1,
            replace_patience: Duration::from_millis(500),
            n_microbatches: 8,
            uneven: true,
            evict_stragglers: true,
            shadows: true,
            incidents_max: INCIDENTS_MAX,
            one_model: false,
            state_bytes: 0,
            rest_bytes_max: 0,
        };
        let on_disk: Arc<Mutex<Vec<Result<Checkpoint, String>>>> = Arc::default();
        let answers = on_disk.clone();
        let checkpoints = Checkpoints::new(move |listing| {
            let answer = answers.lock().unwrap().pop().transpose()?;
            Ok(answer.filter(|found| found.generation >= listing.first && found.step > listing.after))
        });
        let mut job = Job {
            policy,
            store,
            checkpoints,
            on_disk,
            is_alone,
            end_patience,
            coordinators: vec![],
            network: Network { plane: plane.clone(), coordinators: vec![] }.start(),
            events: Log(plane.clone()).start(),
            plane,
        };
        job.add_candidate();
        (0..n_nodes).for_each(|node| job.add_node(NodeId(node)));
        job
    }

    pub fn add_candidate(&mut self) {
        let candidate = self.coordinators.len() as u32;
        let (is_alone, end_patience) = (self.is_alone, self.end_patience);
        let (policy, timing) = (self.policy, Timing::default());
        let settings =
            coordinator::Settings { job: JOB, candidate, holds: None, is_alone, end_patience, policy, timing };
        let outlets = coordinator::Outlets {
            desired_states: self.network.clone().recipient(),
            events: self.events.clone().recipient(),
        };
        let coordinator = Coordinator::new(settings, self.store.clone(), self.checkpoints.clone(), outlets).start();
        self.network.try_send(Reach(coordinator.clone().recipient())).unwrap();
        self.coordinators.push(coordinator);
    }

    pub fn add_node(&mut self, node: NodeId) {
        let settings = supervisor::Settings {
            job: JOB,
            node,
            boot: Incarnation(1_000),
            n_slots: 1,
            n_slots_min: 1,
            devices: Devices::default(),
            inputs: vec![],
            timing: Timing::default(),
        };
        let processes = Processes { node, plane: self.plane.clone() }.start();
        let outlets = supervisor::Outlets {
            spawn: processes.clone().recipient(),
            kill: processes.clone().recipient(),
            examine: processes.clone().recipient(),
            tell: processes.clone().recipient(),
            reports: self.network.clone().recipient(),
            shutdown: processes.recipient(),
        };
        let supervisor = Supervisor::new(settings, outlets).start();
        self.plane.borrow_mut().supervisors.insert(node, supervisor);
    }

    /// Stops the candidate without a message, as if it were killed.
    pub async fn kill_coordinator(&self, candidate: usize) {
        self.coordinators[candidate].send(Leave).await.unwrap();
    }

    /// Kills the rank process of a node; its supervisor receives the exit.
    pub async fn kill_worker_on(&self, node: u32) -> Worker {
        let (worker, supervisor) = {
            let mut plane = self.plane.borrow_mut();
            let worker = *plane.members.keys().find(|worker| worker.member.node == NodeId(node)).unwrap();
            plane.members.remove(&worker);
            (worker, plane.supervisors[&NodeId(node)].clone())
        };
        supervisor.send(WorkerExited(worker)).await.unwrap();
        worker
    }

    pub fn supervisor(&self, node: u32) -> Addr<Supervisor> {
        self.plane.borrow().supervisors[&NodeId(node)].clone()
    }

    /// Status of the leader, if there is one.
    pub async fn status(&self) -> Option<Status> {
        for coordinator in &self.coordinators {
            if let Ok(Ok(status)) = coordinator.send(GetStatus).await {
                return Some(status);
            }
        }
        None
    }

    /// Waits for a status, at most a minute of virtual time.
    pub async fn until(&self, what: &str, done: impl Fn(&Status) -> bool) -> Status {
        for _ in 0..6_000 {
            if let Some(status) = self.status().await.filter(&done) {
                return status;
            }
            tokio::time::sleep(STEP).await;
        }
        panic!("expected {what} within a minute: {:#?}", self.status().await);
    }

    pub async fn until_running(&self, mesh: Mesh, step: Step) -> Status {
        let runs = |status: &Status| {
            let here = (status.activity, status.mesh) == (Activity::Running, Some(mesh));
            here && status.step >= step && status.timelines.iter().any(|t| t.generation == status.generation)
        };
        self.until(&format!("{step} on {mesh}"), runs).await
    }

    pub fn incidents(&self) -> Vec<IncidentLine> {
        let incident = |event: &Event| if let What::Incident(line) = &event.what { Some(line.clone()) } else { None };
        self.plane.borrow().events.iter().filter_map(incident).collect()
    }

    pub fn happened(&self, what: &What) -> bool {
        self.plane.borrow().events.iter().any(|event| event.what == *what)
    }

    pub async fn until_happened(&self, what: What) {
        for _ in 0..6_000 {
            if self.happened(&what) {
                return;
            }
            tokio::time::sleep(STEP).await;
        }
        panic!("expected {what:?} within a minute: {:#?}", self.plane.borrow().events);
    }
}

impl Plane {
    /// Performs the commands of a node's members; returns their status reports.
    fn perform(&mut self, node: NodeId) -> Vec<MemberReport> {
        let mut status_reports = vec![];
        let mine: Vec<Worker> = self.members.keys().copied().filter(|worker| worker.member.node == node).collect();
        for worker in mine {
            while let Some(command) = self.members.get_mut(&worker).and_then(Member::poll_command) {
                let Some(member) = self.members.get_mut(&worker) else { break };
                match command {
                    Command::Join(generation) => drop(member.handle_joined(generation)),
                    Command::Fetch { generation, transfer, .. } => drop(member.handle_fetched(generation, transfer)),
                    Command::Compute { generation, step } => {
                        self.computing.insert((worker, generation, step));
                    }
                    Command::Vote(vote, requests) => self.vote(worker, vote, requests),
                    Command::Save(part) => member.handle_saved(part),
                    Command::Finish(generation) => drop(member.handle_finished(generation)),
                    Command::Exit => drop(self.members.remove(&worker)),
                    Command::Report => status_reports.push(member.report()),
                    Command::Abort(_)
                    | Command::CatchUp(_)
                    | Command::Apply(_)
                    | Command::Discard
                    | Command::Keep(_) => {}
                }
            }
        }
        status_reports
    }

    fn compute(&mut self, node: NodeId) {
        let (mine, others) =
            std::mem::take(&mut self.computing).into_iter().partition(|(worker, ..)| worker.member.node == node);
        self.computing = others;
        let mine: BTreeSet<(Worker, Generation, Step)> = mine;
        for (worker, generation, step) in mine {
            if let Some(member) = self.members.get_mut(&worker) {
                let entered = member.handle_entered(generation, step);
                let _ = entered.and_then(|()| member.handle_computed(generation, step));
            }
        }
    }

    fn vote(&mut self, worker: Worker, vote: Vote, requests: Requests) {
        let assignments = self.members[&worker]
            .assignment()
            .map(|(world_plan, _)| world_plan.assignments.clone())
            .unwrap_or_default();
        let (voted, all) = self.votes.entry((vote.generation, vote.step)).or_default();
        voted.insert(worker);
        *all = all.and(requests);
        let all = *all;
        if assignments.iter().all(|assignment| voted.contains(assignment)) {
            for assignment in assignments {
                if let Some(member) = self.members.get_mut(&assignment) {
                    let _ = member.handle_committed(vote.generation, vote.step, all);
                }
            }
        }
    }
}

/// The rank processes of a node.
struct Processes {
    node: NodeId,
    plane: Rc<RefCell<Plane>>,
}

impl Processes {
    fn supervisor(&self) -> Addr<Supervisor> {
        self.plane.borrow().supervisors[&self.node].clone()
    }

    fn gone(&self, worker: Worker) {
        if self.plane.borrow_mut().members.remove(&worker).is_some() {
            self.supervisor().try_send(WorkerExited(worker)).unwrap();
        }
    }
}

impl Actor for Processes {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Context<Self>) {
        ctx.run_interval(STEP, |processes, _| {
            let node = processes.node;
            let mine = |worker: &&Worker| worker.member.node == node;
            let before: Vec<Worker> = processes.plane.borrow().members.keys().filter(mine).copied().collect();
            processes.plane.borrow_mut().compute(node);
            let mut status_reports = processes.plane.borrow_mut().perform(node);
            let plane = processes.plane.borrow();
            status_reports
                .extend(plane.members.iter().filter(|(worker, _)| mine(worker)).map(|(_, member)| member.report()));
            let supervisor = plane.supervisors[&node].clone();
            for status_report in status_reports {
                let _ = supervisor.try_send(StatusReport(status_report));
            }
            for worker in before.into_iter().filter(|worker| !plane.members.contains_key(worker)) {
                supervisor.try_send(WorkerExited(worker)).unwrap();
            }
        });
    }
}

impl Handler<Spawn> for Processes {
    type Result = ();

    fn handle(&mut self, Spawn { worker, .. }: Spawn, ctx: &mut Context<Self>) {
        ctx.run_later(Duration::from_millis(50), move |processes, _| {
            let schedule = processes.plane.borrow().schedule;
            let member = Member::new(JOB, worker, None, schedule);
            let status_report = member.report();
            processes.plane.borrow_mut().members.insert(worker, member);
            processes.supervisor().try_send(WorkerStarted(status_report)).unwrap();
        });
    }
}

impl Handler<Kill> for Processes {
    type Result = ();

    fn handle(&mut self, Kill(worker): Kill, _: &mut Context<Self>) {
        self.gone(worker);
    }
}

impl Handler<Examine> for Processes {
    type Result = ();

    fn handle(&mut self, Examine(worker): Examine, _: &mut Context<Self>) {
        let waited = Duration::ZERO;
        self.supervisor().try_send(WorkerExamined { worker, waited }).unwrap();
    }
}

impl Handler<Tell> for Processes {
    type Result = ();

    fn handle(&mut self, Tell { worker, desired_state }: Tell, _: &mut Context<Self>) {
        if let Some(member) = self.plane.borrow_mut().members.get_mut(&worker) {
            let _ = member.handle_desired_state(&desired_state);
        }
    }
}

impl Handler<Shutdown> for Processes {
    type Result = ();

    fn handle(&mut self, _: Shutdown, _: &mut Context<Self>) {
        self.plane.borrow_mut().down.insert(self.node);
    }
}

/// Delivers all messages without delay.
struct Network {
    plane: Rc<RefCell<Plane>>,
    coordinators: Vec<Recipient<ReportArrived>>,
}

/// Adds a reachable coordinator.
struct Reach(Recipient<ReportArrived>);

impl actix::Message for Reach {
    type Result = ();
}

impl Actor for Network {
    type Context = Context<Self>;
}

impl Handler<Reach> for Network {
    type Result = ();

    fn handle(&mut self, Reach(coordinator): Reach, _: &mut Context<Self>) {
        self.coordinators.push(coordinator);
    }
}

impl Handler<SendDesiredState> for Network {
    type Result = ();

    fn handle(&mut self, SendDesiredState { node, desired_state }: SendDesiredState, _: &mut Context<Self>) {
        if let Some(supervisor) = self.plane.borrow().supervisors.get(&node) {
            let _ = supervisor.try_send(DesiredStateArrived(desired_state));
        }
    }
}

impl Handler<SendReport> for Network {
    type Result = ();

    fn handle(&mut self, SendReport(report): SendReport, _: &mut Context<Self>) {
        for coordinator in &self.coordinators {
            let _ = coordinator.try_send(ReportArrived(report.clone()));
        }
    }
}

struct Log(Rc<RefCell<Plane>>);

impl Actor for Log {
    type Context = Context<Self>;
}

impl Handler<Event> for Log {
    type Result = ();

    fn handle(&mut self, event: Event, _: &mut Context<Self>) {
        self.0.borrow_mut().events.push(event);
    }
}
