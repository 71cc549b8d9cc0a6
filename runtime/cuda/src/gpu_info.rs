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
    /// Most bytes of shared memory that a block may have.
    pub(crate) shared_bytes_max: usize,
    /// The rate at which it reads its memory at most; none if the driver does not tell.
    pub(crate) memory_bytes_per_s: Option<u64>,
}

impl GpuInfo {
    /// Dense products that it can do at its highest clock rate, with f32 sums, in FLOP/s.
    pub(crate) fn peak_flops(&self, bf16: bool) -> f64 {
        // FLOP of one multiprocessor in a cycle: tensor cores from NVIDIA's architecture papers; two for each FP32 core. GeForce
        // cards run half-width products with f32 sums at half the rate of the same chip in other cards.
        let of_small_chips = if self.name.contains("GeForce") { 512.0 } else { 1024.0 };
        let per_cycle = match (self.capability, bf16) {
            ((8, 0), true) => 2048.0,
            ((8 | 12, _), true) => of_small_chips,
            ((9, _), true) => 4096.0,
            (_, true) => 8192.0,
            ((8, 0), false) => 128.0,
            (_, false) => 256.0,
        };
        per_cycle * f64::from(self.n_multiprocessors) * f64::from(self.clock_khz) * 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Dense bf16 with f32 sums, from NVIDIA's data sheets, within the difference between boost clocks.
    #[test]
    fn peak_of_a_card_is_that_of_its_data_sheet() {
        let cards = [
            ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1_410_000, 312e12),
            ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2_520_000, 165e12),
            ("NVIDIA L40S", (8, 9), 142, 2_520_000, 362e12),
            ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1_830_000, 989e12),
            ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2_407_000, 209e12),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 2_617_000, 504e12),
        ];

        for (name, capability, n_multiprocessors, clock_khz, expected) in cards {
            let (uuid, memory_bytes_per_s) = (None, None);
            let (name, pci_address) = (name.to_owned(), String::new());
            let gpu = GpuInfo {
                name,
                uuid,
                pci_address,
                memory_bytes: 0,
                capability,
                n_multiprocessors,
                clock_khz,
                shared_bytes_max: 0,
                memory_bytes_per_s,
            };
            let peak = gpu.peak_flops(true);
            assert!((peak / expected - 1.0).abs() < 0.03, "{}: {peak:e}", gpu.name);
        }
    }
}
