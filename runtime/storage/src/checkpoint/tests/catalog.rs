//! CHECKPOINT-4 and CHECKPOINT-5: names, order, retries and retention.

use std::fs;

use super::*;
use crate::checkpoint::catalog::{Keep, latest_after, latest_compared, list};
use crate::checkpoint::given_up::Beginning;
use crate::checkpoint::reader::Checkpoint;

fn steps(root: &Path) -> Vec<(u64, u64)> {
    list(root).unwrap().iter().map(|id| (id.step, id.generation)).collect()
}

fn newest(root: &Path) -> CheckpointId {
    list(root).unwrap().remove(0)
}

#[test]
fn directories_sort_by_step_then_generation_and_unknown_names_are_ignored() {
    let root = tempfile::tempdir().unwrap();
    for name in ["step-0000000002.g0001", "step-0000000010.g0001", "step-0000000002.g0003", "step-12345678901.g0000"] {
        fs::create_dir(root.path().join(name)).unwrap();
    }
    for unknown in ["step-2.g1", "step-0000000002", "latest", "step-+000000002.g0001", ".trash-step-0000000001.g0001"] {
        fs::create_dir(root.path().join(unknown)).unwrap();
    }
    fs::write(root.path().join("step-0000000099.g0001"), "a file").unwrap();

    assert_eq!(steps(root.path()), [(12345678901, 0), (10, 1), (2, 3), (2, 1)]);
}

#[test]
fn absent_root_has_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();

    let (checkpoint, skipped) = latest_valid(&root.path().join("nothing")).unwrap();

    assert!(checkpoint.is_none() && skipped.is_empty());
}

#[test]
fn newest_checkpoint_whose_copies_were_compared_is_preferred_and_the_newest_one_taken_if_there_is_none() {
    let chosen = |compared: [bool; 3]| {
        let root = tempfile::tempdir().unwrap();
        let values = [1.0f32; 4];
        for (step, compared) in (1..).zip(compared) {
            let pieces = [Piece::whole("w", Dtype::F32, &[4], bytemuck::cast_slice(&values))];
            quick_writer(root.path()).save(&CheckpointMeta { compared, ..meta(step) }, &pieces, &[]).unwrap();
        }
        let (found, skipped) = latest_compared(root.path()).unwrap();
        let steps = skipped.iter().map(|s| CheckpointId::from_dir(&s.path).unwrap().step).collect::<Vec<u64>>();
        (found.unwrap().id().step, steps, skipped.first().map(|s| s.reason.to_string()).unwrap_or_default())
    };

    assert_eq!(chosen([true, true, true]), (3, vec![], String::new()));
    assert_eq!(chosen([false, false, false]), (3, vec![], String::new()));
    let (step, skipped, reason) = chosen([true, true, false]);
    assert_eq!((step, skipped), (2, vec![3]));
    assert!(reason.contains("saved unverified") && reason.contains("step-0000000002"), "{reason}");
}

#[test]
fn uncommitted_directory_is_skipped_with_its_reason_and_a_retry_takes_the_next_generation() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    save_state(&writer, 1).unwrap();
    let crashed = save_state(&writer, 2).unwrap().path;
    fs::remove_file(crashed.join("COMMIT")).unwrap();

    let (_, skipped) = latest_valid(root.path()).unwrap();
    assert!(skipped[0].reason.to_string().ends_with("is not committed: saving it did not finish"));

    let retried = save_state(&writer, 2).unwrap();
    assert_eq!((retried.step, retried.generation), (2, 4));
    assert_eq!(loaded_step(root.path()), Some(2));
}

#[test]
fn retention_keeps_the_newest_and_removes_remains_of_unfinished_saves() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    for step in 1..=5 {
        let id = save_state(&writer, step).unwrap();
        if step == 3 {
            fs::remove_file(id.path.join("COMMIT")).unwrap();
        }
    }
    fs::create_dir(root.path().join(".trash-step-0000000000.g0000")).unwrap();

    let removed = writer.retain(2, &newest(root.path())).unwrap();

    assert_eq!(steps(root.path()), [(5, 3), (4, 3)]);
    assert_eq!(removed.len(), 3);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
}

#[test]
fn retention_keeps_the_checkpoint_of_a_named_step_besides_the_newest() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    for step in 1..=5 {
        save_state(&writer, step).unwrap();
    }

    writer.retain(Keep { newest: 2, also: Some(2) }, &newest(root.path())).unwrap();

    let kept: Vec<u64> = steps(root.path()).into_iter().map(|(step, _)| step).collect();
    assert_eq!(kept, [5, 4, 2]);
}

#[test]
fn retention_never_removes_the_newest_valid_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    for step in 1..=4 {
        let shard = save_state(&writer, step).unwrap().path.join("rank-00000-0000.safetensors");
        if step >= 3 {
            fs::write(shard, "damaged").unwrap();
        }
    }

    writer.retain(0, &newest(root.path())).unwrap();

    assert_eq!(loaded_step(root.path()), Some(2));
    assert_eq!(steps(root.path()), [(4, 3), (3, 3), (2, 3)]);
}

#[test]
fn retention_removes_nothing_while_no_checkpoint_is_valid() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    for step in 1..=2 {
        fs::write(save_state(&writer, step).unwrap().path.join("MANIFEST"), "damaged").unwrap();
    }

    assert_eq!(writer.retain(1, &newest(root.path())).unwrap(), Vec::<std::path::PathBuf>::new());
    assert_eq!(steps(root.path()), [(2, 3), (1, 3)]);
}

#[test]
fn retention_keeps_what_it_cannot_read_and_counts_only_what_verifies() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    let ids: Vec<_> = (1..=6).map(|step| save_state(&writer, step).unwrap()).collect();
    let unreadable = ids[1].path.join("MANIFEST");
    fs::remove_file(&unreadable).unwrap();
    fs::create_dir(&unreadable).unwrap();
    fs::write(ids[4].path.join("MANIFEST"), "damaged").unwrap();

    let removed = writer.retain(2, &ids[5]).unwrap();

    assert_eq!(steps(root.path()), [(6, 3), (5, 3), (4, 3), (2, 3)]);
    assert_eq!(removed, [ids[2].path.clone(), ids[0].path.clone()]);
}

#[test]
fn retention_removes_nothing_while_the_newest_checkpoint_cannot_be_read() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    let ids: Vec<_> = (1..=3).map(|step| save_state(&writer, step).unwrap()).collect();
    fs::remove_file(ids[2].path.join("COMMIT")).unwrap();
    fs::create_dir(ids[2].path.join("COMMIT")).unwrap();

    assert!(writer.retain(1, &ids[2]).is_err());

    assert_eq!(steps(root.path()), [(3, 3), (2, 3), (1, 3)]);
}

#[test]
fn restarted_run_keeps_its_last_save_of_a_step_beside_the_checkpoints_of_a_longer_run() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    (1..=3).for_each(|step| drop(save_state(&writer, step).unwrap()));
    for generation in 4..8 {
        let saved = save_state(&writer, 2).unwrap();
        assert_eq!(saved.generation, generation);
        writer.retain(2, &saved).unwrap();
        assert!(saved.path.join("COMMIT").exists());
    }

    assert_eq!(steps(root.path()), [(3, 3), (2, 7), (1, 3)]);
}

/// Saves the state of a step as a run of this generation that began here.
fn save_as(root: &Path, generation: u64, beginning: Option<Beginning>, step: u64) -> CheckpointId {
    let pieces = [Piece::whole("w", Dtype::F32, &[4], bytemuck::cast_slice(&[1.0f32; 4]))];
    let writer = quick_writer(root).of_run(beginning);
    writer.save(&CheckpointMeta { generation, ..meta(step) }, &pieces, &[]).unwrap()
}

// CHECKPOINT-9
#[test]
fn checkpoints_of_a_run_that_was_given_up_are_neither_the_newest_nor_a_substitute_and_are_removed_first() {
    let root = &tempfile::tempdir().unwrap().keep();
    let newest_step = || latest_valid(root).unwrap().0.map(|found| (found.id().step, found.id().generation));
    let of_first: Vec<CheckpointId> = [20, 40, 60].map(|step| save_as(root, 1, None, step)).into();
    assert_eq!(newest_step(), Some((60, 1)));

    // Goes back to a named checkpoint.
    let back = Some(Beginning::new(1, Some(&of_first[0]), root));
    let saved = save_as(root, 2, back, 30);
    assert_eq!(newest_step(), Some((30, 2)));
    let (_, skipped) = latest_valid(root).unwrap();
    assert!(skipped.iter().all(|s| s.reason == CheckpointError::GivenUp), "{skipped:?}");
    assert_eq!(skipped.len(), 2);
    assert_eq!(latest_compared(root).unwrap().0.unwrap().id(), &saved);
    assert_eq!(latest_after(root, 10, 0).unwrap().0.unwrap().id(), &saved);

    // A damaged one is replaced by the one from which its run began, which it did not give up.
    fs::write(saved.path.join("MANIFEST"), "damaged").unwrap();
    assert_eq!(newest_step(), Some((20, 1)));

    // Begins again.
    let anew = Some(Beginning::new(2, None, root));
    save_as(root, 3, anew, 10);
    assert_eq!(newest_step(), Some((10, 3)));
    save_as(root, 4, None, 50);
    assert_eq!(newest_step(), Some((50, 4)));

    let last = save_as(root, 4, None, 70);
    quick_writer(root).retain(2, &last).unwrap();
    assert_eq!(steps(root), [(70, 4), (50, 4)], "those that were given up are the first to go");
}

#[test]
fn beginning_in_an_empty_directory_or_at_the_newest_checkpoint_gives_nothing_up() {
    let root = tempfile::tempdir().unwrap();
    let first = save_as(root.path(), 1, Some(Beginning::new(0, None, root.path())), 20);
    save_as(root.path(), 2, Some(Beginning::new(1, Some(&first), root.path())), 40);

    let names = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.map(|name| name.into_string().unwrap()).all(|name| name.starts_with("step-")));
}

#[test]
fn copy_of_a_checkpoint_under_another_name_can_be_read_and_another_folder_is_told_from_it() {
    let root = tempfile::tempdir().unwrap();
    let saved = save_as(root.path(), 1, None, 20);
    let (copy, other) = (root.path().join("best"), root.path().join("other"));
    fs::rename(&saved.path, &copy).unwrap();
    fs::create_dir(&other).unwrap();

    let opened = Checkpoint::open(&copy).unwrap();

    assert_eq!((opened.id().step, opened.id().generation, &opened.id().path), (20, 1, &copy));
    assert!(CheckpointId::is_at(&copy) && !CheckpointId::is_at(&other));
    assert!(matches!(Checkpoint::open(&other), Err(CheckpointError::BadDirectory { .. })));
}
