//! How long an instruction may take on a GPU, from its shapes: an upper estimate, for the watch on hung GPUs.

use crate::gpu_info::GpuInfo;
use phalanx_strategies::cost::instr_cost;
use phalanx_strategies::program::{Cost, DType, Instr, Program};
use std::time::Duration;

/// The share of its highest rate that a GPU surely reaches: in products of large matrices, in attention, and in reading memory.
const PRODUCTS: f64 = 0.25;
const ATTENTION: f64 = 0.1;
const MEMORY: f64 = 0.25;

/// The rate of memory where the driver does not tell it: that of the slowest cards.
const MEMORY_BYTES_PER_S: u64 = 200_000_000_000;

/// Rates that a GPU surely reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// FLOP/s of products in full and in half width.
    products: [f64; 2],
    /// FLOP/s of attention, alike.
    attention: [f64; 2],
    bytes_per_s: f64,
}

impl Rates {
    /// The rates of a GPU.
    pub(crate) fn of(gpu: &GpuInfo) -> Rates {
        let peaks = [false, true].map(|bf16| gpu.peak_flops(bf16).max(1.0));
        Rates {
            products: peaks.map(|peak| peak * PRODUCTS),
            attention: peaks.map(|peak| peak * ATTENTION),
            bytes_per_s: gpu.memory_bytes_per_s.unwrap_or(MEMORY_BYTES_PER_S) as f64 * MEMORY,
        }
    }

    /// Time that an instruction may take.
    pub(crate) fn time_of(&self, program: &Program, instr: &Instr) -> Duration {
        let Cost { matmul_flops, attention_flops, streamed_bytes, rounded_bytes } = instr_cost(program, instr);
        let is_half = instr.reads.first().is_some_and(|v| matches!(program.value(*v).dtype, DType::Bf16 | DType::F16));
        let width = usize::from(is_half);
        let seconds = matmul_flops / self.products[width]
            + attention_flops / self.attention[width]
            + (streamed_bytes + rounded_bytes) / self.bytes_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}
