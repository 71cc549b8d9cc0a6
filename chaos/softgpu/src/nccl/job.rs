//! The job of a group of calls on communicators that do not block: a thread that does their work, and that a later call joins.
//!
//! It is as in NCCL 2.28.9 (`group.cc`, `ncclCommEnsureReady` in `init.cc`), faults included. The communicators of a group
//! count the uses of its job. A look at the state that finds success completes the job, and the communicator forgets it. A
//! call on a communicator whose abort flag is set ends the job, and the communicator does *not* forget it: the next such call
//! uses freed memory, and ends the process here. A communicator that has not forgotten a job takes no other one.

use super::communicator::Communicator;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard};

/// Exit code when NCCL uses memory that it has freed.
const FREED: i32 = 88;

/// The job of a group. It is freed with its last use.
#[derive(Default)]
pub struct Job {
    n_uses: AtomicUsize,
}

/// The job that a communicator has not forgotten.
#[derive(Default)]
pub struct Pending(Mutex<Option<Arc<Job>>>);

impl Pending {
    fn job(&self) -> MutexGuard<'_, Option<Arc<Job>>> {
        self.0.lock().expect("nothing panics here")
    }

    /// Completes the job after a success, and forgets it.
    pub fn complete(&self) {
        if let Some(job) = self.job().take() {
            job.release();
        }
    }

    /// Ends the job because the communicator's abort flag is set.
    pub fn abort(&self) {
        if let Some(job) = self.job().as_ref() {
            job.release();
        }
    }
}

impl Job {
    /// Gives the communicators that do not block, and that have no job, a common one.
    pub fn start<'a>(communicators: impl Iterator<Item = &'a Arc<Communicator>>) {
        let job = Arc::new(Job::default());
        for communicator in communicators.filter(|c| !c.is_blocking) {
            communicator.pending.job().get_or_insert_with(|| {
                job.n_uses.fetch_add(1, SeqCst);
                job.clone()
            });
        }
    }

    fn release(&self) {
        let counted = self.n_uses.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        if counted.is_err() {
            super::report("use after free: the job of a group was ended before, and its communicator refers to it");
            // SAFETY: ends the process at once, as a fault of memory does.
            unsafe { libc::_exit(FREED) };
        }
    }
}
