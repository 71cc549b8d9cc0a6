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

    /// `[x, dy] -> [dx]`.
    pub(super) fn activation_backward(&mut self, f: ActivationFn) {
        let (x, dy, dx) = (self.reads[0], self.reads[1], self.writes[0]);
        assert_eq!(x.dtype, dx.dtype, "a gradient has the element type of its value");
        let kernel = |name| Instance::of(ACTIVATION, name).with("X", type_name(x.dtype)).with("Y", type_name(dy.dtype));
        let args = Args::new().ptr(x).ptr(dy).ptr(dx);
        match f {
            ActivationFn::SwiGlu => {
                let n_vectors = dy.len() / width_of(dy.cols);
                self.launch_strided(kernel("swiglu_backward"), n_vectors, args.int(dy.cols).int(n_vectors));
            }
            ActivationFn::GeluTanh => self.launch_vectors(kernel("gelu_backward"), dy.len(), args.long(dy.len())),
        }
    }
}
