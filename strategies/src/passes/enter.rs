//! Erases [`Op::Enter`], which has an effect only on differentiation.

use crate::program::{Op, Program, ValueId};

/// Replaces every entered value by the value itself.
pub fn erase(program: &mut Program) {
    let mut stands_for: Vec<ValueId> = (0..program.values.len() as u32).map(ValueId).collect();
    let instrs = std::mem::take(&mut program.instrs);
    for mut instr in instrs {
        instr.reads.iter_mut().for_each(|v| *v = stands_for[v.0 as usize]);
        if let Op::Enter(_) = instr.op {
            stands_for[instr.writes[0].0 as usize] = instr.reads[0];
        } else {
            program.instrs.push(instr);
        }
    }
}
