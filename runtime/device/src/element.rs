//! Element types of collectives: the five types that an operand in memory may have.

use half::{bf16, f16};

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

    /// The code of the type in messages.
    pub fn code(self) -> u32 {
        match self {
            ElementType::F32 => 1,
            ElementType::Bf16 => 2,
            ElementType::F16 => 3,
            ElementType::F64 => 4,
            ElementType::I32 => 5,
        }
    }

    /// The type with this code, if this build has one.
    pub fn from_code(code: u32) -> Option<ElementType> {
        [ElementType::F32, ElementType::Bf16, ElementType::F16, ElementType::F64, ElementType::I32]
            .into_iter()
            .find(|dtype| dtype.code() == code)
    }
}

/// A Rust type whose slices can be operands.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The type as a run-time value.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_round_trips_through_its_code() {
        let known: Vec<ElementType> = (0..100).filter_map(ElementType::from_code).collect();

        assert_eq!(known.len(), 5);
        assert!(known.iter().all(|dtype| ElementType::from_code(dtype.code()) == Some(*dtype)));
    }
}
