//! Norm of each query and key head.

use super::norm::of_sum;
use super::rotary::heads;
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Attention, DType, Op, op};

/// f32 sums of up to 200 squares in two orders.
const FORWARD: Tolerance = Tolerance::of(2e-6);

/// Head widths from one vector to several for each thread.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, n, heads) in
        [(DType::Bf16, 2400, heads(4, 2, 64)), (DType::F32, 37, heads(2, 1, 200)), (DType::F16, 300, heads(3, 1, 7))]
    {
        cases.push(forward(dtype, n, heads));
        cases.extend([false, true].map(|residual| backward(dtype, n, heads, residual)));
    }
    cases
}

/// The usual head widths in every type, on a few tokens.
pub(super) fn widths() -> Vec<Case> {
    let types = super::HEAD_WIDTHS.into_iter().flat_map(|d| super::TYPES.map(|dtype| (d, dtype)));
    types
        .flat_map(|(d, dtype)| [forward(dtype, 33, heads(3, 1, d)), backward(dtype, 33, heads(3, 1, d), true)])
        .collect()
}

fn gains(d: usize, seed: u64) -> [Operand; 2] {
    [seed, seed + 1].map(|seed| Operand::random(&[d], DType::F32, seed))
}

fn forward(dtype: DType, n: usize, heads: Attention) -> Case {
    let shape = [n, heads.qkv_columns()];
    let reads = [vec![Operand::random(&shape, dtype, 1)], gains(heads.head_dim, 2).to_vec()].concat();
    let name = format!("head norm {dtype} {heads:?}");
    let case = Case::new(name, Op::HeadNorm(op::HeadNorm { heads, eps: 1e-5 }), reads, FORWARD);
    case.writing(&shape, dtype).writing(&[n, heads.n_heads + heads.n_kv_heads], DType::F32)
}

fn backward(dtype: DType, n: usize, heads: Attention, residual: bool) -> Case {
    let (shape, d) = ([n, heads.qkv_columns()], heads.head_dim);
    let mut reads = vec![Operand::random(&shape, dtype, 1)];
    reads.extend(gains(d, 2));
    reads.push(Operand::random(&[n, heads.n_heads + heads.n_kv_heads], DType::F32, 4).map(|r| 0.3 + 0.1 * r.abs()));
    reads.push(Operand::random(&shape, dtype, 5));
    reads.extend(gains(d, 6).into_iter().filter(|_| residual));
    let name = format!("head norm backward {dtype} {heads:?} {residual}");
    let case = Case::new(
        name,
        Op::HeadNormBackward(op::HeadNormBackward { heads, residual }),
        reads,
        of_sum(n * heads.n_heads),
    );
    case.writing(&shape, dtype).writing(&[d], DType::F32).writing(&[d], DType::F32)
}
