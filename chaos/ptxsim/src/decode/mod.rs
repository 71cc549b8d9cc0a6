//! From statements to a [`Program`]: names become numbers, opcodes become functions.

mod arithmetic;
mod asynchronous;
mod control;
mod data;
mod matrix;
mod names;
mod opcode;
mod warp;

use crate::error::PtxError;
use crate::program::{ALWAYS, GlobalVar, Initial, Instr, Op, Param, Pred, Program, Reg};
use crate::syntax::{Function, Module, Operand, RawInstr, Var};
use crate::types::{Space, Ty};
use names::{Names, Slot};
use opcode::Opcode;
use std::collections::BTreeMap;

/// Decodes a kernel and the functions that it calls.
pub(crate) fn decode(module: &Module, name: &str) -> Result<Program, PtxError> {
    let find = |f: &&Function| f.is_kernel && f.has_body && f.name == name;
    let kernel = module.functions.iter().find(find).ok_or_else(|| PtxError::NoSuchKernel {
        name: name.to_owned(),
        known: module.functions.iter().filter(|f| f.is_kernel).map(|f| f.name.clone()).collect(),
    })?;
    let mut decoder = Decoder::new(module, kernel);
    decoder.kernel_params(kernel);
    decoder.module_vars();
    decoder.function(kernel)?;
    while let Some(callee) = decoder.pending.pop() {
        decoder.function(callee)?;
    }
    decoder.link()
}

/// Where a variable lies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Shared(usize),
    DynamicShared,
    Global(usize),
    /// In the memory of each thread, where parameters of functions lie too.
    Local(usize),
    Param(usize),
}

/// Entry and parameter places of a function that was called or decoded.
struct Callee {
    /// First instruction, known once the body is decoded.
    entry: Option<u32>,
    params: Vec<usize>,
    returns: Vec<usize>,
}

pub(super) struct Decoder<'m> {
    module: &'m Module,
    program: Program,
    names: Names,
    function: &'m Function,
    module_vars: BTreeMap<&'m str, Place>,
    callees: BTreeMap<&'m str, Callee>,
    pending: Vec<&'m Function>,
    /// Calls to patch: the instruction, and the name of the function.
    calls: Vec<(usize, &'m str)>,
    /// Which function calls which.
    edges: Vec<(&'m str, &'m str)>,
    /// Branches to patch within the current function: the instruction and its labels.
    branches: Vec<(usize, usize, Vec<String>)>,
    initial: BTreeMap<Initial, Reg>,
    /// Register into which ignored results go.
    sink: Reg,
}

impl<'m> Decoder<'m> {
    fn new(module: &'m Module, kernel: &'m Function) -> Decoder<'m> {
        let mut program = Program {
            name: kernel.name.clone(),
            locs: module.locs.clone(),
            files: module.files.clone(),
            threads_max: kernel.threads_max,
            n_preds: 2,
            shared_align: 16,
            ..Program::default()
        };
        program.n_regs = 1;
        Decoder {
            module,
            program,
            names: Names::default(),
            function: kernel,
            module_vars: BTreeMap::new(),
            callees: BTreeMap::new(),
            pending: Vec::new(),
            calls: Vec::new(),
            edges: Vec::new(),
            branches: Vec::new(),
            initial: BTreeMap::new(),
            sink: 0,
        }
    }

    fn kernel_params(&mut self, kernel: &'m Function) {
        for var in &kernel.params {
            let offset = self.program.param_bytes.next_multiple_of(var.align);
            let bytes = var.bytes.unwrap_or(0);
            self.program.params.push(Param { offset, bytes });
            self.program.param_bytes = offset + bytes;
            self.module_vars.insert(&var.name, Place::Param(offset));
        }
    }

    fn module_vars(&mut self) {
        for var in &self.module.vars {
            let place = self.place(var);
            self.module_vars.insert(&var.name, place);
        }
    }

    /// Reserves the memory of a variable.
    fn place(&mut self, var: &Var) -> Place {
        let bytes = var.bytes.unwrap_or(0);
        match var.space {
            Space::Shared if var.bytes.is_none() => {
                self.program.shared_align = self.program.shared_align.max(var.align);
                Place::DynamicShared
            }
            Space::Shared => {
                let at = self.program.shared_static_bytes.next_multiple_of(var.align);
                self.program.shared_static_bytes = at + bytes;
                self.program.shared_names.push((at, at + bytes, var.name.clone()));
                Place::Shared(at)
            }
            Space::Global | Space::Const | Space::Generic => {
                self.program.globals.push(GlobalVar { name: var.name.clone(), bytes, init: var.init.clone() });
                Place::Global(self.program.globals.len() - 1)
            }
            Space::Local | Space::Param => {
                let at = self.program.local_bytes.next_multiple_of(var.align);
                self.program.local_bytes = at + bytes;
                Place::Local(at)
            }
        }
    }

    /// Decodes the body of a function and appends it to the program.
    fn function(&mut self, function: &'m Function) -> Result<(), PtxError> {
        let entry = self.program.instrs.len();
        self.function = function;
        self.names = Names::new(function);
        self.branches.clear();
        if !function.is_kernel {
            let places = self.declare_callee(function);
            let callee = self.callees.get_mut(function.name.as_str()).expect("declared above");
            callee.entry = Some(entry as u32);
            for (var, at) in function.params.iter().chain(&function.returns).zip(places) {
                self.names.vars.insert((0, var.name.clone()), Place::Local(at));
            }
        }
        for decl in &function.regs {
            let names = match decl.count {
                None => vec![decl.name.clone()],
                Some(n) => (0..n).map(|k| format!("{}{k}", decl.name)).collect(),
            };
            for name in names {
                let slot =
                    if decl.ty == Ty::Pred { Slot::Pred(self.new_pred()) } else { Slot::Reg(self.new_reg(), decl.ty) };
                self.names.slots.insert((decl.scope, name), slot);
            }
        }
        for var in &function.vars {
            let place = self.place(var);
            self.names.vars.insert((var.scope, var.name.clone()), place);
        }
        for raw in &function.body {
            self.instruction(raw)?;
        }
        // A body that ends without `ret` returns.
        self.names.end(self.program.instrs.len() as u32);
        self.push(Op::Return, ALWAYS, function.body.last().map_or(function.line, |i| i.line), 0, "ret");
        self.patch_branches()
    }

    /// Reserves the parameters of a function at its first mention; returns the places of parameters, then of results.
    fn declare_callee(&mut self, function: &'m Function) -> Vec<usize> {
        if !self.callees.contains_key(function.name.as_str()) {
            let mut local = |vars: &[Var]| -> Vec<usize> {
                let places = vars.iter().map(|var| match self.place(var) {
                    Place::Local(at) => at,
                    _ => 0,
                });
                places.collect()
            };
            let (params, returns) = (local(&function.params), local(&function.returns));
            self.callees.insert(&function.name, Callee { entry: None, params, returns });
        }
        let callee = &self.callees[function.name.as_str()];
        callee.params.iter().chain(&callee.returns).copied().collect()
    }

    fn patch_branches(&mut self) -> Result<(), PtxError> {
        for (at, scope, labels) in std::mem::take(&mut self.branches) {
            let line = self.program.instrs[at].line;
            let find = |name: &String| {
                let target = self.names.label(scope, name);
                target.map(|t| self.names.starts[t]).ok_or_else(|| PtxError::Undeclared { line, name: name.clone() })
            };
            let found = labels.iter().map(find).collect::<Result<Vec<u32>, PtxError>>()?;
            match &mut self.program.instrs[at].op {
                Op::Branch { target } => *target = found[0],
                Op::BranchIndexed { targets, .. } => *targets = found,
                _ => {}
            }
        }
        Ok(())
    }

    /// Resolves calls and rejects recursion.
    fn link(mut self) -> Result<Program, PtxError> {
        for (at, name) in &self.calls {
            let entry = self.callees.get(name).and_then(|c| c.entry);
            let line = self.program.instrs[*at].line;
            let entry = entry.ok_or_else(|| PtxError::Undeclared { line, name: (*name).to_owned() })?;
            self.program.instrs[*at].op = Op::Call { target: entry };
        }
        // Memory and registers of functions are static, so that no function may be active twice.
        let mut remaining = std::mem::take(&mut self.edges);
        loop {
            let before = remaining.len();
            let callers: Vec<&str> = remaining.iter().map(|(caller, _)| *caller).collect();
            remaining.retain(|(_, callee)| callers.contains(callee));
            if remaining.is_empty() {
                break;
            }
            if remaining.len() == before {
                return Err(PtxError::Recursive { name: remaining[0].1.to_owned() });
            }
        }
        self.program.initial = self.initial.into_iter().map(|(value, reg)| (reg, value)).collect();
        Ok(self.program)
    }

    fn instruction(&mut self, raw: &'m RawInstr) -> Result<(), PtxError> {
        self.names.starts.push(self.program.instrs.len() as u32);
        let guard = match &raw.guard {
            None => ALWAYS,
            Some((name, negated)) => Pred { index: self.pred(raw, name)?, negated: *negated },
        };
        let mut opcode = Opcode::new(raw);
        let op = self.decode_op(raw, &mut opcode)?;
        opcode.finish()?;
        self.push(op, guard, raw.line, raw.loc, &raw.opcode);
        Ok(())
    }

    fn decode_op(&mut self, raw: &'m RawInstr, opcode: &mut Opcode<'m>) -> Result<Op, PtxError> {
        match opcode.head {
            "ld" | "ldu" | "st" | "atom" | "red" | "cvta" | "isspacep" | "prefetch" | "prefetchu" | "applypriority"
            | "discard" => self.data(raw, opcode),
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "brkpt" | "nanosleep" | "membar" | "fence" | "bar"
            | "barrier" | "griddepcontrol" | "setmaxnreg" | "pmevent" => self.control(raw, opcode),
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => self.warp_wide(raw, opcode),
            "mma" | "ldmatrix" | "stmatrix" | "wgmma" => self.matrix(raw, opcode),
            "cp" | "mbarrier" => self.asynchronous(raw, opcode),
            _ => self.arithmetic(raw, opcode),
        }
    }

    fn push(&mut self, op: Op, guard: Pred, line: u32, loc: u32, text: &str) {
        self.program.instrs.push(Instr { guard, op, line, loc });
        self.program.text.push(text.to_owned());
    }

    fn new_reg(&mut self) -> Reg {
        self.program.n_regs += 1;
        self.program.n_regs as Reg - 1
    }

    fn new_pred(&mut self) -> u32 {
        self.program.n_preds += 1;
        self.program.n_preds as u32 - 1
    }

    /// The register that holds a value from the start.
    fn constant(&mut self, value: Initial) -> Reg {
        if let Some(reg) = self.initial.get(&value) {
            return *reg;
        }
        let reg = self.new_reg();
        self.initial.insert(value, reg);
        reg
    }

    fn bits(&mut self, bits: u64) -> Reg {
        self.constant(Initial::Bits(bits))
    }

    /// A source operand.
    fn src(&mut self, raw: &RawInstr, operand: &Operand) -> Result<Reg, PtxError> {
        match operand {
            Operand::Literal(bits) => Ok(self.bits(*bits)),
            Operand::Name(name) => match self.names.slot(raw.scope, name) {
                Some(Slot::Reg(reg, _)) => Ok(reg),
                Some(Slot::Pred(_)) => Err(self.unsupported(raw, "a predicate where a register belongs")),
                None => match names::special(name) {
                    Some(special) => Ok(self.constant(special)),
                    None => self.symbol(raw, name, 0),
                },
            },
            Operand::Address { base: Some(name), offset, .. } => self.symbol(raw, name, *offset),
            _ => Err(self.unsupported(raw, "this form of a source operand")),
        }
    }

    /// The address of a variable in its own space.
    fn symbol(&mut self, raw: &RawInstr, name: &str, offset: i64) -> Result<Reg, PtxError> {
        let undeclared = || PtxError::Undeclared { line: raw.line, name: name.to_owned() };
        let (initial, _) = self.variable(raw, name, offset).ok_or_else(undeclared)?;
        Ok(self.constant(initial))
    }

    /// The address of a variable, and the space where accesses to it go.
    fn variable(&self, raw: &RawInstr, name: &str, offset: i64) -> Option<(Initial, Space)> {
        let place = self.names.var(raw.scope, name).or_else(|| self.module_vars.get(name).copied())?;
        let at = |base: usize| Initial::Bits((base as i64 + offset) as u64);
        Some(match place {
            Place::Shared(base) => (at(base), Space::Shared),
            Place::DynamicShared => (Initial::DynamicShared(offset), Space::Shared),
            Place::Global(index) => (Initial::Global(index, offset), Space::Global),
            Place::Local(base) => (at(base), Space::Local),
            Place::Param(base) => (at(base), Space::Param),
        })
    }

    fn sources<const N: usize>(&mut self, raw: &RawInstr, operands: &[Operand]) -> Result<[Reg; N], PtxError> {
        let mut regs = [self.sink; N];
        for (reg, operand) in regs.iter_mut().zip(operands) {
            *reg = self.src(raw, operand)?;
        }
        Ok(regs)
    }

    /// A destination register; `_` is one that nothing reads.
    fn dst(&mut self, raw: &RawInstr, operand: &Operand) -> Result<Reg, PtxError> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(self.sink),
            Operand::Name(name) => match self.names.slot(raw.scope, name) {
                Some(Slot::Reg(reg, _)) => Ok(reg),
                _ => Err(PtxError::Undeclared { line: raw.line, name: name.clone() }),
            },
            _ => Err(self.unsupported(raw, "this form of a destination")),
        }
    }

    fn pred(&self, raw: &RawInstr, name: &str) -> Result<u32, PtxError> {
        match self.names.slot(raw.scope, name) {
            Some(Slot::Pred(pred)) => Ok(pred),
            _ if name == "_" => Ok(crate::program::SINK),
            _ => Err(PtxError::Undeclared { line: raw.line, name: name.to_owned() }),
        }
    }

    /// A predicate as a source: a name, its negation, or a constant.
    fn pred_src(&self, raw: &RawInstr, operand: &Operand) -> Result<Pred, PtxError> {
        Ok(match operand {
            Operand::Name(name) if name == "%pt" => ALWAYS,
            Operand::Name(name) => Pred { index: self.pred(raw, name)?, negated: false },
            Operand::Not(name) => Pred { index: self.pred(raw, name)?, negated: true },
            Operand::Literal(bits) => Pred { negated: *bits == 0, ..ALWAYS },
            _ => return Err(self.unsupported(raw, "this form of a predicate")),
        })
    }

    /// Operand `index`, or an error that names the instruction.
    fn operand(&self, raw: &'m RawInstr, index: usize) -> Result<&'m Operand, PtxError> {
        raw.operands.get(index).ok_or_else(|| self.unsupported(raw, &format!("operand {index} is missing")))
    }

    fn unsupported(&self, raw: &RawInstr, reason: &str) -> PtxError {
        PtxError::Unsupported { line: raw.line, instruction: raw.opcode.clone(), reason: reason.to_owned() }
    }
}
