//! Background saves: the checkpoint holds the copied state, and the snapshot's memory is reused.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::many_writers::Board;
use super::*;
use crate::checkpoint::background::{EndedSave, Snapshot};
use crate::checkpoint::catalog::list;
use crate::checkpoint::reader::Checkpoint;
use crate::checkpoint::writer::WriterRank;

const ALONE: WriterRank = WriterRank { writer: 0, n_writers: 1 };

fn add(snapshot: &mut Snapshot, start: usize, weights: &[f32]) {
    let (offset, shape) = ([start], [weights.len()]);
    let bytes = bytemuck::cast_slice(weights);
    let fingerprint = None;
    let global_shape = &[8];
    snapshot.add(&Piece {
        name: "w",
        dtype: Dtype::F32,
        global_shape,
        offset: &offset,
        shape: &shape,
        bytes,
        fingerprint,
    });
}

fn read(dir: &Path) -> [f32; 8] {
    let mut out = [0f32; 8];
    Checkpoint::open(dir).unwrap().read_whole_into("w", bytemuck::cast_slice_mut(&mut out)).unwrap();
    out
}

#[test]
fn training_goes_on_while_a_snapshot_is_saved_and_does_not_change_it() {
    let root = tempfile::tempdir().unwrap();
    let mut weights = [1f32; 8];
    let mut snapshot = Snapshot::default();
    add(&mut snapshot, 0, &weights);
    snapshot.add_extra("trainer.json", b"{}".to_vec());
    let (go_on, gate): (Sender<()>, Receiver<()>) = channel();
    let sum = move |value| gate.recv().map(|()| value);

    let saving = quick_writer(root.path()).save_in_background(meta(1), ALONE, snapshot, |_| Ok(()), None, sum).unwrap();
    weights.fill(2.0);
    assert!(!saving.is_finished());
    (0..3).for_each(|_| go_on.send(()).unwrap());
    let EndedSave { snapshot, saved, .. } = saving.wait();

    let id = saved.unwrap();
    assert_eq!(read(&id.path), [1.0; 8]);
    assert_eq!(Checkpoint::open(&id.path).unwrap().extra("trainer.json").unwrap(), b"{}");
    assert_eq!(snapshot.n_bytes(), 32);
}

#[test]
fn snapshot_is_reused_and_the_leader_removes_old_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let writer = quick_writer(root.path());
    let boards: Vec<Arc<Board>> = (0..3).map(|_| Arc::new(Board::new(2))).collect();
    let mut snapshots = [Snapshot::default(), Snapshot::default()];
    for (step, board) in (1..).zip(&boards) {
        let [first, second] = snapshots.map(|mut snapshot| {
            snapshot.clear();
            snapshot
        });
        let savings = [(0, first), (1, second)].map(|(writer_rank, mut snapshot)| {
            add(&mut snapshot, writer_rank as usize * 4, &[step as f32; 4]);
            let (writer_rank, board) = (WriterRank { writer: writer_rank, n_writers: 2 }, board.clone());
            let sum = move |value| board.sum(value);
            writer.save_in_background(meta(step), writer_rank, snapshot, |_| Ok(()), Some(2.into()), sum).unwrap()
        });
        snapshots = savings.map(|saving| {
            let EndedSave { snapshot, saved, .. } = saving.wait();
            assert_eq!(read(&saved.unwrap().path), [step as f32; 8]);
            snapshot
        });
    }

    let steps: Vec<u64> = list(root.path()).unwrap().iter().map(|id| id.step).collect();
    assert_eq!(steps, [3, 2]);
}

#[test]
fn waiting_for_a_failed_background_save_returns_its_error() {
    let root = tempfile::tempdir().unwrap();
    let mut snapshot = Snapshot::default();
    add(&mut snapshot, 0, &[1.0; 4]);

    let saving = quick_writer(root.path())
        .save_in_background(meta(1), ALONE, snapshot, |_| Ok(()), None, Ok::<_, String>)
        .unwrap();

    assert!(saving.wait().saved.unwrap_err().to_string().contains("hole or overlap"));
}
