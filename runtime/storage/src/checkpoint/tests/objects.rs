//! CHECKPOINT-1 to CHECKPOINT-5 in object stores: one in memory, one over a folder.

use std::path::PathBuf;

use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use phalanx_strategies::boxes::TensorBox;

use super::faulty_objects::{Fault, FaultyObjects};
use super::*;
use crate::checkpoint::bucket::Bucket;
use crate::checkpoint::catalog::{latest_valid_in, list_in};
use crate::checkpoint::location;
use crate::checkpoint::reader::Checkpoint;
use crate::checkpoint::store::Store;

const ROOT: &str = "mem://bucket/runs/first";

/// A bucket over `objects` with a fault, and the faulty store, which counts operations.
fn bucket(objects: &Arc<dyn ObjectStore>, fault: Fault) -> (Arc<dyn Store>, FaultyObjects) {
    let faulty = FaultyObjects::new(objects.clone(), fault);
    (Arc::new(Bucket::new(Arc::new(faulty.clone()), "mem://bucket").unwrap()), faulty)
}

fn memory() -> Arc<dyn ObjectStore> {
    Arc::new(InMemory::new())
}

fn writer_to(objects: &Arc<dyn ObjectStore>, fault: Fault) -> CheckpointWriter {
    CheckpointWriter::on(bucket(objects, fault).0, Path::new(ROOT))
}

fn loaded(objects: &Arc<dyn ObjectStore>) -> Option<u64> {
    loaded_step_in(&bucket(objects, Fault::Nothing).0, Path::new(ROOT))
}

/// Both kinds of store; dropping the guard removes the folder.
fn stores() -> [(Arc<dyn Store>, PathBuf, Option<tempfile::TempDir>); 2] {
    let folder = tempfile::tempdir().unwrap();
    let url = PathBuf::from(format!("file://{}/runs/first", folder.path().display()));
    [(bucket(&memory(), Fault::Nothing).0, ROOT.into(), None), (location::at(&url).unwrap(), url, Some(folder))]
}

#[test]
fn saved_checkpoint_is_found_loaded_and_removed_when_old() {
    for (store, root, _guard) in stores() {
        let writer = CheckpointWriter::on(store.clone(), &root);
        assert_eq!(loaded_step_in(&store, &root), None, "a new store is empty");

        let [.., saved] = [1, 2, 3, 4].map(|step| save_state(&writer, step).unwrap());
        let removed = writer.retain(2, &saved).unwrap();

        assert_eq!(loaded_step_in(&store, &root), Some(4));
        let steps: Vec<u64> = list_in(&*store, &root).unwrap().iter().map(|id| id.step).collect();
        assert_eq!((steps, removed.len()), (vec![4, 3], 2));
        assert!(saved.path.starts_with(&root), "{}", saved.path.display());
    }
}

#[test]
fn file_url_checkpoint_is_readable_as_a_plain_folder() {
    let [_, (store, root, folder)] = stores();
    save_state(&CheckpointWriter::on(store, &root), 7).unwrap();

    assert_eq!(loaded_step(&folder.unwrap().path().join("runs/first")), Some(7));
    assert_eq!(loaded_step(&root), None, "dropping the guard removed the folder");
}

#[test]
fn rank_with_another_split_reads_the_parts_of_two_writers() {
    for (store, root, _guard) in stores() {
        let writer = CheckpointWriter::on(store.clone(), &root);
        let leader = writer.begin(&meta(1)).unwrap();
        let other = writer.join(&meta(1), leader.id().generation);
        let row = |at: &'static [usize], bytes: &'static [u8]| Piece {
            name: "t",
            dtype: Dtype::U8,
            global_shape: &[2, 3],
            offset: at,
            shape: &[1, 3],
            bytes,
            fingerprint: None,
        };
        leader.write_part(0, &[row(&[0, 0], &[1, 2, 3])], &[]).unwrap();
        assert!(matches!(leader.commit(2), Err(CheckpointError::MissingPart { writer: 1, .. })));
        other.write_part(1, &[row(&[1, 0], &[4, 5, 6])], &[]).unwrap();
        leader.commit(2).unwrap();

        let mut column = [0; 2];
        let checkpoint = Checkpoint::open_lazily_in(&store, &leader.id().path).unwrap();
        checkpoint.read_into("t", &TensorBox { offset: vec![0, 1], extent: vec![2, 1] }, &mut column).unwrap();

        assert_eq!(column, [2, 5]);
    }
}

#[test]
fn directory_is_claimed_by_only_one_leader() {
    for (store, root, _guard) in stores() {
        let writer = CheckpointWriter::on(store.clone(), &root);
        let taken = writer.begin(&meta(1)).unwrap().id().clone();

        assert!(!store.claim(&taken.path).unwrap());
        assert_eq!(writer.begin(&meta(1)).unwrap().id().generation, taken.generation + 1);
    }
}

#[test]
fn crash_at_any_operation_of_a_save_leaves_the_previous_or_the_new_checkpoint() {
    let (store, counted) = bucket(&memory(), Fault::Nothing);
    save_state(&CheckpointWriter::on(store, Path::new(ROOT)), 1).unwrap();
    let n = counted.n_operations();
    assert!(n > 8, "a save has only {n} operations");
    for k in 0..=n {
        let objects = memory();
        save_state(&writer_to(&objects, Fault::Nothing), 1).unwrap();

        let saved = save_state(&writer_to(&objects, Fault::StopsAfter(k)), 2);

        assert_eq!(saved.is_ok(), k == n, "after {k} operations: {saved:?}");
        assert_eq!(loaded(&objects), if saved.is_ok() { Some(2) } else { Some(1) }, "after {k} operations");
        // The next run saves the same step again, whatever remains.
        save_state(&writer_to(&objects, Fault::Nothing), 2).unwrap();
        assert_eq!(loaded(&objects), Some(2));
    }
}

#[test]
fn lost_answer_to_any_operation_fails_at_most_its_own_save() {
    for k in 0..12 {
        let objects = memory();
        save_state(&writer_to(&objects, Fault::Nothing), 1).unwrap();

        let saved = save_state(&writer_to(&objects, Fault::AnswerLost(k)), 2);

        let expected = if saved.is_ok() { Some(2) } else { Some(1) };
        assert_eq!(loaded(&objects), expected, "the answer to operation {k} was lost: {saved:?}");
    }
}

#[test]
fn unreachable_store_is_an_error_instead_of_a_fallback_to_an_older_checkpoint() {
    let objects = memory();
    for step in [1, 2] {
        save_state(&writer_to(&objects, Fault::Nothing), step).unwrap();
    }
    let (store, counted) = bucket(&objects, Fault::Nothing);
    latest_valid_in(&store, Path::new(ROOT)).unwrap();
    let n = counted.n_operations();
    assert!(n >= 8, "{n} operations");
    for fault in (0..n).map(Fault::StopsAfter).chain((0..n).map(Fault::AnswerLost)) {
        let found = latest_valid_in(&bucket(&objects, fault).0, Path::new(ROOT));

        assert!(matches!(found, Err(CheckpointError::Unreachable { .. })), "{fault:?}: {found:?}");
    }
}

#[test]
fn save_succeeds_when_the_client_repeats_any_of_its_operations() {
    let (store, counted) = bucket(&memory(), Fault::Nothing);
    save_state(&CheckpointWriter::on(store, Path::new(ROOT)), 1).unwrap();
    let n = counted.n_operations();
    assert!(n > 8, "a save has only {n} operations");
    for fault in (0..n).map(Fault::Repeats).chain([Fault::RepeatsAll]) {
        let objects = memory();
        save_state(&writer_to(&objects, Fault::Nothing), 1).unwrap();

        let saved = save_state(&writer_to(&objects, fault), 2).unwrap();

        assert_eq!(loaded(&objects), Some(2), "{fault:?}");
        let (store, _) = bucket(&objects, Fault::Nothing);
        let of_step: Vec<u64> = list_in(&*store, Path::new(ROOT)).unwrap().iter().map(|id| id.step).collect();
        assert_eq!(of_step, [2, 1], "{fault:?}: the writer recognises its own claim");
        assert!(Checkpoint::open_in(&store, &saved.path).is_ok(), "{fault:?}");
    }
}

#[test]
fn retention_finishes_when_the_client_repeats_every_operation() {
    let objects = memory();
    let writer = writer_to(&objects, Fault::Nothing);
    let [.., saved] = [1, 2, 3].map(|step| save_state(&writer, step).unwrap());

    let removed = writer_to(&objects, Fault::RepeatsAll).retain(1, &saved).unwrap();

    assert_eq!(removed.len(), 2);
    assert_eq!(list_in(&*bucket(&objects, Fault::Nothing).0, Path::new(ROOT)).unwrap(), [saved]);
}

#[test]
fn foreign_marker_is_not_replaced() {
    let objects = memory();
    let pending = writer_to(&objects, Fault::Nothing).begin(&meta(1)).unwrap();
    pending.write_part(0, &[Piece::whole("t", Dtype::U8, &[2], &[1, 2])], &[]).unwrap();
    put(&objects, &pending.id().path.join("COMMIT"), b"theirs");

    let refused = pending.commit(1).unwrap_err().to_string();

    assert!(refused.contains("COMMIT") && refused.contains("exists"), "{refused}");
    assert_eq!(get(&objects, &pending.id().path.join("COMMIT")), b"theirs");
}

#[test]
fn crash_at_any_operation_of_retention_keeps_the_newest_valid_checkpoint() {
    for k in 0..50 {
        let objects = memory();
        let writer = writer_to(&objects, Fault::Nothing);
        let [.., saved] = [1, 2, 3].map(|step| save_state(&writer, step).unwrap());

        let _ = writer_to(&objects, Fault::StopsAfter(k)).retain(1, &saved);

        let (store, _) = bucket(&objects, Fault::Nothing);
        let (_, skipped) = latest_valid_in(&store, Path::new(ROOT)).unwrap();
        assert_eq!((loaded(&objects), skipped.as_slice()), (Some(3), [].as_slice()), "after {k} operations");
        for older in list_in(&*store, Path::new(ROOT)).unwrap().iter().filter(|id| id.step < 3) {
            let opened = Checkpoint::open_in(&store, &older.path);
            let is_whole_or_nothing = matches!(opened, Ok(_) | Err(CheckpointError::Uncommitted { .. }));
            assert!(is_whole_or_nothing, "after {k} operations: {opened:?}");
        }
        writer.retain(1, &saved).unwrap();
        assert_eq!(list_in(&*store, Path::new(ROOT)).unwrap(), [saved], "the next call finishes");
    }
}

#[test]
fn damaged_object_is_named_and_its_checkpoint_skipped() {
    const FILES: [&str; 5] =
        ["COMMIT", "MANIFEST", "rank-00000-index.json", "rank-00000-0000.safetensors", "rank-00000-extra-trainer.json"];
    for name in FILES {
        let objects = memory();
        let writer = writer_to(&objects, Fault::Nothing);
        save_state(&writer, 1).unwrap();
        let path = save_state(&writer, 2).unwrap().path.join(name);
        let mut content = get(&objects, &path);
        let middle = content.len() / 2;
        content[middle] ^= 1;
        put(&objects, &path, &content);

        let (store, _) = bucket(&objects, Fault::Nothing);
        let (found, skipped) = latest_valid_in(&store, Path::new(ROOT)).unwrap();

        assert_eq!(found.unwrap().id().step, 1);
        let reason = skipped[0].reason.to_string();
        assert!(reason.contains(ROOT) && reason.contains(name) || name == "COMMIT", "{reason}");
        assert!(reason.contains("damaged"), "{reason}");
    }
}

#[test]
fn large_object_is_sent_in_parts_and_does_not_exist_when_one_fails() {
    let content: Vec<u8> = (0..40u32 << 20).map(|i| (i / 7) as u8).collect();
    let piece = [Piece::whole("t", Dtype::U8, &[40 << 20], &content)];
    let (store, counted) = bucket(&memory(), Fault::Nothing);

    let id = CheckpointWriter::on(store.clone(), Path::new(ROOT)).save(&meta(1), &piece, &[]).unwrap();

    let mut found = vec![0; 100];
    let checkpoint = Checkpoint::open_in(&store, &id.path).unwrap();
    checkpoint.read_into("t", &TensorBox { offset: vec![30 << 20], extent: vec![100] }, &mut found).unwrap();
    assert_eq!(found, content[30 << 20..][..100]);
    assert!(counted.n_operations() > 5 + 6, "the object has six parts");
    for k in 3..=9 {
        let objects = memory();
        writer_to(&objects, Fault::StopsAfter(k)).save(&meta(1), &piece, &[]).unwrap_err();
        let (store, _) = bucket(&objects, Fault::Nothing);
        assert!(store.open(&id.path.join("rank-00000-0000.safetensors")).unwrap().is_none(), "after {k} operations");
    }
}

#[test]
fn invalid_url_is_refused_in_one_sentence() {
    let refused = |url: &str| location::at(Path::new(url)).unwrap_err().to_string();

    for (url, why) in [
        ("ftp://host/x", "s3://bucket/"),
        ("s3:///prefix", "names no bucket"),
        ("gs://", "names no bucket"),
        ("file://host/x", "file:///folder"),
        ("file:///a//b", "empty"),
    ] {
        let sentence = refused(url);
        assert!(sentence.contains(url) && sentence.contains(why), "{sentence}");
        assert_eq!(sentence.lines().count(), 1);
    }
}

fn key(path: &Path) -> Key {
    Key::parse(path.to_str().unwrap().strip_prefix("mem://bucket").unwrap()).unwrap()
}

fn block_on<T>(action: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(action)
}

fn get(objects: &Arc<dyn ObjectStore>, path: &Path) -> Vec<u8> {
    block_on(async { objects.get(&key(path)).await.unwrap().bytes().await.unwrap().to_vec() })
}

fn put(objects: &Arc<dyn ObjectStore>, path: &Path, content: &[u8]) {
    block_on(objects.put(&key(path), PutPayload::from(content.to_vec()))).unwrap();
}
