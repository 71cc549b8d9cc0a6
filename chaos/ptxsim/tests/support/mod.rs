//! What several tests of compiled kernels need.
#![allow(dead_code)]

use phalanx_needs::{Need, skip};
use phalanx_ptxsim::nvrtc::{Nvrtc, VARIABLE};
use phalanx_ptxsim::{Device, Finding, Module, Ptr};
use std::path::Path;

/// Compiles kernels of `tests/kernels` behind the prelude; skips the calling test where there is no NVRTC.
#[track_caller]
pub fn compile(file: &str, options: &[&str]) -> Option<Module> {
    let Some(folder) = std::env::var_os(VARIABLE) else {
        skip(Need::Nvrtc, format_args!("{VARIABLE} does not name the folder of libnvrtc"));
        return None;
    };
    let nvrtc = Nvrtc::load(Path::new(&folder)).expect("PHALANX_NVRTC names the folder of libnvrtc");
    let read = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels").join(file);
        std::fs::read_to_string(&path).expect("the kernel exists")
    };
    let source = format!("#line 1 \"prelude.cuh\"\n{}#line 1 \"{file}\"\n{}", read("prelude.cuh"), read(file));
    let compiled = nvrtc.compile(file, &source, &[&["--std=c++17", "-lineinfo"], options].concat());
    let ptx = compiled.expect("the kernel compiles").ptx;
    Some(Module::parse(&ptx).expect("NVRTC writes PTX that the interpreter parses"))
}

/// Numbers between -1 and 1 by a seed.
pub fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// The nearest bf16, ties to even.
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The value of a bf16.
pub fn wide(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Allocates written f32 values.
pub fn f32s(device: &mut Device, values: &[f32]) -> Ptr {
    device.alloc_written(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// Allocates written f64 values.
pub fn f64s(device: &mut Device, values: &[f64]) -> Ptr {
    device.alloc_written(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// Allocates written values, rounded to bf16.
pub fn bf16s(device: &mut Device, values: &[f32]) -> Ptr {
    device.alloc_written(&values.iter().flat_map(|v| bf16(*v).to_le_bytes()).collect::<Vec<u8>>())
}

/// Fails with all findings if there are any.
#[track_caller]
pub fn assert_clean(findings: &[Finding]) {
    let text: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{}", text.join("\n"));
}
