//! Plans of the real library, for GPUs that are only described: it needs no GPU to plan, but a driver and a compiler.

use super::descriptor::{Attribute, Descriptor, Kind, Library, Type};
use super::graph::{Direction, Shape};
use super::packing::Packing;
use super::plan::{Place, Plan};
use crate::library::{Dnn, Search};
use phalanx_needs::{Need, skip};
use phalanx_strategies::program::{Attention, DType};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the real `libcudnn.so.9`.
const FOLDER: &str = "PHALANX_CUDNN";
/// The folder of the stubs, in the process that plans.
const STUBS: &str = "PHALANX_TEST_STUBS";
const DRIVER: &str = include_str!("driver.c");
const STUB_NAMES: [&str; 3] = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"];
/// Tokens of a batch.
const N_TOKENS: usize = 8192;

/// Names of functions of the driver in a library.
fn driver_names(library: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(library).unwrap();
    let is_name = |text: &&[u8]| {
        text.len() > 2
            && text.len() < 64
            && text.starts_with(b"cu")
            && text[2].is_ascii_uppercase()
            && text.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
    };
    let names = bytes.split(|byte| *byte == 0).filter(is_name);
    names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect()
}

fn make_stubs(folder: &Path, cudnn: &Path) {
    let parts = ["graph", "ops", "engines_runtime_compiled"].map(|part| format!("libcudnn_{part}.so.9"));
    let mut names: BTreeSet<String> = parts.iter().flat_map(|part| driver_names(&cudnn.join(part))).collect();
    names.extend(["cuInit", "cuDeviceGet", "cuDeviceGetCount", "cuGetErrorString", "cuGetErrorName"].map(String::from));
    names.retain(|name| !DRIVER.contains(&format!("int {name}(")));
    let others: String = names.iter().map(|name| format!("int {name}() {{ return 0; }}\n")).collect();
    let blas = "unsigned long cublasLtGetVersion(void) { return 130200; }\n".to_owned();
    for (name, text) in
        STUB_NAMES.into_iter().zip([DRIVER.to_owned() + &others, include_str!("nvrtc.c").to_owned(), blas])
    {
        let source = folder.join(format!("{name}.c"));
        std::fs::write(&source, text).unwrap();
        let mut compiler = Command::new("g++");
        compiler.args(["-x", "c", "-w", "-shared", "-fPIC", &format!("-Wl,-soname,{name}"), "-o"]);
        let status = compiler.arg(folder.join(name)).arg(&source).arg("-ldl").status().unwrap();
        assert!(status.success(), "{name}");
    }
}

#[test]
fn real_library_has_plans_within_the_planned_scratch() {
    let Some(cudnn) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return skip(Need::Cudnn, format_args!("{FOLDER} is not set; see tests/cuda/fetch_cudnn"));
    };
    if let Some(stubs) = std::env::var_os(STUBS).map(PathBuf::from) {
        return check_plans(&cudnn, &stubs);
    }
    // In a process of its own: the software GPU's libraries have the same names as the stubs.
    let stubs = tempfile::tempdir().unwrap();
    make_stubs(stubs.path(), &cudnn);
    let test = "cudnn::tests::real_library_has_plans_within_the_planned_scratch";
    let mut child = Command::new(std::env::current_exe().unwrap());

    let output = child.args([test, "--exact", "--nocapture"]).env(STUBS, stubs.path()).output().unwrap();

    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(output.status.success() && text.contains("1 passed"), "{:?}: {text}", output.status);
}

fn check_plans(cudnn: &Path, stubs: &Path) {
    for name in STUB_NAMES {
        // SAFETY: the stubs have no initialisers.
        let stub = unsafe { libloading::os::unix::Library::new(stubs.join(name)) }.unwrap();
        std::mem::forget(stub);
    }
    let dnn = Dnn::find(&Search::only(vec![cudnn.to_owned()])).unwrap();
    let mut failures = Vec::new();
    for sm in [80, 90, 100] {
        let library = Library { dnn, device: format!("sm_{sm}") };
        let place = Place::Described { properties: properties(&library, sm), capability: (sm / 10, 0) };
        for (shape, direction, has_plan) in cases(sm) {
            let plan = Plan::new(&library, &place, &shape, direction, shape.workspace_bytes(direction));
            let bytes = plan.as_ref().map_or(0, |plan| plan.workspace_bytes);
            let reason = plan.as_ref().err().map_or_else(String::new, ToString::to_string);
            println!("sm_{sm} {direction:?} {shape:?}: {bytes} bytes {reason}");
            if plan.is_ok() != has_plan {
                failures.push(format!("sm_{sm} {direction:?} {shape:?}: {reason}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} {}", dnn.version(), failures.join("\n"));
}

/// Shapes, and whether they have a plan.
fn cases(sm: i32) -> Vec<(Shape, Direction, bool)> {
    let packings = |seq_len| {
        let whole = Packing::Whole { rows: N_TOKENS / seq_len, seq_len };
        [whole, Packing::Documents { n: 16, longest: 1024.min(seq_len) }]
    };
    let mut cases = Vec::new();
    for (head_dim, dtype) in [(64, DType::Bf16), (80, DType::F16), (96, DType::Bf16), (128, DType::Bf16)] {
        for (n_kv_heads, window) in [(8, None), (32, None), (8, Some(100))] {
            let heads = Attention { n_heads: 32, n_kv_heads, head_dim, seq_len: 4096, window, scale: 0.125 };
            for packing in packings(heads.seq_len) {
                let shape = Shape::of(&heads, &[dtype; 3], N_TOKENS, packing).unwrap();
                let has_adjoint = !(shape.has_documents && sm == 80);
                cases.extend([(shape, Direction::Forward, true), (shape, Direction::Backward, has_adjoint)]);
            }
        }
    }
    // With a fixed order of sums only where scratch for all scores fits.
    for (seq_len, has_plan) in [(256, true), (4096, false)] {
        let heads = Attention { n_heads: 32, n_kv_heads: 8, head_dim: 64, seq_len, window: None, scale: 0.125 };
        let shape = Shape::of(&heads, &[DType::Bf16; 3], N_TOKENS, packings(seq_len)[0]).unwrap();
        cases.push((Shape { is_deterministic: true, ..shape }, Direction::Backward, has_plan || sm == 100));
    }
    cases
}

/// Properties of a GPU, as the library writes them.
fn properties(library: &Library, sm: i32) -> Descriptor {
    let (name, multiprocessors, shared) = match sm {
        80 => ("NVIDIA A100-SXM4-80GB", 108, 166_912),
        90 => ("NVIDIA H100 80GB HBM3", 132, 232_448),
        _ => ("NVIDIA B200", 148, 232_448),
    };
    let text = format!(
        "{{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\
         \"multiProcessorCount\":{multiprocessors},\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,\
         \"maxSharedMemoryPerBlockOptin\":{shared},\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\
         \"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,\
         \"supportCoopLaunch\":1,\"smClockRateKHz\":1980000,\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,\
         \"deviceName\":\"{name}\",\"deviceVer\":{},\"driverVer\":13000,\"totalGlobalMem\":85045411840,\"cudaDeviceId\":0}}",
        sm * 10
    );
    let mut properties = Descriptor::new(library, Kind::DeviceProperties).unwrap();
    properties.set(library, Attribute::DeviceJson, Type::Char, text.as_bytes()).unwrap();
    properties.finalize(library).unwrap();
    properties
}
