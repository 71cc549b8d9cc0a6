//! Work of an instruction, and the bytes that it touches.

use crate::program::{Instr, Program, ValueId};

/// Work of an instruction or a program.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Operations of matrix products; a multiply-add counts as two.
    pub matmul_flops: f64,
    /// Operations of attention, counted alike; causal, so half of the score matrix.
    pub attention_flops: f64,
    /// Bytes read and written.
    pub streamed_bytes: f64,
    /// Bytes read and written before a product in FP8 to round its operands, or to transpose a weight.
    pub rounded_bytes: f64,
}

impl Cost {
    /// Memory traffic without arithmetic that counts.
    pub(super) fn streamed(bytes: f64) -> Cost {
        Cost { streamed_bytes: bytes, ..Cost::default() }
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;
    fn add(self, other: Cost) -> Cost {
        Cost {
            matmul_flops: self.matmul_flops + other.matmul_flops,
            attention_flops: self.attention_flops + other.attention_flops,
            streamed_bytes: self.streamed_bytes + other.streamed_bytes,
            rounded_bytes: self.rounded_bytes + other.rounded_bytes,
        }
    }
}

/// Bytes of all operands and results.
pub(super) fn touched_bytes(program: &Program, instr: &Instr) -> f64 {
    instr.reads.iter().chain(&instr.writes).map(|v| bytes(program, *v)).sum()
}

/// Bytes of a value.
pub(super) fn bytes(program: &Program, value: ValueId) -> f64 {
    program.value(value).size_bytes() as f64
}
