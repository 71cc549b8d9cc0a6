//! Offload: state of the optimizer leaves the memory of the device. It is touched once a step, in order, and is the
//! largest thing that is.
//!
//! Source: Ren et al. 2021, ZeRO-Offload, §4 (arXiv:2101.06840). Here the pass only says where the state lies; a machine
//! provides the region: host memory behind a GPU, a memory-mapped file behind a CPU.

use crate::program::{Kind, Program};

/// Moves all state of the optimizer to [`super::memory::Region::Offloaded`].
pub fn offload(program: &mut Program) {
    let state = program.values.iter_mut().filter(|v| v.kind == Kind::OptimizerState);
    state.for_each(|v| v.kind = Kind::OffloadedState);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::memory::{Region, memory};
    use crate::program::{DType, Op, Phase, Site};
    use crate::target::Nowhere;

    #[test]
    fn state_leaves_the_device_and_nothing_else_does() {
        let mut program = Program::default();
        let p = program.add_value("p", &[100], DType::F32, Kind::Parameter);
        let m = program.add_value("m", &[100], DType::F32, Kind::OptimizerState);
        let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
        program.push(Op::Add, vec![p, m], vec![m], site);

        offload(&mut program);
        let layout = memory(&program, &Nowhere::default());

        assert_eq!(layout.bytes(Region::OptimizerState), 0);
        assert!(layout.bytes(Region::Offloaded) >= 400 && layout.bytes(Region::Parameters) >= 400);
    }
}
