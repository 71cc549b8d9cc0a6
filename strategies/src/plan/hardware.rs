//! Descriptions of machines. Peaks come from data sheets; the fraction that kernels reach is a separate figure, so that
//! both can be checked.

use crate::program::Compute;
use crate::world::Mover;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A cluster of identical nodes with identical devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Name on the command line.
    pub name: String,
    /// Matrix products of f32 operands.
    pub matmul_f32: Rate,
    /// Matrix products of bf16 operands.
    pub matmul_bf16: Rate,
    /// Speed of products in FP8 over those in bf16; 1 where they are computed in bf16.
    #[serde(default = "in_bf16")]
    pub fp8_speedup: f64,
    /// Fraction of the peak of matrix products that fused attention reaches.
    pub attention_fraction: f64,
    /// Memory of a device, bytes.
    pub memory_bytes: u64,
    /// Memory bandwidth at its peak, bytes per second, reads and writes together.
    pub memory_bytes_per_s: f64,
    /// Fraction of the memory bandwidth that streaming kernels reach.
    pub memory_fraction: f64,
    /// From the start of one kernel to the earliest start of the next, seconds.
    pub launch_s: f64,
    /// Memory of a device that its driver and libraries take for each process, bytes.
    #[serde(default)]
    pub context_bytes: u64,
    /// Channels of NCCL between two devices of a node; 0 if they exchange tensors otherwise.
    #[serde(default)]
    pub channels: u32,
    /// Devices of a node.
    pub devices_per_node: u32,
    /// Between devices of a node.
    pub intra_node: Link,
    /// Between nodes.
    pub inter_node: Link,
    /// Before a collective moves its first byte, seconds.
    pub collective_start_s: f64,
    /// Measured rates of kernels and of collectives within a node, by name, per second: bytes touched, operations for
    /// attention, bytes of whole tensors for collectives. Others use the figures above.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measured: BTreeMap<String, f64>,
    /// What moves the data of collectives.
    #[serde(default)]
    pub mover: Mover,
}

/// Speed of matrix products: a product of `f` operations takes `f / (peak * fraction) + fill`. Small products do not fill
/// a device: a product of `fill * peak * fraction` operations reaches half of the speed of a large one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Peak, operations per second.
    pub peak_flops: f64,
    /// Fraction of it that a large product reaches.
    pub fraction: f64,
    /// First loads, last partial wave and epilogue of a product, seconds.
    pub fill_s: f64,
}

/// A device's connection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bandwidth of one device in one direction at its peak, bytes per second.
    pub bytes_per_s: f64,
    /// Fraction of it that collectives reach.
    pub fraction: f64,
    /// From a device to the next, seconds.
    pub hop_s: f64,
}

impl Rate {
    /// Seconds of a product of `flops` operations.
    pub fn seconds(&self, flops: f64) -> f64 {
        if flops <= 0.0 { 0.0 } else { flops / self.best() + self.fill_s }
    }

    /// Operations per second of an infinitely large product.
    pub fn best(&self) -> f64 {
        self.peak_flops * self.fraction
    }
}

impl Link {
    /// Bytes per second that collectives reach.
    pub fn best(&self) -> f64 {
        self.bytes_per_s * self.fraction
    }
}

const GB: f64 = 1e9;
const TERA: f64 = 1e12;

// "80-90%" of the peak for optimised products, on A100 and on H100 alike: Dao 2023, FlashAttention-2, §1
// (arXiv:2307.08691), and Shah et al. 2024, FlashAttention-3, §1 (arXiv:2407.08608). The lower end, because of power.
const PRODUCTS: f64 = 0.8;
// Forward and backward together. A100: up to 225 of 312 TFLOP/s in training a GPT (FlashAttention-2, abstract), its
// kernels 50 to 73 %. H100: 740 TFLOP/s forward, 75 %, backward less (FlashAttention-3, abstract and §4.1).
const ATTENTION: f64 = 0.6;
// Measured in steps of 1 and 8 billion parameters on an H100 and an H200 (runtime/BENCHMARKS.md): products run at 650 to 860 of 989
// TFLOP/s, 750 on average, because of power; attention, forward and backward together, at 331 with heads of 64 and 405 with 128.
const HOPPER_PRODUCTS: f64 = 0.76;
const HOPPER_ATTENTION: f64 = 0.37;
// Products of the size of a step of 8 billion parameters on an H100 (runtime/BENCHMARKS.md): 1,288 to 1,489 TFLOP/s, in bf16 672 to 791.
const HOPPER_FP8: f64 = 1.9;
// Share of the peak that copies reach on HBM; Deakin et al. 2018, BabelStream, finds 80 to 90 % on server GPUs.
const STREAMS: f64 = 0.85;
// A launch costs a few microseconds of the host: Zhang et al. 2019, "A study of single and multi-device synchronization
// methods in NVIDIA GPUs" (arXiv:2004.05371), measures launch overheads of this order.
const LAUNCH_S: f64 = 4e-6;
// NCCL's own tuning table (nccl/src/graph/tuning.cc, release 2.19): 6.6 us to start a ring, then 1.9 us per step over
// NVLink, 2.5 us over PCIe and 4.0 us over the network (the rows of its middle protocol, LL128).
const NCCL_START_S: f64 = 6.6e-6;
const NVLINK_HOP_S: f64 = 1.9e-6;
const PCIE_HOP_S: f64 = 2.5e-6;
const NETWORK_HOP_S: f64 = 4e-6;
// Bus bandwidth, as nccl-tests defines it (doc/PERFORMANCE.md), over link bandwidth for large messages on NVSwitch
// nodes. An assumption within the range of published runs, not a measurement of ours.
const COLLECTIVES: f64 = 0.8;
/// Bytes of a GPU's memory that the context and the libraries of a process take.
// Besides what PyTorch allocates, an H100 has 1.06 GB in use before the first operation of NCCL (NVIDIA/nccl, issue 1685): context,
// kernels and libraries. Contexts alone are 0.3 to 0.6 GB (pytorch/pytorch, issues 20532, 28394 and 109888; LMCache/LMCache, 4019).
pub const CONTEXT_BYTES: u64 = 1_060_000_000;
// Pairs of H100 in an NVSwitch node have 32 channels (NVIDIA/nccl, issue 1685). Without NVLink NCCL opens two for each link; four are
// assumed.
const NVLINK_CHANNELS: u32 = 32;
const PCIE_CHANNELS: u32 = 4;

/// An invalid description.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HardwareError {
    /// A figure is not positive.
    #[error("hardware `{name}`: `{field}` is {found}, expected more than 0")]
    NotPositive {
        /// Name of the description.
        name: String,
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: f64,
    },
    /// A fraction of a peak is above 1.
    #[error("hardware `{name}`: `{field}` is {found}, expected a fraction of at most 1")]
    AboveOne {
        /// Name of the description.
        name: String,
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: f64,
    },
}

impl Hardware {
    /// Checks a description that a user wrote.
    ///
    /// # Errors If a figure is not positive, or a fraction above 1.
    pub fn validate(self) -> Result<Hardware, HardwareError> {
        let fractions = [
            ("matmul_f32.fraction", self.matmul_f32.fraction),
            ("matmul_bf16.fraction", self.matmul_bf16.fraction),
            ("attention_fraction", self.attention_fraction),
            ("memory_fraction", self.memory_fraction),
            ("intra_node.fraction", self.intra_node.fraction),
            ("inter_node.fraction", self.inter_node.fraction),
        ];
        let figures = [
            ("matmul_f32.peak_flops", self.matmul_f32.peak_flops),
            ("matmul_bf16.peak_flops", self.matmul_bf16.peak_flops),
            ("memory_bytes", self.memory_bytes as f64),
            ("memory_bytes_per_s", self.memory_bytes_per_s),
            ("devices_per_node", f64::from(self.devices_per_node)),
            ("intra_node.bytes_per_s", self.intra_node.bytes_per_s),
            ("inter_node.bytes_per_s", self.inter_node.bytes_per_s),
        ];
        let name = || self.name.clone();
        // Written so that NaN fails.
        let positive = |found: f64| found > 0.0;
        if let Some((field, found)) = fractions.iter().chain(&figures).find(|(_, found)| !positive(*found)) {
            return Err(HardwareError::NotPositive { name: name(), field, found: *found });
        }
        match fractions.iter().find(|(_, found)| *found > 1.0) {
            Some((field, found)) => Err(HardwareError::AboveOne { name: name(), field, found: *found }),
            None => Ok(self),
        }
    }

    /// The names that [`Hardware::named`] accepts.
    pub const NAMES: [&str; 7] = ["a100-80g", "h100", "h200", "b200", "l40s", "4090", "cpu"];

    /// A shipped description.
    pub fn named(name: &str) -> Option<Hardware> {
        match name {
            "a100-80g" | "a100" => Some(a100_80g()),
            "h100" => Some(h100()),
            "h200" => Some(h200()),
            "b200" => Some(b200()),
            "l40s" => Some(l40s()),
            "4090" | "rtx4090" => Some(rtx_4090()),
            "cpu" => Some(cpu()),
            _ => None,
        }
    }

    /// Speed of products of a precision.
    pub fn matmul(&self, compute: Compute) -> Rate {
        match compute {
            Compute::F32 => self.matmul_f32,
            Compute::Bf16 => self.matmul_bf16,
            Compute::Fp8 => {
                let peak_flops = self.fp8_speedup * self.matmul_bf16.peak_flops;
                Rate { peak_flops, ..self.matmul_bf16 }
            }
        }
    }

    /// Bytes per second that a streaming kernel reaches.
    pub fn streaming(&self, kernel: &str) -> f64 {
        self.measured.get(kernel).copied().unwrap_or(self.memory_bytes_per_s * self.memory_fraction)
    }

    /// Bytes per second that no streaming kernel exceeds.
    pub fn fastest_stream(&self) -> f64 {
        if self.measured.is_empty() { self.memory_bytes_per_s * self.memory_fraction } else { f64::INFINITY }
    }

    /// Operations per second that an attention kernel reaches.
    pub fn attention(&self, kernel: &str, compute: Compute) -> f64 {
        let usual = self.matmul(compute.without_fp8()).peak_flops * self.attention_fraction;
        self.measured.get(kernel).copied().unwrap_or(usual)
    }

    /// Whether a GPU with this product name, as its driver gives it, is a device of this hardware.
    pub fn is_of(&self, product: &str) -> bool {
        // `a100-80g` is an `NVIDIA A100-SXM4-80GB`.
        let model = self.name.split('-').next().unwrap_or_default();
        let words = product.split(|c: char| !c.is_ascii_alphanumeric());
        words.into_iter().any(|word| word.eq_ignore_ascii_case(model))
    }

    /// Node of a rank, with ranks placed node by node.
    pub fn node(&self, rank: u32) -> u32 {
        rank / self.devices_per_node.max(1)
    }
}

// An assumption, of the order of a launch.
const FILL_S: f64 = 5e-6;

fn in_bf16() -> f64 {
    1.0
}

fn gpu_rate(peak_flops: f64) -> Rate {
    Rate { peak_flops, fraction: PRODUCTS, fill_s: FILL_S }
}

/// SXM, 80 GB. Source: NVIDIA A100 Tensor Core GPU data sheet (bf16 312 and f32 19.5 TFLOP/s, 2,039 GB/s, NVLink
/// 600 GB/s both ways together); NVIDIA DGX A100 data sheet (eight 200 Gb/s adapters for eight GPUs).
fn a100_80g() -> Hardware {
    Hardware {
        name: "a100-80g".into(),
        matmul_bf16: gpu_rate(312.0 * TERA),
        matmul_f32: gpu_rate(19.5 * TERA),
        fp8_speedup: in_bf16(),
        attention_fraction: ATTENTION,
        memory_bytes: 80_000_000_000,
        memory_bytes_per_s: 2039.0 * GB,
        memory_fraction: STREAMS,
        launch_s: LAUNCH_S,
        context_bytes: CONTEXT_BYTES,
        channels: NVLINK_CHANNELS,
        devices_per_node: 8,
        intra_node: Link { bytes_per_s: 300.0 * GB, fraction: COLLECTIVES, hop_s: NVLINK_HOP_S },
        inter_node: Link { bytes_per_s: 25.0 * GB, fraction: COLLECTIVES, hop_s: NETWORK_HOP_S },
        collective_start_s: NCCL_START_S,
        measured: BTreeMap::new(),
        mover: Mover::Links,
    }
}

/// SXM5, 80 GB. Source: NVIDIA H100 Tensor Core GPU data sheet (bf16 989 TFLOP/s without sparsity, f32 67, 3.35 TB/s,
/// NVLink 900 GB/s both ways together); NVIDIA DGX H100 data sheet (eight 400 Gb/s adapters for eight GPUs).
fn h100() -> Hardware {
    Hardware {
        name: "h100".into(),
        matmul_bf16: Rate { fraction: HOPPER_PRODUCTS, ..gpu_rate(989.0 * TERA) },
        matmul_f32: gpu_rate(67.0 * TERA),
        fp8_speedup: HOPPER_FP8,
        attention_fraction: HOPPER_ATTENTION,
        memory_bytes_per_s: 3350.0 * GB,
        intra_node: Link { bytes_per_s: 450.0 * GB, fraction: COLLECTIVES, hop_s: NVLINK_HOP_S },
        inter_node: Link { bytes_per_s: 50.0 * GB, fraction: COLLECTIVES, hop_s: NETWORK_HOP_S },
        ..a100_80g()
    }
}

/// SXM, 141 GB. Source: NVIDIA H200 Tensor Core GPU data sheet (as H100, with 141 GB at 4.8 TB/s).
fn h200() -> Hardware {
    Hardware { name: "h200".into(), memory_bytes: 141_000_000_000, memory_bytes_per_s: 4800.0 * GB, ..h100() }
}

/// SXM, 180 GB. Source: NVIDIA DGX B200 data sheet (1,440 GB and 64 TB/s for eight, NVLink 1.8 TB/s both ways together, eight
/// 400 Gb/s adapters); NVIDIA HGX platform page (for eight, f32 600 TFLOP/s, bf16 36 PFLOP/s with sparsity, thus 18 without).
fn b200() -> Hardware {
    Hardware {
        name: "b200".into(),
        matmul_bf16: gpu_rate(2250.0 * TERA),
        matmul_f32: gpu_rate(75.0 * TERA),
        fp8_speedup: in_bf16(),
        attention_fraction: ATTENTION,
        memory_bytes: 180_000_000_000,
        memory_bytes_per_s: 8000.0 * GB,
        intra_node: Link { bytes_per_s: 900.0 * GB, fraction: COLLECTIVES, hop_s: NVLINK_HOP_S },
        ..h100()
    }
}

/// Source: NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090 (bf16 with f32 sums 165.2 TFLOP/s without sparsity, f32 82.6,
/// 24 GB at 1,008 GB/s, PCIe 4.0 x16, no NVLink). One device and one 100 Gb/s port are assumed.
fn rtx_4090() -> Hardware {
    Hardware {
        name: "4090".into(),
        matmul_bf16: gpu_rate(165.2 * TERA),
        matmul_f32: gpu_rate(82.6 * TERA),
        memory_bytes: 24_000_000_000,
        memory_bytes_per_s: 1008.0 * GB,
        devices_per_node: 1,
        ..l40s()
    }
}

/// Source: NVIDIA L40S data sheet (bf16 362 TFLOP/s without sparsity, f32 91.6, 48 GB at 864 GB/s, PCIe 4.0 x16 with
/// 64 GB/s both ways together, no NVLink). One 100 Gb/s port a GPU is assumed.
fn l40s() -> Hardware {
    Hardware {
        name: "l40s".into(),
        matmul_bf16: gpu_rate(362.0 * TERA),
        matmul_f32: gpu_rate(91.6 * TERA),
        memory_bytes: 48_000_000_000,
        memory_bytes_per_s: 864.0 * GB,
        channels: PCIE_CHANNELS,
        intra_node: Link { bytes_per_s: 32.0 * GB, fraction: COLLECTIVES, hop_s: PCIE_HOP_S },
        inter_node: Link { bytes_per_s: 12.5 * GB, fraction: COLLECTIVES, hop_s: NETWORK_HOP_S },
        ..a100_80g()
    }
}

/// Two sockets of Xeon Platinum 8480+, a rank on each. Source: Intel ARK (56 cores, 2.0 GHz, eight channels of
/// DDR5-4800, thus 307 GB/s; 3 UPI links); Intel optimisation reference manual, chapter on AMX (1024 bf16 operations a
/// cycle and core) and AVX-512 (64 f32 operations a cycle and core). 512 GB a socket and 100 Gb/s Ethernet are assumed.
fn cpu() -> Hardware {
    let core_cycles = 56.0 * 2.0 * GB;
    Hardware {
        name: "cpu".into(),
        // Loading operands limits AMX far below its peak; the fractions are assumptions until the job measures them.
        matmul_bf16: Rate { peak_flops: core_cycles * 1024.0, fraction: 0.3, fill_s: FILL_S },
        matmul_f32: Rate { peak_flops: core_cycles * 64.0, fraction: PRODUCTS, fill_s: FILL_S },
        fp8_speedup: in_bf16(),
        attention_fraction: 0.2,
        memory_bytes: 512_000_000_000,
        memory_bytes_per_s: 307.2 * GB,
        memory_fraction: STREAMS,
        // Waking a pool of threads.
        launch_s: 5e-6,
        context_bytes: 0,
        channels: 0,
        devices_per_node: 2,
        // UPI at 16 GT/s carries about 24 GB/s a link and direction after coding; 3 links.
        intra_node: Link { bytes_per_s: 72.0 * GB, fraction: 0.5, hop_s: 1e-6 },
        inter_node: Link { bytes_per_s: 12.5 * GB, fraction: COLLECTIVES, hop_s: 25e-6 },
        collective_start_s: 2e-6,
        measured: BTreeMap::new(),
        mover: Mover::Ranks,
    }
}
