//! The device thread of a rank process: joins worlds, transfers state, trains, and keeps superseded state until the
//! next world runs, since until then another failure may need it.

use crate::config::JobConfig;
use crate::control::Control;
use crate::data::prepare::Prepared;
use crate::devices;
use crate::error::{JobError, chain};
use crate::events::{Event, Report};
use crate::rank::arena_contents::{ArenaContents, Lasting};
use crate::rank::beside::catch_up_transfers;
use crate::rank::device_watch::{DeviceWatch, end_process};
use crate::rank::failure_report::FailureReport;
use crate::rank::heal::{Healing, HeldRanges, HeldState, StateToFill};
use crate::rank::mesh_groups::owned;
use crate::rank::pairs::{followers, owner, shadow_holders};
use crate::rank::port::{Membership, Outbox, Tasks, generation};
use crate::rank::rank_messages::FromRank;
use crate::rank::recycled_arenas::{Spare, largest_spare};
use crate::rank::warm::Warm;
use crate::rank::world_groups::{placement, team_plan_of};
use crate::train::event_sink::{EventSink, Fault};
use crate::train::links::Links;
use crate::train::plan::{ModelPlan, RunPlan};
use crate::train::planted::Planted;
use crate::train::programs::Programs;
use crate::train::recorded_generation::RecordedGeneration;
use crate::train::saving::Saving;
use crate::train::saving::elsewhere::SavedElsewhere;
use crate::train::shadow::Shadow;
use crate::train::step_trace::StepTrace;
use crate::train::team::{JoinedWorld, Site, Team, TeamPlan};
use crate::train::trainer::catching_up::OutgoingCatchUp;
use crate::train::trainer::{Pause, TrainData, Trainer};
use crate::train::weights;
use phalanx_actors::rank::{DeviceEvent, Handle, Task};
use phalanx_actors::step_log::StepWriter;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_collective::shm::passing::receive_world;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::shared_memory::{Arena, SharedMemory};
use phalanx_device::world_id::WorldId;
use phalanx_device::{Backing, CollectiveError, Machine};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::{Generation, JobId, Step, Worker};
use phalanx_strategies::elastic::message::WorldPlan;
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::elastic::recovery::{Source, Transfer, shared};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::sampler::Sampler;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// State of a rank process for its whole life.
pub(crate) struct Device<'a> {
    /// The rank's actor.
    pub(crate) rank: Handle,
    pub(crate) tasks: Tasks,
    pub(crate) outbox: Outbox,
    pub(crate) fault: Fault,
    pub(crate) control: Arc<Control>,
    pub(crate) progress_counter: ProgressCounter,
    pub(crate) device_watch: DeviceWatch,
    pub(crate) job: JobId,
    pub(crate) worker: Worker,
    pub(crate) config: &'a JobConfig,
    /// The generation of the world that the coordinator has recorded last.
    pub(crate) recorded: RecordedGeneration,
    pub(crate) model: &'a ModelPlan,
    pub(crate) run: RunPlan,
    pub(crate) sampler: Sampler,
    pub(crate) data: &'a Prepared,
    pub(crate) evaluates: bool,
    pub(crate) extras: Vec<(String, Vec<u8>)>,
    pub(crate) n_threads: usize,
    pub(crate) fd_channel: UnixStream,
    pub(crate) listener: Listener,
    pub(crate) tcp: TcpConfig,
    pub(crate) peak_flops: f64,
    pub(crate) start_from: Option<(u64, PathBuf)>,
    /// Groups of the joined meshes.
    pub(crate) plans: BTreeMap<Mesh, TeamPlan>,
    /// Arenas of all members of the last world on this machine.
    pub(crate) memories: Vec<Arc<SharedMemory>>,
    /// A recycled arena, still mapped because the next rank may use it.
    pub(crate) spare: Option<Spare>,
    /// Prepared memory for the first rank.
    pub(crate) warm: Option<Warm>,
    /// The last instance trains, or trained last.
    pub(crate) instances: Vec<RankInstance<'a>>,
    /// Faults of tests.
    pub(crate) planted: Planted,
    /// What this process computed, for steps whose copies differed.
    pub(crate) memory: Memory,
    /// The last state of the run, if it was saved elsewhere than where its checkpoints belong.
    pub(crate) saved_elsewhere: Option<SavedElsewhere>,
}

/// A rank in one world, with the state of its shards.
pub(crate) struct RankInstance<'a> {
    memory: ArenaContents,
    /// The shards whose state is in the arena, all of one version.
    pub(crate) has: BTreeSet<Shard>,
    pub(crate) generation: Generation,
    /// Number of requested checkpoints that are complete.
    n_saves: u64,
    /// Whether the frozen tensors are loaded.
    is_filled: bool,
    /// Whether the state came from a checkpoint or from initialization, at a start or restart of the run.
    from_disk: bool,
    /// Steps whose copies of state differed in an earlier world.
    disputed: Vec<Step>,
    pub(crate) trainer: Trainer<'a>,
}

impl RankInstance<'_> {
    /// The held state, by shard.
    pub(crate) fn held_states(&self) -> impl Iterator<Item = (Shard, HeldState<'_>)> {
        let (compiled, machine) = self.trainer.memory();
        let own = self.memory.shards.first().map(|shard| (*shard, HeldState { compiled, machine }));
        let shadows = self.trainer.shadows().iter();
        let all = own
            .into_iter()
            .chain(shadows.map(|s| (s.shard, HeldState { compiled: &s.compiled, machine: &*s.machine })));
        all.filter(|(shard, _)| self.has.contains(shard))
    }

    /// Marks the state as complete.
    pub(crate) fn completed(&mut self) {
        self.has = self.memory.shards.iter().copied().collect();
    }

    /// The memory to fill, by shard.
    pub(crate) fn spans_mut(&mut self) -> impl Iterator<Item = (Shard, StateToFill<'_>)> {
        let ((compiled, machine), shadows) = self.trainer.memories_mut();
        let own = self.memory.shards.first().map(|shard| (*shard, StateToFill { compiled, machine }));
        let shadows = shadows.iter_mut();
        own.into_iter()
            .chain(shadows.map(|s| (s.shard, StateToFill { compiled: &s.compiled, machine: &mut *s.machine })))
    }
}

impl<'a> Device<'a> {
    /// Executes tasks until the actor exits.
    pub(crate) fn run(&mut self) {
        loop {
            let warm = &mut self.warm;
            let Some(task) = self.tasks.next(|| warm.as_mut().is_some_and(|warm| warm.machine.rehearse())) else {
                return;
            };
            tracing::debug!(worker = %self.worker, task = name(&task), "device");
            let generation = generation(&task);
            let progress_counter = self.progress_counter.clone();
            let _computes = progress_counter.during(At::Computes);
            let outcome = match task {
                Task::Settle(version) => self.settle(version.is_some()),
                Task::Keep(shards) => {
                    self.keep(&shards);
                    Ok(())
                }
                Task::Join(world_plan) => self.join(&world_plan),
                Task::CatchUp(steps) => self.receive_catch_up(steps),
                Task::Train { steps, trains } => self.train(steps, trains),
                Task::Exit => return,
            };
            match outcome {
                // Other members may wait for a record in the step log.
                Ok(()) => self.rank.tell(DeviceEvent::Logged),
                Err(error) if self.model.device.has_failed() || error.is_lost_cache() => end_process(&chain(&error)),
                Err(JobError::Corrupt(found)) => {
                    tracing::warn!(worker = %self.worker, %found, "left a world");
                    if let Some(generation) = generation {
                        let text = found.to_string();
                        self.rank.tell(DeviceEvent::Corrupt(generation, *found, text));
                    }
                }
                Err(JobError::NotFiniteOnce { what, found }) => {
                    let text = JobError::NotFiniteOnce { what, found: found.clone() }.to_string();
                    tracing::warn!(worker = %self.worker, text, "left a world");
                    if let Some(generation) = generation {
                        self.rank.tell(DeviceEvent::NotFinite(generation, found, text));
                    }
                }
                Err(error) if error.is_of_the_world() => {
                    tracing::info!(worker = %self.worker, %error, "left a world");
                    if let Some(generation) = generation {
                        let broken = DeviceEvent::Broken(generation, error.unreachable(), error.to_string());
                        self.rank.tell(broken);
                    }
                }
                Err(error) => {
                    let failure_report = FailureReport::from(&error);
                    self.rank.tell(DeviceEvent::Failed(failure_report.text.clone()));
                    self.outbox.send(&FromRank::Failed(failure_report));
                }
            }
        }
    }

    fn settle(&mut self, counts: bool) -> Result<(), JobError> {
        let Some(instance) = self.instances.last_mut() else { return Ok(()) };
        if counts {
            instance.trainer.settle()
        } else {
            instance.trainer.give_up();
            Ok(())
        }
    }

    fn keep(&mut self, shards: &[Shard]) {
        if shards.is_empty() {
            self.instances.clear();
        }
    }

    fn join(&mut self, world_plan: &WorldPlan) -> Result<(), JobError> {
        let member = world_plan.member_of(self.worker).expect("a member only joins worlds that it belongs to");
        let plan = team_plan_of(self.team_plan(world_plan.mesh)?, world_plan);
        let id = WorldId { job: self.job.0, generation: world_plan.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, world_plan)?;
        let shm = self.receive(&placement)?;
        let control = shm.control().clone();
        let abort = Box::new(move |reason: &str| control.abort(reason));
        self.rank.tell(DeviceEvent::Connects(world_plan.generation, abort));
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let addresses: Vec<SocketAddr> = world_plan.addresses.iter().map(|a| a.unwrap_or(nowhere)).collect();
        let site = Site { listener: &self.listener, addresses: &addresses, config: &self.tcp };
        let mut joined = plan.join_at(&placement, &shm, member, &site, &*self.model.device)?;
        self.device_watch.join(&joined.connected);
        let groups = owned(std::mem::take(&mut joined.connected));
        self.rank.tell(DeviceEvent::Connected(world_plan.generation, groups));
        match (world_plan.rank_of(self.worker), world_plan.catch_up(self.worker)) {
            (Some(rank), _) => self.take_rank(world_plan, rank, joined),
            (None, Some(catch_up)) => self.join_beside(world_plan, catch_up, joined),
            (None, None) => self.help(world_plan, joined),
        }
    }

    /// Serves the state requests of other members, as a guest.
    fn help(&mut self, world_plan: &WorldPlan, joined: JoinedWorld) -> Result<(), JobError> {
        let mut links = joined.links.with_progress_counter(self.progress_counter.clone());
        let mut healing = Healing::default();
        self.register_held(&mut healing);
        for (to, transfers) in (0..).zip(&world_plan.transfers) {
            let asked = self.answer(&healing, &mut links, to, transfers)?;
            asked.into_iter().for_each(|ranges| healing.gives(to, ranges));
        }
        healing.carry_out(&mut links).map(|_| ())
    }

    /// Joins with a rank, with state from the planned sources.
    fn take_rank(&mut self, world_plan: &WorldPlan, rank: usize, joined: JoinedWorld) -> Result<(), JobError> {
        let JoinedWorld { team, links, .. } = joined;
        let mut links = links.with_progress_counter(self.progress_counter.clone());
        let progress_counter = self.progress_counter.of_world(world_plan.generation.0);
        let team = team.expect("a rank has a team").with_progress_counter(progress_counter);
        let shards = &world_plan.holds[rank];
        let begin = Instant::now();
        let mut instance = self.instance(world_plan, shards, team)?;
        instance.from_disk = world_plan.base.lineage == world_plan.generation;
        // State that is transferred again counts as missing until all of it has arrived.
        for transfer in &world_plan.transfers[rank] {
            instance.has.remove(&transfer.shard);
        }
        if world_plan.transfers[rank].iter().any(|transfer| transfer.source.sender(transfer.shard).is_some()) {
            self.memory.note_received();
        }
        let (set_up, in_place) = (begin.elapsed(), instance.has.len());
        let healed = self.heal(world_plan, rank, &mut instance, &mut links);
        tracing::debug!(worker = %self.worker, in_place, ?set_up, healed = ?begin.elapsed(), "joined with a rank");
        let asked = match healed {
            Ok(asked) => asked,
            Err(error) => {
                // Other members may need the earlier contents until the world runs.
                self.instances.extend((in_place > 0).then_some(instance));
                return Err(error);
            }
        };
        instance.completed();
        let catch_up_transfers = catch_up_transfers(&instance, &mut links, asked);
        let outgoing_catch_up = OutgoingCatchUp { catch_up_transfers, followers: followers(world_plan, rank) };
        instance.trainer.link(links, shadow_holders(world_plan, rank), outgoing_catch_up);
        self.instances.push(instance);
        self.rank.tell(DeviceEvent::Healed(world_plan.generation));
        Ok(())
    }

    /// The instance of a rank with these shards.
    pub(crate) fn instance(
        &mut self,
        world_plan: &WorldPlan,
        shards: &[Shard],
        team: Team,
    ) -> Result<RankInstance<'a>, JobError> {
        let MeshRank { mesh, rank } = team.mesh_rank;
        let is_same = |instance: &RankInstance<'_>| {
            instance.memory.is_of(mesh, rank, shards) && instance.trainer.is_in(team.memory())
        };
        let mut instance = match self.instances.iter().position(is_same) {
            Some(at) => {
                let mut instance = self.instances.remove(at);
                instance.trainer.rejoin(team);
                instance
            }
            None => self.new_instance(world_plan, shards, team)?,
        };
        (instance.generation, instance.n_saves) = (world_plan.generation, world_plan.n_saves);
        instance.disputed = world_plan.disputed.clone();
        Ok(instance)
    }

    /// The instance of a new rank. It may take over the memory and the contents of an earlier rank.
    fn new_instance(
        &mut self,
        world_plan: &WorldPlan,
        shards: &[Shard],
        team: Team,
    ) -> Result<RankInstance<'a>, JobError> {
        let MeshRank { mesh, rank } = team.mesh_rank;
        let programs = Arc::new(Programs::compile(self.model, MeshRank { mesh, rank }, self.evaluates)?);
        let memory = ArenaContents::new(mesh, rank, shards, Arc::new(Lasting::of(&programs)));
        let becomes_it =
            |instance: &RankInstance<'_>| instance.memory.may_become(&memory) && instance.trainer.is_in(team.memory());
        let before = self.instances.iter().position(becomes_it);
        let arena = team.memory().expect("ranks of elastic worlds share memory").clone();
        let shadows = self.shadows(mesh, &shards[1..], &arena, &programs)?;
        let mut settled = self.instances.last().and_then(|last| last.trainer.settled().cloned());
        let (mut has, mut is_filled, mut state, mut machine) = (BTreeSet::new(), false, None, None);
        let before = before.map(|at| self.instances.remove(at));
        let warm = self.warm.take().filter(|warm| before.is_none() && warm.is_for(&memory, &arena));
        if let Some(before) = before {
            (has, is_filled) = (before.has, before.is_filled);
            let (of_before, at, metrics) = before.trainer.into_parts();
            (machine, state, settled) = (Some(of_before), Some(at), metrics);
        } else if let Some(warm) = warm {
            (is_filled, machine) = (warm.is_filled, Some(warm.machine));
        }
        let is_new = machine.is_none();
        let folder = self.config.output.folder();
        let offload_dir = Some(folder.as_path());
        // Takes over memory before it allocates more: a device need not have room for both.
        let machine = programs.machine(machine, &Backing { shared: Some(&arena), offload_dir })?;
        let (run, sampler) = (self.run, self.sampler);
        let trainer = Trainer::new(self.model, run, programs, machine, sampler, team, self.peak_flops)?;
        let mut trainer = trainer.with_shadows(shadows).with_settled(settled);
        trainer.state = state.unwrap_or(trainer.state);
        if is_new {
            // The arena may be that of a rank in an earlier world (`RECYCLED-ARENAS-1`).
            self.instances.retain(|instance| !instance.trainer.is_in(Some(&arena)));
            #[allow(unsafe_code)] // Other processes may have mapped the memory.
            // SAFETY: the machines in the arena were dropped in the line above, the new machine holds no references,
            // and this device starts no operation before it has its rank.
            unsafe { arena.clear() }?;
        }
        let (generation, n_saves) = (world_plan.generation, world_plan.n_saves);
        let (from_disk, disputed) = (false, Vec::new());
        Ok(RankInstance { memory, has, generation, n_saves, is_filled, from_disk, disputed, trainer })
    }

    /// Shadows of these shards, behind the memory of the rank's own programs.
    fn shadows(&self, mesh: Mesh, shards: &[Shard], memory: &Arena, own: &Programs) -> Result<Vec<Shadow>, JobError> {
        // Shadows live in host memory and are updated by the processor: they take nothing from a GPU.
        let device = &*devices::host();
        let mut first = own.shared_bytes();
        let mut shadows = Vec::new();
        for shard in shards {
            let of = owner(&mesh, *shard);
            let step = Programs::compile(self.model, MeshRank { mesh, rank: of }, false)?.train;
            let shadow = Shadow::new(device, *shard, of as u32, &step, memory, first)?;
            first += device.shadow_bytes(&[&shadow.compiled]);
            shadows.push(shadow);
        }
        Ok(shadows)
    }

    fn heal(
        &self,
        world_plan: &WorldPlan,
        rank: usize,
        instance: &mut RankInstance<'a>,
        links: &mut Links,
    ) -> Result<Vec<(u32, HeldRanges)>, JobError> {
        self.fill_frozen(instance)?;
        let own = &world_plan.transfers[rank];
        if let Some(Source::Disk(checkpoint)) = own.first().map(|transfer| transfer.source) {
            // RECOVERY-1: all members read from disk, and no transfers take place.
            return self.restore(instance, checkpoint).map(|()| Vec::new());
        }
        let me = world_plan.member_of(self.worker).expect("a worker with a rank is a member");
        let (state, has) = (instance.trainer.state, instance.has.clone());
        let mut healing = Healing::default();
        for (shard, room) in instance.spans_mut() {
            if has.contains(&shard) {
                healing.holds(shard, HeldState { compiled: room.compiled, machine: room.machine }, state);
            } else {
                healing.missing(shard, room);
            }
        }
        self.register_held(&mut healing);
        for (to, transfers) in (0..).zip(&world_plan.transfers) {
            if to as usize != rank {
                let asked = self.answer(&healing, links, to, transfers)?;
                asked.into_iter().for_each(|ranges| healing.gives(to, ranges));
                continue;
            }
            for group in shared(transfers) {
                let (members, held) = senders(world_plan, group);
                let shard = group[0].shard;
                if members == [me] { healing.find(held[0], shard) } else { healing.ask(links, &members, shard)? }
            }
        }
        let is_elsewhere = |shard: &&Shard| !has.contains(shard) && own.iter().all(|t| t.shard != **shard);
        world_plan.holds[rank].iter().filter(is_elsewhere).for_each(|shard| healing.find(*shard, *shard));
        let mut catch_up_transfers = Vec::new();
        for (to, catch_up) in (world_plan.assignments.len() as u32..).zip(&world_plan.catching_up) {
            for held in self.sends(&catch_up.transfers) {
                catch_up_transfers.push((to, healing.answer_later(links, to, held)?));
            }
        }
        let came = healing.carry_out(links)?;
        instance.trainer.state = came.unwrap_or(state);
        Ok(catch_up_transfers)
    }

    /// Agrees with a member on the transfers to it.
    fn answer(
        &self,
        healing: &Healing<'_>,
        links: &mut Links,
        to: u32,
        transfers: &[Transfer],
    ) -> Result<Vec<HeldRanges>, JobError> {
        self.sends(transfers).map(|held| healing.answer(links, to, held)).collect()
    }

    /// The held shards that this member sends for these transfers.
    fn sends(&self, transfers: &[Transfer]) -> impl Iterator<Item = Shard> {
        let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
        senders.filter(|(worker, _)| *worker == self.worker).map(|(_, held)| held)
    }

    /// Registers the state that this member held before.
    pub(crate) fn register_held<'s>(&'s self, healing: &mut Healing<'s>) {
        for instance in self.instances.iter().rev() {
            instance
                .held_states()
                .for_each(|(shard, held_state)| healing.holds(shard, held_state, instance.trainer.state));
        }
    }

    /// Loads the frozen tensors from the model's source, unless they are loaded. Constant tables are always written, because
    /// their location differs between ranks.
    pub(crate) fn fill_frozen(&self, instance: &mut RankInstance<'a>) -> Result<(), JobError> {
        let (c, machine) = instance.trainer.memory_mut();
        if instance.is_filled {
            weights::fill_constants(machine, c, self.model.model.known());
            return Ok(());
        }
        self.initialise(c, machine, |param| !param.trainable)?;
        instance.is_filled = true;
        Ok(())
    }

    fn initialise(
        &self,
        c: &Compiled,
        machine: &mut dyn Machine,
        wanted: impl Fn(&phalanx_strategies::program::Param) -> bool,
    ) -> Result<(), JobError> {
        let first = self.model.first_values(self.config.output.seed)?;
        let wanted = |param: &phalanx_strategies::program::Param| {
            self.progress_counter.tick();
            wanted(param)
        };
        Ok(weights::initialise(machine, c, &first, wanted)?)
    }

    fn restore(&self, instance: &mut RankInstance<'a>, checkpoint: Checkpoint) -> Result<(), JobError> {
        let saving = self.saving(instance.generation);
        if instance.memory.rank == 0 {
            saving.seal_earlier()?;
        }
        if checkpoint.step == Step(0) {
            let (c, machine) = instance.trainer.memory_mut();
            self.initialise(c, machine, |_| true)?;
            for shadow in instance.trainer.shadows_mut() {
                self.initialise(&shadow.compiled, &mut *shadow.machine, |_| true)?;
            }
            return Ok(());
        }
        let step = checkpoint.step.0;
        let path = match self.start_from.as_ref().filter(|(first, _)| *first == step) {
            Some((_, path)) => path.clone(),
            None => saving.path_of(step, checkpoint.generation.0)?,
        };
        let changed = instance.trainer.restore(&saving, &path)?;
        if !changed.is_empty() && instance.memory.rank == 0 {
            self.tell(instance, Event::Note(format!("changed since the checkpoint was saved: {}", changed.join(", "))));
        }
        for shadow in instance.trainer.shadows_mut() {
            saving.restore_updated(&path, &mut *shadow.machine, &shadow.compiled)?;
        }
        Ok(())
    }

    fn saving(&self, generation: Generation) -> Saving {
        Saving::new(self.config, self.extras.clone())
            .with_progress_counter(self.progress_counter.clone())
            .of_world(generation.0, self.recorded.clone())
    }

    fn tell(&self, instance: &RankInstance<'a>, event: Event) {
        if instance.memory.rank == 0 || matches!(event, Event::Step(_)) {
            self.outbox.send(&FromRank::Event {
                generation: instance.generation.0,
                rank: instance.memory.rank as u32,
                event,
            });
        }
    }

    fn train(&mut self, steps: StepWriter, trains: bool) -> Result<(), JobError> {
        let generation = steps.generation();
        self.give_up_before(generation);
        let mut saving = self.saving(generation);
        let Some(mut instance) = self.instances.pop() else { return Ok(()) };
        instance.trainer.verification_mut().memory = std::mem::take(&mut self.memory);
        instance.trainer.begin_verification(instance.disputed.clone());
        instance.trainer.planted = std::mem::take(&mut self.planted);
        saving.saved_elsewhere = self.saved_elsewhere.take();
        let trained = self.train_in(&mut instance, &mut saving, steps, trains);
        self.saved_elsewhere = saving.saved_elsewhere.take();
        self.planted = std::mem::take(&mut instance.trainer.planted);
        self.memory = std::mem::take(&mut instance.trainer.verification_mut().memory);
        self.instances.push(instance);
        if let Some(report) = trained? {
            self.outbox.send(&FromRank::Done(report));
        }
        self.rank.tell(DeviceEvent::Finished(generation));
        Ok(())
    }

    /// The world of this generation runs, so superseded state is dropped (`MEMBER-2`).
    pub(crate) fn give_up_before(&mut self, generation: Generation) {
        let is_of_it = |instance: &mut RankInstance<'a>| instance.generation == generation;
        let now: Vec<RankInstance<'a>> = self.instances.extract_if(.., is_of_it).collect();
        let before = std::mem::replace(&mut self.instances, now);
        let Some(now) = self.instances.last() else { return };
        let memory =
            |instance: &RankInstance<'a>| instance.trainer.arena().expect("a rank has memory").memory().clone();
        let spares = before.iter().map(|instance| (instance.memory.mesh.size(), memory(instance)));
        self.spare = largest_spare(spares.chain(self.spare.take()), now.memory.mesh.size(), &memory(now));
    }

    /// Trains to the end; the leader reports.
    fn train_in(
        &self,
        instance: &mut RankInstance<'a>,
        saving: &mut Saving,
        steps: StepWriter,
        trains: bool,
    ) -> Result<Option<Report>, JobError> {
        let output = &self.config.output;
        let leads = instance.memory.rank == 0;
        let first_step = instance.trainer.state.step;
        let member = Box::new(Membership { steps, rank: self.rank.clone() });
        instance.trainer.begin(instance.generation, instance.n_saves, member)?;
        let buffer_bytes = instance.trainer.buffer_bytes()?;
        let n_rows = (self.data.train.n_of_run(), self.data.validation.as_ref().map_or(0, |rows| rows.len()));
        let (generation, rank) = (instance.generation.0, instance.memory.rank as u32);
        let (actor, outbox, watch) = (&self.rank, &self.outbox, &self.device_watch);
        let mut on_event = |event: &Event| {
            if let Event::Step(_) = event {
                watch.commit();
            }
            saved(generation, event).into_iter().for_each(|event| actor.tell(event));
            if leads || matches!(event, Event::Step(_)) {
                outbox.send(&FromRank::Event { generation, rank, event: event.clone() });
            }
        };
        let found = self.start_from.as_ref().filter(|(step, _)| instance.from_disk && *step == first_step);
        let resumed = found.map(|(_, path)| path.clone());
        let started = instance.trainer.started(n_rows, self.n_threads, buffer_bytes, resumed.clone());
        on_event(&Event::Started(started));
        let trace = output.trace.as_deref().filter(|_| instance.from_disk);
        instance.trainer.trace = trace.map(|path| StepTrace::new(path, first_step, self.run.total_steps));
        let mut event_sink =
            EventSink::new(&output.folder(), first_step, leads, saving, resumed, self.fault.clone(), &mut on_event);
        instance.trainer.agree_on_best()?;
        if let Some(metrics) = instance.trainer.take_settled()? {
            event_sink.make_up_for(metrics);
        }
        let data = TrainData {
            train: &self.data.train,
            validation: self.data.validation.as_ref(),
            eval_steps: self.run.eval_steps,
            save_steps: self.run.save_steps,
            checkpoint_required: output.checkpoint_required,
        };
        let lacks_evaluation = event_sink.lacks_evaluation(first_step);
        instance.trainer.agree_on_unfinished(&data, lacks_evaluation, instance.from_disk)?;
        if first_step == self.run.total_steps && instance.from_disk {
            event_sink.emit(Event::Note(format!("all {first_step} steps were already done")));
        }
        if trains {
            let ended = instance.trainer.train(&data, saving, &self.control, &mut |event| event_sink.emit(event))?;
            if ended == Pause::Paused {
                return Ok(None);
            }
        } else {
            // Earlier worlds have completed the last step, or their checkpoint was lost, or the job fails.
            instance.trainer.check_weights()?;
            instance.trainer.verify_if_due(true, 1.0)?;
            let outcome = instance.trainer.save(saving)?;
            instance.trainer.conclude_last(outcome, saving, &mut |event| event_sink.emit(event))?;
        }
        let mut report = event_sink.report.clone();
        report.finished = report.steps >= self.run.total_steps || instance.trainer.is_over();
        if report.finished && leads {
            let _stores = self.progress_counter.during(At::Stores);
            report.model_dir = Some(event_sink.export(&output.folder(), &instance.trainer, saving)?);
        }
        Ok(leads.then_some(report))
    }

    fn team_plan(&mut self, mesh: Mesh) -> Result<&TeamPlan, JobError> {
        if !self.plans.contains_key(&mesh) {
            let plan = TeamPlan::new(self.model, mesh, self.evaluates)?;
            self.plans.insert(mesh, plan);
        }
        Ok(&self.plans[&mesh])
    }

    /// Receives the memory of the world, which the node sends before the desired state. Skips the memory of worlds that ended
    /// before this rank joined them.
    fn receive(&mut self, placement: &Placement) -> Result<ShmWorld, CollectiveError> {
        let expected = placement.machine_world(self.worker.member.node.0)?;
        let spare = self.spare.iter().map(|(_, memory)| memory);
        let known: Vec<Arc<SharedMemory>> = self.memories.iter().chain(spare).cloned().collect();
        loop {
            match receive_world(&self.fd_channel, &expected, None, &known) {
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

const fn name(task: &Task) -> &'static str {
    match task {
        Task::Settle(_) => "settle",
        Task::Keep(_) => "keep",
        Task::Join(_) => "join",
        Task::CatchUp(_) => "catch up",
        Task::Train { .. } => "train",
        Task::Exit => "exit",
    }
}

/// The senders of these transfers, by position in the world, and the shards that they hold.
pub(crate) fn senders(world_plan: &WorldPlan, transfers: &[Transfer]) -> (Vec<u32>, Vec<Shard>) {
    let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
    let member = |worker| world_plan.member_of(worker).expect("a sender is a member");
    senders.map(|(worker, held)| (member(worker), held)).unzip()
}

/// What the rank's actor learns of a checkpoint.
fn saved(generation: u64, event: &Event) -> Option<DeviceEvent> {
    match event {
        Event::Saved { step, .. } => Some(DeviceEvent::Saved(*step)),
        Event::NotSaved { step, reason } => Some(DeviceEvent::NotSaved(Generation(generation), *step, reason.clone())),
        _ => None,
    }
}
