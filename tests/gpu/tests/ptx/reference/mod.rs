//! What every operation computes, by its definition, in f64 and in the simplest order.

mod attention;
mod loss;
mod magnitude;
mod norms;
mod optimizers;
mod sequences;

use crate::elements::{rounded, stored};
use half::bf16;
use phalanx_device::e4m3;
use phalanx_gpu::case::{Case, Operand};
use phalanx_strategies::passes::reproducible::plan_of_sum;
use phalanx_strategies::program::packing::E4M3_STEP;
use phalanx_strategies::program::{
    ActivationFn, Attention, Columns, Compute, DType, Dropout, Hyper, MatMul, Op, Packing, op,
};
use std::slice::ChunksExact;

/// An operand: a matrix by rows.
pub struct Matrix {
    cols: usize,
    at: Vec<f64>,
}

impl Matrix {
    fn n_rows(&self) -> usize {
        self.at.len() / self.cols
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.at[i * self.cols..][..self.cols]
    }

    fn rows(&self) -> ChunksExact<'_, f64> {
        self.at.chunks_exact(self.cols)
    }

    fn map(&self, f: impl Fn(f64) -> f64) -> Vec<f64> {
        self.at.iter().map(|x| f(*x)).collect()
    }
}

/// The elements of every result of a case.
pub fn reference(case: &Case) -> Vec<Vec<f64>> {
    let operand = |operand: &Operand| Matrix { cols: last(&operand.shape), at: stored(operand) };
    let x: Vec<Matrix> = case.reads.iter().map(operand).collect();
    let n_written = |i: usize| case.writes[i].0.iter().product::<usize>();
    match &case.op {
        Op::MatMul(m) => vec![product(m, case.reads[1].dtype, &x)],
        Op::Attention(a) => attention::whole(a, &x),
        Op::AttentionBackward(op::AttentionBackward(a)) => attention::whole_backward(a, &x),
        Op::AttentionPart(part) => attention::part(part, &x),
        Op::CacheWrite(op::CacheWrite(a)) => vec![attention::cache_write(a, &x)],
        Op::CachedAttention(a) => attention::cached(a, &x),
        Op::AttentionPartBackward(b) => attention::part_backward(&b.part, b.carried_q, b.carried_kv, &x),
        Op::Embedding(op::Embedding { residual, first }) => vec![embedding(case.reads[1].dtype, &x, *residual, *first)],
        Op::EmbeddingBackward(b) => vec![embedding_backward(&x, b.residual, b.first, n_written(0))],
        Op::Activation(op::Activation(f)) => vec![activation(*f, &x)],
        Op::ActivationBackward(b) => activation_backward(b.function, b.again, &x),
        Op::Add(_) => vec![x[0].at.iter().zip(&x[1].at).map(|(a, b)| a + b).collect()],
        Op::Scale(op::Scale { factor }) => vec![x[0].map(|x| f64::from(*factor) * x)],
        Op::Dropout(dropout) => vec![drop_out(dropout, &x)],
        Op::Slice(op::Slice { start }) => vec![x[0].at[*start..][..n_written(0)].to_vec()],
        Op::Paste(op::Paste { start }) => vec![paste(*start, &x)],
        Op::Sum(_) => vec![sum_of_runs(&x, n_written(0))],
        Op::Assemble(op::Assemble { places }) => vec![assemble(places, &x, n_written(0))],
        Op::TreeSum(op::TreeSum { n_leaves, n_ranks }) => vec![tree_sum(*n_leaves, *n_ranks, &x, n_written(0))],
        Op::SumSquares(op::SumSquares { elements }) => {
            let (first, len) = elements.unwrap_or((0, x[0].at.len()));
            vec![vec![squares(&x[0].at[first..first + len])]]
        }
        Op::SumSquaresBlocks(op::SumSquaresBlocks { block }) => vec![x[0].at.chunks(*block).map(squares).collect()],
        Op::ClipCoefficient(op::ClipCoefficient { max_norm }) => clip(&x, *max_norm),
        Op::CrossEntropy(c) => loss::cross_entropy(&x, c.residual, c.gradient, c.vocab),
        Op::CrossEntropyStats(op::CrossEntropyStats(vocab)) => vec![loss::statistics(&x, vocab.first)],
        op if sequences::has(op) => sequences::reference(case, &x),
        Op::Update(update) => optimizers::update(update, &x),
        Op::UpdateSums(op::UpdateSums(update)) => optimizers::sums(update, &x),
        Op::Cast(_) => vec![x[0].at.clone()],
        Op::Unpack(op::Unpack(packing)) => vec![unpack(*packing, &x[0])],
        Op::Norm(op::Norm { kind, eps }) => norms::forward(*kind, f64::from(*eps), &x),
        Op::NormBackward(op::NormBackward { kind, residual_x, residual_params, again, narrow }) => {
            let mut results = norms::backward(*kind, *residual_x, *residual_params, *again, &x);
            let dx = narrow.then(|| results[0].clone());
            results.extend(dx);
            results
        }
        Op::HeadNorm(op::HeadNorm { heads, eps }) => norms::of_heads(heads, f64::from(*eps), &x),
        Op::HeadNormBackward(b) => norms::of_heads_backward(&b.heads, b.residual, &x),
        Op::QkSquares(op::QkSquares(columns)) => vec![norms::qk_squares(*columns, &x)],
        Op::QkSquaresBackward(b) => vec![norms::qk_squares_backward(b.columns, b.residual, &x)],
        Op::QkNorm(norm) => vec![norms::qk(norm, &x)],
        Op::QkNormBackward(op::QkNormBackward { norm, residual }) => norms::qk_backward(norm, *residual, &x),
        Op::Rotary(op::Rotary { heads, inverse }) => vec![rotary(heads, *inverse, &x)],
        Op::SplitColumns(_) => {
            let left = last(&case.writes[0].0);
            let part = |of: fn(&[f64], usize) -> &[f64]| x[0].rows().flat_map(|row| of(row, left).to_vec()).collect();
            vec![part(|row, left| &row[..left]), part(|row, left| &row[left..])]
        }
        Op::JoinColumns(_) => {
            vec![x[0].rows().zip(x[1].rows()).flat_map(|(left, right)| [left, right].concat()).collect()]
        }
        Op::AddBias(_) => {
            vec![x[0].rows().flat_map(|row| row.iter().zip(&x[1].at).map(|(x, b)| x + b)).collect()]
        }
        Op::RowLengths(_) | Op::Magnitude(_) | Op::MagnitudeBackward(_) => magnitude::reference(&case.op, &x),
        Op::ColumnSum(op::ColumnSum { residual, columns }) => vec![column_sum(&x, *residual, *columns)],
        other => unreachable!("{} has no kernel", other.name()),
    }
}

fn unpack(packing: Packing, words: &Matrix) -> Vec<f64> {
    let words: Vec<u32> = words.at.iter().map(|x| (*x as i32).cast_unsigned()).collect();
    let mut weights = vec![0.0f32; packing.weights(words.len())];
    phalanx_device::packed::unpack(packing, &words, &mut weights);
    weights.into_iter().map(f64::from).collect()
}

fn paste(start: usize, x: &[Matrix]) -> Vec<f64> {
    let mut y = x[0].at.clone();
    y[start..][..x[1].at.len()].copy_from_slice(&x[1].at);
    y
}

/// The last dim; 1 for a scalar.
fn last(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1).max(1)
}

fn squares(x: &[f64]) -> f64 {
    dot(x, x)
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Operands as products in FP8 round them; the other columns of `a` stay as they are.
fn operands_of_fp8(m: &MatMul, of_b: DType, x: &[Matrix]) -> [Matrix; 2] {
    let used = m.a_columns.unwrap_or(Columns { start: 0, len: x[0].cols });
    let mut a = x[0].at.clone();
    for row in a.chunks_exact_mut(x[0].cols) {
        let row = &mut row[used.start..][..used.len];
        let mut numbers: Vec<bf16> = row.iter().map(|x| bf16::from_f64(*x)).collect();
        e4m3::round_row(&mut numbers);
        row.iter_mut().zip(numbers).for_each(|(x, number)| *x = number.to_f64());
    }
    let step = f64::from(E4M3_STEP);
    let weight = |x: f64| match of_b {
        DType::E4m3 => x * step,
        _ => rounded(DType::E4m3, rounded(DType::Bf16, x) / step) * step,
    };
    [Matrix { at: a, cols: x[0].cols }, Matrix { at: x[1].map(weight), cols: x[1].cols }]
}

fn product(m: &MatMul, of_b: DType, x: &[Matrix]) -> Vec<f64> {
    let (a, b) = (&x[0], &x[1]);
    let operand = |x: f64| if m.compute == Compute::Bf16 { rounded(DType::Bf16, x) } else { x };
    let in_fp8 = (m.compute == Compute::Fp8).then(|| operands_of_fp8(m, of_b, &x[..2]));
    let (a, b) = in_fp8.as_ref().map_or((a, b), |[a, b]| (a, b));
    let used = m.a_columns.unwrap_or(Columns { start: 0, len: a.cols });
    let (rows, k) = if m.trans_a { (used.len, a.n_rows()) } else { (a.n_rows(), used.len) };
    let left = |i: usize, x: usize| if m.trans_a { a.row(x)[used.start + i] } else { a.row(i)[used.start + x] };
    let of_b = m.b_columns.unwrap_or(Columns { start: 0, len: b.cols });
    let right = |x: usize, j: usize| if m.trans_b { b.row(j)[of_b.start + x] } else { b.row(x)[of_b.start + j] };
    let n = if m.trans_b { b.n_rows() } else { of_b.len };
    let cols = if m.residual { x[x.len() - 1].cols } else { n };
    let written = m.c_columns.unwrap_or(Columns { start: 0, len: cols });
    let mut c = if m.residual { x[x.len() - 1].at.clone() } else { vec![0.0; rows * cols] };
    for (i, j) in (0..rows).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let sum: f64 = (0..k).map(|x| operand(left(i, x)) * operand(right(x, j))).sum();
        let at = i * cols + written.start + j;
        c[at] = f64::from(m.alpha) * sum + if m.replaces { 0.0 } else { c[at] };
    }
    if m.bias {
        c.chunks_exact_mut(cols).for_each(|row| row.iter_mut().zip(&x[2].at).for_each(|(c, bias)| *c += bias));
    }
    c
}

fn embedding(of_table: DType, x: &[Matrix], residual: bool, first: usize) -> Vec<f64> {
    let unpacked = (of_table == DType::I32)
        .then(|| Matrix { cols: Packing::Bf16.weights(x[1].cols), at: unpack(Packing::Bf16, &x[1]) });
    let (ids, table) = (&x[0].at, unpacked.as_ref().unwrap_or(&x[1]));
    let mut y = if residual { x[2].at.clone() } else { vec![0.0; ids.len() * table.cols] };
    for (id, y) in ids.iter().zip(y.chunks_exact_mut(table.cols)) {
        if let Some(row) = (*id as usize).checked_sub(first).filter(|row| *row < table.n_rows()) {
            y.iter_mut().zip(table.row(row)).for_each(|(y, x)| *y += x);
        }
    }
    y
}

fn embedding_backward(x: &[Matrix], residual: bool, first: usize, n_table: usize) -> Vec<f64> {
    let (ids, dx) = (&x[0].at, &x[1]);
    let mut dtable = if residual { x[2].at.clone() } else { vec![0.0; n_table] };
    for (id, dx) in ids.iter().zip(dx.rows()) {
        let row = (*id as usize).checked_sub(first).and_then(|row| dtable.chunks_exact_mut(dx.len()).nth(row));
        row.into_iter().flatten().zip(dx).for_each(|(sum, dx)| *sum += dx);
    }
    dtable
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x / 2 (1 + tanh(u))`, and `u` and its slope.
fn gelu_argument(x: f64) -> (f64, f64) {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    (scale * (x + 0.044715 * x.powi(3)), scale * (1.0 + 3.0 * 0.044715 * x * x))
}

fn activation(f: ActivationFn, x: &[Matrix]) -> Vec<f64> {
    let swiglu = |row: &[f64]| {
        let (gates, ups) = row.split_at(row.len() / 2);
        gates.iter().zip(ups).map(|(gate, up)| gate * sigmoid(*gate) * up).collect::<Vec<f64>>()
    };
    match f {
        ActivationFn::SwiGlu => x[0].rows().flat_map(swiglu).collect(),
        ActivationFn::GeluTanh => x[0].map(|x| 0.5 * x * (1.0 + gelu_argument(x).0.tanh())),
    }
}

fn activation_backward(f: ActivationFn, again: bool, x: &[Matrix]) -> Vec<Vec<f64>> {
    let swiglu = |(row, dy): (&[f64], &[f64])| {
        let (gates, ups) = row.split_at(row.len() / 2);
        let of_gate = |((gate, up), dy): ((&f64, &f64), &f64)| {
            let s = sigmoid(*gate);
            dy * up * (s + gate * s * (1.0 - s))
        };
        let of_up = |(gate, dy): (&f64, &f64)| dy * gate * sigmoid(*gate);
        let gate = gates.iter().zip(ups).zip(dy).map(of_gate);
        gate.chain(gates.iter().zip(dy).map(of_up)).collect::<Vec<f64>>()
    };
    let gelu = |(x, dy): (&f64, &f64)| {
        let (u, slope) = gelu_argument(*x);
        dy * (0.5 * (1.0 + u.tanh()) + 0.5 * x * (1.0 - u.tanh().powi(2)) * slope)
    };
    let dx = match f {
        ActivationFn::SwiGlu => x[0].rows().zip(x[1].rows()).flat_map(swiglu).collect(),
        ActivationFn::GeluTanh => x[0].at.iter().zip(&x[1].at).map(gelu).collect(),
    };
    [dx].into_iter().chain(again.then(|| activation(f, x))).collect()
}

fn clip(x: &[Matrix], max_norm: Option<f64>) -> Vec<Vec<f64>> {
    let (hyper, sums) = x.split_last().expect("the scalars of the step come last");
    let scale = hyper.at[Hyper::LOSS_SCALE];
    let norm = sums.iter().map(|sum| sum.at[0]).sum::<f64>().sqrt() / scale;
    let factor = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0)) / scale;
    vec![vec![norm], vec![if norm.is_finite() { factor } else { f64::NAN }]]
}

fn rotary(heads: &Attention, inverse: bool, x: &[Matrix]) -> Vec<f64> {
    let (d, n_rotated) = (heads.head_dim, heads.n_heads + heads.n_kv_heads);
    let (cosines, sines) = x[2].at.split_at(x[2].at.len() / 2);
    let mut y = x[0].at.clone();
    for (row, position) in y.chunks_exact_mut(x[0].cols).zip(&x[1].at) {
        for head in row.chunks_exact_mut(d).take(n_rotated) {
            for i in 0..d / 2 {
                let at = *position as usize * (d / 2) + i;
                let (cos, sin) = (cosines[at], if inverse { -sines[at] } else { sines[at] });
                let (a, b) = (head[i], head[i + d / 2]);
                (head[i], head[i + d / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
    y
}

fn column_sum(x: &[Matrix], residual: bool, columns: Option<Columns>) -> Vec<f64> {
    let Columns { start, len } = columns.unwrap_or(Columns { start: 0, len: x[0].cols });
    let base = |j: usize| if residual { x[1].at[j] } else { 0.0 };
    (0..len).map(|j| base(j) + x[0].rows().map(|row| row[start + j]).sum::<f64>()).collect()
}

fn drop_out(dropout: &Dropout, x: &[Matrix]) -> Vec<f64> {
    let mut y = Vec::new();
    for (row, key) in x[0].rows().zip(&x[1].at) {
        let of_token = dropout.of_token(*key as i32);
        let kept = |column: usize| dropout.draw(of_token, column) >= dropout.threshold();
        let of = |(column, x): (usize, &f64)| if kept(column) { x * f64::from(dropout.factor()) } else { 0.0 };
        y.extend(row.iter().enumerate().map(of));
    }
    y
}

fn tree_sum(n_leaves: usize, n_ranks: usize, x: &[Matrix], n: usize) -> Vec<f64> {
    let terms = plan_of_sum(n_leaves, n_ranks).0;
    (0..n).map(|i| terms.iter().map(|(rank, k)| x[*k].at[rank * n + i]).sum()).collect()
}

fn sum_of_runs(x: &[Matrix], run: usize) -> Vec<f64> {
    let of = |i: usize| x.iter().flat_map(|x| x.at.iter().skip(i).step_by(run)).sum();
    (0..run).map(of).collect()
}

fn assemble(places: &[usize], x: &[Matrix], n: usize) -> Vec<f64> {
    let mut y = vec![0.0; n];
    places.iter().zip(x).for_each(|(place, x)| y[place * x.at.len()..][..x.at.len()].copy_from_slice(&x.at));
    y
}
