//! Offload: moves optimizer state out of device memory. A step touches this state once, in order, and it is the largest
//! such data.
//!
//! Source: Ren et al. 2021, ZeRO-Offload, §4 (arXiv:2101.06840). The pass only assigns the region; a machine provides it:
//! host memory for a GPU, a memory-mapped file for a CPU.

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
    use crate::program::op;
    use crate::program::{DType, Op, Phase, Site};
    use crate::target::Nowhere;

    #[test]
    fn only_optimizer_state_leaves_the_device() {
        let mut program = Program::default();
        let p = program.add_value("p", &[100], DType::F32, Kind::Parameter);
        let m = program.add_value("m", &[100], DType::F32, Kind::OptimizerState);
        let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
        program.push(Op::Add(op::Add), vec![p, m], vec![m], site);

        offload(&mut program);
        let layout = memory(&program, &Nowhere::default());

        assert_eq!(layout.bytes(Region::OptimizerState), 0);
        assert!(layout.bytes(Region::Offloaded) >= 400 && layout.bytes(Region::Parameters) >= 400);
    }
}
