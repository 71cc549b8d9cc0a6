//! `wgmma`: products of matrices in shared memory by a group of four warps.
//!
//! Each warp computes 16 of the 64 rows, with the register layout of `mma.sync`, so that the four need not meet. Products and
//! sums are computed when the instruction is issued; until they are waited for, their registers and operands are in use.
//!
//! Layouts of operands, in chunks of 16 bytes; rows run along M or N. Source: PTX ISA 9.0, §9.7.16.5.1, and the canonical
//! layouts of CUTLASS 3.5, `mma_sm90_desc.hpp`.

use super::block::Block;
use super::flow::Flow;
use super::mma::{half_value, round_sum, value};
use super::swizzle::Swizzle;
use super::warp::Warp;
use crate::alu::WARP;
use crate::memory::clock::lanes;
use crate::memory::shared::Outgoing;
use crate::program::{MatrixType, Op, Reg, Wgmma, WgmmaA};
use crate::report::Kind;
use std::collections::BTreeSet;

/// Elements of a product along K.
const K: usize = 16;

/// A matrix of 16-bit elements in shared memory.
struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
    /// Whether rows, and not columns, are contiguous along K.
    k_major: bool,
}

impl Descriptor {
    fn new(bits: u64, transposed: bool) -> Descriptor {
        let field = |at: u32| (bits >> at & 0x3fff) << 4;
        Descriptor {
            start: field(0),
            leading: field(16),
            stride: field(32),
            swizzle: Swizzle::of_descriptor(bits),
            k_major: !transposed,
        }
    }

    /// Address of the chunk of 8 elements that holds element `[row, k]`, and the position of the element in it.
    fn chunk(&self, row: usize, k: usize) -> (u64, usize) {
        let (along, across) = if self.k_major { (k, row) } else { (row, k) };
        let (chunk, within) = ((along / 8) as u64, along % 8);
        let (group, line) = ((across / 8) as u64, (across % 8) as u64);
        let row_bytes = self.swizzle.row_bytes();
        let per_row = row_bytes / 16;
        let offset = match (self.swizzle, self.k_major) {
            (Swizzle::None, true) => chunk * self.leading + group * self.stride + line * 16,
            (Swizzle::None, false) => chunk * self.stride + group * self.leading + line * 16,
            (_, true) => chunk * 16 + group * self.stride + line * row_bytes,
            (_, false) => {
                chunk % per_row * 16 + chunk / per_row * self.leading + group * self.stride + line * row_bytes
            }
        };
        (self.swizzle.apply(self.start + offset), within)
    }
}

impl Block<'_, '_> {
    pub(super) fn wgmma(&mut self, warp: &mut Warp, op: &Op, exec: u32) -> Flow {
        match self.converge(warp, u32::MAX) {
            None => return Flow::Done,
            Some(missing) if missing != 0 || exec != u32::MAX => {
                self.find_first(warp, exec, Kind::LaneMask, "not all lanes of the warp execute the matrix instruction");
            }
            Some(_) => {}
        }
        match op {
            Op::WgmmaCommit => {
                let group = std::mem::take(&mut warp.wgmma.open);
                warp.wgmma.groups.push_back(group);
                warp.wgmma.n_committed += 1;
            }
            Op::WgmmaWait { pending } => {
                while warp.wgmma.groups.len() > *pending {
                    warp.wgmma.groups.pop_front();
                }
                let done = warp.wgmma.n_committed.saturating_sub(*pending as u64);
                let index = warp.index;
                self.shared.outgoing.retain(|o| o.warp != index || o.lane != WGMMA_LANE || o.group >= done);
            }
            Op::Wgmma(wgmma) => self.product(warp, wgmma, exec),
            _ => {}
        }
        Flow::Next
    }

    fn product(&mut self, warp: &mut Warp, wgmma: &Wgmma, exec: u32) {
        let lane = exec.trailing_zeros() as usize;
        let rows = 16 * (warp.index % 4);
        let a = match &wgmma.a {
            WgmmaA::Regs(regs) => registers(warp, wgmma.ty, regs),
            WgmmaA::Descriptor(reg) => {
                let descriptor = Descriptor::new(warp.reg(*reg)[lane], wgmma.transpose_a);
                self.operand(warp, &descriptor, wgmma.ty, rows..rows + 16)
            }
        };
        let descriptor = Descriptor::new(warp.reg(wgmma.b)[lane], wgmma.transpose_b);
        let b = self.operand(warp, &descriptor, wgmma.ty, 0..wgmma.n);
        let sign = (wgmma.scale_a * wgmma.scale_b) as f32;
        let keeps = warp.pred(wgmma.accumulate) >> lane & 1 == 1;
        let per_reg = if wgmma.half_sums { 2 } else { 1 };
        for (k, reg) in wgmma.d.iter().enumerate() {
            let old = *warp.reg(*reg);
            let mut out = [0u64; WARP];
            for (lane, out) in out.iter_mut().enumerate() {
                for part in 0..per_reg {
                    let i = k * per_reg + part;
                    let (row, column) = (lane / 4 + 8 * (i / 2 % 2), i / 4 * 8 + lane % 4 * 2 + i % 2);
                    let c = match (keeps, wgmma.half_sums) {
                        (false, _) => 0.0,
                        (true, true) => half_value(old[lane] >> (16 * part)),
                        (true, false) => f32::from_bits(old[lane] as u32),
                    };
                    let sum = (0..K).fold(c, |sum, k| sum + sign * a[row][k] * b[column][k]);
                    *out |= round_sum(sum, wgmma.half_sums) << (16 * part);
                }
            }
            warp.set(*reg, &out, exec);
        }
        warp.wgmma.open.extend(&wgmma.d);
    }

    /// Rows of an operand in shared memory, read by the asynchronous proxy.
    fn operand(
        &mut self,
        warp: &Warp,
        from: &Descriptor,
        ty: MatrixType,
        rows: std::ops::Range<usize>,
    ) -> Vec<[f32; K]> {
        let mut chunks = BTreeSet::new();
        for row in rows.clone() {
            chunks.extend((0..K).map(|k| from.chunk(row, k).0));
        }
        let mut bytes = std::collections::BTreeMap::new();
        for (n, at) in chunks.iter().enumerate() {
            let mut chunk = [0u8; 16];
            let actor = Self::actor(&self.clocks, self.index, warp);
            let violation = self.shared.read_by_proxy(*at, &mut chunk, &actor, n % WARP);
            self.note(warp, n % WARP, violation);
            bytes.insert(*at, chunk);
        }
        if let (Some(first), Some(last)) = (chunks.first(), chunks.last()) {
            let pc = warp.fragments[warp.current].pc;
            let group = warp.wgmma.n_committed;
            let (from, to) = (*first as usize, *last as usize + 16);
            self.shared.outgoing.push(Outgoing { warp: warp.index, lane: WGMMA_LANE, group, from, to, pc });
        }
        let element = |row: usize, k: usize| {
            let (at, within) = from.chunk(row, k);
            let chunk = &bytes[&at];
            value(ty, u64::from(u16::from_le_bytes([chunk[2 * within], chunk[2 * within + 1]])))
        };
        rows.map(|row| std::array::from_fn(|k| element(row, k))).collect()
    }
}

/// Marks ranges that products read, and not the copies of a lane.
const WGMMA_LANE: usize = WARP;

/// The 16 rows of A that a warp holds in registers.
fn registers(warp: &Warp, ty: MatrixType, regs: &[Reg]) -> Vec<[f32; K]> {
    let mut a = vec![[0f32; K]; 16];
    for (register, reg) in regs.iter().enumerate() {
        for lane in lanes(u32::MAX) {
            for half in 0..2 {
                let (row, column) = (lane / 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register / 2));
                a[row][column] = value(ty, warp.reg(*reg)[lane] >> (16 * half));
            }
        }
    }
    a
}
