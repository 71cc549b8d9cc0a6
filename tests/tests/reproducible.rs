//! `reproducible: true`: however many ranks share the data, the state and the layers, the weights have the same bits.

use anyhow::Context;
use phalanx::{Event, Job};
use phalanx_strategies::mesh::Mesh;
use phalanx_tests::matrix::{Cell, Shape, job};
use std::path::Path;
use std::sync::Mutex;

const MICROBATCHES: usize = 8;

const fn mesh(pp: usize, dp_replicate: usize, dp_shard: usize) -> Mesh {
    Mesh { pp, dp_replicate, dp_shard, cp: 1, tp: 1 }
}

/// Final weights as they are exported, and the bits of each step's loss and gradient norm.
fn train(shape: Shape, cell: &Cell, dir: &Path, resume: Option<&Path>) -> anyhow::Result<(Vec<u8>, Vec<(u64, u64)>)> {
    let job: Job = job(shape, cell, dir, 4, resume, &format!("resumed-{}", resume.is_some()))?
        .set("gradient_accumulation_steps", 1)
        .set("microbatches_per_step", MICROBATCHES)
        .set("reproducible", true)
        .build()?;
    let curve = Mutex::new(Vec::new());
    let report = job.run_with(&phalanx::Control::default(), |event| {
        if let Event::Step(m) = event {
            curve.lock().expect("nobody panics with it").push((m.loss.to_bits(), m.grad_norm.to_bits()));
        }
    })?;
    let dir = report.model_dir.context("the run finished")?;
    Ok((std::fs::read(dir.join("model.safetensors"))?, curve.into_inner()?))
}

fn cell(mesh: Mesh, zero: usize, schedule: &'static str) -> Cell {
    Cell { mesh, zero, schedule, ..Cell::ALONE }
}

fn arrangements() -> Vec<Cell> {
    vec![
        cell(mesh(1, 2, 1), 3, "1f1b"),
        cell(mesh(1, 3, 1), 3, "1f1b"),
        cell(mesh(1, 5, 1), 3, "1f1b"),
        cell(mesh(1, 8, 1), 3, "1f1b"),
        cell(mesh(1, 1, 2), 1, "1f1b"),
        cell(mesh(1, 1, 3), 2, "1f1b"),
        cell(mesh(1, 1, 5), 3, "1f1b"),
        cell(mesh(1, 1, 8), 3, "1f1b"),
        cell(mesh(2, 1, 1), 3, "zero_bubble"),
        cell(mesh(3, 1, 1), 3, "1f1b"),
        cell(mesh(4, 1, 1), 3, "interleaved"),
        cell(mesh(5, 1, 1), 3, "gpipe"),
        cell(mesh(1, 2, 3), 3, "1f1b"),
        cell(mesh(2, 3, 1), 3, "1f1b"),
        cell(mesh(2, 1, 3), 3, "zero_bubble"),
        cell(mesh(2, 2, 2), 2, "interleaved"),
        cell(mesh(4, 1, 2), 1, "1f1b"),
    ]
}

#[test]
fn every_arrangement_ends_with_the_bits_of_one_rank() {
    for shape in Shape::ALL {
        let dir = tempfile::tempdir().unwrap();
        let (weights, curve) = train(shape, &Cell::ALONE, dir.path(), None).unwrap();
        for cell in arrangements() {
            let (theirs, their_curve) = train(shape, &cell, dir.path(), None).unwrap();

            assert_eq!(their_curve, curve, "{shape} {cell}: losses and norms");
            assert!(theirs == weights, "{shape} {cell}: weights");
        }
    }
}
