//! The rank's end of the channel to its launcher.
#![allow(unsafe_code)] // Takes descriptors by their numbers.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use serde::Serialize;

use super::error::LaunchError;
use super::frame::{FrameCutter, FrameError, enclose_into, encode_into};
use super::sys;

/// Initial capacity of the frame buffer, larger than a step event, so that a step does not allocate.
const EVENT_BYTES: usize = 4 << 10;

/// Sends frames from a rank to its launcher. Sending blocks while the launcher does not read.
#[derive(Debug)]
pub struct FrameSender {
    socket: UnixStream,
    /// Buffer of the last frame, reused by the next: the device thread sends one frame per step.
    frame: Vec<u8>,
}

/// Receives frames from the launcher, on a separate thread of the rank.
#[derive(Debug)]
pub struct FrameReceiver {
    socket: UnixStream,
    cutter: FrameCutter,
}

/// Takes the channel that this process inherited, by the descriptor number in its arguments.
///
/// # Errors
/// [`LaunchError::NoChannel`] when the descriptor is not a socket.
///
/// # Safety
/// The launcher opened the descriptor for this process, and nothing else owns it: this is called once per descriptor.
pub unsafe fn adopt(fd: RawFd) -> Result<(FrameSender, FrameReceiver), LaunchError> {
    // SAFETY: the caller's contract.
    let socket = unsafe { sys::inherited_socket(fd) }.ok_or(LaunchError::NoChannel { fd })?;
    let sender = socket.try_clone().map_err(|error| LaunchError::system("duplicate the channel", &error))?;
    Ok((
        FrameSender { socket: sender, frame: Vec::with_capacity(EVENT_BYTES) },
        FrameReceiver { socket, cutter: FrameCutter::default() },
    ))
}

/// Takes the second socket to the launcher, which passes descriptors of shared memory.
///
/// # Errors
/// [`LaunchError::NoChannel`] when the descriptor is not a socket.
///
/// # Safety
/// As [`adopt`].
pub unsafe fn adopt_fd_channel(fd: RawFd) -> Result<UnixStream, LaunchError> {
    // SAFETY: the caller's contract.
    unsafe { sys::inherited_socket(fd) }.ok_or(LaunchError::NoChannel { fd })
}

impl FrameSender {
    /// A sender to this socket.
    #[cfg(test)]
    pub(crate) fn into_socket(socket: UnixStream) -> FrameSender {
        FrameSender { socket, frame: Vec::new() }
    }

    /// Sends a value as a frame.
    ///
    /// # Errors
    /// When the value cannot be encoded, or the launcher is gone.
    pub fn send(&mut self, value: &impl Serialize) -> Result<(), FrameError> {
        encode_into(value, &mut self.frame)?;
        self.write()
    }

    /// Sends bytes as a frame.
    ///
    /// # Errors
    /// When there are too many, or the launcher is gone.
    pub fn send_bytes(&mut self, content: &[u8]) -> Result<(), FrameError> {
        enclose_into(content, &mut self.frame)?;
        self.write()
    }

    fn write(&mut self) -> Result<(), FrameError> {
        self.socket.write_all(&self.frame).map_err(|error| FrameError::Broken(error.to_string()))
    }
}

impl FrameReceiver {
    /// Waits for a frame; `None` once the launcher is gone.
    ///
    /// # Errors
    /// When the received bytes are not a frame.
    pub fn receive(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self.cutter.next_frame()? {
                return Ok(Some(frame));
            }
            // Only for arriving bytes: a thread that waits in `read` also wakes each time the launcher has read a frame of this
            // rank, because both directions share one socket.
            let mut readable = [libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            match sys::poll(&mut readable, None).and_then(|_| self.socket.read(&mut buffer)) {
                Ok(0) => {
                    return self.cutter.missing().map_or(Ok(None), |missing| Err(FrameError::CutShort { missing }));
                }
                Ok(n) => self.cutter.push(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(FrameError::Broken(error.to_string())),
            }
        }
    }
}
