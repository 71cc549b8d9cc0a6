//! Checkpoints of a run: what belongs to its state, and which checkpoint it resumes from.

mod contents;
pub(crate) mod elsewhere;
pub(crate) mod places;
mod restore;
pub(crate) mod resuming;

pub(crate) use self::contents::Contents;
use self::contents::{SavedBox, copy_to};
use self::elsewhere::SavedElsewhere;
use self::places::Places;
use super::background::{Ballot, Ongoing, Waited};
use super::best::Best;
use super::inputs::RunInputs;
use super::planted::flip_bit;
use super::recorded_generation::RecordedGeneration;
use super::run_files::{INPUTS_JSON, JOB_YAML};
use super::team::Team;
use super::verification::Compared;
use super::weights::{self, Tensor};
use crate::config::JobConfig;
use crate::config::output::{Resume, is_url};
use crate::error::JobError;
use crate::error::export::ExportError;
use phalanx_device::Machine;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_storage::checkpoint::background::{EndedSave, Snapshot};
use phalanx_storage::checkpoint::catalog::{Keep, list};
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::checkpoint::checkpoint_meta::CheckpointMeta;
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::fence::Fence;
use phalanx_storage::checkpoint::given_up::Beginning;
use phalanx_storage::checkpoint::piece::Piece;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::checkpoint::writer::{CheckpointWriter, WriterRank};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::loss_scale::LossScale;
use phalanx_strategies::mesh::Axis;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

/// The position of a run: all that the next step depends on, besides the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerState {
    /// Steps that were completed.
    pub(crate) step: u64,
    /// Updates that were made; fp16 runs skip some.
    pub(crate) n_updates: u64,
    pub(crate) loss_scale: LossScale,
    /// The evaluations so far, if they decide anything.
    #[serde(default)]
    pub(crate) best: Best,
}

/// Name of the extra that holds [`TrainerState`].
pub(crate) const STATE: &str = "trainer.json";

/// Saves and restores the state of one run.
pub(crate) struct Saving {
    places: Places,
    /// The state that is saved in the folder of this machine.
    pub(crate) saved_elsewhere: Option<SavedElsewhere>,
    /// Whether the latest save in `root` failed, or still waits for its store.
    is_failing: bool,
    job: String,
    keep: Option<usize>,
    /// Whether the best checkpoint is kept, too.
    keeps_best: bool,
    /// Files that make a checkpoint self-contained: configuration, model configuration, tokenizer.
    extras: Vec<(String, Vec<u8>)>,
    contents: Contents,
    /// The generation that writes.
    generation: u64,
    /// Of a world that may be replaced (`CHECKPOINT-8`).
    fence: Option<Fence>,
    /// The same for files of this machine, which training waits for.
    fence_of_files: Option<Fence>,
    resume: Resume,
    /// The latest generation before this run, if it is known now.
    before_this_run: Before,
    ongoing: Option<Ongoing>,
    /// Memory of the last snapshot, for the next one.
    spare: Snapshot,
    /// The thread that prepares memory for the first snapshot.
    warming: Option<JoinHandle<Snapshot>>,
    /// Shows that the device works on files.
    progress_counter: ProgressCounter,
}

/// Reads the latest generation before a run; `None` if it is not known now.
type Before = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// A save that has ended.
#[derive(Debug)]
pub(crate) struct SaveOutcome {
    /// The step of its state.
    pub(crate) step: u64,
    /// The durable checkpoint, or why there is none.
    pub(crate) saved: Result<PathBuf, CheckpointError>,
    /// Whether this rank could remove older checkpoints.
    pub(crate) retained: Result<(), CheckpointError>,
}

/// The save of this step still waits for an answer of its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) step: u64,
}

impl Saving {
    pub(crate) fn new(config: &JobConfig, extras: Vec<(String, Vec<u8>)>) -> Saving {
        let output = &config.output;
        let job = output.output_dir.file_name().map_or("job".into(), |n| n.to_string_lossy().into_owned());
        let (generation, progress_counter) = (0, ProgressCounter::default());
        Saving {
            places: Places::of(output),
            saved_elsewhere: None,
            is_failing: false,
            job,
            keep: output.save_total_limit,
            keeps_best: output.best_rule().keeps_best,
            extras,
            contents: Contents::of(config),
            generation,
            fence: None,
            fence_of_files: None,
            resume: output.resume_from_checkpoint.clone(),
            before_this_run: Arc::new(|| None),
            ongoing: None,
            spare: Snapshot::default(),
            warming: None,
            progress_counter,
        }
    }

    /// As far as it is known before there are ranks.
    pub(crate) fn of_run(config: &JobConfig, inputs: &RunInputs) -> Saving {
        let mut run = Saving::of_configuration(config);
        run.extras.push((INPUTS_JSON.to_owned(), inputs.encode()));
        run
    }

    /// As far as it is known where nothing is trained.
    pub(crate) fn of_configuration(config: &JobConfig) -> Saving {
        Saving::new(config, vec![(JOB_YAML.to_owned(), config.to_yaml().into_bytes())])
    }

    /// Adds a file to all checkpoints to come.
    pub(crate) fn set_extra(&mut self, name: &str, bytes: Vec<u8>) {
        self.extras.retain(|(other, _)| other != name);
        self.extras.push((name.to_owned(), bytes));
    }

    /// The same saving on a device with this progress counter.
    pub(crate) fn with_progress_counter(self, progress_counter: ProgressCounter) -> Saving {
        Saving { progress_counter, ..self }
    }

    /// Where its checkpoints are.
    pub(crate) const fn places(&self) -> &Places {
        &self.places
    }

    /// Checks before the run begins that the object store for checkpoints answers, and that the checkpoint to resume from
    /// exists if it is named.
    ///
    /// # Errors
    /// When a URL is invalid, its store does not answer or refuses, a link leads nowhere, or the checkpoint is invalid.
    pub(crate) fn check(&self, resume: &Resume) -> Result<(), JobError> {
        if let Resume::Path(path) = resume {
            Checkpoint::open_lazily(path)?;
        }
        if is_url(&self.places.root) {
            list(&self.places.root)?;
        }
        match self.places.root.read_link() {
            Ok(target) if !self.places.root.exists() => {
                Err(JobError::CheckpointsUnmounted { root: self.places.root.clone(), target })
            }
            _ => Ok(()),
        }
    }

    /// The same saving for the world of this generation, which may be replaced by one that is on record.
    pub(crate) fn of_world(self, generation: u64, recorded: RecordedGeneration) -> Saving {
        let (here, began) = (recorded.clone(), recorded.clone());
        let fence_of_files = Some(Fence::new(generation, move || here.read_here()));
        let before_this_run: Before = Arc::new(move || began.before_this_run());
        let fence = Some(Fence::new(generation, move || recorded.read_for_checkpoints()));
        Saving { generation, fence, fence_of_files, before_this_run, ..self }
    }

    /// The same saving for a run whose ranks are threads: its checkpoints have a later generation than those that are there.
    ///
    /// # Errors
    /// When the directory of checkpoints cannot be read.
    pub(crate) fn of_threads(self) -> Result<Saving, JobError> {
        // A file in the place of the directory matters when a checkpoint is saved.
        let mut earlier = if self.places.root.is_file() { Vec::new() } else { list(&self.places.root)? };
        if let Some(own) = self.places.own.as_ref().filter(|own| own.is_dir()) {
            earlier.extend(list(own)?);
        }
        let latest = earlier.iter().map(|id| id.generation).max();
        Ok(Saving {
            generation: latest.map_or(0, |latest| latest + 1),
            before_this_run: Arc::new(move || latest),
            ..self
        })
    }

    /// Where this run began, unless it continues from the newest checkpoint.
    fn beginning(&self, root: &Path) -> Option<Beginning> {
        let from = match &self.resume {
            Resume::Auto => return None,
            Resume::Never => None,
            Resume::Path(path) => CheckpointId::from_dir(path),
        };
        Some(Beginning::new((self.before_this_run)()?, from.as_ref(), root))
    }

    /// How the writer of a file in the job's folder finds out whether a later world has begun, in a world that may be replaced.
    pub(crate) const fn fence_of_files(&self) -> Option<&Fence> {
        self.fence_of_files.as_ref()
    }

    fn writer(&self) -> Result<CheckpointWriter, CheckpointError> {
        self.writer_at(&self.places.root)
    }

    fn writer_at(&self, root: &Path) -> Result<CheckpointWriter, CheckpointError> {
        let writer = CheckpointWriter::at(root)?.of_run(self.beginning(root));
        Ok(match &self.fence {
            Some(fence) => writer.behind(fence.clone()),
            None => writer,
        })
    }

    /// Keeps earlier worlds from finishing checkpoints. The leader of a world calls it before it continues from one.
    ///
    /// # Errors
    /// When a later world has begun.
    pub(crate) fn seal_earlier(&self) -> Result<(), JobError> {
        let _stores = self.progress_counter.during(At::Stores);
        match self.writer().and_then(|writer| writer.seal_earlier()) {
            Err(error @ CheckpointError::Superseded { .. }) => Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "earlier worlds may still finish checkpoints, until this one saves its first");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// The generation that writes.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation
    }

    /// The checkpoint of a step, from this generation if there is one.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn path_of(&self, step: u64, generation: u64) -> Result<PathBuf, JobError> {
        let mut of_step = list(&self.places.root)?;
        of_step.retain(|id| id.step == step);
        let found = of_step.iter().find(|id| id.generation == generation).or(of_step.first());
        let why = format!(" at step {step} of generation {generation}");
        found.map(|id| id.path.clone()).ok_or(JobError::NoCheckpoint { path: self.places.root.clone(), why })
    }

    /// Files that make a checkpoint self-contained.
    pub(crate) fn extras(&self) -> &[(String, Vec<u8>)] {
        &self.extras
    }

    /// Saves while training waits; no other save may be running.
    ///
    /// # Errors
    /// When the store cannot be opened.
    pub(crate) fn save(
        &self,
        machine: &dyn Machine,
        c: &Compiled,
        state: &TrainerState,
        compared: &Compared,
        team: &mut Team,
    ) -> Result<SaveOutcome, JobError> {
        self.save_at(&self.places.root, self.keep(state), machine, c, state, compared, team)
    }

    /// Whether the latest save failed, or still waits for its store; the same on all ranks.
    pub(crate) const fn is_failing(&self) -> bool {
        self.is_failing
    }

    fn save_at(
        &self,
        root: &Path,
        keep: Option<Keep>,
        machine: &dyn Machine,
        c: &Compiled,
        state: &TrainerState,
        compared: &Compared,
        team: &mut Team,
    ) -> Result<SaveOutcome, JobError> {
        let _stores = self.progress_counter.during(At::Stores);
        let boxes = self.boxes(machine, c, compared);
        let pieces: Vec<Piece<'_>> = boxes.iter().map(SavedBox::piece).collect();
        let extras = self.extras_of(state, team)?;
        let extras: Vec<(&str, &[u8])> = extras.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        let writer = self.writer_at(root)?;
        let saved =
            writer.save_together(&self.meta(state, compared, team), writer_rank(team), &pieces, &extras, |value| {
                team.sum(value)
            });
        let retained = match (&saved, keep.filter(|_| team.leads())) {
            (Ok(id), Some(keep)) => writer.retain(keep, id).map(drop),
            _ => Ok(()),
        };
        Ok(SaveOutcome { step: state.step, saved: saved.map(|id| id.path), retained })
    }

    /// Prepares memory for a copy beside training, unless an earlier save left some. For runs that will save.
    pub(crate) fn prepare(&mut self, c: &Compiled) {
        if self.ongoing.is_some() || self.warming.is_some() || self.spare.capacity() > 0 {
            return;
        }
        let n_bytes = self.contents.snapshot_bytes(c);
        // Without a thread, the first save allocates its memory itself.
        self.warming = Builder::new().name("warm".into()).spawn(move || Snapshot::with_memory(n_bytes)).ok();
    }

    /// Copies the state and begins to write it beside training. State in the memory of a device is copied beside training,
    /// too; until then its next update waits.
    ///
    /// # Errors
    /// When the system cannot start a thread, or the device has failed.
    ///
    /// # Panics
    /// If a save is running; see [`Saving::wait`].
    pub(crate) fn begin(
        &mut self,
        machine: &dyn Machine,
        c: &Compiled,
        state: &TrainerState,
        compared: &Compared,
        team: &Team,
    ) -> Result<(), JobError> {
        assert!(self.ongoing.is_none(), "one save at a time");
        let warmed = self.warming.take().and_then(|thread| thread.join().ok());
        let mut snapshot = warmed.unwrap_or_else(|| std::mem::take(&mut self.spare));
        snapshot.clear();
        snapshot.reserve(self.contents.snapshot_bytes(c));
        let copy = copy_to(&mut snapshot, machine, c, self.contents, compared)?;
        if let Some(seed) = compared.planted {
            flip_bit(snapshot.bytes_mut(), seed);
        }
        self.extras_of(state, team)?.into_iter().for_each(|(name, bytes)| snapshot.add_extra(&name, bytes));
        let writer = self.writer()?;
        self.ongoing = Some(Ongoing::begin(
            &writer,
            self.meta(state, compared, team),
            writer_rank(team),
            snapshot,
            copy,
            self.keep(state),
        )?);
        Ok(())
    }

    /// Whether nothing is being saved.
    pub(crate) fn is_idle(&self) -> bool {
        self.ongoing.is_none()
    }

    /// This rank's contribution to the state of the current save, summed over all ranks.
    pub(crate) fn ballot(&mut self) -> Ballot {
        self.ongoing.as_mut().map_or(Ballot::default(), Ongoing::ballot)
    }

    /// Advances the running save by the sum of all ranks' ballots. Returns it when it has ended.
    pub(crate) fn count(&mut self, ballots: Ballot, team: &Team) -> Option<SaveOutcome> {
        let ongoing = self.ongoing.take()?;
        let step = ongoing.step();
        match ongoing.count(ballots, team.n_ranks() as u64) {
            Ok(ended) => Some(self.end(step, ended)),
            Err(ongoing) => {
                self.ongoing = Some(ongoing);
                None
            }
        }
    }

    /// Waits for the running save, if there is one.
    ///
    /// # Errors
    /// When a peer is lost.
    pub(crate) fn wait(&mut self, team: &mut Team) -> Result<Option<SaveOutcome>, JobError> {
        match self.wait_while_answered(team, true)? {
            Ok(ended) => Ok(ended),
            Err(Stalled { .. }) => unreachable!("the wait ends only with the save"),
        }
    }

    /// As [`Saving::wait`], but only while the stores of all ranks answer (`BACKGROUND-3`), unless to the end.
    ///
    /// # Errors
    /// As [`Saving::wait`].
    pub(crate) fn wait_while_answered(
        &mut self,
        team: &mut Team,
        to_the_end: bool,
    ) -> Result<Result<Option<SaveOutcome>, Stalled>, JobError> {
        let Some(ongoing) = self.ongoing.take() else { return Ok(Ok(None)) };
        let progress_counter = self.progress_counter.clone();
        let _stores = progress_counter.during(At::Stores);
        let step = ongoing.step();
        Ok(match ongoing.wait(team, to_the_end)? {
            Waited::Ended(ended) => Ok(Some(self.end(step, ended))),
            Waited::Stalled(ongoing) => {
                self.is_failing = true;
                self.ongoing = Some(ongoing);
                Err(Stalled { step })
            }
        })
    }

    fn end(&mut self, step: u64, ended: EndedSave) -> SaveOutcome {
        self.spare = ended.snapshot;
        self.is_failing = ended.saved.is_err();
        SaveOutcome { step, saved: ended.saved.map(|id| id.path), retained: ended.retained }
    }

    /// All boxes that a checkpoint holds of this rank's memory.
    fn boxes<'a>(&self, machine: &'a dyn Machine, c: &Compiled, compared: &Compared) -> Vec<SavedBox<'a>> {
        let of = |t: Tensor| {
            let (values, fingerprint) = (weights::packed(machine, c, &t), compared.fingerprint(&t));
            SavedBox { name: t.name, shape: t.shape, region: t.held.region, values, fingerprint }
        };
        self.contents.saved(c).map(of).collect()
    }

    /// The checkpoints that stay when this state is saved.
    fn keep(&self, state: &TrainerState) -> Option<Keep> {
        let also = (self.keeps_best && state.best.loss().is_some()).then_some(state.best.step);
        self.keep.map(|newest| Keep { newest, also })
    }

    fn meta(&self, state: &TrainerState, compared: &Compared, team: &Team) -> CheckpointMeta {
        let sizes = team.mesh_rank.mesh;
        let mesh = Axis::ALL.map(|axis| (axis.name().to_string(), sizes.axis(axis) as u64));
        CheckpointMeta {
            job: self.job.clone(),
            step: state.step,
            generation: self.generation,
            mesh: BTreeMap::from(mesh),
            verified: compared.is_verified,
            compared: compared.is_compared,
        }
    }

    /// The small files that this rank adds.
    fn extras_of(&self, state: &TrainerState, team: &Team) -> Result<Vec<(String, Vec<u8>)>, JobError> {
        if !team.leads() {
            return Ok(Vec::new());
        }
        let state = serde_json::to_vec_pretty(state).map_err(ExportError::Encode)?;
        Ok([(STATE.to_string(), state)].into_iter().chain(self.extras.iter().cloned()).collect())
    }
}

const fn writer_rank(team: &Team) -> WriterRank {
    WriterRank { writer: team.mesh_rank.rank as u32, n_writers: team.n_ranks() as u32 }
}
