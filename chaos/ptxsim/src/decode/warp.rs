//! Instructions in which the lanes of a warp exchange values.

use super::Decoder;
use super::opcode::Opcode;
use crate::error::PtxError;
use crate::program::{AtomOp, Op, SINK, ShuffleMode, Vote};
use crate::syntax::{Operand, RawInstr};

impl<'m> Decoder<'m> {
    pub(super) fn warp_wide(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        if opcode.head != "activemask" && !opcode.take("sync") {
            return Err(opcode.unsupported("the form without `.sync`"));
        }
        match opcode.head {
            "shfl" => self.shuffle(raw, opcode),
            "vote" => self.vote(raw, opcode),
            "match" => {
                let all = opcode.take("all");
                opcode.ignore(&["any"]);
                let bytes = opcode.need_type()?.bytes();
                let (dst, valid) = self.reg_and_pred(raw)?;
                let (src, mask) = (self.src(raw, self.operand(raw, 1)?)?, self.src(raw, self.operand(raw, 2)?)?);
                Ok(Op::Match { all, dst, valid, src, bytes, mask })
            }
            "redux" => {
                let op = opcode.take_map(|m| {
                    Some(match m {
                        "add" => AtomOp::Add,
                        "min" => AtomOp::Min,
                        "max" => AtomOp::Max,
                        "and" => AtomOp::And,
                        "or" => AtomOp::Or,
                        "xor" => AtomOp::Xor,
                        _ => return None,
                    })
                });
                let op = op.ok_or_else(|| opcode.unsupported("the operation is missing"))?;
                let ty = opcode.need_type()?;
                let dst = self.dst(raw, self.operand(raw, 0)?)?;
                let (src, mask) = (self.src(raw, self.operand(raw, 1)?)?, self.src(raw, self.operand(raw, 2)?)?);
                Ok(Op::Redux { op, ty, dst, src, mask })
            }
            "elect" => {
                let (dst, pred) = self.reg_and_pred(raw)?;
                Ok(Op::Elect { dst, pred, mask: self.src(raw, self.operand(raw, 1)?)? })
            }
            _ => {
                opcode.take_type();
                Ok(Op::ActiveMask { dst: self.dst(raw, self.operand(raw, 0)?)? })
            }
        }
    }

    fn shuffle(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let mode = opcode.take_map(|m| match m {
            "up" => Some(ShuffleMode::Up),
            "down" => Some(ShuffleMode::Down),
            "bfly" => Some(ShuffleMode::Butterfly),
            "idx" => Some(ShuffleMode::Index),
            _ => None,
        });
        let mode = mode.ok_or_else(|| opcode.unsupported("the mode is missing"))?;
        opcode.need_type()?;
        let (dst, valid) = self.reg_and_pred(raw)?;
        self.operand(raw, 4)?;
        let [src, by, clamp, mask] = self.sources(raw, &raw.operands[1..5])?;
        Ok(Op::Shuffle { mode, dst, valid, src, by, clamp, mask })
    }

    fn vote(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let vote = opcode.take_map(|m| match m {
            "all" => Some(Vote::All),
            "any" => Some(Vote::Any),
            "uni" => Some(Vote::Uniform),
            "ballot" => Some(Vote::Ballot),
            _ => None,
        });
        let vote = vote.ok_or_else(|| opcode.unsupported("the mode is missing"))?;
        opcode.take_type();
        let (mut dst, mut dst_pred) = (self.sink, SINK);
        match (vote, self.operand(raw, 0)?) {
            (Vote::Ballot, operand) => dst = self.dst(raw, operand)?,
            (_, Operand::Name(name)) => dst_pred = self.pred(raw, name)?,
            _ => return Err(opcode.unsupported("the destination must be a predicate")),
        }
        let src = self.pred_src(raw, self.operand(raw, 1)?)?;
        Ok(Op::Vote { vote, dst, dst_pred, src, mask: self.src(raw, self.operand(raw, 2)?)? })
    }

    /// A destination `r|p` or `r`.
    fn reg_and_pred(&mut self, raw: &'m RawInstr) -> Result<(u32, u32), PtxError> {
        match self.operand(raw, 0)? {
            Operand::Pair(reg, pred) => Ok((self.dst(raw, &Operand::Name(reg.clone()))?, self.pred(raw, pred)?)),
            operand => Ok((self.dst(raw, operand)?, SINK)),
        }
    }
}
