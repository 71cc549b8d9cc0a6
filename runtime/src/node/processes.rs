//! The rank processes of a machine and their shared memory; executes the commands of the supervisor.

use crate::devices;
use crate::error::JobError;
use crate::events::{Event, Report};
use crate::launch::cores::Cores;
use crate::launch::executable::Executable;
use crate::launch::failure::Ending;
use crate::launch::numa::NumaNode;
use crate::launch::slots::{SlotEvent, Slots};
use crate::node::processor_waits::ProcessorWaits;
use crate::rank::arena_contents::{ArenaContents, Lasting};
use crate::rank::failure_report::FailureReport;
use crate::rank::pairs::owner;
use crate::rank::rank_messages::{Begin, FromRank, ToRank};
use crate::rank::recycled_arenas::RecycledArenas;
use crate::rank::world_groups::{alone, placement, team_plan_of};
use crate::train::links::STAGING_BYTES;
use crate::train::plan::ModelPlan;
use crate::train::programs::Programs;
use crate::train::shadow::Shadow;
use crate::train::team::TeamPlan;
use phalanx_collective::shm::passing::send_world;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::world_id::WorldId;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Worker};
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Stage, WorldPlan};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An event of a rank process.
#[derive(Debug)]
pub(crate) enum NodeEvent {
    /// The process sent its first status report.
    Started(MemberReport),
    /// A heartbeat.
    StatusReport(MemberReport),
    /// The process exited; the flag tells whether it had sent a status report.
    Exited(Worker, Ending, bool),
    /// How long the process has waited for a processor since its last heartbeat or examination.
    Examined(Worker, Duration),
    /// An event of the rank in its world.
    Happened {
        /// Generation of the world.
        generation: u64,
        /// The rank.
        rank: u32,
        /// The event.
        event: Event,
    },
    /// The leader has finished the run.
    Done(Report),
    /// A permanent failure; a restart would fail again.
    Failed(Worker, FailureReport),
    /// The process wrote a line to its standard error.
    Line(Worker, String),
    /// The waker was triggered.
    Woken,
}

pub(crate) struct Node {
    id: NodeId,
    program: Executable,
    model: ModelPlan,
    evaluates: bool,
    /// The start message of every rank; the worker is filled in.
    begin: Begin,
    /// Ids of the node's devices.
    devices: Vec<String>,
    cores: Cores,
    slots: Slots,
    /// The worker in each slot.
    workers: BTreeMap<u32, Worker>,
    /// Workers that have sent a status report.
    started: BTreeMap<u32, Worker>,
    /// The waits of started workers for a processor.
    waits: BTreeMap<Worker, ProcessorWaits>,
    /// Whether any process has ever sent a status report: the input and this machine served it.
    has_served: bool,
    plans: BTreeMap<Mesh, TeamPlan>,
    needs: BTreeMap<(Mesh, usize), Needs>,
    /// The latest world that was passed to ranks, and its members on this node.
    world: Option<(Generation, ShmWorld, Vec<Worker>)>,
    recycled_arenas: BTreeMap<Worker, RecycledArenas>,
    /// The last rank of each slot, and the bytes that it needs.
    assignments: BTreeMap<u32, ((Mesh, usize), u64)>,
    events: VecDeque<NodeEvent>,
}

/// Where the kernel describes devices.
const SYSFS: &str = "/sys";

/// The memory needs of a rank of a mesh.
#[derive(Clone)]
struct Needs {
    /// Bytes of shared memory.
    own: u64,
    /// Bytes of shared memory for a shadow of this rank on another rank.
    shadow: u64,
    lasting: Arc<Lasting>,
}

/// Address space for a rank of this size and for programs of other meshes with the same shard: each halving of the number
/// of replicas may add another gradient sum. Unused address space takes no memory.
fn with_spare(bytes: u64) -> u64 {
    bytes.saturating_mul(4)
}

/// Maximum wait for the memory of an ended world; after that, new memory is allocated.
const WRITES_MAX: Duration = Duration::from_millis(20);

impl Node {
    pub(crate) fn new(
        id: NodeId,
        program: Executable,
        model: ModelPlan,
        evaluates: bool,
        begin: Begin,
        n_slots: u32,
        devices: Vec<String>,
    ) -> Result<Node, JobError> {
        // Not bound to cores: the job may share the machine.
        let cores = Cores::of_this_process(n_slots, false)?;
        Ok(Node {
            id,
            program,
            model,
            evaluates,
            begin,
            devices,
            cores,
            slots: Slots::new(n_slots),
            workers: BTreeMap::new(),
            started: BTreeMap::new(),
            waits: BTreeMap::new(),
            has_served: false,
            plans: BTreeMap::new(),
            needs: BTreeMap::new(),
            world: None,
            recycled_arenas: BTreeMap::new(),
            assignments: BTreeMap::new(),
            events: VecDeque::new(),
        })
    }

    /// Also reports [`NodeEvent::Woken`] whenever `waker` is readable.
    pub(crate) fn wake_on(&mut self, waker: OwnedFd) {
        self.slots.wake_on(waker);
    }

    /// Starts a rank process on this device, if the node has any: with the cores and the memory near it. If that fails, the
    /// process counts as exited before its first status report, after [`NodeEvent::Failed`] with the reason.
    pub(crate) fn spawn(&mut self, worker: Worker, device: Option<u32>) {
        let Err(error) = self.try_spawn(worker, device) else { return };
        tracing::error!(%worker, %error, "cannot start a rank");
        let is_input = error.is_input() && !self.has_served;
        self.events.push_back(NodeEvent::Failed(worker, FailureReport { is_input, ..FailureReport::from(&error) }));
        let is_half_started = self.workers.get(&worker.member.slot) == Some(&worker);
        let killed = if is_half_started { self.kill(worker) } else { Ok(()) };
        match killed {
            // Its exit is reported like any other.
            Ok(()) if is_half_started => {}
            Ok(()) => self.events.push_back(NodeEvent::Exited(worker, Ending::NotStarted, false)),
            Err(error) => tracing::error!(%worker, %error, "cannot end a rank that could not be started"),
        }
    }

    fn try_spawn(&mut self, worker: Worker, device: Option<u32>) -> Result<(), JobError> {
        let slot = worker.member.slot;
        let program = &self.program;
        let id = device.and_then(|i| self.devices.get(i as usize));
        let environment = id.map(|id| self.model.device.environment(id)).unwrap_or_default();
        let address = id.and_then(|id| self.model.device.pci_address(id));
        let near = address.and_then(|address| NumaNode::of_pci_device(Path::new(SYSFS), &address));
        if let (Some(id), Some(near)) = (id, &near) {
            tracing::info!(%worker, device = id, ?near, "the rank runs near its device");
        }
        self.slots.start(slot, self.cores.of(slot), |channel, fd_channel| {
            let mut command = program.command();
            // Node, slot and incarnation are shown in process listings.
            let name = format!("{}.{}.{}", worker.member.node.0, slot, worker.incarnation.0);
            let (channel, fd_channel) = (channel.to_string(), fd_channel.to_string());
            command.args(["rank", "--worker", &name, "--channel", &channel, "--fd-channel", &fd_channel]);
            command.stdout(Stdio::null()).envs(environment);
            if let Some(near) = near {
                near.bind(&mut command);
            }
            command
        })?;
        self.workers.insert(slot, worker);
        let (mesh, _) = self.begin.assignment;
        let (assignment, arena_bytes) = match self.assignments.get(&slot) {
            Some(last) => *last,
            None => {
                let assignment = (mesh, slot as usize % mesh.size());
                (assignment, self.needs_of(assignment.0, assignment.1)?.own)
            }
        };
        self.give_memory(worker, arena_bytes)?;
        let is_successor = self.has_served;
        let begin = Begin { worker, assignment, arena_bytes, is_successor, ..self.begin.clone() };
        self.slots.send(slot, &ToRank::Begin(Box::new(begin)))?;
        Ok(())
    }

    /// Gives a process memory for its first rank, so that the process can touch it before the world waits for it.
    fn give_memory(&mut self, worker: Worker, bytes: u64) -> Result<(), JobError> {
        let world = ShmWorld::create(&alone(self.begin.job, worker)?, &[with_spare(bytes)], STAGING_BYTES)?;
        let fd_channel = self.slots.fd_channel(worker.member.slot).expect("it has just been started");
        if let Err(error) = send_world(fd_channel, &world, None) {
            // If the process has exited, that is reported later.
            tracing::debug!(%worker, %error, "a rank did not accept its first memory");
        }
        self.recycled_arenas.insert(worker, RecycledArenas::new(world.arena_of(0).expect("it has one").clone()));
        Ok(())
    }

    /// Kills a rank process and waits for its exit.
    ///
    /// # Errors
    /// When the process does not exit.
    pub(crate) fn kill(&mut self, worker: Worker) -> Result<(), JobError> {
        if self.workers.get(&worker.member.slot) == Some(&worker) {
            self.slots.kill(worker.member.slot)?;
        }
        Ok(())
    }

    /// Finds out how long a rank has waited for a processor, after handling what the rank has sent.
    ///
    /// # Errors
    /// When the system refuses to poll.
    pub(crate) fn examine(&mut self, worker: Worker) -> Result<(), JobError> {
        for event in self.slots.take_pending()? {
            self.handle(event);
        }
        let waited = self.waits.get_mut(&worker).map(ProcessorWaits::since_last).unwrap_or_default();
        tracing::debug!(%worker, ?waited, "a rank sends no heartbeat; it has waited for a processor");
        self.events.push_back(NodeEvent::Examined(worker, waited));
        Ok(())
    }

    /// Passes the memory of a world to a rank, then the desired state.
    ///
    /// # Errors
    /// When the memory cannot be allocated.
    pub(crate) fn tell(&mut self, worker: Worker, desired_state: &DesiredState) -> Result<(), JobError> {
        if let Some(world_plan) = &desired_state.world_plan {
            self.make_world(world_plan)?;
        }
        if desired_state.id.stage == Stage::Run
            && let Some((.., members)) = self.world.as_ref().filter(|(of, ..)| *of == desired_state.id.generation)
            && members.contains(&worker)
        {
            self.recycled_arenas.entry(worker).and_modify(RecycledArenas::runs);
        }
        if self.workers.get(&worker.member.slot) == Some(&worker)
            && let Err(error) = self.slots.send(worker.member.slot, &ToRank::DesiredState(desired_state.clone()))
        {
            // A process that does not read is stuck; its missing heartbeats will be detected.
            tracing::warn!(%worker, %error, "a rank did not accept a desired state");
        }
        Ok(())
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// When the system refuses to wait.
    pub(crate) fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<NodeEvent>, JobError> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.slots.next_event(timeout)? {
                None => return Ok(None),
                Some(event) => self.handle(event),
            }
        }
    }

    fn handle(&mut self, event: SlotEvent) {
        match event {
            SlotEvent::Woken => self.events.push_back(NodeEvent::Woken),
            SlotEvent::Line { slot, text } => {
                let line = self.workers.get(&slot).map(|worker| NodeEvent::Line(*worker, text));
                self.events.extend(line);
            }
            SlotEvent::Exited { slot, ending } => {
                let has_begun = self.started.remove(&slot).is_some();
                let Some(worker) = self.workers.remove(&slot) else { return };
                self.recycled_arenas.remove(&worker);
                self.waits.remove(&worker);
                // Peers stop waiting for this member now, before their next desired state.
                if let Some((_, world, _)) = self.world.as_ref().filter(|(_, _, members)| members.contains(&worker)) {
                    world.control().abort(&format!("{worker} {ending}"));
                }
                self.events.push_back(NodeEvent::Exited(worker, ending, has_begun));
            }
            SlotEvent::Message { slot, bytes } => {
                let Some(worker) = self.workers.get(&slot).copied() else { return };
                match FromRank::decode(&bytes) {
                    Ok(FromRank::StatusReport(status_report)) if status_report.worker == worker => {
                        let pid = self.slots.pid(slot);
                        if let Some(pid) = pid {
                            self.waits.entry(worker).or_insert_with(|| ProcessorWaits::of(pid)).since_last();
                        }
                        let first = self.started.insert(slot, worker) != Some(worker);
                        self.has_served = true;
                        if first {
                            // From now on others wait for it: its end matters more than how it ended.
                            self.slots.forgo_ending(slot);
                        }
                        self.events.push_back(if first {
                            NodeEvent::Started(status_report)
                        } else {
                            NodeEvent::StatusReport(status_report)
                        });
                    }
                    Ok(FromRank::StatusReport(status_report)) => {
                        tracing::warn!(%worker, of = %status_report.worker, "rejected a status report of another worker")
                    }
                    Ok(FromRank::Event { generation, rank, event }) => {
                        self.events.push_back(NodeEvent::Happened { generation, rank, event });
                    }
                    Ok(FromRank::Done(report)) => self.events.push_back(NodeEvent::Done(report)),
                    Ok(FromRank::Failed(failure_report)) => {
                        self.events.push_back(NodeEvent::Failed(worker, failure_report))
                    }
                    Err(error) => tracing::warn!(%worker, %error, "cannot decode a message of a rank"),
                }
            }
        }
    }

    /// Makes the memory of a world and passes it to its members on this node, once per world.
    fn make_world(&mut self, world_plan: &WorldPlan) -> Result<(), JobError> {
        if self.world.as_ref().is_some_and(|(generation, ..)| *generation >= world_plan.generation) {
            return Ok(());
        }
        let mesh = world_plan.mesh;
        if !self.plans.contains_key(&mesh) {
            let plan = TeamPlan::new(&self.model, mesh, self.evaluates)?;
            self.plans.insert(mesh, plan);
        }
        let plan = team_plan_of(&self.plans[&mesh], world_plan);
        let id = WorldId { job: self.begin.job.0, generation: world_plan.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, world_plan)?;
        let here: Vec<Worker> = world_plan.members().filter(|worker| worker.member.node == self.id).collect();
        if here.is_empty() {
            return Ok(());
        }
        let no_writers = self.end_world(&here);
        let mut wanted = Vec::new();
        for worker in &here {
            let Some((assignment, bytes)) = self.assignment_of(world_plan, *worker)? else {
                wanted.push((0, None));
                continue;
            };
            let recycled_arenas = self.recycled_arenas.get(worker);
            let largest_spare = recycled_arenas
                .and_then(|recycled_arenas| recycled_arenas.for_rank(&assignment, STAGING_BYTES + bytes, no_writers));
            let has = recycled_arenas.map(RecycledArenas::bytes);
            tracing::debug!(%worker, needs = STAGING_BYTES + bytes, ?has, is_kept = largest_spare.is_some(), "memory of a rank");
            wanted.push(match largest_spare {
                Some(arena) => (bytes, Some(arena.clone())),
                None => (with_spare(bytes), None),
            });
        }
        let world = ShmWorld::succeed(&placement.machine_world(self.id.0)?, wanted, STAGING_BYTES)?;
        for (local, worker) in here.iter().enumerate() {
            if let Some((assignment, bytes)) = self.assignment_of(world_plan, *worker)? {
                let arena = world.arena_of(local as u32).expect("a world has an arena for each member here");
                self.assignments.insert(worker.member.slot, ((assignment.mesh, assignment.rank), bytes));
                let recycled_arenas =
                    self.recycled_arenas.entry(*worker).or_insert_with(|| RecycledArenas::new(arena.clone()));
                recycled_arenas.moved(assignment, arena.clone(), no_writers);
            }
            let fd_channel = self.slots.fd_channel(worker.member.slot);
            let is_there = self.workers.get(&worker.member.slot) == Some(worker);
            if let Some(fd_channel) = fd_channel.filter(|_| is_there)
                && let Err(error) = send_world(fd_channel, &world, None)
            {
                tracing::warn!(%worker, %error, "a rank did not accept shared memory");
            }
        }
        self.world = Some((world_plan.generation, world, here));
        Ok(())
    }

    /// Ends the last world. Returns whether no process outside `here` still writes its memory; such a process may be delayed
    /// in the middle of a sum. Members of the next world have left the last one when it begins (`member`, `MEMBER-7`).
    fn end_world(&self, here: &[Worker]) -> bool {
        let Some((generation, world, members)) = &self.world else { return true };
        world.control().abort(&format!("{generation} has ended"));
        let is_there = |worker: &Worker| self.workers.get(&worker.member.slot) == Some(worker);
        let others = (0..).zip(members).filter(|(_, worker)| !here.contains(worker) && is_there(worker));
        let until = Instant::now() + WRITES_MAX;
        let mut writing: Vec<(u32, &Worker)> = others.collect();
        loop {
            writing.retain(|(rank, _)| world.control().writes(*rank) != Ok(false));
            let Some((_, worker)) = writing.first() else { return true };
            if Instant::now() >= until {
                tracing::info!(%worker, %generation, "a worker still writes memory of an ended world; the memory is not reused");
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The rank that a member has or catches up for, and the bytes of its shared memory: for its own programs and for the
    /// shadows that it holds.
    fn assignment_of(
        &mut self,
        world_plan: &WorldPlan,
        worker: Worker,
    ) -> Result<Option<(ArenaContents, u64)>, JobError> {
        let Some((mesh, rank, shards)) = world_plan.assignment_of(worker) else { return Ok(None) };
        let Needs { own, lasting, .. } = self.needs_of(mesh, rank)?.clone();
        let mut bytes = own;
        for shard in &shards[1..] {
            bytes += self.needs_of(mesh, owner(&mesh, *shard))?.shadow;
        }
        Ok(Some((ArenaContents::new(mesh, rank, shards, lasting), bytes)))
    }

    fn needs_of(&mut self, mesh: Mesh, rank: usize) -> Result<&Needs, JobError> {
        if !self.needs.contains_key(&(mesh, rank)) {
            let programs = Programs::compile(&self.model, MeshRank { mesh, rank }, self.evaluates)?;
            let (own, shadow) = (programs.shared_bytes(), Shadow::bytes(&*devices::host(), &programs.train)?);
            let lasting = Arc::new(Lasting::of(&programs));
            self.needs.insert((mesh, rank), Needs { own: own as u64, shadow: shadow as u64, lasting });
        }
        Ok(&self.needs[&(mesh, rank)])
    }
}
