//! Packed weights.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Op, Packing, op};

/// All forms, to all types of operands of products.
pub(super) fn cases() -> Vec<Case> {
    let forms = [Packing::Bf16, Packing::E4m3, Packing::Int8, Packing::Nf4 { double: true }];
    let types = [DType::F32, DType::Bf16, DType::F16];
    forms.into_iter().flat_map(|packing| types.map(|dtype| unpack(packing, dtype))).collect()
}

/// Any bits are codes; the first word of a block is its scale, and a word of bf16 is two numbers.
fn unpack(packing: Packing, dtype: DType) -> Case {
    let (rows, columns) = (5, 192);
    let n_words = rows * packing.words(columns);
    let word = |i: usize| {
        let mixed = (i as u32).wrapping_add(1).wrapping_mul(0x9e37_79b9);
        let number = f32::from((mixed >> 16) as u16) / 65536.0 - 0.5;
        match packing {
            Packing::Bf16 => number.to_bits() & 0xffff_0000 | (2.0 * number).to_bits() >> 16,
            // Any byte but a NaN.
            Packing::E4m3 => mixed & 0x7777_7777 | mixed & 0x8080_8080,
            _ if i.is_multiple_of(packing.n_words()) => number.abs().to_bits(),
            _ => mixed ^ mixed >> 13,
        }
    };
    let words = (0..n_words).map(|i| f64::from(word(i).cast_signed())).collect();
    let reads = vec![Operand::of(&[rows, packing.words(columns)], DType::I32, words)];
    Case::new(format!("unpack {packing} to {dtype}"), Op::Unpack(op::Unpack(packing)), reads, Tolerance::EXACT)
        .writing(&[rows, columns], dtype)
}
