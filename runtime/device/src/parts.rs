//! Division of a tensor among the members of a group.

use std::ops::Range;

/// The elements of a tensor of `n_elements` that belong to the member at `position` of `size`.
///
/// The tensor is a sequence of blocks of `unit` elements, the last possibly short; with `b` blocks in all, a member has
/// blocks `⌊position · b / size⌋ .. ⌊(position + 1) · b / size⌋`. Parts are in order of position and cover the tensor;
/// their lengths differ by at most one block, and a part may be empty.
///
/// # Panics
/// If `unit` is zero or `position` is not below `size`.
pub fn part(n_elements: usize, unit: usize, size: u32, position: u32) -> Range<usize> {
    assert!(unit > 0 && position < size, "part {position} of {size} in units of {unit}");
    let n_blocks = n_elements.div_ceil(unit) as u128;
    // 128 bits, because blocks times members may exceed 64.
    let edge = |i: u32| ((n_blocks * u128::from(i) / u128::from(size)) as usize).saturating_mul(unit).min(n_elements);
    edge(position)..edge(position + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_in_order_and_cover_the_tensor(n in 0..10_000usize, unit in 1..70usize, size in 1..9u32) {
            let parts: Vec<_> = (0..size).map(|i| part(n, unit, size, i)).collect();

            prop_assert_eq!(parts[0].start, 0);
            prop_assert_eq!(parts[size as usize - 1].end, n);
            prop_assert!(parts.windows(2).all(|w| w[0].end == w[1].start));
            prop_assert!(parts.iter().all(|p| p.start % unit == 0 || p.start == n));
        }

        #[test]
        fn parts_differ_by_at_most_one_block(n in 0..10_000usize, unit in 1..70usize, size in 1..9u32) {
            let blocks: Vec<_> = (0..size).map(|i| part(n, unit, size, i).len().div_ceil(unit)).collect();

            prop_assert!(blocks.iter().max().unwrap() - blocks.iter().min().unwrap() <= 1, "{:?}", blocks);
        }
    }

    #[test]
    fn last_of_three_members_gets_the_short_block_of_five_elements_in_units_of_two() {
        assert_eq!([0, 1, 2].map(|i| part(5, 2, 3, i)), [0..2, 2..4, 4..5]);
    }
}
