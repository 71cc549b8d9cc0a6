//! A test device whose memory the host cannot address. It computes on the host, so results have the same bits, but `host`
//! returns `None`, and dereferencing one of its addresses ends the process.
#![allow(unsafe_code)] // `Machine` is an unsafe trait.

use phalanx_device::shared_memory::Arena;
use phalanx_device::span::{CopyError, Memory, Ring};
use phalanx_device::{AllocError, Backing, Device, ExecError, Machine, RawBuffer, Run, Space, ThreadError};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, Program, ValueId};
use phalanx_strategies::target::Target;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Set in every address: processors fault on such addresses.
const FAR: usize = 1 << 63;
const DEVICE: u32 = 7;

#[derive(Debug)]
pub(crate) struct Remote {
    host: Arc<dyn Device>,
    memory: Arc<RemoteMemory>,
    head_chunk_tokens: Option<usize>,
}

impl Remote {
    pub(crate) fn new() -> Remote {
        Remote { host: super::host(), memory: Arc::default(), head_chunk_tokens: None }
    }

    /// A device that asks for the logits of so many tokens at a time.
    pub(crate) fn with_head_chunks(tokens: usize) -> Remote {
        Remote { head_chunk_tokens: Some(tokens), ..Remote::new() }
    }

    fn far(&self, inner: Box<dyn Machine>) -> Box<dyn Machine> {
        Box::new(RemoteMachine { inner, memory: Arc::clone(&self.memory) })
    }
}

#[derive(Debug, Default)]
struct RemoteMemory {
    /// Holds of the state of all machines.
    n_holds: Mutex<usize>,
    /// Signalled when one ends.
    let_go: Condvar,
}

impl RemoteMemory {
    fn holds(&self) -> MutexGuard<'_, usize> {
        self.n_holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no state is held.
    fn await_holds(&self) {
        drop(self.let_go.wait_while(self.holds(), |n_holds| *n_holds > 0));
    }

    fn reach(&self, buffer: RawBuffer) -> *mut u8 {
        assert_eq!(buffer.space(), Space::Device(DEVICE));
        std::ptr::with_exposed_provenance_mut(buffer.address() & !FAR)
    }
}

impl Memory for RemoteMemory {
    fn ring(self: Arc<Self>, n_slots: usize, slot_bytes: usize) -> Result<Box<dyn Ring>, CopyError> {
        let slots = vec![vec![0; slot_bytes.div_ceil(size_of::<u64>())]; n_slots];
        Ok(Box::new(RemoteRing { memory: self, slots, slot_bytes, n_holds: 0 }))
    }
}

/// A ring whose copies are done when they begin.
#[derive(Debug)]
struct RemoteRing {
    memory: Arc<RemoteMemory>,
    slots: Vec<Vec<u64>>,
    slot_bytes: usize,
    n_holds: usize,
}

impl Ring for RemoteRing {
    unsafe fn read(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError> {
        let memory = self.memory.clone();
        let bytes = self.wait(slot)?;
        for (at, run) in runs {
            let to = &mut bytes[*at..at + run.bytes()];
            // SAFETY: the caller's contract; the machine has exposed its addresses.
            unsafe { std::ptr::copy_nonoverlapping(memory.reach(*run).cast_const(), to.as_mut_ptr(), to.len()) };
        }
        Ok(())
    }

    unsafe fn write(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError> {
        let memory = self.memory.clone();
        let bytes = self.wait(slot)?;
        for (at, run) in runs {
            let from = &bytes[*at..at + run.bytes()];
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), memory.reach(*run), from.len()) };
        }
        Ok(())
    }

    fn wait(&mut self, slot: usize) -> Result<&mut [u8], CopyError> {
        Ok(&mut bytemuck::cast_slice_mut(&mut self.slots[slot])[..self.slot_bytes])
    }

    fn hold(&mut self, _: RawBuffer) {
        self.n_holds += 1;
        *self.memory.holds() += 1;
    }

    fn let_go(&mut self) {
        *self.memory.holds() -= std::mem::take(&mut self.n_holds);
        self.memory.let_go.notify_all();
    }
}

impl Drop for RemoteRing {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[derive(Debug)]
struct RemoteMachine {
    inner: Box<dyn Machine>,
    memory: Arc<RemoteMemory>,
}

// SAFETY: every call is forwarded to the inner machine; `RemoteMemory` removes from addresses the bit that `place` sets.
unsafe impl Machine for RemoteMachine {
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError> {
        if part.end > c.phases.apply {
            self.memory.await_holds();
        }
        self.inner.run(c, part, with)
    }

    fn settle(&mut self) -> Result<(), ExecError> {
        self.inner.settle()
    }

    fn get(&self, c: &Compiled, v: ValueId, at: usize, to: &mut [u8]) {
        self.inner.get(c, v, at, to);
    }

    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]) {
        self.inner.put(c, v, at, from);
    }

    fn host(&self, _: &Compiled, _: ValueId) -> Option<&[u8]> {
        None
    }

    fn host_mut(&mut self, _: &Compiled, _: ValueId) -> Option<&mut [u8]> {
        None
    }

    fn place(&self, c: &Compiled, v: ValueId) -> RawBuffer {
        let here = self.inner.place(c, v);
        RawBuffer::on_device(here.address() | FAR, here.bytes(), DEVICE)
    }

    fn memory(&self) -> Option<Arc<dyn Memory>> {
        Some(self.memory.clone())
    }

    fn has(&self, c: &Compiled, v: ValueId) -> bool {
        self.inner.has(c, v)
    }

    fn allocated_bytes(&self) -> usize {
        self.inner.allocated_bytes()
    }

    fn bytes_in_shared(&self) -> usize {
        self.inner.bytes_in_shared()
    }

    fn remap(&mut self, memory: &Arena) {
        self.inner.remap(memory);
    }

    fn succeed(self: Box<Self>, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        self.memory.await_holds();
        let RemoteMachine { inner, memory } = *self;
        Ok(Box::new(RemoteMachine { inner: inner.succeed(programs, on)?, memory }))
    }
}

impl Target for Remote {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        self.host.target().scratch_bytes(program, instr)
    }

    fn head_chunk_tokens(&self) -> Option<usize> {
        self.head_chunk_tokens
    }
}

impl Device for Remote {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn target(&self) -> &dyn Target {
        self
    }

    fn machine(&self, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        Ok(self.far(self.host.machine(programs, on)?))
    }

    fn warm(&self, programs: &[&Compiled], shared: &Arena) -> Result<Box<dyn Machine>, AllocError> {
        Ok(self.far(self.host.warm(programs, shared)?))
    }

    fn shadow(&self, programs: &[&Compiled], memory: &Arena, first: usize) -> Box<dyn Machine> {
        self.far(self.host.shadow(programs, memory, first))
    }

    fn bytes_for(&self, programs: &[&Compiled]) -> usize {
        self.host.bytes_for(programs)
    }

    fn shared_bytes(&self, programs: &[&Compiled]) -> usize {
        self.host.shared_bytes(programs)
    }

    fn shadow_bytes(&self, programs: &[&Compiled]) -> usize {
        self.host.shadow_bytes(programs)
    }

    fn lasting_regions(&self, programs: &[&Compiled]) -> [(usize, bool); 3] {
        self.host.lasting_regions(programs)
    }

    fn peak_flops(&self, _: bool) -> f64 {
        1.0
    }

    fn has_fast_bf16(&self) -> bool {
        self.host.has_fast_bf16()
    }

    fn engine(&self, bf16: bool) -> &'static str {
        self.host.engine(bf16)
    }

    fn available_threads(&self) -> usize {
        self.host.available_threads()
    }

    fn lead(&self, n_threads: usize, work: Box<dyn FnOnce() + Send + '_>) -> Result<(), ThreadError> {
        self.host.lead(n_threads, work)
    }
}

/// The host, and a device whose memory the host cannot address.
pub(crate) fn both() -> [Arc<dyn Device>; 2] {
    [super::host(), Arc::new(Remote::new())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_device::span::STAGING_BYTES;
    use phalanx_strategies::passes::commit::StepPhases;
    use phalanx_strategies::passes::memory::memory;
    use phalanx_strategies::program::{DType, Kind};
    use std::convert::Infallible;

    /// A value larger than twice the staging buffer, and a value behind it.
    fn program(target: &dyn Target) -> (Compiled, ValueId, usize) {
        let n = 2 * STAGING_BYTES / size_of::<f32>() + 1000;
        let mut program = Program::default();
        let v = program.add_value("w", &[n], DType::F32, Kind::Parameter);
        program.add_value("behind", &[16], DType::F32, Kind::Parameter);
        let layout = memory(&program, target);
        (Compiled::new(program, layout, StepPhases { apply: 0, gather: 0, end: 0 }), v, n)
    }

    #[test]
    fn remote_elements_are_read_and_written_in_staged_pieces() {
        for device in both() {
            let (c, v, n) = program(device.target());
            let mut machine = device.machine(&[&c], &Backing::default()).unwrap();
            let (mut n_pieces, run) = (0, 5..n - 3);

            machine.fill(&c, v, run.clone(), |first, to| {
                (first..).zip(to).for_each(|(i, x)| *x = i as f32);
            });
            machine.edit(&c, v, 7..n - 5, |_, to: &mut [f32]| to.iter_mut().for_each(|x| *x += 1.0));
            let mut seen: Vec<f32> = Vec::new();
            let visited: Result<(), Infallible> = machine.visit(&c, v, 0..n, |piece| {
                n_pieces += 1;
                seen.extend_from_slice(piece);
                Ok(())
            });

            visited.unwrap();
            let edited = |i: usize| f32::from(u8::from((7..n - 5).contains(&i)));
            let expected = |i: usize| if run.contains(&i) { (i - 5) as f32 + edited(i) } else { 0.0 };
            assert!(seen.iter().enumerate().all(|(i, x)| *x == expected(i)) && seen.len() == n);
            assert_eq!(n_pieces, if device.name() == "remote" { 3 } else { 1 });
            assert_eq!(machine.read::<f32>(&c, ValueId(1)), [0.0; 16]);
        }
    }

    #[test]
    fn overlapping_rooms_are_rejected() {
        for device in both() {
            let (c, v, _) = program(device.target());
            let mut machine = device.machine(&[&c], &Backing::default()).unwrap();

            assert!(machine.spans_mut(&c, &[(v, 0..10), (v, 10..20), (ValueId(1), 0..16), (v, 4..4)]).is_some());
            assert!(machine.spans_mut(&c, &[(v, 0..10), (v, 20..30), (v, 9..10)]).is_none());
        }
    }
}
