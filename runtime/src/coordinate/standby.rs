//! A standby coordinator. It watches the active coordinator's lease, does not listen, and takes over once the lease has
//! expired; nodes then find it at one of their configured addresses, or at the address that it publishes.
//!
//! Every coordinator starts as a standby. The first one takes over at once; one that restarts after it was killed waits until
//! its own last lease expires.

use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::store::Store;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::timing::Timing;
use std::time::Instant;

/// The candidate number of a job on one machine, which has no standby.
pub(super) const ALONE: u32 = 0;

/// The outcome of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// No coordinator is active; this is the last lease.
    Vacant(Lease),
    /// A job on one machine is active, which nobody takes over.
    Occupied,
    /// The job ended under the other coordinator, or this one was stopped.
    NotNeeded,
}

/// Whether a coordinator renews its lease, seen from here for as long as a standby would wait; `None` if the store does not answer.
pub(super) fn is_renewed(store: &dyn Store, timing: &Timing) -> Option<bool> {
    let before = store.read_lease().ok()?;
    std::thread::sleep(timing.lease);
    Some(store.read_lease().ok()? != before)
}

/// Waits until no coordinator is active. Calls `stands_by` when it first detects another active coordinator.
///
/// A store that fails is read again without limit: this coordinator may be the only one that is left when it returns.
///
/// # Errors
/// When the store cannot be read at first.
pub(crate) fn wait(
    store: &dyn Store,
    timing: &Timing,
    stops: &dyn Fn() -> bool,
    stands_by: &mut dyn FnMut(),
) -> Result<Watched, JobError> {
    let (mut seen, mut since) = (store.read_lease().map_err(ControlPlaneError::from)?, Instant::now());
    let (mut is_alive, mut silent_since) = (false, None);
    // The default lease means that no coordinator has held one.
    while seen != Lease::default() && since.elapsed() < timing.lease {
        if stops() {
            return Ok(Watched::NotNeeded);
        }
        std::thread::sleep(timing.lease_renewal / 2);
        let lease = match store.read_lease() {
            Ok(lease) => lease,
            Err(error) => {
                if silent_since.is_none() {
                    tracing::warn!(%error, "cannot read the lease; retrying");
                }
                // A lease that cannot be read does not expire.
                since = Instant::now();
                silent_since.get_or_insert(since);
                continue;
            }
        };
        if let Some(since) = silent_since.take() {
            tracing::info!(silent_for = ?since.elapsed(), "the lease can be read again");
        }
        if lease == seen {
            continue;
        }
        (seen, since) = (lease, Instant::now());
        if seen.holder == ALONE {
            return Ok(Watched::Occupied);
        }
        if !std::mem::replace(&mut is_alive, true) {
            stands_by();
        }
    }
    let has_ended = is_alive && store.read_record().map_err(ControlPlaneError::from)?.ending.is_some();
    Ok(if has_ended { Watched::NotNeeded } else { Watched::Vacant(seen) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_actors::store::StoreError;
    use phalanx_actors::store::memory::Memory;
    use phalanx_strategies::elastic::identity::Term;
    use phalanx_strategies::elastic::message::{Ending, Record};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    fn timing() -> Timing {
        // Long enough for a busy machine to renew a lease in time.
        Timing::derive(Duration::from_millis(500))
    }

    fn lease(beat: u64) -> Lease {
        Lease { term: Term(1), holder: 7, beat }
    }

    /// Renews a lease `n` times, then calls `then`; also returns the start time and the number of `stands_by` calls.
    fn renewed(store: &Memory, n: u64, then: impl FnOnce() + Send) -> (Result<Watched, JobError>, Instant, u32) {
        let begin = Instant::now();
        store.replace_lease(Lease::default(), lease(0)).unwrap().unwrap();
        let mut n_calls = 0;
        let watched = std::thread::scope(|scope| {
            scope.spawn(|| {
                for beat in 0..n {
                    std::thread::sleep(timing().lease_renewal);
                    store.replace_lease(lease(beat), lease(beat + 1)).unwrap().unwrap();
                }
                then();
            });
            wait(store, &timing(), &|| false, &mut || n_calls += 1)
        });
        (watched, begin, n_calls)
    }

    #[test]
    fn standby_takes_over_at_once_if_no_lease_was_ever_held() {
        let watched =
            wait(&Memory::default(), &timing(), &|| false, &mut || panic!("no coordinator is active")).unwrap();

        assert_eq!(watched, Watched::Vacant(Lease::default()));
    }

    #[test]
    fn standby_waits_until_the_lease_is_no_longer_renewed() {
        let (watched, begin, n_calls) = renewed(&Memory::default(), 9, || {});

        assert_eq!((watched.unwrap(), n_calls), (Watched::Vacant(lease(9)), 1));
        assert!(begin.elapsed() >= 9 * timing().lease_renewal + timing().lease);
    }

    /// A store whose first read of the lease succeeds, and the next ones fail.
    #[derive(Debug)]
    struct Interrupted {
        store: Memory,
        n_reads: AtomicUsize,
    }

    const N_FAILURES: usize = 4;

    impl Store for Interrupted {
        fn read_lease(&self) -> Result<Lease, StoreError> {
            match self.n_reads.fetch_add(1, Ordering::AcqRel) {
                1..=N_FAILURES => Err(StoreError::Damaged { path: "lease".into(), found: "nothing".into() }),
                _ => self.store.read_lease(),
            }
        }
        fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
            self.store.replace_lease(old, new)
        }
        fn read_record(&self) -> Result<Record, StoreError> {
            self.store.read_record()
        }
        fn write_record(&self, record: &Record) -> Result<bool, StoreError> {
            self.store.write_record(record)
        }
    }

    #[test]
    fn standby_outlasts_a_store_that_fails_and_the_lease_does_not_expire_meanwhile() {
        let store = Interrupted { store: Memory::default(), n_reads: AtomicUsize::new(0) };
        store.replace_lease(Lease::default(), lease(0)).unwrap().unwrap();
        let begin = Instant::now();

        let watched = wait(&store, &timing(), &|| false, &mut || panic!("no coordinator is active"));

        assert_eq!(watched.unwrap(), Watched::Vacant(lease(0)));
        assert!(begin.elapsed() >= timing().lease_renewal / 2 * N_FAILURES as u32 + timing().lease);
    }

    #[test]
    fn nobody_stands_by_for_a_job_on_one_machine() {
        let store = Memory::default();
        let alone = |beat| Lease { holder: ALONE, ..lease(beat) };
        store.replace_lease(Lease::default(), alone(0)).unwrap().unwrap();

        let watched = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(timing().lease_renewal);
                store.replace_lease(alone(0), alone(1)).unwrap().unwrap();
            });
            wait(&store, &timing(), &|| false, &mut || panic!("a job on one machine has no standby"))
        });

        assert_eq!(watched.unwrap(), Watched::Occupied);
    }

    #[test]
    fn standby_is_not_needed_after_the_job_has_ended() {
        let store = Memory::default();
        let ends = || {
            let ending = Some(Ending::Finished);
            assert!(store.write_record(&Record { term: Term(1), ending, ..Record::default() }).unwrap());
        };

        assert_eq!(renewed(&store, 9, ends).0.unwrap(), Watched::NotNeeded);
    }

    #[test]
    fn waiting_standby_can_be_stopped() {
        let (store, asked) = (Memory::default(), AtomicBool::new(false));
        store.replace_lease(Lease::default(), lease(0)).unwrap().unwrap();

        let stops = || asked.swap(true, Ordering::AcqRel);

        assert_eq!(wait(&store, &timing(), &stops, &mut || ()).unwrap(), Watched::NotNeeded);
    }
}
