//! Normalisations.

use super::operands::{Kernel, Operands, copy, f32s, heads_of, with_element};
use crate::kernels::{Heads, elementwise, head_norm, layer_norm, qk_norm, rms_norm};
use phalanx_device::float::Float;
use phalanx_strategies::program::{NormKind, QkColumns, QkNorm, op};

impl Kernel for op::Norm {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Norm { kind, eps } = self;
            with_element!(o.writes[0].dtype, T => o.norm::<T>(*kind, *eps));
        }
    }
}

impl Kernel for op::NormBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::NormBackward { kind, residual_x, residual_params, again, narrow } = self;
            let n_stats = if *kind == NormKind::Rms { 1 } else { 2 };
            let dy = o.reads[2 + n_stats];
            with_element!(dy.dtype, T => o.norm_backward::<T>(*kind, *residual_x, *residual_params, *again));
            if *narrow {
                let (dx, narrow) = (o.writes[0], o.writes[o.writes.len() - 1]);
                with_element!(dx.dtype, X => with_element!(narrow.dtype, Y => {
                    elementwise::cast::<X, Y>(dx.slice(), narrow.slice_mut());
                }));
            }
        }
    }
}

impl Kernel for op::HeadNorm {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::HeadNorm { heads, eps } = self;
            with_element!(o.reads[0].dtype, T => o.head_norm::<T>(heads_of(heads), *eps));
        }
    }
}

impl Kernel for op::HeadNormBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::HeadNormBackward { heads, residual } = self;
            with_element!(o.reads[0].dtype, T => o.head_norm_backward::<T>(heads_of(heads), *residual));
        }
    }
}

impl Kernel for op::QkSquares {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::QkSquares(columns) = self;
            let (qkv, squares) = (o.reads[0], o.writes[0].slice_mut());
            with_element!(qkv.dtype, T => qk_norm::qk_squares::<T>(*columns, qkv.slice(), squares));
        }
    }
}

impl Kernel for op::QkSquaresBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::QkSquaresBackward { columns, residual } = self;
            with_element!(o.reads[0].dtype, T => o.qk_squares_backward::<T>(*columns, *residual));
        }
    }
}

impl Kernel for op::QkNorm {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.reads[0].dtype, T => o.qk_norm::<T>(*self));
        }
    }
}

impl Kernel for op::QkNormBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::QkNormBackward { norm, residual } = self;
            with_element!(o.reads[0].dtype, T => o.qk_norm_backward::<T>(*norm, *residual));
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn norm<Y: Float>(&mut self, kind: NormKind, eps: f32) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (x, gain) = (self.reads[0], self.reads[1].slice());
            let (y, rstd) = (self.writes[0].slice_mut::<Y>(), self.writes[1].slice_mut());
            with_element!(x.dtype, X => match kind {
                NormKind::Rms => rms_norm::rms_norm::<X, Y>(x.slice(), gain, eps, y, rstd),
                NormKind::Layer => {
                    let (bias, mean) = (self.reads[2].slice(), self.writes[2].slice_mut());
                    layer_norm::layer_norm::<X, Y>(x.slice(), gain, bias, eps, y, rstd, mean);
                }
            });
        }
    }

    unsafe fn norm_backward<Y: Float>(&mut self, kind: NormKind, residual_x: bool, residual_params: bool, again: bool) {
        // SAFETY: a result may be its carried operand, and `y` may be `dy`; neither is read after `copy`. Results overlap
        // neither each other nor `x`, the gain and the statistics, nor `dy` but for `y`, and then no slice of `dy` is made.
        unsafe {
            let n_stats = if kind == NormKind::Rms { 1 } else { 2 };
            let mut carried = self.reads[3 + n_stats..].iter();
            for (write, wanted) in self.writes.iter().zip([residual_x, residual_params, residual_params]) {
                if let Some(from) = carried.as_slice().first().filter(|_| wanted) {
                    copy(*from, *write);
                    carried.next();
                }
            }
            let (x, gain, rstd) = (self.reads[0], self.reads[1].slice(), self.reads[2].slice());
            let dy = self.reads[2 + n_stats];
            let (dx, dgain) = (self.writes[0], self.writes[1].slice_mut());
            let scratch = f32s(self.scratch);
            let (add_x, add) = (residual_x, residual_params);
            if again {
                copy(dy, self.writes[1 + n_stats]);
            }
            with_element!(x.dtype, X => match (kind, again) {
                (NormKind::Rms, false) => rms_norm::rms_norm_backward::<X, Y>(
                    x.slice(), gain, rstd, dy.slice(), dx.slice_mut(), add_x, dgain, add, scratch,
                ),
                (NormKind::Rms, true) => rms_norm::rms_norm_backward_again::<X, Y>(
                    x.slice(), gain, rstd, self.writes[2].slice_mut(), dx.slice_mut(), add_x, dgain, add, scratch,
                ),
                (NormKind::Layer, false) => {
                    let (mean, dbias) = (self.reads[3].slice(), self.writes[2].slice_mut());
                    layer_norm::layer_norm_backward::<X, Y>(
                        x.slice(), gain, rstd, mean, dy.slice(), dx.slice_mut(), add_x, dgain, dbias, add, scratch,
                    );
                }
                (NormKind::Layer, true) => {
                    let (mean, dbias) = (self.reads[3].slice(), self.writes[2].slice_mut());
                    let (bias, y) = (self.reads[self.reads.len() - 1].slice(), self.writes[3].slice_mut());
                    layer_norm::layer_norm_backward_again::<X, Y>(
                        x.slice(), gain, bias, rstd, mean, y, dx.slice_mut(), add_x, dgain, dbias, add, scratch,
                    );
                }
            });
        }
    }

    unsafe fn qk_squares_backward<T: Float>(&mut self, columns: QkColumns, residual: bool) {
        // SAFETY: `dqkv` may be the residual (operand 2), which is not read after `copy`; the others do not overlap it
        // and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            } else {
                self.writes[0].slice_mut::<T>().fill(T::ZERO);
            }
            let (qkv, dsquares, dqkv) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.writes[0].slice_mut());
            qk_norm::qk_squares_backward(columns, qkv, dsquares, dqkv);
        }
    }

    unsafe fn qk_norm<T: Float>(&mut self, norm: QkNorm) {
        // SAFETY: the result overlaps no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            qk_norm::qk_norm(norm, qkv, gain_q, gain_k, self.reads[3].slice(), self.writes[0].slice_mut::<T>());
        }
    }

    unsafe fn qk_norm_backward<T: Float>(&mut self, norm: QkNorm, residual: bool) {
        // SAFETY: results 2 and 3 may be operands 5 and 6, which are not read after `copy`; no others overlap.
        unsafe {
            if residual {
                copy(self.reads[5], self.writes[2]);
                copy(self.reads[6], self.writes[3]);
            }
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (squares, dy) = (self.reads[3].slice(), self.reads[4].slice::<T>());
            let (dqkv, dsquares) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            let (dgain_q, dgain_k) = (self.writes[2].slice_mut(), self.writes[3].slice_mut());
            let scratch = f32s(self.scratch);
            qk_norm::qk_norm_backward(
                norm, qkv, gain_q, gain_k, squares, dy, dqkv, dsquares, dgain_q, dgain_k, residual, scratch,
            );
        }
    }

    unsafe fn head_norm<T: Float>(&mut self, heads: Heads, eps: f32) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (y, rstd) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            head_norm::head_norm(heads, qkv, gain_q, gain_k, eps, y, rstd);
        }
    }

    unsafe fn head_norm_backward<T: Float>(&mut self, heads: Heads, residual: bool) {
        // SAFETY: results 1 and 2 may be operands 5 and 6, which are not read after `copy`; no others overlap.
        unsafe {
            if residual {
                copy(self.reads[5], self.writes[1]);
                copy(self.reads[6], self.writes[2]);
            }
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (rstd, dy) = (self.reads[3].slice(), self.reads[4].slice::<T>());
            let (dgain_q, dgain_k) = (self.writes[1].slice_mut(), self.writes[2].slice_mut());
            let dqkv = self.writes[0].slice_mut::<T>();
            let scratch = f32s(self.scratch);
            head_norm::head_norm_backward(
                heads, qkv, gain_q, gain_k, rstd, dy, dqkv, dgain_q, dgain_k, residual, scratch,
            );
        }
    }
}
