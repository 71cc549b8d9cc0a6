//! What a step tells of its objective: sums over samples and tokens, and the means that become metrics.

use super::{Counts, Unit};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

/// Most sums of an objective.
pub const SUMS_MAX: usize = 16;

/// The sums of [`crate::program::Role::LossSum`]: of the parts of the loss, then of the scalars. They are kept in place, so that a step
/// allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sums {
    all: [f64; SUMS_MAX],
    n: usize,
}

impl Sums {
    /// These sums.
    ///
    /// # Panics
    /// If there are more than 16.
    pub fn of(sums: &[f64]) -> Sums {
        let mut all = [0.0; SUMS_MAX];
        all[..sums.len()].copy_from_slice(sums);
        Sums { all, n: sums.len() }
    }

    /// The same number as often as there are sums.
    ///
    /// # Panics
    /// As [`Sums::of`].
    pub fn filled(with: f64, n: usize) -> Sums {
        Sums::of(&[with; SUMS_MAX][..n])
    }
}

impl Deref for Sums {
    type Target = [f64];
    fn deref(&self) -> &[f64] {
        &self.all[..self.n]
    }
}

impl DerefMut for Sums {
    fn deref_mut(&mut self) -> &mut [f64] {
        &mut self.all[..self.n]
    }
}

/// What the sums of an objective mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What each part of the loss is averaged over.
    pub units: Vec<Unit>,
    /// TRL's name of each scalar, and what each of the sums is averaged over that are added up to it.
    pub scalars: Vec<(&'static str, Vec<Unit>)>,
}

impl Report {
    /// Number of sums.
    pub fn n_sums(&self) -> usize {
        self.units.len() + self.scalars.iter().map(|(_, units)| units.len()).sum::<usize>()
    }

    /// The loss, from its sums over what is counted.
    pub fn loss(&self, sums: &Sums, counts: &Counts) -> f64 {
        self.units.iter().zip(sums.iter()).map(|(unit, sum)| sum / counts.of(*unit)).sum()
    }

    /// The scalars by name, from the same sums; none that is a mean over nothing.
    pub fn scalars(&self, sums: &Sums, counts: &Counts) -> BTreeMap<String, f64> {
        let mut sums = sums.iter().skip(self.units.len());
        let mut scalars = BTreeMap::new();
        for (name, units) in &self.scalars {
            let value: f64 = units.iter().zip(sums.by_ref()).map(|(unit, sum)| sum / counts.of(*unit)).sum();
            if units.iter().all(|unit| counts.number(*unit) > 0) {
                scalars.insert((*name).to_owned(), value);
            }
        }
        scalars
    }
}
