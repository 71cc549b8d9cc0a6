//! SwiGLU and GELU, and their adjoints.

use super::elementwise::width_of;
use super::{Lowering, type_name};
use crate::command::Args;
use crate::kernels::{ACTIVATION, Instance};
use phalanx_strategies::program::ActivationFn;

impl Lowering {
    /// `[x] -> [y]`.
    pub(super) fn activation(&mut self, f: ActivationFn) {
        let (x, y) = (self.reads[0], self.writes[0]);
        let kernel = |name| Instance::of(ACTIVATION, name).with("X", type_name(x.dtype)).with("Y", type_name(y.dtype));
        let args = Args::new().ptr(x).ptr(y);
        match f {
            ActivationFn::SwiGlu => {
                let n_vectors = y.len() / width_of(y.cols);
                self.launch_strided(kernel("swiglu"), n_vectors, args.int(y.cols).int(n_vectors));
            }
            ActivationFn::GeluTanh => self.launch_vectors(kernel("gelu"), y.len(), args.long(y.len())),
        }
    }

    /// `[x, dy] -> [dx, (y)]`.
    pub(super) fn activation_backward(&mut self, f: ActivationFn, again: bool) {
        let (x, dy, dx) = (self.reads[0], self.reads[1], self.writes[0]);
        let y = again.then(|| self.writes[1]);
        assert_eq!(x.dtype, dx.dtype, "a gradient has the element type of its value");
        let kernel = |name| Instance::of(ACTIVATION, name).with("X", type_name(x.dtype)).with("Y", type_name(dy.dtype));
        let args = Args::new().ptr(x).ptr(dy).ptr(dx);
        let args = if let Some(y) = y { args.ptr(y) } else { args };
        match f {
            ActivationFn::SwiGlu => {
                let n_vectors = dy.len() / width_of(dy.cols);
                let name = if again { "swiglu_backward_again" } else { "swiglu_backward" };
                self.launch_strided(kernel(name), n_vectors, args.int(dy.cols).int(n_vectors));
            }
            ActivationFn::GeluTanh => {
                let name = if again { "gelu_backward_again" } else { "gelu_backward" };
                self.launch_vectors(kernel(name), dy.len(), args.long(dy.len()));
            }
        }
    }
}
