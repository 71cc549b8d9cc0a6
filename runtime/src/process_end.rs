//! The end of a rank's process.
#![allow(unsafe_code)] // The standard library runs destructors.

use std::io::Write;

/// Ends this process without the destructors of C libraries. A driver may block in them without a limit, and threads that still free
/// communicators crash beside them. The system frees what the process holds, on GPUs too.
pub(crate) fn end_with(code: i32) -> ! {
    // What is buffered for a closed stream has no reader.
    let _ = std::io::stdout().flush();
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}
