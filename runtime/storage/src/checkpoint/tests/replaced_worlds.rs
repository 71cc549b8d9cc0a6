//! CHECKPOINT-8: a world that has been replaced commits nothing, wherever it, or its successor, is suspended or killed.

use std::fmt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::faulty_disk::FaultyDisk;
use super::faulty_objects::{Fault, FaultyObjects};
use super::*;
use crate::checkpoint::bucket::Bucket;
use crate::checkpoint::catalog::list_in;
use crate::checkpoint::error::ReadFailure;
use crate::checkpoint::fence::Fence;
use crate::checkpoint::pending::PendingCheckpoint;
use crate::checkpoint::reader::Checkpoint;

/// What others do while the user of a store is suspended before the operation with this number. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Meanwhile(Arc<Mutex<Option<(usize, Act)>>>);

type Act = Box<dyn FnOnce() + Send>;

impl Meanwhile {
    pub(super) fn nothing() -> Self {
        Self::default()
    }

    fn at(operation: usize, act: impl FnOnce() + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some((operation, Box::new(act))))))
    }

    pub(super) fn before(&self, operation: usize) {
        let act = self.0.lock().unwrap().take_if(|(at, _)| *at == operation);
        if let Some((_, act)) = act {
            // A client of an object store waits inside an event loop, which the others must not share.
            std::thread::spawn(act).join().unwrap();
        }
    }

    fn has_happened(&self) -> bool {
        self.0.lock().unwrap().is_none()
    }
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

/// The checkpoints of a job, and the generation on its record.
#[derive(Clone)]
struct Job {
    root: PathBuf,
    /// Unless the checkpoints are in a folder.
    objects: Option<Arc<dyn ObjectStore>>,
    recorded: Arc<AtomicU64>,
    _folder: Arc<tempfile::TempDir>,
}

impl Job {
    /// One in a folder and one in an object store; each has a checkpoint of step 1, and a save of step 2 whose writer has died.
    fn both() -> [Job; 2] {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let job = |root: PathBuf, objects| {
            let job = Job { root, objects, recorded: Arc::new(AtomicU64::new(1)), _folder: folder.clone() };
            drop(begun(&job.writer(1, Meanwhile::nothing()), 1, 2));
            job.records(2);
            save(&job.writer(2, Meanwhile::nothing()), 2, 1).unwrap();
            job
        };
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        [job(folder.path().join("checkpoints"), None), job("mem://bucket/job".into(), Some(objects))]
    }

    fn store(&self, fault: Fault, meanwhile: Meanwhile) -> Arc<dyn Store> {
        match (&self.objects, fault) {
            (Some(objects), fault) => {
                let faulty = FaultyObjects::new(objects.clone(), fault).suspended(meanwhile);
                Arc::new(Bucket::new(Arc::new(faulty), "mem://bucket").unwrap())
            }
            (None, Fault::StopsAfter(n)) => Arc::new(Disk::on(Arc::new(FaultyDisk::stopping_after(n)))),
            (None, _) => Arc::new(Disk::on(Arc::new(FaultyDisk::suspended(meanwhile)))),
        }
    }

    fn fenced(&self, store: Arc<dyn Store>, generation: u64) -> CheckpointWriter {
        let recorded = Arc::clone(&self.recorded);
        let fence = Fence::new(generation, move || Some(recorded.load(Ordering::SeqCst)));
        CheckpointWriter::on(store, &self.root).behind(fence)
    }

    /// The writer of a world, suspended meanwhile.
    fn writer(&self, generation: u64, meanwhile: Meanwhile) -> CheckpointWriter {
        self.fenced(self.store(Fault::Nothing, meanwhile), generation)
    }

    /// Puts a world on record.
    fn records(&self, generation: u64) {
        self.recorded.store(generation, Ordering::SeqCst);
    }

    /// Step and generation of all checkpoints that load.
    fn committed(&self) -> Vec<(u64, u64)> {
        let store = self.store(Fault::Nothing, Meanwhile::nothing());
        let mut ids = list_in(&*store, &self.root).unwrap();
        ids.retain(|id| Checkpoint::open_in(&store, &id.path).is_ok());
        ids.iter().map(|id| (id.step, id.generation)).collect()
    }
}

const PIECE: Piece<'_> = Piece {
    name: "w",
    dtype: Dtype::U8,
    global_shape: &[4],
    offset: &[0],
    shape: &[4],
    bytes: &[1, 2, 3, 4],
    fingerprint: None,
};

fn meta_of(generation: u64, step: u64) -> CheckpointMeta {
    CheckpointMeta { generation, ..meta(step) }
}

fn save(writer: &CheckpointWriter, generation: u64, step: u64) -> Result<CheckpointId, CheckpointError> {
    writer.save(&meta_of(generation, step), &[PIECE], &[])
}

/// A save that lacks its marker.
fn begun(writer: &CheckpointWriter, generation: u64, step: u64) -> PendingCheckpoint {
    let pending = writer.begin(&meta_of(generation, step)).unwrap();
    pending.write_part(0, &[PIECE], &[]).unwrap();
    pending
}

/// Suspends the world of generation 2 before each of its operations in a save of step 5, while others `act`; `check`s the result
/// of the save.
fn sweep(act: impl Fn(&Job) -> Act, check: impl Fn(&Job, Result<CheckpointId, CheckpointError>, &str)) {
    for which in 0..2 {
        let mut n_operations = 0;
        for operation in 0.. {
            let job = Job::both().into_iter().nth(which).unwrap();
            let meanwhile = Meanwhile::at(operation, act(&job));

            let saved = save(&job.writer(2, meanwhile.clone()), 2, 5);

            if !meanwhile.has_happened() {
                break;
            }
            check(&job, saved, &format!("{} before operation {operation}", job.root.display()));
            n_operations = operation + 1;
        }
        assert!(n_operations > 5, "a save has only {n_operations} operations");
    }
}

#[test]
fn world_that_is_suspended_at_any_operation_of_a_save_commits_nothing_once_a_later_one_has_saved() {
    let at_the_change = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&at_the_change);
    let later_world_saves = |job: &Job| -> Act {
        let (job, seen) = (job.clone(), Arc::clone(&seen));
        Box::new(move || {
            job.records(3);
            save(&job.writer(3, Meanwhile::nothing()), 3, 4).unwrap();
            *seen.lock().unwrap() = job.committed();
        })
    };
    let outcomes = Mutex::new(std::collections::BTreeSet::new());

    sweep(later_world_saves, |job, saved, at| {
        let then = at_the_change.lock().unwrap().clone();
        assert_eq!(job.committed(), then, "{at}");
        let is_committed = then.contains(&(5, 2));
        assert_eq!(saved.is_ok(), is_committed, "{at}: {saved:?}");
        if let Err(error) = saved {
            assert_eq!(error, CheckpointError::Superseded { generation: 2, latest: 3 }, "{at}");
        }
        outcomes.lock().unwrap().insert((job.objects.is_some(), is_committed));
    });

    let seen = outcomes.into_inner().unwrap();
    assert!(
        seen.contains(&(false, true)) && seen.contains(&(false, false)) && seen.contains(&(true, false)),
        "{seen:?}"
    );
}

#[test]
fn world_that_is_suspended_at_any_operation_keeps_no_later_one_from_committing() {
    let later_save = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&later_save);
    let later_world_begins = |job: &Job| -> Act {
        let (job, slot) = (job.clone(), Arc::clone(&slot));
        Box::new(move || {
            job.records(3);
            *slot.lock().unwrap() = Some(begun(&job.writer(3, Meanwhile::nothing()), 3, 4));
        })
    };

    sweep(later_world_begins, |job, _, at| {
        let pending = later_save.lock().unwrap().take().unwrap();
        pending.commit(1).unwrap_or_else(|error| panic!("{at}: {error}"));

        assert!(job.committed().contains(&(4, 3)), "{at}");
    });
}

#[test]
fn later_world_that_dies_at_any_operation_leaves_the_next_one_to_commit() {
    for n in 0..12 {
        let later_world_dies = move |job: &Job| -> Act {
            let job = job.clone();
            Box::new(move || {
                job.records(3);
                let store = job.store(Fault::StopsAfter(n), Meanwhile::nothing());
                assert!(save(&job.fenced(store, 3), 3, 4).is_err());
            })
        };

        sweep(later_world_dies, |job, _, at| {
            job.records(4);
            save(&job.writer(4, Meanwhile::nothing()), 4, 4).unwrap_or_else(|error| panic!("{at}, {n}: {error}"));

            let committed = job.committed();
            assert!(committed.contains(&(4, 4)) && committed.contains(&(1, 2)), "{at}, {n}: {committed:?}");
        });
    }
}

#[test]
fn world_whose_remains_are_removed_while_it_is_suspended_leaves_nothing_that_looks_damaged() {
    let later_world_removes = |job: &Job| -> Act {
        let job = job.clone();
        Box::new(move || {
            job.records(3);
            let writer = job.writer(3, Meanwhile::nothing());
            let saved = save(&writer, 3, 6).unwrap();
            writer.retain(1, &saved).unwrap();
        })
    };

    sweep(later_world_removes, |job, _, at| {
        let store = job.store(Fault::Nothing, Meanwhile::nothing());
        let ids = list_in(&*store, &job.root).unwrap();
        let failures = ids.iter().filter_map(|id| Checkpoint::open_in(&store, &id.path).err());
        let failures: Vec<CheckpointError> = failures.collect();
        let is_unfinished = |error: &CheckpointError| error.read_failure() == ReadFailure::Unfinished;
        assert!(failures.iter().all(is_unfinished), "{at}: {failures:?}");
        assert!(job.committed().contains(&(6, 3)), "{at}");
    });
}
