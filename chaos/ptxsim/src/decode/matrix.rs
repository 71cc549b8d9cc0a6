//! Matrix instructions.

use super::Decoder;
use super::opcode::Opcode;
use crate::error::PtxError;
use crate::program::{MatrixAccess, MatrixType, Mma, Op, Pred, Reg, Wgmma, WgmmaA};
use crate::syntax::{Operand, RawInstr};
use crate::types::{Space, Ty};

impl<'m> Decoder<'m> {
    pub(super) fn matrix(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        match opcode.head {
            "mma" => self.mma(raw, opcode),
            "wgmma" => self.wgmma(raw, opcode),
            head => {
                opcode.ignore(&["sync", "aligned", "m8n8", "b16"]);
                let n = opcode.take_map(|m| match m {
                    "x1" => Some(1),
                    "x2" => Some(2),
                    "x4" => Some(4),
                    _ => None,
                });
                let n = n.ok_or_else(|| opcode.unsupported("the number of matrices is missing"))?;
                let transposed = opcode.take("trans");
                let space = opcode.take_space().unwrap_or(Space::Generic);
                let store = head == "stmatrix";
                let (address, space) = self.address(raw, self.operand(raw, usize::from(!store))?, space)?;
                let regs = self.regs(raw, self.operand(raw, usize::from(store))?, n)?;
                Ok(Op::Matrix(MatrixAccess { store, transposed, space, address, regs }))
            }
        }
    }

    fn mma(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["sync", "aligned", "row", "col"]);
        let shape = opcode.take_map(|m| m.strip_prefix('m').filter(|s| s.contains('n')));
        let types = [opcode.need_type()?, opcode.need_type()?, opcode.need_type()?, opcode.need_type()?];
        let (ty, k) = match (shape, types[1]) {
            (Some("16n8k16"), Ty::Bf16) => (MatrixType::Bf16, 16),
            (Some("16n8k8"), Ty::Bf16) => (MatrixType::Bf16, 8),
            (Some("16n8k16"), Ty::F16) => (MatrixType::F16, 16),
            (Some("16n8k8"), Ty::F16) => (MatrixType::F16, 8),
            (Some("16n8k8"), Ty::Tf32) => (MatrixType::Tf32, 8),
            (Some("16n8k4"), Ty::Tf32) => (MatrixType::Tf32, 4),
            (Some("8n8k4"), Ty::F64) => (MatrixType::F64, 4),
            _ => return Err(opcode.unsupported("this shape or type")),
        };
        let half_sums = types[0] == Ty::F16;
        let sums = if ty == MatrixType::F64 { Ty::F64 } else { Ty::F32 };
        if types[1] != types[2] || types[0] != types[3] || types[0] != sums && !(half_sums && ty == MatrixType::F16) {
            return Err(opcode.unsupported("this combination of types"));
        }
        let (n_a, n_b) = match ty {
            MatrixType::F64 => (1, 1),
            MatrixType::Tf32 => (k / 2, k / 4),
            _ => (k / 4, k / 8),
        };
        let n_sums = if half_sums || ty == MatrixType::F64 { 2 } else { 4 };
        Ok(Op::Mma(Mma {
            ty,
            k,
            half_sums,
            d: self.regs(raw, self.operand(raw, 0)?, n_sums)?,
            a: self.regs(raw, self.operand(raw, 1)?, n_a)?,
            b: self.regs(raw, self.operand(raw, 2)?, n_b)?,
            c: self.regs(raw, self.operand(raw, 3)?, n_sums)?,
        }))
    }

    fn wgmma(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["sync", "aligned"]);
        if opcode.take("fence") {
            return Ok(Op::WgmmaFence);
        }
        if opcode.take("commit_group") {
            return Ok(Op::WgmmaCommit);
        }
        if opcode.take("wait_group") {
            return Ok(Op::WgmmaWait { pending: self.literal(raw, 0)? as usize });
        }
        opcode.take("mma_async");
        let shape = opcode.take_map(|m| m.strip_prefix("m64n"));
        let (n, k) = shape.and_then(|s| s.split_once('k')).ok_or_else(|| opcode.unsupported("this shape"))?;
        let n: usize = n.parse().map_err(|_| opcode.unsupported("this shape"))?;
        let (sums, ta, tb) = (opcode.need_type()?, opcode.need_type()?, opcode.need_type()?);
        let ty = match (ta, k) {
            (Ty::Bf16, "16") => MatrixType::Bf16,
            (Ty::F16, "16") => MatrixType::F16,
            _ => return Err(opcode.unsupported("this shape or type")),
        };
        let half_sums = sums == Ty::F16;
        if ta != tb
            || sums != Ty::F32 && !(half_sums && ty == MatrixType::F16)
            || n == 0
            || n > 256
            || !n.is_multiple_of(8)
        {
            return Err(opcode.unsupported("this combination of types"));
        }
        let a = match self.operand(raw, 1)? {
            Operand::List(_) => WgmmaA::Regs(self.regs(raw, self.operand(raw, 1)?, 4)?),
            operand => WgmmaA::Descriptor(self.src(raw, operand)?),
        };
        let by_register = matches!(a, WgmmaA::Regs(_));
        let accumulate: Pred = self.pred_src(raw, self.operand(raw, 3)?)?;
        let (scale_a, scale_b) = (self.literal(raw, 4)? as i32, self.literal(raw, 5)? as i32);
        // From registers, A has no transposition.
        let transpose_a = !by_register && self.literal(raw, 6)? != 0;
        let transpose_b = self.literal(raw, if by_register { 6 } else { 7 })? != 0;
        Ok(Op::Wgmma(Box::new(Wgmma {
            ty,
            n,
            half_sums,
            d: self.regs(raw, self.operand(raw, 0)?, if half_sums { n / 4 } else { n / 2 })?,
            a,
            b: self.src(raw, self.operand(raw, 2)?)?,
            accumulate,
            scale_a,
            scale_b,
            transpose_a,
            transpose_b,
        })))
    }

    pub(super) fn literal(&self, raw: &'m RawInstr, index: usize) -> Result<u64, PtxError> {
        match self.operand(raw, index)? {
            Operand::Literal(value) => Ok(*value),
            _ => Err(self.unsupported(raw, &format!("operand {index} must be a constant"))),
        }
    }

    fn regs(&mut self, raw: &'m RawInstr, operand: &'m Operand, n: usize) -> Result<Vec<Reg>, PtxError> {
        let list = match operand {
            Operand::List(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        if list.len() != n {
            return Err(self.unsupported(raw, &format!("{} registers where {n} belong", list.len())));
        }
        list.iter().map(|o| self.src(raw, o)).collect()
    }
}
