//! Handing a segment to another process over a Unix socket.
#![allow(unsafe_code)] // Ancillary data of sockets is only reachable through libc.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::segment::Segment;
use super::{CollectiveError, GroupId};

/// Room for one control message with one descriptor, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Sends the descriptor of `segment`.
///
/// # Errors
/// [`CollectiveError::System`] if the socket refuses.
pub fn send_segment(socket: &UnixStream, segment: &Segment) -> Result<(), CollectiveError> {
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 64]);
    let message = message(&mut iov, &mut control);
    // SAFETY: `message` points at buffers of this frame; the control buffer has room for one header and one descriptor
    // (CMSG_SPACE(4) is 24 bytes), so CMSG_FIRSTHDR is not null and its data lies in the buffer.
    let n_sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(segment.fd().as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if n_sent == 1 { Ok(()) } else { Err(CollectiveError::last_os("sendmsg")) }
}

/// Receives a descriptor and attaches to its segment, which must be one of `expected`.
///
/// # Errors
/// As [`Segment::attach`]; [`CollectiveError::Invalid`] if the message carries no descriptor.
pub fn receive_segment(socket: &UnixStream, expected: GroupId) -> Result<Segment, CollectiveError> {
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 64]);
    let mut message = message(&mut iov, &mut control);
    // SAFETY: `message` points at buffers of this frame with their true lengths.
    let n_received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if n_received < 0 {
        return Err(CollectiveError::last_os("recvmsg"));
    }
    // SAFETY: the kernel filled the control buffer and its length; CMSG_FIRSTHDR is null if there is no message, and a
    // descriptor is read only from a message of that type and length. It is new to this process and owned by nobody.
    let fd = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let is_fd = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len == libc::CMSG_LEN(4) as usize;
        if !is_fd {
            return Err(CollectiveError::Invalid { field: "descriptors in the message", expected: 1, found: 0 });
        }
        OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<libc::c_int>().read_unaligned())
    };
    Segment::attach(fd, expected)
}

/// A message of one byte with room for one descriptor.
fn message(iov: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: `msghdr` is plain data for which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: pure arithmetic.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    message
}
