//! Copies of blocks of rows and columns between matrices.

use super::parallel::{CHUNK, rows_per_task};
use crate::tasks::{Cut, Tasks};

/// `to[t, to_first..to_first + len] = from[t, from_first..from_first + len]` for each row; the rest of `to` is
/// unchanged.
///
/// # Shapes
/// `from: [N, from_columns]`, `to: [N, to_columns]`.
///
/// # Panics
/// If the columns exceed a matrix, or the numbers of rows differ.
pub fn copy_columns<T: Copy + Send + Sync>(
    (from, from_columns, from_first): (&[T], usize, usize),
    (to, to_columns, to_first): (&mut [T], usize, usize),
    len: usize,
) {
    assert!(from_first + len <= from_columns && to_first + len <= to_columns);
    if len == 0 {
        return;
    }
    assert!(from.len().is_multiple_of(from_columns) && to.len().is_multiple_of(to_columns));
    assert_eq!(from.len() / from_columns, to.len() / to_columns);
    if from_columns == len && to_columns == len {
        return copy_rows(from, to);
    }
    let rows = rows_per_task(len);
    to.par_chunks_mut(rows * to_columns).zip(from.par_chunks(rows * from_columns)).for_each(|(to, from)| {
        for (to, from) in to.chunks_exact_mut(to_columns).zip(from.chunks_exact(from_columns)) {
            to[to_first..to_first + len].copy_from_slice(&from[from_first..from_first + len]);
        }
    });
}

/// `to = from`: whole rows are one run of memory.
///
/// # Shapes
/// Equal.
pub fn copy_rows<T: Copy + Send + Sync>(from: &[T], to: &mut [T]) {
    assert_eq!(from.len(), to.len());
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn copy_of_columns_changes_only_those_columns(
            n in 0usize..400, before in (0usize..5, 0usize..5), len in 0usize..200, after in (0usize..5, 0usize..5),
        ) {
            let (from_columns, to_columns) = (before.0 + len + after.0, before.1 + len + after.1);
            let from: Vec<i32> = (0..(n * from_columns) as i32).collect();
            let mut to = vec![-1i32; n * to_columns];

            copy_columns((&from, from_columns, before.0), (&mut to, to_columns, before.1), len);

            for (e, found) in to.iter().enumerate() {
                let (t, column) = (e / to_columns, e % to_columns);
                let moved = (before.1..before.1 + len).contains(&column);
                let expected = if moved { (t * from_columns + before.0 + column - before.1) as i32 } else { -1 };
                prop_assert_eq!(*found, expected);
            }
        }
    }

    #[test]
    fn rows_of_any_type_are_copied() {
        let from: Vec<u16> = (0..2 * CHUNK + 5).map(|i| i as u16).collect();
        let mut to = vec![0; from.len()];

        copy_rows(&from, &mut to);

        assert_eq!(to, from);
    }
}
