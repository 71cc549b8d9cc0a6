//! Passing a world to another process over a Unix socket.
//!
//! The message holds the size of a staging area, and the descriptors of all memory as ancillary data. Each side checks
//! with the kernel (`SO_PEERCRED`) that the other is a process of the same user; mapping validates the memory again.
#![allow(unsafe_code)] // Ancillary data and credentials of sockets need libc.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::control::Control;
use super::world::ShmWorld;
use phalanx_device::CollectiveError;
use phalanx_device::shared_memory::SharedMemory;
use phalanx_device::world::{LOCAL_RANKS_MAX, World};

/// Control memory and an arena per rank.
const DESCRIPTORS_MAX: usize = 1 + LOCAL_RANKS_MAX as usize;
/// Space for a header and the descriptors, with a margin for a peer that sends too many.
const CONTROL_BYTES: usize = 1024;

/// A control buffer, aligned as the kernel requires.
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_BYTES]);

const _: () = assert!(CONTROL_BYTES > 32 + 4 * DESCRIPTORS_MAX);

/// Sends a world to a process of the same user; to the process `peer` only, if given.
///
/// # Errors
/// [`CollectiveError::Untrusted`]; [`CollectiveError::System`] if the socket fails.
pub fn send_world(socket: &UnixStream, world: &ShmWorld, peer: Option<u32>) -> Result<(), CollectiveError> {
    check_peer(socket, peer)?;
    let fds: Vec<libc::c_int> = world.memories().map(|memory| memory.fd().as_raw_fd()).collect();
    let mut body = world.staging_bytes().to_le_bytes();
    let mut iov = libc::iovec { iov_base: body.as_mut_ptr().cast(), iov_len: body.len() };
    let mut control = ControlBuffer([0; CONTROL_BYTES]);
    let fds_bytes = size_of_val(fds.as_slice());
    // SAFETY: pure arithmetic.
    let control_len = unsafe { libc::CMSG_SPACE(fds_bytes as u32) } as usize;
    let message = message(&mut iov, &mut control, control_len);
    // SAFETY: the control buffer holds one header and all descriptors (asserted above), so CMSG_FIRSTHDR is not null
    // and the data lies in the buffer; `fds` holds as many bytes as are copied.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(fds_bytes as u32) as _; // u32 in musl, usize in glibc
        std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), fds_bytes);
    }
    let n_sent = uninterrupted("sendmsg", || {
        // SAFETY: `message` points at buffers of this frame with their true lengths.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) }
    })?;
    expect_whole(body.len(), n_sent)
}

/// Receives a world, which must be `expected`, from a process of the same user; from the process `peer` only, if given.
/// Memory in `known` is not mapped again.
///
/// # Errors
/// As [`Control::attach`] and [`SharedMemory::attach`]; [`CollectiveError::Untrusted`]; [`CollectiveError::Invalid`] if
/// the message does not come from [`send_world`].
pub fn receive_world(
    socket: &UnixStream,
    expected: &World,
    peer: Option<u32>,
    known: &[Arc<SharedMemory>],
) -> Result<ShmWorld, CollectiveError> {
    check_peer(socket, peer)?;
    let mut body = [0u8; 8];
    let mut iov = libc::iovec { iov_base: body.as_mut_ptr().cast(), iov_len: body.len() };
    let mut control = ControlBuffer([0; CONTROL_BYTES]);
    let mut message = message(&mut iov, &mut control, CONTROL_BYTES);
    let n_received = uninterrupted("recvmsg", || {
        // SAFETY: `message` points at buffers of this frame with their true lengths.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) }
    })?;
    // Owning the descriptors first closes them on every error below.
    let mut fds = descriptors(&message).into_iter();
    expect_whole(body.len(), n_received)?;
    let truncated = message.msg_flags & libc::MSG_CTRUNC;
    if truncated != 0 {
        return Err(CollectiveError::Invalid { field: "truncated descriptors", expected: 0, found: truncated as u64 });
    }
    let Some(first) = fds.next() else {
        let expected = u64::from(expected.n_ranks()) + 1;
        return Err(CollectiveError::Invalid { field: "descriptors in the message", expected, found: 0 });
    };
    let control = Control::attach(first, expected)?;
    let arenas = fds.map(|fd| SharedMemory::attach_or_keep(fd, known)).collect::<Result<Vec<_>, _>>()?;
    ShmWorld::from_parts(control, arenas, u64::from_le_bytes(body))
}

/// Verifies the identity of the peer.
///
/// # Errors
/// [`CollectiveError::Untrusted`], [`CollectiveError::System`].
fn check_peer(socket: &UnixStream, process: Option<u32>) -> Result<(), CollectiveError> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the buffer is ours, of the given length, and outlives the call.
    let outcome = unsafe {
        let to = (&raw mut found).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut len)
    };
    if outcome != 0 {
        return Err(CollectiveError::last_os("getsockopt(SO_PEERCRED)"));
    }
    // SAFETY: a query without arguments that cannot fail.
    let user = unsafe { libc::geteuid() };
    if found.uid != user {
        return Err(CollectiveError::Untrusted { what: "user", expected: user, found: found.uid });
    }
    match process.filter(|expected| *expected != found.pid as u32) {
        Some(expected) => Err(CollectiveError::Untrusted { what: "process", expected, found: found.pid as u32 }),
        None => Ok(()),
    }
}

/// All descriptors that came with a message, each owned.
fn descriptors(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control buffer and its length; the macros walk it within that length. The data of
    // such a header is an array of descriptors whose length the header gives; each is new to this process and unowned.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let n = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                fds.extend((0..n).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    fds
}

/// Repeats a system call that a signal interrupted.
fn uninterrupted(call: &'static str, mut attempt: impl FnMut() -> isize) -> Result<usize, CollectiveError> {
    loop {
        let outcome = attempt();
        if let Ok(n) = usize::try_from(outcome) {
            return Ok(n);
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(CollectiveError::io(call, &error));
        }
    }
}

fn expect_whole(expected: usize, found: usize) -> Result<(), CollectiveError> {
    if expected == found {
        return Ok(());
    }
    Err(CollectiveError::Invalid { field: "bytes of a message", expected: expected as u64, found: found as u64 })
}

/// A message with one body buffer and the first `control_len` bytes of a control buffer.
fn message(iov: &mut libc::iovec, control: &mut ControlBuffer, control_len: usize) -> libc::msghdr {
    // SAFETY: `msghdr` is plain data for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control_len as _; // u32 in musl, usize in glibc
    message
}
