//! A mapping for each OS thread that runs blocks: their state, their threads' stacks, their shared memory.
//! `shim/block.h` defines the layout.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Mutex;

const BYTES: usize = 128 << 20;

static ARENAS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The arena of the calling thread: zeros at first, aligned to its size.
pub extern "C" fn of_this_thread() -> *mut c_void {
    thread_local!(static ARENA: Cell<usize> = const { Cell::new(0) });
    let mut at = ARENA.get();
    if at == 0 {
        at = map();
        ARENA.set(at);
        ARENAS.lock().expect("no panic while arenas are held").push(at);
    }
    at as _
}

fn map() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping; what is not aligned of it is given back.
    unsafe {
        let map = libc::mmap(std::ptr::null_mut(), 2 * BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(map, libc::MAP_FAILED, "no address space for the stacks of a block");
        let (map, at) = (map as usize, (map as usize).next_multiple_of(BYTES));
        libc::munmap(map as _, at - map);
        libc::munmap((at + BYTES) as _, map + BYTES - at);
        at
    }
}

/// Whether an address lies in an arena, for the message of a crash.
pub fn contains(address: usize) -> bool {
    ARENAS.try_lock().is_ok_and(|a| a.iter().any(|at| (*at..at + BYTES).contains(&address)))
}
