//! Counts the allocations of the hot loop in a process where nothing else runs; a test harness has its own threads.
//!
//! `allocation_probe f32|bf16 THREADS`: prints the number of allocations of 20 steps on all threads, including the filling of
//! batches from documents, and the origin of the first ones to standard error.
//!
//! With other arguments it is the `phalanx` command line. Its rank processes count if `PHALANX_PROBE_DIR` names a folder: from
//! the appearance of the file `begin-0` in it to that of `end-0`, then from `begin-1` to `end-1`, and so on. After each window a
//! rank writes two counts to `PID.count-0` and so on: the allocations of its device thread and pool, and those of its connection
//! threads. `PID.trace` has the origin of the device thread's first ones.
#![allow(unsafe_code)] // `GlobalAlloc` is an unsafe trait

use anyhow::{Result, ensure};
use phalanx::config::datasets::DatasetType;
use phalanx::data::columns::Columns;
use phalanx::data::config::{DataConfig, DatasetConfig};
use phalanx::data::prepare::prepare;
use phalanx::data::rows::Rows;
use phalanx::data::tokenizer::Tokenizer;
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use phalanx_strategies::sampler::Sampler;
use phalanx_tests::step::{BenchProgram, small_model};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The system's allocator with counters.
struct Counting;

/// Allocations on all threads.
static N_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Whether a window is open.
static WATCHES: AtomicBool = AtomicBool::new(false);

/// Allocations within the window: of the device thread and its pool, and of connections.
static N_WATCHED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Number of allocations whose backtraces are shown.
const N_SHOWN: u64 = 3;

/// In a rank process: the folder of its counts. Threads of the control plane do not count there.
static PROBE_DIR: OnceLock<PathBuf> = OnceLock::new();

/// Prefixes of the names of watched threads, and the counter of each.
const WATCHED: [(&str, usize); 4] = [("device", 0), ("compute-", 0), ("state", 0), ("tcp-", 1)];

std::thread_local! {
    /// Whether this thread is showing a backtrace; allocations meanwhile do not count.
    static SHOWS: Cell<bool> = const { Cell::new(false) };
    /// The counter of this thread, if it has one; `None` until looked up.
    static COUNTER: Cell<Option<Option<usize>>> = const { Cell::new(None) };
}

fn count() {
    if SHOWS.get() {
        return;
    }
    N_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    let Some(counter) = WATCHES.load(Ordering::Acquire).then(counter).flatten() else { return };
    if N_WATCHED[counter].fetch_add(1, Ordering::SeqCst) < N_SHOWN && counter == 0 {
        SHOWS.set(true);
        show();
        SHOWS.set(false);
    }
}

fn counter() -> Option<usize> {
    if PROBE_DIR.get().is_none() {
        return Some(0);
    }
    COUNTER.get().unwrap_or_else(|| {
        // Reading the name from the kernel does not allocate.
        let mut name = [0; 16];
        let n = std::fs::File::open("/proc/thread-self/comm").and_then(|mut file| file.read(&mut name)).unwrap_or(0);
        let found = WATCHED.iter().find(|(begin, _)| name[..n].starts_with(begin.as_bytes()));
        let counter = found.map(|(_, counter)| *counter);
        COUNTER.set(Some(counter));
        counter
    })
}

fn show() {
    let thread = std::thread::current();
    let text = format!("thread {:?} allocates\n{}\n", thread.name(), std::backtrace::Backtrace::force_capture());
    let Some(dir) = PROBE_DIR.get() else {
        eprint!("{text}");
        return;
    };
    let file = std::fs::File::options().create(true).append(true).open(of_this_process(dir, "trace"));
    // A failed write only loses the backtrace, not the count.
    let _ = file.and_then(|mut file| file.write_all(text.as_bytes()));
}

fn of_this_process(dir: &Path, what: &str) -> PathBuf {
    dir.join(format!("{}.{what}", std::process::id()))
}

// SAFETY: every call is forwarded unchanged to the system's allocator, which keeps the contract.
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

/// Rows of packed documents, which exercise every way of filling a row.
fn rows(dir: &std::path::Path) -> Result<Rows> {
    let path = dir.join("documents.jsonl");
    let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", "hold the line ".repeat(1 + i % 4));
    std::fs::write(&path, (0..200).map(line).collect::<String>())?;
    let mut config = DataConfig::new(vec![DatasetConfig::new(path, DatasetType::Completion)], BATCH.seq_len);
    config.sample_packing = true;
    Ok(prepare(&config, &Tokenizer::bytes(), &dir.join("cache"), 4096, &|_| Ok(()))?.train)
}

/// Allocations of [`N_STEPS`] steps after [`N_WARM_UP`] steps that create threads and queues.
fn allocations_of_steps(bf16: bool, rows: &Rows) -> Result<u64> {
    let mut model = small_model();
    (model.n_layers, model.windows) = (2, vec![None; 2]);
    let mut step = BenchProgram::new(model, bf16, BATCH).allocate();
    let sampler = Sampler::new(7, rows.len() as u64, BATCH.n_rows as u64, true)?;
    let mut batch = Columns::new([Column::Ids, Column::Labels, Column::Positions, Column::DocStart], BATCH);
    let mut picked = vec![0; BATCH.n_rows];
    for i in 0..N_WARM_UP + N_STEPS {
        if i == N_WARM_UP {
            WATCHES.store(true, Ordering::SeqCst);
        }
        sampler.fill_step(i, 0, &mut picked);
        rows.fill(&picked, CounterRng::new(0), &mut batch)?;
        step.write_batch(&batch);
        ensure!(step.run().is_finite(), "step {i}: the loss is not a number");
    }
    WATCHES.store(false, Ordering::SeqCst);
    Ok(N_WATCHED[0].load(Ordering::SeqCst))
}

/// Counts in a rank process, one window after another, as the test requests.
fn count_while_asked(dir: &Path) -> std::io::Result<()> {
    let wait_for = |name: String| {
        while !dir.join(&name).exists() {
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    for window in 0.. {
        wait_for(format!("begin-{window}"));
        N_WATCHED.iter().for_each(|n| n.store(0, Ordering::SeqCst));
        WATCHES.store(true, Ordering::SeqCst);
        std::fs::write(of_this_process(dir, &format!("watches-{window}")), "")?;
        wait_for(format!("end-{window}"));
        WATCHES.store(false, Ordering::SeqCst);
        let [of_device, of_connections] = [0, 1].map(|counter: usize| N_WATCHED[counter].load(Ordering::SeqCst));
        // Renamed when complete, so that the test never reads half a file.
        let unnamed = of_this_process(dir, "unnamed");
        std::fs::write(&unnamed, format!("{of_device} {of_connections}"))?;
        std::fs::rename(unnamed, of_this_process(dir, &format!("count-{window}")))?;
    }
    Ok(())
}

fn print_allocations_of_steps(precision: &str, n_threads: &str) -> Result<()> {
    let (bf16, n_threads) = (precision == "bf16", n_threads.parse()?);
    let dir = tempfile::tempdir()?;
    let rows = rows(dir.path())?;
    let before = N_ALLOCATIONS.load(Ordering::SeqCst);
    drop(std::hint::black_box(vec![1u8; 100]));
    ensure!(N_ALLOCATIONS.load(Ordering::SeqCst) > before, "the allocator does not count");

    println!("{}", phalanx::devices::host().on_device_thread(n_threads, || allocations_of_steps(bf16, &rows))??);
    Ok(())
}

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        [precision @ ("f32" | "bf16"), n_threads] => {
            print_allocations_of_steps(precision, n_threads)?;
            return Ok(ExitCode::SUCCESS);
        }
        ["rank", ..] => {
            if let Some(dir) = std::env::var_os("PHALANX_PROBE_DIR") {
                let dir = PROBE_DIR.get_or_init(|| dir.into());
                let counts = std::thread::Builder::new().name("counts".into());
                counts.spawn(|| count_while_asked(dir).expect("the folder of the probe exists"))?;
            }
        }
        _ => {}
    }
    Ok(phalanx::cli::main(None))
}
