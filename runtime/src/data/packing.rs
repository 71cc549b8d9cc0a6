//! Packs documents into rows so that few tokens of padding remain.

use std::collections::BTreeSet;

/// Documents of each row: row `r` holds `documents[ends[r - 1] .. ends[r]]`, numbers in file order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Packing {
    documents: Vec<u32>,
    ends: Vec<u32>,
}

impl Packing {
    /// Each document alone in its row.
    pub(crate) fn one_per_row(documents: Vec<u32>) -> Self {
        let ends = (1..=documents.len() as u32).collect();
        Self { documents, ends }
    }

    /// Rows of `len` documents each, of the first `n` ones.
    pub(crate) fn groups(n: usize, len: usize) -> Self {
        let ends = (1..=(n / len) as u32).map(|row| row * len as u32).collect();
        Self { documents: (0..n as u32).collect(), ends }
    }

    /// Best-fit decreasing: the longest documents first, each into the fullest row that still has room for it. At most
    /// 11/9 of the fewest possible rows, plus a constant; text documents, many of them short, fill rows almost entirely.
    /// Source: Johnson, Demers, Ullman, Garey and Graham 1974, "Worst-case performance bounds for simple one-dimensional
    /// packing algorithms".
    ///
    /// Rows are in the order of their first document, so that training without shuffling roughly follows the file.
    /// `documents` are pairs of number and length; no length exceeds `row_len`.
    pub(crate) fn best_fit(documents: &[(u32, usize)], row_len: usize) -> Self {
        let mut longest_first = documents.to_vec();
        // Equal lengths by number: the result must not depend on the sort.
        longest_first.sort_unstable_by_key(|&(number, len)| (std::cmp::Reverse(len), number));
        let mut rows: Vec<Vec<u32>> = Vec::new();
        let mut by_room: BTreeSet<(usize, usize)> = BTreeSet::new();
        for (number, len) in longest_first {
            assert!(len <= row_len, "document {number} of {len} tokens is longer than a row of {row_len}");
            let (room, row) = match by_room.range((len, 0)..).next().copied() {
                Some(fullest) => {
                    by_room.remove(&fullest);
                    fullest
                }
                None => {
                    rows.push(Vec::new());
                    (row_len, rows.len() - 1)
                }
            };
            rows[row].push(number);
            if room > len {
                by_room.insert((room - len, row));
            }
        }
        for row in &mut rows {
            row.sort_unstable();
        }
        rows.sort_unstable_by_key(|row| row[0]);
        let mut packing = Self::default();
        for row in rows {
            packing.documents.extend(row);
            packing.ends.push(packing.documents.len() as u32);
        }
        packing
    }

    /// Each document into the row of the one before it, if there is room. `documents` are pairs of number and length; no length
    /// exceeds `row_len`.
    pub(crate) fn sequential(documents: &[(u32, usize)], row_len: usize) -> Self {
        let mut packing = Self::default();
        let mut used = 0;
        for &(number, len) in documents {
            assert!(len <= row_len, "document {number} of {len} tokens is longer than a row of {row_len}");
            if used + len > row_len {
                packing.ends.push(packing.documents.len() as u32);
                used = 0;
            }
            packing.documents.push(number);
            used += len;
        }
        if !packing.documents.is_empty() {
            packing.ends.push(packing.documents.len() as u32);
        }
        packing
    }

    /// The number of rows.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The documents of one row.
    pub(crate) fn row(&self, row: usize) -> &[u32] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] as usize };
        &self.documents[start..self.ends[row] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_document_is_in_exactly_one_row_and_no_row_overflows(lens in prop::collection::vec(1usize..=64, 1..200)) {
            let documents: Vec<(u32, usize)> = (0..).zip(lens.iter().copied()).collect();

            let packing = Packing::best_fit(&documents, 64);

            let mut seen = Vec::new();
            for row in 0..packing.len() {
                prop_assert!(packing.row(row).iter().map(|&d| lens[d as usize]).sum::<usize>() <= 64);
                prop_assert!(packing.row(row).is_sorted());
                seen.extend_from_slice(packing.row(row));
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lens.len() as u32).collect::<Vec<_>>());
        }

        // Johnson et al. 1974: at most 11/9 of the optimum plus 4, and the optimum is at least the total length.
        #[test]
        fn rows_are_within_the_bound_for_documents_of_at_most_a_third(lens in prop::collection::vec(1usize..=21, 1..300)) {
            let documents: Vec<(u32, usize)> = (0..).zip(lens.iter().copied()).collect();

            let packing = Packing::best_fit(&documents, 64);

            let fewest = lens.iter().sum::<usize>().div_ceil(64);
            prop_assert!(9 * packing.len() <= 11 * fewest + 36, "{} rows, at least {fewest} needed", packing.len());
        }
    }

    #[test]
    fn document_goes_into_the_fullest_row_with_room() {
        let packing = Packing::best_fit(&[(0, 5), (1, 6), (2, 4), (3, 3)], 10);

        assert_eq!(
            (0..packing.len()).map(|row| packing.row(row).to_vec()).collect::<Vec<_>>(),
            [vec![0, 3], vec![1, 2]]
        );
    }

    #[test]
    fn sequential_packing_keeps_the_order_of_documents() {
        let packing = Packing::sequential(&[(0, 5), (1, 6), (2, 4), (3, 3)], 10);

        assert_eq!(
            (0..packing.len()).map(|row| packing.row(row).to_vec()).collect::<Vec<_>>(),
            [vec![0], vec![1, 2], vec![3]]
        );
        assert_eq!(Packing::sequential(&[], 10).len(), 0);
    }

    // Instructions are often short, with a long tail: here log-normal, as in Alpaca's data.
    #[test]
    fn best_fit_leaves_less_padding_than_sequential_packing() {
        let rng = phalanx_strategies::rng::CounterRng::new(7);
        let len = |i: u64| ((5.2 + 0.8 * rng.normal(i)).exp() as usize).clamp(8, 2048);
        let documents: Vec<(u32, usize)> = (0..20_000).map(|i| (i, len(u64::from(i)))).collect();
        let total: usize = documents.iter().map(|(_, len)| len).sum();
        let fill = |packing: Packing| total as f64 / (packing.len() * 2048) as f64;

        let (best, sequential) =
            (fill(Packing::best_fit(&documents, 2048)), fill(Packing::sequential(&documents, 2048)));

        assert!(best > 0.999 && (0.85..0.97).contains(&sequential), "{best} and {sequential}");
    }

    #[test]
    fn rows_of_single_documents_keep_their_order() {
        let packing = Packing::one_per_row(vec![2, 5]);

        assert_eq!((packing.row(0), packing.row(1), packing.len()), (&[2][..], &[5][..], 2));
    }
}
