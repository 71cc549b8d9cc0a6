//! The rank's end of the channel to its launcher.
#![allow(unsafe_code)] // Taking a descriptor by its number.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;

use serde::Serialize;

use super::error::LaunchError;
use super::frame::{FrameCutter, FrameError, encode_into};
use super::sys;

/// More than a frame about a step has: a step allocates nothing for it.
const EVENT_BYTES: usize = 4 << 10;

/// What a rank tells its launcher. Sending blocks while the launcher is behind.
#[derive(Debug)]
pub struct FrameSender {
    socket: UnixStream,
    /// The last frame, whose memory the next one takes: the device thread sends one per step.
    frame: Vec<u8>,
}

/// What a launcher tells its rank; read on a thread of its own.
#[derive(Debug)]
pub struct FrameReceiver {
    socket: UnixStream,
    cutter: FrameCutter,
}

/// Takes the channel that this process inherited under the number that its arguments name.
///
/// # Errors
/// [`LaunchError::NoChannel`] when the number is not that of a socket.
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

/// Takes the second socket to the launcher, which carries no frames but descriptors of shared memory.
///
/// # Errors
/// [`LaunchError::NoChannel`] when the number is not that of a socket.
///
/// # Safety
/// As [`adopt`].
pub unsafe fn adopt_fd_channel(fd: RawFd) -> Result<UnixStream, LaunchError> {
    // SAFETY: the caller's contract.
    unsafe { sys::inherited_socket(fd) }.ok_or(LaunchError::NoChannel { fd })
}

impl FrameSender {
    /// Sends into this socket.
    #[cfg(test)]
    pub(crate) fn into_socket(socket: UnixStream) -> FrameSender {
        FrameSender { socket, frame: Vec::new() }
    }

    /// Sends a value as a frame.
    ///
    /// # Errors
    /// When it is no frame, or the launcher is gone.
    pub fn send(&mut self, value: &impl Serialize) -> Result<(), FrameError> {
        encode_into(value, &mut self.frame)?;
        self.socket.write_all(&self.frame).map_err(|error| FrameError::Broken(error.to_string()))
    }
}

impl FrameReceiver {
    /// Waits for a frame; `None` once the launcher is gone.
    ///
    /// # Errors
    /// When what comes is no frame.
    pub fn receive(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self.cutter.next_frame()? {
                return Ok(Some(frame));
            }
            match self.socket.read(&mut buffer) {
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
