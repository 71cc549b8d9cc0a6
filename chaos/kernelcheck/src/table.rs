//! The report as a table for people.

use crate::{KernelReport, Report};

const HEADER: [&str; 9] =
    ["source", "defines", "architecture", "kernel", "registers", "spills", "stack", "shared", "tensor"];

/// The report as text: a header and a line for each kernel, columns aligned.
pub fn table(report: &Report) -> String {
    let rows: Vec<[String; 9]> =
        std::iter::once(HEADER.map(str::to_owned)).chain(report.kernels.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 9] = std::array::from_fn(width);
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| {
            // Names are aligned at the left, numbers at the right.
            if column < 4 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

fn row(k: &KernelReport) -> [String; 9] {
    [
        k.source.clone(),
        k.defines.join(" "),
        k.architecture.clone(),
        k.kernel.clone(),
        k.registers.map_or_else(|| "-".into(), |n| n.to_string()),
        (k.spill_store_bytes + k.spill_load_bytes).to_string(),
        k.stack_bytes.to_string(),
        k.shared_bytes.to_string(),
        k.tensor_found.unwrap_or(k.tensor_wanted).to_string(),
    ]
}
