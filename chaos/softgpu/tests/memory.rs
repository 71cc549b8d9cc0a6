//! Memory of devices and pinned memory.
#![allow(unsafe_code)]

mod support;

use support::{Gpu, P, arg, assert_ends_with, cu, in_child};

const SCALE: &str = r#"
extern "C" __global__ void scale(float* x, float factor, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) x[i] *= factor;
}
"#;

fn scale(gpu: &Gpu, at: u64, n: u32) -> u32 {
    gpu.launch(gpu.kernel(SCALE, "scale"), gpu.stream, [1, 1, 1], 64, 0, &[arg(&at), arg(&2f32), arg(&n)])
}

#[test]
fn new_memory_holds_not_a_number_in_every_type() {
    let gpu = Gpu::new();

    let words: Vec<u32> = gpu.get(gpu.alloc(400), 100);

    assert!(words.iter().all(|w| f32::from_bits(*w).is_nan() && *w == u32::MAX));
}

#[test]
fn allocation_larger_than_what_is_free_fails_and_frees_count() {
    let gpu = Gpu::with(&[("SOFTGPU_MEMORY", "64K")]);
    let free = || {
        let (mut free, mut total) = (0usize, 0usize);
        assert_eq!(cu!(gpu, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize)), 0);
        free
    };
    let before = free();

    let first = gpu.alloc(before);
    let mut second = 0;
    let refused = cu!(gpu, cuMemAlloc_v2(&raw mut second => *mut u64, 1 => usize));
    let full = free();
    assert_eq!(cu!(gpu, cuMemFree_v2(first => u64)), 0);
    let after = free();
    gpu.set("SOFTGPU_MEMORY", "4G");

    assert_eq!((refused, full, after), (2, 0, before));
}

#[test]
fn second_free_and_free_of_an_inner_address_are_refused() {
    let gpu = Gpu::new();
    let at = gpu.alloc(1024);

    let inner = cu!(gpu, cuMemFree_v2(at + 256 => u64));
    let first = cu!(gpu, cuMemFree_v2(at => u64));
    let second = cu!(gpu, cuMemFree_v2(at => u64));

    assert_eq!((inner, first, second), (1, 0, 1));
}

#[test]
fn kernel_that_leaves_its_memory_ends_the_process() {
    let output = in_child("kernel_that_leaves_its_memory_ends_the_process", &[], || {
        let gpu = Gpu::new();
        scale(&gpu, gpu.put(&[1f32; 64]), 65);
        gpu.sync();
    });

    let stderr = assert_ends_with(&output, 87);

    assert!(stderr.contains("kernel scale touched") && stderr.contains("byte 256 of an allocation of 256"), "{stderr}");
}

#[test]
fn kernel_that_writes_into_the_padding_ends_the_process() {
    let output = in_child("kernel_that_writes_into_the_padding_ends_the_process", &[], || {
        let gpu = Gpu::new();
        let source = r#"extern "C" __global__ void fill(float* x) { x[threadIdx.x] = 1.0f; }"#;
        let at = gpu.alloc(63 * 4);
        gpu.launch(gpu.kernel(source, "fill"), gpu.stream, [1, 1, 1], 64, 0, &[arg(&at)]);
        gpu.sync();
    });

    let stderr = assert_ends_with(&output, 87);

    assert!(stderr.contains("kernel fill wrote behind the end of an allocation of 252"), "{stderr}");
}

#[test]
fn use_of_freed_memory_ends_the_process() {
    let output = in_child("use_of_freed_memory_ends_the_process", &[], || {
        let gpu = Gpu::new();
        let at = gpu.put(&[1f32; 64]);
        assert_eq!(cu!(gpu, cuMemFree_v2(at => u64)), 0);
        gpu.alloc(256);
        scale(&gpu, at, 64);
        gpu.sync();
    });

    let stderr = assert_ends_with(&output, 87);

    assert!(stderr.contains("of an allocation of 256 on device 0, freed"), "{stderr}");
}

#[test]
fn host_that_touches_device_memory_ends_the_process() {
    let output = in_child("host_that_touches_device_memory_ends_the_process", &[], || {
        let gpu = Gpu::new();
        let at = gpu.put(&[1f32; 64]);
        gpu.sync();
        // SAFETY: none; the test is that this ends the process.
        println!("{}", unsafe { *((at + 8) as *const f32) });
    });

    let stderr = assert_ends_with(&output, 86);

    assert!(stderr.contains("the host touched") && stderr.contains("byte 8 of an allocation of 256"), "{stderr}");
}

#[test]
fn fault_of_the_program_itself_ends_it_by_the_signal() {
    let output = in_child("fault_of_the_program_itself_ends_it_by_the_signal", &[], || {
        let _gpu = Gpu::new();
        // SAFETY: none; the test is that the process ends by the signal.
        unsafe { std::ptr::null_mut::<u32>().wrapping_add(4).write_volatile(1) };
    });

    assert_eq!(output.status.code(), None, "{output:?}");
}

#[test]
fn misaligned_access_ends_the_process() {
    let output = in_child("misaligned_access_ends_the_process", &[], || {
        let gpu = Gpu::new();
        let source = r#"extern "C" __global__ void f(float* x) { *(float4*)(x + 1) = make_float4(1, 2, 3, 4); }"#;
        let at = gpu.alloc(64);
        gpu.launch(gpu.kernel(source, "f"), gpu.stream, [1, 1, 1], 1, 0, &[arg(&at)]);
        gpu.sync();
    });

    let stderr = assert_ends_with(&output, 87);

    assert!(stderr.contains("kernel f made an access that is not aligned"), "{stderr}");
}

#[test]
fn pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_at_once() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let pinned = gpu.pinned::<u32>(1);
    let mut pageable = vec![1u32];
    let (a, b) = (gpu.alloc(4), gpu.alloc(4));
    // SAFETY: pinned memory of one word.
    unsafe { *pinned = 1 };

    cu!(gpu, cuMemcpyHtoDAsync_v2(a => u64, pinned.cast() => P, 4 => usize, gpu.stream => P));
    cu!(gpu, cuMemcpyHtoDAsync_v2(b => u64, pageable.as_mut_ptr().cast() => P, 4 => usize, gpu.stream => P));
    // SAFETY: as above.
    unsafe { *pinned = 2 };
    pageable[0] = 2;
    std::hint::black_box(&pageable);

    assert_eq!((gpu.get::<u32>(a, 1), gpu.get::<u32>(b, 1)), (vec![2], vec![1]));
}

#[test]
fn target_of_a_copy_holds_poison_until_it_was_waited_for() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let (at, pinned) = (gpu.put(&[7u32]), gpu.pinned::<u32>(1));
    gpu.sync();
    // SAFETY: pinned memory of one word, also below.
    unsafe { *pinned = 5 };

    cu!(gpu, cuMemcpyDtoHAsync_v2(pinned.cast() => P, at => u64, 4 => usize, gpu.stream => P));
    let early = unsafe { pinned.read_volatile() };
    gpu.sync();
    let late = unsafe { pinned.read_volatile() };

    assert_eq!((early, late), (u32::MAX, 7));
}

#[test]
fn copy_to_pageable_memory_returns_when_it_is_done() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let at = gpu.put(&[7u32]);
    let mut to = [0u32];

    cu!(gpu, cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast() => P, at => u64, 4 => usize, gpu.stream => P));

    assert_eq!(to, [7]);
}

#[test]
fn synchronous_copies_and_sets_are_done_when_they_return() {
    let gpu = Gpu::new();
    let (a, b) = (gpu.alloc(16), gpu.alloc(16));
    let (from, mut to) = ([1u32, 2, 3, 4], [0u32; 4]);

    assert_eq!(cu!(gpu, cuMemcpyHtoD_v2(a => u64, from.as_ptr().cast_mut().cast() => P, 16 => usize)), 0);
    assert_eq!(cu!(gpu, cuMemcpyDtoD_v2(b => u64, a => u64, 16 => usize)), 0);
    assert_eq!(cu!(gpu, cuMemsetD32_v2(b + 4 => u64, 9 => u32, 1 => usize)), 0);
    assert_eq!(cu!(gpu, cuMemsetD16_v2(b + 8 => u64, 0x101 => u16, 1 => usize)), 0);
    assert_eq!(cu!(gpu, cuMemsetD8_v2(b + 12 => u64, 1 => u8, 2 => usize)), 0);
    assert_eq!(cu!(gpu, cuMemcpyDtoH_v2(to.as_mut_ptr().cast() => P, b => u64, 16 => usize)), 0);

    assert_eq!(to, [1, 9, 0x101, 0x101]);
}

#[test]
fn copies_and_sets_outside_of_an_allocation_are_refused() {
    let gpu = Gpu::new();
    let at = gpu.alloc(16);
    let mut host = [0u8; 32];
    let h = host.as_mut_ptr().cast();

    let codes = [
        cu!(gpu, cuMemcpyHtoDAsync_v2(at => u64, h => P, 17 => usize, gpu.stream => P)),
        cu!(gpu, cuMemcpyDtoHAsync_v2(h => P, at + 1 => u64, 16 => usize, gpu.stream => P)),
        cu!(gpu, cuMemcpyDtoDAsync_v2(at => u64, h as u64 => u64, 16 => usize, gpu.stream => P)),
        cu!(gpu, cuMemsetD8Async(at + 16 => u64, 0 => u8, 1 => usize, gpu.stream => P)),
        cu!(gpu, cuMemsetD32Async(at + 2 => u64, 0 => u32, 1 => usize, gpu.stream => P)),
    ];

    assert_eq!(codes, [1; 5]);
}

#[test]
fn registered_memory_is_pinned_until_it_is_unregistered() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let mut host = vec![1u32; 64];
    let (h, at) = (host.as_mut_ptr(), gpu.alloc(4));
    let register = |flags| cu!(gpu, cuMemHostRegister_v2(h.cast() => P, 256 => usize, flags => u32));
    let unregister = || cu!(gpu, cuMemHostUnregister(h.cast() => P));
    let mut mapped = 0u64;

    let codes = [unregister(), register(0), register(0)];
    let unmapped = cu!(gpu, cuMemHostGetDevicePointer_v2(&raw mut mapped => *mut u64, h.cast() => P, 0 => u32));
    cu!(gpu, cuMemcpyHtoDAsync_v2(at => u64, h.cast() => P, 4 => usize, gpu.stream => P));
    // SAFETY: the vector lives.
    unsafe { h.write_volatile(2) };
    let copied = gpu.get::<u32>(at, 1);

    assert_eq!((codes, unmapped, copied), ([713, 0, 712], 1, vec![2]));
    assert_eq!((unregister(), register(2)), (0, 0));
    assert_eq!(cu!(gpu, cuMemHostGetDevicePointer_v2(&raw mut mapped => *mut u64, h.cast() => P, 0 => u32)), 0);
    assert_eq!((mapped, unregister()), (h as u64, 0));
}

#[test]
fn address_range_and_kind_of_a_pointer_are_known() {
    let gpu = Gpu::new();
    let (at, host) = (gpu.alloc(1000), gpu.pinned::<u8>(10));
    let (mut start, mut bytes, mut kinds) = (0u64, 0usize, [0u32; 2]);

    assert_eq!(
        cu!(gpu, cuMemGetAddressRange_v2(&raw mut start => *mut u64, &raw mut bytes => *mut usize, at + 999 => u64)),
        0
    );
    for (kind, pointer) in kinds.iter_mut().zip([at, host as u64]) {
        assert_eq!(cu!(gpu, cuPointerGetAttribute(std::ptr::from_mut(kind) => *mut u32, 2 => i32, pointer => u64)), 0);
    }

    assert_eq!((start, bytes, kinds), (at, 1000, [2, 1]));
}
