//! Where blocks have little shared memory, attention of wide heads, and where cuBLASLt has no products in FP8, their numbers in bf16:
//! sm_86, sm_89 and sm_120. All operations run on an architecture by
//! `SOFTGPU_ARCH=89 cargo test --release -p phalanx-gpu --test cases`.

use phalanx_cpu::CpuDevice;
use phalanx_gpu::{cases, open};

#[test]
fn attention_of_wide_heads_and_fp8_agree_with_the_cpu_where_a_gpu_has_less_of_either() {
    open::set("SOFTGPU_ARCH", "89").unwrap();
    let gpu = open::software_gpu().unwrap();
    let wide = ["heads of 128", "heads of 136", "heads of 256"];
    let is_wide = |name: &str| name.contains("in fp8") || wide.iter().any(|wide| name.contains(wide));
    let wide: Vec<_> = cases::all().into_iter().filter(|case| is_wide(&case.name)).collect();

    let failures: Vec<String> =
        wide.iter().filter_map(|case| case.compare(&CpuDevice, &gpu).err().map(|error| format!("{error:#}"))).collect();

    assert!(wide.len() >= 8 + 24 && failures.is_empty(), "{} cases: {}", wide.len(), failures.join("\n"));
}
