//! The rank processes of a machine and the memory that they share: what the commands of its supervisor do.

use super::device::{member_of, owner, placement};
use super::pairs::pairs;
use super::words::{Begin, FromRank, ToRank};
use crate::collective::shm::memory::SharedMemory;
use crate::collective::shm::passing::send_world;
use crate::collective::shm::world::ShmWorld;
use crate::collective::world::WorldId;
use crate::cpu::CpuMachine;
use crate::job::{Event, Report};
use crate::launch::cores::Cores;
use crate::launch::failure::Ending;
use crate::launch::slots::{SlotEvent, Slots};
use crate::train::JobError;
use crate::train::excuse::Excuse;
use crate::train::links::STAGING_BYTES;
use crate::train::plan::ModelPlan;
use crate::train::shadow::Shadow;
use crate::train::team::TeamPlan;
use crate::train::trainer::Programs;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Worker};
use phalanx_strategies::elastic::message::{Formation, MemberReport, Order};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::{Mesh, Place};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

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
    /// Bytes of shared memory of a rank, and of a shadow of it.
    sizes: BTreeMap<(Mesh, usize), [u64; 2]>,
    /// The latest world of which ranks were told, and its members here.
    world: Option<(Generation, ShmWorld, Vec<Worker>)>,
    /// The memory that a worker has from its last world, and what it is for.
    arenas: BTreeMap<Worker, (Seat, Arc<SharedMemory>)>,
    events: VecDeque<NodeEvent>,
}

/// What the memory of a worker is for: it keeps it as long as this is the same.
type Seat = (Mesh, usize, Vec<Shard>);

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
            sizes: BTreeMap::new(),
            world: None,
            arenas: BTreeMap::new(),
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
        self.slots.send(slot, &ToRank::Begin(Box::new(Begin { worker, ..self.begin.clone() })))?;
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
                self.arenas.remove(&worker);
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
        let plan = self.plans[&mesh].with_pairs(formation.guests.len() as u32, pairs(formation));
        let id = WorldId { job: self.begin.job.0, generation: formation.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, formation)?;
        let members: Vec<Worker> = formation.seats.iter().chain(&formation.guests).copied().collect();
        let here: Vec<Worker> = members.into_iter().filter(|worker| worker.member.node == self.id).collect();
        if here.is_empty() {
            return Ok(());
        }
        let mut wanted = Vec::new();
        for worker in &here {
            let Some(rank) = formation.rank_of(*worker) else {
                wanted.push((0, None));
                continue;
            };
            let seat: Seat = (mesh, rank, formation.holds[rank].clone());
            let kept = self.arenas.get(worker).filter(|(before, _)| *before == seat).map(|(_, arena)| arena.clone());
            wanted.push((self.size(formation, rank)?, kept));
        }
        let world = ShmWorld::succeed(&placement.machine_world(self.id.0)?, wanted, STAGING_BYTES)?;
        for (local, worker) in here.iter().enumerate() {
            if let Some(rank) = member_of(formation, *worker).filter(|m| (*m as usize) < formation.seats.len()) {
                let seat: Seat = (mesh, rank as usize, formation.holds[rank as usize].clone());
                let arena = world.arena_of(local as u32).expect("a world has an arena for each member here");
                self.arenas.insert(*worker, (seat, arena.clone()));
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

    /// Bytes that a rank shares with its peers: of its own programs and of the shadows that it holds.
    fn size(&mut self, formation: &Formation, rank: usize) -> Result<u64, JobError> {
        let mesh = formation.mesh;
        let mut bytes = self.sizes_of(mesh, rank)?[0];
        for shard in &formation.holds[rank][1..] {
            bytes += self.sizes_of(mesh, owner(formation, *shard))?[1];
        }
        Ok(bytes)
    }

    /// Bytes of a rank's programs, and of a shadow of it.
    fn sizes_of(&mut self, mesh: Mesh, rank: usize) -> Result<[u64; 2], JobError> {
        if let Some(bytes) = self.sizes.get(&(mesh, rank)) {
            return Ok(*bytes);
        }
        let programs = Programs::compile(&self.model, Place { mesh, rank }, self.evaluates)?;
        let bytes = [CpuMachine::shared_bytes(&programs.all()) as u64, Shadow::bytes(&programs.train)? as u64];
        self.sizes.insert((mesh, rank), bytes);
        Ok(bytes)
    }
}
