//! The lease of a job without a coordinator: its ranks are threads of this process. It is the same lease as a coordinator's, so
//! that no other job of any kind begins in the folder.

use crate::config::JobConfig;
use crate::control::Control;
use crate::coordinate::serve::{forget_job, take_alone};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::node::shared_folder::CONTROL;
use crate::train::output_lock::OutputLock;
use phalanx_actors::store::Store;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

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
    let (store, (lease, _)) = take_alone(config, lock)?;
    forget_job(&config.output.output_dir.join(CONTROL))?;
    // A coordinator that leads here later begins from the checkpoints, not from the world of an earlier job.
    let generation = store.read_record().map_err(ControlPlaneError::from)?.generation;
    let record = Record { term: lease.term, generation, ..Record::default() };
    store.write_record(&record).map_err(ControlPlaneError::from)?;
    let (store, interval) = (&store, config.elastic.timing().lease_renewal);
    scope(|threads| {
        let (end, ended) = channel();
        let renewing = Builder::new().name("lease".into());
        let renewing = renewing.spawn_scoped(threads, move || renew(store, lease, interval, &ended, control));
        renewing.map_err(ControlPlaneError::cannot("start a thread that renews the lease"))?;
        let done = job();
        drop::<std::sync::mpsc::Sender<()>>(end);
        done
    })
}

/// Renews the lease until the sender is dropped. A lease that another job has taken stops this one: its process was paused
/// for too long.
fn renew(store: &impl Store, mut held: Lease, interval: Duration, ended: &Receiver<()>, control: &Control) {
    while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        let next = Lease { beat: held.beat + 1, ..held };
        match store.replace_lease(held, next) {
            Ok(Ok(renewed)) => held = renewed,
            Ok(Err(other)) if other == next => held = next,
            Ok(Err(other)) => {
                tracing::error!(?other, "another job has taken the output folder; stopping this one");
                control.stop();
                return;
            }
            // The next try shows whether the lease was written.
            Err(error) => tracing::warn!(%error, "cannot renew the lease; retrying"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_actors::store::memory::Memory;
    use phalanx_strategies::elastic::identity::Term;

    const INTERVAL: Duration = Duration::from_millis(1);

    #[test]
    fn lease_is_renewed_until_the_job_ends_and_a_lost_one_stops_the_job() {
        let (store, control) = (Memory::default(), Control::default());
        let lease = Lease { term: Term(1), ..Lease::default() };
        store.replace_lease(Lease::default(), lease).unwrap().unwrap();
        let (end, ended) = channel();

        scope(|threads| {
            let (store, control) = (&store, &control);
            threads.spawn(move || renew(store, lease, INTERVAL, &ended, control));
            while store.read_lease().unwrap().beat < 3 {
                std::thread::sleep(INTERVAL);
            }
            drop(end);
        });
        assert!(!control.stops());

        let (_end, ended) = channel();
        let before = store.read_lease().unwrap();
        store.replace_lease(before, Lease { term: Term(2), ..lease }).unwrap().unwrap();
        renew(&store, before, INTERVAL, &ended, &control);
        assert!(control.stops());
    }
}
