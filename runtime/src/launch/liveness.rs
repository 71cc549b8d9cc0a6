//! The liveness pipe: the launcher holds the reading end, the rank the writing end, as its standard input at first.
//!
//! The kernel reports the exit of a process (pidfd) only when all its threads have ended and their descriptors are closed. With
//! a GPU that takes long: the driver tears the context down when its descriptors are closed, and a thread that hangs in the
//! driver never ends. So a thread with a descriptor table of its own holds the pipe. It ends as soon as the process is to
//! end, whatever other threads do, and the pipe closes.

use std::io;
use std::sync::mpsc;

use super::sys;

/// Moves the pipe into the table of a thread of its own. Call it once, before any driver is loaded: the thread closes its
/// copies of the descriptors that are open now.
///
/// # Errors
/// When the system has no room for a thread, or does not allow a table of its own. The pipe then closes with the other
/// descriptors of the process.
pub(crate) fn hold() -> io::Result<()> {
    let (held, answer) = mpsc::channel();
    std::thread::Builder::new().name("liveness".into()).stack_size(64 << 10).spawn(move || {
        let outcome = sys::keep_stdin_alone();
        let is_held = outcome.is_ok();
        let _ = held.send(outcome);
        if is_held {
            loop {
                std::thread::park();
            }
        }
    })?;
    answer.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))?;
    sys::replace_stdin()
}
