//! Limits that the system sets for a process.
#![allow(unsafe_code)] // Calls of the C library.

/// Prepares a process of this program, before it starts threads: as many open files as the system allows, since data sets have
/// thousands, and files that may not grow (`ulimit -f`) are a full disk instead of a deadly signal. Processes that it starts inherit
/// both. A program that embeds the runtime decides for itself; its ranks call this.
pub(crate) fn prepare_process() {
    let mut limit = open_files_limit();
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the limit is a local variable. A failure leaves the limit as it is.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// How many files this process may have open.
pub(crate) fn open_files() -> usize {
    usize::try_from(open_files_limit().rlim_cur).unwrap_or(usize::MAX)
}

fn open_files_limit() -> libc::rlimit {
    // What POSIX guarantees.
    let mut limit = libc::rlimit { rlim_cur: 20, rlim_max: 20 };
    // SAFETY: the limit is a local variable, which keeps its value on failure.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit
}
