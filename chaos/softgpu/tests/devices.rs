//! Initialisation, devices, contexts.
#![allow(unsafe_code)]

mod support;

use support::{Gpu, P, assert_ends_with, cu, in_child};

#[test]
fn calls_before_initialisation_fail() {
    let output = in_child("calls_before_initialisation_fail", &[], || {
        let gpu = Gpu::uninitialized();
        let (mut n, mut version) = (0, 0);
        assert_eq!(cu!(gpu, cuDeviceGetCount(&raw mut n => *mut i32)), 3);
        assert_eq!(cu!(gpu, cuDriverGetVersion(&raw mut version => *mut i32)), 0);
        assert_eq!((cu!(gpu, cuInit(1 => u32)), cu!(gpu, cuInit(0 => u32))), (1, 0));
        assert_eq!((cu!(gpu, cuDeviceGetCount(&raw mut n => *mut i32)), n), (0, 1));
        assert_eq!(cu!(gpu, cuCtxSynchronize()), 201);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn broken_driver_old_driver_and_no_device_can_be_imitated() {
    let cases = [
        ("SOFTGPU_INIT_CODE", "803", 803),
        ("SOFTGPU_DEVICES", "0", 100),
        ("SOFTGPU_TYPO", "1", 1),
        ("SOFTGPU_ARCH", "91", 1),
    ];
    for (name, value, code) in cases {
        let output = in_child(
            "broken_driver_old_driver_and_no_device_can_be_imitated",
            &[(name, value), ("SOFTGPU_DRIVER_VERSION", "12040")],
            || {
                let (gpu, mut version) = (Gpu::uninitialized(), 0);
                assert_eq!(cu!(gpu, cuDriverGetVersion(&raw mut version => *mut i32)), 0);
                std::process::exit(if version == 12040 { cu!(gpu, cuInit(0 => u32)) as i32 & 0xff } else { 255 });
            },
        );

        let stderr = assert_ends_with(&output, code & 0xff);

        assert_eq!(stderr.contains(name), code == 1, "{stderr}");
    }
}

#[test]
fn devices_have_the_attributes_of_their_architecture() {
    let output = in_child(
        "devices_have_the_attributes_of_their_architecture",
        &[("SOFTGPU_DEVICES", "2"), ("SOFTGPU_ARCH", "80")],
        || {
            let gpu = Gpu::new();
            let attribute = |a: i32, d: i32| {
                let mut value = 0;
                let code = cu!(gpu, cuDeviceGetAttribute(&raw mut value => *mut i32, a => i32, d => i32));
                (code, value)
            };
            assert_eq!([75, 76, 16, 97, 8, 10].map(|a| attribute(a, 1).1), [8, 0, 108, 163 << 10, 48 << 10, 32]);
            assert_eq!((attribute(5555, 0).0, attribute(75, 2).0), (1, 101));
            let text = |d: i32| {
                let mut text = [0u8; 32];
                assert_eq!(cu!(gpu, cuDeviceGetPCIBusId(text.as_mut_ptr() => *mut u8, 32 => i32, d => i32)), 0);
                let mut uuid = [0u8; 16];
                assert_eq!(cu!(gpu, cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], d => i32)), 0);
                (text, uuid)
            };
            assert!(text(0).0.starts_with(b"0000:01:00.0\0") && text(0).0 != text(1).0 && text(0).1 != text(1).1);
        },
    );

    let stderr = assert_ends_with(&output, 0);

    assert!(stderr.contains("unknown attribute 5555"), "{stderr}");
}

#[test]
fn visible_devices_are_selected_by_index() {
    let environment = [("SOFTGPU_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", "2,0,9,1")];
    let output = in_child("visible_devices_are_selected_by_index", &environment, || {
        let (gpu, mut n, mut text) = (Gpu::new(), 0, [0u8; 16]);
        assert_eq!((cu!(gpu, cuDeviceGetCount(&raw mut n => *mut i32)), n), (0, 2));
        cu!(gpu, cuDeviceGetPCIBusId(text.as_mut_ptr() => *mut u8, 16 => i32, 0 => i32));
        assert!(text.starts_with(b"0000:03:00.0\0"));
    });

    assert_ends_with(&output, 0);
}

#[test]
fn visible_devices_are_selected_by_uuid() {
    let names = "GPU-736f6674-6770-752d-6465-766963652d02,GPU-736f6674-6770-752d-6465-766963652d00,GPU-0,1";
    let environment = [("SOFTGPU_DEVICES", "4"), ("CUDA_VISIBLE_DEVICES", names)];
    let output = in_child("visible_devices_are_selected_by_uuid", &environment, || {
        let (gpu, mut n, mut uuid) = (Gpu::new(), 0, [0u8; 16]);
        assert_eq!((cu!(gpu, cuDeviceGetCount(&raw mut n => *mut i32)), n), (0, 2));
        cu!(gpu, cuDeviceGetUuid(&raw mut uuid => *mut [u8; 16], 0 => i32));
        assert_eq!(uuid[15], 2);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn context_and_memory_of_a_device_that_others_have_taken_are_refused() {
    let environment = [("SOFTGPU_MEMORY", "64K"), ("SOFTGPU_TAKEN", "48K")];
    let name = "context_and_memory_of_a_device_that_others_have_taken_are_refused";
    let output = in_child(name, &environment, || {
        let (gpu, mut at, mut free, mut total) = (Gpu::new(), 0u64, 0usize, 0usize);
        cu!(gpu, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize));
        assert_eq!((free, total), (16 << 10, 64 << 10));
        assert_eq!(cu!(gpu, cuMemAlloc_v2(&raw mut at => *mut u64, 17 << 10 => usize)), 2);
        gpu.set("SOFTGPU_CONTEXT_CODE", "46");
        let mut context: P = std::ptr::null_mut();
        assert_eq!(cu!(gpu, cuDevicePrimaryCtxRetain(&raw mut context => *mut P, 0 => i32)), 46);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn contexts_belong_to_threads_and_streams_to_contexts() {
    let output = in_child("contexts_belong_to_threads_and_streams_to_contexts", &[("SOFTGPU_DEVICES", "2")], || {
        let gpu = Gpu::new();
        let (other, mut device) = (gpu.retain(1), -1);
        let set = |context| cu!(gpu, cuCtxSetCurrent(context => P));
        let (at, first) = (gpu.alloc(4), gpu.stream);
        assert_eq!(set(other), 0);
        assert_eq!((cu!(gpu, cuCtxGetDevice(&raw mut device => *mut i32)), device), (0, 1));
        let event = gpu.new_event();
        assert_eq!(cu!(gpu, cuEventRecord(event => P, first => P)), 400, "an event of another device");
        let source = r#"extern "C" __global__ void f(int* x) { *x = 1; }"#;
        let f = gpu.kernel(source, "f");
        assert_eq!(gpu.launch(f, first, [1, 1, 1], 1, 0, &[support::arg(&at)]), 400, "a stream of another device");
        let (mut free, mut total) = (0usize, 0usize);
        cu!(gpu, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize));
        assert_eq!(free, total, "memory is counted for each device");
        assert_eq!(cu!(gpu, cuDevicePrimaryCtxRelease_v2(1 => i32)), 0);
        assert_eq!(cu!(gpu, cuCtxSynchronize()), 709);
        assert_eq!((set(other), set(1 as P), set(std::ptr::null_mut())), (709, 201, 0));
        assert_eq!(cu!(gpu, cuCtxSynchronize()), 201);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn error_of_one_device_leaves_the_other_alone() {
    let output = in_child("error_of_one_device_leaves_the_other_alone", &[("SOFTGPU_DEVICES", "2")], || {
        let gpu = Gpu::with(&[("SOFTGPU_FAULT", "1:700")]);
        let source = r#"extern "C" __global__ void f() {}"#;
        gpu.launch(gpu.kernel(source, "f"), gpu.stream, [1, 1, 1], 1, 0, &[]);
        assert_eq!(gpu.synchronize(gpu.stream), 700);
        let other = gpu.retain(1);
        assert_eq!(cu!(gpu, cuCtxSetCurrent(other => P)), 0);
        let stream = gpu.new_stream();
        gpu.launch(gpu.kernel(source, "f"), stream, [1, 1, 1], 1, 0, &[]);
        assert_eq!(gpu.synchronize(stream), 0);
    });

    assert_ends_with(&output, 0);
}

#[test]
fn errors_have_names_and_descriptions() {
    let gpu = Gpu::new();
    let name = |code: u32| {
        let mut at = std::ptr::null();
        let found = cu!(gpu, cuGetErrorName(code => u32, &raw mut at => *mut *const i8));
        // SAFETY: a string of the library.
        (found, (!at.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(at.cast()) }.to_str().unwrap().to_owned()))
    };

    assert_eq!(name(700), (0, Some("CUDA_ERROR_ILLEGAL_ADDRESS".into())));
    assert_eq!(name(904), (0, Some("CUDA_ERROR_STREAM_CAPTURE_UNJOINED".into())));
    assert_eq!(name(12345), (1, None));
}

#[test]
fn functions_are_found_by_name_in_their_newest_version() {
    let gpu = Gpu::new();
    let (mut at, mut status) = (std::ptr::null_mut(), 9);

    let code = cu!(gpu, cuGetProcAddress_v2(c"cuMemAlloc".as_ptr().cast_mut().cast() => P, &raw mut at => *mut P, 13000 => i32,
        0 => u64, &raw mut status => *mut i32));

    assert_eq!((code, status), (0, 0));
    assert_eq!(at, *gpu.symbol::<unsafe extern "C" fn()>("cuMemAlloc_v2") as P);
}
