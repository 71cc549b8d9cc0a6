//! Which records of a file are read.

use std::ops::Range;

use phalanx_strategies::sampler::Permutation;

/// The records of a file that are read, by their number in it, counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    range: Range<u64>,
    shard: Option<Shard>,
}

/// One of several random parts of the records of a data set; each record is in exactly one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    order: Permutation,
    /// The places in the order that belong to this part.
    places: Range<u64>,
    /// Number of the first record of the file's range among those of the data set.
    first: u64,
}

/// The stream of shards among those of a seed, unlike the orders of epochs.
const STREAM: u64 = u64::MAX - 1;

impl Shard {
    /// Part `index` of `count` of a data set of `n` records, for a file whose range begins with record `first` of these.
    pub(crate) fn new(seed: u64, n: u64, count: u64, index: u64, first: u64) -> Self {
        let place = |index: u64| (u128::from(index) * u128::from(n) / u128::from(count)) as u64;
        Self { order: Permutation::new(n, seed, STREAM), places: place(index)..place(index + 1), first }
    }
}

impl Choice {
    /// All records.
    pub(crate) const ALL: Self = Self { range: 0..u64::MAX, shard: None };

    /// The records of a range, and of these the ones in a shard.
    pub(crate) fn new(range: Range<u64>, shard: Option<Shard>) -> Self {
        Self { range, shard }
    }

    /// Whether a record is read.
    pub(crate) fn has(&self, record: u64) -> bool {
        let in_shard =
            |shard: &Shard| shard.places.contains(&shard.order.apply(shard.first + record - self.range.start));
        self.range.contains(&record) && self.shard.as_ref().is_none_or(in_shard)
    }

    /// Whether neither `record` nor one after it is read.
    pub(crate) fn ends_before(&self, record: u64) -> bool {
        record >= self.range.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_is_in_one_shard_and_shards_have_equal_sizes() {
        let shards: Vec<Choice> =
            (0..3).map(|index| Choice::new(5..1005, Some(Shard::new(42, 1000, 3, index, 0)))).collect();

        let sizes: Vec<usize> = shards.iter().map(|shard| (0..2000).filter(|&i| shard.has(i)).count()).collect();

        assert_eq!(sizes, [333, 333, 334]);
        assert!((5..1005).all(|i| shards.iter().filter(|shard| shard.has(i)).count() == 1));
    }

    #[test]
    fn shard_of_two_files_is_that_of_their_records_together() {
        let whole = Choice::new(0..100, Some(Shard::new(1, 100, 4, 2, 0)));
        let second = Choice::new(10..70, Some(Shard::new(1, 100, 4, 2, 40)));

        assert!((10..70).all(|i| second.has(i) == whole.has(40 + i - 10)));
    }
}
