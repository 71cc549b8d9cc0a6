//! Boxes of tensors: where two of them meet, and which runs of bytes they share.

use serde::{Deserialize, Serialize};

/// A box in a tensor: along every dim the positions `offset .. offset + shape`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Region {
    /// The first position along every dim.
    pub offset: Vec<u64>,
    /// The number of positions along every dim.
    pub shape: Vec<u64>,
}

/// Bytes that a stored box and a wanted box share without a gap in either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Where they start in the stored box.
    pub(super) stored: u64,
    /// Where they start in the wanted box.
    pub(super) wanted: u64,
    /// How many they are.
    pub(super) len: u64,
}

impl Region {
    /// The box that is the whole tensor of this shape.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offset: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// The number of positions; `None` beyond 64 bits.
    pub fn volume(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim))
    }

    /// Whether the box lies in a tensor of this shape.
    pub fn fits_in(&self, shape: &[u64]) -> bool {
        let inside =
            |(&offset, (&dim, &global)): (&u64, (&u64, &u64))| offset.checked_add(dim).is_some_and(|end| end <= global);
        self.offset.len() == shape.len()
            && self.shape.len() == shape.len()
            && self.offset.iter().zip(self.shape.iter().zip(shape)).all(inside)
    }

    /// The positions that both boxes have, if any; both must be of one tensor.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let mut meet = Self { offset: Vec::new(), shape: Vec::new() };
        for dim in 0..self.offset.len() {
            let start = self.offset[dim].max(other.offset[dim]);
            let end = (self.offset[dim] + self.shape[dim]).min(other.offset[dim] + other.shape[dim]);
            if start >= end {
                return None;
            }
            meet.offset.push(start);
            meet.shape.push(end - start);
        }
        Some(meet)
    }

    /// The runs of bytes that the stored box `self` and the box `wanted` share, in the order of both. Elements have
    /// `element_bytes`; both boxes must lie in one tensor whose bytes can be counted in 64 bits.
    pub(super) fn shared_runs(&self, wanted: &Self, element_bytes: u64) -> Vec<Run> {
        let Some(meet) = self.intersection(wanted) else { return Vec::new() };
        // Inner dims that all three boxes cover in full, and the first that they do not, form one run.
        let mut outer = self.shape.len();
        let mut len = element_bytes;
        while outer > 0 {
            outer -= 1;
            len *= meet.shape[outer];
            if meet.shape[outer] != self.shape[outer] || meet.shape[outer] != wanted.shape[outer] {
                break;
            }
        }
        let n_runs: u64 = meet.shape[..outer].iter().product();
        let mut at = meet.offset.clone();
        let mut runs = Vec::with_capacity(n_runs as usize);
        for _ in 0..n_runs {
            let (stored, wanted) = (self.byte_of(&at, element_bytes), wanted.byte_of(&at, element_bytes));
            runs.push(Run { stored, wanted, len });
            for dim in (0..outer).rev() {
                at[dim] += 1;
                if at[dim] < meet.offset[dim] + meet.shape[dim] {
                    break;
                }
                at[dim] = meet.offset[dim];
            }
        }
        runs
    }

    /// The byte in the row-major box at which the element at the global position `at` starts.
    fn byte_of(&self, at: &[u64], element_bytes: u64) -> u64 {
        let positions = at.iter().zip(&self.offset).zip(&self.shape);
        positions.fold(0, |index, ((at, offset), dim)| index * dim + (at - offset)) * element_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offset: &[u64], shape: &[u64]) -> Region {
        Region { offset: offset.to_vec(), shape: shape.to_vec() }
    }

    #[test]
    fn whole_rows_are_one_run_and_columns_are_one_run_each() {
        let stored = region(&[2, 0], &[4, 8]);

        assert_eq!(stored.shared_runs(&region(&[3, 0], &[9, 8]), 4), [Run { stored: 32, wanted: 0, len: 96 }]);
        assert_eq!(
            stored.shared_runs(&region(&[4, 6], &[2, 2]), 4),
            [Run { stored: 88, wanted: 0, len: 8 }, Run { stored: 120, wanted: 8, len: 8 }]
        );
        assert_eq!(stored.shared_runs(&region(&[0, 0], &[2, 8]), 4), []);
    }
}
