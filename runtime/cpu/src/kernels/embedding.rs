//! Embedding: lookup of table rows by id, and its adjoint.

use super::parallel::{PARTS, rows_per_task};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// `out[t, :] = table[ids[t], :]`, or `out +=` if `accumulate`.
///
/// # Shapes
/// `ids: [N]`, `table: [V, C]`, `out: [N, C]`, `C = n_columns`.
///
/// # Panics
/// If the table has no such id.
pub fn embedding<Y: Float, T: Float>(ids: &[i32], table: &[T], n_columns: usize, out: &mut [Y], accumulate: bool) {
    let n_rows = table.len() / n_columns.max(1);
    gather(ids, table, n_columns, |id| Some(row_of(id, n_rows)), out, accumulate);
}

/// [`embedding`] for a table that holds the rows `first..first + rows` of a larger table: ids of other rows give rows
/// of zeros. The sum over all parts of the larger table equals its [`embedding`]. Source: Shoeybi et al. 2019,
/// Megatron-LM, §3 (arXiv:1909.08053).
///
/// # Shapes
/// `ids: [N]`, `table: [rows, C]`, `out: [N, C]`, `C = n_columns`.
///
/// # Panics
/// If an id is negative; an id beyond the larger table is treated as a row of another part.
pub fn embedding_part<Y: Float, T: Float>(
    ids: &[i32],
    table: &[T],
    n_columns: usize,
    first: usize,
    out: &mut [Y],
    accumulate: bool,
) {
    let n_rows = table.len() / n_columns.max(1);
    gather(ids, table, n_columns, |id| row_of_part(id, first, n_rows), out, accumulate);
}

/// `dtable[ids[t], :] += dout[t, :]`, tokens in order; `dtable` is zeroed first unless `accumulate`.
///
/// # Shapes
/// `ids: [N]`, `dout: [N, C]`, `dtable: [V, C]`, `C = n_columns`.
///
/// # Panics
/// If the table has no such id.
pub fn embedding_backward<Y: Float>(ids: &[i32], dout: &[Y], n_columns: usize, dtable: &mut [f32], accumulate: bool) {
    let n_rows = dtable.len() / n_columns.max(1);
    assert!(ids.iter().all(|id| row_of(*id, n_rows) < n_rows));
    scatter(ids, dout, n_columns, 0, dtable, accumulate);
}

/// [`embedding_backward`] for a `dtable` that holds the rows `first..first + rows` of a larger table: ids of other rows
/// add nothing.
///
/// # Shapes
/// `ids: [N]`, `dout: [N, C]`, `dtable: [rows, C]`, `C = n_columns`.
///
/// # Panics
/// If an id is negative.
pub fn embedding_part_backward<Y: Float>(
    ids: &[i32],
    dout: &[Y],
    n_columns: usize,
    first: usize,
    dtable: &mut [f32],
    accumulate: bool,
) {
    assert!(ids.iter().all(|id| *id >= 0));
    scatter(ids, dout, n_columns, first, dtable, accumulate);
}

/// Copies the row `row_of(id)` of the table for each id, or zeros if there is none.
fn gather<Y: Float, T: Float>(
    ids: &[i32],
    table: &[T],
    n_columns: usize,
    row_of: impl Fn(i32) -> Option<usize> + Sync,
    out: &mut [Y],
    accumulate: bool,
) {
    let rows = rows_per_task(n_columns);
    assert_eq!(out.len(), ids.len() * n_columns);
    out.par_chunks_mut(rows * n_columns.max(1)).zip(ids.par_chunks(rows)).for_each(|(out, ids)| {
        for (out, id) in out.chunks_exact_mut(n_columns).zip(ids) {
            match row_of(*id) {
                Some(row) => copy_row(&table[row * n_columns..][..n_columns], out, accumulate),
                None if accumulate => {}
                None => out.fill(Y::ZERO),
            }
        }
    });
}

/// Adds each row of `dout` to the row `id - first` of `dtable`, if there is one.
fn scatter<Y: Float>(ids: &[i32], dout: &[Y], n_columns: usize, first: usize, dtable: &mut [f32], accumulate: bool) {
    assert_eq!(dout.len(), ids.len() * n_columns);
    // Each task owns rows of the table and scans all ids for them: reading ids is cheap compared with rows.
    let rows = (dtable.len() / n_columns.max(1)).div_ceil(4 * PARTS).max(1);
    dtable.par_chunks_mut(rows * n_columns.max(1)).enumerate().for_each(|(task, dtable)| {
        if !accumulate {
            dtable.fill(0.0);
        }
        let start = first + task * rows;
        let owned = start..start + dtable.len() / n_columns;
        for (id, dout) in ids.iter().zip(dout.chunks_exact(n_columns)) {
            let row = *id as usize;
            if owned.contains(&row) {
                let at = (row - start) * n_columns;
                copy_row(dout, &mut dtable[at..at + n_columns], true);
            }
        }
    });
}

fn row_of(id: i32, n_rows: usize) -> usize {
    let row = usize::try_from(id).unwrap_or(usize::MAX);
    assert!(row < n_rows, "id {id} is outside a table of {n_rows} rows");
    row
}

fn row_of_part(id: i32, first: usize, n_rows: usize) -> Option<usize> {
    let row = usize::try_from(id).unwrap_or_else(|_| panic!("id {id} is negative"));
    row.checked_sub(first).filter(|row| *row < n_rows)
}

simd! {
    fn copy_row<X: Float, Y: Float>(row: &[X], out: &mut [Y], accumulate: bool) {
        if accumulate {
            for (out, x) in out.iter_mut().zip(row) {
                *out = Y::from_f32(out.to_f32() + x.to_f32());
            }
        } else {
            for (out, x) in out.iter_mut().zip(row) {
                *out = Y::from_f32(x.to_f32());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, close, random, same_on_every_number_of_threads, stored, wide};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    fn ids(n: usize, v: usize, seed: u64) -> Vec<i32> {
        random(n, seed).iter().map(|x| (x.abs() * v as f32) as i32).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn both_directions_match_the_definition(
            n in 1usize..200, v in 1usize..300, c in 1usize..40, accumulate in any::<bool>(), seed in any::<u64>(),
        ) {
            let (ids, table, dout) = (ids(n, v, seed), random(v * c, seed ^ 1), random(n * c, seed ^ 2));
            let old = if accumulate { 2.0 } else { f32::NAN };
            let (mut out, mut dtable) = (vec![old; n * c], vec![old; v * c]);

            embedding(&ids, &table, c, &mut out, accumulate);
            embedding_backward(&ids, &dout, c, &mut dtable, accumulate);

            let base = if accumulate { 2.0 } else { 0.0 };
            let (mut expected, mut expected_table) = (vec![base; n * c], vec![base; v * c]);
            for (e, expected) in expected.iter_mut().enumerate() {
                let at = ids[e / c] as usize * c + e % c;
                *expected += table[at] as f64;
                expected_table[at] += dout[e] as f64;
            }
            close(&out, &expected, 1e-6);
            close(&dtable, &expected_table, 1e-5);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn parts_of_the_table_give_the_bits_of_the_whole(
            n in 1usize..200, cuts in (0usize..100, 0usize..100, 1usize..100), c in 1usize..40,
            accumulate in any::<bool>(), seed in any::<u64>(),
        ) {
            let v = cuts.0 + cuts.1 + cuts.2;
            let (ids, table, dout) = (ids(n, v, seed), random(v * c, seed ^ 1), stored::<bf16>(&random(n * c, seed ^ 2)));
            let (mut whole, mut dwhole) = (vec![2.0; n * c], vec![2.0; v * c]);
            embedding(&ids, &table, c, &mut whole, accumulate);
            embedding_backward(&ids, &dout, c, &mut dwhole, accumulate);

            let mut dtable = vec![2.0; v * c];
            for rows in [0..cuts.0, cuts.0..cuts.0 + cuts.1, cuts.0 + cuts.1..v] {
                let mut out = vec![2.0; n * c];
                let part = rows.start * c..rows.end * c;
                embedding_part(&ids, &table[part.clone()], c, rows.start, &mut out, accumulate);
                embedding_part_backward(&ids, &dout, c, rows.start, &mut dtable[part], accumulate);

                for (t, id) in ids.iter().enumerate() {
                    let (found, held) = (&out[t * c..(t + 1) * c], rows.contains(&(*id as usize)));
                    let absent = vec![if accumulate { 2.0 } else { 0.0 }; c];
                    prop_assert_eq!(bits(found), bits(if held { &whole[t * c..(t + 1) * c] } else { &absent }));
                }
            }
            prop_assert_eq!(bits(&dtable), bits(&dwhole));
        }
    }

    #[test]
    fn half_width_gradients_are_summed_in_f32() {
        let (ids, dout) = (vec![1; 300], stored::<bf16>(&random(300 * 4, 1)));
        let mut dtable = vec![f32::NAN; 3 * 4];

        embedding_backward(&ids, &dout, 4, &mut dtable, false);

        let mut expected = vec![0.0; 12];
        wide(&dout).iter().enumerate().for_each(|(i, x)| expected[4 + i % 4] += x);
        close(&dtable, &expected, 1e-5);
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (ids, dout) = (ids(2000, 50, 2), random(2000 * 30, 3));

        same_on_every_number_of_threads(|| {
            let mut dtable = vec![0.5; 50 * 30];
            embedding_backward(&ids, &dout, 30, &mut dtable, true);
            bits(&dtable)
        });
    }
}
