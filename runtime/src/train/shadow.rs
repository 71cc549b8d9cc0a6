//! A shadow: a copy of another rank's state, kept current by applying the same updates.

use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena;
use phalanx_device::span::SpanMut;
use phalanx_device::{Device, Machine, Run};
use phalanx_strategies::compile::{CompileError, Compiled, compile_shadow};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::program::{Hyper, Role};

use crate::error::JobError;

/// A shadow of one shard.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) shard: Shard,
    /// The rank that it copies, which sends its gradients.
    pub(crate) of: u32,
    pub(crate) compiled: Compiled,
    pub(crate) machine: Box<dyn Machine>,
}

impl Shadow {
    /// An empty shadow of the rank that runs `step`, in shared memory from `first` on, where gradients arrive without a
    /// copy.
    pub(crate) fn new(
        device: &dyn Device,
        shard: Shard,
        of: u32,
        step: &Compiled,
        memory: &Arena,
        first: usize,
    ) -> Result<Shadow, CompileError> {
        let compiled = compile_shadow(step, device.target())?;
        let machine = device.shadow(&[&compiled], memory, first);
        Ok(Shadow { shard, of, compiled, machine })
    }

    /// Bytes of shared memory that a shadow of the rank that runs `step` takes.
    pub(crate) fn bytes(device: &dyn Device, step: &Compiled) -> Result<usize, CompileError> {
        Ok(device.shadow_bytes(&[&compile_shadow(step, device.target())?]))
    }

    /// The destinations of the gradients, in the order of their arrival.
    ///
    /// # Panics
    /// Never: gradients of a verified program do not overlap.
    pub(crate) fn gradients(&mut self) -> Vec<SpanMut<'_>> {
        let p = &self.compiled.program;
        let whole: Vec<_> = p.bound(Role::Gradient).map(|grad| (grad, 0..p.value(grad).n_elements())).collect();
        self.machine.spans_mut(&self.compiled, &whole).expect("gradients do not overlap")
    }

    /// Takes the scalars of an update from the rank that holds the shadow; they are the same on all ranks.
    fn take_scalars(&mut self, holder: &dyn Machine, step: &Compiled) {
        let c = &self.compiled;
        for role in [Role::Hyper, Role::ClipCoefficient] {
            let (to, from) = (c.program.bound(role).next(), step.program.bound(role).next());
            let (Some(to), Some(from)) = (to, from) else { continue };
            let scalars = &mut [0.0; Hyper::LEN][..step.program.value(from).n_elements()];
            holder.get(step, from, 0, bytemuck::cast_slice_mut(scalars));
            self.machine.write(c, to, 0, scalars);
        }
    }

    /// Updates the copy with the scalars that [`Shadow`] has read from its holder.
    fn update(&mut self, alone: &mut Groups) -> Result<(), JobError> {
        let c = &self.compiled;
        Ok(self.machine.run(c, c.phases.apply(), &mut Run::with(alone))?)
    }
}

/// Makes the update of a computed step: of a rank's own state, and of the shadows that it holds. A device that computes on its
/// own makes the rank's update meanwhile.
///
/// # Errors
/// See [`Machine::run`]; the state is lost.
pub(crate) fn update(
    machine: &mut dyn Machine,
    step: &Compiled,
    shadows: &mut [Shadow],
    with: &mut Run<'_>,
) -> Result<(), JobError> {
    // Reading waits for all earlier work of the device, which does not yet include the update.
    shadows.iter_mut().for_each(|shadow| shadow.take_scalars(machine, step));
    machine.run(step, step.phases.apply(), with)?;
    shadows.iter_mut().try_for_each(|shadow| shadow.update(with.groups))
}
