//! A store in a folder: two human-readable files for lease and record, each a line with version and checksum above its JSON,
//! and a third one that counts the renewals of the lease.
//!
//! To replace lease or record, the store writes a new file beside it, syncs it, renames it and syncs the folder. A renewal only
//! shows that the leader is alive, several times a second, so it is written in place and not synced: after a power failure no
//! leader is alive. A writer holds an exclusive lock on a fourth file, which the system releases when the process dies. The
//! folder may be on a network file system that supports locks and atomic renames.

use super::{Store, StoreError, is_of_lease};
use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::validate::InvalidMessage;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Directory {
    folder: PathBuf,
}

const LEASE: &str = "lease.json";
const RECORD: &str = "record.json";
/// The term of the lease and its renewals, as decimal numbers of fixed width.
const RENEWALS: &str = "renewals";
const LOCK: &str = "lock";
/// Larger than the file with the renewals.
const RENEWALS_BYTES_MAX: u64 = 64;
/// First word of each file with a checksum.
const MAGIC: &str = "phalanx-store-2";

impl Directory {
    /// Opens a folder, and creates it if necessary.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub fn open(folder: &Path) -> Result<Directory, StoreError> {
        fs::create_dir_all(folder).map_err(|error| failed(folder, "created", &error))?;
        let directory = Directory { folder: folder.to_owned() };
        drop(directory.lock()?);
        Ok(directory)
    }

    /// `STORE-1`
    fn lock(&self) -> Result<File, StoreError> {
        let path = self.folder.join(LOCK);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|error| failed(&path, "opened", &error))?;
        file.lock().map_err(|error| failed(&path, "locked", &error))?;
        Ok(file)
    }

    fn read<T: DeserializeOwned + Default>(&self, name: &str) -> Result<T, StoreError> {
        let path = self.folder.join(name);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(T::default()),
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(StoreError::Damaged { path, found: error.to_string() });
            }
            Err(error) => return Err(failed(&path, "read", &error)),
        };
        decode(&text).map_err(|found| StoreError::Damaged { path, found })
    }

    /// `STORE-3`
    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        let (path, beside) = (self.folder.join(name), self.folder.join(format!("{name}.new")));
        let replace = || -> io::Result<()> {
            let mut file = File::create(&beside)?;
            file.write_all(encode(value).as_bytes())?;
            file.sync_all()?;
            fs::rename(&beside, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        replace().map_err(|error| failed(&path, "written", &error))
    }

    /// Renewals of the lease of `term`. A file that cannot be parsed counts none: it was interrupted by a power failure, or is
    /// being written, and a reader without the lock only needs to see that the number changes.
    fn read_renewals(&self, term: Term) -> Result<u64, StoreError> {
        let path = self.folder.join(RENEWALS);
        let mut bytes = Vec::new();
        match File::open(&path).and_then(|file| file.take(RENEWALS_BYTES_MAX).read_to_end(&mut bytes)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(failed(&path, "read", &error)),
        }
        let text = String::from_utf8_lossy(&bytes);
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(of)), Some(Ok(beat))) if of == term.0 => Ok(beat),
            _ => Ok(0),
        }
    }

    fn write_renewals(&self, lease: Lease) -> Result<(), StoreError> {
        let path = self.folder.join(RENEWALS);
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
            file.write_all(format!("{:020} {:020}\n", lease.term.0, lease.beat).as_bytes())
        };
        write().map_err(|error| failed(&path, "written", &error))
    }
}

impl Store for Directory {
    fn read_lease(&self) -> Result<Lease, StoreError> {
        let lease: Lease = self.read(LEASE)?;
        Ok(Lease { beat: lease.beat.max(self.read_renewals(lease.term)?), ..lease })
    }

    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
        let _lock = self.lock()?;
        let have = self.read_lease()?;
        if have != old {
            return Ok(Err(have));
        }
        if (new.term, new.holder) == (old.term, old.holder) {
            self.write_renewals(new)?;
        } else {
            self.write(LEASE, &new)?;
        }
        Ok(Ok(new))
    }

    fn read_record(&self) -> Result<Record, StoreError> {
        let record: Record = self.read(RECORD)?;
        let damaged =
            |error: InvalidMessage| StoreError::Damaged { path: self.folder.join(RECORD), found: error.to_string() };
        record.check().map_err(damaged)?;
        Ok(record)
    }

    fn write_record(&self, record: &Record) -> Result<bool, StoreError> {
        let _lock = self.lock()?;
        if !is_of_lease(record, self.read_lease()?) {
            return Ok(false);
        }
        self.write(RECORD, record)?;
        Ok(true)
    }
}

pub(crate) fn encode<T: Serialize>(value: &T) -> String {
    sealed(&serde_json::to_string_pretty(value).expect("leases and records have string keys only"))
}

/// The text of a file with this body.
pub(crate) fn sealed(body: &str) -> String {
    format!("{MAGIC} crc32c={:08x}\n{body}\n", crc_fast::crc32_iscsi(body.as_bytes()))
}

pub(crate) fn decode<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let (head, body) = text.split_once('\n').ok_or("expected a header line, found none")?;
    let body = body.strip_suffix('\n').ok_or("the end of the file is missing")?;
    let expected = format!("{MAGIC} crc32c={:08x}", crc_fast::crc32_iscsi(body.as_bytes()));
    if head != expected {
        return Err(format!("expected the header \"{expected}\", found \"{head}\""));
    }
    serde_json::from_str(body).map_err(|error| error.to_string())
}

fn failed(path: &Path, action: &'static str, error: &io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::elastic::identity::{Generation, NodeId, Worker};
    use phalanx_strategies::elastic::message::{Ending, WorldPlan};
    use phalanx_strategies::elastic::shadow::place;
    use phalanx_strategies::elastic::snapshot::Checkpoint;
    use phalanx_strategies::mesh::Mesh;
    use std::sync::Arc;

    fn full() -> Record {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let assignments = vec![Worker::default(); 2];
        let holds = place(&mesh, &assignments, true);
        let world_plan = WorldPlan {
            generation: Generation(3),
            mesh,
            assignments,
            catching_up: vec![],
            guests: vec![],
            addresses: vec![Some("[::1]:4000".parse().unwrap()), None],
            base: Default::default(),
            voted_in: Generation(2),
            transfers: phalanx_strategies::elastic::recovery::from_disk(&holds, Checkpoint::default()),
            holds,
            n_saves: 1,
            rests: false,
            disputed: vec![],
        };
        Record {
            term: Term(1),
            generation: Generation(3),
            world_plan: Some(Arc::new(world_plan)),
            drained: [NodeId(4)].into(),
            wanted: Some(mesh),
            ending: Some(Ending::Failed("loss is NaN".into())),
            ..Record::default()
        }
    }

    fn written() -> (tempfile::TempDir, Directory) {
        let folder = tempfile::tempdir().unwrap();
        let store = Directory::open(folder.path()).unwrap();
        store.replace_lease(Lease::default(), Lease { term: Term(1), ..Lease::default() }).unwrap().unwrap();
        assert!(store.write_record(&full()).unwrap());
        (folder, store)
    }

    #[test]
    fn record_is_the_same_when_another_process_reads_it() {
        let (folder, _) = written();

        assert_eq!(Directory::open(folder.path()).unwrap().read_record(), Ok(full()));
    }

    // STORE-3
    #[test]
    fn interrupted_write_leaves_the_old_record() {
        let (folder, store) = written();
        let beside = folder.path().join("record.json.new");
        fs::write(&beside, &encode(&Record::default())[..30]).unwrap();

        assert_eq!(store.read_record(), Ok(full()));
        assert_eq!(store.write_record(&Record { generation: Generation(4), ..full() }), Ok(true));
        assert_eq!(store.read_record().unwrap().generation, Generation(4));
    }

    // STORE-3
    #[test]
    fn truncated_or_changed_file_is_an_error() {
        let (folder, store) = written();
        let path = folder.path().join(RECORD);
        let whole = fs::read(&path).unwrap();

        for length in (0..whole.len()).step_by(7) {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(matches!(store.read_record(), Err(StoreError::Damaged { .. })), "cut off after {length} bytes");
        }
        for position in (0..whole.len()).step_by(11) {
            let mut changed = whole.clone();
            changed[position] ^= 1;
            fs::write(&path, changed).unwrap();
            assert!(matches!(store.read_record(), Err(StoreError::Damaged { .. })), "changed byte {position}");
        }
    }

    // STORE-1, STORE-3
    #[test]
    fn renewal_counts_for_its_term_only_and_leaves_the_durable_lease_alone() {
        let (folder, store) = written();
        let lease = store.read_lease().unwrap();
        let durable = fs::read(folder.path().join(LEASE)).unwrap();

        let renewed = Lease { beat: 9, ..lease };
        assert_eq!(store.replace_lease(lease, renewed), Ok(Ok(renewed)));
        assert_eq!(
            store.replace_lease(lease, Lease { beat: 1, ..lease }),
            Ok(Err(renewed)),
            "it was renewed meanwhile"
        );
        assert_eq!(Directory::open(folder.path()).unwrap().read_lease(), Ok(renewed));
        assert_eq!(fs::read(folder.path().join(LEASE)).unwrap(), durable);

        let next = Lease { term: lease.term.next(), holder: 8, beat: 0 };
        assert_eq!(store.replace_lease(renewed, next), Ok(Ok(next)));
        assert_eq!(store.read_lease(), Ok(next), "renewals of the earlier term do not count");
    }

    // STORE-3
    #[test]
    fn renewal_interrupted_by_a_power_failure_reads_as_no_renewal() {
        let (folder, store) = written();
        let lease = store.read_lease().unwrap();
        store.replace_lease(lease, Lease { beat: 12, ..lease }).unwrap().unwrap();

        for interrupted in [&b""[..], &[0; 41], b"00000000000000000001", b"\xff\xff 3"] {
            fs::write(folder.path().join(RENEWALS), interrupted).unwrap();
            assert_eq!(store.read_lease(), Ok(lease), "{interrupted:?}");
            let renewed = Lease { beat: 1, ..lease };
            assert_eq!(store.replace_lease(lease, renewed), Ok(Ok(renewed)));
            assert_eq!(store.read_lease(), Ok(renewed));
        }
    }

    #[test]
    fn error_names_the_folder_that_cannot_be_created() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();

        let error = Directory::open(&file.join("store")).unwrap_err();

        assert!(error.to_string().contains("could not be created"), "{error}");
    }
}
