//! What is known of a GPU before it is used.

/// What the driver tells of a GPU without a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its product name.
    pub name: String,
    /// Its name in `CUDA_VISIBLE_DEVICES`, the same in every process; none for a part of a GPU (MIG).
    pub uuid: Option<String>,
    /// Its address on the PCI bus, as the kernel writes it.
    pub pci_address: String,
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Its compute capability.
    pub capability: (i32, i32),
    pub(crate) n_multiprocessors: u32,
    /// Its highest clock rate.
    pub(crate) clock_khz: u32,
}

impl GpuInfo {
    /// Dense products that it can do at its highest clock rate, with f32 sums, in FLOP/s.
    pub(crate) fn peak_flops(&self, bf16: bool) -> f64 {
        // FLOP of one multiprocessor in a cycle: tensor cores from NVIDIA's architecture papers; two for each FP32 core.
        let per_cycle = match (self.capability, bf16) {
            ((8, 0), true) => 2048.0,
            ((8, _), true) => 1024.0,
            ((9, _), true) => 4096.0,
            (_, true) => 8192.0,
            ((8, 0), false) => 128.0,
            (_, false) => 256.0,
        };
        per_cycle * f64::from(self.n_multiprocessors) * f64::from(self.clock_khz) * 1e3
    }
}
