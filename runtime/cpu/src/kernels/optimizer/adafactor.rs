//! Adafactor: sums over whole tensors in two rounds, and the update; the formulas are in
//! [`phalanx_strategies::optimizer::Adafactor`].
//!
//! A vector is a matrix of one row with averages of columns only.

use super::super::parallel::{PARTS, rows_per_part, rows_per_task};
use super::super::simd::simd;
use super::{Step, Whole};
use crate::tasks::{Cut, Tasks};
use phalanx_strategies::optimizer::Adafactor;
use phalanx_strategies::program::tiles::{Stack, Tile};
use std::ops::Range;

/// Columns per task of summing squares.
const COLUMNS: usize = 64;
/// Number of partial sums of a row.
const LANES: usize = 16;

/// First round, over this rank's elements: `Σ g'²` of each row (of matrices) and column, and `Σ p²` of each tensor,
/// where `g' = grad_scale g`.
pub(super) fn squares(p: &[f32], g: &[f32], whole: &Whole<'_>, step: &Step, out: &mut [&mut [f32]]) {
    out.iter_mut().for_each(|sums| sums.fill(0.0));
    let scale = step.grad_scale as f32;
    let (mut of_rows, of_columns, of_tensors) = match out {
        [rows, columns, tensors] => (Some(rows), columns, tensors),
        [columns, tensors] => (None, columns, tensors),
        _ => unreachable!("{} sums of a first round", out.len()),
    };
    for tile in whole.tiles.tiles.iter().filter(|tile| tile.counted) {
        let stack = &whole.tiles.tensors[tile.tensor];
        if let Some(rows) = &mut of_rows {
            let n = rows_per_task(tile.n_columns);
            rows[rows_of(stack, tile)].par_chunks_mut(n).enumerate().for_each(|(task, sums)| {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum += row_squares(&g[tile.row_at(task * n + i)], scale) as f32;
                }
            });
        }
        of_columns[columns_of(stack, tile)].par_chunks_mut(COLUMNS).enumerate().for_each(|(task, sums)| {
            let mut totals = [0.0; COLUMNS];
            for i in 0..tile.n_rows {
                let first = tile.row_at(i).start + task * COLUMNS;
                add_squares(&mut totals[..sums.len()], &g[first..first + sums.len()], scale);
            }
            sums.iter_mut().zip(totals).for_each(|(sum, total)| *sum += total as f32);
        });
        of_tensors[tile.tensor] += over_rows(tile, |i| row_squares(&p[tile.row_at(i)], 1.0)) as f32;
    }
}

/// Second round, over this rank's elements: `Σ u²` of each tensor, before `u` is clipped.
pub(super) fn squares_of_updates(
    state: &[&[f32]],
    g: &[f32],
    rule: &Adafactor,
    whole: &Whole<'_>,
    step: &Step,
    out: &mut [f32],
) {
    out.fill(0.0);
    for tile in whole.tiles.tiles.iter().filter(|tile| tile.counted) {
        let averages = Averages::new(state, rule, whole, step, tile);
        out[tile.tensor] += over_rows(tile, |i| averages.squares_of_row(i, &g[tile.row_at(i)])) as f32;
    }
}

/// Updates this rank's elements, and the averages of all rows and columns.
pub(super) fn update(
    p: &mut [f32],
    state: &mut [&mut [f32]],
    g: &[f32],
    rule: &Adafactor,
    whole: &Whole<'_>,
    step: &Step,
) {
    let [.., of_tensors, of_updates] = whole.sums else { unreachable!("{} sums of an update", whole.sums.len()) };
    {
        let mut views: [&[f32]; 2] = [&[]; 2];
        state.iter().zip(&mut views).for_each(|(state, view)| *view = state);
        let views = &views[..state.len()];
        for tile in &whole.tiles.tiles {
            let averages = Averages::new(views, rule, whole, step, tile);
            let rms = |squares: &[f32]| (squares[tile.tensor] as f64 / averages.stack.n_elements() as f64).sqrt();
            let relative = rms(of_tensors).max(rule.eps2) * step.lr.min(step.scalars[1]);
            let by = Change {
                decay: (1.0 - step.lr * rule.weight_decay) as f32,
                length: (relative / (rms(of_updates) / rule.d).max(1.0)) as f32,
            };
            let rows = rows_per_task(tile.stride);
            let end = if tile.n_rows == 0 { tile.first } else { tile.row_at(tile.n_rows - 1).end };
            p[tile.first..end].par_chunks_mut((rows * tile.stride).max(1)).enumerate().for_each(|(task, p)| {
                for (i, p) in p.chunks_mut(tile.stride.max(1)).enumerate() {
                    let i = task * rows + i;
                    averages.update_row(i, &mut p[..tile.n_columns], &g[tile.row_at(i)], by);
                }
            });
        }
    }
    move_averages(state, whole, step);
}

fn rows_of(stack: &Stack, tile: &Tile) -> Range<usize> {
    let first = stack.rows_of(tile.matrix).start + tile.row;
    first..first + tile.n_rows
}

fn columns_of(stack: &Stack, tile: &Tile) -> Range<usize> {
    let first = stack.columns_of(tile.matrix).start + tile.column;
    first..first + tile.n_columns
}

/// Sums `row(i)` over the rows of a tile, in parts that depend on the tile's shape alone.
fn over_rows(tile: &Tile, row: impl Fn(usize) -> f64 + Sync) -> f64 {
    let mut parts = [0.0; PARTS];
    let n = rows_per_part(tile.n_rows, tile.n_columns);
    let of_part = |part: usize| (part * n).min(tile.n_rows)..((part + 1) * n).min(tile.n_rows);
    let parts = &mut parts[..tile.n_rows.div_ceil(n)];
    parts.par_iter_mut().enumerate().for_each(|(part, sum)| *sum = of_part(part).map(&row).sum());
    parts.iter().sum()
}

/// `average + weight (sum / n - average)`.
#[inline(always)]
fn moved(average: f32, sum: f32, weight: f32, inverse_n: f32) -> f32 {
    average + weight * (sum * inverse_n - average)
}

/// The averages of the rows and columns of a tile, including the squares of this step.
struct Averages<'a> {
    stack: &'a Stack,
    /// The averages and sums of the tile's rows, and the inverse of the matrix's mean; none for a vector.
    rows: Option<(&'a [f32], &'a [f32], f32)>,
    columns: Columns<'a>,
}

/// The inputs of a row's kernel besides the row.
#[derive(Clone, Copy)]
struct Columns<'a> {
    averages: &'a [f32],
    sums: &'a [f32],
    /// Weight of this step.
    weight: f32,
    /// Inverse of the number of elements of a column.
    inverse_n: f32,
    /// Factor of the gradient.
    scale: f32,
    /// Least average.
    least: f32,
}

/// The scalars of a weight's change.
#[derive(Clone, Copy)]
struct Change {
    decay: f32,
    length: f32,
}

impl<'a> Averages<'a> {
    fn new(state: &[&'a [f32]], rule: &Adafactor, whole: &Whole<'a>, step: &Step, tile: &Tile) -> Averages<'a> {
        let stack = &whole.tiles.tensors[tile.tensor];
        let weight = step.scalars[0] as f32;
        let (rows, of_columns, sums) = match (state, whole.sums) {
            ([rows, columns], [of_rows, of_columns, ..]) => (Some((*rows, *of_rows)), *columns, *of_columns),
            ([columns], [of_columns, ..]) => (None, *columns, *of_columns),
            _ => unreachable!("{} tensors of state, {} sums", state.len(), whole.sums.len()),
        };
        let rows = rows.map(|(averages, sums)| {
            let all = stack.rows_of(tile.matrix);
            let inverse_n = 1.0 / stack.n_columns as f32;
            let pairs = averages[all.clone()].iter().zip(&sums[all]);
            let total: f64 = pairs.map(|(average, sum)| moved(*average, *sum, weight, inverse_n) as f64).sum();
            let mean = (total / stack.n_rows as f64).max(rule.eps1);
            let here = rows_of(stack, tile);
            (&averages[here.clone()], &sums[here], (1.0 / mean) as f32)
        });
        let here = columns_of(stack, tile);
        let columns = Columns {
            averages: &of_columns[here.clone()],
            sums: &sums[here],
            weight,
            inverse_n: 1.0 / stack.n_rows as f32,
            scale: step.grad_scale as f32,
            least: (rule.eps1 * rule.eps1) as f32,
        };
        Averages { stack, rows, columns }
    }

    /// The row's factor in the averages of its elements.
    fn factor(&self, row: usize) -> f32 {
        self.rows.map_or(1.0, |(averages, sums, inverse_mean)| {
            moved(averages[row], sums[row], self.columns.weight, 1.0 / self.stack.n_columns as f32) * inverse_mean
        })
    }

    fn squares_of_row(&self, row: usize, g: &[f32]) -> f64 {
        row_update_squares(g, self.factor(row), self.columns)
    }

    fn update_row(&self, row: usize, p: &mut [f32], g: &[f32], by: Change) {
        row_update(p, g, self.factor(row), self.columns, by);
    }
}

/// Adds the squares of this step to all averages.
fn move_averages(state: &mut [&mut [f32]], whole: &Whole<'_>, step: &Step) {
    let weight = step.scalars[0] as f32;
    for stack in &whole.tiles.tensors {
        for matrix in 0..stack.n_matrices {
            let columns = (stack.columns_of(matrix), stack.n_rows);
            // The averages of columns come last, like their sums.
            let ranges = [(stack.rows_of(matrix), stack.n_columns), columns];
            let ranges = &ranges[ranges.len() - state.len()..];
            for ((state, sums), (range, n)) in state.iter_mut().zip(whole.sums).zip(ranges) {
                let inverse_n = 1.0 / *n as f32;
                for (average, sum) in state[range.clone()].iter_mut().zip(&sums[range.clone()]) {
                    *average = moved(*average, *sum, weight, inverse_n);
                }
            }
        }
    }
}

simd! {
    fn row_squares(x: &[f32], scale: f32) -> f64 {
        let mut lanes = [0.0; LANES];
        let (x, tail) = x.as_chunks::<LANES>();
        for x in x {
            for i in 0..LANES {
                let x = (x[i] * scale) as f64;
                lanes[i] += x * x;
            }
        }
        let tail: f64 = tail.iter().map(|x| (x * scale) as f64).map(|x| x * x).sum();
        lanes.iter().sum::<f64>() + tail
    }
}

simd! {
    fn add_squares(totals: &mut [f64], x: &[f32], scale: f32) {
        for (total, x) in totals.iter_mut().zip(x) {
            let x = (x * scale) as f64;
            *total += x * x;
        }
    }
}

#[inline(always)]
fn update_of(g: f32, average: f32, sum: f32, factor: f32, columns: &Columns<'_>) -> f32 {
    let average = factor * moved(average, sum, columns.weight, columns.inverse_n);
    g * columns.scale / average.max(columns.least).sqrt()
}

simd! {
    fn row_update_squares(g: &[f32], factor: f32, columns: Columns<'_>) -> f64 {
        let mut lanes = [0.0; LANES];
        let (g, g_tail) = g.as_chunks::<LANES>();
        let (averages, averages_tail) = columns.averages.as_chunks::<LANES>();
        let (sums, sums_tail) = columns.sums.as_chunks::<LANES>();
        for ((g, average), sum) in g.iter().zip(averages).zip(sums) {
            for i in 0..LANES {
                let u = update_of(g[i], average[i], sum[i], factor, &columns) as f64;
                lanes[i] += u * u;
            }
        }
        let mut total: f64 = lanes.iter().sum();
        for ((g, average), sum) in g_tail.iter().zip(averages_tail).zip(sums_tail) {
            let u = update_of(*g, *average, *sum, factor, &columns) as f64;
            total += u * u;
        }
        total
    }
}

simd! {
    fn row_update(p: &mut [f32], g: &[f32], factor: f32, columns: Columns<'_>, by: Change) {
        for (((p, g), average), sum) in p.iter_mut().zip(g).zip(columns.averages).zip(columns.sums) {
            *p = *p * by.decay - by.length * update_of(*g, *average, *sum, factor, &columns);
        }
    }
}

#[cfg(test)]
#[path = "adafactor_tests.rs"]
mod tests;
