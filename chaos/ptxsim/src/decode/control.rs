//! Branches, calls, barriers and fences.

use super::Decoder;
use super::opcode::Opcode;
use crate::error::PtxError;
use crate::program::{ALWAYS, Access, Address, Barrier, BarrierReduction, Op, Strength};
use crate::syntax::{Function, Operand, RawInstr};
use crate::types::Space;

impl<'m> Decoder<'m> {
    pub(super) fn control(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        opcode.ignore(&["uni"]);
        Ok(match opcode.head {
            "bra" => {
                let Operand::Name(label) = self.operand(raw, 0)? else {
                    return Err(opcode.unsupported("the target must be a label"));
                };
                self.branches.push((self.program.instrs.len(), raw.scope, vec![label.clone()]));
                Op::Branch { target: 0 }
            }
            "brx" => {
                opcode.take("idx");
                let Operand::Name(list) = self.operand(raw, 1)? else {
                    return Err(opcode.unsupported("the targets must be a label"));
                };
                let undeclared = || PtxError::Undeclared { line: raw.line, name: list.clone() };
                let labels = self.names.list(raw.scope, list).ok_or_else(undeclared)?;
                self.branches.push((self.program.instrs.len(), raw.scope, labels));
                Op::BranchIndexed { targets: Vec::new(), index: self.src(raw, self.operand(raw, 0)?)? }
            }
            "call" => self.call(raw)?,
            "ret" => Op::Return,
            "exit" => Op::Exit,
            "trap" => Op::Trap,
            "bar" | "barrier" => self.barrier(raw, opcode)?,
            "membar" => {
                let block_only = opcode.take("cta");
                opcode.ignore(&["gl", "sys"]);
                Op::Fence { releases: !block_only }
            }
            "fence" => self.fence(opcode)?,
            "nanosleep" => {
                opcode.take_type();
                Op::Yield
            }
            // No effect on results.
            "griddepcontrol" | "setmaxnreg" | "pmevent" | "brkpt" => {
                opcode.ignore(&["launch_dependents", "wait", "inc", "dec", "sync", "aligned", "u32", "mask"]);
                Op::Nop
            }
            _ => return Err(opcode.unsupported("unknown")),
        })
    }

    fn fence(&self, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        if opcode.take("proxy") {
            opcode.ignore(&["async", "global", "alias", "async::generic", "acquire", "release", "tensormap::generic"]);
            opcode.ignore(&["shared::cta", "shared::cluster", "async.global", "cta", "gpu", "sys", "cluster"]);
            opcode.ignore(&["sync_restrict::shared::cta", "sync_restrict::shared::cluster"]);
            return Ok(Op::ProxyFence);
        }
        let block_only = opcode.take("cta");
        // Orders the initialisation of an mbarrier, which the interpreter does not delay.
        opcode.ignore(&["sc", "acq_rel", "acquire", "release", "gpu", "sys", "cluster", "mbarrier_init"]);
        Ok(Op::Fence { releases: !block_only })
    }

    /// A call becomes stores into the parameters of the function, a jump, and loads from its results.
    fn call(&mut self, raw: &'m RawInstr) -> Result<Op, PtxError> {
        let name_at = raw.operands.iter().position(|o| matches!(o, Operand::Name(_)));
        let name_at = name_at.ok_or_else(|| self.unsupported(raw, "the name of a function is missing"))?;
        let Operand::Name(name) = &raw.operands[name_at] else { unreachable!("the position was just found") };
        let module = self.module;
        let known: Option<&'m Function> =
            module.functions.iter().find(|f| f.has_body && !f.is_kernel && f.name == *name);
        let Some(function) = known else {
            return Err(self.unsupported(raw, &format!("function `{name}` has no body in this module")));
        };
        if !self.callees.contains_key(function.name.as_str()) {
            self.pending.push(function);
        }
        let places = self.declare_callee(function);
        let list = |at: Option<usize>| match at.and_then(|at| raw.operands.get(at)) {
            Some(Operand::List(list)) => list.as_slice(),
            _ => &[],
        };
        let (results, arguments) = (list(name_at.checked_sub(1)), list(Some(name_at + 1)));
        let (params, returns) = places.split_at(function.params.len());
        for ((argument, to), var) in arguments.iter().zip(params).zip(&function.params) {
            let from =
                self.local_place(raw, argument).ok_or_else(|| self.unsupported(raw, "this form of an argument"))?;
            self.copy_local(raw, from, *to, var.bytes.unwrap_or(0));
        }
        self.calls.push((self.program.instrs.len(), &function.name));
        self.edges.push((self.function.name.as_str(), &function.name));
        if results.is_empty() {
            return Ok(Op::Call { target: 0 });
        }
        self.push(Op::Call { target: 0 }, ALWAYS, raw.line, raw.loc, &raw.opcode);
        for ((result, from), var) in results.iter().zip(returns).zip(&function.returns) {
            let to = self.local_place(raw, result).ok_or_else(|| self.unsupported(raw, "this form of a result"))?;
            self.copy_local(raw, *from, to, var.bytes.unwrap_or(0));
        }
        Ok(Op::Nop)
    }

    fn copy_local(&mut self, raw: &RawInstr, from: usize, to: usize, bytes: usize) {
        let base = self.initial(0);
        let mut done = 0;
        while done < bytes {
            let n = [8, 4, 2, 1]
                .into_iter()
                .find(|n| done + n <= bytes && (from + done).is_multiple_of(*n) && (to + done).is_multiple_of(*n));
            let n = n.expect("one byte always fits");
            let reg = self.new_reg();
            let access = |at: usize| Access {
                space: Space::Local,
                address: Address { base, offset: (at + done) as i64 },
                bytes: n,
                extend_to: None,
                regs: vec![reg],
                strength: Strength::Weak,
            };
            self.push(Op::Load(access(from)), ALWAYS, raw.line, raw.loc, &raw.opcode);
            self.push(Op::Store(access(to)), ALWAYS, raw.line, raw.loc, &raw.opcode);
            done += n;
        }
    }

    fn barrier(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        if opcode.take("warp") {
            opcode.ignore(&["sync"]);
            return Ok(Op::WarpBarrier { mask: self.src(raw, self.operand(raw, 0)?)? });
        }
        if opcode.take("cluster") {
            return Err(opcode.unsupported("clusters of blocks"));
        }
        opcode.ignore(&["cta"]);
        let aligned = opcode.take("aligned") | (opcode.head == "bar");
        let arrive_only = opcode.take("arrive");
        let is_reduction = opcode.take("red");
        opcode.ignore(&["sync"]);
        let reduction = opcode.take_map(|m| match m {
            "popc" => Some(BarrierReduction::PopCount),
            "and" => Some(BarrierReduction::And),
            "or" => Some(BarrierReduction::Or),
            _ => None,
        });
        opcode.take_type();
        if !is_reduction {
            let id = self.src(raw, self.operand(raw, 0)?)?;
            let threads = raw.operands.get(1).map(|o| self.src(raw, o)).transpose()?;
            return Ok(Op::Barrier(Barrier {
                id,
                threads,
                arrive_only,
                aligned,
                reduction: None,
                dst: None,
                dst_pred: None,
            }));
        }
        let reduction = reduction.ok_or_else(|| opcode.unsupported("the reduction is missing"))?;
        let id = self.src(raw, self.operand(raw, 1)?)?;
        let threads = if raw.operands.len() > 3 { Some(self.src(raw, &raw.operands[2])?) } else { None };
        let source = raw.operands.last().ok_or_else(|| opcode.unsupported("operands are missing"))?;
        let reduction = Some((reduction, self.pred_src(raw, source)?));
        let (mut dst, mut dst_pred) = (None, None);
        match (reduction, self.operand(raw, 0)?) {
            (Some((BarrierReduction::PopCount, _)), operand) => dst = Some(self.dst(raw, operand)?),
            (_, Operand::Name(name)) => dst_pred = Some(self.pred(raw, name)?),
            _ => return Err(opcode.unsupported("this form of the result")),
        }
        Ok(Op::Barrier(Barrier { id, threads, arrive_only, aligned, reduction, dst, dst_pred }))
    }
}
