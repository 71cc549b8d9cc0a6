//! The gradient of one tensor on a tape, taken out and put back so that several can be used at once: dfdx gives access to
//! one at a time.

use dfdx::prelude::{Cpu, CpuError, Gradients, Shape, Tensor};

type Swap = dyn Fn(&mut Gradients<f32, Cpu>, &mut Vec<f32>) -> Result<(), CpuError>;

/// Access to a tensor's gradient; does not keep the tensor's values alive.
pub(super) struct GradSlot {
    swap: Box<Swap>,
}

impl GradSlot {
    pub(super) fn of<S: Shape>(tensor: &Tensor<S, f32, Cpu>) -> GradSlot {
        let ghost = tensor.ghost();
        let swap = move |grads: &mut Gradients<f32, Cpu>, other: &mut Vec<f32>| {
            std::mem::swap::<Vec<f32>>(grads.get_or_alloc_mut(&ghost)?, other);
            Ok(())
        };
        GradSlot { swap: Box::new(swap) }
    }

    /// Takes the gradient, zeros if there is none yet. It must be put back before another operation needs it.
    pub(super) fn take(&self, grads: &mut Gradients<f32, Cpu>) -> Result<Vec<f32>, CpuError> {
        let mut taken = Vec::new();
        (self.swap)(grads, &mut taken)?;
        Ok(taken)
    }

    pub(super) fn put(&self, grads: &mut Gradients<f32, Cpu>, mut gradient: Vec<f32>) -> Result<(), CpuError> {
        (self.swap)(grads, &mut gradient)
    }
}
