//! Element types of collectives: five types in memory, one rule for sums.
//!
//! A sum is taken in [`Summand::Wide`], in the order in which the sources are given, and rounded once at the end:
//! f32 for the three types up to 32 bits of float, the type itself for f64 and i32 (which wraps).

use half::{bf16, f16};

use crate::cpu::element::Element as _;

/// Type of the elements of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// The upper half of 32-bit floats.
    Bf16,
    /// 16-bit floats of IEEE 754.
    F16,
    /// 64-bit floats.
    F64,
    /// 32-bit integers; sums wrap.
    I32,
}

impl ElementType {
    /// Bytes of one element; its alignment as well.
    pub fn bytes(self) -> usize {
        match self {
            ElementType::Bf16 | ElementType::F16 => 2,
            ElementType::F32 | ElementType::I32 => 4,
            ElementType::F64 => 8,
        }
    }

    /// The number by which the type travels.
    pub fn code(self) -> u32 {
        match self {
            ElementType::F32 => 1,
            ElementType::Bf16 => 2,
            ElementType::F16 => 3,
            ElementType::F64 => 4,
            ElementType::I32 => 5,
        }
    }

    /// The type that travels as `code`, if this build knows it.
    pub fn from_code(code: u32) -> Option<ElementType> {
        [ElementType::F32, ElementType::Bf16, ElementType::F16, ElementType::F64, ElementType::I32]
            .into_iter()
            .find(|dtype| dtype.code() == code)
    }
}

/// A Rust type whose slices can be operands.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its name at run time.
    const TYPE: ElementType;
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}
impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;
}
impl Element for f16 {
    const TYPE: ElementType = ElementType::F16;
}
impl Element for f64 {
    const TYPE: ElementType = ElementType::F64;
}
impl Element for i32 {
    const TYPE: ElementType = ElementType::I32;
}

/// An element that can be summed.
pub(super) trait Summand: Element {
    /// What sums are taken in.
    type Wide: Element + Default;
    /// Widens exactly.
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest even.
    fn narrow(wide: Self::Wide) -> Self;
    /// One addition.
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

/// Floats that are summed in f32.
macro_rules! summed_in_f32 {
    ($($ty:ty),*) => {$(
        impl Summand for $ty {
            type Wide = f32;
            #[inline(always)]
            fn widen(self) -> f32 {
                crate::cpu::element::Element::to_f32(self)
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
            $crate::collective::element::ElementType::F32 => {
                type $ty = f32;
                $body
            }
            $crate::collective::element::ElementType::Bf16 => {
                type $ty = half::bf16;
                $body
            }
            $crate::collective::element::ElementType::F16 => {
                type $ty = half::f16;
                $body
            }
            $crate::collective::element::ElementType::F64 => {
                type $ty = f64;
                $body
            }
            $crate::collective::element::ElementType::I32 => {
                type $ty = i32;
                $body
            }
        }
    };
}
pub(super) use for_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_its_code() {
        let known: Vec<ElementType> = (0..100).filter_map(ElementType::from_code).collect();

        assert_eq!(known.len(), 5);
        assert!(known.iter().all(|dtype| ElementType::from_code(dtype.code()) == Some(*dtype)));
    }

    #[test]
    fn sizes_are_those_of_the_rust_types() {
        for dtype in (1..6).filter_map(ElementType::from_code) {
            let size = for_element!(dtype, T => size_of::<T>());

            assert_eq!(dtype.bytes(), size, "{dtype:?}");
        }
    }
}
