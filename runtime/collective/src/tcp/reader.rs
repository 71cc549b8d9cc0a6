//! The thread that reads a connection: it handles announcements, and puts the bytes of tensors where they belong.
//!
//! Bytes of a tensor are read into their place, not through a buffer. The thread enters the group's gate for each read, which returns
//! at once with what the socket has, and waits for more outside of it.
#![allow(unsafe_code)] // Operands are raw memory.

use std::io::{ErrorKind, Read};
use std::mem::MaybeUninit;
use std::net::TcpStream;

use socket2::SockRef;

use super::frame::{BodyCheck, CHUNK_BYTES, FrameKind, HEADER_BYTES, Header, checksum};
use super::group::SharedGroup;
use super::plane::TcpPlane;
use phalanx_device::{CollectiveError, RawBuffer, Stream};

/// What a reader keeps between frames.
struct Reader {
    socket: TcpStream,
    /// Of a frame without a place of its own; aligned for the elements of a sum.
    body: Vec<u64>,
    /// The sources of a sum.
    sources: Vec<*const u8>,
}

impl Reader {
    /// Fills the start of the body with bytes of the connection.
    fn read_body(&mut self, len: usize) -> Result<&[u8], CollectiveError> {
        let body = &mut bytemuck::cast_slice_mut(&mut self.body)[..len];
        self.socket.read_exact(body).map_err(|error| io(&error))?;
        Ok(body)
    }
}

fn io(error: &std::io::Error) -> CollectiveError {
    CollectiveError::io("read", error)
}

impl TcpPlane {
    /// Reads frames until the connection ends.
    pub(super) fn read(&self, peer: u32, is_first: bool, socket: TcpStream) {
        let mut reader = Reader { socket, body: vec![0; CHUNK_BYTES / 8], sources: Vec::new() };
        let outcome = loop {
            match self.read_frame(peer, is_first, &mut reader) {
                Ok(true) => {}
                outcome => break outcome,
            }
        };
        match outcome {
            Ok(_) => {}
            // Connections for tensors end without a frame when a peer leaves.
            Err(CollectiveError::System { kind: ErrorKind::UnexpectedEof, .. }) if !is_first => {}
            Err(CollectiveError::System { kind, .. }) => self.lost(peer, is_first, kind),
            Err(error) => self.abort(&format!("rank {}: {error}", self.name())),
        }
    }

    /// Reads and handles one frame; returns whether another may follow.
    fn read_frame(&self, peer: u32, is_first: bool, reader: &mut Reader) -> Result<bool, CollectiveError> {
        let mut bytes = [0; HEADER_BYTES];
        reader.socket.read_exact(&mut bytes).map_err(|error| io(&error))?;
        let (header, mut check) = Header::open(&bytes, self.world().id(), self.world().name_of(peer))?;
        if is_first == (header.kind == FrameKind::Data) {
            let (field, expected, found) = ("kind of a frame on this connection", 0, 1);
            return Err(CollectiveError::Invalid { field, expected, found });
        }
        if header.kind == FrameKind::Data {
            let (group, position) = self.group_with(peer, &header)?;
            self.read_data(group, position, &header, check, reader)?;
            return Ok(true);
        }
        let body = reader.read_body(header.len as usize)?;
        check.add(body);
        check.verify()?;
        match header.kind {
            FrameKind::Abort => {
                self.abort(&String::from_utf8_lossy(body));
                return Ok(false);
            }
            FrameKind::Leave => {
                self.on_leave(peer);
                return Ok(false);
            }
            FrameKind::AbortGroup => {
                let (group, _) = self.group_with(peer, &header)?;
                self.on_abort_group(group, &String::from_utf8_lossy(body));
            }
            FrameKind::Announce | FrameKind::Data => {
                let (group, position) = self.group_with(peer, &header)?;
                let outcome = group.lock().on_announce(self, position, &header, body);
                outcome.inspect_err(|error| group.fail(error.clone()))?;
            }
        }
        Ok(true)
    }

    /// The group of a frame of rank `peer`, and the peer's position in it.
    fn group_with(&self, peer: u32, header: &Header) -> Result<(&SharedGroup, u32), CollectiveError> {
        let number = header.group as usize;
        let group = self.group(number)?;
        let n_groups = self.world().groups().len();
        let not_a_member = CollectiveError::NotAMember { rank: peer, group: number, n_groups };
        let position = group.lock().position_of(peer).ok_or(not_a_member)?;
        Ok((group, position))
    }

    /// Reads the bytes of a tensor from the member at `peer` into their place, and computes the sum that they make due.
    fn read_data(
        &self,
        group: &SharedGroup,
        peer: u32,
        header: &Header,
        mut check: BodyCheck,
        reader: &mut Reader,
    ) -> Result<(), CollectiveError> {
        let operation = (header.lane.seen_from_other_side(peer), header.index);
        let arrival = group.lock().on_data(peer, header);
        let arrival = arrival.inspect_err(|error| group.fail(error.clone()))?;
        let Some(arrival) = arrival else {
            // The group has failed, so the bytes are of no use.
            reader.read_body(header.len as usize)?;
            return Ok(());
        };
        match arrival.place {
            Some(place) if !read_into(group, operation, place, &mut check, reader)? => return Ok(()),
            Some(_) => {}
            None => check.add(reader.read_body(header.len as usize)?),
        }
        check.verify()?;
        let mut state = group.lock();
        let from = (peer, reader.body.as_ptr().cast());
        let Some(sum) = state.on_arrived(self, operation, &arrival, from, &mut reader.sources) else { return Ok(()) };
        let access = group.gate.enter();
        drop(state);
        // SAFETY: TCP-GROUP-2: the gate was entered while the operation was in its stream, so its memory is valid; all contributions
        // are in their place or in the body, which is aligned.
        let checksum = unsafe {
            sum.compute(&reader.sources);
            // While the sum is in cache: all peers get it with the same checksum.
            sum.is_sent.then(|| checksum(std::slice::from_raw_parts(sum.to.start().cast_const(), sum.to.bytes())))
        };
        // Not while waiting for the lock: who holds it may be waiting to enter, behind a thread that waits to pass.
        drop(access);
        group.lock().on_summed(self, operation, &sum, checksum);
        Ok(())
    }
}

/// Reads bytes of a tensor into their place, as long as their operation is in its stream; after it has ended, reads and forgets the
/// rest. Returns whether all bytes are in their place.
fn read_into(
    group: &SharedGroup,
    operation: (Stream, u64),
    place: RawBuffer,
    check: &mut BodyCheck,
    reader: &mut Reader,
) -> Result<bool, CollectiveError> {
    let mut left = place;
    while left.bytes() > 0 {
        let mut state = group.lock();
        if !state.has(operation) {
            drop(state);
            reader.read_body(left.bytes())?;
            return Ok(false);
        }
        let access = group.gate.enter();
        drop(state);
        // SAFETY: TCP-GROUP-2: the gate was entered while the operation was in its stream, so its memory is valid; each byte of a
        // tensor has one sender.
        let to = unsafe { std::slice::from_raw_parts_mut(left.start().cast::<MaybeUninit<u8>>(), left.bytes()) };
        match SockRef::from(&reader.socket).recv_with_flags(to, libc::MSG_DONTWAIT) {
            Ok(0) => return Err(io(&ErrorKind::UnexpectedEof.into())),
            Ok(n) => {
                // SAFETY: the socket has just filled them.
                check.add(unsafe { to[..n].assume_init_ref() });
                left = left.slice(n..left.bytes());
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                drop(access);
                match reader.socket.peek(&mut [0]) {
                    Err(error) if error.kind() != ErrorKind::Interrupted => return Err(io(&error)),
                    _ => {}
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io(&error)),
        }
    }
    Ok(true)
}
