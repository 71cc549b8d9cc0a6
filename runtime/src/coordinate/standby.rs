//! A coordinator in waiting. It watches the active coordinator's lease, does not listen, and takes over once the lease
//! has expired: then nodes find it at one of the addresses that they know.
//!
//! Any coordinator begins so. Started where none is it has nothing to wait for; started again after it was killed it waits
//! for its own last lease to run out.

use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::store::Store;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::timing::Timing;
use std::time::Instant;

/// How the waiting has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// Nobody coordinates; the lease is the last one that somebody held.
    Vacant(Lease),
    /// The job has ended under the other coordinator, or this one was asked to stop.
    NotNeeded,
}

/// Waits until no coordinator is active. Calls `stands_by` once another coordinator is known to be active.
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
    // A lease of no term was never held.
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
        // Long enough that a busy machine renews a lease in time.
        Timing::derive(Duration::from_millis(500))
    }

    fn lease(beat: u64) -> Lease {
        Lease { term: Term(1), holder: 7, beat }
    }

    /// Renews a lease so often, and calls `then` at the end.
    fn renewed(store: &Memory, n: u64, then: impl FnOnce() + Send) -> (Result<Watched, JobError>, Instant, u32) {
        let begin = Instant::now();
        store.replace_lease(Lease::default(), lease(0)).unwrap().unwrap();
        let mut n_said = 0;
        let watched = std::thread::scope(|scope| {
            scope.spawn(|| {
                for beat in 0..n {
                    std::thread::sleep(timing().lease_renewal);
                    store.replace_lease(lease(beat), lease(beat + 1)).unwrap().unwrap();
                }
                then();
            });
            wait(store, &timing(), &|| false, &mut || n_said += 1)
        });
        (watched, begin, n_said)
    }

    #[test]
    fn where_nobody_ever_coordinated_it_begins_at_once() {
        let watched = wait(&Memory::default(), &timing(), &|| false, &mut || panic!("there is nobody")).unwrap();

        assert_eq!(watched, Watched::Vacant(Lease::default()));
    }

    #[test]
    fn a_lease_that_is_renewed_is_waited_for_until_it_is_not() {
        let (watched, begin, n_said) = renewed(&Memory::default(), 9, || {});

        assert_eq!((watched.unwrap(), n_said), (Watched::Vacant(lease(9)), 1));
        assert!(begin.elapsed() >= 9 * timing().lease_renewal + timing().lease);
    }

    #[test]
    fn a_job_that_ends_needs_no_other_coordinator() {
        let store = Memory::default();
        let ends = || {
            let ending = Some(Ending::Finished);
            assert!(store.write_record(&Record { term: Term(1), ending, ..Record::default() }).unwrap());
        };

        assert_eq!(renewed(&store, 9, ends).0.unwrap(), Watched::NotNeeded);
    }

    #[test]
    fn waiting_member_can_be_released() {
        let (store, asked) = (Memory::default(), AtomicBool::new(false));
        store.replace_lease(Lease::default(), lease(0)).unwrap().unwrap();

        let stops = || asked.swap(true, Ordering::AcqRel);

        assert_eq!(wait(&store, &timing(), &stops, &mut || ()).unwrap(), Watched::NotNeeded);
    }
}
