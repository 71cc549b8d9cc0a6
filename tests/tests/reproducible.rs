//! `reproducible: true`: the weights have the same bits for any number of ranks along pp, dp_replicate and dp_shard.

use phalanx_strategies::mesh::Mesh;
use phalanx_tests::matrix::cell::Cell;
use phalanx_tests::matrix::model::Shape;
use phalanx_tests::matrix::run::{Task, train};
use std::path::Path;

const STEPS: u64 = 4;

const fn mesh(pp: usize, dp_replicate: usize, dp_shard: usize) -> Mesh {
    Mesh { pp, dp_replicate, dp_shard, cp: 1, tp: 1 }
}

/// The exported weights, and the bits of each step's loss and gradient norm.
fn bits(task: &Task, cell: &Cell, dir: &Path) -> (Vec<u8>, Vec<(u64, u64)>) {
    let run = train(task, cell, dir, STEPS, None).unwrap_or_else(|error| panic!("{} {cell}: {error:#}", task.shape));
    let weights = std::fs::read(run.model.join("model.safetensors")).unwrap();
    (weights, run.curve.iter().map(|(loss, norm)| (loss.to_bits(), norm.to_bits())).collect())
}

fn cell(mesh: Mesh, zero: usize, schedule: &'static str) -> Cell {
    Cell { mesh, zero, schedule, ..Cell::ALONE }
}

/// Every mesh of 2 to 8 ranks along these axes. ZeRO stages and pipeline schedules alternate.
fn arrangements() -> Vec<Cell> {
    let mut cells = Vec::new();
    for pp in 1..=8 {
        for dp_replicate in 1..=8 / pp {
            for dp_shard in 1..=8 / (pp * dp_replicate) {
                let i = cells.len();
                let zero = if dp_shard > 1 { 1 + i % 3 } else { 3 };
                let schedule = match i % 4 {
                    _ if pp == 1 => "1f1b",
                    // These have enough microbatches for two chunks of layers per stage.
                    _ if [(4, 1, 1), (2, 2, 2)].contains(&(pp, dp_replicate, dp_shard)) => "interleaved",
                    0 => "gpipe",
                    1 => "zero_bubble",
                    _ => "1f1b",
                };
                cells.push(cell(mesh(pp, dp_replicate, dp_shard), zero, schedule));
            }
        }
    }
    cells.retain(|cell| cell.mesh.size() > 1);
    cells
}

#[test]
fn arrangements_cover_all_meshes_of_two_to_eight_ranks_with_every_schedule_and_stage() {
    let cells = arrangements();

    assert_eq!(cells.len(), 37);
    assert!((2..=8).all(|n| cells.iter().any(|cell| cell.mesh.size() == n)));
    for schedule in ["1f1b", "gpipe", "interleaved", "zero_bubble"] {
        assert!(cells.iter().any(|cell| cell.mesh.pp > 1 && cell.schedule == schedule), "{schedule}");
    }
    assert!((1..=3).all(|zero| cells.iter().any(|cell| cell.mesh.dp_shard > 1 && cell.zero == zero)));
}

#[test]
fn every_arrangement_ends_with_the_bits_of_one_rank() {
    for shape in Shape::ALL {
        let task = Task { extra: &[("reproducible", "true")], ..Task::plain(shape) };
        let dir = tempfile::tempdir().unwrap();
        let (weights, curve) = bits(&task, &Cell::ALONE, dir.path());
        for cell in arrangements() {
            let (theirs, their_curve) = bits(&task, &cell, dir.path());

            assert_eq!(their_curve, curve, "{shape} {cell}: losses and norms");
            assert!(theirs == weights, "{shape} {cell}: weights");
        }
    }
}

/// A few arrangements, with two or three microbatches a rank.
fn assert_bits_of_one_rank(extra: &'static [(&str, &str)]) {
    let cells = [
        cell(mesh(1, 2, 1), 3, "1f1b"),
        cell(mesh(1, 1, 2), 1, "1f1b"),
        cell(mesh(1, 1, 3), 3, "1f1b"),
        cell(mesh(2, 1, 2), 2, "interleaved"),
    ];
    for shape in Shape::ALL {
        let task = Task { shape, extra };
        let dir = tempfile::tempdir().unwrap();
        let alone = bits(&task, &Cell::ALONE, dir.path());
        for cell in &cells {
            let theirs = bits(&task, cell, dir.path());

            assert_eq!(theirs.1, alone.1, "{shape} {cell}: losses and norms");
            assert!(theirs.0 == alone.0, "{shape} {cell}: weights");
        }
    }
}

#[test]
fn lion_ends_with_the_bits_of_one_rank() {
    assert_bits_of_one_rank(&[("reproducible", "true"), ("optimizer", "lion"), ("learning_rate", "1e-4")]);
}

#[test]
fn adafactor_ends_with_the_bits_of_one_rank() {
    assert_bits_of_one_rank(&[("reproducible", "true"), ("optimizer", "adafactor"), ("learning_rate", "1e-2")]);
}

/// Projections have their state in blocks.
#[test]
fn adamw_of_8_bits_ends_with_the_bits_of_one_rank() {
    assert_bits_of_one_rank(&[
        ("reproducible", "true"),
        ("optimizer", "adamw_8bit"),
        ("model.hidden_size", "64"),
        ("model.n_embd", "64"),
    ]);
}

#[test]
fn every_arrangement_of_the_other_axes_ends_with_the_same_bits_at_a_fixed_tp() {
    let with_tp = |tp: usize, cell: Cell, sequence_parallel: bool| Cell {
        mesh: Mesh { tp, ..cell.mesh },
        sequence_parallel,
        ..cell
    };
    let others = [
        cell(mesh(1, 2, 1), 3, "1f1b"),
        cell(mesh(1, 1, 2), 1, "1f1b"),
        cell(mesh(1, 1, 2), 3, "1f1b"),
        cell(mesh(1, 1, 3), 2, "1f1b"),
        cell(mesh(1, 2, 2), 3, "1f1b"),
        cell(mesh(2, 1, 1), 3, "zero_bubble"),
        cell(mesh(2, 2, 1), 3, "1f1b"),
    ];
    for (shape, tp, sequence_parallel) in
        [(Shape::Llama, 2, false), (Shape::Llama, 2, true), (Shape::Llama, 4, false), (Shape::Gpt2, 2, true)]
    {
        let task = Task { extra: &[("reproducible", "true")], ..Task::plain(shape) };
        let dir = tempfile::tempdir().unwrap();
        let alone = bits(&task, &with_tp(tp, Cell::ALONE, sequence_parallel), dir.path());
        for cell in others {
            let cell = with_tp(tp, cell, sequence_parallel);

            let theirs = bits(&task, &cell, dir.path());

            assert_eq!(theirs.1, alone.1, "{shape} {cell}: losses and norms");
            assert!(theirs.0 == alone.0, "{shape} {cell}: weights");
        }
    }
}

#[test]
fn arrangements_end_with_different_bits_without_reproducible() {
    // Shows that the tests above can fail.
    let task = Task::plain(Shape::Llama);
    let dir = tempfile::tempdir().unwrap();

    let alone = bits(&task, &Cell::ALONE, dir.path());
    let replicated = bits(&task, &cell(mesh(1, 4, 1), 3, "1f1b"), dir.path());

    assert!(alone.0 != replicated.0);
}

#[test]
fn offloaded_optimizer_state_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let on_device = bits(&Task::plain(Shape::Gpt2), &Cell::ALONE, dir.path());
    let offloaded = Task { extra: &[("offload_optimizer", "true")], ..Task::plain(Shape::Gpt2) };

    assert!(bits(&offloaded, &Cell::ALONE, dir.path()) == on_device);
}
