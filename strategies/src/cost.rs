//! Cost of an instruction and of a program: arithmetic and memory traffic, derived from shapes.

use crate::program::{Cost, Instr, Program};

/// Cost of one instruction.
pub fn instr_cost(program: &Program, instr: &Instr) -> Cost {
    instr.op.operation().cost(program, instr)
}

/// Cost of a whole program.
pub fn program_cost(program: &Program) -> Cost {
    program.instrs.iter().map(|i| instr_cost(program, i)).fold(Cost::default(), std::ops::Add::add)
}
