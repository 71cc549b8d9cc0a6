//! Linux system calls that are missing from the standard library, as safe functions where possible.
#![allow(unsafe_code)] // System calls, and the code between fork and exec.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// A descriptor of a process, readable when the process exits.
pub(super) fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers; the result is checked.
    let fd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) })?;
    // SAFETY: the descriptor is new and unowned. The kernel makes it close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Sends a signal to the process, which may have exited.
pub(super) fn pidfd_signal(process: BorrowedFd<'_>, signal: libc::c_int) -> io::Result<()> {
    let null = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: without a `siginfo` the call takes integers only.
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, null, 0) };
    match checked(sent) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        sent => sent.map(drop),
    }
}

/// Waits until one of the descriptors is ready, at most `timeout`; `false` when none is.
pub(super) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<bool> {
    // Rounded up, so that a wait for less than a millisecond is not a busy loop.
    let millis = timeout.map_or(-1, |t| t.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as libc::c_int);
    // SAFETY: the pointer and the length are those of one slice.
    let n = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
    Ok(checked(n.into())? > 0)
}

/// Makes reads and writes return at once.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both calls take a descriptor that lives and integers.
    let flags = checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) }.into())?;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags as libc::c_int | libc::O_NONBLOCK) }.into())
        .map(drop)
}

/// The cores on which this process may run, in order.
pub(super) fn allowed_cpus() -> io::Result<Vec<usize>> {
    // SAFETY: a set of bits, for which zero is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a local variable of the given size.
    checked(unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) }.into())?;
    // SAFETY: the number is below the size of the set.
    Ok((0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Signals that ask a whole job to end: the terminal's, and those with which batch systems, service managers and container
/// runtimes notify every process of a job before they kill it.
pub(crate) const REQUESTS_TO_END: [libc::c_int; 6] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGXCPU];

/// Signals of a terminal that suspend a process. Batch systems that suspend a job send the first of them to each of its processes
/// some seconds before they stop all with SIGSTOP. A launcher without a terminal does not obey it, so a rank that did would seem to hang.
const SUSPENDS: [libc::c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// Sends the signal to the process that started this one, if that handles it: another one would die of it.
pub(crate) fn pass_to_parent(signal: libc::c_int) {
    // SAFETY: the call has no arguments and cannot fail.
    let parent = unsafe { libc::getppid() };
    let status = std::fs::read_to_string(format!("/proc/{parent}/status")).unwrap_or_default();
    if handles(&status, signal) {
        // SAFETY: the call takes two integers. The parent lives at least as long as this process (`prepare`).
        unsafe { libc::kill(parent, signal) };
    }
}

/// Whether a process with this text in `/proc/PID/status` has a handler for the signal.
fn handles(status: &str, signal: libc::c_int) -> bool {
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

/// Prepares a command for a rank: the process dies with the thread that starts it, ignores requests to end and signals of
/// terminals (LAUNCH-5), runs on
/// these cores (on any core if the list is empty), and inherits these descriptors under their numbers.
pub(super) fn prepare(command: &mut Command, inherited: [RawFd; 2], cpus: &[usize]) {
    // SAFETY: a set of bits, for which zero is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the number is below the size of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    let is_bound = !cpus.is_empty();
    let launcher = std::process::id();
    let between_fork_and_exec = move || {
        // SAFETY: these are plain system calls on integers and on the set that the closure owns.
        unsafe {
            // An ignored signal stays ignored in the program that starts here, and in its children.
            for signal in REQUESTS_TO_END.into_iter().chain(SUSPENDS) {
                if libc::signal(signal, libc::SIG_IGN) == libc::SIG_ERR {
                    return Err(io::Error::last_os_error());
                }
            }
            checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL).into())?;
            // If the launcher died before the line above, the kernel does not send the signal.
            if libc::getppid() as u32 != launcher {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            if is_bound {
                checked(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set).into())?;
            }
            for fd in inherited {
                checked(libc::fcntl(fd, libc::F_SETFD, 0).into())?;
            }
        }
        Ok(())
    };
    // SAFETY: the closure neither allocates nor takes locks, so it may run in a fork of a process with threads; errors
    // made from a code do not allocate.
    unsafe { command.pre_exec(between_fork_and_exec) };
}

/// `MPOL_PREFERRED`. Processes that may use memory of one node only are killed when that is full.
const PREFERRED: libc::c_int = 1;
/// Most NUMA nodes of a machine.
const NODES_MAX: usize = 1024;

/// Prepares a command whose process runs on these cores and prefers memory of this NUMA node.
pub(super) fn start_near(command: &mut Command, cpus: &[usize], node: u32) {
    // SAFETY: a set of bits, for which zero is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the number is below the size of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    let mut nodes = [0u64; NODES_MAX / 64];
    if let Some(word) = nodes.get_mut(node as usize / 64) {
        *word = 1 << (node % 64);
    }
    let between_fork_and_exec = move || {
        // SAFETY: plain system calls on sets that the closure owns.
        unsafe {
            checked(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set).into())?;
            // Containers may refuse this; then memory comes from the node of the core that first uses it.
            libc::syscall(libc::SYS_set_mempolicy, PREFERRED, nodes.as_ptr(), NODES_MAX);
        }
        Ok(())
    };
    // SAFETY: as in `prepare`.
    unsafe { command.pre_exec(between_fork_and_exec) };
}

/// Takes a socket that this process inherited under a number; `None` if that descriptor is not a socket.
///
/// # Safety
/// Nothing else in this process owns or uses the descriptor: the launcher opened it for this call, which is made once.
pub(super) unsafe fn inherited_socket(fd: RawFd) -> Option<UnixStream> {
    // SAFETY: `stat` is plain data for which zero is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer is a local variable; for a number that is not a descriptor the call fails.
    let is_socket = unsafe { libc::fstat(fd, &raw mut stat) } == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK;
    if fd <= 2 || !is_socket {
        return None;
    }
    // SAFETY: the descriptor is open, as the call above showed, and unowned by the caller's contract. Child processes do
    // not inherit it.
    unsafe {
        libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        Some(UnixStream::from(OwnedFd::from_raw_fd(fd)))
    }
}

/// Gives the calling thread a descriptor table of its own, in which only standard input stays open.
pub(super) fn keep_stdin_alone() -> io::Result<()> {
    // SAFETY: affects the calling thread only. The first call fails or succeeds as a whole; the second closes the thread's own
    // copies, which nothing in it uses.
    unsafe {
        checked(libc::unshare(libc::CLONE_FILES).into())?;
        checked(libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0)).map(drop)
    }
}

/// Replaces standard input by nothing.
pub(super) fn replace_stdin() -> io::Result<()> {
    let nothing = std::fs::File::open("/dev/null")?;
    // SAFETY: both are open descriptors; nothing owns standard input.
    checked(unsafe { libc::dup2(nothing.as_raw_fd(), libc::STDIN_FILENO) }.into()).map(drop)
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
