//! The instruction sets that kernels are written for, and the best of them that this process uses.
//!
//! Only this file asks the CPU. Machines with different CPUs use the same kernels if [`LIMIT`] names, on all of them, an instruction
//! set that all have.

use std::sync::OnceLock;

/// The environment variable that names the widest instruction set to use: see [`Isa::name`].
pub const LIMIT: &str = "PHALANX_MAX_CPU_ISA";

/// Instruction sets, narrowest first; each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions of every CPU of the target.
    Baseline,
    /// 256 bits, with fused multiplications and conversions of f16.
    Avx2,
    /// 512 bits: AVX-512 F, BW, DQ and VL.
    Avx512,
    /// Products of bf16 pairs in 512 bits.
    Avx512Bf16,
    /// Products of bf16 tiles.
    Amx,
}

impl Isa {
    const ALL: [Isa; 5] = [Isa::Baseline, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The value of [`LIMIT`] that names it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Baseline => "baseline",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Amx => "amx",
        }
    }
}

/// What kernels are chosen by: the best instruction set of this CPU up to the limit. Asked once per process.
pub fn isa() -> Isa {
    static ISA: OnceLock<Isa> = OnceLock::new();
    // An unknown limit is refused by `limit` before a job begins.
    *ISA.get_or_init(|| of_cpu().min(limit().ok().flatten().unwrap_or(Isa::Amx)))
}

/// The instruction set named in [`LIMIT`], if the variable is set.
///
/// # Errors
/// One sentence, if it names none.
pub fn limit() -> Result<Option<Isa>, String> {
    let Some(value) = std::env::var_os(LIMIT) else { return Ok(None) };
    named(&value.to_string_lossy()).map(Some)
}

fn named(name: &str) -> Result<Isa, String> {
    let names = Isa::ALL.map(Isa::name).join(", ");
    let found = Isa::ALL.into_iter().find(|isa| isa.name() == name);
    found.ok_or_else(|| format!("{LIMIT}={name} names no instruction set; set it to one of {names}, or unset it"))
}

#[cfg(target_arch = "x86_64")]
fn of_cpu() -> Isa {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")) {
        return Isa::Baseline;
    }
    let has_512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (has_512, is_x86_feature_detected!("avx512bf16")) {
        (false, _) => Isa::Avx2,
        (true, false) => Isa::Avx512,
        (true, true) if has_bf16_tiles() => Isa::Amx,
        // Without permission for the tiles, as in some virtual machines.
        (true, true) if has_slow_pairs() => Isa::Avx512,
        (true, true) => Isa::Avx512Bf16,
    }
}

/// Whether products of bf16 pairs take longer than f32 products of rounded operands. On the Intel processor that
/// was measured they take twice as long: 228 and 452 GFLOP/s on registers alone (`benches/ceiling.rs`).
#[cfg(target_arch = "x86_64")]
fn has_slow_pairs() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn of_cpu() -> Isa {
    Isa::Baseline
}

/// Whether the CPU has tiles of bf16 and the operating system lets this process use them.
#[cfg(target_arch = "x86_64")]
fn has_bf16_tiles() -> bool {
    let leaf = std::arch::x86_64::__cpuid_count(7, 0);
    leaf.edx >> 24 & 1 == 1 && leaf.edx >> 22 & 1 == 1 && is_permitted()
}

/// Requests the tile state from the operating system, which saves it only for processes with this permission.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[allow(unsafe_code, reason = "a system call")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this request changes the permission only.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn is_permitted() -> bool {
    false
}

/// Bytes of the second-level cache for each thread of the CPU that shares it; 512 KiB where the CPU does not tell. Asked once per process.
pub fn second_level_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| told_second_level_cache().unwrap_or(512 << 10))
}

/// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, `CPUID` leaf 4; AMD64 Architecture Programmer's Manual, volume 3,
/// leaf 8000_001D, which has the same layout.
#[cfg(target_arch = "x86_64")]
fn told_second_level_cache() -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    let leaf = [0x8000_001d, 4].into_iter().find(|leaf| *leaf <= __cpuid(*leaf & 0x8000_0000).eax)?;
    let caches = (0..8).map(|i| __cpuid_count(leaf, i)).take_while(|cache| cache.eax & 0x1f != 0);
    let second = { caches }.find(|cache| cache.eax >> 5 & 7 == 2)?;
    let field = |register: u32, first: u32, bits: u32| (register >> first & ((1 << bits) - 1)) as usize + 1;
    let (ways, partitions, line) = (field(second.ebx, 22, 10), field(second.ebx, 12, 10), field(second.ebx, 0, 12));
    Some(ways * partitions * line * (second.ecx as usize + 1) / field(second.eax, 14, 12))
}

#[cfg(not(target_arch = "x86_64"))]
fn told_second_level_cache() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_level_cache_is_what_the_kernel_found() {
        let folder = "/sys/devices/system/cpu/cpu0/cache/index2";
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).ok();
        let kib: Option<usize> = read("size").and_then(|size| size.trim().strip_suffix('K')?.parse().ok());
        let Some((kib, sharing)) = kib.zip(read("shared_cpu_map")) else { return };
        let sharing: u32 =
            sharing.trim().split(',').map(|word| u32::from_str_radix(word, 16).unwrap().count_ones()).sum();

        // The CPU may count threads that this system does not have.
        let found = second_level_cache() / 1024;
        let is_share = found <= kib / sharing as usize && kib.is_multiple_of(found);
        assert!(is_share, "{found} KiB, of {kib} KiB for {sharing} threads");
    }

    #[test]
    fn names_of_instruction_sets_are_read_back_and_others_refused_with_those_that_fit() {
        for isa in Isa::ALL {
            assert_eq!(named(isa.name()), Ok(isa));
        }
        let refused = "PHALANX_MAX_CPU_ISA=avx3 names no instruction set; set it to one of \
            baseline, avx2, avx512, avx512_bf16, amx, or unset it";
        assert_eq!(named("avx3"), Err(refused.to_owned()));
    }
}
