//! CHECKPOINT-3 for ranks that read only their part: a rank verifies what it reads and touches nothing else.

use std::fs;

use super::*;
use crate::checkpoint::reader::Checkpoint;
use phalanx_strategies::boxes::TensorBox;

/// A checkpoint of `n` writers, each with one row of 8 bytes; the row `i` is all `i`.
fn rows(root: &Path, n: u32) -> CheckpointId {
    let pending = quick_writer(root).begin(&meta(1)).unwrap();
    for writer in 0..n {
        let row = Piece {
            name: "rows",
            dtype: Dtype::U8,
            global_shape: &[n as usize, 8],
            offset: &[writer as usize, 0],
            shape: &[1, 8],
            bytes: &[writer as u8; 8],
            fingerprint: None,
        };
        pending.write_part(writer, &[row], &[]).unwrap();
    }
    pending.commit(n).unwrap();
    pending.id().clone()
}

fn row(checkpoint: &Checkpoint, i: usize) -> Result<[u8; 8], CheckpointError> {
    let mut out = [0; 8];
    checkpoint.read_into("rows", &TensorBox { offset: vec![i, 0], extent: vec![1, 8] }, &mut out).map(|()| out)
}

fn flip_last_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn lazy_reads_open_only_the_files_they_need_and_detect_their_damage() {
    let root = tempfile::tempdir().unwrap();
    let id = rows(root.path(), 4);
    fs::remove_file(id.path.join("rank-00000-0000.safetensors")).unwrap();
    flip_last_bit(&id.path.join("rank-00002-0000.safetensors"));

    let checkpoint = Checkpoint::open_lazily(&id.path).unwrap();

    assert_eq!(row(&checkpoint, 1), Ok([1; 8]));
    assert_eq!(row(&checkpoint, 3), Ok([3; 8]));
    let damaged = row(&checkpoint, 2).unwrap_err();
    assert!(matches!(damaged, CheckpointError::FileHash { path, .. } if path.ends_with("rank-00002-0000.safetensors")));
    assert!(matches!(row(&checkpoint, 0), Err(CheckpointError::MissingFile { .. })));
}

#[test]
fn box_over_rows_of_many_writers_reads_from_each() {
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open_lazily(&rows(root.path(), 5).path).unwrap();
    let mut column = [0; 3];

    checkpoint.read_into("rows", &TensorBox { offset: vec![1, 7], extent: vec![3, 1] }, &mut column).unwrap();

    assert_eq!(column, [1, 2, 3]);
}

#[test]
fn checkpoint_of_more_files_than_may_be_open_is_read() {
    let root = tempfile::tempdir().unwrap();
    let path = rows(root.path(), 200).path;

    let checkpoint = Checkpoint::open(&path).unwrap();

    let of_this = |entry: std::io::Result<fs::DirEntry>| {
        fs::read_link(entry.unwrap().path()).is_ok_and(|to| to.starts_with(&path))
    };
    let n_open = fs::read_dir("/proc/self/fd").unwrap().map(of_this).filter(|&ours| ours).count();
    assert!(n_open <= 128, "{n_open} files are open");
    assert!((0..200).all(|i| row(&checkpoint, i) == Ok([i as u8; 8])));
}

#[test]
fn replaced_file_is_verified_again_when_it_is_reopened() {
    let root = tempfile::tempdir().unwrap();
    let path = rows(root.path(), 200).path;
    let checkpoint = Checkpoint::open_lazily(&path).unwrap();
    assert_eq!(row(&checkpoint, 0), Ok([0; 8]));
    // Opening the others closes the first.
    assert!((1..200).all(|i| row(&checkpoint, i).is_ok()));
    flip_last_bit(&path.join("rank-00000-0000.safetensors"));

    assert!(matches!(row(&checkpoint, 0), Err(CheckpointError::FileHash { .. })));
}

#[test]
fn second_read_of_a_verified_chunk_reads_only_the_requested_bytes() {
    let root = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..64 << 10).map(|x: u32| (x * 7) as u8).collect();
    let id =
        quick_writer(root.path()).save(&meta(1), &[Piece::whole("t", Dtype::U8, &[64 << 10], &content)], &[]).unwrap();
    let checkpoint = Checkpoint::open_lazily(&id.path).unwrap();
    let read = |at: usize| {
        let mut out = [0];
        checkpoint.read_into("t", &TensorBox { offset: vec![at], extent: vec![1] }, &mut out).map(|()| out[0])
    };
    assert_eq!(read(5), Ok(content[5]));

    // Damage elsewhere in the chunk goes undetected, which shows that the chunk is not read and hashed again.
    flip_last_bit(&id.path.join("rank-00000-0000.safetensors"));

    assert_eq!(read(6), Ok(content[6]));
    assert!(matches!(Checkpoint::open(&id.path), Err(CheckpointError::FileHash { .. })));
}
