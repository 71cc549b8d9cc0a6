//! Sums over members, in the order of their positions: the only code that adds elements.
#![allow(unsafe_code)] // Operands lie in memory that other processes map as well: addresses, not borrows.

use crate::summand::{Summand, for_element};
use phalanx_device::ElementType;

/// Elements that are summed at a time, so that the running sum stays in the L1 cache.
const BLOCK_LEN: usize = 2048;

/// Writes the sum of `n_elements` from every source to every target: `x₀ + x₁ + x₂ + …` for each element, in the order of
/// `sources`. A target may be one of the sources.
///
/// # Safety
/// Sources and targets are aligned and valid for `n_elements` of type `dtype`; no other thread or process writes the
/// sources or touches the targets meanwhile; a target is the same memory as a source or shares none with it.
///
/// # Panics
/// If there is no source.
pub(super) unsafe fn sum(dtype: ElementType, sources: &[*const u8], targets: &[*mut u8], n_elements: usize) {
    // SAFETY: the caller's promise, element type by element type.
    for_element!(dtype, T => unsafe { sum_of::<T>(sources, targets, n_elements) });
}

unsafe fn sum_of<T: Summand>(sources: &[*const u8], targets: &[*mut u8], n_elements: usize) {
    let (first, others) = sources.split_first().expect("a group has a member");
    let mut total = [T::Wide::default(); BLOCK_LEN];
    let mut rounded = [T::zeroed(); BLOCK_LEN];
    for start in (0..n_elements).step_by(BLOCK_LEN) {
        let n = BLOCK_LEN.min(n_elements - start);
        let (total, rounded) = (&mut total[..n], &mut rounded[..n]);
        // SAFETY: the caller promised that the sources are aligned, valid and not written meanwhile; any bits are a `T`.
        unsafe {
            load::<T>(std::slice::from_raw_parts(first.cast::<T>().add(start), n), total);
            for other in others {
                add::<T>(std::slice::from_raw_parts(other.cast::<T>().add(start), n), total);
            }
        }
        round::<T>(total, rounded);
        for target in targets {
            // SAFETY: the caller promised that the targets are aligned, valid and exclusively ours meanwhile. No borrow
            // of a source is alive.
            unsafe { std::ptr::copy_nonoverlapping(rounded.as_ptr(), target.cast::<T>().add(start), n) }
        }
    }
}

fn load<T: Summand>(source: &[T], total: &mut [T::Wide]) {
    for (sum, x) in total.iter_mut().zip(source) {
        *sum = x.widen();
    }
}

fn add<T: Summand>(source: &[T], total: &mut [T::Wide]) {
    for (sum, x) in total.iter_mut().zip(source) {
        *sum = T::add(*sum, x.widen());
    }
}

fn round<T: Summand>(total: &[T::Wide], rounded: &mut [T]) {
    for (to, sum) in rounded.iter_mut().zip(total) {
        *to = T::narrow(*sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn sum_of_slices<T: Summand>(sources: &[&[T]]) -> Vec<T> {
        let mut target = vec![T::zeroed(); sources[0].len()];
        let pointers: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
        // SAFETY: all slices have the length of the target, and none of them is the target.
        unsafe { sum(T::TYPE, &pointers, &[target.as_mut_ptr().cast()], target.len()) };
        target
    }

    #[test]
    fn narrow_floats_are_rounded_once() {
        // In bf16 1 + 2⁻⁸ rounds back to 1, so rounding after each addition would lose both small terms.
        let [one, small] = [1.0, 0.003_906_25].map(bf16::from_f32);
        let [one_f16, small_f16] = [1.0, 0.000_488_281_25].map(f16::from_f32);

        assert_eq!(sum_of_slices(&[&[one], &[small], &[small]]), [bf16::from_f32(1.007_812_5)]);
        assert_eq!(sum_of_slices(&[&[one_f16], &[small_f16], &[small_f16]]), [f16::from_f32(1.000_976_6)]);
    }

    #[test]
    fn sum_follows_the_order_of_the_sources() {
        let (big, one) = (&[1e8f32, 1e8][..], &[1.0f32, 1.0][..]);
        let minus = &[-1e8f32, -1e8][..];

        assert_eq!(sum_of_slices(&[big, minus, one]), [1.0, 1.0]);
        assert_eq!(sum_of_slices(&[big, one, minus]), [0.0, 0.0]);
    }

    #[test]
    fn integer_sums_wrap_and_minus_zero_stays_minus_zero() {
        assert_eq!(sum_of_slices(&[&[i32::MAX], &[1]]), [i32::MIN]);
        assert_eq!(sum_of_slices(&[&[-0.0f64], &[-0.0]])[0].to_bits(), (-0.0f64).to_bits());
    }

    #[test]
    fn targets_may_be_sources_in_sums_of_many_blocks() {
        let n = 2 * BLOCK_LEN + 3;
        let mut a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let mut b = vec![0.5f32; n];
        let targets = [a.as_mut_ptr().cast::<u8>(), b.as_mut_ptr().cast()];

        // SAFETY: both are of length `n` and each target is a source.
        unsafe { sum(ElementType::F32, &targets.map(|t| t.cast_const()), &targets, n) };

        assert!(a == b && a.iter().enumerate().all(|(i, x)| *x == i as f32 + 0.5));
    }
}
