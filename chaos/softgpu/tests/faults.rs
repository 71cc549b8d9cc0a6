//! Planted faults.
#![allow(unsafe_code)]

mod support;

use std::time::{Duration, Instant};
use support::{Gpu, P, arg, assert_ends_with, cu, in_child};

const KERNELS: &str = r#"
extern "C" __global__ void first(int* x) { atomicAdd(x, 1); }
extern "C" __global__ void second(int* x) { atomicAdd(x, 100); }
"#;

struct Bench {
    gpu: Gpu,
    first: P,
    second: P,
    x: u64,
}

impl Bench {
    fn new(settings: &[(&str, &str)]) -> Bench {
        let gpu = Gpu::with(settings);
        let module = gpu.module(KERNELS);
        let (first, second, x) = (gpu.function(module, "first"), gpu.function(module, "second"), gpu.put(&[0i32]));
        Bench { gpu, first, second, x }
    }

    fn go(&self, f: P) -> u32 {
        self.gpu.launch(f, self.gpu.stream, [1, 1, 1], 1, 0, &[arg(&self.x)])
    }
}

#[test]
fn error_comes_at_the_launch_that_is_named_and_stays() {
    for (fault, code) in [("3:719", 719), ("second:214", 214), ("first#2:999", 999)] {
        let b = Bench::new(&[("SOFTGPU_FAULT", fault)]);
        b.gpu.sync();

        for f in [b.first, b.first, b.second] {
            b.go(f);
        }
        let synchronized = b.gpu.synchronize(b.gpu.stream);
        let mut at = 0u64;
        let codes = [
            b.go(b.first),
            cu!(b.gpu, cuMemAlloc_v2(&raw mut at => *mut u64, 4 => usize)),
            cu!(b.gpu, cuStreamQuery(b.gpu.stream => P)),
            cu!(b.gpu, cuEventCreate(&raw mut at => *mut u64, 0 => u32)),
            cu!(b.gpu, cuCtxSynchronize()),
        ];
        b.gpu.set("SOFTGPU_FAULT", "");

        assert_eq!((synchronized, codes), (code, [code; 5]), "{fault}");
        assert_eq!(
            b.gpu.get::<i32>(b.x, 1),
            [if fault.starts_with("first") { 1 } else { 2 }],
            "what came before was done"
        );
    }
}

#[test]
fn launches_are_counted_inside_graphs_too() {
    let b = Bench::new(&[("SOFTGPU_FAULT", "3:700")]);
    b.gpu.sync();
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    cu!(b.gpu, cuStreamBeginCapture_v2(b.gpu.stream => P, 1 => u32));
    b.go(b.first);
    b.go(b.second);
    cu!(b.gpu, cuStreamEndCapture(b.gpu.stream => P, &raw mut graph => *mut P));
    cu!(b.gpu, cuGraphInstantiateWithFlags(&raw mut exec => *mut P, graph => P, 0 => u64));

    let mut codes = Vec::new();
    for _ in 0..2 {
        cu!(b.gpu, cuGraphLaunch(exec => P, b.gpu.stream => P));
        codes.push(b.gpu.synchronize(b.gpu.stream));
    }
    b.gpu.set("SOFTGPU_FAULT", "");

    assert_eq!(codes, [0, 700]);
    assert_eq!(b.gpu.get::<i32>(b.x, 1), [101]);
}

#[test]
fn allocation_that_is_named_fails_once() {
    let gpu = Gpu::with(&[("SOFTGPU_ALLOC_FAIL", "2")]);
    let mut at = 0u64;

    let codes = [0; 3].map(|_: i32| cu!(gpu, cuMemAlloc_v2(&raw mut at => *mut u64, 4 => usize)));

    assert_eq!(codes, [0, 2, 0]);
}

#[test]
fn slow_device_takes_longer_for_each_kernel() {
    let b = Bench::new(&[]);
    let busy = b.gpu.kernel(
        r#"extern "C" __global__ void busy() { long long end = clock64() + 4000000; while (clock64() < end); }"#,
        "busy",
    );
    b.gpu.sync();
    let time = |f: &dyn Fn()| {
        let start = Instant::now();
        (0..10).for_each(|_| f());
        b.gpu.sync();
        start.elapsed()
    };

    let run_busy = || assert_eq!(b.gpu.launch(busy, b.gpu.stream, [1, 1, 1], 1, 0, &[]), 0);

    b.gpu.set("SOFTGPU_SLOW_US", "2000");
    let by_microseconds = time(&|| assert_eq!(b.go(b.first), 0));
    b.gpu.set("SOFTGPU_SLOW_US", "0");
    let normal = time(&run_busy);
    b.gpu.set("SOFTGPU_SLOW_PERCENT", "800");
    let by_percent = time(&run_busy);

    assert!(by_microseconds >= Duration::from_millis(20), "{by_microseconds:?}");
    assert!(by_percent > normal * 2, "{normal:?} {by_percent:?}");
}

#[test]
fn hung_kernel_occupies_its_stream_and_no_other() {
    let output = in_child("hung_kernel_occupies_its_stream_and_no_other", &[("SOFTGPU_HANG", "second")], || {
        let b = Bench::new(&[("SOFTGPU_HANG", "second")]);
        let other = b.gpu.new_stream();
        b.gpu.sync();
        b.go(b.second);
        let y = b.gpu.alloc(4);
        cu!(b.gpu, cuMemsetD32Async(y => u64, 5 => u32, 1 => usize, other => P));
        assert_eq!(b.gpu.synchronize(other), 0);
        assert_eq!(cu!(b.gpu, cuStreamQuery(b.gpu.stream => P)), 600);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn change_for_one_process_is_taken_by_it_once_and_the_next_one_by_the_first_new_process() {
    let test = "change_for_one_process_is_taken_by_it_once_and_the_next_one_by_the_first_new_process";
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("next"), "SOFTGPU_ALLOC_FAIL=2\n").unwrap();

    let child = || {
        in_child(test, &[("SOFTGPU_CONTROL", folder.path().to_str().unwrap())], || {
            let (gpu, folder) = (Gpu::new(), std::env::var("SOFTGPU_CONTROL").unwrap());
            let mut at = 0u64;
            let mut allocate = || cu!(gpu, cuMemAlloc_v2(&raw mut at => *mut u64, 4 => usize));
            let of_next = [allocate(), allocate(), allocate()];
            std::fs::write(format!("{folder}/{}", std::process::id()), "SOFTGPU_ALLOC_FAIL=1\n").unwrap();
            eprintln!("codes {of_next:?} {:?}", [allocate(), allocate()]);
        })
    };

    assert!(assert_ends_with(&child(), 0).contains("codes [0, 2, 0] [2, 0]"));
    assert!(assert_ends_with(&child(), 0).contains("codes [0, 0, 0] [2, 0]"));
    assert!(!path("next").exists());
}

#[test]
fn wrong_settings_are_refused() {
    let gpu = Gpu::new();
    let set = |name: &std::ffi::CStr, value: &std::ffi::CStr| cu!(gpu, softgpu_set(name.as_ptr() as P => P, value.as_ptr() as P => P));

    assert_eq!(
        [
            set(c"SOFTGPU_FOO", c"1"),
            set(c"SOFTGPU_SEED", c"x"),
            set(c"SOFTGPU_FAULT", c"first"),
            set(c"SOFTGPU_GUARD", c"no")
        ],
        [1; 4]
    );
    assert_eq!(gpu.stat("foo"), u64::MAX);
}
