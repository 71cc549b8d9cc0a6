//! Rotary embedding: in place and not, both directions.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Attention, DType, Op, op};

/// Tokens.
const N: usize = 37;
/// Rows of the table.
const POSITIONS: usize = 50;

/// Heads of a width that fills vectors, of one that does not, and numbers of heads that threads cannot share evenly.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for inverse in [false, true] {
        cases.push(case(DType::Bf16, heads(8, 2, 64), inverse));
        cases.push(case(DType::Bf16, heads(1, 1, 128), inverse));
        cases.push(case(DType::F32, heads(6, 3, 24), inverse));
        cases.push(case(DType::F16, heads(14, 2, 10), inverse));
    }
    cases
}

/// The usual head widths in every type.
pub(super) fn widths() -> Vec<Case> {
    let types = super::HEAD_WIDTHS.into_iter().flat_map(|d| super::TYPES.map(|dtype| (d, dtype)));
    types.flat_map(|(d, dtype)| [false, true].map(|inverse| case(dtype, heads(3, 1, d), inverse))).collect()
}

/// Heads without mask or scale, which these operations do not use.
pub(super) fn heads(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Attention {
    Attention { n_heads, n_kv_heads, head_dim, seq_len: 1, window: None, scale: 1.0 }
}

fn case(dtype: DType, heads: Attention, inverse: bool) -> Case {
    let shape = [N, heads.qkv_columns()];
    // Not in order, and with the first and the last position.
    let positions = (0..N).map(|t| (t * 49 % POSITIONS) as f64).collect();
    let half = heads.head_dim / 2;
    let angle = |e: usize| (e / half) as f64 / 10f64.powf((e % half) as f64 / half as f64);
    let n_angles = POSITIONS * half;
    let table =
        (0..2 * n_angles).map(|e| if e < n_angles { angle(e).cos() } else { angle(e - n_angles).sin() }).collect();
    let reads = vec![
        Operand::random(&shape, dtype, 1),
        Operand::of(&[N], DType::I32, positions),
        Operand::of(&[2, POSITIONS, half], DType::F32, table),
    ];
    // The same formula without fused operations, so the same bits.
    let name = format!("rotary {dtype} {heads:?} {inverse}");
    Case::new(name, Op::Rotary(op::Rotary { heads, inverse }), reads, Tolerance::EXACT).writing(&shape, dtype)
}
