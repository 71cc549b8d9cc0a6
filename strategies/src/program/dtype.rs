//! Element types of the program's values.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Storage type of one element of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: f32's range with 8 bits of precision.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE double precision: scalars of the step (losses, norms, hyperparameters).
    F64,
    /// Token ids, labels and positions.
    I32,
    /// 8-bit float with 4 bits of exponent and 3 of mantissa, up to 448 and without infinities: weights of products in FP8.
    /// Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning, §3 (arXiv:2209.05433).
    E4m3,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 => 8,
            DType::E4m3 => 1,
        }
    }

    /// Whether the type is one of the three that activations may have.
    pub const fn is_activation(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16 | DType::F16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::E4m3 => "e4m3",
        })
    }
}
