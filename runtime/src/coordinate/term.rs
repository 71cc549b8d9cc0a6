//! The start of a coordinator's term: it takes the lease, finds out what became of the job on record, and writes the record from
//! which the job continues, or begins.

use crate::checkpoint_claim::CheckpointClaim;
use crate::config::JobConfig;
use crate::config::output::Resume;
use crate::control_place::{CONFIG, ControlPlace};
use crate::coordinate::held_lease::{HeldLease, claim, take_alone};
use crate::coordinate::job_number::{forget_job, job_id, job_of};
use crate::coordinate::patience::patiently;
use crate::coordinate::serving::Serve;
use crate::coordinate::standby::{self, ALONE, Watched};
use crate::coordinate::survivors;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::train::inputs::RunInputs;
use crate::train::output_lock::{OutputLock, RankLock};
use crate::train::same_run::{Change, change_of_running_job};
use crate::train::saving::Saving;
use phalanx_actors::store::{SharedStore, Store};
use phalanx_actors::trust::join::Address;
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::elastic::checkpoint;
use phalanx_strategies::elastic::identity::{Generation, JobId, Step};
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Instant;

/// The start of a coordinator's term: the job's number, the lease, and the job's store.
pub(super) struct Term {
    pub(super) job: JobId,
    pub(super) place: ControlPlace,
    pub(super) store: SharedStore,
    pub(super) candidate: u32,
    pub(super) lease: HeldLease,
    /// The checkpoint from which the job starts, if any: its step and folder.
    pub(super) start_from: Option<(u64, PathBuf)>,
    /// The published addresses of the coordinator, once it listens.
    pub(super) addresses: Vec<Address>,
    /// The claim on the checkpoints of the job, if they are outside its output.
    pub(super) claim: Option<CheckpointClaim>,
    /// The lock of the job's folder, unless its caller holds it, or a coordinator that has lost its lease.
    pub(super) lock: Option<OutputLock>,
}

impl Term {
    /// The coordinated job.
    pub(super) const fn job(&self) -> JobId {
        self.job
    }

    /// The token of the claim on the checkpoints.
    pub(super) fn claim(&self) -> Option<u64> {
        self.claim.as_ref().map(CheckpointClaim::token)
    }
}

/// The state of an earlier run of the job, if the store has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Earlier {
    /// Its ranks may be alive, and this coordinator continues the run.
    MayLive,
    /// Its ranks are gone; only checkpoints remain.
    IsOver,
}

/// Takes over a job on several machines once no other coordinator is active; `None` if this coordinator is not needed.
/// `lock` is that of the job's folder, if the caller has taken it.
pub(super) fn take_over(
    config: &JobConfig,
    serve: &Serve,
    mut lock: Option<OutputLock>,
    is_over: &dyn Fn() -> bool,
    stands_by: &mut dyn FnMut(),
) -> Result<Option<Term>, JobError> {
    let timing = config.elastic.timing();
    let place = ControlPlace::of(&config.output.output_dir, &timing)?;
    let store = place.store()?;
    // Process ids are not unique across machines.
    let candidate = (job_id().0 as u32).max(ALONE + 1);
    let (mut locked_since, mut was_led) = (None, false);
    loop {
        let Some(seen) = vacant_lease(config, &place, is_over, &mut || {
            was_led = true;
            stands_by();
        })?
        else {
            return Ok(None);
        };
        // The node belongs to the job of the record: a standby that begins after its end must not start the job again.
        let read = || Ok(store.read_record().map_err(ControlPlaneError::from)?);
        let record = patiently(&place, is_over, read)?;
        if serve.is_beside_node && record.ending.is_some() {
            return Ok(None);
        }
        if lock.is_none() {
            lock = match OutputLock::take(&config.output.folder()) {
                // The lease decides between coordinators: one that has lost it may still run.
                Err(JobError::InUse { .. }) if seen.holder != ALONE => None,
                // A coordinator locks the folder before it takes the lease: the lease shows whose the folder is.
                Err(JobError::InUse { .. })
                    if locked_since.get_or_insert_with(Instant::now).elapsed() < timing.lease * LEASES_OF_LOCK =>
                {
                    if is_over() {
                        return Ok(None);
                    }
                    std::thread::sleep(timing.lease_renewal / 2);
                    continue;
                }
                taken => Some(taken?),
            };
        }
        let Some(lease) = patiently(&place, is_over, || claim(&*store, seen, candidate))? else { continue };
        let held = HeldLease::hold(store.clone(), lease, timing.lease_renewal)?;
        let earlier = match may_live(&record) && !serve.is_beside_node && !was_led {
            true => earlier_run(config, serve, &place, (&record, seen.holder), is_over)?,
            false => Earlier::MayLive,
        };
        let claim = CheckpointClaim::take(&config.output, &place, is_over)?;
        let start_from = patiently(&place, is_over, || {
            let warn = &mut |warning| tracing::warn!("{warning}");
            begin(config, &Saving::of_configuration(config), &place, &*store, lease.0, earlier, warn)
        })?;
        let job = patiently(&place, is_over, || job_of(&place))?;
        let addresses = Vec::new();
        return Ok(Some(Term { job, place, store, candidate, lease: held, start_from, addresses, claim, lock }));
    }
}

/// The lease, once no coordinator has it; `None` if none is needed any more. `stands_by` is called while another one leads.
fn vacant_lease(
    config: &JobConfig,
    place: &ControlPlace,
    is_over: &dyn Fn() -> bool,
    stands_by: &mut dyn FnMut(),
) -> Result<Option<Lease>, JobError> {
    let (timing, store) = (config.elastic.timing(), place.store()?);
    let other = RefCell::new(None);
    let watched = patiently(place, is_over, || {
        standby::wait(&*store, &timing, &|| is_over() || other.borrow().is_some(), &mut || {
            *other.borrow_mut() = other_configuration(config, place);
            stands_by();
        })
    })?;
    if let Some(other) = other.take() {
        return Err(other.into());
    }
    match watched {
        Watched::Vacant(lease) => Ok(Some(lease)),
        Watched::Occupied => Err(JobError::InUse { path: config.output.output_dir.clone() }),
        Watched::NotNeeded => Ok(None),
    }
}

/// Begins a job on this machine alone, in a folder that this process has locked.
///
/// # Errors
/// As [`take_alone`], and when the store or a checkpoint cannot be used.
pub(super) fn begin_alone(
    config: &JobConfig,
    inputs: &RunInputs,
    lock: &OutputLock,
    warn: &mut dyn FnMut(String),
) -> Result<Term, JobError> {
    let timing = config.elastic.timing();
    let place = ControlPlace::of(&config.output.output_dir, &timing)?;
    let (store, lease) = take_alone(config, &place, lock)?;
    let held = HeldLease::hold(store.clone(), lease, timing.lease_renewal)?;
    let goes_on = || false;
    let run = Saving::of_run(config, inputs);
    let claim = CheckpointClaim::take(&config.output, &place, &goes_on)?;
    let start_from =
        patiently(&place, &goes_on, || begin(config, &run, &place, &*store, lease.0, Earlier::IsOver, &mut *warn))?;
    let job = patiently(&place, &goes_on, || job_of(&place))?;
    let addresses = Vec::new();
    Ok(Term { job, place, store, candidate: ALONE, lease: held, start_from, addresses, claim, lock: None })
}

/// What became of the job on record, which no coordinator led when this one came. A coordinator with the same wishes as the last one
/// continues it; wishes that differ, and those of the operator of a run whose processes are gone, need to know whether it is over.
///
/// # Errors
/// When its ranks live, and cannot continue with this configuration.
fn earlier_run(
    config: &JobConfig,
    serve: &Serve,
    place: &ControlPlace,
    (record, holder): (&Record, u32),
    is_over: &dyn Fn() -> bool,
) -> Result<Earlier, JobError> {
    // The ranks of a job on one machine died with the process that coordinated them.
    if holder == ALONE {
        return Ok(Earlier::IsOver);
    }
    let changed = other_configuration(config, place);
    let begins = config.output.resume_from_checkpoint != Resume::Auto;
    let was_asked = record.requests.stop || !record.drained.is_empty() || !record.gone.is_empty();
    if changed.is_none() && !begins && !was_asked {
        return Ok(Earlier::MayLive);
    }
    if !patiently(place, is_over, || survivors::report(config, serve, place, is_over))? {
        return Ok(Earlier::IsOver);
    }
    if let Some(changed) = changed {
        return Err(changed.into());
    }
    if begins {
        tracing::warn!("the ranks of the job are running: they continue, and `resume_from_checkpoint` has no effect");
    }
    Ok(Earlier::MayLive)
}

/// Whether ranks of the job on record may train.
const fn may_live(record: &Record) -> bool {
    record.ending.is_none() && record.world_plan.is_some()
}

/// Why a coordinator with this configuration cannot continue the job. A job without a recorded one accepts any.
fn other_configuration(config: &JobConfig, place: &ControlPlace) -> Option<ControlPlaneError> {
    let (recorded, path) = (place.read(CONFIG).ok().flatten()?, place.path(CONFIG));
    match change_of_running_job(&recorded, config) {
        Some(Change::Unreadable) => Some(ControlPlaneError::UnreadableConfiguration { path }),
        Some(Change::Of(changed)) => Some(ControlPlaneError::OtherConfiguration { path, changed }),
        None => None,
    }
}

/// For how many leases the folder may be locked by another coordinator that has no lease yet.
const LEASES_OF_LOCK: u32 = 2;

/// Prepares the store. A job that has ended starts again, from its last checkpoint if configured. Returns that checkpoint.
fn begin(
    config: &JobConfig,
    run: &Saving,
    place: &ControlPlace,
    store: &dyn Store,
    lease: Lease,
    earlier: Earlier,
    warn: &mut dyn FnMut(String),
) -> Result<Option<(u64, PathBuf)>, JobError> {
    let output = &config.output;
    let found = store.read_record().map_err(ControlPlaneError::from)?;
    let is_over = earlier == Earlier::IsOver || found.ending.is_some();
    if is_over {
        RankLock::await_end_of_ranks(&output.folder())?;
    } else if found.world_plan.is_some() {
        return Ok(None);
    }
    let (resume, warnings) = run.find(&output.resume_from_checkpoint, config.elastic.verify_steps)?;
    let resume = resume.map(|path| Checkpoint::open(&path).map(|found| (path, found))).transpose()?;
    // A refusal leaves the record of the earlier run as it is.
    resume.as_ref().map_or(Ok(Vec::new()), |(_, checkpoint)| run.check_run(checkpoint))?;
    if is_over {
        // A later run gets a new job number, so that members of the earlier run cannot take part.
        forget_job(place)?;
    }
    let kept = if is_over { Record { generation: found.generation, ..Record::default() } } else { found };
    if lease.holder != ALONE {
        place.write(CONFIG, &config.to_yaml())?;
    }
    let own = resume.as_ref().filter(|_| output.resume_from_checkpoint == Resume::Auto);
    run.places().note(place, own.map(|(path, _)| path.as_path()))?;
    let mut record = Record { term: lease.term, ..kept };
    warnings.into_iter().for_each(warn);
    let mut start_from = None;
    if let Some((path, checkpoint)) = resume {
        record.checkpoint = as_snapshot(checkpoint.id());
        record.generation = record.generation.max(record.checkpoint.generation);
        start_from = Some((checkpoint.id().step, path));
    }
    // Worlds of this run have later generations than all checkpoints that were there before.
    record.generation = record.generation.max(Generation(run.last_generation()?));
    record.began = record.generation;
    // If a later term has begun, the store does not take this record, and this coordinator steps down later.
    store.write_record(&record).map_err(ControlPlaneError::from)?;
    Ok(start_from)
}

pub(super) fn as_snapshot(id: &CheckpointId) -> checkpoint::Checkpoint {
    checkpoint::Checkpoint { generation: Generation(id.generation), step: Step(id.step) }
}
