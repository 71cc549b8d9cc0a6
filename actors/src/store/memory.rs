//! A store in the memory of its process, for tests and for jobs that end with their coordinator.

use super::{Store, StoreError, is_of_lease};
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lease and a record that end with the process.
#[derive(Debug, Default)]
pub struct Memory(Mutex<(Lease, Record)>);

impl Memory {
    fn lock(&self) -> MutexGuard<'_, (Lease, Record)> {
        // Each write is one assignment, so a panic cannot leave a partial write.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Memory {
    fn read_lease(&self) -> Result<Lease, StoreError> {
        Ok(self.lock().0)
    }

    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
        let mut state = self.lock();
        if state.0 != old {
            return Ok(Err(state.0));
        }
        state.0 = new;
        Ok(Ok(new))
    }

    fn read_record(&self) -> Result<Record, StoreError> {
        Ok(self.lock().1.clone())
    }

    fn write_record(&self, record: &Record) -> Result<bool, StoreError> {
        let mut state = self.lock();
        let accepted = is_of_lease(record, state.0);
        if accepted {
            state.1 = record.clone();
        }
        Ok(accepted)
    }
}
