//! Atomic instructions.

use super::block::Block;
use super::warp::Warp;
use crate::alu::{BF16, F16, Format, Rounding, WARP, narrow, widen};
use crate::memory::Mode;
use crate::memory::clock::lanes;
use crate::program::{Atom, AtomOp};
use crate::types::{Ty, mask_of, sign_extend};

impl Block<'_, '_> {
    pub(super) fn atom(&mut self, warp: &mut Warp, atom: &Atom, exec: u32) {
        let bytes = atom.ty.bytes();
        let mut old = vec![[0u64; WARP]; atom.src.len()];
        for lane in lanes(exec) {
            let base = self.address_of(warp, atom.address, lane);
            self.acquire(warp, base);
            self.publish(warp, base, atom.release);
            for (k, src) in atom.src.iter().enumerate() {
                let address = base.wrapping_add((k * bytes) as u64);
                let mut buffer = [0u8; 8];
                let violation = self.read_lane(warp, lane, atom.space, address, &mut buffer[..bytes], Mode::Atomic);
                self.note(warp, lane, violation);
                let value = u64::from_le_bytes(buffer);
                let new = apply(atom.op, atom.ty, value, warp.reg(*src)[lane], warp.reg(atom.new)[lane]);
                let new = new.to_le_bytes();
                let violation = self.write_lane(warp, lane, atom.space, address, &new[..bytes], Mode::Atomic);
                self.note(warp, lane, violation);
                old[k][lane] = value;
            }
        }
        for (dst, old) in atom.dst.iter().zip(&old) {
            if let Some(dst) = dst {
                warp.set(*dst, old, exec);
            }
        }
    }
}

/// The new value in memory.
pub(super) fn apply(op: AtomOp, ty: Ty, old: u64, operand: u64, new: u64) -> u64 {
    let mask = mask_of(ty.bytes());
    let (old, operand) = (old & mask, operand & mask);
    let signed = |v: u64| sign_extend(v, ty.bytes()) as i64;
    match (op, ty) {
        (AtomOp::Add, Ty::F32) => u64::from((f32::from_bits(old as u32) + f32::from_bits(operand as u32)).to_bits()),
        (AtomOp::Add, Ty::F64) => (f64::from_bits(old) + f64::from_bits(operand)).to_bits(),
        (AtomOp::Add, Ty::F16) => half_sum(old, operand, F16),
        (AtomOp::Add, Ty::Bf16) => half_sum(old, operand, BF16),
        (AtomOp::Add, Ty::F16x2) => half_sum(old, operand, F16) | half_sum(old >> 16, operand >> 16, F16) << 16,
        (AtomOp::Add, Ty::Bf16x2) => half_sum(old, operand, BF16) | half_sum(old >> 16, operand >> 16, BF16) << 16,
        (AtomOp::Add, _) => old.wrapping_add(operand) & mask,
        (AtomOp::Min, Ty::Signed(_)) => signed(old).min(signed(operand)) as u64 & mask,
        (AtomOp::Max, Ty::Signed(_)) => signed(old).max(signed(operand)) as u64 & mask,
        (AtomOp::Min, _) => old.min(operand),
        (AtomOp::Max, _) => old.max(operand),
        (AtomOp::And, _) => old & operand,
        (AtomOp::Or, _) => old | operand,
        (AtomOp::Xor, _) => old ^ operand,
        (AtomOp::Exchange, _) => operand,
        (AtomOp::CompareAndSwap, _) => {
            if old == operand {
                new & mask
            } else {
                old
            }
        }
        (AtomOp::Increment, _) => {
            if old >= operand {
                0
            } else {
                old + 1
            }
        }
        (AtomOp::Decrement, _) => {
            if old == 0 || old > operand {
                operand
            } else {
                old - 1
            }
        }
    }
}

fn half_sum(a: u64, b: u64, format: Format) -> u64 {
    narrow(
        crate::alu::add_to_odd(widen(a & 0xffff, format), widen(b & 0xffff, format)),
        format,
        Rounding::Nearest,
        false,
    )
}
