//! `y = x Wᵀ + b` with our matrix products.

use super::super::grad_slot::GradSlot;
use super::{parameter, result, values};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Tape, Tensor};
use phalanx_cpu::kernels::reduce::{column_sum, column_sum_scratch_len};
use phalanx_cpu::matmul::{Compute, Epilogue, Mat, MatMut, Slice, SliceMut, Storage, matmul, scratch_bytes};

/// `y = x Wᵀ + b`; the weight is stored `[out, in]` as in dfdx's `Linear` and in model files.
///
/// # Shapes
/// `x: (N, I)`, `weight: (O, I)`, `bias: (O,)`, result `(N, O)`.
///
/// # Panics
/// If the shapes do not fit.
pub fn linear<N: Dim, I: Dim, O: Dim, T: Tape<f32, Cpu>>(
    x: Tensor<(N, I), f32, Cpu, T>,
    weight: &Tensor<(O, I), f32, Cpu>,
    bias: Option<&Tensor<(O,), f32, Cpu>>,
) -> Tensor<(N, O), f32, Cpu, T> {
    assert_eq!(x.shape().1.size(), weight.shape().1.size(), "columns of x and of the weight");
    let (n_out, n_in) = (weight.shape().0, weight.shape().1.size());
    let (x_values, x, tape) = values(x);
    let (w_values, weight, mut tape) = parameter(weight, tape);
    let n = x.shape().0;
    let (rows, cols) = (n.size(), n_out.size());
    let mut bias_slot = None;
    let mut bias_values = None;
    if let Some(bias) = bias {
        let (b_values, bias, merged) = parameter(bias, tape);
        (bias_slot, bias_values, tape) = (Some(GradSlot::of(&bias)), Some(b_values), merged);
    }
    let mut y = vec![0.0; rows * cols];
    let epilogue = Epilogue { bias: bias_values.as_deref(), ..Epilogue::default() };
    product((rows, cols, n_in), mat(&x_values, n_in), mat(&w_values, n_in).t(), &mut y, epilogue);
    let y = result(y, (n, n_out), &x);
    if T::OWNS_TAPE {
        let (x_slot, w_slot, y_slot) = (GradSlot::of(&x), GradSlot::of(&weight), GradSlot::of(&y));
        tape.add_backward_op(move |grads| {
            let dy = y_slot.take(grads)?;
            let add = Epilogue { accumulate: true, ..Epilogue::default() };
            let mut dw = w_slot.take(grads)?;
            product((cols, n_in, rows), mat(&dy, cols).t(), mat(&x_values, n_in), &mut dw, add);
            w_slot.put(grads, dw)?;
            let mut dx = x_slot.take(grads)?;
            product((rows, n_in, cols), mat(&dy, cols), mat(&w_values, n_in), &mut dx, add);
            x_slot.put(grads, dx)?;
            if let Some(slot) = bias_slot {
                let (mut db, mut scratch) = (slot.take(grads)?, vec![0.0; column_sum_scratch_len(cols)]);
                column_sum(&dy, cols, 0, &mut db, true, &mut scratch);
                slot.put(grads, db)?;
            }
            y_slot.put(grads, dy)
        });
    }
    y.put_tape(tape)
}

fn mat(values: &[f32], columns: usize) -> Mat<'_> {
    Mat::new(Slice::F32(values), columns)
}

fn product((m, n, k): (usize, usize, usize), a: Mat<'_>, b: Mat<'_>, c: &mut [f32], epilogue: Epilogue<'_>) {
    let mut scratch = vec![0; scratch_bytes(Compute::F32, m, n, k, Storage::F32)];
    matmul(Compute::F32, m, n, k, a, b, MatMut { data: SliceMut::F32(c), ld: n }, epilogue, &mut scratch);
}
