//! A copy of another rank's state, kept up to date by the same updates.

use phalanx_cpu::{CpuMachine, scratch_bytes};
use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena;
use phalanx_strategies::compile::{CompileError, Compiled, compile_shadow};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::passes::shadow::coefficient;
use phalanx_strategies::program::{Role, ValueId};

use crate::error::JobError;

/// What a rank holds for another one.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) shard: Shard,
    /// The rank that it stands for, whose gradients it gets.
    pub(crate) of: u32,
    pub(crate) compiled: Compiled,
    pub(crate) machine: CpuMachine,
}

impl Shadow {
    /// A shadow of the rank that runs `step`, with nothing in it, in shared memory from `first` on: gradients come there
    /// without a copy.
    pub(crate) fn new(
        shard: Shard,
        of: u32,
        step: &Compiled,
        memory: &Arena,
        first: usize,
    ) -> Result<Shadow, CompileError> {
        let compiled = compile_shadow(step, scratch_bytes)?;
        let machine = CpuMachine::within(&[&compiled], memory, first);
        Ok(Shadow { shard, of, compiled, machine })
    }

    /// Bytes of shared memory that a shadow of the rank that runs `step` takes.
    pub(crate) fn bytes(step: &Compiled) -> Result<usize, CompileError> {
        Ok(CpuMachine::bytes_within(&[&compile_shadow(step, scratch_bytes)?]))
    }

    /// Where the gradients go, in the order in which they come.
    pub(crate) fn gradients(&mut self) -> Vec<&mut [f32]> {
        let values: Vec<ValueId> = self.compiled.program.bound(Role::Gradient).collect();
        self.machine.write_all(&self.compiled, &values)
    }

    /// Makes the update, with the scalars of the rank that holds it: they are the same on all.
    pub(crate) fn update(&mut self, holder: &CpuMachine, step: &Compiled, alone: &mut Groups) -> Result<(), JobError> {
        let c = &self.compiled;
        let scalars = [
            (c.program.bound(Role::Hyper).next(), step.program.bound(Role::Hyper).next()),
            (c.program.bound(Role::ClipCoefficient).next(), coefficient(&step.program, &step.turn)),
        ];
        for (to, from) in scalars {
            let (Some(to), Some(from)) = (to, from) else { continue };
            self.machine.write::<f64>(c, to).copy_from_slice(holder.read::<f64>(step, from));
        }
        Ok(self.machine.run_part(c, c.turn.update(), &mut [], alone)?)
    }
}
