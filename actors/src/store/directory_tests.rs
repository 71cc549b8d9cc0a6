//! The store in a folder: its files, interrupted writes, and writers that are late.

use super::*;
use crate::store::Store;
use crate::store::conditional::RECORD;
use crate::store::sealed::encode;
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Term, Worker};
use phalanx_strategies::elastic::message::{Ending, Record, WorldPlan};
use phalanx_strategies::elastic::shadow::place;
use phalanx_strategies::elastic::succession::Lease;
use phalanx_strategies::mesh::Mesh;
use std::sync::mpsc::channel;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

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

fn lease(term: u64, beat: u64) -> Lease {
    Lease { term: Term(term), beat, ..Lease::default() }
}

/// A folder with a lease of term 1 and a record, and the store of its leader.
fn written() -> (tempfile::TempDir, Conditional) {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path()).unwrap();
    store.replace_lease(Lease::default(), lease(1, 0)).unwrap().unwrap();
    assert!(store.write_record(&full()).unwrap());
    (folder, store)
}

/// The file of the latest version.
fn latest(folder: &Path, name: &str) -> PathBuf {
    Directory::open(folder).unwrap().versions(name).unwrap().pop_last().unwrap().1
}

#[test]
fn record_is_the_same_when_another_process_reads_it() {
    let (folder, _) = written();

    assert_eq!(open_store(folder.path()).unwrap().read_record(), Ok(full()));
}

// STORE-3
#[test]
fn interrupted_write_leaves_the_old_record() {
    let (folder, store) = written();
    let unnamed = folder.path().join("record.json.0011223344556677.new");
    fs::write(&unnamed, &encode(&Record::default())[..30]).unwrap();

    assert_eq!(store.read_record(), Ok(full()));
    assert_eq!(store.write_record(&Record { generation: Generation(4), ..full() }), Ok(true));
    assert_eq!(store.read_record().unwrap().generation, Generation(4));
}

// STORE-3
#[test]
fn truncated_or_changed_file_is_an_error() {
    let (folder, store) = written();
    let path = latest(folder.path(), RECORD);
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

// STORE-3
#[test]
fn renewal_lost_in_a_power_failure_reads_as_the_one_before() {
    for interrupted in [&b""[..], &[0; 41]] {
        let (folder, store) = written();
        store.replace_lease(lease(1, 0), lease(1, 1)).unwrap().unwrap();
        fs::write(latest(folder.path(), LEASE), interrupted).unwrap();
        let restarted = open_store(folder.path()).unwrap();

        assert_eq!(restarted.read_lease(), Ok(lease(1, 0)));
        assert_eq!(restarted.replace_lease(lease(1, 0), lease(2, 0)), Ok(Ok(lease(2, 0))));
        assert_eq!(restarted.read_lease(), Ok(lease(2, 0)));
    }
}

// STORE-1, STORE-3
#[test]
fn damaged_lease_is_taken_over_with_a_later_term() {
    for n_bytes in [0, 20, 200] {
        let (folder, _) = written();
        let path = latest(folder.path(), LEASE);
        let mut bytes = fs::read(&path).unwrap();
        bytes.resize(n_bytes, b'x');
        fs::write(&path, bytes).unwrap();
        let candidate = open_store(folder.path()).unwrap();

        let seen = candidate.read_lease().unwrap();
        let next = lease(seen.term.0 + 1, 0);
        let taken = candidate.replace_lease(seen, next);

        assert!(seen.term > Term(1) && seen.holder != Lease::default().holder, "{n_bytes} bytes: {seen:?}");
        assert_eq!(taken, Ok(Ok(next)));
        assert_eq!(candidate.read_record(), Ok(full()), "the record has everything");
        assert_eq!(candidate.write_record(&Record { term: next.term, ..full() }), Ok(true));
    }
}

// STORE-3
#[test]
fn only_a_damaged_record_is_replaced_and_its_error_names_the_way_out() {
    let (folder, store) = written();
    assert_eq!(store.replace_damaged_record(), Ok(false));
    fs::write(latest(folder.path(), RECORD), &encode(&full())[..30]).unwrap();
    let store = open_store(folder.path()).unwrap();

    let error = store.read_record().unwrap_err().to_string();
    let replaced = store.replace_damaged_record();

    assert!(error.contains("no checkpoint is lost") && error.contains("record.json*"), "{error}");
    assert_eq!((replaced, store.read_record()), (Ok(true), Ok(Record::default())));
    assert_eq!(store.replace_lease(lease(1, 0), lease(2, 0)), Ok(Ok(lease(2, 0))));
    assert_eq!(store.write_record(&Record { term: Term(2), ..full() }), Ok(true));
}

// STORE-1
#[test]
fn locks_that_others_hold_on_the_files_of_a_store_delay_no_writer() {
    let (folder, store) = written();
    let entries = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let held: Vec<File> = entries.map(|path| File::open(path).unwrap()).collect();
    held.iter().for_each(|file| file.lock().unwrap());
    let (done, is_done) = channel();

    std::thread::spawn(move || {
        let renewed = store.replace_lease(lease(1, 0), lease(1, 1));
        done.send((renewed, store.write_record(&full()))).unwrap();
    });

    assert_eq!(is_done.recv_timeout(PATIENCE), Ok((Ok(Ok(lease(1, 1))), Ok(true))));
}

// STORE-1, STORE-2
#[test]
fn writer_that_was_paused_for_many_versions_replaces_nothing() {
    let (folder, _) = written();
    let directory = Directory::open(folder.path()).unwrap();
    let before = version(1);
    let mut last = directory.read(LEASE, PATIENCE).unwrap().unwrap().1;
    for _ in 0..3 * KEPT {
        last = directory.replace(LEASE, Some(&last), b"later", false, PATIENCE).unwrap().unwrap();
    }
    assert!(!directory.path_of(LEASE, 2).exists(), "its version was pruned, so that its link succeeds");

    let late = directory.replace(LEASE, Some(&before), b"late", true, PATIENCE);

    assert_eq!(late, Ok(None));
    assert_eq!(directory.read(LEASE, PATIENCE), Ok(Some((b"later".to_vec(), last))));
}

#[test]
fn store_keeps_a_bounded_number_of_files() {
    let (folder, store) = written();

    for beat in 0..100 {
        store.replace_lease(lease(1, beat), lease(1, beat + 1)).unwrap().unwrap();
        assert!(store.write_record(&full()).unwrap());
    }

    assert!(fs::read_dir(folder.path()).unwrap().count() as u64 <= 2 * (KEPT + 2));
}

#[test]
fn error_names_the_folder_that_cannot_be_created() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();

    let error = Directory::open(&file.join("store")).unwrap_err();

    assert!(error.to_string().contains("could not be created"), "{error}");
}
