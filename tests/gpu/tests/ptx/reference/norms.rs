//! Norms of rows, of heads, and of all queries and keys.

use super::{Matrix, dot, squares};
use phalanx_strategies::program::{Attention, NormKind, QkColumns, QkNorm};

fn mean(x: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = x.len() as f64;
    x.sum::<f64>() / n
}

pub fn forward(kind: NormKind, eps: f64, x: &[Matrix]) -> Vec<Vec<f64>> {
    let is_layer = kind == NormKind::Layer;
    let (mut y, mut rstds, mut means) = (Vec::new(), Vec::new(), Vec::new());
    for row in x[0].rows() {
        let m = if is_layer { mean(row.iter().copied()) } else { 0.0 };
        let rstd = 1.0 / (mean(row.iter().map(|x| (x - m).powi(2))) + eps).sqrt();
        let bias = |j: usize| if is_layer { x[2].at[j] } else { 0.0 };
        y.extend(row.iter().enumerate().map(|(j, v)| (v - m) * rstd * x[1].at[j] + bias(j)));
        rstds.push(rstd);
        means.push(m);
    }
    if is_layer { vec![y, rstds, means] } else { vec![y, rstds] }
}

/// For given statistics, which need not be those of `x`.
pub fn backward(kind: NormKind, residual_x: bool, residual_params: bool, again: bool, x: &[Matrix]) -> Vec<Vec<f64>> {
    let is_layer = kind == NormKind::Layer;
    let (gain, rstds) = (&x[1].at, &x[2].at);
    let first = if is_layer { 4 } else { 3 };
    let dy = &x[first];
    let n_params = if is_layer { 2 } else { 1 };
    let base = |i: usize| match residual_params {
        true => x[first + 1 + usize::from(residual_x) + i].at.clone(),
        false => vec![0.0; x[0].cols],
    };
    let mut dx = if residual_x { x[first + 1].at.clone() } else { vec![0.0; x[0].at.len()] };
    let mut dparams: Vec<Vec<f64>> = (0..n_params).map(base).collect();
    for (i, ((row, dy), dx)) in x[0].rows().zip(dy.rows()).zip(dx.chunks_exact_mut(x[0].cols)).enumerate() {
        let (r, m) = (rstds[i], if is_layer { x[3].at[i] } else { 0.0 });
        let z = |j: usize| (row[j] - m) * r;
        let a = |j: usize| dy[j] * gain[j];
        let n = row.len();
        let (mean_a, mean_az) = (mean((0..n).map(a)), mean((0..n).map(|j| a(j) * z(j))));
        for j in 0..n {
            // The mean is a constant of the RMS norm.
            dx[j] += r * (a(j) - if is_layer { mean_a } else { 0.0 } - z(j) * mean_az);
            dparams[0][j] += dy[j] * z(j);
            if is_layer {
                dparams[1][j] += dy[j];
            }
        }
    }
    let y = again.then(|| result(kind, x));
    [dx].into_iter().chain(dparams).chain(y).collect()
}

/// The result of the norm for the statistics that its adjoint reads; the bias is the last operand.
fn result(kind: NormKind, x: &[Matrix]) -> Vec<f64> {
    let is_layer = kind == NormKind::Layer;
    let mut y = Vec::new();
    for (i, row) in x[0].rows().enumerate() {
        let (rstd, m) = (x[2].at[i], if is_layer { x[3].at[i] } else { 0.0 });
        let bias = |j: usize| if is_layer { x[x.len() - 1].at[j] } else { 0.0 };
        y.extend(row.iter().enumerate().map(|(j, v)| (v - m) * rstd * x[1].at[j] + bias(j)));
    }
    y
}

/// The query and key heads of a row, each with its number; values follow them.
fn normed<'a>(heads: &Attention, row: &'a [f64]) -> impl Iterator<Item = (usize, &'a [f64])> {
    row.chunks_exact(heads.head_dim).take(heads.n_heads + heads.n_kv_heads).enumerate()
}

pub fn of_heads(heads: &Attention, eps: f64, x: &[Matrix]) -> Vec<Vec<f64>> {
    let d = heads.head_dim;
    let (mut y, mut rstds) = (x[0].at.clone(), Vec::new());
    for (row, y) in x[0].rows().zip(y.chunks_exact_mut(x[0].cols)) {
        for (h, head) in normed(heads, row) {
            let gain = if h < heads.n_heads { &x[1].at } else { &x[2].at };
            let rstd = 1.0 / (squares(head) / d as f64 + eps).sqrt();
            y[h * d..][..d].iter_mut().zip(gain).for_each(|(y, gain)| *y *= rstd * gain);
            rstds.push(rstd);
        }
    }
    vec![y, rstds]
}

/// For given statistics.
pub fn of_heads_backward(heads: &Attention, residual: bool, x: &[Matrix]) -> Vec<Vec<f64>> {
    let d = heads.head_dim;
    let n_normed = heads.n_heads + heads.n_kv_heads;
    // Values pass through, and so do their gradients.
    let mut dqkv = x[4].at.clone();
    let mut dgains = [5, 6].map(|i| if residual { x[i].at.clone() } else { vec![0.0; d] });
    for (i, (row, dx)) in x[0].rows().zip(dqkv.chunks_exact_mut(x[0].cols)).enumerate() {
        for (h, head) in normed(heads, row) {
            let (gain, dgain) = if h < heads.n_heads { (&x[1].at, 0) } else { (&x[2].at, 1) };
            let r = x[3].at[i * n_normed + h];
            let dx = &mut dx[h * d..][..d];
            let dy = dx.to_vec();
            let along = mean((0..d).map(|j| dy[j] * gain[j] * head[j]));
            for j in 0..d {
                dx[j] = dy[j] * gain[j] * r - head[j] * r.powi(3) * along;
                dgains[dgain][j] += dy[j] * head[j] * r;
            }
        }
    }
    let [dgain_q, dgain_k] = dgains;
    vec![dqkv, dgain_q, dgain_k]
}

pub fn qk_squares(QkColumns { q, k }: QkColumns, x: &[Matrix]) -> Vec<f64> {
    x[0].rows().flat_map(|row| [squares(&row[..q]), squares(&row[q..q + k])]).collect()
}

pub fn qk_squares_backward(QkColumns { q, k }: QkColumns, residual: bool, x: &[Matrix]) -> Vec<f64> {
    let mut dqkv = if residual { x[2].at.clone() } else { vec![0.0; x[0].at.len()] };
    for ((row, d), dqkv) in x[0].rows().zip(x[1].rows()).zip(dqkv.chunks_exact_mut(x[0].cols)) {
        for j in 0..q + k {
            dqkv[j] += 2.0 * d[usize::from(j >= q)] * row[j];
        }
    }
    dqkv
}

/// Gains, number of columns, and place among the squares of queries (0) and keys (1), with their columns.
fn groups(norm: &QkNorm) -> [(usize, std::ops::Range<usize>, f64); 2] {
    let QkColumns { q, k } = norm.columns;
    [(0, 0..q, norm.summed.q as f64), (1, q..q + k, norm.summed.k as f64)]
}

pub fn qk(norm: &QkNorm, x: &[Matrix]) -> Vec<f64> {
    let mut y = x[0].at.clone();
    for (y, squares) in y.chunks_exact_mut(x[0].cols).zip(x[3].rows()) {
        for (of, columns, n) in groups(norm) {
            let r = 1.0 / (squares[of] / n + f64::from(norm.eps)).sqrt();
            y[columns].iter_mut().zip(&x[1 + of].at).for_each(|(y, gain)| *y *= r * gain);
        }
    }
    y
}

pub fn qk_backward(norm: &QkNorm, residual: bool, x: &[Matrix]) -> Vec<Vec<f64>> {
    let mut dqkv = x[4].at.clone();
    let mut dsquares = Vec::new();
    let mut dgains = [0, 1].map(|i| if residual { x[5 + i].at.clone() } else { vec![0.0; x[1 + i].at.len()] });
    for ((row, dqkv), squares) in x[0].rows().zip(dqkv.chunks_exact_mut(x[0].cols)).zip(x[3].rows()) {
        for (of, columns, n) in groups(norm) {
            let r = 1.0 / (squares[of] / n + f64::from(norm.eps)).sqrt();
            let (x, gain, dy) = (&row[columns.clone()], &x[1 + of].at, &mut dqkv[columns]);
            let products: Vec<f64> = dy.iter().zip(gain).map(|(dy, gain)| dy * gain).collect();
            dsquares.push(dot(&products, x) * r.powi(3) / (-2.0 * n));
            for j in 0..x.len() {
                dgains[of][j] += dy[j] * x[j] * r;
                dy[j] = products[j] * r;
            }
        }
    }
    let [dgain_q, dgain_k] = dgains;
    vec![dqkv, dsquares, dgain_q, dgain_k]
}
