//! The whole matrix: every combination of axes up to a number of ranks, with every ZeRO stage and schedule, against one
//! rank. Prints the table of the README.
//!
//! `cargo run --release -p phalanx-tests --bin matrix -- [max_ranks] [filter]`

use phalanx_tests::matrix::{Cell, Curve, LOSS_TOLERANCE, NORM_TOLERANCE, STEPS, Shape, cells, distance, train};
use std::path::{Path, PathBuf};

fn main() -> anyhow::Result<()> {
    let max = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(8);
    let filter = std::env::args().nth(2).unwrap_or_default();
    let mut failures = 0;
    for shape in Shape::ALL {
        let dir = tempfile::tempdir()?;
        let (reference, _) = train(shape, &Cell::ALONE, dir.path(), STEPS, None)?;
        println!("{shape}: reference {reference:?}");
        let mut previous: Option<PathBuf> = None;
        for cell in cells(max).into_iter().filter(|c| c.to_string().contains(&filter)) {
            let outcome = check(shape, &cell, dir.path(), &reference, previous.as_deref());
            match outcome {
                Ok((loss, norm, checkpoint)) => {
                    let ok = loss <= LOSS_TOLERANCE && norm <= NORM_TOLERANCE;
                    failures += usize::from(!ok);
                    println!("{} {shape} {cell}: loss {loss:.1e} norm {norm:.1e}", if ok { "ok  " } else { "FAIL" });
                    previous = Some(checkpoint);
                }
                Err(error) => {
                    failures += 1;
                    println!("FAIL {shape} {cell}: {error:#}");
                }
            }
        }
    }
    anyhow::ensure!(failures == 0, "{failures} cells failed");
    Ok(())
}

/// Trains a cell to half of the steps from the start, compares, then to the end from the checkpoint of another cell.
fn check(
    shape: Shape,
    cell: &Cell,
    dir: &Path,
    reference: &Curve,
    other: Option<&Path>,
) -> anyhow::Result<(f64, f64, PathBuf)> {
    let half = STEPS / 2;
    let (first, checkpoint) = train(shape, cell, dir, half, None)?;
    let (second, _) = train(shape, cell, dir, STEPS, Some(other.unwrap_or(&checkpoint)))?;
    let (a, b) = reference.split_at(half as usize);
    let (x, y) = (distance(&first, a), distance(&second, b));
    Ok((x.0.max(y.0), x.1.max(y.1), checkpoint))
}
