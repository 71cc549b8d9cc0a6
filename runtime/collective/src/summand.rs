//! Sums over the elements of operands: one rule for all five types.
//!
//! A sum is computed in [`Summand::Wide`], in the order of the sources, and rounded once at the end: f32 for the three
//! types up to 32 bits of float, the type itself for f64 and i32 (which wraps).

use half::{bf16, f16};
use phalanx_device::Element;
use phalanx_device::float::Float as _;

/// An element that can be summed.
pub(crate) trait Summand: Element {
    /// The type of the running sum.
    type Wide: Element + Default;
    /// Widens exactly.
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest even.
    fn narrow(wide: Self::Wide) -> Self;
    /// One addition.
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

/// Implements [`Summand`] for floats that are summed in f32.
macro_rules! summed_in_f32 {
    ($($ty:ty),*) => {$(
        impl Summand for $ty {
            type Wide = f32;
            #[inline(always)]
            fn widen(self) -> f32 {
                phalanx_device::float::Float::to_f32(self)
            }
            #[inline(always)]
            fn narrow(wide: f32) -> $ty {
                <$ty>::from_f32(wide)
            }
            #[inline(always)]
            fn add(a: f32, b: f32) -> f32 {
                a + b
            }
        }
    )*};
}
summed_in_f32!(f32, bf16);

impl Summand for f16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        f16::from_f32(wide)
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        a + b
    }
}

impl Summand for f64 {
    type Wide = f64;
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
    #[inline(always)]
    fn narrow(wide: f64) -> f64 {
        wide
    }
    #[inline(always)]
    fn add(a: f64, b: f64) -> f64 {
        a + b
    }
}

impl Summand for i32 {
    type Wide = i32;
    #[inline(always)]
    fn widen(self) -> i32 {
        self
    }
    #[inline(always)]
    fn narrow(wide: i32) -> i32 {
        wide
    }
    #[inline(always)]
    fn add(a: i32, b: i32) -> i32 {
        a.wrapping_add(b)
    }
}

/// Runs `$body` with `$ty` standing for the Rust type of `$dtype`.
macro_rules! for_element {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            phalanx_device::ElementType::F32 => {
                type $ty = f32;
                $body
            }
            phalanx_device::ElementType::Bf16 => {
                type $ty = half::bf16;
                $body
            }
            phalanx_device::ElementType::F16 => {
                type $ty = half::f16;
                $body
            }
            phalanx_device::ElementType::F64 => {
                type $ty = f64;
                $body
            }
            phalanx_device::ElementType::I32 => {
                type $ty = i32;
                $body
            }
        }
    };
}
pub(crate) use for_element;

#[cfg(test)]
mod tests {
    use phalanx_device::ElementType;

    #[test]
    fn element_sizes_equal_the_sizes_of_the_rust_types() {
        for dtype in (1..6).filter_map(ElementType::from_code) {
            let size = for_element!(dtype, T => size_of::<T>());

            assert_eq!(dtype.bytes(), size, "{dtype:?}");
        }
    }
}
