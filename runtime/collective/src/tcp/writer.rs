//! The thread that writes a connection: announcements, and the bytes of tensors.
//!
//! Bytes of a tensor go from their place to the socket. The thread enters the group's gate for as long as the socket takes bytes at
//! once, and copies the others, for which it waits outside of the gate.
#![allow(unsafe_code)] // Operands are raw memory.

use std::io::{ErrorKind, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::atomic::Ordering;

use socket2::SockRef;

use super::commands::{WriterCommand, WriterQueue};
use super::frame::{CHUNK_BYTES, FrameKind, HEADER_BYTES, Header, Lane, checksum};
use super::group::SharedGroup;
use super::job::Job;
use super::plane::TcpPlane;

impl TcpPlane {
    /// Executes commands until one of them stops the writer.
    pub(super) fn write(&self, peer: u32, mut socket: TcpStream, commands: &WriterQueue) {
        // A frame that the socket does not take at once.
        let mut rest = Vec::with_capacity(HEADER_BYTES + CHUNK_BYTES);
        loop {
            let outcome = match commands.next() {
                WriterCommand::Frame(header, body) => {
                    let outcome = write_frame(&mut socket, &header, &body, &mut rest);
                    commands.recycle(body);
                    outcome
                }
                WriterCommand::Fetch(job) => self.write_job(&mut socket, &job, &mut rest),
                WriterCommand::Last(header, body) => {
                    let _ = write_frame(&mut socket, &header, &body, &mut rest);
                    break;
                }
                WriterCommand::Stop => break,
            };
            if let Err(error) = outcome {
                self.lost(peer, false, error.kind());
                break;
            }
        }
        commands.close();
        let _ = socket.shutdown(Shutdown::Write);
    }

    /// Sends the bytes of a job, chunk by chunk.
    fn write_job(&self, socket: &mut TcpStream, job: &Job, rest: &mut Vec<u8>) -> std::io::Result<()> {
        let Ok(group) = self.group(job.group) else { return Ok(()) };
        for start in job.range.clone().step_by(CHUNK_BYTES) {
            let range = start..job.range.end.min(start + CHUNK_BYTES);
            if !self.write_chunk(socket, group, job, range, rest)? {
                return Ok(());
            }
            socket.write_all(rest)?;
        }
        group.lock().on_sent(self, job);
        Ok(())
    }

    /// Sends what the socket takes at once of a chunk, and copies the others into `rest`. Returns false if the job's operation has
    /// left its stream.
    fn write_chunk(
        &self,
        socket: &TcpStream,
        group: &SharedGroup,
        job: &Job,
        range: Range<usize>,
        rest: &mut Vec<u8>,
    ) -> std::io::Result<bool> {
        let header = Header {
            group: job.group as u32,
            lane: Lane::of(job.stream),
            index: job.index,
            operand: job.operand,
            stage: job.stage,
            offset: range.start as u64,
            len: range.len() as u32,
            ..Header::bare(FrameKind::Data, self.world().id())
        };
        let mut state = group.lock();
        let Some(source) = state.source(job) else { return Ok(false) };
        let _access = group.gate.enter();
        drop(state);
        let from = source.slice(range);
        // SAFETY: TCP-GROUP-2: the gate was entered while the operation was in its stream, so its memory is valid; no thread writes
        // bytes that are still to be fetched: the sum of a chunk comes from a member that has this contribution to it.
        let body = unsafe { std::slice::from_raw_parts(from.start().cast_const(), from.bytes()) };
        let mut of_body = job.checksum.unwrap_or_else(|| checksum(body));
        if self.damages_next.load(Ordering::Relaxed) && self.damages_next.swap(false, Ordering::Relaxed) {
            of_body ^= 0x20;
        }
        send_now(socket, &header.seal(of_body), body, rest)?;
        Ok(true)
    }
}

/// Sends what the socket takes at once of a frame, and copies the others into `rest`.
fn send_now(socket: &TcpStream, header: &[u8], body: &[u8], rest: &mut Vec<u8>) -> std::io::Result<()> {
    rest.clear();
    let parts = [IoSlice::new(header), IoSlice::new(body)];
    let n = match SockRef::from(socket).send_vectored_with_flags(&parts, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
        sent => sent?,
    };
    rest.extend_from_slice(&header[n.min(header.len())..]);
    rest.extend_from_slice(&body[n.saturating_sub(header.len())..]);
    Ok(())
}

/// Sends a frame that is no chunk of a tensor.
fn write_frame(socket: &mut TcpStream, header: &Header, body: &[u8], rest: &mut Vec<u8>) -> std::io::Result<()> {
    send_now(socket, &header.seal(checksum(body)), body, rest)?;
    socket.write_all(rest)
}
