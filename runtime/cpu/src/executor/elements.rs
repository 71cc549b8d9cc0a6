//! Operations element by element, and copies of columns and runs.

use super::operands::{Kernel, Operands, copy, with_element};
use crate::kernels::{activation, elementwise, unpack};
use phalanx_device::float::Float;
use phalanx_strategies::program::{ActivationFn, op};

impl Kernel for op::Activation {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Activation(f) = self;
            with_element!(o.reads[0].dtype, T => o.activation::<T>(*f));
        }
    }
}

impl Kernel for op::ActivationBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::ActivationBackward { function, again } = self;
            match again {
                false => with_element!(o.reads[0].dtype, T => o.activation_backward::<T>(*function)),
                true => with_element!(o.reads[0].dtype, T => o.activation_backward_again::<T>(*function)),
            }
        }
    }
}

impl Kernel for op::Add {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.writes[0].dtype, T => o.add::<T>());
        }
    }
}

impl Kernel for op::Cast {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            // Of any bits, such as those of packed weights.
            if o.reads[0].dtype == o.writes[0].dtype {
                return copy(o.reads[0], o.writes[0]);
            }
            with_element!(o.reads[0].dtype, X => with_element!(o.writes[0].dtype, Y => {
                elementwise::cast::<X, Y>(o.reads[0].slice(), o.writes[0].slice_mut());
            }));
        }
    }
}

impl Kernel for op::Unpack {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Unpack(packing) = self;
            with_element!(o.writes[0].dtype, T => {
                unpack::unpack::<T>(*packing, o.reads[0].slice(), o.writes[0].slice_mut());
            });
        }
    }
}

impl Kernel for op::SplitColumns {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            o.split_columns();
        }
    }
}

impl Kernel for op::JoinColumns {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            o.join_columns();
        }
    }
}

impl Kernel for op::Scale {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Scale { factor } = self;
            copy(o.reads[0], o.writes[0]);
            with_element!(o.writes[0].dtype, T => {
                elementwise::scale::<T>(o.writes[0].slice_mut(), *factor);
            });
        }
    }
}

impl Kernel for op::Dropout {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            copy(o.reads[0], o.writes[0]);
            let keys = o.reads[1].slice();
            with_element!(o.writes[0].dtype, T => {
                elementwise::dropout::<T>(o.writes[0].slice_mut(), keys, self);
            });
        }
    }
}

impl Kernel for op::AddBias {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.writes[0].dtype, T => o.add_bias::<T>());
        }
    }
}

impl Kernel for op::Slice {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Slice { start } = self;
            o.slice(*start);
        }
    }
}

impl Kernel for op::Paste {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Paste { start } = self;
            o.paste(*start);
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
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
