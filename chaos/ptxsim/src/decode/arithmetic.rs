//! Arithmetic, logic, comparisons, selections, moves and conversions.

use super::Decoder;
use super::names::Slot;
use super::opcode::Opcode;
use crate::alu::{
    self, Alu, BF16, Conversion, F16, FloatMode, IntegerMode, Rounding, bits, comparison, convert, convert_pair,
    f32_op, f64_op, funnel_shift, half_op, integer_op,
};
use crate::error::PtxError;
use crate::program::{ALWAYS, Logic, Op, Pred, SINK};
use crate::syntax::{Operand, RawInstr};
use crate::types::{Ty, mask_of};

impl<'m> Decoder<'m> {
    pub(super) fn arithmetic(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let gives_carry = matches!(opcode.head, "add" | "sub" | "mad") && opcode.take("cc");
        match opcode.head {
            "mov" => self.mov(raw, opcode),
            "cvt" => self.cvt(raw, opcode),
            "setp" => self.setp(raw, opcode),
            "set" => self.set(raw, opcode),
            "selp" => self.selp(raw, opcode),
            "slct" => self.slct(raw, opcode),
            "addc" | "subc" | "madc" => self.carry(raw, opcode, true),
            _ if gives_carry => self.carry(raw, opcode, false),
            "shf" => {
                let left = opcode.take("l");
                let wrap = opcode.take("wrap");
                opcode.ignore(&["r", "clamp", "b32"]);
                self.alu(raw, funnel_shift(left, wrap))
            }
            "lop3" => {
                opcode.ignore(&["b32"]);
                let Operand::Literal(table) = self.operand(raw, 4)? else {
                    return Err(opcode.unsupported("the table must be a constant"));
                };
                let dst = self.dst(raw, self.operand(raw, 0)?)?;
                Ok(Op::Lop3 { dst, src: self.sources(raw, &raw.operands[1..4])?, table: *table as u8 })
            }
            "bfi" => {
                let ty = opcode.need_type()?;
                self.operand(raw, 4)?;
                let dst = self.dst(raw, self.operand(raw, 0)?)?;
                Ok(Op::BitInsert { ty, dst, src: self.sources(raw, &raw.operands[1..5])? })
            }
            _ => self.computed(raw, opcode),
        }
    }

    /// An instruction that is one function of its operands.
    fn computed(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let rounding = opcode.take_rounding();
        let mode = FloatMode {
            rounding: rounding.map_or(Rounding::Nearest, |r| r.0),
            ftz: opcode.take("ftz"),
            sat: opcode.take("sat"),
            nan: opcode.take("NaN"),
            approx: opcode.take("approx") | opcode.take("full"),
        };
        let relu = opcode.take("relu");
        let product = opcode.take_map(|m| match m {
            "lo" => Some(IntegerMode::Low),
            "hi" => Some(IntegerMode::High),
            "wide" => Some(IntegerMode::Wide),
            _ => None,
        });
        let shift_amount = opcode.take("shiftamt");
        let ty = opcode.need_type()?;
        if opcode.head == "dp4a" {
            let second = opcode.need_type()?;
            if second != ty {
                return Err(opcode.unsupported("operands of different signs"));
            }
        }
        let op = opcode.head;
        if ty == Ty::Pred {
            return self.predicate_logic(raw, opcode);
        }
        let f = match ty {
            Ty::F32 => f32_op(op, mode),
            Ty::F64 => f64_op(op, mode),
            Ty::F16 | Ty::F16x2 => half_op(op, F16, ty == Ty::F16x2, mode.nan, relu, mode.sat),
            Ty::Bf16 | Ty::Bf16x2 => half_op(op, BF16, ty == Ty::Bf16x2, mode.nan, relu, mode.sat),
            _ => {
                bits(op, ty, shift_amount).or_else(|| integer_op(op, ty, product.unwrap_or(IntegerMode::Low), mode.sat))
            }
        };
        let f = f.ok_or_else(|| opcode.unsupported("this operation or one of its modifiers is unknown"))?;
        self.alu(raw, f)
    }

    /// An instruction with a destination and as many sources as its function has operands.
    fn alu(&mut self, raw: &'m RawInstr, f: Alu) -> Result<Op, PtxError> {
        let n = f.operands();
        if raw.operands.len() != n + 1 {
            return Err(self.unsupported(raw, &format!("{} operands where {} belong", raw.operands.len(), n + 1)));
        }
        let dst = self.dst(raw, &raw.operands[0])?;
        let src = self.sources(raw, &raw.operands[1..])?;
        Ok(Op::Alu { f, dst, src })
    }

    fn predicate_logic(&mut self, raw: &'m RawInstr, opcode: &Opcode<'m>) -> Result<Op, PtxError> {
        let Operand::Name(dst) = self.operand(raw, 0)? else {
            return Err(self.unsupported(raw, "the destination must be a predicate"));
        };
        let dst = self.pred(raw, dst)?;
        let a = self.pred_src(raw, self.operand(raw, 1)?)?;
        let (op, a, b) = match opcode.head {
            "not" => (Logic::And, Pred { negated: !a.negated, ..a }, ALWAYS),
            "and" => (Logic::And, a, self.pred_src(raw, self.operand(raw, 2)?)?),
            "or" => (Logic::Or, a, self.pred_src(raw, self.operand(raw, 2)?)?),
            "xor" => (Logic::Xor, a, self.pred_src(raw, self.operand(raw, 2)?)?),
            "mov" => (Logic::And, a, ALWAYS),
            _ => return Err(opcode.unsupported("this operation on predicates is unknown")),
        };
        Ok(Op::PredicateLogic { op, dst, a, b })
    }

    /// `mov`: of a value, an address, a predicate, or between a register and its parts.
    fn mov(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let ty = opcode.need_type()?;
        let (dst, src) = (self.operand(raw, 0)?, self.operand(raw, 1)?);
        match (dst, src) {
            _ if ty == Ty::Pred => self.predicate_logic(raw, opcode),
            (Operand::List(parts), _) => {
                let bytes = ty.bytes() / parts.len();
                let reg = |part: &Operand| match part {
                    Operand::Name(name) if name == "_" => Ok(None),
                    part => self.dst(raw, part).map(Some),
                };
                let parts = parts.iter().map(reg).collect::<Result<_, PtxError>>()?;
                Ok(Op::Unpack { parts, src: self.src(raw, src)?, bytes })
            }
            (_, Operand::List(parts)) => {
                let bytes = ty.bytes() / parts.len();
                let parts = parts.iter().map(|p| self.src(raw, p)).collect::<Result<_, PtxError>>()?;
                Ok(Op::Pack { dst: self.dst(raw, dst)?, parts, bytes })
            }
            (_, Operand::Name(name))
                if matches!(name.as_str(), "%clock" | "%clock64" | "%globaltimer" | "%clock_hi") =>
            {
                Ok(Op::Clock { dst: self.dst(raw, dst)? })
            }
            _ => {
                let mask = mask_of(ty.bytes());
                self.alu(raw, alu::one(move |a| a & mask))
            }
        }
    }

    fn cvt(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let (rounding, to_integer) = opcode.take_rounding().unwrap_or((Rounding::Nearest, false));
        let mode = Conversion {
            rounding,
            to_integer,
            ftz: opcode.take("ftz"),
            sat: opcode.take("sat"),
            satfinite: opcode.take("satfinite"),
            relu: opcode.take("relu"),
        };
        let (to, from) = (opcode.need_type()?, opcode.need_type()?);
        // Without a rounding, conversions to an integer truncate.
        let mode = if from.is_float() && !to.is_float() && !to_integer {
            Conversion { rounding: Rounding::Zero, ..mode }
        } else {
            mode
        };
        let f = if raw.operands.len() == 3 { convert_pair(to, mode) } else { convert(to, from, mode) };
        let f = f.ok_or_else(|| opcode.unsupported("conversion between these types"))?;
        // The result of a narrow signed type fills the wider register that holds it.
        let wide = match self.operand(raw, 0)? {
            Operand::Name(name) => match self.names.slot(raw.scope, name) {
                Some(Slot::Reg(_, reg)) if to.is_signed() && reg.bytes() > to.bytes() => Some(reg.bytes()),
                _ => None,
            },
            _ => None,
        };
        match (wide, f) {
            (Some(bytes), Alu::One(f)) => {
                let (mask, narrow) = (mask_of(bytes), to.bytes());
                let extended = Alu::One(Box::new(move |a, out| {
                    f(a, out);
                    out.iter_mut().for_each(|v| *v = crate::types::sign_extend(*v, narrow) & mask);
                }));
                self.alu(raw, extended)
            }
            (_, f) => self.alu(raw, f),
        }
    }

    fn setp(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let (test, logic) = self.comparison(opcode)?;
        let (p, q) = match self.operand(raw, 0)? {
            Operand::Name(p) => (self.pred(raw, p)?, None),
            Operand::Pair(p, q) => (self.pred(raw, p)?, Some(self.pred(raw, q)?).filter(|q| *q != SINK)),
            _ => return Err(self.unsupported(raw, "the destination must be a predicate")),
        };
        let (a, b) = (self.src(raw, self.operand(raw, 1)?)?, self.src(raw, self.operand(raw, 2)?)?);
        let with = match logic {
            None => None,
            Some(logic) => Some((logic, self.pred_src(raw, self.operand(raw, 3)?)?)),
        };
        Ok(Op::SetPredicate { test, a, b, with, p, q })
    }

    fn set(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let to = opcode.need_type()?;
        let (test, logic) = self.comparison(opcode)?;
        let holds = match to {
            Ty::F32 => u64::from(1f32.to_bits()),
            Ty::F16 => 0x3c00,
            Ty::Bf16 => 0x3f80,
            ty if !ty.is_float() => mask_of(ty.bytes()),
            _ => return Err(opcode.unsupported("this type of the result")),
        };
        let dst = self.dst(raw, self.operand(raw, 0)?)?;
        let (a, b) = (self.src(raw, self.operand(raw, 1)?)?, self.src(raw, self.operand(raw, 2)?)?);
        let with = match logic {
            None => None,
            Some(logic) => Some((logic, self.pred_src(raw, self.operand(raw, 3)?)?)),
        };
        Ok(Op::Set { test, a, b, with, dst, holds })
    }

    /// The comparison of an instruction, and the logic that combines it with a predicate.
    fn comparison(&self, opcode: &mut Opcode<'m>) -> Result<(alu::Comparison, Option<Logic>), PtxError> {
        let logic = opcode.take_map(|m| match m {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            "xor" => Some(Logic::Xor),
            _ => None,
        });
        let ftz = opcode.take("ftz");
        let ty = opcode.need_type()?;
        let operator = opcode.take_first().ok_or_else(|| opcode.unsupported("the comparison is missing"))?;
        let test = comparison(operator, ty, ftz).ok_or_else(|| opcode.unsupported("comparison of this type"))?;
        Ok((test, logic))
    }

    fn selp(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let mask = mask_of(opcode.need_type()?.bytes());
        let dst = self.dst(raw, self.operand(raw, 0)?)?;
        let (a, b) = (self.src(raw, self.operand(raw, 1)?)?, self.src(raw, self.operand(raw, 2)?)?);
        Ok(Op::Select { dst, a, b, by: self.pred_src(raw, self.operand(raw, 3)?)?, mask })
    }

    /// `slct`: `a` where the third operand is not negative.
    fn slct(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["ftz"]);
        let (ty, by) = (opcode.need_type()?, opcode.need_type()?);
        let mask = mask_of(ty.bytes());
        let f = match by {
            Ty::Signed(4) => alu::three(move |a, b, c| if c as i32 >= 0 { a & mask } else { b & mask }),
            Ty::F32 => alu::three(move |a, b, c| if f32::from_bits(c as u32) >= 0.0 { a & mask } else { b & mask }),
            _ => return Err(opcode.unsupported("this type of the selecting operand")),
        };
        self.alu(raw, f)
    }

    fn carry(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>, takes: bool) -> Result<Op, PtxError> {
        // `add.cc` came here without its modifier.
        let gives = opcode.take("cc") | !takes;
        let mode = opcode.take_map(|m| match m {
            "lo" => Some(IntegerMode::Low),
            "hi" => Some(IntegerMode::High),
            _ => None,
        });
        let ty = opcode.need_type()?;
        let op = match opcode.head {
            "add" | "addc" => "add",
            "sub" | "subc" => "sub",
            _ => "mad",
        };
        let dst = self.dst(raw, self.operand(raw, 0)?)?;
        let src = self.sources(raw, &raw.operands[1..])?;
        Ok(Op::Carry { op, ty, mode: mode.unwrap_or(IntegerMode::Low), takes, gives, dst, src })
    }
}
