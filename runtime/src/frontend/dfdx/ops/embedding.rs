//! Rows of a table by token id, the start of a model's tape.

use super::super::grad_slot::GradSlot;
use super::{parameter, result};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Tape, Tensor};
use phalanx_cpu::kernels::embedding as kernel;

/// `y[t, :] = table[ids[t], :]`, recorded on `tape`.
///
/// # Shapes
/// `table: (V, C)`, `ids: [N]`, result `(N, C)`.
///
/// # Panics
/// If an id is not below `V`.
pub fn embedding<V: Dim, C: Dim, T: Tape<f32, Cpu>>(
    table: &Tensor<(V, C), f32, Cpu>,
    ids: &[i32],
    tape: T,
) -> Tensor<(usize, C), f32, Cpu, T> {
    let columns = table.shape().1;
    let c = columns.size();
    let (table_values, table, mut tape) = parameter(table, tape);
    let mut y = vec![0.0; ids.len() * c];
    kernel::embedding(ids, &table_values, c, &mut y, false);
    let y = result(y, (ids.len(), columns), &table);
    if T::OWNS_TAPE {
        let (table_slot, y_slot, ids) = (GradSlot::of(&table), GradSlot::of(&y), ids.to_vec());
        tape.add_backward_op(move |grads| {
            let (dy, mut dtable) = (y_slot.take(grads)?, table_slot.take(grads)?);
            kernel::embedding_backward(&ids, &dy, c, &mut dtable, true);
            table_slot.put(grads, dtable)?;
            y_slot.put(grads, dy)
        });
    }
    y.put_tape(tape)
}
