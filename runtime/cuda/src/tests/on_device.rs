//! Host operands for a communicator of device operands: the tests of host communicators run over it.

use crate::gpu::{DeviceMemory, Gpu};
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, Operand, Operation, OperationKind, RawBuffer, Stream, Ticket,
};
use std::sync::Arc;

/// Moves operands to the device when an operation starts, and results back when it is finished. Operands that overlap on the
/// host overlap in the same way on the device.
pub struct OnDevice {
    gpu: Arc<Gpu>,
    inner: Box<dyn Collective>,
    in_flight: Vec<InFlight>,
}

struct InFlight {
    stream: Stream,
    index: u64,
    pieces: Vec<Piece>,
}

/// Memory of the host and its copy on the device.
struct Piece {
    host: RawBuffer,
    copy: DeviceMemory,
    /// What it must contain at the end, if the operation only reads it.
    unchanged: Option<Vec<u8>>,
}

impl OnDevice {
    /// Over the communicator `inner` for operands of `gpu`.
    pub fn new(gpu: Arc<Gpu>, inner: Box<dyn Collective>) -> OnDevice {
        OnDevice { gpu, inner, in_flight: Vec::new() }
    }

    /// A copy on the device, with the contents if `is_read`; else the software GPU's poison.
    fn piece(&self, host: RawBuffer, is_read: bool, is_written: bool) -> Piece {
        let copy = self.gpu.allocate(host.bytes()).unwrap();
        // SAFETY: the operation may read the buffer, by the contract of `start`.
        let bytes = if is_read { unsafe { bytes_of(host) }.to_vec() } else { Vec::new() };
        // SAFETY: new memory of this GPU.
        unsafe { self.gpu.write(copy.address, &bytes) }.unwrap();
        Piece { host, copy, unchanged: (is_read && !is_written).then_some(bytes) }
    }

    fn on_device(&self, operation: &Operation, operand: &Operand, pieces: &mut Vec<Piece>) -> Operand {
        let position = self.position();
        let (send, recv) = (operand.send, operand.recv);
        let is_read = match operation.kind {
            OperationKind::Broadcast { root } => root == position,
            _ => true,
        };
        let at = |piece: &Piece, buffer: RawBuffer| {
            let offset = buffer.address() - piece.host.address();
            RawBuffer::on_device(piece.copy.address as usize + offset, buffer.bytes(), self.gpu.ordinal)
        };
        let mut moved = |buffer: RawBuffer, is_read, is_written| {
            pieces.push(self.piece(buffer, is_read, is_written));
            at(pieces.last().expect("just pushed"), buffer)
        };
        if is_read && send.overlaps(recv) {
            let whole = moved(send, true, true);
            let start = recv.address() - send.address();
            return Operand { send: whole, recv: whole.slice(start..start + recv.bytes()), ..*operand };
        }
        let recv_moved = moved(recv, false, true);
        let send = if send == recv { recv_moved } else { moved(send, is_read, false) };
        Operand { send, recv: recv_moved, ..*operand }
    }
}

impl Collective for OnDevice {
    fn position(&self) -> u32 {
        self.inner.position()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let mut pieces = Vec::new();
        let moved: Vec<Operand> = operands.iter().map(|o| self.on_device(operation, o, &mut pieces)).collect();
        // SAFETY: the copies live until the operation is finished.
        let ticket = unsafe { self.inner.start(operation, &moved) }?;
        self.in_flight.push(InFlight { stream: ticket.stream, index: ticket.index, pieces });
        Ok(ticket)
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let found = self.in_flight.iter().position(|w| (w.stream, w.index) == (ticket.stream, ticket.index));
        let work = found.map(|i| self.in_flight.swap_remove(i));
        self.inner.finish(ticket)?;
        for piece in work.into_iter().flat_map(|work| work.pieces) {
            let mut found = vec![0; piece.host.bytes()];
            // SAFETY: memory of this GPU, as long as the buffer.
            unsafe { self.gpu.read(piece.copy.address, &mut found) }.unwrap();
            match piece.unchanged {
                Some(expected) => assert!(found == expected, "an operand was written that is only read"),
                // SAFETY: the operation may write the buffer, by the contract of `start`.
                None => unsafe { bytes_of(piece.host) }.copy_from_slice(&found),
            }
        }
        Ok(())
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        self.inner.control()
    }
}

/// # Safety
/// The buffer is valid, in host memory and not otherwise accessed while the slice exists.
unsafe fn bytes_of<'a>(buffer: RawBuffer) -> &'a mut [u8] {
    if buffer.bytes() == 0 {
        return &mut [];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(buffer.start(), buffer.bytes()) }
}
