//! Asynchronous copies and mbarriers.

use super::Decoder;
use super::opcode::Opcode;
use crate::error::PtxError;
use crate::program::{Address, CopyOp, MbarrierOp, Op, Reg, SINK};
use crate::syntax::{Operand, RawInstr};
use crate::types::{Space, Ty};

impl<'m> Decoder<'m> {
    pub(super) fn asynchronous(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"]);
        if opcode.head == "mbarrier" {
            return self.mbarrier(raw, opcode);
        }
        if !opcode.take("async") {
            return Err(opcode.unsupported("the form without `.async`"));
        }
        let copy = if opcode.take("bulk") { self.bulk(raw, opcode)? } else { self.small(raw, opcode)? };
        Ok(Op::Copy(copy))
    }

    fn small(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<CopyOp, PtxError> {
        if opcode.take("commit_group") {
            return Ok(CopyOp::Commit);
        }
        if opcode.take("wait_all") {
            return Ok(CopyOp::WaitAll);
        }
        if opcode.take("wait_group") {
            return Ok(CopyOp::Wait { pending: self.literal(raw, 0)? as usize });
        }
        if opcode.take("mbarrier") {
            let no_increment = opcode.take("noinc");
            opcode.ignore(&["arrive", "b64", "shared", "shared::cta"]);
            let (barrier, _) = self.address(raw, self.operand(raw, 0)?, Space::Shared)?;
            return Ok(CopyOp::Arrive { barrier, no_increment });
        }
        opcode.ignore(&["ca", "cg", "global"]);
        opcode.take_space();
        let (to, _) = self.address(raw, self.operand(raw, 0)?, Space::Shared)?;
        let (from, _) = self.address(raw, self.operand(raw, 1)?, Space::Global)?;
        let bytes = self.literal(raw, 2)? as usize;
        if ![4, 8, 16].contains(&bytes) {
            return Err(opcode.unsupported("copies have 4, 8 or 16 bytes"));
        }
        let (mut source_bytes, mut skip) = (None, None);
        match raw.operands.get(3) {
            None => {}
            Some(operand) if self.is_pred(raw, operand) => skip = Some(self.pred_src(raw, operand)?),
            Some(operand) => source_bytes = Some(self.src(raw, operand)?),
        }
        Ok(CopyOp::Small { to, from, bytes, source_bytes, skip })
    }

    fn is_pred(&self, raw: &RawInstr, operand: &Operand) -> bool {
        match operand {
            Operand::Not(_) => true,
            Operand::Name(name) => self.pred(raw, name).is_ok(),
            _ => false,
        }
    }

    fn bulk(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<CopyOp, PtxError> {
        if opcode.take("commit_group") {
            return Ok(CopyOp::BulkCommit);
        }
        if opcode.take("wait_group") {
            // Copies write at once, so that the end of their reads is their end.
            opcode.ignore(&["read"]);
            return Ok(CopyOp::BulkWait { pending: self.literal(raw, 0)? as usize });
        }
        if opcode.take("prefetch") {
            return Err(opcode.unsupported("bulk prefetches"));
        }
        let is_tensor = opcode.take("tensor");
        opcode.ignore(&["mbarrier::complete_tx::bytes", "bulk_group", "tile", "1d", "2d", "3d", "4d", "5d"]);
        if opcode.take("multicast::cluster") {
            return Err(opcode.unsupported("copies to several blocks of a cluster"));
        }
        let to_shared = opcode.take_space().ok_or_else(|| opcode.unsupported("the destination is missing"))?;
        opcode.take_space();
        let reduce = self.reduction(opcode)?;
        if to_shared == Space::Shared {
            let (to, _) = self.address(raw, self.operand(raw, 0)?, Space::Shared)?;
            if is_tensor {
                let (map, coordinates) = self.tensor(raw, 1)?;
                let (barrier, _) = self.address(raw, self.operand(raw, 2)?, Space::Shared)?;
                return Ok(CopyOp::TensorLoad { to, map, coordinates, barrier });
            }
            let (from, _) = self.address(raw, self.operand(raw, 1)?, Space::Global)?;
            let bytes = self.src(raw, self.operand(raw, 2)?)?;
            let (barrier, _) = self.address(raw, self.operand(raw, 3)?, Space::Shared)?;
            return Ok(CopyOp::BulkLoad { to, from, bytes, barrier });
        }
        let (from, _) = self.address(raw, self.operand(raw, 1)?, Space::Shared)?;
        if is_tensor {
            let (map, coordinates) = self.tensor(raw, 0)?;
            return Ok(CopyOp::TensorStore { map, coordinates, from, reduce: reduce.is_some() });
        }
        let (to, _) = self.address(raw, self.operand(raw, 0)?, Space::Global)?;
        Ok(CopyOp::BulkStore { to, from, bytes: self.src(raw, self.operand(raw, 2)?)?, reduce })
    }

    /// The type of `cp.reduce.async.bulk…add`.
    fn reduction(&self, opcode: &mut Opcode<'m>) -> Result<Option<Ty>, PtxError> {
        if !opcode.take("reduce") {
            return Ok(None);
        }
        if !opcode.take("add") {
            return Err(opcode.unsupported("reductions other than sums"));
        }
        opcode.ignore(&["noftz"]);
        Ok(Some(opcode.take_type().unwrap_or(Ty::F32)))
    }

    fn tensor(&mut self, raw: &'m RawInstr, index: usize) -> Result<(Address, Vec<Reg>), PtxError> {
        let operand = self.operand(raw, index)?;
        let (map, _) = self.address(raw, operand, Space::Generic)?;
        let Operand::Address { coordinates, .. } = operand else {
            return Err(self.unsupported(raw, "the coordinates are missing"));
        };
        let coordinates = coordinates.iter().map(|c| self.src(raw, c)).collect::<Result<_, PtxError>>()?;
        Ok((map, coordinates))
    }

    fn mbarrier(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&[
            "b64",
            "shared",
            "shared::cta",
            "shared::cluster",
            "cta",
            "cluster",
            "release",
            "acquire",
            "relaxed",
        ]);
        let kind = opcode.take_first().ok_or_else(|| opcode.unsupported("the operation is missing"))?;
        let mut at = 0;
        let op = match kind {
            "init" => MbarrierOp::Init { count: self.src(raw, self.operand(raw, 1)?)? },
            "inval" => MbarrierOp::Invalidate,
            "expect_tx" => MbarrierOp::ExpectTransaction { bytes: self.src(raw, self.operand(raw, 1)?)? },
            "arrive" | "arrive_drop" => {
                let expects = opcode.take("expect_tx");
                opcode.ignore(&["noComplete"]);
                let state = match self.operand(raw, 0)? {
                    Operand::Address { .. } => None,
                    state => Some(self.dst(raw, state)?),
                };
                at = usize::from(state.is_some());
                let operand = raw.operands.get(at + 1).map(|o| self.src(raw, o)).transpose()?;
                let (count, transaction_bytes) = if expects { (None, operand) } else { (operand, None) };
                MbarrierOp::Arrive { state, count, transaction_bytes, drop: kind == "arrive_drop" }
            }
            "test_wait" | "try_wait" => {
                let by_parity = opcode.take("parity");
                at = 1;
                let result = match self.operand(raw, 0)? {
                    Operand::Name(name) => self.pred(raw, name)?,
                    _ => SINK,
                };
                let phase = Some(self.src(raw, self.operand(raw, 2)?)?);
                let (state, parity) = if by_parity { (None, phase) } else { (phase, None) };
                MbarrierOp::Wait { result, state, parity }
            }
            _ => return Err(opcode.unsupported("this operation on an mbarrier")),
        };
        let (address, _) = self.address(raw, self.operand(raw, at)?, Space::Shared)?;
        Ok(Op::Mbarrier(op, address))
    }
}
