//! CHECKPOINT-1, CHECKPOINT-2 and CHECKPOINT-7 with many writers: the death of any writer at any moment loses nothing
//! committed.

use super::faulty_disk::FaultyDisk;
use super::many_writers::Board;
use super::*;
use crate::checkpoint::catalog::list;
use crate::checkpoint::writer::WriterRank;

const N_WRITERS: u32 = 3;

/// Where a writer dies: after a number of operations of its disk, or instead of an exchange with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Operation(usize),
    Exchange(usize),
}

/// One writer's part of the state that [`loaded_step`] expects.
fn save_part(
    writer: &CheckpointWriter,
    writer_rank: u32,
    step: u64,
    sum: impl FnMut(u64) -> Result<u64, String>,
) -> Result<CheckpointId, CheckpointError> {
    let weights: Vec<f32> = (0..24).map(|x| x as f32 + step as f32).collect();
    let counts = [step; 3];
    let row = |i: usize| Piece {
        name: "model.weight",
        dtype: Dtype::F32,
        global_shape: &[4, 6],
        offset: if i == 0 { &[0, 0] } else { &[2, 0] },
        shape: &[2, 6],
        bytes: bytemuck::cast_slice(&weights[i * 12..(i + 1) * 12]),
        fingerprint: None,
    };
    let json = format!("{{\"step\":{step}}}");
    let extras: [(&str, &[u8]); 1] = [("trainer.json", json.as_bytes())];
    let writer_rank = WriterRank { writer: writer_rank, n_writers: N_WRITERS };
    let counts = Piece::whole("counts", Dtype::U64, &[3], bytemuck::cast_slice(&counts));
    let pieces = match writer_rank.writer {
        0 => vec![row(0)],
        1 => vec![counts, row(1)],
        _ => vec![],
    };
    writer.save_together(&meta(step), writer_rank, &pieces, if writer_rank.writer == 0 { &extras } else { &[] }, sum)
}

/// Saves with all writers on one disk; no writer dies.
fn save_on(disk: &FaultyDisk, root: &Path, step: u64) -> Vec<Result<CheckpointId, CheckpointError>> {
    let board = Board::new(N_WRITERS as usize);
    let writer = CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), root);
    let part = |writer_rank| save_part(&writer, writer_rank, step, |value| board.sum(value));
    std::thread::scope(|scope| {
        let writer_ranks: Vec<_> = (0..N_WRITERS).map(|writer_rank| scope.spawn(move || part(writer_rank))).collect();
        writer_ranks.into_iter().map(|writer_rank| writer_rank.join().unwrap()).collect()
    })
}

/// Saves with all writers; one writer dies during the save. Its result here is the one that it would have returned alive.
fn save_with_death(root: &Path, step: u64, dying: u32, death: Death) -> Vec<Result<CheckpointId, CheckpointError>> {
    let board = Board::new(N_WRITERS as usize);
    let part = |writer_rank| {
        let disk = match death {
            Death::Operation(n) if writer_rank == dying => FaultyDisk::stopping_after(n),
            _ => FaultyDisk::default(),
        };
        let mut n_exchanges = 0;
        let sum = |value| {
            let dies = disk.has_stopped() || death == Death::Exchange(n_exchanges);
            n_exchanges += 1;
            if writer_rank == dying && dies {
                board.leave();
                return Err("dead".into());
            }
            board.sum(value)
        };
        save_part(&CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), root), writer_rank, step, sum)
    };
    std::thread::scope(|scope| {
        let part = &part;
        let writer_ranks: Vec<_> = (0..N_WRITERS).map(|writer_rank| scope.spawn(move || part(writer_rank))).collect();
        writer_ranks.into_iter().map(|writer_rank| writer_rank.join().unwrap()).collect()
    })
}

fn operations_of_a_save() -> usize {
    let root = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::default();
    assert!(save_on(&disk, root.path(), 1).iter().all(Result::is_ok));
    disk.n_operations()
}

#[test]
fn writer_that_dies_at_any_operation_or_exchange_leaves_the_previous_or_the_new_checkpoint() {
    let deaths = (0..40).map(Death::Operation).chain((0..3).map(Death::Exchange));
    let mut seen = std::collections::BTreeSet::new();
    for (death, dying) in deaths.flat_map(|death| (0..N_WRITERS).map(move |dying| (death, dying))) {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();

        let results = save_with_death(root.path(), 2, dying, death);

        let loaded = loaded_step(root.path());
        assert!(loaded == Some(1) || loaded == Some(2), "writer {dying}, {death:?}: {loaded:?}");
        if results.iter().any(Result::is_ok) {
            assert_eq!(loaded, Some(2), "writer {dying}, {death:?}: a writer reported the save as done");
        }
        seen.insert((results.iter().all(Result::is_ok), loaded));
        // The next run saves the same step again, whatever remains, and retention removes the remains.
        assert!(save_on(&FaultyDisk::default(), root.path(), 2).iter().all(Result::is_ok));
        assert_eq!(loaded_step(root.path()), Some(2));
        let saved = list(root.path()).unwrap().remove(0);
        quick_writer(root.path()).retain(1, &saved).unwrap();
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "writer {dying}, {death:?}");
    }
    let outcomes = [(false, Some(1)), (false, Some(2)), (true, Some(2))];
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), outcomes, "the sweep must see all outcomes");
}

#[test]
fn power_failure_at_any_operation_leaves_the_previous_checkpoint_or_a_durable_new_one() {
    let n = operations_of_a_save();
    assert!(n > 25, "a save has only {n} operations");
    for k in 0..=n {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();
        let disk = FaultyDisk::stopping_after(k);

        let results = save_on(&disk, root.path(), 2);
        disk.lose_power();

        assert!(results.iter().all(|result| result.is_ok() == (k == n)), "after {k} operations");
        assert_eq!(loaded_step(root.path()), Some(if k == n { 2 } else { 1 }), "after {k} operations");
    }
}

#[test]
fn full_disk_fails_every_writer_and_keeps_only_the_previous_checkpoint() {
    let whole = tempfile::tempdir().unwrap();
    let id = save_on(&FaultyDisk::default(), whole.path(), 2)[0].clone().unwrap();
    let n_bytes: u64 = std::fs::read_dir(&id.path).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    for room in (0..n_bytes).step_by(487).chain([n_bytes - 1]) {
        let root = tempfile::tempdir().unwrap();
        save_state(&quick_writer(root.path()), 1).unwrap();

        let results = save_on(&FaultyDisk::full_after(room), root.path(), 2);

        let errors: Vec<String> = results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
        assert!(errors.iter().any(|error| error.contains("No space left on device")), "{errors:?}");
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "with room for {room} bytes");
        assert_eq!(loaded_step(root.path()), Some(1));
    }
}

#[test]
fn part_survives_a_power_failure_once_it_is_written() {
    let root = tempfile::tempdir().unwrap();
    let pending = quick_writer(root.path()).begin(&meta(2)).unwrap();
    let disk = FaultyDisk::default();
    let other = CheckpointWriter::on(Arc::new(Disk::on(Arc::new(disk.clone()))), root.path())
        .join(&meta(2), pending.id().generation);
    other.write_part(1, &[Piece::whole("t", Dtype::U8, &[2], &[1, 2])], &[("x", b"y")]).unwrap();

    disk.lose_power();

    pending.write_part(0, &[], &[]).unwrap();
    pending.commit(2).unwrap();
    assert_eq!(latest_valid(root.path()).unwrap().0.unwrap().extra("x").unwrap(), b"y");
}
