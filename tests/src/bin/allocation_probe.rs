//! Counts what the hot loop allocates, on all threads, in a process in which nothing else runs: a test harness has
//! threads of its own.
//!
//! `allocation_probe f32|bf16 THREADS`: prints the number of allocations of 20 steps, batches filled from documents
//! included, and to standard error where the first of them came from.
#![allow(unsafe_code)] // an allocator can be written in no other way

use anyhow::{Result, bail, ensure};
use phalanx::config::datasets::DatasetType;
use phalanx::data::config::{DataConfig, DatasetConfig};
use phalanx::data::prepare::prepare;
use phalanx::data::rows::{BatchMut, Rows};
use phalanx::data::tokenizer::Tokenizer;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::sampler::Sampler;
use phalanx_tests::step::{BenchProgram, bench_model};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The system's allocator, counting.
struct Counting;

/// Calls that asked for memory, on all threads.
static N_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The next allocation shows its backtrace.
static WATCHED: AtomicBool = AtomicBool::new(false);

std::thread_local! {
    /// This thread is showing a backtrace, whose own allocations do not count.
    static SHOWS: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if SHOWS.get() {
        return;
    }
    N_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    if WATCHED.swap(false, Ordering::SeqCst) {
        SHOWS.set(true);
        let thread = std::thread::current();
        eprintln!("thread {:?} allocates\n{}", thread.name(), std::backtrace::Backtrace::force_capture());
        SHOWS.set(false);
    }
}

// SAFETY: every call goes to the system's allocator unchanged, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BATCH: BatchShape = BatchShape { n_rows: 2, seq_len: 64 };
const N_WARM_UP: u64 = 5;
const N_STEPS: u64 = 20;

/// Rows of packed documents, so that every way of filling a row is on the path.
fn rows(dir: &std::path::Path) -> Result<Rows> {
    let path = dir.join("documents.jsonl");
    let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", "hold the line ".repeat(1 + i % 4));
    std::fs::write(&path, (0..200).map(line).collect::<String>())?;
    let mut config = DataConfig::new(vec![DatasetConfig::new(path, DatasetType::Completion)], BATCH.seq_len);
    config.sample_packing = true;
    Ok(prepare(&config, &Tokenizer::bytes(), &dir.join("cache"), 4096, &|_| {})?.train)
}

/// Allocations of [`N_STEPS`] steps behind [`N_WARM_UP`], in which threads and their queues come to be.
fn allocations_of_steps(bf16: bool, rows: &Rows) -> Result<u64> {
    let mut model = bench_model();
    (model.n_layers, model.windows) = (2, vec![None; 2]);
    let mut step = BenchProgram::new(model, bf16, BATCH).allocate();
    let sampler = Sampler::new(7, rows.len() as u64, BATCH.n_rows as u64, true)?;
    let [mut ids, mut labels, mut positions, mut doc_start] = [const { [0i32; BATCH.n_tokens()] }; 4];
    let mut picked = vec![0; BATCH.n_rows];
    let mut before = 0;
    for i in 0..N_WARM_UP + N_STEPS {
        if i == N_WARM_UP {
            before = N_ALLOCATIONS.load(Ordering::SeqCst);
            WATCHED.store(true, Ordering::SeqCst);
        }
        sampler.fill_step(i, 0, &mut picked);
        let mut batch =
            BatchMut { ids: &mut ids, labels: &mut labels, positions: &mut positions, doc_start: &mut doc_start };
        rows.fill(&picked, &mut batch);
        step.write_batch(&ids, &labels, &positions, &doc_start);
        ensure!(step.run().is_finite(), "step {i}: the loss is not a number");
    }
    let n = N_ALLOCATIONS.load(Ordering::SeqCst) - before;
    WATCHED.store(false, Ordering::SeqCst);
    Ok(n)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, precision, n_threads] = &args[..] else { bail!("usage: allocation_probe f32|bf16 THREADS") };
    let (bf16, n_threads) = (precision == "bf16", n_threads.parse()?);
    let dir = tempfile::tempdir()?;
    let rows = rows(dir.path())?;
    let before = N_ALLOCATIONS.load(Ordering::SeqCst);
    drop(std::hint::black_box(vec![1u8; 100]));
    ensure!(N_ALLOCATIONS.load(Ordering::SeqCst) > before, "the allocator does not count");

    println!("{}", phalanx::devices::host().on_device_thread(n_threads, || allocations_of_steps(bf16, &rows))??);
    Ok(())
}
