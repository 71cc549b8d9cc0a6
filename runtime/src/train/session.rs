//! One run from its configuration to the exported model.

use super::elastic::local::{self, Local};
use super::elastic::words::Begin;
use super::error::JobError;
use super::export::{self, ExportFrom};
use super::metrics::{MetricsFiles, StepMetrics};
use super::output_lock::OutputLock;
use super::plan::{self, ModelPlan};
use super::saving::Saving;
use super::step_trace::{StepTrace, check_writable};
use super::team::{Team, TeamPlan};
use super::trainer::{Programs, TrainData, Trainer, state_bytes};
use crate::config::JobConfig;
use crate::config::datasets::ValSetSize;
use crate::data::prepare::{Prepared, Summary, prepare};
use crate::data::rows::Rows;
use crate::data::tokenize::Progress;
use crate::data::tokenizer::Tokenizer;
use crate::frontend::UserModel;
use crate::job::{Control, Event, Report};
use phalanx_collective::shm::LOCAL_RANKS_MAX;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_cpu::matmul::peak_flops;
use phalanx_cpu::{CpuMachine, available_threads, on_device_thread};
use phalanx_device::CollectiveError;
use phalanx_device::world::{RANKS_MAX, WorldId};
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::elastic::identity::{Generation, Step, Worker};
use phalanx_strategies::elastic::snapshot;
use phalanx_strategies::mesh::{Axis, Coord, Mesh, Place};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::sampler::Sampler;
use std::borrow::Borrow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the ranks of a run are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Threads of this process.
    Threads,
    /// Processes of this program where there are several; one alone is a thread.
    Several(PathBuf),
    /// Processes of this program, however many there are.
    Processes(PathBuf),
}

/// Runs a job to its end, or until it is asked to stop. Nothing is written before the whole input was checked.
pub(crate) fn run(
    config: &JobConfig,
    user: Option<UserModel>,
    ranks: &Ranks,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    Checked::new(config, user, ranks)?.run(control, on_event)
}

/// A job of which everything was checked but its data.
pub(crate) struct Checked<'a> {
    config: &'a JobConfig,
    user: Option<UserModel>,
    /// The program of the rank processes, if ranks are such.
    program: Option<&'a Path>,
    tokenizer: Tokenizer,
    model: ModelPlan,
    mesh: Mesh,
    programs: Vec<Arc<Programs>>,
}

impl<'a> Checked<'a> {
    /// Checks a job and writes nothing.
    pub(crate) fn new(
        config: &'a JobConfig,
        user: Option<UserModel>,
        ranks: &'a Ranks,
    ) -> Result<Checked<'a>, JobError> {
        let tokenizer = plan::tokenizer(config)?;
        let model = match &user {
            Some(user) => plan::user_plan(config, &tokenizer, user)?,
            None => plan::model_plan(config, &tokenizer)?,
        };
        let mesh = config.parallel.mesh()?;
        check_ranks(mesh, user.is_some())?;
        if config.parallel.nnodes > 1 {
            return Err(JobError::Unusable(format!(
                "nnodes is {}, and this is one machine; several are started by `phalanx train --slurm` or `--torchrun`, or by `phalanx coordinator` and `phalanx node`",
                config.parallel.nnodes
            )));
        }
        let program = match ranks {
            Ranks::Processes(program) => Some(program.as_path()),
            Ranks::Several(program) if mesh.size() > 1 => Some(program.as_path()),
            Ranks::Several(_) | Ranks::Threads => None,
        };
        if user.is_some() && program.is_some() {
            return Err(JobError::Unusable(
                "a model written in Rust exists in this process only, not in rank processes; `Job::start` trains it on threads".into(),
            ));
        }
        // Compiled before the data is read, so that a model that cannot train leaves no tokens behind.
        let evaluates = config.data.val_set_size != ValSetSize::Nothing;
        let programs =
            (0..mesh.size()).map(|rank| Programs::compile(&model, Place { mesh, rank }, evaluates).map(Arc::new));
        let programs = programs.collect::<Result<Vec<Arc<Programs>>, _>>()?;
        let n_spares = if program.is_some() { config.elastic.spare_ranks } else { 0 };
        check_memory(&programs, n_spares)?;
        Saving::new(&config.output, Vec::new()).check(&config.output.resume_from_checkpoint)?;
        Ok(Checked { config, user, program, tokenizer, model, mesh, programs })
    }

    /// Prepares the data and runs the job.
    pub(crate) fn run(self, control: &Control, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        let Checked { config, user, program, tokenizer, model, mesh, programs } = self;
        if let Some(note) = plan::ignored_dropout(&model.hf_config) {
            on_event(&Event::Note(note));
        }
        let data = prepare_data(config, &model, &tokenizer, on_event)?;
        create_dir(&config.output.output_dir)?;
        let _lock = OutputLock::take(&config.output.output_dir)?;
        config.output.trace.as_deref().map_or(Ok(()), check_writable)?;
        if let Some(program) = program {
            drop((data, programs));
            return elastic(config, model, program, control, on_event);
        }
        let extras = extras(config, &model, &tokenizer)?;
        let run = Run { config, model: &model, data: &data, extras, control, user: user.as_ref() };
        if mesh.size() > 1 {
            let plan = TeamPlan::new(&model, mesh, config.data.val_set_size != ValSetSize::Nothing)?;
            let world = shared_world(&plan, &programs)?;
            return run.threads(&programs, &plan, &world, on_event);
        }
        let n_threads = config.precision.threads.unwrap_or_else(available_threads);
        run.rank(&programs[0], n_threads, || Ok(Team::alone()), on_event)
    }
}

/// Checks all of a configuration that can be checked without the data and the machines that will run it.
pub(crate) fn check(config: &JobConfig) -> Result<ModelPlan, JobError> {
    let tokenizer = plan::tokenizer(config)?;
    let model = plan::model_plan(config, &tokenizer)?;
    fits(&model, config.parallel.mesh()?, config.data.val_set_size != ValSetSize::Nothing)?;
    Saving::new(&config.output, Vec::new()).check(&config.output.resume_from_checkpoint)?;
    create_dir(&config.output.output_dir)?;
    Ok(model)
}

/// Checks that a model can be trained on a mesh: that there are programs for a rank of each stage, since ranks that differ
/// on other axes differ in sizes only. Returns the bytes that all ranks need together.
///
/// # Errors
/// Why it cannot.
pub(crate) fn fits(model: &ModelPlan, mesh: Mesh, evaluates: bool) -> Result<u64, JobError> {
    let n_ranks = mesh.checked_size().filter(|n| *n <= RANKS_MAX as usize).ok_or_else(|| {
        JobError::Unusable(format!("a mesh has at least one rank on each axis and at most {RANKS_MAX}; this is {mesh}"))
    })?;
    let mut bytes = 0;
    for stage in 0..mesh.pp {
        let rank = mesh.rank(Coord::default().with(Axis::Pp, stage));
        let programs = Programs::compile(model, Place { mesh, rank }, evaluates)?;
        bytes += programs.bytes() * (n_ranks / mesh.pp) as u64;
    }
    Ok(bytes)
}

/// As [`fits`], for a job with so many rank processes, all on this machine.
pub(crate) fn fits_here(model: &ModelPlan, mesh: Mesh, evaluates: bool, n_slots: u32) -> Result<(), JobError> {
    let needed = fits(model, mesh, evaluates)?;
    if mesh.size() > n_slots as usize {
        return Err(JobError::Unusable(format!(
            "the mesh {mesh} has {} ranks; the job was started with {n_slots} rank processes, all on this machine",
            mesh.size()
        )));
    }
    let n_spares = n_slots as u64 - mesh.size() as u64;
    check_bytes(needed.saturating_add((needed / mesh.size() as u64).saturating_mul(n_spares)))
}

/// Runs the ranks as processes that may die.
fn elastic(
    config: &JobConfig,
    model: ModelPlan,
    program: &Path,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    let output = &config.output;
    let saving = Saving::new(output, Vec::new());
    let (resume, warnings) = saving.find(&output.resume_from_checkpoint)?;
    warnings.into_iter().for_each(|w| on_event(&Event::Note(w)));
    let found = resume.as_deref().map(Checkpoint::open).transpose()?;
    let start_from = found.as_ref().map(|c| (c.id().step, c.id().path.clone()));
    let checkpoint = found.map_or_else(snapshot::Checkpoint::default, |c| snapshot::Checkpoint {
        generation: Generation(c.id().generation),
        step: Step(c.id().step),
    });
    let mesh = config.parallel.mesh()?;
    let timing = config.elastic.timing();
    let begin = Begin {
        job: local::job_id(),
        worker: Worker::default(),
        seat: (mesh, 0),
        seat_bytes: 0,
        n_threads: config.precision.threads.unwrap_or_else(|| (available_threads() / mesh.size()).max(1)),
        yaml: config.to_yaml(),
        listen: None,
        secret: Vec::new(),
        peak_flops: peak_flops(model.spec.precision == Precision::Bf16),
        start_from,
        timing,
    };
    let local = Local {
        config,
        program: program.to_owned(),
        evaluates: config.data.val_set_size != ValSetSize::Nothing,
        policy: config.elastic.policy(mesh, model.n_microbatches, state_bytes(&model)?),
        model: &model,
        timing,
        n_slots: mesh.size() as u32 + config.elastic.spare_ranks as u32,
        checkpoint,
        begin,
        control,
    };
    local.run(on_event)
}

/// The shared memory of all ranks: of each the regions in which peers read and write.
pub(crate) fn shared_world(plan: &TeamPlan, programs: &[impl Borrow<Programs>]) -> Result<ShmWorld, JobError> {
    let id = WorldId { job: u64::from(std::process::id()), generation: 0, incarnation: 0 };
    let arena_bytes: Vec<u64> = programs.iter().map(|p| CpuMachine::shared_bytes(&p.borrow().all()) as u64).collect();
    Ok(ShmWorld::create(&plan.world(id)?, &arena_bytes, STAGING_BYTES)?)
}

/// Room for operands that lie outside the shared regions: those that ranks agree on between steps, a few numbers.
const STAGING_BYTES: u64 = 64 << 10;

/// What all ranks of a run share.
struct Run<'a> {
    config: &'a JobConfig,
    model: &'a ModelPlan,
    data: &'a Prepared,
    extras: Vec<(String, Vec<u8>)>,
    control: &'a Control,
    user: Option<&'a UserModel>,
}

impl Run<'_> {
    /// Runs one rank on a device thread of its own.
    fn rank(
        &self,
        programs: &Arc<Programs>,
        n_threads: usize,
        team: impl FnOnce() -> Result<Team, CollectiveError> + Send,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let saving = Saving::new(&self.config.output, self.extras.clone());
        let Run { config, model, data, user, .. } = *self;
        let session = Session { config, model, programs, data, saving, n_threads, user };
        on_device_thread(n_threads, || session.run(team()?, self.control, on_event))?
    }

    /// Runs all ranks in this process. The first one that fails takes the others with it.
    fn threads(
        &self,
        ranks: &[Arc<Programs>],
        plan: &TeamPlan,
        world: &ShmWorld,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let n_threads = self.config.precision.threads.unwrap_or_else(|| (available_threads() / ranks.len()).max(1));
        let outcomes: Vec<Result<Report, JobError>> = std::thread::scope(|scope| {
            let mut handles = Vec::new();
            let mut listener = Some(on_event);
            for (rank, programs) in ranks.iter().enumerate() {
                let leader = listener.take_if(|_| rank == 0);
                handles.push(scope.spawn(move || {
                    let team = || plan.join(world, rank as u32);
                    let outcome = match leader {
                        Some(on_event) => self.rank(programs, n_threads, team, on_event),
                        None => self.rank(programs, n_threads, team, &mut |_| {}),
                    };
                    if let Err(error) = &outcome {
                        world.control().abort(&format!("rank {rank}: {error}"));
                    }
                    outcome
                }));
            }
            handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        root_cause(outcomes)
    }
}

/// The leader's report, or the error that was not a consequence of another.
fn root_cause(outcomes: Vec<Result<Report, JobError>>) -> Result<Report, JobError> {
    let mut report = None;
    let mut errors = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(of_rank) => report = report.or(Some(of_rank)),
            Err(error) => errors.push(error),
        }
    }
    let first = errors.iter().position(|e| !e.is_consequence()).unwrap_or(0);
    match report.filter(|_| errors.is_empty()) {
        Some(report) => Ok(report),
        None => Err(errors.swap_remove(first)),
    }
}

struct Session<'a> {
    config: &'a JobConfig,
    model: &'a ModelPlan,
    programs: &'a Arc<Programs>,
    data: &'a Prepared,
    saving: Saving,
    n_threads: usize,
    user: Option<&'a UserModel>,
}

impl Session<'_> {
    fn run(
        mut self,
        team: Team,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let out = &self.config.output;
        let n_rows = self.data.train.len();
        let run = plan::run_plan(self.config, n_rows as u64);
        let leads = team.leads();
        let batch_rows = self.config.sequences_per_step() as u64;
        let sampler = Sampler::new(out.seed, n_rows as u64, batch_rows, self.config.data.shuffle)?;
        let (resume, warnings) = self.saving.find(&out.resume_from_checkpoint)?;
        warnings.into_iter().for_each(|w| on_event(&Event::Note(w)));
        // The yardstick is for the rank whose steps are reported.
        let peak = if leads { peak_flops(self.model.spec.precision == Precision::Bf16) } else { f64::INFINITY };
        let models = self.user.iter().map(|user| user.start(self.model.batch)).collect::<Result<Vec<_>, _>>()?;
        let programs = Arc::clone(self.programs);
        let mut trainer = Trainer::new(self.model, run, programs, sampler, models, team, &out.output_dir, peak)?;
        match self.user {
            Some(user) => trainer.start_from(user.params()),
            None => trainer.initialise(out.seed)?,
        }
        if let Some(path) = &resume {
            let changed = trainer.restore(&self.saving, path)?;
            if !changed.is_empty() {
                let note = format!("changed since the checkpoint was saved: {}", changed.join(", "));
                on_event(&Event::Note(note));
            }
            tracing::info!(checkpoint = %path.display(), step = trainer.state.step, "resumed");
        }
        let first_step = trainer.state.step;
        trainer.trace = out.trace.as_deref().map(|path| StepTrace::new(path, first_step, run.total_steps));
        let buffer_bytes = trainer.buffer_bytes()?;
        let n_rows = (n_rows, self.data.validation.as_ref().map_or(0, Rows::len));
        on_event(&Event::Started(trainer.started(n_rows, self.n_threads, buffer_bytes, resume.clone())));
        let mut telling = Telling::new(&out.output_dir, first_step, leads, resume, on_event)?;
        let data = TrainData {
            train: &self.data.train,
            validation: self.data.validation.as_ref(),
            eval_steps: self.config.data.eval_steps.map(|n| n as u64),
            save_steps: out.save_steps,
        };
        // Its world is the only one.
        let _over = trainer.train(&data, &mut self.saving, control, &mut |event| telling.emit(event))?;
        let mut report = telling.report;
        report.finished = report.steps >= run.total_steps;
        if report.finished && leads {
            let dir = out.output_dir.join("model");
            export_model(&dir, &trainer, report.checkpoint.as_deref(), &self.saving)?;
            report.model_dir = Some(dir);
        }
        Ok(report)
    }
}

/// What becomes of the events of a rank: the leader's also go into files and into its report.
pub(crate) struct Telling<'a> {
    files: Option<MetricsFiles>,
    path: PathBuf,
    pub(crate) report: Report,
    on_event: &'a mut (dyn FnMut(&Event) + Send),
}

impl<'a> Telling<'a> {
    pub(crate) fn new(
        output_dir: &Path,
        first_step: u64,
        leads: bool,
        resume: Option<PathBuf>,
        on_event: &'a mut (dyn FnMut(&Event) + Send),
    ) -> Result<Telling<'a>, JobError> {
        let path = output_dir.join("metrics.jsonl");
        let files = leads.then(|| MetricsFiles::open(output_dir, first_step)).transpose();
        let files = files.map_err(|source| JobError::Io { action: "write", path: path.clone(), source })?;
        let report = Report { steps: first_step, finished: false, last: None, checkpoint: resume, model_dir: None };
        Ok(Telling { files, path, report, on_event })
    }

    /// Tells of a step that was done in an earlier world, unless that was told already.
    pub(crate) fn make_up_for(&mut self, metrics: StepMetrics) -> Result<(), JobError> {
        match &self.files {
            Some(files) if files.last_step() < metrics.step => self.emit(Event::Step(metrics)),
            _ => Ok(()),
        }
    }

    pub(crate) fn emit(&mut self, event: Event) -> Result<(), JobError> {
        let written = match (&event, &mut self.files) {
            (Event::Step(m), Some(files)) => files.step(m),
            (Event::Eval(m), Some(files)) => files.eval(m),
            _ => Ok(()),
        };
        written.map_err(|source| JobError::Io { action: "write", path: self.path.clone(), source })?;
        match &event {
            Event::Step(m) => (self.report.steps, self.report.last) = (m.step, Some(m.clone())),
            Event::Saved { path, .. } => self.report.checkpoint = Some(path.clone()),
            _ => {}
        }
        (self.on_event)(&event);
        Ok(())
    }
}

/// Writes the trained model, from memory where one rank has it all, else from the last checkpoint.
pub(crate) fn export_model(
    dir: &Path,
    trainer: &Trainer<'_>,
    checkpoint: Option<&Path>,
    saving: &Saving,
) -> Result<(), JobError> {
    match checkpoint.filter(|_| trainer.n_ranks() > 1) {
        // Of several ranks none has the whole model; the checkpoint does.
        Some(checkpoint) => export::export_checkpoint(checkpoint, dir, false),
        None => {
            let (compiled, machine) = trainer.memory();
            export::export(dir, &ExportFrom { machine, compiled }, saving.extras())
        }
    }
}

pub(crate) fn prepare_data(
    config: &JobConfig,
    model: &ModelPlan,
    tokenizer: &Tokenizer,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Prepared, JobError> {
    let cache = config.data.dataset_prepared_path.clone().unwrap_or_else(|| config.output.output_dir.join("data"));
    let prepared = {
        let listener = std::cell::RefCell::new(&mut *on_event);
        let progress = |p: Progress<'_>| {
            let (done_bytes, total_bytes) = (p.done_bytes, p.total_bytes);
            listener.borrow_mut()(&Event::Preparing { path: p.path.to_owned(), done_bytes, total_bytes });
        };
        prepare(&plan::data_config(config)?, tokenizer, &cache, model.model.vocab_size(), &progress)?
    };
    match &prepared.summaries[..] {
        few @ [_] | few @ [_, _] | few @ [_, _, _] => few.iter().for_each(|s| on_event(&Event::Note(describe(s)))),
        many => {
            let sum = |count: fn(&Summary) -> usize| many.iter().map(count).sum::<usize>();
            let (tokens, rows) = (sum(|s| s.n_tokens), sum(|s| s.n_rows));
            on_event(&Event::Note(format!("{} files: {tokens} tokens, {rows} rows", many.len())));
        }
    }
    Ok(prepared)
}

/// Refuses a mesh that one machine, or this model, cannot have.
fn check_ranks(mesh: Mesh, is_user_defined: bool) -> Result<(), JobError> {
    if is_user_defined && (mesh.pp, mesh.cp, mesh.tp) != (1, 1, 1) {
        return Err(JobError::Unusable(format!(
            "a user-defined model is one operation, which {mesh} would cut; `dp_replicate_size` and `dp_shard_size` fit it"
        )));
    }
    if mesh.size() > LOCAL_RANKS_MAX as usize {
        return Err(JobError::Unusable(format!(
            "the mesh {mesh} has {} ranks; at most {LOCAL_RANKS_MAX} fit one machine",
            mesh.size()
        )));
    }
    Ok(())
}

/// Refuses a step that this machine has not the memory for: the system would promise it and kill the run later. Spare
/// processes have memory for a seat.
fn check_memory(ranks: &[Arc<Programs>], n_spares: usize) -> Result<(), JobError> {
    let bytes = || ranks.iter().map(|programs| programs.bytes());
    check_bytes(bytes().sum::<u64>().saturating_add(bytes().max().unwrap_or(0).saturating_mul(n_spares as u64)))
}

fn check_bytes(needed: u64) -> Result<(), JobError> {
    // Where the system does not tell, the allocation itself has the last word.
    let Ok(mut system) = sysinfo::System::new() else { return Ok(()) };
    system.refresh_memory();
    let present = system.total_memory();
    if present > 0 && needed > present { Err(JobError::TooLarge { needed, present }) } else { Ok(()) }
}

fn describe(s: &Summary) -> String {
    let mut text = format!("{}: {} tokens, {} rows", s.path.display(), s.n_tokens, s.n_rows);
    for (n, what) in
        [(s.n_empty, "without a token to predict"), (s.n_dropped, "dropped as too long"), (s.n_truncated, "truncated")]
    {
        if n > 0 {
            text += &format!(", {n} of {} documents {what}", s.n_documents);
        }
    }
    if s.from_cache { text + " (from the cache)" } else { text }
}

/// The files that make a checkpoint self-contained.
pub(crate) fn extras(
    config: &JobConfig,
    model: &ModelPlan,
    tokenizer: &Tokenizer,
) -> Result<Vec<(String, Vec<u8>)>, JobError> {
    let json = serde_json::to_vec_pretty(&model.hf_config).map_err(|e| JobError::Unusable(e.to_string()))?;
    let mut extras =
        vec![(export::JOB_YAML.to_string(), config.to_yaml().into_bytes()), (export::CONFIG_JSON.to_string(), json)];
    extras.extend(tokenizer.files());
    if let Some(dir) = &model.weights {
        let path = dir.join(export::GENERATION_JSON);
        if let Ok(bytes) = std::fs::read(&path) {
            extras.push((export::GENERATION_JSON.to_string(), bytes));
        }
    }
    Ok(extras)
}

fn create_dir(dir: &Path) -> Result<(), JobError> {
    std::fs::create_dir_all(dir).map_err(|source| JobError::Io { action: "create", path: dir.to_owned(), source })
}
