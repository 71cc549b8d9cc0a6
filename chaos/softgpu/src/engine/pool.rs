//! OS threads that run blocks together with the engine's; they live as long as the process.

use crate::memory::{crash, open_to_this_thread};
use std::ffi::c_void;
use std::sync::{Condvar, Mutex};

/// Runs on each thread that takes part.
type Work = unsafe extern "C" fn(*mut c_void);

#[derive(Default)]
struct State {
    job: Option<(Work, usize)>,
    /// Counts jobs.
    number: u64,
    /// Threads that still have to begin the job, and those that have not ended it.
    to_begin: u32,
    to_end: u32,
    n_threads: u32,
}

struct Pool {
    state: Mutex<State>,
    start: Condvar,
    end: Condvar,
}

static POOL: Pool = Pool {
    state: Mutex::new(State { job: None, number: 0, to_begin: 0, to_end: 0, n_threads: 0 }),
    start: Condvar::new(),
    end: Condvar::new(),
};

/// Calls `work` on `n_os` threads, one of them the caller's, and returns when all are done.
pub extern "C" fn parallel(work: Work, data: *mut c_void, n_os: u32) {
    const HELD: &str = "no panic while the pool is held";
    let helpers = n_os.saturating_sub(1);
    let mut state = POOL.state.lock().expect(HELD);
    while state.n_threads < helpers {
        state.n_threads += 1;
        let name = format!("softgpu-{}", state.n_threads);
        std::thread::Builder::new().name(name).spawn(serve).expect("the system has room for one more thread");
    }
    state.job = Some((work, data as usize));
    state.number += 1;
    (state.to_begin, state.to_end) = (helpers, helpers);
    drop(state);
    POOL.start.notify_all();
    // SAFETY: the caller gives a function with its argument.
    unsafe { work(data) };
    let mut state = POOL.state.lock().expect(HELD);
    // Threads that were too late to begin are not waited for.
    state.to_end -= state.to_begin;
    state.to_begin = 0;
    while state.to_end > 0 {
        state = POOL.end.wait(state).expect(HELD);
    }
}

fn serve() {
    const HELD: &str = "no panic while the pool is held";
    let _end = super::AbortOnPanic;
    open_to_this_thread();
    crash::register_worker();
    let mut state = POOL.state.lock().expect(HELD);
    let mut last = 0;
    loop {
        if state.to_begin == 0 || state.number == last {
            state = POOL.start.wait(state).expect(HELD);
            continue;
        }
        last = state.number;
        state.to_begin -= 1;
        let (work, data) = state.job.expect("a job was started");
        drop(state);
        // SAFETY: as in `parallel`, which waits for the end.
        unsafe { work(data as *mut c_void) };
        state = POOL.state.lock().expect(HELD);
        state.to_end -= 1;
        if state.to_end == 0 {
            POOL.end.notify_one();
        }
    }
}
