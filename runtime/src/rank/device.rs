//! The device thread of a rank process: joins worlds, gets and gives state, trains, and keeps what it has until the next
//! world runs, since until then another failure may need it.

use crate::config::JobConfig;
use crate::control::Control;
use crate::data::prepare::Prepared;
use crate::error::JobError;
use crate::events::{Event, Report};
use crate::rank::beside::lessons;
use crate::rank::cell::{Cell, Task};
use crate::rank::excuse::Excuse;
use crate::rank::heal::{Healing, Holding, Places, Wanting};
use crate::rank::lent::{Spare, kept};
use crate::rank::mesh_groups::communicators;
use crate::rank::pairs::{followers, heirs};
use crate::rank::seat_memory::{Lasting, SeatMemory};
use crate::rank::warm::Warm;
use crate::rank::words::FromRank;
use crate::rank::world_plan::{owner, placement, world_plan};
use crate::train::links::Links;
use crate::train::plan::{ModelPlan, RunPlan};
use crate::train::programs::Programs;
use crate::train::saving::Saving;
use crate::train::shadow::Shadow;
use crate::train::step_trace::StepTrace;
use crate::train::team::{Joined, Site, Team, TeamPlan};
use crate::train::telling::Telling;
use crate::train::trainer::learning::Teaching;
use crate::train::trainer::{Pause, TrainData, Trainer};
use crate::train::weights;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_collective::shm::passing::receive_world;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_device::pulse::Pulse;
use phalanx_device::shared_memory::{Arena, SharedMemory};
use phalanx_device::world::WorldId;
use phalanx_device::{CollectiveError, Machine};
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::identity::{Generation, JobId, Step, Worker};
use phalanx_strategies::elastic::message::Formation;
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::elastic::recovery::{Source, Transfer, shared};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::snapshot::Checkpoint;
use phalanx_strategies::mesh::{Mesh, Place};
use phalanx_strategies::sampler::Sampler;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// What a rank process has for its whole life.
pub(crate) struct Device<'a> {
    pub(crate) cell: Arc<Cell>,
    pub(crate) control: Arc<Control>,
    pub(crate) pulse: Pulse,
    pub(crate) job: JobId,
    pub(crate) worker: Worker,
    pub(crate) config: &'a JobConfig,
    pub(crate) model: &'a ModelPlan,
    pub(crate) run: RunPlan,
    pub(crate) sampler: Sampler,
    pub(crate) data: &'a Prepared,
    pub(crate) evaluates: bool,
    pub(crate) extras: Vec<(String, Vec<u8>)>,
    pub(crate) n_threads: usize,
    pub(crate) passage: UnixStream,
    pub(crate) listener: TcpListener,
    pub(crate) tcp: TcpConfig,
    pub(crate) peak_flops: f64,
    pub(crate) start_from: Option<(u64, PathBuf)>,
    /// Groups of the meshes that were joined.
    pub(crate) plans: BTreeMap<Mesh, TeamPlan>,
    /// The memory of all members of the last world on this machine.
    pub(crate) memories: Vec<Arc<SharedMemory>>,
    /// Mapped still, since it may be that of the next seat.
    pub(crate) spare: Option<Spare>,
    /// Memory for the first seat.
    pub(crate) warm: Option<Warm>,
    /// The latest is the one that trains, or trained last.
    pub(crate) seats: Vec<Seat<'a>>,
}

/// A place in a world, with the state of its shards.
pub(crate) struct Seat<'a> {
    memory: SeatMemory,
    /// The shards whose state is in its memory, all of the same version.
    pub(crate) has: BTreeSet<Shard>,
    pub(crate) generation: Generation,
    /// How many of the checkpoints that were asked for are complete.
    n_saves: u64,
    /// Whether what is never updated is in its memory.
    is_filled: bool,
    /// Whether its state came from a checkpoint, or from nowhere: the run begins, or begins again.
    from_disk: bool,
    pub(crate) trainer: Trainer<'a>,
}

impl Seat<'_> {
    /// Where it has the state that it has.
    pub(crate) fn holdings(&self) -> impl Iterator<Item = (Shard, Holding<'_>)> {
        let (compiled, machine) = self.trainer.memory();
        let own = self.memory.shards.first().map(|shard| (*shard, Holding { compiled, machine }));
        let shadows = self.trainer.shadows().iter();
        let all =
            own.into_iter().chain(shadows.map(|s| (s.shard, Holding { compiled: &s.compiled, machine: &*s.machine })));
        all.filter(|(shard, _)| self.has.contains(shard))
    }

    /// All that belongs to it is in its memory.
    pub(crate) fn completed(&mut self) {
        self.has = self.memory.shards.iter().copied().collect();
    }

    /// The same, where it may be filled.
    pub(crate) fn rooms(&mut self) -> impl Iterator<Item = (Shard, Wanting<'_>)> {
        let ((compiled, machine), shadows) = self.trainer.memories_mut();
        let own = self.memory.shards.first().map(|shard| (*shard, Wanting { compiled, machine }));
        let shadows = shadows.iter_mut();
        own.into_iter().chain(shadows.map(|s| (s.shard, Wanting { compiled: &s.compiled, machine: &mut *s.machine })))
    }
}

impl<'a> Device<'a> {
    /// Does what it is told until the job is over.
    pub(crate) fn run(&mut self) {
        loop {
            let task = self.cell.next_task();
            tracing::debug!(worker = %self.worker, task = task.name(), "device");
            let generation = task.generation();
            let pulse = self.pulse.clone();
            let _computes = pulse.during(At::Computes);
            let outcome = match task {
                Task::Settle(version) => self.settle(version.is_some()),
                Task::Keep(shards) => {
                    self.keep(&shards);
                    Ok(())
                }
                Task::Join(formation) => self.join(&formation),
                Task::Learn(generation) => self.learn(generation),
                Task::Train(generation) => self.train(generation),
                Task::Exit => return,
            };
            match outcome {
                Ok(()) => {}
                Err(error) if error.is_of_the_world() => {
                    tracing::info!(worker = %self.worker, %error, "out of a world");
                    if let Some(generation) = generation {
                        self.cell.broken(generation, error.unreachable(), &error.to_string());
                    }
                }
                Err(error) => {
                    let excuse = Excuse::from(&error);
                    self.cell.failed(&excuse.text);
                    self.cell.tell(&FromRank::Failed(excuse));
                }
            }
        }
    }

    fn settle(&mut self, counts: bool) -> Result<(), JobError> {
        let Some(seat) = self.seats.last_mut() else { return Ok(()) };
        if counts {
            seat.trainer.settle()
        } else {
            seat.trainer.give_up();
            Ok(())
        }
    }

    fn keep(&mut self, shards: &[Shard]) {
        if shards.is_empty() {
            self.seats.clear();
        }
    }

    fn join(&mut self, formation: &Formation) -> Result<(), JobError> {
        let member = formation.member_of(self.worker).expect("one is told to join a world of which one is a member");
        let plan = world_plan(self.team_plan(formation.mesh)?, formation);
        let id = WorldId { job: self.job.0, generation: formation.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, formation)?;
        let shm = self.receive(&placement)?;
        let machine = self.worker.member.node.0;
        self.cell.entered(formation.generation, communicators(&plan, &placement, shm.control(), machine, member));
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let addresses: Vec<SocketAddr> = formation.addresses.iter().map(|a| a.unwrap_or(nowhere)).collect();
        let site = Site { listener: &self.listener, addresses: &addresses, config: &self.tcp };
        let joined = plan.join_at(&placement, &shm, member, &site)?;
        match (formation.rank_of(self.worker), formation.learner(self.worker)) {
            (Some(rank), _) => self.sit_down(formation, rank, joined),
            (None, Some(learner)) => self.sit_beside(formation, learner, joined),
            (None, None) => self.help(formation, joined),
        }
    }

    /// A guest gives what others ask for.
    fn help(&mut self, formation: &Formation, joined: Joined) -> Result<(), JobError> {
        let mut links = joined.links.with_pulse(self.pulse.clone());
        let mut healing = Healing::default();
        self.lend(&mut healing);
        for (to, transfers) in (0..).zip(&formation.transfers) {
            let asked = self.answer(&healing, &mut links, to, transfers)?;
            asked.into_iter().for_each(|places| healing.gives(to, places));
        }
        healing.carry_out(&mut links).map(|_| ())
    }

    /// Takes its seat, with state from where the formation says.
    fn sit_down(&mut self, formation: &Formation, rank: usize, joined: Joined) -> Result<(), JobError> {
        let Joined { team, links, .. } = joined;
        let mut links = links.with_pulse(self.pulse.clone());
        let pulse = self.pulse.of_world(formation.generation.0);
        let team = team.expect("a rank has a team").with_pulse(pulse);
        let shards = &formation.holds[rank];
        let begin = Instant::now();
        let mut seat = self.seat(formation, shards, team)?;
        seat.from_disk = formation.base.lineage == formation.generation;
        // What comes anew is not there before all of it has come.
        for transfer in &formation.transfers[rank] {
            seat.has.remove(&transfer.shard);
        }
        let (seated, in_place) = (begin.elapsed(), seat.has.len());
        let healed = self.heal(formation, rank, &mut seat, &mut links);
        tracing::debug!(worker = %self.worker, in_place, ?seated, healed = ?begin.elapsed(), "took a seat");
        let asked = match healed {
            Ok(asked) => asked,
            Err(error) => {
                // What was there before may be needed by others until the world runs.
                self.seats.extend((in_place > 0).then_some(seat));
                return Err(error);
            }
        };
        seat.completed();
        let lessons = lessons(&seat, &mut links, asked);
        let teaching = Teaching { lessons, followers: followers(formation, rank) };
        seat.trainer.link(links, heirs(formation, rank), teaching);
        self.seats.push(seat);
        self.cell.healed(formation, rank);
        Ok(())
    }

    /// A seat with these shards.
    pub(crate) fn seat(&mut self, formation: &Formation, shards: &[Shard], team: Team) -> Result<Seat<'a>, JobError> {
        let Place { mesh, rank } = team.place;
        let is_same = |seat: &Seat<'_>| seat.memory.is_of(mesh, rank, shards) && seat.trainer.is_in(team.memory());
        let mut seat = match self.seats.iter().position(is_same) {
            Some(at) => {
                let mut seat = self.seats.remove(at);
                seat.trainer.rejoin(team);
                seat
            }
            None => self.new_seat(formation, shards, team)?,
        };
        (seat.generation, seat.n_saves) = (formation.generation, formation.n_saves);
        Ok(seat)
    }

    /// A seat that it did not have. Its memory may be that of a seat that it had, with what is in it.
    fn new_seat(&mut self, formation: &Formation, shards: &[Shard], team: Team) -> Result<Seat<'a>, JobError> {
        let Place { mesh, rank } = team.place;
        let programs = Arc::new(Programs::compile(self.model, Place { mesh, rank }, self.evaluates)?);
        let memory = SeatMemory::new(mesh, rank, shards, Arc::new(Lasting::of(&programs)));
        let becomes_it = |seat: &Seat<'_>| seat.memory.may_become(&memory) && seat.trainer.is_in(team.memory());
        let before = self.seats.iter().position(becomes_it);
        let arena = team.memory().expect("ranks of elastic worlds share memory").clone();
        let shadows = self.shadows(mesh, &shards[1..], &arena, &programs)?;
        let (run, sampler, dir) = (self.run, self.sampler, &self.config.output.output_dir);
        let trainer = Trainer::new(self.model, run, programs, sampler, vec![], team, dir, self.peak_flops)?;
        let mut trainer = trainer.with_member(self.cell.clone(), shadows);
        if let Some(last) = self.seats.last() {
            trainer.tell_of(&last.trainer);
        }
        let (mut has, mut is_filled) = (BTreeSet::new(), false);
        let before = before.map(|at| self.seats.remove(at));
        let warm = self.warm.take().filter(|warm| before.is_none() && warm.is_for(&memory, &arena));
        match (before, warm) {
            (Some(before), _) => {
                (has, is_filled) = (before.has, before.is_filled);
                trainer.follow(before.trainer, dir)?;
            }
            (None, Some(warm)) => {
                is_filled = warm.is_filled;
                trainer.take_over(warm.machine, dir)?;
            }
            (None, None) => {
                // It may be that of a seat in an earlier world (`L-1`).
                self.seats.retain(|seat| !seat.trainer.is_in(Some(&arena)));
                #[allow(unsafe_code)] // Others may have mapped the memory.
                // SAFETY: the machines that lay in it were dropped in the line above, the new one holds no references, and
                // this device starts no operation before it has its seat.
                unsafe { arena.clear() }?;
            }
        }
        let (generation, n_saves) = (formation.generation, formation.n_saves);
        Ok(Seat { memory, has, generation, n_saves, is_filled, from_disk: false, trainer })
    }

    /// Shadows of these shards, behind the memory of the rank's own programs.
    fn shadows(&self, mesh: Mesh, shards: &[Shard], memory: &Arena, own: &Programs) -> Result<Vec<Shadow>, JobError> {
        let device = &*self.model.device;
        let mut first = own.shared_bytes();
        let mut shadows = Vec::new();
        for shard in shards {
            let of = owner(&mesh, *shard);
            let step = Programs::compile(self.model, Place { mesh, rank: of }, false)?.train;
            let shadow = Shadow::new(device, *shard, of as u32, &step, memory, first)?;
            first += device.shadow_bytes(&[&shadow.compiled]);
            shadows.push(shadow);
        }
        Ok(shadows)
    }

    fn heal(
        &self,
        formation: &Formation,
        rank: usize,
        seat: &mut Seat<'a>,
        links: &mut Links,
    ) -> Result<Vec<(u32, Places)>, JobError> {
        self.fill_frozen(seat)?;
        let own = &formation.transfers[rank];
        if let Some(Source::Disk(checkpoint)) = own.first().map(|transfer| transfer.source) {
            // all of it, and nobody has anything for anybody.
            return self.restore(seat, checkpoint).map(|()| Vec::new());
        }
        let me = formation.member_of(self.worker).expect("who has a seat is a member");
        let (state, has) = (seat.trainer.state, seat.has.clone());
        let mut healing = Healing::default();
        for (shard, room) in seat.rooms() {
            if has.contains(&shard) {
                healing.holds(shard, Holding { compiled: room.compiled, machine: room.machine }, state);
            } else {
                healing.lacks(shard, room);
            }
        }
        self.lend(&mut healing);
        for (to, transfers) in (0..).zip(&formation.transfers) {
            if to as usize != rank {
                let asked = self.answer(&healing, links, to, transfers)?;
                asked.into_iter().for_each(|places| healing.gives(to, places));
                continue;
            }
            for group in shared(transfers) {
                let (members, held) = senders(formation, group);
                let shard = group[0].shard;
                if members == [me] { healing.find(held[0], shard) } else { healing.ask(links, &members, shard)? }
            }
        }
        let is_elsewhere = |shard: &&Shard| !has.contains(shard) && own.iter().all(|t| t.shard != **shard);
        formation.holds[rank].iter().filter(is_elsewhere).for_each(|shard| healing.find(*shard, *shard));
        let mut lessons = Vec::new();
        for (to, learner) in (formation.seats.len() as u32..).zip(&formation.learners) {
            for held in self.sends(&learner.transfers) {
                lessons.push((to, healing.promise(links, to, held)?));
            }
        }
        let came = healing.carry_out(links)?;
        seat.trainer.state = came.unwrap_or(state);
        Ok(lessons)
    }

    /// Agrees with a member on what it takes from this one.
    fn answer(
        &self,
        healing: &Healing<'_>,
        links: &mut Links,
        to: u32,
        transfers: &[Transfer],
    ) -> Result<Vec<Places>, JobError> {
        self.sends(transfers).map(|held| healing.answer(links, to, held)).collect()
    }

    /// What this member is to send, as it has it.
    fn sends(&self, transfers: &[Transfer]) -> impl Iterator<Item = Shard> {
        let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
        senders.filter(|(worker, _)| *worker == self.worker).map(|(_, held)| held)
    }

    /// What this member had before.
    pub(crate) fn lend<'s>(&'s self, healing: &mut Healing<'s>) {
        for seat in self.seats.iter().rev() {
            seat.holdings().for_each(|(shard, holding)| healing.holds(shard, holding, seat.trainer.state));
        }
    }

    /// What is never updated comes from where the model came from, unless it is there; tables lie elsewhere in every seat.
    pub(crate) fn fill_frozen(&self, seat: &mut Seat<'a>) -> Result<(), JobError> {
        let (c, machine) = seat.trainer.memory_mut();
        if seat.is_filled {
            weights::fill_constants(machine, c, self.model.model.known());
            return Ok(());
        }
        self.initialise(c, machine, |param| !param.trainable)?;
        seat.is_filled = true;
        Ok(())
    }

    fn initialise(
        &self,
        c: &Compiled,
        machine: &mut dyn Machine,
        wanted: impl Fn(&phalanx_strategies::program::Param) -> bool,
    ) -> Result<(), JobError> {
        let source = self.model.weights.as_deref().map(TensorSource::open).transpose()?;
        let (known, seed) = (self.model.model.known(), self.config.output.seed);
        let wanted = |param: &phalanx_strategies::program::Param| {
            self.pulse.tick();
            wanted(param)
        };
        Ok(weights::initialise_some(machine, c, known, seed, source.as_ref(), wanted)?)
    }

    fn restore(&self, seat: &mut Seat<'a>, checkpoint: Checkpoint) -> Result<(), JobError> {
        let saving = self.saving();
        if checkpoint.step == Step(0) {
            let (c, machine) = seat.trainer.memory_mut();
            self.initialise(c, machine, |_| true)?;
            for shadow in seat.trainer.shadows_mut() {
                self.initialise(&shadow.compiled, &mut *shadow.machine, |_| true)?;
            }
            return Ok(());
        }
        let step = checkpoint.step.0;
        let path = match self.start_from.as_ref().filter(|(first, _)| *first == step) {
            Some((_, path)) => path.clone(),
            None => saving.path_of(step, checkpoint.generation.0)?,
        };
        let changed = seat.trainer.restore(&saving, &path)?;
        if !changed.is_empty() && seat.memory.rank == 0 {
            self.tell(seat, Event::Note(format!("changed since the checkpoint was saved: {}", changed.join(", "))));
        }
        for shadow in seat.trainer.shadows_mut() {
            saving.restore_updated(&path, &mut *shadow.machine, &shadow.compiled)?;
        }
        Ok(())
    }

    fn saving(&self) -> Saving {
        Saving::new(&self.config.output, self.extras.clone()).with_pulse(self.pulse.clone())
    }

    fn tell(&self, seat: &Seat<'a>, event: Event) {
        if seat.memory.rank == 0 || matches!(event, Event::Step(_)) {
            self.cell.tell(&FromRank::Event { generation: seat.generation.0, rank: seat.memory.rank as u32, event });
        }
    }

    fn train(&mut self, generation: Generation) -> Result<(), JobError> {
        self.give_up_before(generation);
        let mut saving = self.saving().of_generation(generation.0);
        let Some(mut seat) = self.seats.pop() else { return Ok(()) };
        let trained = self.train_in(&mut seat, &mut saving);
        self.seats.push(seat);
        if let Some(report) = trained? {
            self.cell.tell(&FromRank::Done(report));
        }
        self.cell.finished(generation);
        Ok(())
    }

    /// The world of this generation runs, so nobody needs what its members had before (`B-2`).
    pub(crate) fn give_up_before(&mut self, generation: Generation) {
        let is_of_it = |seat: &mut Seat<'a>| seat.generation == generation;
        let now: Vec<Seat<'a>> = self.seats.extract_if(.., is_of_it).collect();
        let before = std::mem::replace(&mut self.seats, now);
        let Some(now) = self.seats.last() else { return };
        let memory = |seat: &Seat<'a>| seat.trainer.arena().expect("a seat has memory").memory().clone();
        let spares = before.iter().map(|seat| (seat.memory.mesh.size(), memory(seat)));
        self.spare = kept(spares.chain(self.spare.take()), now.memory.mesh.size(), &memory(now));
    }

    /// Trains to the end; the leader reports.
    fn train_in(&self, seat: &mut Seat<'a>, saving: &mut Saving) -> Result<Option<Report>, JobError> {
        let output = &self.config.output;
        let leads = seat.memory.rank == 0;
        let first_step = seat.trainer.state.step;
        seat.trainer.begin(seat.generation, seat.n_saves)?;
        let buffer_bytes = seat.trainer.buffer_bytes()?;
        let n_rows = (self.data.train.len(), self.data.validation.as_ref().map_or(0, |rows| rows.len()));
        let (generation, rank) = (seat.generation.0, seat.memory.rank as u32);
        let cell = &self.cell;
        let mut on_event = |event: &Event| {
            if let Event::Saved { step, .. } = event {
                cell.saved(*step);
            }
            if leads || matches!(event, Event::Step(_)) {
                cell.tell(&FromRank::Event { generation, rank, event: event.clone() });
            }
        };
        let found = self.start_from.as_ref().filter(|(step, _)| seat.from_disk && *step == first_step);
        let resumed = found.map(|(_, path)| path.clone());
        let started = seat.trainer.started(n_rows, self.n_threads, buffer_bytes, resumed.clone());
        on_event(&Event::Started(started));
        let trace = output.trace.as_deref().filter(|_| seat.from_disk);
        seat.trainer.trace = trace.map(|path| StepTrace::new(path, first_step, self.run.total_steps));
        let mut telling = Telling::new(&output.output_dir, first_step, leads, resumed, &mut on_event)?;
        if let Some(metrics) = seat.trainer.take_settled()? {
            telling.make_up_for(metrics)?;
        }
        let data = TrainData {
            train: &self.data.train,
            validation: self.data.validation.as_ref(),
            eval_steps: self.config.data.eval_steps.map(|n| n as u64),
            save_steps: output.save_steps,
        };
        if self.cell.trains() {
            let ended = seat.trainer.train(&data, saving, &self.control, &mut |event| telling.emit(event))?;
            if ended == Pause::Paused {
                return Ok(None);
            }
        } else {
            // The worlds before have done the last step, or have lost what they saved.
            let (step, path) = seat.trainer.save(saving)?;
            telling.emit(Event::Saved { step, path })?;
        }
        let mut report = telling.report;
        report.finished = report.steps >= self.run.total_steps;
        if report.finished && leads {
            report.model_dir = Some(self.export(seat, &report, saving)?);
        }
        Ok(leads.then_some(report))
    }

    fn export(&self, seat: &Seat<'a>, report: &Report, saving: &Saving) -> Result<PathBuf, JobError> {
        let _stores = self.pulse.during(At::Stores);
        let dir = self.config.output.output_dir.join("model");
        crate::train::telling::export_model(&dir, &seat.trainer, report.checkpoint.as_deref(), saving)?;
        Ok(dir)
    }

    fn team_plan(&mut self, mesh: Mesh) -> Result<&TeamPlan, JobError> {
        if !self.plans.contains_key(&mesh) {
            let plan = TeamPlan::new(self.model, mesh, self.evaluates)?;
            self.plans.insert(mesh, plan);
        }
        Ok(&self.plans[&mesh])
    }

    /// The memory of the world, which the supervisor has sent before the order to join it. Memory of worlds that were over
    /// before this rank came to them lies before it.
    fn receive(&mut self, placement: &Placement) -> Result<ShmWorld, CollectiveError> {
        let expected = placement.machine_world(self.worker.member.node.0)?;
        let spare = self.spare.iter().map(|(_, memory)| memory);
        let known: Vec<Arc<SharedMemory>> = self.memories.iter().chain(spare).cloned().collect();
        loop {
            match receive_world(&self.passage, &expected, None, &known) {
                Err(CollectiveError::Stale { expected, found }) if found.generation < expected.generation => {}
                received => {
                    let world = received?;
                    self.memories = world.arenas().to_vec();
                    return Ok(world);
                }
            }
        }
    }
}

impl Task {
    /// The world that it is of.
    fn generation(&self) -> Option<Generation> {
        match self {
            Task::Join(formation) => Some(formation.generation),
            Task::Train(generation) | Task::Learn(generation) => Some(*generation),
            Task::Settle(_) | Task::Keep(_) | Task::Exit => None,
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Task::Settle(_) => "settle",
            Task::Keep(_) => "keep",
            Task::Join(_) => "join",
            Task::Learn(_) => "learn",
            Task::Train(_) => "train",
            Task::Exit => "exit",
        }
    }
}

/// Who sends these, by their position in the world, and what they have it as.
pub(crate) fn senders(formation: &Formation, transfers: &[Transfer]) -> (Vec<u32>, Vec<Shard>) {
    let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
    let member = |worker| formation.member_of(worker).expect("who sends is a member");
    senders.map(|(worker, held)| (member(worker), held)).unzip()
}
