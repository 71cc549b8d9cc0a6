//! Patience of a starting coordinator with the object store of its job, as that of checkpoints.

use crate::control_place::ControlPlace;
use crate::error::JobError;
use phalanx_actors::store::StoreError;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// No attempt begins later than this after the first.
const TOTAL: Duration = Duration::from_secs(60);
/// The first pause; each further one is twice as long, up to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Repeats an attempt while the object store does not answer, unless this coordinator is stopped. A folder answers at once.
///
/// # Errors
/// The last error of the attempt.
pub(super) fn patiently<T>(
    place: &ControlPlace,
    stops: &dyn Fn() -> bool,
    mut attempt: impl FnMut() -> Result<T, JobError>,
) -> Result<T, JobError> {
    let (begin, mut pause) = (Instant::now(), PAUSES.0);
    loop {
        match attempt() {
            Err(error)
                if matches!(place, ControlPlace::Objects(_))
                    && passes(&error)
                    && begin.elapsed() < TOTAL
                    && !stops() =>
            {
                tracing::warn!(%error, "the object store does not answer; retrying");
                // The standard library seeds each hasher at random.
                let share = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
                std::thread::sleep(pause.mul_f64(0.5 + share / 2.0));
                pause = (2 * pause).min(PAUSES.1);
            }
            done => return done,
        }
    }
}

/// Whether an error may pass: the store was silent, or a document was replaced by an earlier leader that had not yet found out
/// that it leads no more. The next attempt reads the document again.
fn passes(error: &JobError) -> bool {
    let JobError::ControlPlane(error) = error else { return false };
    matches!(error.of_store(), Some(StoreError::Io { .. } | StoreError::Replaced { .. }))
}
