//! Accesses to the memory of operands outside of their group's lock.
//!
//! A thread that holds the group's lock finds an operation in its stream, enters the gate and lets go of the lock; copies and sums
//! then delay no other thread of the group. Whoever takes operations out of their streams before they are complete passes the gate
//! before the owner of the memory learns of it. Accesses never wait for a peer, so passing takes microseconds.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// The accesses that are under way.
#[derive(Debug, Default)]
pub(super) struct Gate(RwLock<()>);

impl Gate {
    /// Begins an access, which ends when the result is dropped.
    pub(super) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of all accesses that have begun. The caller does not hold the group's lock.
    pub(super) fn pass(&self) {
        drop(self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn passing_waits_for_the_accesses_that_have_begun() {
        let (gate, is_over) = (Gate::default(), AtomicBool::new(false));
        let access = gate.enter();

        std::thread::scope(|scope| {
            let passer = scope.spawn(|| {
                gate.pass();
                is_over.load(Ordering::SeqCst)
            });
            std::thread::sleep(Duration::from_millis(20));
            is_over.store(true, Ordering::SeqCst);
            drop(access);

            assert!(passer.join().unwrap(), "passed during an access");
        });
    }
}
