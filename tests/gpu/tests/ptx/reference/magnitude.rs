//! Rows of adapted weights with trained lengths.

use super::Matrix;
use phalanx_strategies::program::{AdaptedRows, Columns, Op, op};

/// The results of one of the operations.
pub fn reference(op: &Op, x: &[Matrix]) -> Vec<Vec<f64>> {
    match op {
        Op::RowLengths(op::RowLengths(rows)) => vec![row_lengths(rows, x)],
        Op::Magnitude(op::Magnitude(columns)) => vec![scale_columns(*columns, &x[0], x)],
        Op::MagnitudeBackward(op::MagnitudeBackward { columns, residual }) => {
            vec![scale_columns(*columns, &x[3], x), magnitude_backward(*columns, *residual, x)]
        }
        other => unreachable!("{} has no lengths", other.name()),
    }
}

fn row_lengths(rows: &AdaptedRows, x: &[Matrix]) -> Vec<f64> {
    let [w, a, b] = x else { panic!("a weight and two matrices") };
    let factor = f64::from(rows.factor);
    let of = |k: usize| {
        let o = rows.columns.start + k;
        let element = |i: usize| {
            let product: f64 = (0..b.cols).map(|r| b.row(k)[r] * a.row(r)[i]).sum();
            factor * product + if rows.trans_b { w.row(o)[i] } else { w.row(i)[o] }
        };
        (0..a.cols).map(|i| element(i).powi(2)).sum::<f64>().sqrt()
    };
    (0..rows.columns.len).map(of).collect()
}

/// Columns of `y` times the magnitude over the length, which are operands 1 and 2.
fn scale_columns(columns: Columns, y: &Matrix, x: &[Matrix]) -> Vec<f64> {
    let factor = |c: usize| match c.checked_sub(columns.start).filter(|c| *c < columns.len) {
        Some(c) => x[1].at[c] / x[2].at[c],
        None => 1.0,
    };
    y.at.iter().enumerate().map(|(i, y)| y * factor(i % x[0].cols)).collect()
}

fn magnitude_backward(columns: Columns, residual: bool, x: &[Matrix]) -> Vec<f64> {
    let of = |c: usize| {
        let products = x[0].rows().zip(x[3].rows()).map(|(x, dy)| x[columns.start + c] * dy[columns.start + c]);
        products.sum::<f64>() / x[2].at[c] + if residual { x[4].at[c] } else { 0.0 }
    };
    (0..columns.len).map(of).collect()
}
