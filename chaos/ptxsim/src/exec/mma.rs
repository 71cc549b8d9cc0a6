//! `mma.sync`: products of small matrices spread over the registers of a warp.
//!
//! With g = lane / 4 and t = lane % 4, lane holds of A `[16, K]` the rows g and g + 8, of B `[K, 8]` the column g, and of C and
//! D `[16, 8]` the rows g and g + 8 of columns 2t and 2t + 1. Source: PTX ISA 9.0, §9.7.15.5.
//!
//! Products of 16-bit and tf32 numbers are exact in f32. Sums are taken in f32, in the order of k, starting with C; hardware
//! sums in another order and with fewer roundings.

use super::block::Block;
use super::flow::Flow;
use super::warp::Warp;
use crate::alu::{F16, Rounding, WARP, narrow, widen};
use crate::program::{MatrixType, Mma, Reg};
use crate::report::Kind;

impl Block<'_, '_> {
    pub(super) fn mma(&mut self, warp: &mut Warp, mma: &Mma, exec: u32) -> Flow {
        match self.converge(warp, u32::MAX) {
            None => return Flow::Done,
            Some(missing) if missing != 0 || exec != u32::MAX => {
                self.find_first(warp, exec, Kind::LaneMask, "not all lanes of the warp execute the matrix instruction");
            }
            Some(_) => {}
        }
        if mma.ty == MatrixType::F64 {
            product_f64(warp, mma, exec);
        } else {
            product(warp, mma, exec);
        }
        Flow::Next
    }
}

/// The value of an element of 16 or 32 bits.
pub(super) fn value(ty: MatrixType, bits: u64) -> f32 {
    match ty {
        MatrixType::Bf16 => f32::from_bits((bits as u32) << 16),
        MatrixType::F16 => widen(bits & 0xffff, F16) as f32,
        // Hardware reads the upper 19 bits only.
        _ => f32::from_bits(bits as u32 & 0xffff_e000),
    }
}

fn product(warp: &mut Warp, mma: &Mma, exec: u32) {
    let (mut a, mut b) = ([[0f32; 16]; 16], [[0f32; 16]; 8]);
    let packed = if mma.ty == MatrixType::Tf32 { 1 } else { 2 };
    for (register, reg) in mma.a.iter().enumerate() {
        let values = warp.reg(*reg);
        for lane in 0..WARP {
            let (g, t) = (lane / 4, lane % 4);
            for half in 0..packed {
                // Registers alternate between the rows g and g + 8; each pair of registers is 4 groups of columns further.
                let (row, column) = (g + 8 * (register % 2), packed * t + half + 4 * packed * (register / 2));
                a[row][column] = value(mma.ty, values[lane] >> (16 * half));
            }
        }
    }
    for (register, reg) in mma.b.iter().enumerate() {
        let values = warp.reg(*reg);
        for lane in 0..WARP {
            let (g, t) = (lane / 4, lane % 4);
            for half in 0..packed {
                b[g][packed * t + half + 4 * packed * register] = value(mma.ty, values[lane] >> (16 * half));
            }
        }
    }
    let mut sums = sums_of(warp, &mma.c, mma.half_sums);
    for (row, sums) in sums.iter_mut().enumerate() {
        for (column, sum) in sums.iter_mut().enumerate() {
            for k in 0..mma.k {
                *sum += a[row][k] * b[column][k];
            }
        }
    }
    store_sums(warp, &mma.d, mma.half_sums, &sums, exec);
}

/// C `[16, 8]` from registers of f32, or of pairs of f16.
fn sums_of(warp: &Warp, regs: &[Reg], half: bool) -> [[f32; 8]; 16] {
    let mut sums = [[0f32; 8]; 16];
    for lane in 0..WARP {
        for i in 0..4 {
            let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            sums[row][column] = if half {
                widen(warp.reg(regs[i / 2])[lane] >> (16 * (i % 2)) & 0xffff, F16) as f32
            } else {
                f32::from_bits(warp.reg(regs[i])[lane] as u32)
            };
        }
    }
    sums
}

fn store_sums(warp: &mut Warp, regs: &[Reg], half: bool, sums: &[[f32; 8]; 16], exec: u32) {
    for (k, reg) in regs.iter().enumerate() {
        let out = std::array::from_fn(|lane| {
            let at = |i: usize| sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
            if half {
                let bits = |i: usize| narrow(f64::from(at(i)), F16, Rounding::Nearest, false);
                bits(2 * k) | bits(2 * k + 1) << 16
            } else {
                u64::from(at(k).to_bits())
            }
        });
        warp.set(*reg, &out, exec);
    }
}

/// `m8n8k4` of f64: lane holds A `[g, t]`, B `[t, g]` and columns 2t, 2t + 1 of row g of C.
fn product_f64(warp: &mut Warp, mma: &Mma, exec: u32) {
    let (a, b) = (*warp.reg(mma.a[0]), *warp.reg(mma.b[0]));
    for i in 0..2 {
        let c = *warp.reg(mma.c[i]);
        let out = std::array::from_fn(|lane| {
            let (row, column) = (lane / 4, lane % 4 * 2 + i);
            let step =
                |sum: f64, k: usize| f64::from_bits(a[row * 4 + k]).mul_add(f64::from_bits(b[column * 4 + k]), sum);
            (0..4).fold(f64::from_bits(c[lane]), step).to_bits()
        });
        warp.set(mma.d[i], &out, exec);
    }
}

/// Rounds a sum as the type of the results requires.
pub(super) fn round_sum(sum: f32, half: bool) -> u64 {
    if half { narrow(f64::from(sum), F16, Rounding::Nearest, false) } else { u64::from(sum.to_bits()) }
}

/// The value of a 16-bit sum.
pub(super) fn half_value(bits: u64) -> f32 {
    widen(bits & 0xffff, F16) as f32
}
