//! The gated unit of feed-forward layers. Source: Shazeer 2020 (arXiv:2002.05202).

use super::super::grad_slot::GradSlot;
use super::{result, values};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Tape, Tensor};
use phalanx_cpu::kernels::activation;
use phalanx_cpu::kernels::elementwise::add_assign;

/// `y = silu(gate) * up`, `silu(x) = x sigmoid(x)`. Gate and up are one matrix, gate first, so that one product can
/// compute both; `width` is the width of each, as a number or as `Const`.
///
/// # Shapes
/// `gate_up: (N, P)` with `P = 2 F`, result `(N, F)`.
///
/// # Panics
/// If `gate_up` does not have twice `width` columns.
pub fn swiglu<N: Dim, P: Dim, F: Dim, T: Tape<f32, Cpu>>(
    gate_up: Tensor<(N, P), f32, Cpu, T>,
    width: F,
) -> Tensor<(N, F), f32, Cpu, T> {
    let n = gate_up.shape().0;
    assert_eq!(gate_up.shape().1.size(), 2 * width.size(), "columns of gate and up");
    let (x_values, x, mut tape) = values(gate_up);
    let mut y = vec![0.0; n.size() * width.size()];
    activation::swiglu(&x_values, width.size(), &mut y);
    let y = result(y, (n, width), &x);
    if T::OWNS_TAPE {
        let (x_slot, y_slot) = (GradSlot::of(&x), GradSlot::of(&y));
        let mut x_values = x_values;
        tape.add_backward_op(move |grads| {
            let (dy, mut dx) = (y_slot.take(grads)?, x_slot.take(grads)?);
            activation::swiglu_backward_in_place(&mut x_values, &dy, width.size());
            add_assign(&mut dx, &x_values);
            x_slot.put(grads, dx)?;
            y_slot.put(grads, dy)
        });
    }
    y.put_tape(tape)
}
