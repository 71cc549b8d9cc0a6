//! Operations element by element, and copies of columns and runs.

use super::operands::{Operands, copy, with_element};
use crate::kernels::{activation, elementwise, unpack};
use phalanx_device::float::Float;
use phalanx_strategies::program::{ActivationFn, Op, op};

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn of_elements(&mut self, op: &Op) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            match op {
                Op::Activation(op::Activation(f)) => with_element!(self.reads[0].dtype, T => self.activation::<T>(*f)),
                Op::ActivationBackward(op::ActivationBackward { function, again: false }) => {
                    with_element!(self.reads[0].dtype, T => self.activation_backward::<T>(*function));
                }
                Op::ActivationBackward(op::ActivationBackward { function, again: true }) => {
                    with_element!(self.reads[0].dtype, T => self.activation_backward_again::<T>(*function));
                }
                Op::Add(_) => with_element!(self.writes[0].dtype, T => self.add::<T>()),
                Op::Cast(_) => {
                    with_element!(self.reads[0].dtype, X => with_element!(self.writes[0].dtype, Y => {
                        elementwise::cast::<X, Y>(self.reads[0].slice(), self.writes[0].slice_mut());
                    }))
                }
                Op::Unpack(op::Unpack(packing)) => with_element!(self.writes[0].dtype, T => {
                    unpack::unpack::<T>(*packing, self.reads[0].slice(), self.writes[0].slice_mut());
                }),
                Op::SplitColumns(_) => self.split_columns(),
                Op::JoinColumns(_) => self.join_columns(),
                Op::Scale(op::Scale { factor }) => {
                    copy(self.reads[0], self.writes[0]);
                    with_element!(self.writes[0].dtype, T => {
                        elementwise::scale::<T>(self.writes[0].slice_mut(), *factor);
                    });
                }
                Op::Dropout(dropout) => {
                    copy(self.reads[0], self.writes[0]);
                    let keys = self.reads[1].slice();
                    with_element!(self.writes[0].dtype, T => {
                        elementwise::dropout::<T>(self.writes[0].slice_mut(), keys, dropout);
                    });
                }
                Op::AddBias(_) => with_element!(self.writes[0].dtype, T => self.add_bias::<T>()),
                Op::Slice(op::Slice { start }) => self.slice(*start),
                Op::Paste(op::Paste { start }) => self.paste(*start),
                _ => unreachable!("of another family"),
            }
        }
    }

    unsafe fn activation<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: the result does not overlap the operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (x, y) = (self.reads[0].slice::<X>(), self.writes[0]);
            with_element!(y.dtype, Y => match f {
                ActivationFn::SwiGlu => activation::swiglu::<X, Y>(x, y.cols, y.slice_mut()),
                ActivationFn::GeluTanh => activation::gelu::<X, Y>(x, y.slice_mut()),
            });
        }
    }

    unsafe fn activation_backward<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: `dx` may be `x` for SwiGLU only, and then no slice of `x` is made; `dy` overlaps neither.
        unsafe {
            let (x, dy, dx) = (self.reads[0], self.reads[1], self.writes[0]);
            with_element!(dy.dtype, Y => match f {
                ActivationFn::SwiGlu if x.is(&dx) => {
                    activation::swiglu_backward_in_place::<X, Y>(dx.slice_mut(), dy.slice(), dy.cols);
                }
                ActivationFn::SwiGlu => {
                    activation::swiglu_backward::<X, Y>(x.slice(), dy.slice(), dy.cols, dx.slice_mut());
                }
                ActivationFn::GeluTanh => activation::gelu_backward::<X, Y>(x.slice(), dy.slice(), dx.slice_mut()),
            });
        }
    }

    unsafe fn activation_backward_again<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: `dx` may be `x` and `y` may be `dy`, which are not read after `copy`; no others overlap.
        unsafe {
            let (dx, y) = (self.writes[0], self.writes[1]);
            copy(self.reads[0], dx);
            copy(self.reads[1], y);
            with_element!(y.dtype, Y => match f {
                ActivationFn::SwiGlu => {
                    activation::swiglu_backward_again::<X, Y>(dx.slice_mut(), y.slice_mut(), y.cols);
                }
                ActivationFn::GeluTanh => activation::gelu_backward_again::<X, Y>(dx.slice_mut(), y.slice_mut()),
            });
        }
    }

    unsafe fn add<Y: Float>(&mut self) {
        // SAFETY: `out` may be one or both of the operands, and then no slice of them is made.
        unsafe {
            let (a, b, out) = (self.reads[0], self.reads[1], self.writes[0]);
            // The sum overwrites an operand; the other operand may be the same value.
            let (there, other) = if b.is(&out) { (b, a) } else { (a, b) };
            if there.is(&out) && other.is(&out) {
                return out.slice_mut::<Y>().iter_mut().for_each(|y| *y = Y::from_f32(y.to_f32() + y.to_f32()));
            }
            if there.is(&out) {
                return with_element!(other.dtype, B => elementwise::add_assign::<Y, B>(out.slice_mut(), other.slice()));
            }
            with_element!(a.dtype, A => with_element!(b.dtype, B => {
                elementwise::add::<A, B, Y>(a.slice(), b.slice(), out.slice_mut());
            }));
        }
    }
}
