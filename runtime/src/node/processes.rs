//! The rank processes of a machine and the memory that they share: what the commands of its supervisor do.

use crate::error::JobError;
use crate::events::{Event, Report};
use crate::launch::cores::Cores;
use crate::launch::failure::Ending;
use crate::launch::slots::{SlotEvent, Slots};
use crate::rank::excuse::Excuse;
use crate::rank::lent::Lent;
use crate::rank::seat_memory::{Lasting, SeatMemory};
use crate::rank::words::{Begin, FromRank, ToRank};
use crate::rank::world_plan::{alone, owner, placement, world_plan};
use crate::train::links::STAGING_BYTES;
use crate::train::plan::ModelPlan;
use crate::train::programs::Programs;
use crate::train::shadow::Shadow;
use crate::train::team::TeamPlan;
use phalanx_collective::shm::passing::send_world;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::world::WorldId;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Worker};
use phalanx_strategies::elastic::message::{Formation, MemberReport, Order, Stage};
use phalanx_strategies::mesh::{Mesh, Place};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What happened to a rank process.
#[derive(Debug)]
pub(crate) enum NodeEvent {
    /// It is up; its first word.
    Started(MemberReport),
    /// A sign of life.
    Word(MemberReport),
    /// It is gone; whether it had ever said a word.
    Exited(Worker, Ending, bool),
    /// Something happened in its world.
    Happened {
        /// The world.
        generation: u64,
        /// Its place there.
        rank: u32,
        /// What.
        event: Event,
    },
    /// The leader has finished the run.
    Done(Report),
    /// It cannot go on, and no successor could.
    Failed(Worker, Excuse),
    /// It wrote a line to its standard error.
    Line(Worker, String),
    /// Somebody wants the attention of whoever waits.
    Woken,
}

/// See the [module](self).
pub(crate) struct Node {
    id: NodeId,
    program: PathBuf,
    model: ModelPlan,
    evaluates: bool,
    /// What every rank is told when it begins; the worker is filled in.
    begin: Begin,
    cores: Cores,
    slots: Slots,
    /// Who is in which place.
    workers: BTreeMap<u32, Worker>,
    /// Those of whom a word was heard.
    started: BTreeMap<u32, Worker>,
    plans: BTreeMap<Mesh, TeamPlan>,
    needs: BTreeMap<(Mesh, usize), Needs>,
    /// The latest world of which ranks were told, and its members here.
    world: Option<(Generation, ShmWorld, Vec<Worker>)>,
    lent: BTreeMap<Worker, Lent>,
    /// The seat that was last taken from each place, and the bytes that it needs.
    seats: BTreeMap<u32, ((Mesh, usize), u64)>,
    events: VecDeque<NodeEvent>,
}

/// What a rank of a mesh needs.
#[derive(Clone)]
struct Needs {
    /// Bytes of shared memory.
    own: u64,
    /// Bytes of it for a shadow of the rank, elsewhere.
    shadow: u64,
    lasting: Arc<Lasting>,
}

/// Address space for a seat that needs so many bytes, and for programs of other meshes over the same shard: each halving of
/// the replicas may add another sum of gradients. What is not used costs no memory.
fn with_spare(bytes: u64) -> u64 {
    bytes.saturating_mul(4)
}

/// How long the memory of a world that is over is worth waiting for, rather than taking other memory.
const WRITES_MAX: Duration = Duration::from_millis(20);

impl Node {
    pub(crate) fn new(
        id: NodeId,
        program: PathBuf,
        model: ModelPlan,
        evaluates: bool,
        begin: Begin,
        n_slots: u32,
    ) -> Result<Node, JobError> {
        // Not bound to cores: nobody says that this job has the machine to itself.
        let cores = Cores::of_this_process(n_slots, false)?;
        Ok(Node {
            id,
            program,
            model,
            evaluates,
            begin,
            cores,
            slots: Slots::new(n_slots),
            workers: BTreeMap::new(),
            started: BTreeMap::new(),
            plans: BTreeMap::new(),
            needs: BTreeMap::new(),
            world: None,
            lent: BTreeMap::new(),
            seats: BTreeMap::new(),
            events: VecDeque::new(),
        })
    }

    /// Also reports [`NodeEvent::Woken`] whenever `waker` is readable.
    pub(crate) fn wake_on(&mut self, waker: OwnedFd) {
        self.slots.wake_on(waker);
    }

    /// Starts a rank process.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn spawn(&mut self, worker: Worker) -> Result<(), JobError> {
        let slot = worker.member.slot;
        let program = &self.program;
        self.slots.start(slot, self.cores.of(slot), |channel, passage| {
            let mut command = Command::new(program);
            // Node, place and incarnation are for whoever looks at the list of processes.
            let name = format!("{}.{}.{}", worker.member.node.0, slot, worker.incarnation.0);
            let (channel, passage) = (channel.to_string(), passage.to_string());
            command.args(["rank", "--worker", &name, "--channel", &channel, "--passage", &passage]);
            command.stdout(Stdio::null());
            command
        })?;
        self.workers.insert(slot, worker);
        let (mesh, _) = self.begin.seat;
        let (seat, seat_bytes) = match self.seats.get(&slot) {
            Some(last) => *last,
            None => {
                let seat = (mesh, slot as usize % mesh.size());
                (seat, self.needs_of(seat.0, seat.1)?.own)
            }
        };
        self.lend(worker, seat_bytes)?;
        self.slots.send(slot, &ToRank::Begin(Box::new(Begin { worker, seat, seat_bytes, ..self.begin.clone() })))?;
        Ok(())
    }

    /// Gives a process memory for its first seat, so that it can take that from the system while nobody waits for it.
    fn lend(&mut self, worker: Worker, bytes: u64) -> Result<(), JobError> {
        let world = ShmWorld::create(&alone(self.begin.job, worker)?, &[with_spare(bytes)], STAGING_BYTES)?;
        let passage = self.slots.passage(worker.member.slot).expect("it has just been started");
        if let Err(error) = send_world(passage, &world, None) {
            // One that is gone already is told of in due course.
            tracing::debug!(%worker, %error, "memory was not taken");
        }
        self.lent.insert(worker, Lent::new(world.arena_of(0).expect("it has one").clone()));
        Ok(())
    }

    /// Kills a rank process; returns when it is gone.
    ///
    /// # Errors
    /// When it does not end.
    pub(crate) fn kill(&mut self, worker: Worker) -> Result<(), JobError> {
        if self.workers.get(&worker.member.slot) == Some(&worker) {
            self.slots.kill(worker.member.slot)?;
        }
        Ok(())
    }

    /// Passes an order on, and the memory of its world before it.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub(crate) fn tell(&mut self, worker: Worker, order: &Order) -> Result<(), JobError> {
        if let Some(formation) = &order.formation {
            self.make_world(formation)?;
        }
        if order.id.stage == Stage::Run
            && let Some((.., members)) = self.world.as_ref().filter(|(of, ..)| *of == order.id.generation)
            && members.contains(&worker)
        {
            self.lent.entry(worker).and_modify(Lent::runs);
        }
        if self.workers.get(&worker.member.slot) == Some(&worker)
            && let Err(error) = self.slots.send(worker.member.slot, &ToRank::Order(order.clone()))
        {
            // One that does not read is stopped; that will be noticed by its silence.
            tracing::warn!(%worker, %error, "an order was not taken");
        }
        Ok(())
    }

    /// Waits for what happens next.
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
                Some(event) => self.hear(event),
            }
        }
    }

    fn hear(&mut self, event: SlotEvent) {
        match event {
            SlotEvent::Woken => self.events.push_back(NodeEvent::Woken),
            SlotEvent::Line { slot, text } => {
                let line = self.workers.get(&slot).map(|worker| NodeEvent::Line(*worker, text));
                self.events.extend(line);
            }
            SlotEvent::Exited { slot, ending } => {
                let has_begun = self.started.remove(&slot).is_some();
                let Some(worker) = self.workers.remove(&slot) else { return };
                self.lent.remove(&worker);
                // Its peers need not wait for the next order to stop waiting for it.
                if let Some((_, world, _)) = self.world.as_ref().filter(|(_, _, members)| members.contains(&worker)) {
                    world.control().abort(&format!("{worker} {ending}"));
                }
                self.events.push_back(NodeEvent::Exited(worker, ending, has_begun));
            }
            SlotEvent::Message { slot, bytes } => {
                let Some(worker) = self.workers.get(&slot).copied() else { return };
                match serde_json::from_slice(&bytes) {
                    Ok(FromRank::Word(word)) if word.worker == worker => {
                        let first = self.started.insert(slot, worker) != Some(worker);
                        self.events.push_back(if first { NodeEvent::Started(word) } else { NodeEvent::Word(word) });
                    }
                    Ok(FromRank::Word(word)) => {
                        tracing::warn!(%worker, of = %word.worker, "a word of another was refused")
                    }
                    Ok(FromRank::Event { generation, rank, event }) => {
                        self.events.push_back(NodeEvent::Happened { generation, rank, event });
                    }
                    Ok(FromRank::Done(report)) => self.events.push_back(NodeEvent::Done(report)),
                    Ok(FromRank::Failed(excuse)) => self.events.push_back(NodeEvent::Failed(worker, excuse)),
                    Err(error) => tracing::warn!(%worker, %error, "a rank said what its node does not understand"),
                }
            }
        }
    }

    /// Makes the memory of a world for its members here, and hands it to them; once.
    fn make_world(&mut self, formation: &Formation) -> Result<(), JobError> {
        if self.world.as_ref().is_some_and(|(generation, ..)| *generation >= formation.generation) {
            return Ok(());
        }
        let mesh = formation.mesh;
        if !self.plans.contains_key(&mesh) {
            let plan = TeamPlan::new(&self.model, mesh, self.evaluates)?;
            self.plans.insert(mesh, plan);
        }
        let plan = world_plan(&self.plans[&mesh], formation);
        let id = WorldId { job: self.begin.job.0, generation: formation.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, formation)?;
        let here: Vec<Worker> = formation.members().filter(|worker| worker.member.node == self.id).collect();
        if here.is_empty() {
            return Ok(());
        }
        let nobody_writes = self.end_world(&here);
        let mut wanted = Vec::new();
        for worker in &here {
            let Some((seat, bytes)) = self.seat_of(formation, *worker)? else {
                wanted.push((0, None));
                continue;
            };
            let lent = self.lent.get(worker);
            let kept = lent.and_then(|lent| lent.for_seat(&seat, STAGING_BYTES + bytes, nobody_writes));
            let has = lent.map(Lent::bytes);
            tracing::debug!(%worker, needs = STAGING_BYTES + bytes, ?has, is_kept = kept.is_some(), "memory of a seat");
            wanted.push(match kept {
                Some(arena) => (bytes, Some(arena.clone())),
                None => (with_spare(bytes), None),
            });
        }
        let world = ShmWorld::succeed(&placement.machine_world(self.id.0)?, wanted, STAGING_BYTES)?;
        for (local, worker) in here.iter().enumerate() {
            if let Some((seat, bytes)) = self.seat_of(formation, *worker)? {
                let arena = world.arena_of(local as u32).expect("a world has an arena for each member here");
                self.seats.insert(worker.member.slot, ((seat.mesh, seat.rank), bytes));
                let lent = self.lent.entry(*worker).or_insert_with(|| Lent::new(arena.clone()));
                lent.moved(seat, arena.clone(), nobody_writes);
            }
            let passage = self.slots.passage(worker.member.slot);
            let is_there = self.workers.get(&worker.member.slot) == Some(worker);
            if let Some(passage) = passage.filter(|_| is_there)
                && let Err(error) = send_world(passage, &world, None)
            {
                tracing::warn!(%worker, %error, "shared memory was not taken");
            }
        }
        self.world = Some((formation.generation, world, here));
        Ok(())
    }

    /// Whether no process here that is not one of `here` writes memory of the last world. It may have been put off in the
    /// middle of a sum; who is a member of the next world has left the last one when that begins (`member`, `B-7`).
    fn end_world(&self, here: &[Worker]) -> bool {
        let Some((generation, world, members)) = &self.world else { return true };
        world.control().abort(&format!("{generation} is over"));
        let is_there = |worker: &Worker| self.workers.get(&worker.member.slot) == Some(worker);
        let others = (0..).zip(members).filter(|(_, worker)| !here.contains(worker) && is_there(worker));
        let until = Instant::now() + WRITES_MAX;
        let mut writing: Vec<(u32, &Worker)> = others.collect();
        loop {
            writing.retain(|(rank, _)| world.control().writes(*rank) != Ok(false));
            let Some((_, worker)) = writing.first() else { return true };
            if Instant::now() >= until {
                tracing::info!(%worker, %generation, "still writes memory of a world that is over; it is not used again");
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The seat that a member has or learns for, and the bytes that it shares with its peers there: of its own programs and
    /// of the shadows that it holds.
    fn seat_of(&mut self, formation: &Formation, worker: Worker) -> Result<Option<(SeatMemory, u64)>, JobError> {
        let Some((mesh, rank, shards)) = formation.seat_of(worker) else { return Ok(None) };
        let Needs { own, lasting, .. } = self.needs_of(mesh, rank)?.clone();
        let mut bytes = own;
        for shard in &shards[1..] {
            bytes += self.needs_of(mesh, owner(&mesh, *shard))?.shadow;
        }
        Ok(Some((SeatMemory::new(mesh, rank, shards, lasting), bytes)))
    }

    fn needs_of(&mut self, mesh: Mesh, rank: usize) -> Result<&Needs, JobError> {
        if !self.needs.contains_key(&(mesh, rank)) {
            let programs = Programs::compile(&self.model, Place { mesh, rank }, self.evaluates)?;
            let (own, shadow) = (programs.shared_bytes(), Shadow::bytes(&*self.model.device, &programs.train)?);
            let lasting = Arc::new(Lasting::of(&programs));
            self.needs.insert((mesh, rank), Needs { own: own as u64, shadow: shadow as u64, lasting });
        }
        Ok(&self.needs[&(mesh, rank)])
    }
}
