//! A store in objects that are replaced conditionally, such as those of S3, Google Cloud Storage and Azure, and such as the files of a
//! shared folder ([`Directory`](super::directory::Directory)). These cover the clusters that this runtime is for, so there is none
//! over etcd.
//!
//! The lease is one object, the record another one. A renewal, several times a second, thus sends a hundred bytes, however long
//! the record is. Each replacement names the version that it replaces (`If-Match`), or none (`If-None-Match`).
//!
//! - `STORE-1` follows from the conditional replacement of the lease. Its object also names its writer, a random number of the
//!   process, because jobs on one machine all have the same candidate number.
//! - `STORE-2`: the object of the record names the term that may replace it, its **fence**. Whoever wins the lease of a term
//!   raises the fence to that term, and only then has won. Raising the fence is a replacement of the record, so each
//!   replacement that an earlier leader has begun names an older version and fails, however late it arrives. What the earlier
//!   leader has written before is in the record that the new leader reads. The order matters: a fence that rises before the
//!   lease is won would stop a leader that is alive.
//! - `STORE-3`: the objects are replaced whole and keep what they have acknowledged; checksums find the rest.
//!
//! An answer that was lost leaves open which version is stored. The next call reads the object and compares: a lease is
//! recognised by its writer, a record by its content. No content occurs twice (the lease counts its renewals, the record its
//! replacements), so a version that is derived from the content, as many ETags are, names one replacement.
//!
//! A renewal without an answer is given up within a fraction of the lease. No clock is compared with another machine's.
//!
//! While no candidate reaches the store, none can replace the lease: one that cannot read it does not take it over, and the
//! leader that steps down takes it again with its first answer.
//!
//! Source: Lamport 1998, "The part-time parliament" (ballots that fence older ones); RFC 9110 §13 (conditional requests).

use super::sealed::{decode, encode};
use super::{Store, StoreError};
use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Small objects by name, each replaced as a whole and conditionally. Calls block.
pub trait Objects: Debug + Send + Sync + 'static {
    /// An object and its version; `None` if there is none.
    ///
    /// # Errors
    /// When there is no answer within `limit`.
    fn read(&self, name: &str, limit: Duration) -> Result<Option<(Vec<u8>, Version)>, StoreError>;

    /// Replaces an object if it has the version `old` (`None`: if there is no object), and returns its new version.
    /// `None` if the object has another version. Without `is_durable`, a power failure may undo the replacement.
    ///
    /// # Errors
    /// When it is unknown whether the object was replaced; it may be replaced later, too.
    fn replace(&self, name: &str, old: Option<&Version>, bytes: &[u8], is_durable: bool, limit: Duration) -> Replaced;

    /// The location of an object, for errors.
    fn location(&self, name: &str) -> PathBuf;
}

/// The new version of an object; `None` if the object had another one than expected, and is unchanged.
pub type Replaced = Result<Option<Version>, StoreError>;

/// The version of an object, as its store names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The entity tag.
    pub e_tag: Option<String>,
    /// The generation, in stores that count them.
    pub generation: Option<String>,
}

/// A lease and a record as two objects, each replaced only if it is still the version that was read.
#[derive(Debug)]
pub struct Conditional {
    objects: Arc<dyn Objects>,
    limits: Limits,
    writer: u64,
    /// The objects as this process last read or wrote them, unless an answer is missing since.
    lease: Mutex<Option<Known<StoredLease>>>,
    /// The latest term to which this process has raised the fence.
    fenced: Mutex<Term>,
    record: Mutex<Option<Known<StoredRecord>>>,
    documents: Mutex<BTreeMap<String, Option<Version>>>,
    /// Whether a damaged lease was reported.
    has_warned: AtomicBool,
}

/// How long requests may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    lease: Duration,
    others: Duration,
}

/// Lower bound for requests that no lease waits for.
const LIMIT_MIN: Duration = Duration::from_secs(2);
/// Attempts of a replacement that meets another version each time.
const ATTEMPTS: usize = 4;
/// The holder of a lease that is damaged: no candidate.
const NOBODY: u32 = u32::MAX;

pub(super) const LEASE: &str = "lease.json";
pub(super) const RECORD: &str = "record.json";

/// An object, and the version to replace; `None` if it does not exist.
#[derive(Clone, Debug)]
struct Known<T> {
    value: T,
    version: Option<Version>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredLease {
    lease: Lease,
    writer: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredRecord {
    /// The term that may replace the record.
    fence: Term,
    /// Counts replacements.
    number: u64,
    record: Record,
}

impl Conditional {
    /// A store over these objects, for leases of this length.
    pub fn new(objects: Arc<dyn Objects>, lease: Duration) -> Conditional {
        let limits = Limits { lease: lease / 2, others: lease.max(LIMIT_MIN) };
        let (lease, fenced, record, documents) = Default::default();
        // The standard library seeds each hasher at random.
        let writer = RandomState::new().hash_one(std::process::id());
        let has_warned = AtomicBool::new(false);
        Conditional { objects, limits, writer, lease, fenced, record, documents, has_warned }
    }

    /// The location of an object, for errors.
    pub fn location(&self, name: &str) -> PathBuf {
        self.objects.location(name)
    }

    /// Reads a small document of the job's leader, such as its register of nodes; `None` if there is none.
    ///
    /// # Errors
    /// When the document cannot be read.
    pub fn read_document(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.objects.read(name, self.limits.others)?;
        let (bytes, version) = found.map_or((None, None), |(bytes, version)| (Some(bytes), Some(version)));
        locked(&self.documents).insert(name.to_owned(), version);
        Ok(bytes)
    }

    /// Replaces a document that nobody else has replaced since this process read or wrote it: a leader that has lost the lease
    /// cannot undo what its successor writes.
    ///
    /// # Errors
    /// When another process has replaced the document, or it is unknown whether it was replaced.
    pub fn write_document(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let known = locked(&self.documents).remove(name);
        let version = match known {
            Some(version) => version,
            None => self.objects.read(name, self.limits.others)?.map(|(_, version)| version),
        };
        if let Some(version) = self.objects.replace(name, version.as_ref(), bytes, true, self.limits.others)? {
            locked(&self.documents).insert(name.to_owned(), Some(version));
            return Ok(());
        }
        match self.objects.read(name, self.limits.others)? {
            // An earlier attempt, whose answer was lost.
            Some((found, version)) if found == bytes => {
                locked(&self.documents).insert(name.to_owned(), Some(version));
                Ok(())
            }
            _ => Err(StoreError::Replaced { path: self.objects.location(name) }),
        }
    }

    /// The contents of an object, or their defect.
    fn fetch<T: serde::de::DeserializeOwned + Default>(
        &self,
        name: &str,
        limit: Duration,
    ) -> Result<Known<Result<T, String>>, StoreError> {
        let Some((bytes, version)) = self.objects.read(name, limit)? else {
            return Ok(Known { value: Ok(T::default()), version: None });
        };
        let text = String::from_utf8(bytes).map_err(|error| error.to_string());
        Ok(Known { value: text.and_then(|text| decode(&text)), version: Some(version) })
    }

    /// The lease. A damaged one, as of an interrupted copy of its folder, reads as that of nobody: candidates take it over once
    /// it was not renewed for as long as any other.
    fn fetch_lease(&self) -> Result<Known<StoredLease>, StoreError> {
        let Known { value, version } = self.fetch::<StoredLease>(LEASE, self.limits.lease)?;
        let value = match value {
            Ok(lease) => lease,
            Err(found) => {
                // Later than every term that has written the record.
                let term = self.fetch_record()?.value.fence.next();
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    let path = self.objects.location(LEASE);
                    tracing::warn!(path = %path.display(), found, "the lease is damaged; the next leader replaces it, and nothing is lost");
                }
                StoredLease { lease: Lease { term, holder: NOBODY, beat: 0 }, writer: 0 }
            }
        };
        Ok(Known { value, version })
    }

    fn fetch_record(&self) -> Result<Known<StoredRecord>, StoreError> {
        let Known { value, version } = self.fetch::<StoredRecord>(RECORD, self.limits.others)?;
        let checked = value.and_then(|value| match value.record.check() {
            Ok(()) => Ok(value),
            Err(error) => Err(error.to_string()),
        });
        let damaged = |found| StoreError::Damaged { path: self.objects.location(RECORD), found };
        Ok(Known { value: checked.map_err(damaged)?, version })
    }

    /// Replaces the record and remembers it; false if it has another version than the known one.
    fn put_record(
        &self,
        known: &mut Option<Known<StoredRecord>>,
        version: Option<&Version>,
        value: StoredRecord,
    ) -> Result<bool, StoreError> {
        let text = encode(&value);
        let replaced = self.objects.replace(RECORD, version, text.as_bytes(), true, self.limits.others)?;
        let is_replaced = replaced.is_some();
        *known = replaced.map(|version| Known { value, version: Some(version) });
        Ok(is_replaced)
    }

    /// Raises the fence of the record to this term, whose lease this process has won (`STORE-2`); once for each term.
    fn raise_fence(&self, term: Term) -> Result<(), StoreError> {
        let mut fenced = locked(&self.fenced);
        if *fenced < term {
            self.raise_fence_to(term)?;
            *fenced = term;
        }
        Ok(())
    }

    fn raise_fence_to(&self, term: Term) -> Result<(), StoreError> {
        let mut known = locked(&self.record);
        for _ in 0..ATTEMPTS {
            let Known { value, version } = self.fetch_record()?;
            // An earlier attempt raised it, or a later term has begun, which the next renewal shows.
            if value.fence >= term {
                *known = Some(Known { value, version });
                return Ok(());
            }
            let raised = StoredRecord { fence: term, number: value.number + 1, record: value.record };
            if self.put_record(&mut known, version.as_ref(), raised)? {
                return Ok(());
            }
        }
        Err(self.contended(RECORD))
    }

    fn contended(&self, name: &str) -> StoreError {
        let message = format!("{ATTEMPTS} attempts met another version each");
        StoreError::Io { path: self.objects.location(name), action: "replaced", message }
    }
}

impl Store for Conditional {
    fn read_lease(&self) -> Result<Lease, StoreError> {
        let found = self.fetch_lease()?;
        let StoredLease { lease, writer } = locked(&self.lease).insert(found).value;
        // A candidate that finds its own lease leads, also if the answer to the write was lost before the fence was raised.
        if writer == self.writer {
            self.raise_fence(lease.term)?;
        }
        Ok(lease)
    }

    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
        let wanted = StoredLease { lease: new, writer: self.writer };
        let mut known = locked(&self.lease);
        for _ in 0..ATTEMPTS {
            let Known { value, version } = match known.take().filter(|known| known.value.lease == old) {
                Some(known) => known,
                None => self.fetch_lease()?,
            };
            let is_own = value == wanted;
            if !is_own && value.lease != old {
                let lease = value.lease;
                *known = Some(Known { value, version });
                return Ok(Err(lease));
            }
            let version = if is_own {
                version
            } else {
                let text = encode(&wanted);
                // A renewal shows that the leader is alive, and after a power failure no leader is.
                let is_renewal = (new.term, new.holder) == (old.term, old.holder);
                self.objects.replace(LEASE, version.as_ref(), text.as_bytes(), !is_renewal, self.limits.lease)?
            };
            if version.is_some() {
                *known = Some(Known { value: wanted, version });
                self.raise_fence(new.term)?;
                return Ok(Ok(new));
            }
        }
        Err(self.contended(LEASE))
    }

    fn read_record(&self) -> Result<Record, StoreError> {
        let mut known = locked(&self.record);
        let found = self.fetch_record()?;
        Ok(known.insert(found).value.record.clone())
    }

    fn write_record(&self, record: &Record) -> Result<bool, StoreError> {
        let mut known = locked(&self.record);
        for _ in 0..ATTEMPTS {
            let Known { value, version } = match known.take().filter(|known| known.value.fence == record.term) {
                Some(known) => known,
                None => self.fetch_record()?,
            };
            if value.fence != record.term || record.term == Term(0) {
                *known = Some(Known { value, version });
                return Ok(false);
            }
            let next = StoredRecord { fence: value.fence, number: value.number + 1, record: record.clone() };
            // Another version was written by an earlier, unacknowledged attempt, or is the fence of a later term.
            if self.put_record(&mut known, version.as_ref(), next)? {
                return Ok(true);
            }
        }
        Err(self.contended(RECORD))
    }

    fn replace_damaged_record(&self) -> Result<bool, StoreError> {
        match self.fetch_record() {
            Err(StoreError::Damaged { .. }) => {
                let version = self.fetch::<StoredRecord>(RECORD, self.limits.others)?.version;
                self.put_record(&mut locked(&self.record), version.as_ref(), StoredRecord::default())
            }
            found => found.map(|_| false),
        }
    }
}

/// A panic leaves at worst no known version, which is then read again.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "conditional_tests.rs"]
pub(crate) mod tests;
