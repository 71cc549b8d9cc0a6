//! The device thread, on which programs run, and its thread pool.

use crate::team::Team;
use phalanx_device::ThreadError;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::OnceLock;

thread_local! {
    /// The team of a device thread and the other threads of its pool.
    static TEAM: RefCell<Option<Rc<Team>>> = const { RefCell::new(None) };
}

/// Number of cores available to this process.
pub(crate) fn available_threads() -> usize {
    // Cached: the query takes a dozen system calls, and compilation repeats it for every attention.
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Runs `work` on this thread; if it is a device thread, its pool stays awake for the kernels.
pub(crate) fn with_team<R>(work: impl FnOnce() -> R) -> R {
    match TEAM.with_borrow(Option::clone) {
        Some(team) => team.lead(work),
        None => work(),
    }
}

/// Runs `work` on a new thread in a pool of `n_threads`, itself included, and waits for it.
///
/// The thread is a member of the pool, not a client: its tasks go through its own queue, which neither locks nor
/// allocates; a client's injections do both.
///
/// # Errors
/// When the system refuses the threads.
pub(crate) fn on_device_thread<R: Send>(n_threads: usize, work: impl FnOnce() -> R + Send) -> Result<R, ThreadError> {
    std::thread::scope(|scope| {
        let lead = || {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .use_current_thread()
                .thread_name(|i| format!("compute-{i}"))
                .build()
                .map_err(|source| ThreadError::Pool { n_threads, source: source.into() })?;
            // A thread's first attempt to steal work registers it with the queues' memory reclamation, which allocates.
            // Pinning does this now, and not in the middle of a later step.
            pool.broadcast(|_| drop(crossbeam_epoch::pin()));
            TEAM.set(Some(Rc::new(Team::new(n_threads))));
            Ok(pool.install(work))
        };
        let thread = std::thread::Builder::new().name("device".into()).stack_size(8 << 20);
        let handle = thread.spawn_scoped(scope, lead).map_err(ThreadError::Spawn)?;
        handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_thread_runs_in_a_pool_of_the_requested_size() {
        let n = on_device_thread(3, rayon::current_num_threads).unwrap();
        assert_eq!(n, 3);
    }
}
