//! The CPU as a device.

use crate::executor::{CpuMachine, scratch_bytes};
use crate::{matmul, thread};
use phalanx_device::shared_memory::Arena;
use phalanx_device::{AllocError, Backing, Device, Machine, ThreadError};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Instr, Program};
use phalanx_strategies::target::Target;

/// The processors of this machine and their memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuDevice;

impl Target for CpuDevice {
    fn scratch_bytes(&self, program: &Program, instr: &Instr) -> usize {
        scratch_bytes(program, instr)
    }

    fn widens_operands(&self) -> bool {
        true
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn target(&self) -> &dyn Target {
        self
    }

    fn machine(&self, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        Ok(Box::new(CpuMachine::on(programs, on)?))
    }

    fn warm(&self, programs: &[&Compiled], shared: &Arena) -> Result<Box<dyn Machine>, AllocError> {
        Ok(Box::new(CpuMachine::warm(programs, shared)?))
    }

    fn shadow(&self, programs: &[&Compiled], memory: &Arena, first: usize) -> Box<dyn Machine> {
        Box::new(CpuMachine::within(programs, memory, first))
    }

    fn bytes_for(&self, programs: &[&Compiled]) -> usize {
        CpuMachine::bytes_for(programs)
    }

    fn shared_bytes(&self, programs: &[&Compiled]) -> usize {
        CpuMachine::shared_bytes(programs)
    }

    fn shadow_bytes(&self, programs: &[&Compiled]) -> usize {
        CpuMachine::bytes_within(programs)
    }

    fn lasting_regions(&self, programs: &[&Compiled]) -> [(usize, bool); 3] {
        CpuMachine::lasting_regions(programs)
    }

    fn peak_flops(&self, bf16: bool) -> f64 {
        matmul::peak_flops(bf16)
    }

    fn has_fast_bf16(&self) -> bool {
        matmul::fast_bf16()
    }

    fn engine(&self, bf16: bool) -> &'static str {
        matmul::engine_name(bf16)
    }

    fn available_threads(&self) -> usize {
        thread::available_threads()
    }

    fn lead(&self, n_threads: usize, work: Box<dyn FnOnce() + Send + '_>) -> Result<(), ThreadError> {
        thread::on_device_thread(n_threads, work)
    }
}
