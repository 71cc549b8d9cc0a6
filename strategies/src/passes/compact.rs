//! Drops values and parameters that no instruction of this rank touches: those of other stages and leftovers of rewriting.

use crate::program::{Kind, Program, Role, ValueId};

/// Renumbers the remaining values in the same order.
pub fn compact(program: &mut Program) {
    let mut used = vec![false; program.values.len()];
    for instr in &program.instrs {
        instr.reads.iter().chain(&instr.writes).for_each(|v| used[v.0 as usize] = true);
    }
    for (i, value) in program.values.iter().enumerate() {
        if let Kind::View(of) = value.kind {
            used[of.0 as usize] |= used[i];
        }
    }
    program.bindings.retain(|b| used[b.value.0 as usize]);
    // An unused weight is still part of the model.
    program.params.iter().filter(|p| p.stages.is_empty()).for_each(|p| used[p.value.0 as usize] = true);
    let kept: Vec<bool> = program.params.iter().map(|p| used[p.value.0 as usize]).collect();
    for b in program.bindings.iter_mut().filter(|b| b.role == Role::GradSumSquares) {
        b.microbatch = kept[..b.microbatch as usize].iter().filter(|kept| **kept).count() as u32;
    }
    program.params.retain(|p| used[p.value.0 as usize]);
    let mut next = 0;
    let new: Vec<ValueId> = used
        .iter()
        .map(|used| {
            let id = ValueId(next);
            next += u32::from(*used);
            id
        })
        .collect();
    let mut keep = used.into_iter();
    program.values.retain(|_| keep.next().unwrap_or(false));
    for instr in &mut program.instrs {
        instr.reads.iter_mut().chain(&mut instr.writes).for_each(|v| *v = new[v.0 as usize]);
    }
    for value in &mut program.values {
        if let Kind::View(of) = &mut value.kind {
            *of = new[of.0 as usize];
        }
    }
    program.params.iter_mut().for_each(|p| p.value = new[p.value.0 as usize]);
    program.bindings.iter_mut().for_each(|b| b.value = new[b.value.0 as usize]);
}
