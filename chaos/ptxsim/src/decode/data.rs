//! Loads, stores, atomic instructions and conversions of addresses.

use super::names::Slot;
use super::opcode::Opcode;
use super::{Decoder, Place};
use crate::error::PtxError;
use crate::program::{Access, Address, Atom, AtomOp, Initial, Op, Strength};
use crate::syntax::{Operand, RawInstr};
use crate::types::{Space, Ty};

/// Modifiers that concern caches only.
const CACHE: [&str; 19] = [
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1",
    "L2",
    "evict_last",
    "evict_first",
    "evict_normal",
    "level",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "unified",
    "mmio",
];

impl<'m> Decoder<'m> {
    pub(super) fn data(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&CACHE);
        opcode.ignore_prefix("L1::");
        opcode.ignore_prefix("L2::");
        match opcode.head {
            "ld" | "ldu" => self.load(raw, opcode),
            "st" => self.store(raw, opcode),
            "atom" | "red" => self.atom(raw, opcode),
            "cvta" => {
                let to_space = opcode.take("to");
                let space = opcode.take_space().unwrap_or(Space::Generic);
                opcode.need_type()?;
                let (dst, src) = (self.dst(raw, self.operand(raw, 0)?)?, self.src(raw, self.operand(raw, 1)?)?);
                Ok(Op::ConvertAddress { dst, src, space, to_space })
            }
            "isspacep" => {
                let space = opcode.take_space().ok_or_else(|| opcode.unsupported("the space is missing"))?;
                let Operand::Name(dst) = self.operand(raw, 0)? else {
                    return Err(opcode.unsupported("the destination must be a predicate"));
                };
                Ok(Op::IsSpace { dst: self.pred(raw, dst)?, src: self.src(raw, self.operand(raw, 1)?)?, space })
            }
            // Hints.
            _ => {
                opcode.ignore(&["global", "local", "tensormap", "param", "const"]);
                opcode.ignore_prefix("L1");
                opcode.ignore_prefix("L2");
                opcode.ignore(&["evict_last", "evict_normal", "b32"]);
                Ok(Op::Nop)
            }
        }
    }

    fn load(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let strength = if opcode.take("nc") { Some(Strength::NonCoherent) } else { None };
        let strength = strength.unwrap_or(self.strength(opcode));
        let (space, vector, ty) = self.shape(opcode)?;
        let (address, space) = self.address(raw, self.operand(raw, 1)?, space)?;
        let regs = self.vector(raw, self.operand(raw, 0)?, vector, false)?;
        // A narrow signed value fills the wider register that receives it.
        let register = match self.operand(raw, 0)? {
            Operand::List(list) => list.first(),
            other => Some(other),
        };
        let extend_to = match register {
            Some(Operand::Name(name)) if ty.is_signed() => match self.names.slot(raw.scope, name) {
                Some(Slot::Reg(_, reg)) if reg.bytes() > ty.bytes() => Some(reg.bytes()),
                _ => None,
            },
            _ => None,
        };
        Ok(Op::Load(Access { space, address, bytes: ty.bytes(), extend_to, regs, strength }))
    }

    fn store(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        let strength = self.strength(opcode);
        if opcode.take("async") {
            return Err(opcode.unsupported("stores to other blocks of a cluster"));
        }
        let (space, vector, ty) = self.shape(opcode)?;
        let (address, space) = self.address(raw, self.operand(raw, 0)?, space)?;
        let regs = self.vector(raw, self.operand(raw, 1)?, vector, true)?;
        Ok(Op::Store(Access { space, address, bytes: ty.bytes(), extend_to: None, regs, strength }))
    }

    fn strength(&self, opcode: &mut Opcode<'m>) -> Strength {
        opcode.ignore(&["weak", "cta", "cluster", "gpu", "sys"]);
        if opcode.take("acquire") {
            Strength::Acquire
        } else if opcode.take("release") {
            Strength::Release
        } else if opcode.take("volatile") | opcode.take("relaxed") {
            Strength::Strong
        } else {
            Strength::Weak
        }
    }

    fn shape(&self, opcode: &mut Opcode<'m>) -> Result<(Space, usize, Ty), PtxError> {
        let space = opcode.take_space().unwrap_or(Space::Generic);
        let vector = opcode.take_map(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        Ok((space, vector.unwrap_or(1), opcode.need_type()?))
    }

    fn vector(
        &mut self,
        raw: &'m RawInstr,
        operand: &'m Operand,
        n: usize,
        source: bool,
    ) -> Result<Vec<u32>, PtxError> {
        let list = match operand {
            Operand::List(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        if list.len() != n {
            return Err(self.unsupported(raw, "as many registers as the vector has elements"));
        }
        list.iter().map(|o| if source { self.src(raw, o) } else { self.dst(raw, o) }).collect()
    }

    /// An address operand. A parameter of a function lies in the memory of its thread.
    pub(super) fn address(
        &mut self,
        raw: &RawInstr,
        operand: &Operand,
        space: Space,
    ) -> Result<(Address, Space), PtxError> {
        let Operand::Address { base, offset, .. } = operand else {
            return Err(self.unsupported(raw, "an address in brackets is missing"));
        };
        let Some(name) = base else {
            return Ok((Address { base: self.bits(0), offset: *offset }, space));
        };
        match self.names.slot(raw.scope, name) {
            Some(Slot::Reg(base, _)) => Ok((Address { base, offset: *offset }, space)),
            Some(Slot::Pred(_)) => Err(self.unsupported(raw, "a predicate as an address")),
            None => {
                let undeclared = || PtxError::Undeclared { line: raw.line, name: name.clone() };
                let (initial, own) = self.variable(raw, name, 0).ok_or_else(undeclared)?;
                let space = if space == Space::Param { own } else { space };
                Ok((Address { base: self.constant(initial), offset: *offset }, space))
            }
        }
    }

    fn atom(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["cta", "cluster", "gpu", "sys", "relaxed", "noftz"]);
        let acq_rel = opcode.take("acq_rel");
        // Every atomic instruction acquires here what was published at its address.
        opcode.ignore(&["acquire"]);
        let release = opcode.take("release") | acq_rel;
        let space = opcode.take_space().unwrap_or(Space::Generic);
        let vector = opcode.take_map(|m| match m {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        let op = opcode.take_map(|m| {
            Some(match m {
                "add" => AtomOp::Add,
                "min" => AtomOp::Min,
                "max" => AtomOp::Max,
                "and" => AtomOp::And,
                "or" => AtomOp::Or,
                "xor" => AtomOp::Xor,
                "exch" => AtomOp::Exchange,
                "cas" => AtomOp::CompareAndSwap,
                "inc" => AtomOp::Increment,
                "dec" => AtomOp::Decrement,
                _ => return None,
            })
        });
        let op = op.ok_or_else(|| opcode.unsupported("the operation is missing or unknown"))?;
        let ty = opcode.need_type()?;
        let returns = opcode.head == "atom";
        let first = usize::from(returns);
        let (address, space) = self.address(raw, self.operand(raw, first)?, space)?;
        let n = vector.unwrap_or(1);
        let src = self.vector(raw, self.operand(raw, first + 1)?, n, true)?;
        let dst = match returns {
            true => self.vector(raw, self.operand(raw, 0)?, n, false)?.into_iter().map(Some).collect(),
            false => vec![None; n],
        };
        let new = match op {
            AtomOp::CompareAndSwap => self.src(raw, self.operand(raw, first + 2)?)?,
            _ => self.sink,
        };
        Ok(Op::Atom(Atom { op, ty, space, address, dst, src, new, release }))
    }

    /// Copies arguments into parameters: the places of a call's own variables.
    pub(super) fn local_place(&self, raw: &RawInstr, operand: &Operand) -> Option<usize> {
        let Operand::Name(name) = operand else { return None };
        match self.names.var(raw.scope, name)? {
            Place::Local(at) => Some(at),
            _ => None,
        }
    }

    /// The register of a constant, for operands that are made up.
    pub(super) fn initial(&mut self, value: u64) -> u32 {
        self.constant(Initial::Bits(value))
    }
}
