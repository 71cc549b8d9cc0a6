//! Embedding and its adjoint.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::program::{DType, Op};

/// Several blocks of tokens, the last one not whole.
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
            cases.push(forward(columns, dtype, residual, part));
            cases.push(backward(columns, dtype, residual, part));
        }
    }
    // More columns than one block has.
    cases.push(backward(1036, DType::Bf16, false, Part::Whole));
    cases
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
    fn ids(self) -> Operand {
        let n_ids = if self == Part::Whole { V } else { 2 * V };
        let id = |i: usize| if i.is_multiple_of(3) { n_ids - 1 - i % 2 } else { i * i % n_ids };
        Operand::of(&[N], DType::I32, (0..N).map(|i| id(i) as f64).collect())
    }

    fn on_mesh(self, mut case: Case) -> Case {
        if self != Part::Whole {
            case.mesh_rank = MeshRank { mesh: Mesh { tp: 2, ..Mesh::ONE }, rank: usize::from(self == Part::Second) };
        }
        case
    }
}

fn forward(columns: usize, dtype: DType, residual: bool, part: Part) -> Case {
    let mut reads = vec![part.ids(), Operand::random(&[V, columns], DType::F32, 1)];
    if residual {
        reads.push(Operand::random(&[N, columns], dtype, 2));
    }
    let name = format!("embedding of {columns} columns, {dtype}, {part:?}, residual {residual}");
    // One addition and one rounding.
    let op = Op::Embedding { residual, first: part.first() };
    part.on_mesh(Case::new(name, op, reads, Tolerance::EXACT).writing(&[N, columns], dtype))
}

fn backward(columns: usize, dtype: DType, residual: bool, part: Part) -> Case {
    let mut reads = vec![part.ids(), Operand::random(&[N, columns], dtype, 1)];
    if residual {
        reads.push(Operand::random(&[V, columns], DType::F32, 2));
    }
    let name = format!("embedding backward of {columns} columns, {dtype}, {part:?}, residual {residual}");
    // Both machines add the tokens of an id in order.
    let op = Op::EmbeddingBackward { residual, first: part.first() };
    part.on_mesh(Case::new(name, op, reads, Tolerance::EXACT).writing(&[V, columns], DType::F32))
}
