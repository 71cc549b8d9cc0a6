//! Rows of a table by id.

use super::parallel::{PARTS, rows_per_task};
use super::simd::simd;
use crate::cpu::element::Element;
use rayon::prelude::*;

/// `out[t, :] = table[ids[t], :]`, added to what is there if `accumulate`.
///
/// # Shapes
/// `ids: [N]`, `table: [V, C]`, `out: [N, C]`, `C = n_columns`.
///
/// # Panics
/// If an id is not of the table.
pub fn embedding<Y: Element>(ids: &[i32], table: &[f32], n_columns: usize, out: &mut [Y], accumulate: bool) {
    let rows = rows_per_task(n_columns);
    assert_eq!(out.len(), ids.len() * n_columns);
    out.par_chunks_mut(rows * n_columns.max(1)).zip(ids.par_chunks(rows)).for_each(|(out, ids)| {
        for (out, id) in out.chunks_exact_mut(n_columns).zip(ids) {
            let first = row_of(*id, table.len() / n_columns) * n_columns;
            copy_row(&table[first..first + n_columns], out, accumulate);
        }
    });
}

/// `dtable[ids[t], :] += dout[t, :]`, tokens in order; `dtable` is zeroed first unless `accumulate`.
///
/// # Shapes
/// `ids: [N]`, `dout: [N, C]`, `dtable: [V, C]`, `C = n_columns`.
///
/// # Panics
/// If an id is not of the table.
pub fn embedding_backward<Y: Element>(ids: &[i32], dout: &[Y], n_columns: usize, dtable: &mut [f32], accumulate: bool) {
    assert_eq!(dout.len(), ids.len() * n_columns);
    let n_rows = dtable.len() / n_columns.max(1);
    assert!(ids.iter().all(|id| row_of(*id, n_rows) < n_rows));
    // A task owns rows of the table and looks for their ids among all tokens: reading the ids is cheap beside the rows.
    let rows = n_rows.div_ceil(4 * PARTS).max(1);
    dtable.par_chunks_mut(rows * n_columns.max(1)).enumerate().for_each(|(task, dtable)| {
        if !accumulate {
            dtable.fill(0.0);
        }
        let owned = task * rows..task * rows + dtable.len() / n_columns;
        for (id, dout) in ids.iter().zip(dout.chunks_exact(n_columns)) {
            let row = *id as usize;
            if owned.contains(&row) {
                let first = (row - owned.start) * n_columns;
                copy_row(dout, &mut dtable[first..first + n_columns], true);
            }
        }
    });
}

fn row_of(id: i32, n_rows: usize) -> usize {
    let row = usize::try_from(id).unwrap_or(usize::MAX);
    assert!(row < n_rows, "id {id} is not of a table of {n_rows} rows");
    row
}

simd! {
    fn copy_row<X: Element, Y: Element>(row: &[X], out: &mut [Y], accumulate: bool) {
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
