//! A standby coordinator. It watches the active coordinator's lease, does not listen, and takes over once the lease has
//! expired; nodes then find it at one of their configured addresses.
//!
//! Every coordinator starts as a standby. The first one takes over at once; one that restarts after it was killed waits until
//! its own last lease expires.

use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::store::Store;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::timing::Timing;
use std::time::Instant;

/// The outcome of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// No coordinator is active; this is the last lease.
    Vacant(Lease),
    /// The job ended under the other coordinator, or this one was stopped.
    NotNeeded,
}

/// Waits until no coordinator is active. Calls `stands_by` when it first detects another active coordinator.
///
/// # Errors
/// When the store cannot be read.
pub(crate) fn wait(
    store: &impl Store,
    timing: &Timing,
    stops: &dyn Fn() -> bool,
    stands_by: &mut dyn FnMut(),
) -> Result<Watched, JobError> {
    let (mut seen, mut since) = (store.read_lease().map_err(ControlPlaneError::from)?, Instant::now());
    let mut is_alive = false;
    // The default lease means that no coordinator has held one.
    while seen != Lease::default() && since.elapsed() < timing.lease {
        if stops() {
            return Ok(Watched::NotNeeded);
        }
        std::thread::sleep(timing.lease_renewal / 2);
        let lease = store.read_lease().map_err(ControlPlaneError::from)?;
        if lease == seen {
            continue;
        }
        (seen, since) = (lease, Instant::now());
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
    use phalanx_actors::store::memory::Memory;
    use phalanx_strategies::elastic::identity::Term;
    use phalanx_strategies::elastic::message::{Ending, Record};
    use std::sync::atomic::{AtomicBool, Ordering};
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
