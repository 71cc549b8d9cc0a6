//! The element types of CPU buffers: f32 storage, and the two half-width storage types of mixed precision.
//!
//! Arithmetic is always done in f32; a narrower type only changes what a buffer holds.

use half::{bf16, f16};

/// A type that a buffer of activations may hold.
pub trait Float: Copy + Send + Sync + bytemuck::Pod + 'static {
    /// The additive identity.
    const ZERO: Self;
    /// Widens exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest even.
    fn from_f32(x: f32) -> Self;
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Float for bf16 {
    const ZERO: bf16 = bf16::ZERO;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    // Branch-free so that loops over it vectorise; a NaN stays a NaN because its quiet bit is set first.
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        let kept = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
        bf16::from_bits((kept >> 16) as u16)
    }
}

impl Float for f16 {
    const ZERO: f16 = f16::ZERO;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bf16_rounding_agrees_with_the_half_crate(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let (ours, theirs) = (<bf16 as Float>::from_f32(x), bf16::from_f32(x));
            prop_assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x}: {ours} {theirs}");
            prop_assert!(ours.is_nan() || Float::to_f32(ours) == half::bf16::to_f32(theirs));
        }
    }
}
