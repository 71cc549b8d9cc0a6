//! libcuda: the functions that Phalanx calls, by the names that cuda.h gives.
//!
//! SAFETY, for all functions here: arguments are what cuda.h asks for. Addresses that results are written to are valid or
//! null, handles were given by this library, strings end in NUL. Handles are numbers, so a wrong one is refused.

mod context;
mod copy;
mod devices;
mod events;
mod functions;
mod graphs;
mod launches;
mod memories;
mod streams;

use crate::codes::{Code, INVALID_VALUE, NOT_PERMITTED, OK};
use crate::engine::engine;
use std::cell::Cell;
use std::ffi::c_void;

/// A handle or an address of the host.
type P = *mut c_void;
/// What a call does, without its checks.
type Outcome = Result<(), Code>;

/// Writes a result.
fn put<T>(at: *mut T, value: T) -> Outcome {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: by the caller of the C function.
    unsafe { at.write(value) };
    Ok(())
}

fn code(outcome: Outcome) -> Code {
    outcome.err().unwrap_or(OK)
}

/// A call that needs cuInit only.
fn call(f: impl FnOnce() -> Outcome) -> Code {
    let checked = || {
        devices::check_initialized()?;
        if is_in_host_function() { Err(NOT_PERMITTED) } else { Ok(()) }
    };
    code(checked().and_then(|()| f()))
}

/// A call that needs a context: `f` is given its device.
fn call_in_context(f: impl FnOnce(u32) -> Outcome) -> Code {
    call(|| {
        let device = context::current()?;
        match engine().lock().sticky(device) {
            OK => {}
            code => return Err(code),
        }
        f(device)
    })
}

thread_local!(static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) });

/// Runs a function of the program on the engine's thread; it may not call CUDA.
pub fn in_host_function(f: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    f();
    IN_HOST_FUNCTION.set(false);
}

fn is_in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// The device of the calling thread's context, for the other libraries.
pub fn current_device() -> Option<u32> {
    context::current().ok()
}
