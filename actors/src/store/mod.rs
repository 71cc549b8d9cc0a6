//! The durable store of coordinators: the lease, and the record of decisions.
//!
//! Invariants:
//! - `STORE-1` The lease is replaced only if it equals the one that the writer has read; all writes are serialized.
//! - `STORE-2` A record is written only under the term of the lease. So the record that a new leader reads after winning
//!   the lease is final: only this leader can overwrite it.
//! - `STORE-3` A completed write survives a power failure; an interrupted write leaves the complete old or new contents.
//!   A damaged record is an error, never an older state; a damaged lease is that of nobody. Only renewals of a lease need not
//!   survive a power failure: no leader survives it either, and terms do not depend on them.
//!
//! Calls block; actors make them in `spawn_blocking`.

pub mod conditional;
pub mod directory;
pub mod memory;
pub(crate) mod sealed;

use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

/// The store of a job. See the [module](self).
pub trait Store: Debug + Send + Sync + 'static {
    /// The lease, or the default if none was written.
    ///
    /// # Errors
    /// When the lease cannot be read.
    fn read_lease(&self) -> Result<Lease, StoreError>;

    /// Replaces the lease if it equals `old` (`STORE-1`). Returns the current lease: `Ok(new)`, or `Err` of another one.
    ///
    /// # Errors
    /// When it is unknown whether the old or the new value is stored.
    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError>;

    /// The record, or the default if none was written.
    ///
    /// # Errors
    /// When the record cannot be read.
    fn read_record(&self) -> Result<Record, StoreError>;

    /// Replaces the record, unless another term has begun (`STORE-2`). Returns whether the record was replaced.
    ///
    /// # Errors
    /// When it is unknown whether the old or the new record is stored; the same record may be written again.
    fn write_record(&self, record: &Record) -> Result<bool, StoreError>;

    /// Replaces a damaged record with an empty one; the caller knows that no process of the job lives. Returns whether it was damaged.
    ///
    /// # Errors
    /// When the store fails.
    fn replace_damaged_record(&self) -> Result<bool, StoreError> {
        Ok(false)
    }
}

/// A store shared by several candidates.
pub type SharedStore = Arc<dyn Store>;

/// Why a store did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// An operation on a file or folder failed.
    #[error("{path} could not be {action}: {message}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The operation, as a participle.
        action: &'static str,
        /// The system's error.
        message: String,
    },
    /// The contents of a file are invalid.
    #[error(
        "{path} is damaged: {found}; no checkpoint is lost: end all processes of the job and remove {path}*, and the job \
         begins again from its newest checkpoint"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The defect.
        found: String,
    },
    /// Another process has replaced an object since this one read it: it leads the job now.
    #[error("another coordinator has replaced {path} since this one read it")]
    Replaced {
        /// The object.
        path: PathBuf,
    },
}

/// Reopens an ended job, which then continues from its checkpoint. Call it before any candidate starts. Returns whether the
/// job had ended.
///
/// # Errors
/// When the store fails.
pub fn reopen(store: &dyn Store) -> Result<bool, StoreError> {
    let record = store.read_record()?;
    if record.ending.is_none() {
        return Ok(false);
    }
    let term = store.read_lease()?.term;
    store.write_record(&Record { term, ..record.reopened() })
}

/// `STORE-2`
fn is_of_lease(record: &Record, lease: Lease) -> bool {
    record.term == lease.term && record.term > Term(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::elastic::identity::Generation;
    use phalanx_strategies::elastic::message::Ending;

    fn lease(term: u64, beat: u64) -> Lease {
        Lease { term: Term(term), holder: 1, beat }
    }

    fn record(term: u64, generation: u64) -> Record {
        Record { term: Term(term), generation: Generation(generation), ..Record::default() }
    }

    fn stores() -> (tempfile::TempDir, Vec<SharedStore>) {
        let folder = tempfile::tempdir().unwrap();
        let memory: SharedStore = Arc::new(memory::Memory::default());
        let conditional = conditional::tests::over(conditional::tests::ObjectsInMemory::default());
        let in_folder = in_folder(folder.path());
        (folder, vec![memory, in_folder, Arc::new(conditional)])
    }

    fn in_folder(folder: &std::path::Path) -> SharedStore {
        Arc::new(directory::open_store(folder).unwrap())
    }

    // STORE-1
    #[test]
    fn lease_is_replaced_only_if_it_equals_the_expected_one() {
        let (_folder, stores) = stores();
        for store in stores {
            assert_eq!(store.read_lease(), Ok(Lease::default()), "{store:?}");
            assert_eq!(store.replace_lease(Lease::default(), lease(1, 0)), Ok(Ok(lease(1, 0))));
            assert_eq!(store.replace_lease(Lease::default(), lease(2, 0)), Ok(Err(lease(1, 0))));
            assert_eq!(store.replace_lease(lease(1, 0), lease(1, 1)), Ok(Ok(lease(1, 1))));
            assert_eq!(store.read_lease(), Ok(lease(1, 1)));
        }
    }

    // STORE-2
    #[test]
    fn record_of_another_term_is_refused() {
        let (_folder, stores) = stores();
        for store in stores {
            store.replace_lease(Lease::default(), lease(1, 0)).unwrap().unwrap();
            assert_eq!(store.write_record(&record(1, 4)), Ok(true), "{store:?}");
            store.replace_lease(lease(1, 0), lease(2, 0)).unwrap().unwrap();

            assert_eq!(store.write_record(&record(1, 5)), Ok(false));
            assert_eq!(store.write_record(&record(3, 5)), Ok(false));

            assert_eq!(store.read_record(), Ok(record(1, 4)));
            assert_eq!(store.write_record(&record(2, 5)), Ok(true));
            assert_eq!(store.read_record(), Ok(record(2, 5)));
        }
    }

    #[test]
    fn ended_job_is_reopened_once() {
        let (_folder, stores) = stores();
        for store in stores {
            store.replace_lease(Lease::default(), lease(1, 0)).unwrap().unwrap();
            let ended = Record { ending: Some(Ending::Finished), ..record(1, 4) };
            store.write_record(&ended).unwrap();
            store.replace_lease(lease(1, 0), lease(2, 0)).unwrap().unwrap();

            assert_eq!(reopen(&*store), Ok(true));
            assert_eq!(store.read_record(), Ok(Record { began: Generation(4), ..record(2, 4) }));
            assert_eq!(reopen(&*store), Ok(false));
        }
    }

    // STORE-1
    #[test]
    fn one_candidate_wins_each_term() {
        let (folder, _) = stores();
        one_wins_each_term(&|| in_folder(folder.path()));
        let objects = conditional::tests::ObjectsInMemory::default();
        one_wins_each_term(&|| Arc::new(conditional::tests::over(objects.clone())));
    }

    fn one_wins_each_term(open: &dyn Fn() -> SharedStore) {
        let candidate = |holder: u32| {
            let store = open();
            std::thread::spawn(move || {
                let mut won = vec![];
                for _ in 0..20 {
                    let old = store.read_lease().unwrap();
                    let new = Lease { term: old.term.next(), holder, beat: 0 };
                    if store.replace_lease(old, new).is_ok_and(|replaced| replaced.is_ok()) {
                        won.push(new.term);
                    }
                }
                won
            })
        };

        let threads: Vec<_> = (0..4).map(candidate).collect();
        let mut won: Vec<Term> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();

        won.sort_unstable();
        let distinct: std::collections::BTreeSet<Term> = won.iter().copied().collect();
        assert_eq!(won, Vec::from_iter(distinct));
        assert!(won.len() >= 20 && open().read_lease().unwrap().term >= won[won.len() - 1]);
    }
}
