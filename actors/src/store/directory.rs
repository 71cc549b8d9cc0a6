//! A store in a folder: two human-readable files, each a line with version and checksum above its JSON.
//!
//! To replace a file, the store writes a new one beside it, syncs it, renames it and syncs the folder. A writer holds an
//! exclusive lock on a third file, which the system releases when the process dies. The folder may be on a network file
//! system that supports locks and atomic renames.

use super::{Store, StoreError, is_of_lease};
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::elastic::validate::InvalidMessage;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Directory {
    folder: PathBuf,
}

const LEASE: &str = "lease.json";
const RECORD: &str = "record.json";
const LOCK: &str = "lock";
/// First word of each file.
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
}

impl Store for Directory {
    fn read_lease(&self) -> Result<Lease, StoreError> {
        self.read(LEASE)
    }

    fn replace_lease(&self, old: Lease, new: Lease) -> Result<Result<Lease, Lease>, StoreError> {
        let _lock = self.lock()?;
        let have = self.read_lease()?;
        if have != old {
            return Ok(Err(have));
        }
        self.write(LEASE, &new)?;
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
    format!("{MAGIC} crc32c={:08x}\n{body}\n", crc32c::crc32c(body.as_bytes()))
}

pub(crate) fn decode<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let (head, body) = text.split_once('\n').ok_or("expected a header line, found none")?;
    let body = body.strip_suffix('\n').ok_or("the end of the file is missing")?;
    let expected = format!("{MAGIC} crc32c={:08x}", crc32c::crc32c(body.as_bytes()));
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
    use phalanx_strategies::elastic::identity::{Generation, NodeId, Term, Worker};
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

    #[test]
    fn error_names_the_folder_that_cannot_be_created() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();

        let error = Directory::open(&file.join("store")).unwrap_err();

        assert!(error.to_string().contains("could not be created"), "{error}");
    }
}
