//! What the CUDA machine takes for granted of the driver and NCCL: order of streams, captures, codes of memory, aborts. The software
//! GPU's own tests check the same of the software GPU; where a driver differs, the software GPU must learn it.
#![allow(unsafe_code)] // C functions of NVIDIA's libraries.

use super::Report;
use crate::driver::{Driver, P, call};
use anyhow::{Result, ensure};
use phalanx_cuda::CudaDevice;
use std::time::{Duration, Instant};

/// Words of a buffer: enough that a copy takes longer than its launch.
const N: usize = 1 << 20;
/// Runs of a check whose mistakes show only sometimes.
const N_RUNS: u32 = 20;
/// Longer than an abort takes.
const PATIENCE: Duration = Duration::from_secs(10);

type Check = fn(&Driver) -> Result<()>;

const CHECKS: [(&str, Check); 11] = [
    ("an event orders two streams", event_orders_streams),
    ("a wait means the latest record before it", wait_means_the_latest_record),
    ("an event without timing has no time", event_without_timing),
    ("pageable memory may change once a copy from it is enqueued", pageable_copy),
    ("captured work runs at each launch and not before", captured_work),
    ("a capture that is not joined fails", unjoined_capture),
    ("synchronisation during a capture invalidates it", synchronisation_in_a_capture),
    ("allocation during a capture", allocation_in_a_capture),
    ("an allocation larger than the memory fails, and the next succeeds", too_large_allocation),
    ("a second free and a free of an inner address are refused", wrong_frees),
    ("an aborted communicator is gone at once", nccl_abort),
];

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let mut report = Report::new(&gpu.gpus()[0].name, &["check", "outcome"]);
    let driver = Driver::open(gpu)?;
    for (name, check) in CHECKS {
        let outcome = check(&driver);
        report.row(&[&name, &if outcome.is_ok() { "as expected" } else { "differs" }]);
        report.check(outcome.map_err(|error| error.context(name)));
    }
    Ok(report)
}

fn expect(what: &str, found: &[u32], expected: &[u32]) -> Result<()> {
    ensure!(found == expected, "{what}: codes {found:?}, expected {expected:?}");
    Ok(())
}

fn all_are(words: &[u32], expected: u32) -> Result<()> {
    let wrong = words.iter().position(|word| *word != expected);
    ensure!(wrong.is_none(), "word {} is {}, expected {expected}", wrong.unwrap_or(0), words[wrong.unwrap_or(0)]);
    Ok(())
}

fn event_orders_streams(d: &Driver) -> Result<()> {
    let (first, then, x, y) = (d.stream()?, d.stream()?, d.words(N)?, d.words(N)?);
    for run in 1..=N_RUNS {
        d.after(then, first)?;
        let codes = [d.set(x, 0, N, first)?, d.set(x, run, N, first)?];
        d.after(first, then)?;
        expect("enqueuing", &[codes[0], codes[1], d.copy(y, x, N, then)?], &[0; 3])?;
        all_are(&d.read(y, N)?, run)?;
    }
    Ok(())
}

fn wait_means_the_latest_record(d: &Driver) -> Result<()> {
    let (first, then, x, y) = (d.stream()?, d.stream()?, d.words(N)?, d.words(N)?);
    let event = d.event(false)?;
    let record = || Ok::<_, anyhow::Error>(call!(d, cuEventRecord(event => P, first => P)));
    let codes = [
        d.set(x, 1, N, first)?,
        record()?,
        d.set(x, 2, N, first)?,
        record()?,
        call!(d, cuStreamWaitEvent(then => P, event => P, 0 => u32)),
        d.copy(y, x, N, then)?,
    ];
    expect("enqueuing", &codes, &[0; 6])?;
    all_are(&d.read(y, N)?, 2)
}

fn event_without_timing(d: &Driver) -> Result<()> {
    let (stream, a, b) = (d.stream()?, d.event(false)?, d.event(false)?);
    let codes =
        [call!(d, cuEventRecord(a => P, stream => P)), call!(d, cuEventRecord(b => P, stream => P)), d.wait(stream)?];
    expect("recording", &codes, &[0; 3])?;
    let mut ms = 0f32;
    expect("time between them", &[call!(d, cuEventElapsedTime(&raw mut ms => *mut f32, a => P, b => P))], &[400])
}

/// Inputs of a step are copied from memory that is filled for the next step at once.
fn pageable_copy(d: &Driver) -> Result<()> {
    let (stream, x) = (d.stream()?, d.words(N)?);
    let mut words = vec![0u32; N];
    for run in 1..=N_RUNS {
        words.fill(run);
        // Work before it keeps the copy waiting.
        let before = d.set(x, 0, N, stream)?;
        let bytes = size_of_val(&words[..]);
        let copied = call!(d, cuMemcpyAsync(x => u64, words.as_ptr() as u64 => u64, bytes => usize, stream => P));
        words.fill(u32::MAX);
        expect("enqueuing", &[before, copied, d.wait(stream)?], &[0; 3])?;
        all_are(&d.read(x, N)?, run)?;
    }
    Ok(())
}

fn begin(d: &Driver, stream: P, mode: u32) -> Result<u32> {
    Ok(call!(d, cuStreamBeginCapture_v2(stream => P, mode => u32)))
}

/// Ends a capture: its graph or null, and the code.
fn end(d: &Driver, stream: P) -> Result<(P, u32)> {
    let mut graph: P = std::ptr::null_mut();
    let code = call!(d, cuStreamEndCapture(stream => P, &raw mut graph => *mut P));
    Ok((graph, code))
}

/// Relaxed to this thread: what other threads do does not disturb the capture.
const THREAD_LOCAL: u32 = 1;

fn captured_work(d: &Driver) -> Result<()> {
    let (stream, beside, x, y) = (d.stream()?, d.stream()?, d.words(N)?, d.words(N)?);
    expect("setting", &[d.set(x, 5, N, stream)?, d.set(y, 6, N, stream)?, d.wait(stream)?], &[0; 3])?;
    expect("beginning", &[begin(d, stream, THREAD_LOCAL)?], &[0])?;
    d.after(stream, beside)?;
    expect("capturing", &[d.copy(y, x, N, beside)?], &[0])?;
    d.after(beside, stream)?;
    let (graph, code) = end(d, stream)?;
    let mut exec: P = std::ptr::null_mut();
    let instantiated = call!(d, cuGraphInstantiateWithFlags(&raw mut exec => *mut P, graph => P, 0 => u64));
    expect("ending", &[code, instantiated], &[0; 2])?;

    all_are(&d.read(y, N)?, 6)?;
    for run in 1..=3 {
        let codes = [d.set(x, run, N, stream)?, call!(d, cuGraphLaunch(exec => P, stream => P))];
        expect("launching", &codes, &[0; 2])?;
        all_are(&d.read(y, N)?, run)?;
    }
    let codes = [call!(d, cuGraphExecDestroy(exec => P)), call!(d, cuGraphDestroy(graph => P))];
    expect("destroying", &codes, &[0; 2])
}

fn unjoined_capture(d: &Driver) -> Result<()> {
    let (stream, beside, x) = (d.stream()?, d.stream()?, d.words(N)?);
    expect("beginning", &[begin(d, stream, THREAD_LOCAL)?], &[0])?;
    d.after(stream, beside)?;
    expect("capturing", &[d.set(x, 1, N, beside)?], &[0])?;

    expect("ending", &[end(d, stream)?.1], &[904])?;
    expect("afterwards", &[d.set(x, 1, N, beside)?, d.wait(beside)?], &[0; 2])
}

fn synchronisation_in_a_capture(d: &Driver) -> Result<()> {
    let (stream, x) = (d.stream()?, d.words(N)?);
    for with_query in [false, true] {
        expect("beginning", &[begin(d, stream, THREAD_LOCAL)?], &[0])?;
        let code = if with_query { call!(d, cuStreamQuery(stream => P)) } else { d.wait(stream)? };
        let codes = [code, d.set(x, 1, N, stream)?, end(d, stream)?.1];
        expect("waiting, enqueuing, ending", &codes, &[900, 901, 901])?;
    }
    Ok(())
}

fn allocation_in_a_capture(d: &Driver) -> Result<()> {
    let stream = d.stream()?;
    let mut codes = Vec::new();
    for mode in 0..3 {
        expect("beginning", &[begin(d, stream, mode)?], &[0])?;
        let mut at = 0u64;
        codes.push(call!(d, cuMemAlloc_v2(&raw mut at => *mut u64, 4 => usize)));
        codes.push(end(d, stream)?.1);
    }
    expect("global, thread-local, relaxed", &codes, &[900, 901, 900, 901, 0, 0])
}

fn too_large_allocation(d: &Driver) -> Result<()> {
    let (mut free, mut total, mut at) = (0usize, 0usize, 0u64);
    expect("asking", &[call!(d, cuMemGetInfo_v2(&raw mut free => *mut usize, &raw mut total => *mut usize))], &[0])?;
    let too_large = call!(d, cuMemAlloc_v2(&raw mut at => *mut u64, total + (1 << 30) => usize));
    let none = call!(d, cuMemAlloc_v2(&raw mut at => *mut u64, 0 => usize));
    let fits = call!(d, cuMemAlloc_v2(&raw mut at => *mut u64, 4 * N => usize));
    expect("too large, nothing, fits", &[too_large, none, fits, call!(d, cuMemFree_v2(at => u64))], &[2, 1, 0, 0])
}

fn wrong_frees(d: &Driver) -> Result<()> {
    let at = d.words(N)?;
    let inner = call!(d, cuMemFree_v2(at + 4 => u64));
    let first = call!(d, cuMemFree_v2(at => u64));
    let second = call!(d, cuMemFree_v2(at => u64));
    expect("inner address, first, second", &[inner, first, second], &[1, 0, 1])
}

/// An identifier of NCCL, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

fn nccl_abort(d: &Driver) -> Result<()> {
    let (mut id, mut communicator, stream, x) = (UniqueId([0; 128]), std::ptr::null_mut(), d.stream()?, d.words(N)?);
    let codes = [
        call!(d, ncclGetUniqueId(&raw mut id => *mut UniqueId)),
        call!(d, ncclCommInitRank(&raw mut communicator => *mut P, 1 => i32, id => UniqueId, 0 => i32)),
        d.set(x, 3, N, stream)?,
        // 3 is u32, 0 the sum.
        call!(d, ncclAllReduce(x => u64, x => u64, N => usize, 3 => u32, 0 => u32, communicator => P, stream => P)),
    ];
    expect("connecting and summing", &codes, &[0; 4])?;
    all_are(&d.read(x, N)?, 3)?;
    let begin = Instant::now();
    expect("aborting", &[call!(d, ncclCommAbort(communicator => P))], &[0])?;
    ensure!(begin.elapsed() < PATIENCE, "the abort took {:.1} s", begin.elapsed().as_secs_f64());
    expect("the stream afterwards", &[d.set(x, 4, N, stream)?, d.wait(stream)?], &[0; 2])?;
    all_are(&d.read(x, N)?, 4)
}
