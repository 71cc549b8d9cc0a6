//! The staging area of a rank's arena, for tensors that lie elsewhere.

use std::ops::Range;

/// Pieces begin at multiples of a cache line, so that no two tensors share one.
const ALIGN: usize = 64;

/// The free bytes of the staging area.
#[derive(Debug)]
pub(super) struct Staging {
    /// Sorted; no range is empty, no two are adjacent.
    free: Vec<Range<usize>>,
}

impl Staging {
    /// A staging area of `bytes` bytes, all free.
    pub(super) fn new(bytes: usize) -> Staging {
        let whole = 0..bytes / ALIGN * ALIGN;
        Staging { free: if whole.is_empty() { Vec::new() } else { vec![whole] } }
    }

    /// Takes the first piece that is large enough.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let wanted = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let i = self.free.iter().position(|range| range.len() >= wanted)?;
        let start = self.free[i].start;
        self.free[i].start += wanted;
        if self.free[i].is_empty() {
            self.free.remove(i);
        }
        Some(start..start + wanted)
    }

    /// Frees a piece.
    pub(super) fn give(&mut self, piece: Range<usize>) {
        let i = self.free.partition_point(|range| range.start < piece.start);
        self.free.insert(i, piece);
        if i + 1 < self.free.len() && self.free[i].end == self.free[i + 1].start {
            self.free[i].end = self.free[i + 1].end;
            self.free.remove(i + 1);
        }
        if i > 0 && self.free[i - 1].end == self.free[i].start {
            self.free[i - 1].end = self.free[i].end;
            self.free.remove(i);
        }
    }

    /// Bytes of the largest piece that can be taken.
    pub(super) fn largest(&self) -> usize {
        self.free.iter().map(ExactSizeIterator::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_bytes_are_free_at_the_end(steps in prop::collection::vec((any::<bool>(), 0..3000usize), 1..60)) {
            let mut staging = Staging::new(10_000);
            let mut taken: Vec<Range<usize>> = Vec::new();

            for (is_take, x) in steps {
                if is_take {
                    if let Some(piece) = staging.take(x) {
                        prop_assert!(piece.len() >= x && piece.end <= 10_000);
                        prop_assert!(taken.iter().all(|t| t.end <= piece.start || piece.end <= t.start));
                        taken.push(piece);
                    }
                } else if !taken.is_empty() {
                    staging.give(taken.swap_remove(x % taken.len()));
                }
            }
            taken.into_iter().for_each(|piece| staging.give(piece));

            prop_assert_eq!(staging.free, vec![0..10_000 / ALIGN * ALIGN]);
        }
    }
}
