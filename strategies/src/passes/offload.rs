//! Offload: moves state out of device memory that a step touches seldom and in order.
//!
//! The state of the optimizer is read and written once a step, where it lies. The weights of a frozen reference are read once a
//! microbatch, by products that read them many times over, or by collectives, so each block of layers copies them to the device before it uses
//! them.
//!
//! Source: Ren et al. 2021, ZeRO-Offload, §4 (arXiv:2101.06840). The pass only assigns the region; a machine provides it:
//! host memory for a GPU, a memory-mapped file for a CPU.

use super::reference::is_copy;
use crate::program::{Kind, Op, Program, Site, ValueId, op};
use std::collections::{BTreeMap, BTreeSet};

/// What lies outside device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// The state of the optimizer.
    pub optimizer: bool,
    /// The weights of a frozen reference, where they are a copy of the model's.
    pub reference: bool,
}

/// Moves it to [`super::memory::Region::Offloaded`].
pub fn offload(program: &mut Program, what: Offload) {
    if what.optimizer {
        let state = program.values.iter_mut().filter(|v| v.kind == Kind::OptimizerState);
        state.for_each(|v| v.kind = Kind::OffloadedState);
    }
    if what.reference {
        let copies = program.params.iter().filter(|param| param.parts.iter().any(|part| is_copy(&part.name)));
        let copies = copies.map(|param| param.value).collect();
        stage(program, copies);
    }
}

/// Offloads these weights, and lets their readers read a copy on the device, which lives as long as one block of a microbatch.
fn stage(program: &mut Program, weights: BTreeSet<ValueId>) {
    weights.iter().for_each(|weight| program.values[weight.0 as usize].kind = Kind::OffloadedState);
    let mut staged: BTreeMap<ValueId, (Site, ValueId)> = BTreeMap::new();
    for mut instr in std::mem::take(&mut program.instrs) {
        for read in &mut instr.reads {
            // Packed weights are also read by views of their halves.
            let weight = *read;
            let home = if let Kind::View(of) = program.value(weight).kind { of } else { weight };
            if !weights.contains(&home) {
                continue;
            }
            let found = staged.get(&weight).filter(|(site, _)| *site == instr.site).map(|(_, copy)| *copy);
            *read = found.unwrap_or_else(|| {
                let value = program.value(weight).clone();
                let copy = program.add_value(value.name, &value.shape, value.dtype, Kind::Activation);
                program.push(Op::Cast(op::Cast), vec![weight], vec![copy], instr.site);
                staged.insert(weight, (instr.site, copy));
                copy
            });
        }
        program.instrs.push(instr);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::memory::{Region, memory};
    use crate::passes::reference::reference;
    use crate::passes::reference::tests::two_passes;
    use crate::program::{DType, Instr, Phase};
    use crate::target::Nowhere;

    #[test]
    fn only_optimizer_state_leaves_the_device() {
        let mut program = Program::default();
        let p = program.add_value("p", &[100], DType::F32, Kind::Parameter);
        let m = program.add_value("m", &[100], DType::F32, Kind::OptimizerState);
        let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
        program.push(Op::Add(op::Add), vec![p, m], vec![m], site);

        offload(&mut program, Offload { optimizer: true, reference: true });
        let layout = memory(&program, &Nowhere::default());

        assert_eq!(layout.bytes(Region::OptimizerState), 0);
        assert!(layout.bytes(Region::Offloaded) >= 400 && layout.bytes(Region::Parameters) >= 400);
    }

    #[test]
    fn reference_is_copied_to_the_device_once_for_each_block_of_a_microbatch() {
        let mut program = two_passes();
        reference(&mut program);
        let again: Vec<Instr> = program.instrs.iter().filter(|i| i.site.phase == Phase::Reference).cloned().collect();
        for (instr, microbatch) in again.iter().flat_map(|instr| [(instr, 0), (instr, 1)]) {
            let site = Site { microbatch, ..instr.site };
            program.instrs.push(Instr { site, ..instr.clone() });
        }
        let copies: Vec<ValueId> =
            program.params.iter().filter(|p| is_copy(&p.parts[0].name)).map(|p| p.value).collect();

        offload(&mut program, Offload { optimizer: false, reference: true });

        assert!(copies.iter().all(|copy| program.value(*copy).kind == Kind::OffloadedState));
        assert!(memory(&program, &Nowhere::default()).bytes(Region::Offloaded) > 0);
        let (casts, others): (Vec<&Instr>, Vec<&Instr>) =
            program.instrs.iter().partition(|instr| copies.contains(&instr.reads[0]));
        assert!(casts.iter().all(|instr| matches!(instr.op, Op::Cast(_))));
        assert!(others.iter().all(|instr| !instr.reads.iter().any(|read| copies.contains(read))));
        let mut of_sites: Vec<(ValueId, u32)> = casts.iter().map(|i| (i.reads[0], i.site.microbatch)).collect();
        of_sites.dedup();
        assert!(casts.len() >= 2 * copies.len() && of_sites.len() == casts.len(), "{of_sites:?}");
    }
}
