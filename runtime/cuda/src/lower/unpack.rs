//! Packed weights as numbers.

use super::elementwise::WIDTH;
use super::{Lowering, type_name};
use crate::command::Args;
use crate::kernels::{Instance, UNPACK};
use phalanx_strategies::program::Packing;

impl Lowering {
    /// `[words [R, W]] -> [w [R, C]]`.
    pub(super) fn unpack(&mut self, packing: Packing) {
        let (words, weights) = (self.reads[0], self.writes[0]);
        let (kernel, of_thread) = match packing {
            Packing::Bf16 => ("unpack_bf16", 2),
            Packing::E4m3 => ("unpack_e4m3", 4),
            Packing::Int8 => ("unpack_int8", WIDTH),
            Packing::Nf4 { .. } => ("unpack_nf4", WIDTH),
        };
        let kernel = Instance::of(UNPACK, kernel).with("Y", type_name(weights.dtype));
        let args = Args::new().ptr(words).ptr(weights).long(weights.len());
        self.launch_strided(kernel, weights.len() / of_thread, args);
    }
}
