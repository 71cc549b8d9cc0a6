//! Implements the [`Machine`] interface for [`CpuMachine`].

use super::CpuMachine;
use super::buffer::Buffer;
use phalanx_device::shared_memory::Arena;
use phalanx_device::span::Memory;
use phalanx_device::{AllocError, Backing, ExecError, Machine, RawBuffer, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::ValueId;
use std::ops::Range;
use std::sync::Arc;

// SAFETY: arenas are mapped for the lifetime of the machine; only a mutable borrow of it writes them, and peers write only
// operands of collectives in flight. Offsets of values are multiples of 64 bytes from the start of a page or a cache line,
// and values overlap only where the memory pass allows it.
unsafe impl Machine for CpuMachine {
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError> {
        self.run_part(c, part, with)
    }

    /// A run is complete when it returns.
    fn settle(&mut self) -> Result<(), ExecError> {
        Ok(())
    }

    fn get(&self, c: &Compiled, v: ValueId, at: usize, to: &mut [u8]) {
        to.copy_from_slice(&self.bytes(c, v)[at..at + to.len()]);
    }

    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]) {
        self.bytes_mut(c, v)[at..at + from.len()].copy_from_slice(from);
    }

    fn host(&self, c: &Compiled, v: ValueId) -> Option<&[u8]> {
        Some(self.bytes(c, v))
    }

    fn host_mut(&mut self, c: &Compiled, v: ValueId) -> Option<&mut [u8]> {
        Some(self.bytes_mut(c, v))
    }

    fn place(&self, c: &Compiled, v: ValueId) -> RawBuffer {
        let buffer = self.buffer(c, v);
        RawBuffer::new(buffer.ptr, bytes_of(&buffer))
    }

    fn memory(&self) -> Option<Arc<dyn Memory>> {
        None
    }

    fn has(&self, c: &Compiled, v: ValueId) -> bool {
        CpuMachine::has(self, c, v)
    }

    fn allocated_bytes(&self) -> usize {
        CpuMachine::allocated_bytes(self)
    }

    fn bytes_in_shared(&self) -> usize {
        CpuMachine::bytes_in_shared(self)
    }

    fn remap(&mut self, memory: &Arena) {
        CpuMachine::remap(self, memory);
    }

    fn succeed(self: Box<Self>, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        Ok(Box::new(CpuMachine::succeed(*self, programs, on)?))
    }
}

impl CpuMachine {
    fn bytes(&self, c: &Compiled, v: ValueId) -> &[u8] {
        let buffer = self.buffer(c, v);
        // SAFETY: the value lies in an arena; no program runs while `self` is borrowed, and writers borrow it mutably.
        unsafe { std::slice::from_raw_parts(buffer.ptr, bytes_of(&buffer)) }
    }

    fn bytes_mut(&mut self, c: &Compiled, v: ValueId) -> &mut [u8] {
        let buffer = self.buffer(c, v);
        // SAFETY: the value lies in an arena, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(buffer.ptr, bytes_of(&buffer)) }
    }
}

const fn bytes_of(buffer: &Buffer) -> usize {
    buffer.len() * buffer.dtype.size_bytes()
}
