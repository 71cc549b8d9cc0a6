//! Outcomes of the matrix: one JSON line per cell, and the table of `tests/MATRIX.md`.

use super::model::Shape;
use super::run::{Outcome, STEPS, Tolerance};
use phalanx_strategies::mesh::Mesh;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;

/// Lines before and after the table in `tests/MATRIX.md`.
const MARKERS: [&str; 2] = ["<!-- matrix: begin, written by the command above -->", "<!-- matrix: end -->"];

/// An outcome as one JSON object.
pub fn json_line(outcome: &Outcome, tolerance: &Tolerance) -> Value {
    let cell = |c: &super::cell::Cell| {
        json!({
            "pp": c.mesh.pp, "dp_replicate": c.mesh.dp_replicate, "dp_shard": c.mesh.dp_shard, "cp": c.mesh.cp,
            "tp": c.mesh.tp, "zero_stage": c.zero, "schedule": c.schedule, "sequence_parallel": c.sequence_parallel,
            "cp_comm": c.cp_comm,
        })
    };
    let mut line = json!({
        "model": outcome.shape.to_string(), "passed": outcome.passed(tolerance), "cell": cell(&outcome.cell),
        "resumed_from": cell(&outcome.from),
    });
    match &outcome.distance {
        Ok((loss, norm)) => (line["loss_difference"], line["norm_difference"]) = (json!(loss), json!(norm)),
        Err(error) => line["error"] = json!(error),
    }
    line
}

/// The table: a row for each mesh, with the worst of its cells.
pub fn table(outcomes: &[Outcome], tolerance: &Tolerance) -> String {
    let meshes: BTreeSet<(usize, Mesh)> = outcomes.iter().map(|o| (o.cell.mesh.size(), o.cell.mesh)).collect();
    let failed = outcomes.iter().filter(|o| !o.passed(tolerance)).count();
    let all: Vec<&Outcome> = outcomes.iter().collect();
    let mut text = format!(
        "{} runs of {STEPS} steps over {} meshes, each against one rank; {failed} failed. Worst difference of a loss {}, \
         of a gradient norm {}.\n\n",
        outcomes.len(),
        meshes.len(),
        number(worst(&all, 0)),
        number(worst(&all, 1)),
    );
    text += "| pp | dp_replicate | dp_shard | cp | tp |";
    for shape in Shape::ALL {
        let _ = write!(text, " {shape}: variants | loss | norm | resumed from |");
    }
    text += "\n|--:|--:|--:|--:|--:|";
    text += &"--:|--:|--:|--:|".repeat(Shape::ALL.len());
    text.push('\n');
    for (_, m) in meshes {
        let _ = write!(text, "| {} | {} | {} | {} | {} |", m.pp, m.dp_replicate, m.dp_shard, m.cp, m.tp);
        for shape in Shape::ALL {
            let here: Vec<&Outcome> = outcomes.iter().filter(|o| o.cell.mesh == m && o.shape == shape).collect();
            let passed = here.iter().filter(|o| o.passed(tolerance)).count();
            let from: BTreeSet<Mesh> = here.iter().map(|o| o.from.mesh).collect();
            let variants =
                if passed == here.len() { passed.to_string() } else { format!("{passed} of {}", here.len()) };
            let (loss, norm) = (number(worst(&here, 0)), number(worst(&here, 1)));
            let _ = write!(text, " {variants} | {loss} | {norm} | {} |", from.len());
        }
        text.push('\n');
    }
    text
}

/// The largest difference of a loss (0) or a norm (1); infinite if a cell failed.
fn worst(outcomes: &[&Outcome], which: usize) -> f64 {
    let of = |o: &&Outcome| o.distance.as_ref().map_or(f64::INFINITY, |d| [d.0, d.1][which]);
    outcomes.iter().map(of).fold(0.0, f64::max)
}

fn number(x: f64) -> String {
    if x == 0.0 { "0".into() } else { format!("{x:.1e}") }
}

/// The file with the new table between its markers; `None` without markers.
pub fn with_table(readme: &str, table: &str) -> Option<String> {
    let (before, rest) = readme.split_once(MARKERS[0])?;
    let (_, behind) = rest.split_once(MARKERS[1])?;
    Some(format!("{before}{}\n{table}{}{behind}", MARKERS[0], MARKERS[1]))
}

#[cfg(test)]
mod tests {
    use super::super::cell::Cell;
    use super::*;

    fn outcome(shape: Shape, distance: Result<(f64, f64), String>) -> Outcome {
        Outcome { shape, cell: Cell::ALONE, from: Cell::ALONE, distance }
    }

    #[test]
    fn row_has_the_worst_difference_of_its_cells_and_the_number_that_passed() {
        let outcomes = [
            outcome(Shape::Llama, Ok((1e-8, 3e-8))),
            outcome(Shape::Llama, Ok((2e-8, 1e-8))),
            outcome(Shape::Gpt2, Err("a peer was lost".into())),
        ];

        let table = table(&outcomes, &Tolerance::F32);

        let last = table.lines().last().expect("a table has rows");
        assert_eq!(last, "| 1 | 1 | 1 | 1 | 1 | 2 | 2.0e-8 | 3.0e-8 | 1 | 0 of 1 | inf | inf | 1 |");
        assert!(table.starts_with("3 runs of 8 steps over 1 meshes, each against one rank; 1 failed."), "{table}");
    }

    #[test]
    fn only_text_between_the_markers_changes() {
        let readme = format!("a\n{}\nold\n{}\nb\n", MARKERS[0], MARKERS[1]);

        let new = with_table(&readme, "new\n").expect("the text has markers");

        assert_eq!(new, readme.replace("old", "new"));
        assert_eq!(with_table("no markers", "new\n"), None);
    }
}
