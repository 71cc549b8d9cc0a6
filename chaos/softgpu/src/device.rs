//! What a device is: its architecture, its attributes, its identity.

use crate::codes::{Code, INVALID_DEVICE, INVALID_VALUE, refuse};
use crate::environment;

/// Facts of one architecture; those of the usual product with it.
struct Architecture {
    capability: u32,
    multiprocessors: i32,
    shared_bytes_optin: i32,
    shared_bytes_multiprocessor: i32,
    threads_multiprocessor: i32,
    cache_bytes: i32,
}

const fn architecture(capability: u32, sms: i32, shared_kib: i32, threads: i32, cache_mib: i32) -> Architecture {
    Architecture {
        capability,
        multiprocessors: sms,
        shared_bytes_optin: shared_kib << 10,
        shared_bytes_multiprocessor: (shared_kib + 1) << 10,
        threads_multiprocessor: threads,
        cache_bytes: cache_mib << 20,
    }
}

const ARCHITECTURES: [Architecture; 6] = [
    architecture(80, 108, 163, 2048, 40),
    architecture(86, 84, 99, 1536, 6),
    architecture(89, 142, 99, 1536, 96),
    architecture(90, 132, 227, 2048, 50),
    architecture(100, 148, 227, 2048, 126),
    architecture(120, 188, 99, 1536, 128),
];

fn current() -> &'static Architecture {
    let arch = environment::number("SOFTGPU_ARCH");
    ARCHITECTURES.iter().find(|a| u64::from(a.capability) == arch).unwrap_or(&ARCHITECTURES[3])
}

/// Whether `SOFTGPU_ARCH` may have this value.
pub fn is_known_arch(text: &str) -> bool {
    ARCHITECTURES.iter().any(|a| a.capability.to_string() == text)
}

/// The compute capability as one number: 90 for 9.0.
pub fn capability() -> u32 {
    current().capability
}

/// Most bytes of shared memory that a kernel may ask for.
pub fn shared_bytes_optin() -> usize {
    current().shared_bytes_optin as usize
}

/// The physical devices that the process sees, in its order. As in CUDA, `CUDA_VISIBLE_DEVICES` is a list of indices and of
/// beginnings of UUIDs that ends at the first device that does not exist.
pub fn visible() -> Vec<u32> {
    let n = environment::number("SOFTGPU_DEVICES") as u32;
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else { return (0..n).collect() };
    let device = |name: &str| match name.strip_prefix("GPU-") {
        Some(_) => (0..n).find(|physical| uuid_text(*physical).starts_with(name)),
        None => name.parse::<u32>().ok().filter(|i| *i < n),
    };
    list.split(',').map_while(|name| device(name.trim())).collect()
}

fn physical(ordinal: u32) -> u32 {
    visible().get(ordinal as usize).copied().unwrap_or(ordinal)
}

/// Whether an ordinal is that of a device.
pub fn check(ordinal: i32) -> Result<u32, Code> {
    let n = visible().len();
    u32::try_from(ordinal).ok().filter(|o| (*o as usize) < n).ok_or(INVALID_DEVICE)
}

/// The bus id of a device: `0000:01:00.0`.
pub fn pci_bus_id(ordinal: u32) -> String {
    format!("0000:{:02X}:00.0", physical(ordinal) + 1)
}

/// The UUID of a device; the same in every process.
pub fn uuid(ordinal: u32) -> [u8; 16] {
    uuid_of(physical(ordinal))
}

fn uuid_of(physical: u32) -> [u8; 16] {
    let mut uuid = *b"softgpu-device-\0";
    uuid[15] = physical as u8;
    uuid
}

/// The UUID of a device as `CUDA_VISIBLE_DEVICES` and NVML write it: `GPU-` and hexadecimal digits in groups.
pub fn uuid_name(ordinal: u32) -> String {
    uuid_text(physical(ordinal))
}

fn uuid_text(physical: u32) -> String {
    let hex: String = uuid_of(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Value of a `CUdevice_attribute`.
pub fn attribute(attribute: i32, ordinal: u32) -> Result<i32, Code> {
    let a = current();
    Ok(match attribute {
        1..=3 => 1024,                                   // threads of a block, of its x and of its y
        4 => 64,                                         // of its z
        5 => i32::MAX,                                   // blocks of a grid in x
        6 | 7 => 65535,                                  // in y, in z
        8 => 48 << 10,                                   // shared memory of a block that needs no opt-in
        9 => 64 << 10,                                   // constant memory
        10 => 32,                                        // warp size
        11 => i32::MAX,                                  // pitch
        12 | 82 => 65536,                                // registers of a block, of a multiprocessor
        13 => 1_980_000,                                 // clock in kHz
        14 => 512,                                       // texture alignment
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 => 1, // overlap, mapped host memory, concurrent kernels, ECC, …
        16 => a.multiprocessors,
        17 | 18 | 35 => 0, // time limit, integrated, TCC
        20 => environment::foreign("SOFTGPU_NVML_COMPUTE_MODE", 0) as i32,
        33 => physical(ordinal) as i32 + 1, // PCI bus
        34 | 50 => 0,                       // PCI device, domain
        36 => 2_619_000,                    // memory clock in kHz
        37 => 5120,                         // memory bus width
        38 => a.cache_bytes,
        39 => a.threads_multiprocessor,
        40 => 3, // copy engines
        75 => (a.capability / 10) as i32,
        76 => (a.capability % 10) as i32,
        81 => a.shared_bytes_multiprocessor,
        84 | 85 => 0,                       // board with several devices, its group
        86 | 88 | 89 | 91 | 100 | 101 => 0, // host atomics, pageable access, …
        87 => 2,                            // ratio of f32 to f64
        90 => 1,                            // preemption
        92..=94 => 1,                       // stream memory operations
        95 | 96 => 0,                       // cooperative launches: not imitated
        97 => a.shared_bytes_optin,
        98 | 99 => 1,                         // flush of remote writes, host registration
        102 => 0,                             // virtual memory management: not imitated
        106 => a.threads_multiprocessor / 64, // blocks of a multiprocessor
        111 => 1 << 10,                       // shared memory of a block that the system takes
        115 => 0,                             // memory pools: not imitated
        116 | 124 => 0,                       // RDMA
        _ => return Err(refuse(INVALID_VALUE, format_args!("cuDeviceGetAttribute: unknown attribute {attribute}"))),
    })
}
