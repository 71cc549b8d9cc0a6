//! One checkpoint, saved by two writers and loaded by others: `cargo bench -p phalanx-storage --bench checkpoint -- DIR MIB`.
//!
//! The state is a Llama-shaped model with AdamW in f32, about MIB mebibytes; the two writers split each tensor by rows.
//! Prints one line per figure, a name and seconds: `first` and `stall`, the copies that training waits for, into
//! preallocated memory and into memory of the previous save; `save`, from there until the checkpoint is durable;
//! `load-rows` and `load-columns`, until three readers that split rows, or two that split columns, have verified their
//! parts. Ranks are threads that share only the disk. The counterpart is `tests/peers/checkpoints.py`.
//! Not a criterion benchmark: it alternates with its counterpart, one checkpoint each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_storage::checkpoint::background::Snapshot;
use phalanx_storage::checkpoint::checkpoint_meta::CheckpointMeta;
use phalanx_storage::checkpoint::piece::Piece;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::checkpoint::writer::{CheckpointWriter, WriterRank};
use phalanx_storage::hf::dtype::Dtype;
use phalanx_strategies::boxes::TensorBox;

const N_WRITERS: usize = 2;
/// Shapes of one layer: attention, SwiGLU, norms.
const LAYER: [[usize; 2]; 9] = [
    [1024, 1024],
    [1024, 1024],
    [1024, 1024],
    [1024, 1024],
    [2816, 1024],
    [2816, 1024],
    [1024, 2816],
    [1024, 1],
    [1024, 1],
];

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let [dir, mib] = args.as_slice() else {
        // `cargo bench` of the whole workspace gives no arguments.
        let dir = tempfile::tempdir()?;
        return run(dir.path(), 256);
    };
    run(Path::new(dir), mib.parse()?)
}

fn run(dir: &Path, mib: usize) -> anyhow::Result<()> {
    let tensors = tensors(mib << 20);
    let n_bytes: usize = tensors.iter().map(|(_, [rows, columns])| 4 * rows * columns).sum();
    println!("bytes {n_bytes}");
    let path = save(dir, &tensors)?;
    for (what, n_readers, dim) in [("load-rows", 3, 0), ("load-columns", 2, 1)] {
        println!("{what} {:.4}", load(&path, &tensors, n_readers, dim)?.as_secs_f64());
    }
    Ok(())
}

/// Name and shape of every tensor of a state of about `n_bytes` bytes.
fn tensors(n_bytes: usize) -> Vec<(String, [usize; 2])> {
    let layer_bytes: usize = LAYER.iter().map(|[rows, columns]| 3 * 4 * rows * columns).sum();
    let layers = 0..n_bytes.div_ceil(layer_bytes);
    let kinds = ["weight", "exp_avg", "exp_avg_sq"];
    let of_layer = |layer| {
        let named = move |(i, shape)| kinds.map(|kind| (format!("layers.{layer}.{i}.{kind}"), shape));
        LAYER.into_iter().enumerate().flat_map(named)
    };
    layers.flat_map(of_layer).collect()
}

/// The value of element `index` of tensor `t`.
fn element(t: usize, index: usize) -> f32 {
    ((t * 7919 + index) % (1 << 24)) as f32
}

fn save(dir: &Path, tensors: &[(String, [usize; 2])]) -> anyhow::Result<PathBuf> {
    let writer = CheckpointWriter::at(dir)?;
    let meta = CheckpointMeta {
        job: "bench".into(),
        step: 1,
        generation: 0,
        mesh: BTreeMap::new(),
        verified: false,
        compared: true,
    };
    let board = Arc::new(Board { barrier: Barrier::new(N_WRITERS), sum: Mutex::default() });
    let rank = |writer_rank: usize| -> anyhow::Result<PathBuf> {
        let parts: Vec<Vec<f32>> = tensors
            .iter()
            .enumerate()
            .map(|(t, (_, [rows, columns]))| {
                let half = rows / N_WRITERS * columns;
                (writer_rank * half..(writer_rank + 1) * half).map(|i| element(t, i)).collect()
            })
            .collect();
        // Training does the same after its first step.
        let mut snapshot = Snapshot::with_memory(parts.iter().map(|part| 4 * part.len()).sum());
        for what in ["first", "stall"] {
            board.barrier.wait();
            let start = Instant::now();
            snapshot.clear();
            snapshot.reserve(parts.iter().map(|part| 4 * part.len()).sum());
            for ((name, shape), part) in tensors.iter().zip(&parts) {
                let [rows, columns] = *shape;
                let (offset, half) = ([writer_rank * (rows / N_WRITERS), 0], [rows / N_WRITERS, columns]);
                let bytes = bytemuck::cast_slice(part);
                snapshot.add(&Piece {
                    name,
                    dtype: Dtype::F32,
                    global_shape: shape,
                    offset: &offset,
                    shape: &half,
                    bytes,
                    fingerprint: None,
                });
            }
            board.report(writer_rank, what, start);
        }
        let start = Instant::now();
        let (others, writer_ranks) =
            (board.clone(), WriterRank { writer: writer_rank as u32, n_writers: N_WRITERS as u32 });
        let sum = move |value| Ok::<_, std::convert::Infallible>(others.sum(value));
        let saved =
            writer.save_in_background(meta.clone(), writer_ranks, snapshot, |_| Ok(()), None, sum)?.wait().saved;
        board.report(writer_rank, "save", start);
        Ok(saved?.path)
    };
    let rank = &rank;
    let paths = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..N_WRITERS).map(|writer_rank| scope.spawn(move || rank(writer_rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<anyhow::Result<Vec<_>>>()
    });
    Ok(paths?.swap_remove(0))
}

/// Synchronizes the writers and sums their values.
struct Board {
    barrier: Barrier,
    sum: Mutex<u64>,
}

impl Board {
    fn sum(&self, value: u64) -> u64 {
        *self.sum.lock().expect("no rank panics") += value;
        self.barrier.wait();
        let sum = *self.sum.lock().expect("no rank panics");
        if self.barrier.wait().is_leader() {
            *self.sum.lock().expect("no rank panics") = 0;
        }
        self.barrier.wait();
        sum
    }

    /// Prints the time from `start` until every writer is done.
    fn report(&self, writer_rank: usize, what: &str, start: Instant) {
        self.barrier.wait();
        if writer_rank == 0 {
            println!("{what} {:.4}", start.elapsed().as_secs_f64());
        }
    }
}

/// Loads tensors split along `dim` between the readers, and checks them after the measurement.
fn load(path: &Path, tensors: &[(String, [usize; 2])], n_readers: usize, dim: usize) -> anyhow::Result<Duration> {
    let region = |shape: [usize; 2], reader: usize| {
        let cut = |at: usize| shape[dim] * at / n_readers;
        let (mut offset, mut part) = ([0; 2], shape);
        (offset[dim], part[dim]) = (cut(reader), cut(reader + 1) - cut(reader));
        TensorBox { offset: offset.into(), extent: part.into() }
    };
    let barrier = Barrier::new(n_readers);
    let reader = |reader: usize| -> anyhow::Result<Duration> {
        let room = |(_, shape): &(String, [usize; 2])| vec![1.0f32; region(*shape, reader).n_elements()];
        let mut parts: Vec<Vec<f32>> = tensors.iter().map(room).collect();
        barrier.wait();
        let start = Instant::now();
        let checkpoint = Checkpoint::open_lazily(path)?;
        for ((name, shape), part) in tensors.iter().zip(&mut parts) {
            checkpoint.read_into(name, &region(*shape, reader), bytemuck::cast_slice_mut(part))?;
        }
        barrier.wait();
        let time = start.elapsed();
        for (t, ((name, shape), part)) in tensors.iter().zip(&parts).enumerate() {
            let TensorBox { offset, extent: cut } = region(*shape, reader);
            let expected = (0..cut[0]).flat_map(|row| (0..cut[1]).map(move |column| (row, column)));
            let number = |row, column| (offset[0] + row) * shape[1] + offset[1] + column;
            let right = expected.zip(part).all(|((row, column), x)| *x == element(t, number(row, column)));
            anyhow::ensure!(right, "{name} differs from what was saved");
        }
        Ok(time)
    };
    let reader = &reader;
    let times = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..n_readers).map(|at| scope.spawn(move || reader(at))).collect();
        readers.into_iter().map(|reader| reader.join().expect("no reader panics")).collect::<anyhow::Result<Vec<_>>>()
    });
    Ok(times?.into_iter().max().unwrap_or_default())
}
