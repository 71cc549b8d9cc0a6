//! A lease that a thread of its own renews: of a job without a coordinator, whose ranks are threads of this process, and of a
//! coordinator until it has started. It is the same lease for all, so that no other job of any kind begins in the folder.

use crate::checkpoint_claim::CheckpointClaim;
use crate::config::JobConfig;
use crate::control::Control;
use crate::control_place::ControlPlace;
use crate::coordinate::job_number::forget_job;
use crate::coordinate::patience::patiently;
use crate::coordinate::standby;
use crate::coordinate::standby::{ALONE, Watched};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::train::output_lock::{OutputLock, RankLock};
use phalanx_actors::store::{SharedStore, Store};
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle, scope};
use std::time::{Duration, Instant};

/// Runs a job while it holds the lease of its folder, which this process has locked.
///
/// # Errors
/// When another job is active in the folder, or the store of the lease cannot be used.
pub(crate) fn with_lease<T>(
    config: &JobConfig,
    lock: &OutputLock,
    control: &Control,
    job: impl FnOnce() -> Result<T, JobError>,
) -> Result<T, JobError> {
    let timing = config.elastic.timing();
    let place = ControlPlace::of(&config.output.output_dir, &timing)?;
    let (store, (lease, _)) = take_alone(config, &place, lock)?;
    patiently(&place, &|| control.stops(), || {
        forget_job(&place)?;
        // A coordinator that leads here later begins from the checkpoints, not from the world of an earlier job.
        let generation = store.read_record().map_err(ControlPlaneError::from)?.generation;
        let record = Record { term: lease.term, generation, ..Record::default() };
        Ok(store.write_record(&record).map_err(ControlPlaneError::from)?)
    })?;
    let claim = CheckpointClaim::take(&config.output, &place, &|| control.stops())?;
    let (store, interval) = (&*store, timing.lease_renewal);
    scope(|threads| {
        let (end, ended) = channel();
        let renewing = Builder::new().name("lease".into());
        let renewing = renewing.spawn_scoped(threads, move || {
            let loss = || claim.as_ref().and_then(CheckpointClaim::loss);
            if !renew(store, &mut (lease, Instant::now()), interval, &ended, &|| loss().is_some()) {
                loss().into_iter().for_each(|loss| tracing::error!("{loss}"));
                control.stop();
            }
        });
        renewing.map_err(ControlPlaneError::cannot("start a thread that renews the lease"))?;
        let done = job();
        drop::<Sender<()>>(end);
        done
    })
}

/// A lease that is renewed until its holder takes it, or drops this.
#[derive(Debug)]
pub(super) struct HeldLease {
    end: Sender<()>,
    renewing: JoinHandle<(Lease, Instant)>,
}

impl HeldLease {
    /// Renews a lease, requested at this time, on a thread.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(super) fn hold(
        store: SharedStore,
        mut held: (Lease, Instant),
        interval: Duration,
    ) -> Result<HeldLease, ControlPlaneError> {
        let (end, ended) = channel();
        let renewing = Builder::new().name("lease".into()).spawn(move || {
            // Whoever takes the lease finds out that it is lost when it renews it.
            let _ = renew(&*store, &mut held, interval, &ended, &|| false);
            held
        });
        Ok(HeldLease {
            end,
            renewing: renewing.map_err(ControlPlaneError::cannot("start a thread that renews the lease"))?,
        })
    }

    /// Ends the renewals. Returns the lease, and when it was last requested.
    pub(super) fn take(self) -> (Lease, Instant) {
        drop(self.end);
        self.renewing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Renews the lease until the sender is dropped. Returns false when another job has taken it, or is found to have displaced this
/// one: this process was paused for too long.
fn renew(
    store: &dyn Store,
    held: &mut (Lease, Instant),
    interval: Duration,
    ended: &Receiver<()>,
    is_displaced: &dyn Fn() -> bool,
) -> bool {
    while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        if is_displaced() {
            return false;
        }
        let (asked, next) = (Instant::now(), Lease { beat: held.0.beat + 1, ..held.0 });
        match store.replace_lease(held.0, next) {
            Ok(Ok(renewed)) => *held = (renewed, asked),
            Ok(Err(other)) if other == next => *held = (next, asked),
            Ok(Err(other)) => {
                tracing::error!(?other, "another job has taken the output folder");
                return false;
            }
            // The next try shows whether the lease was written.
            Err(error) => tracing::warn!(%error, "cannot renew the lease; retrying"),
        }
    }
    true
}

/// Takes the lease of a folder, which this process has locked, for a job on this machine alone.
///
/// # Errors
/// When a coordinator is active in the folder, or ranks of an earlier job are, or the store cannot be used.
pub(super) fn take_alone(
    config: &JobConfig,
    place: &ControlPlace,
    lock: &OutputLock,
) -> Result<(SharedStore, (Lease, Instant)), JobError> {
    let (store, goes_on) = (place.store()?, || false);
    let in_use = || JobError::InUse { path: config.output.output_dir.clone() };
    let read = || Ok(store.read_lease().map_err(ControlPlaneError::from)?);
    let mut seen = patiently(place, &goes_on, read)?;
    // A job on one machine holds the lock as long as it renews its lease, where the file system has locks. The lock of a folder
    // says nothing about other machines that use the same object store.
    let is_over = if seen.holder == ALONE {
        seen == Lease::default() || lock.is_exclusive() && !config.output.is_remote()
    } else {
        patiently(place, &goes_on, || Ok(store.read_record().map_err(ControlPlaneError::from)?))?.ending.is_some()
    };
    if !is_over {
        let is_alive = Cell::new(false);
        let timing = config.elastic.timing();
        let watched = patiently(place, &goes_on, || {
            standby::wait(&*store, &timing, &|| is_alive.get(), &mut || is_alive.set(true))
        })?;
        let Watched::Vacant(lease) = watched else { return Err(in_use()) };
        seen = lease;
    }
    RankLock::await_end_of_ranks(&config.output.folder())?;
    // Without ranks, the record of a job on one machine tells nothing that its checkpoints do not.
    let is_own = seen.holder == ALONE && lock.is_exclusive() && !config.output.is_remote();
    if is_own && store.replace_damaged_record().map_err(ControlPlaneError::from)? {
        tracing::warn!("the record of the last run was damaged and is replaced; no checkpoint is lost");
    }
    let lease = patiently(place, &goes_on, || claim(&*store, seen, ALONE))?.ok_or_else(in_use)?;
    Ok((store, lease))
}

/// Takes the lease for the next term, unless another candidate took it first.
pub(super) fn claim(store: &dyn Store, seen: Lease, candidate: u32) -> Result<Option<(Lease, Instant)>, JobError> {
    let (asked, lease) = (Instant::now(), Lease { term: seen.term.next(), holder: candidate, beat: 0 });
    Ok(store.replace_lease(seen, lease).map_err(ControlPlaneError::from)?.ok().map(|lease| (lease, asked)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_actors::store::memory::Memory;
    use phalanx_strategies::elastic::identity::Term;

    const INTERVAL: Duration = Duration::from_millis(1);

    #[test]
    fn lease_is_renewed_until_the_job_ends_and_a_lost_one_stops_the_job() {
        let store = Memory::default();
        let lease = Lease { term: Term(1), ..Lease::default() };
        store.replace_lease(Lease::default(), lease).unwrap().unwrap();
        let (end, ended) = channel();

        scope(|threads| {
            let store = &store;
            let renewing =
                threads.spawn(move || renew(store, &mut (lease, Instant::now()), INTERVAL, &ended, &|| false));
            while store.read_lease().unwrap().beat < 3 {
                std::thread::sleep(INTERVAL);
            }
            drop(end);
            assert!(renewing.join().unwrap());
        });

        let (_end, ended) = channel();
        let before = store.read_lease().unwrap();
        store.replace_lease(before, Lease { term: Term(2), ..lease }).unwrap().unwrap();
        assert!(!renew(&store, &mut (before, Instant::now()), INTERVAL, &ended, &|| false));
    }

    #[test]
    fn lease_is_renewed_until_its_holder_takes_it() {
        let store: SharedStore = std::sync::Arc::new(Memory::default());
        let lease = Lease { term: Term(1), ..Lease::default() };
        store.replace_lease(Lease::default(), lease).unwrap().unwrap();
        let begin = Instant::now();

        let held = HeldLease::hold(store.clone(), (lease, begin), INTERVAL).unwrap();
        while store.read_lease().unwrap().beat < 3 {
            std::thread::sleep(INTERVAL);
        }
        let (taken, asked) = held.take();

        assert!(taken.beat >= 3 && asked > begin);
        assert_eq!(store.read_lease(), Ok(taken));
    }
}
