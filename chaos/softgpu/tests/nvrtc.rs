//! Compilation and modules.
#![allow(unsafe_code)]

mod support;

use std::ffi::CString;
use support::{Gpu, P, arg, assert_ends_with, cu, in_child};

const ONE: &str = "extern \"C\" __global__ void one(float* x) { *x = VALUE; }";

#[test]
fn defines_reach_the_kernel_and_each_module_is_its_own() {
    let gpu = Gpu::new();
    let image = |define| gpu.compile(ONE, &["-arch=sm_90", define]).unwrap();
    let at = gpu.alloc(4);
    let run = |module| {
        gpu.launch(gpu.function(module, "one"), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
        gpu.get::<f32>(at, 1)[0]
    };
    let (first, second, third) =
        (image("-DVALUE=1.5f"), image("--define-macro=VALUE=2.5f"), image("-DVALUE=__CUDA_ARCH__"));

    let modules = [&first, &second, &third, &first].map(|i| gpu.load(i));
    let n = gpu.stat("modules");
    let values = modules.map(run);
    let unloaded = modules.map(|m| cu!(gpu, cuModuleUnload(m => P)));

    assert_eq!((values, unloaded, gpu.stat("modules")), ([1.5, 2.5, 900.0, 1.5], [0; 4], n - 4));
}

#[test]
fn errors_come_with_the_line_of_the_source() {
    let gpu = Gpu::new();

    let log = gpu
        .compile("// one\n__device__ void f() {\n    __shared__ int s[4];\n    undefined(s);\n}\n", &["-arch=sm_90"])
        .unwrap_err();

    assert!(log.starts_with("6: ") && log.contains("test.cu:4:") && log.contains("undefined"), "{log}");
}

#[test]
fn unknown_options_and_includes_are_errors() {
    let gpu = Gpu::new();

    let option = gpu.compile("", &["--use_fast_math"]).unwrap_err();
    let include = gpu.compile("#include <vector>\n", &["-arch=sm_90"]).unwrap_err();

    assert!(option.starts_with("5: ") && option.contains("--use_fast_math"), "{option}");
    assert!(include.starts_with("6: ") && include.contains("vector"), "{include}");
}

#[test]
fn compiled_program_is_taken_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let output = in_child(
        "compiled_program_is_taken_from_the_cache",
        &[("SOFTGPU_CACHE", folder.path().to_str().unwrap())],
        || {
            let gpu = Gpu::new();
            let counts = || (gpu.stat("compilations"), gpu.stat("cache_hits"));
            let first = gpu.compile(ONE, &["-arch=sm_90", "-DVALUE=1"]).unwrap();
            assert_eq!(counts(), (1, 0));
            let again = gpu.compile(ONE, &["-arch=sm_90", "-DVALUE=1"]).unwrap();
            assert_eq!((counts(), first == again), ((1, 1), true));
            gpu.compile(ONE, &["-arch=sm_90", "-DVALUE=2"]).unwrap();
            gpu.compile(ONE, &["-arch=sm_80", "-DVALUE=1"]).unwrap();
            assert_eq!(counts(), (3, 1));
        },
    );

    assert_ends_with(&output, 0);
}

#[test]
fn cubin_outlives_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let output = in_child("cubin_outlives_the_cache", &[("SOFTGPU_CACHE", folder.path().to_str().unwrap())], || {
        let gpu = Gpu::new();
        let image = gpu.compile(ONE, &["-arch=sm_90", "-DVALUE=1"]).unwrap();
        std::fs::remove_dir_all(std::env::var("SOFTGPU_CACHE").unwrap()).unwrap();
        let at = gpu.alloc(4);
        gpu.launch(gpu.function(gpu.load(&image), "one"), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
        assert_eq!(gpu.get::<f32>(at, 1), [1.0]);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn cubin_of_another_architecture_does_not_load() {
    let gpu = Gpu::new();
    let load = |arch: &str| {
        let image = gpu.compile(ONE, &[&format!("-arch={arch}"), "-DVALUE=1"]).unwrap();
        let mut module = std::ptr::null_mut();
        cu!(gpu, cuModuleLoadData(&raw mut module => *mut P, image.as_ptr() as P => P))
    };
    let mut module = std::ptr::null_mut();

    let codes = ["sm_90", "sm_90a", "sm_80", "sm_100"].map(load);
    let nonsense = cu!(gpu, cuModuleLoadData(&raw mut module => *mut P, c"nonsense".as_ptr() as P => P));

    assert_eq!((codes, nonsense), ([0, 0, 209, 209], 200));
}

/// Compiles for a virtual architecture; gives the sizes of cubin and PTX, and what loading the PTX returns.
fn ptx(gpu: &Gpu, arch: &str) -> (usize, bool, u32) {
    let (source, option) =
        (CString::new(ONE.replace("VALUE", "1")).unwrap(), CString::new(format!("-arch={arch}")).unwrap());
    let (mut program, none): (P, P) = (std::ptr::null_mut(), std::ptr::null_mut());
    cu!(gpu, nvrtcCreateProgram(&raw mut program => *mut P, source.as_ptr() as P => P, none => P, 0 => i32, none => P, none => P));
    let options = [option.as_ptr() as P];
    assert_eq!(cu!(gpu, nvrtcCompileProgram(program => P, 1 => i32, options.as_ptr() => *const P)), 0);
    let (mut cubin, mut bytes) = (9, 0);
    cu!(gpu, nvrtcGetCUBINSize(program => P, &raw mut cubin => *mut usize));
    cu!(gpu, nvrtcGetPTXSize(program => P, &raw mut bytes => *mut usize));
    let mut text = vec![0u8; bytes];
    assert_eq!(cu!(gpu, nvrtcGetPTX(program => P, text.as_mut_ptr() => *mut u8)), 0);
    let mut module = std::ptr::null_mut();
    (cubin, text.ends_with(b"\0"), cu!(gpu, cuModuleLoadData(&raw mut module => *mut P, text.as_ptr() as P => P)))
}

#[test]
fn ptx_loads_on_newer_devices_and_not_in_older_drivers() {
    let gpu = Gpu::new();

    let (older, newer) = (ptx(&gpu, "compute_80"), ptx(&gpu, "compute_100"));
    gpu.set("SOFTGPU_DRIVER_VERSION", "12080");
    let old_driver = ptx(&gpu, "compute_80");
    gpu.set("SOFTGPU_DRIVER_VERSION", "13000");

    assert_eq!((older, newer, old_driver), ((0, true, 0), (0, true, 209), (0, true, 222)));
}

#[test]
fn cubin_does_not_load_in_a_driver_that_is_older_than_its_compiler() {
    let gpu = Gpu::new();
    let image = gpu.compile(ONE, &["-arch=sm_90", "-DVALUE=1"]).unwrap();
    let mut module = std::ptr::null_mut();

    gpu.set("SOFTGPU_DRIVER_VERSION", "12080");
    let code = cu!(gpu, cuModuleLoadData(&raw mut module => *mut P, image.as_ptr() as P => P));
    gpu.set("SOFTGPU_DRIVER_VERSION", "13000");

    assert_eq!(code, 200);
}

#[test]
fn kernels_without_c_linkage_are_found_by_their_lowered_names_only() {
    let gpu = Gpu::new();
    let source = c"template <int N> __global__ void f(int* x) { *x = N; } __global__ void g(int* x) { *x = 7; }";
    let (mut program, none): (P, P) = (std::ptr::null_mut(), std::ptr::null_mut());
    cu!(gpu, nvrtcCreateProgram(&raw mut program => *mut P, source.as_ptr() as P => P, none => P, 0 => i32, none => P, none => P));
    assert_eq!(cu!(gpu, nvrtcAddNameExpression(program => P, c"f<42>".as_ptr() as P => P)), 0);
    let options = [c"-arch=sm_90".as_ptr() as P];
    assert_eq!(cu!(gpu, nvrtcCompileProgram(program => P, 1 => i32, options.as_ptr() => *const P)), 0);
    let (mut name, mut bytes) = (std::ptr::null(), 0);
    assert_eq!(
        cu!(gpu, nvrtcGetLoweredName(program => P, c"f<42>".as_ptr() as P => P, &raw mut name => *mut *const i8)),
        0
    );
    cu!(gpu, nvrtcGetCUBINSize(program => P, &raw mut bytes => *mut usize));
    let mut image = vec![0u8; bytes];
    cu!(gpu, nvrtcGetCUBIN(program => P, image.as_mut_ptr() => *mut u8));
    let (module, at) = (gpu.load(&image), gpu.alloc(4));
    // SAFETY: a string of the program, which lives.
    let name = unsafe { std::ffi::CStr::from_ptr(name.cast()) }.to_str().unwrap();

    gpu.launch(gpu.function(module, name), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
    let mut plain = std::ptr::null_mut();
    let not_found = cu!(gpu, cuModuleGetFunction(&raw mut plain => *mut P, module => P, c"g".as_ptr() as P => P));

    assert_eq!((gpu.get::<i32>(at, 1), not_found), (vec![42], 500));
}

#[test]
fn kernels_made_by_macros_and_in_linkage_blocks_are_found() {
    let gpu = Gpu::new();
    let source = r#"
#define KERNEL(name, value) extern "C" __global__ void name(int* x) { *x = value; }
KERNEL(made, 3)
#if 0
extern "C" __global__ void absent(Unknown x) {}
#endif
extern "C" {
__global__ void __launch_bounds__(64) block(int* x) { *x = 4; }
}
extern "C" __global__ void declared(int* x);
extern "C" __global__ void declared(int* x) { *x = 5; }
"#;
    let module = gpu.module(source);
    let at = gpu.alloc(4);

    let values = ["made", "block", "declared"].map(|name| {
        assert_eq!(gpu.launch(gpu.function(module, name), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]), 0);
        gpu.get::<i32>(at, 1)[0]
    });

    assert_eq!(values, [3, 4, 5]);
}
