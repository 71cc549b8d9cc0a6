//! The device thread of a rank process: joins worlds, transfers state, trains, and keeps superseded state until the
//! next world runs, since until then another failure may need it.

mod instances;
mod joining;
pub(crate) mod state;
mod training;

use crate::config::JobConfig;
use crate::control::Control;
use crate::data::prepare::Prepared;
use crate::error::{JobError, chain};
use crate::rank::device_watch::{DeviceWatch, end_process};
use crate::rank::failure_report::FailureReport;
use crate::rank::instance::RankInstance;
use crate::rank::port::{Outbox, Tasks, generation};
use crate::rank::rank_messages::FromRank;
use crate::rank::recycled_arenas::Spare;
use crate::rank::warm::Warm;
use crate::train::event_sink::Fault;
use crate::train::plan::ModelPlan;
use crate::train::planted::Planted;
use crate::train::recorded_generation::RecordedGeneration;
use crate::train::run_plan::RunPlan;
use crate::train::saving::elsewhere::SavedElsewhere;
use crate::train::team::TeamPlan;
use phalanx_actors::rank::{DeviceEvent, Handle, Task};
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::shared_memory::SharedMemory;
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::{JobId, Worker};
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::sampler::Sampler;
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

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
