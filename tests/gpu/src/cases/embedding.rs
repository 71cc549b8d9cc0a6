//! Embedding and its adjoint.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::program::{DType, Op, op};

/// Tokens: several blocks of them, the last one not whole.
const N: usize = 150;
/// Rows of the table.
const V: usize = 50;

/// Element types, residuals, parts of the table, and rows of different widths.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for (columns, residual, part) in
            [(40, false, Part::Whole), (37, true, Part::Whole), (40, true, Part::First), (37, false, Part::Second)]
        {
            cases.push(forward(N, columns, dtype, residual, part));
            cases.push(forward(N, columns, dtype, residual, part).splitting(1));
            cases.push(backward(N, columns, dtype, residual, part));
        }
    }
    for (columns, residual, part) in [(40, false, Part::Whole), (38, true, Part::Second)] {
        cases.push(packed(forward(N, columns, DType::Bf16, residual, part)));
    }
    // More columns than one block has.
    cases.push(backward(N, 1036, DType::Bf16, false, Part::Whole));
    cases
}

/// Every number of tokens.
pub(super) fn rows() -> Vec<Case> {
    let types = super::ROWS.into_iter().flat_map(|rows| super::TYPES.map(|dtype| (rows, dtype)));
    types
        .flat_map(|(n, dtype)| [forward(n, 51, dtype, true, Part::Whole), backward(n, 51, dtype, true, Part::Whole)])
        .collect()
}

/// The rows of the whole table that the operand has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Whole,
    First,
    Second,
}

impl Part {
    fn first(self) -> usize {
        if self == Part::Second { V } else { 0 }
    }

    /// Ids within the table, or of both parts. Some occur often, some never.
    fn ids(self, n: usize) -> Operand {
        let n_ids = if self == Part::Whole { V } else { 2 * V };
        let id = |i: usize| if i.is_multiple_of(3) { n_ids - 1 - i % 2 } else { i * i % n_ids };
        Operand::of(&[n], DType::I32, (0..n).map(|i| id(i) as f64).collect())
    }

    fn on_mesh(self, mut case: Case) -> Case {
        if self != Part::Whole {
            case.mesh_rank = MeshRank { mesh: Mesh { tp: 2, ..Mesh::ONE }, rank: usize::from(self == Part::Second) };
        }
        case
    }
}

fn forward(n: usize, columns: usize, dtype: DType, residual: bool, part: Part) -> Case {
    let mut reads = vec![part.ids(n), Operand::random(&[V, columns], DType::F32, 1)];
    if residual {
        reads.push(Operand::random(&[n, columns], dtype, 2));
    }
    let name = format!("embedding of {n} tokens, {columns} columns, {dtype}, {part:?}, residual {residual}");
    // One addition and one rounding.
    let op = Op::Embedding(op::Embedding { residual, first: part.first() });
    part.on_mesh(Case::new(name, op, reads, Tolerance::EXACT).writing(&[n, columns], dtype))
}

/// The case with its table in words of two bf16 numbers.
fn packed(case: Case) -> Case {
    let mut reads = case.reads;
    let rounded = |x: f64| (x as f32).to_bits() >> 16;
    let pairs = reads[1].elements.chunks(2).map(|pair| rounded(pair[0]) | rounded(pair[1]) << 16);
    let words = pairs.map(|word| f64::from(word.cast_signed())).collect();
    reads[1] = Operand::of(&[V, reads[1].shape[1] / 2], DType::I32, words);
    Case { name: format!("{}, packed", case.name), reads, ..case }
}

fn backward(n: usize, columns: usize, dtype: DType, residual: bool, part: Part) -> Case {
    let mut reads = vec![part.ids(n), Operand::random(&[n, columns], dtype, 1)];
    if residual {
        reads.push(Operand::random(&[V, columns], DType::F32, 2));
    }
    let name = format!("embedding backward of {n} tokens, {columns} columns, {dtype}, {part:?}, residual {residual}");
    // Both machines add the tokens of an id in order.
    let op = Op::EmbeddingBackward(op::EmbeddingBackward { residual, first: part.first() });
    part.on_mesh(Case::new(name, op, reads, Tolerance::EXACT).writing(&[V, columns], DType::F32))
}
