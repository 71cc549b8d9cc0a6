//! Streams, events, host functions, memory operations.
#![allow(unsafe_code)]

mod support;

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use support::{Gpu, P, arg, cu};

const AFFINE: &str = r#"
extern "C" __global__ void affine(float* x, float factor, float add, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) x[i] = x[i] * factor + add;
}
"#;

/// `x = 0 x + 1` on one stream, then `x = 2 x` on another: 2, if the second comes behind the first.
fn two_streams(gpu: &Gpu, affine: P, has_event: bool) -> f32 {
    let (x, other) = (gpu.put(&[1f32; 64]), gpu.new_stream());
    gpu.sync();
    let go = |stream, factor: f32, add: f32| {
        assert_eq!(gpu.launch(affine, stream, [1, 1, 1], 32, 0, &[arg(&x), arg(&factor), arg(&add), arg(&64u32)]), 0);
    };
    go(gpu.stream, 0.0, 1.0);
    if has_event {
        gpu.after(gpu.stream, other);
    }
    go(other, 2.0, 0.0);
    if has_event {
        gpu.after(other, gpu.stream);
    }
    gpu.synchronize(other);
    gpu.sync();
    gpu.get::<f32>(x, 64)[63]
}

#[test]
fn missing_event_is_found_with_some_seeds_and_a_present_one_holds_with_all() {
    let gpu = Gpu::new();
    let affine = gpu.kernel(AFFINE, "affine");

    for seed in 0..4 {
        gpu.set("SOFTGPU_SEED", &seed.to_string());
        let right = |has_event| (0..16).filter(|_| two_streams(&gpu, affine, has_event) == 2.0).count();

        let (with, without) = (right(true), right(false));

        assert_eq!(with, 16, "seed {seed}");
        assert!((2..=14).contains(&without), "seed {seed}: {without} of 16 right without an event");
    }
}

#[test]
fn same_seed_gives_the_same_order() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let affine = gpu.kernel(AFFINE, "affine");
    let run = |seed: &str| {
        gpu.set("SOFTGPU_SEED", seed);
        (0..12).map(|_| two_streams(&gpu, affine, false).to_bits()).collect::<Vec<_>>()
    };

    let (one, other, again) = (run("5"), run("6"), run("5"));

    assert_eq!(one, again);
    assert_ne!(one, other);
}

#[test]
fn work_is_held_back_for_a_while_and_then_done_without_a_wait() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "20000")]);
    let word = gpu.pinned::<u32>(1);
    // SAFETY: pinned memory of one word.
    let read = || unsafe { AtomicU32::from_ptr(word) }.load(SeqCst);
    gpu.sync();

    cu!(gpu, cuStreamWriteValue32_v2(gpu.stream => P, word as u64 => u64, 7 => u32, 0 => u32));
    let at_once = (read(), cu!(gpu, cuStreamQuery(gpu.stream => P)));
    let start = std::time::Instant::now();
    while read() != 7 && start.elapsed().as_secs() < 20 {
        std::thread::yield_now();
    }

    assert_eq!(at_once, (u32::MAX, 600));
    assert_eq!(read(), 7);
}

#[test]
fn legacy_and_unknown_streams_are_refused() {
    let gpu = Gpu::new();
    let affine = gpu.kernel(AFFINE, "affine");
    let x = gpu.put(&[1f32]);

    for stream in [0usize, 1, 2, 0x1234, gpu.new_event() as usize] {
        let code = gpu.launch(affine, stream as P, [1, 1, 1], 1, 0, &[arg(&x), arg(&1f32), arg(&0f32), arg(&1u32)]);
        assert_eq!(code, 400, "{stream:#x}");
    }
}

#[test]
fn destroyed_stream_finishes_its_work() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let (at, other) = (gpu.put(&[1u32]), gpu.new_stream());
    gpu.sync();
    let streams = gpu.stat("streams");

    cu!(gpu, cuMemsetD32Async(at => u64, 5 => u32, 1 => usize, other => P));
    assert_eq!(cu!(gpu, cuStreamDestroy_v2(other => P)), 0);
    let use_after = cu!(gpu, cuStreamQuery(other => P));
    assert_eq!(cu!(gpu, cuCtxSynchronize()), 0);

    assert_eq!((use_after, gpu.get::<u32>(at, 1), gpu.stat("streams")), (400, vec![5], streams - 1));
}

#[test]
fn wait_for_an_event_means_its_latest_record_before_the_wait() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let (word, event, other) = (gpu.pinned::<u32>(2), gpu.new_event(), gpu.new_stream());
    // SAFETY: pinned memory of two words.
    unsafe { word.write_bytes(0, 2) };
    let wait_value =
        |stream, i: u64| cu!(gpu, cuStreamWaitValue32_v2(stream => P, word as u64 + 4 * i => u64, 1 => u32, 0 => u32));
    // The first record can be reached at once, the second only after the host writes the word.
    cu!(gpu, cuEventRecord(event => P, gpu.stream => P));
    cu!(gpu, cuStreamWaitEvent(other => P, event => P, 0 => u32));
    assert_eq!(wait_value(gpu.stream, 1), 0);
    cu!(gpu, cuEventRecord(event => P, gpu.stream => P));

    let first = gpu.synchronize(other);
    let second = cu!(gpu, cuEventQuery(event => P));
    // SAFETY: as above.
    unsafe { AtomicU32::from_ptr(word.add(1)) }.store(1, SeqCst);
    let third = cu!(gpu, cuEventSynchronize(event => P));

    assert_eq!((first, second, third), (0, 600, 0));
}

#[test]
fn wait_for_an_event_outlives_the_event() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "0")]);
    let (word, other) = (gpu.pinned::<u32>(1), gpu.new_stream());
    // SAFETY: pinned memory of one word.
    unsafe { *word = 0 };
    cu!(gpu, cuStreamWaitValue32_v2(gpu.stream => P, word as u64 => u64, 1 => u32, 1 => u32));

    gpu.after(gpu.stream, other);
    std::thread::sleep(std::time::Duration::from_millis(5));
    let before = cu!(gpu, cuStreamQuery(other => P));
    // SAFETY: as above.
    unsafe { AtomicU32::from_ptr(word) }.store(1, SeqCst);

    assert_eq!((before, gpu.synchronize(other)), (600, 0));
}

#[test]
fn time_between_events_is_that_of_the_work_between() {
    let gpu = Gpu::with(&[("SOFTGPU_SLOW_US", "3000")]);
    let affine = gpu.kernel(AFFINE, "affine");
    let (x, from, to) = (gpu.put(&[1f32]), gpu.new_event(), gpu.new_event());
    let mut ms = 0f32;
    let mut elapsed = |a, b| cu!(gpu, cuEventElapsedTime(&raw mut ms => *mut f32, a => P, b => P));

    let unrecorded = elapsed(from, to);
    cu!(gpu, cuEventRecord(from => P, gpu.stream => P));
    gpu.launch(affine, gpu.stream, [1, 1, 1], 1, 0, &[arg(&x), arg(&1f32), arg(&0f32), arg(&1u32)]);
    cu!(gpu, cuEventRecord(to => P, gpu.stream => P));
    gpu.sync();
    let recorded = elapsed(from, to);

    assert_eq!((unrecorded, recorded), (400, 0));
    assert!((3.0..3000.0).contains(&ms), "{ms}");
}

#[test]
fn events_without_timing_have_no_time() {
    let gpu = Gpu::new();
    let (mut event, mut ms) = (std::ptr::null_mut(), 0f32);
    assert_eq!(cu!(gpu, cuEventCreate(&raw mut event => *mut P, 2 => u32)), 0);
    cu!(gpu, cuEventRecord(event => P, gpu.stream => P));
    gpu.sync();

    assert_eq!(cu!(gpu, cuEventElapsedTime(&raw mut ms => *mut f32, event => P, event => P)), 400);
}

#[test]
fn host_function_runs_in_stream_order_and_may_not_call_cuda() {
    struct Seen {
        free: unsafe extern "C" fn(u64) -> u32,
        word: *const u32,
        saw: u32,
        code: u32,
    }
    unsafe extern "C" fn look(data: *mut u8) {
        // SAFETY: the test's own structure, which it leaves alone meanwhile.
        unsafe {
            let seen = &mut *data.cast::<Seen>();
            (seen.saw, seen.code) = (seen.word.read_volatile(), (seen.free)(0));
        }
    }
    let gpu = Gpu::new();
    let word = gpu.pinned::<u32>(1);
    let mut seen = Seen { free: *gpu.symbol("cuMemFree_v2"), word, saw: 0, code: 0 };

    cu!(gpu, cuStreamWriteValue32_v2(gpu.stream => P, word as u64 => u64, 3 => u32, 0 => u32));
    let data = (&raw mut seen).cast::<u8>();
    cu!(gpu, cuLaunchHostFunc(gpu.stream => P, look => unsafe extern "C" fn(*mut u8), data => *mut u8));
    gpu.sync();

    assert_eq!((seen.saw, seen.code), (3, 800));
}

#[test]
fn words_are_written_to_devices_and_mapped_memory_only() {
    let gpu = Gpu::new();
    let (at, mut host) = (gpu.alloc(8), [0u32; 2]);
    let write = |at: u64| cu!(gpu, cuStreamWriteValue32_v2(gpu.stream => P, at => u64, 1 => u32, 0 => u32));

    let codes = [write(at + 4), write(at + 8), write(at + 2), write(host.as_mut_ptr() as u64)];

    assert_eq!(codes, [0, 1, 1, 1]);
    assert_eq!(gpu.get::<u32>(at, 2), [u32::MAX, 1]);
}

#[test]
fn synchronous_copy_comes_behind_blocking_streams_only() {
    let gpu = Gpu::with(&[("SOFTGPU_HOLD_US", "500000")]);
    let (mut blocking, at, mut to) = (std::ptr::null_mut(), gpu.put(&[1u32]), [0u32]);
    assert_eq!(cu!(gpu, cuStreamCreate(&raw mut blocking => *mut P, 0 => u32)), 0);
    gpu.sync();

    for _ in 0..20 {
        cu!(gpu, cuMemsetD32Async(at => u64, 1 => u32, 1 => usize, blocking => P));
        cu!(gpu, cuMemsetD32Async(at => u64, 5 => u32, 1 => usize, blocking => P));
        cu!(gpu, cuMemcpyDtoH_v2(to.as_mut_ptr().cast() => P, at => u64, 4 => usize));
        assert_eq!(to, [5]);
    }
}

/// A copy to pinned memory of a stream that is not done while the setting is large.
#[test]
fn slow_copy_delays_its_own_stream_and_no_other_one() {
    let gpu = Gpu::with(&[("SOFTGPU_COPY_US", "1000000000")]);
    let affine = gpu.kernel(AFFINE, "affine");
    let (x, y, other, to) = (gpu.put(&[1f32; 64]), gpu.put(&[1f32; 64]), gpu.new_stream(), gpu.pinned::<f32>(64));
    gpu.sync();

    assert_eq!(cu!(gpu, cuMemcpyDtoHAsync_v2(to.cast() => P, x => u64, 256 => usize, other => P)), 0);
    let go = [arg(&y), arg(&2f32), arg(&0f32), arg(&64u32)];
    assert_eq!(gpu.launch(affine, gpu.stream, [1, 1, 1], 32, 0, &go), 0);
    gpu.sync();
    let (meanwhile, state) = (gpu.get::<f32>(y, 64)[63], cu!(gpu, cuStreamQuery(other => P)));
    gpu.set("SOFTGPU_COPY_US", "0");
    gpu.synchronize(other);

    assert_eq!((meanwhile, state), (2.0, 600), "the other stream has worked, and the copy is not done");
    // SAFETY: pinned memory of 64 elements, which the copy has filled.
    assert_eq!(unsafe { std::slice::from_raw_parts(to, 64) }, [1f32; 64]);
}
