//! CHECKPOINT-1 and CHECKPOINT-2: a crash, a power failure or a full disk at any moment of a save loses nothing committed.

use super::faulty_disk::FaultyDisk;
use super::*;

/// Operations of one undisturbed save below an existing root.
fn operations_of_a_save() -> usize {
    let root = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::default();
    save_state(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), root.path()), 1).unwrap();
    disk.n_operations()
}

#[test]
fn crash_at_any_operation_of_a_save_leaves_the_previous_or_the_new_checkpoint() {
    let n = operations_of_a_save();
    assert!(n > 15, "a save has only {n} operations");
    let mut seen = std::collections::BTreeSet::new();
    for k in 0..=n {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();
        let disk = FaultyDisk::stopping_after(k);

        let saved = save_state(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk))), root.path()), 2);

        let loaded = loaded_step(root.path());
        assert!(loaded == Some(1) || loaded == Some(2), "after {k} operations: {loaded:?}");
        assert_eq!(saved.is_ok(), k == n, "after {k} operations");
        if saved.is_ok() {
            assert_eq!(loaded, Some(2));
        }
        seen.insert(loaded);
        // The next run saves the same step again, whatever remains.
        save_state(&quick_writer(root.path()), 2).unwrap();
        assert_eq!(loaded_step(root.path()), Some(2));
    }
    assert_eq!(seen.len(), 2, "the sweep must see both outcomes");
}

#[test]
fn power_failure_at_any_operation_of_a_save_leaves_the_previous_checkpoint_or_a_durable_new_one() {
    for k in 0..=operations_of_a_save() {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();
        let disk = FaultyDisk::stopping_after(k);

        let saved = save_state(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), root.path()), 2);
        disk.lose_power();

        let expected = if saved.is_ok() { Some(2) } else { Some(1) };
        let loaded = loaded_step(root.path());
        assert_eq!(loaded, expected, "after {k} operations");
    }
}

#[test]
fn root_itself_survives_a_power_failure_once_a_save_has_returned() {
    let parent = tempfile::tempdir().unwrap();
    let root = parent.path().join("outputs/checkpoints");
    let disk = FaultyDisk::default();

    save_state(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), &root), 5).unwrap();
    disk.lose_power();

    assert_eq!(loaded_step(&root), Some(5));
}

#[test]
fn full_disk_fails_the_save_and_keeps_only_the_previous_checkpoint() {
    let whole = tempfile::tempdir().unwrap();
    let id = save_state(&quick_writer(whole.path()), 2).unwrap();
    let n_bytes: u64 = std::fs::read_dir(&id.path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    for room in (0..n_bytes).step_by(97).chain([n_bytes - 1]) {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();
        let disk = FaultyDisk::full_after(room);

        let error = save_state(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk))), root.path()), 2).unwrap_err();

        assert!(error.to_string().contains("No space left on device"), "{error}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "with room for {room} bytes");
        assert_eq!(loaded_step(root.path()), Some(1));
    }
}

#[test]
fn crash_at_any_operation_of_retention_keeps_the_newest_valid_checkpoint() {
    for k in 0..30 {
        let root = tempfile::tempdir().unwrap();
        let writer = quick_writer(root.path());
        let [.., saved] = [1, 2, 3, 4].map(|step| save_state(&writer, step).unwrap());
        let disk = FaultyDisk::stopping_after(k);

        let _ = CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk))), root.path()).retain(1, &saved);

        let (_, skipped) = latest_valid(root.path()).unwrap();
        assert_eq!((loaded_step(root.path()), skipped.as_slice()), (Some(4), [].as_slice()), "after {k} operations");
        writer.retain(1, &saved).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "the next call finishes");
    }
}
