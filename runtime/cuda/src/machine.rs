//! The machine: the regions of programs in the memory of a GPU, and the execution of programs over them.
//!
//! A program is lowered when it first runs; after that a step only replays commands. Everything runs on one stream, in the
//! order of the program.

use crate::command::{Command, Ready};
use crate::error::CudaError;
use crate::gpu::{DeviceMemory, Event};
use crate::kernels::CompileError;
use crate::lower::lower;
use crate::shared::Shared;
use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena;
use phalanx_device::span::Memory;
use phalanx_device::{AllocError, Backing, ElementType, ExecError, Machine, Operand, RawBuffer, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::program::{Collective, CollectiveKind, DType, Instr, Op, Program, ValueId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const REGIONS: [Region; 5] =
    [Region::Parameters, Region::OptimizerState, Region::Offloaded, Region::Constants, Region::Work];

/// Instructions between two marks of the GPU's progress. A mark costs the GPU one or two microseconds.
const MARK_EVERY: usize = 16;

/// The regions that outlast a step.
const LASTING: [Region; 3] = [Region::Parameters, Region::OptimizerState, Region::Offloaded];

/// Bytes of a region: those of the largest of the programs.
pub(crate) fn region_bytes(programs: &[&Compiled], region: Region) -> usize {
    programs.iter().map(|c| c.layout.bytes(region)).max().unwrap_or(0)
}

/// Bytes of all regions.
pub(crate) fn bytes_for(programs: &[&Compiled]) -> usize {
    REGIONS.into_iter().map(|region| region_bytes(programs, region)).sum()
}

/// The regions that outlast a step: bytes, and that none is in shared memory.
pub(crate) fn lasting_regions(programs: &[&Compiled]) -> [(usize, bool); 3] {
    LASTING.map(|region| (region_bytes(programs, region), false))
}

/// A program and what its instructions enqueue.
#[derive(Debug)]
struct Lowered {
    program: Program,
    /// First command of each instruction, and the number of commands.
    starts: Vec<usize>,
    commands: Vec<Ready>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct CudaMachine {
    shared: Arc<Shared>,
    regions: BTreeMap<Region, DeviceMemory>,
    lowered: Vec<Lowered>,
    /// Marks the end of each instruction when times are measured; kept between runs.
    events: Vec<Event>,
}

impl CudaMachine {
    /// Allocates the regions; takes those of `before` that fit.
    ///
    /// # Errors
    /// When the GPU has too little memory.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        programs: &[&Compiled],
        mut before: BTreeMap<Region, DeviceMemory>,
    ) -> Result<CudaMachine, AllocError> {
        let gpu = &shared.gpu;
        let fits = bytes_for(programs) <= gpu.memory_bytes().1;
        let mut regions = BTreeMap::new();
        for region in REGIONS {
            let bytes = region_bytes(programs, region);
            let failed = |e: CudaError| AllocError { bytes, source: shared.refusal(e, programs) };
            let memory = match before.remove(&region).filter(|memory| memory.bytes == bytes) {
                Some(memory) => memory,
                None => {
                    let is_pinned = region == Region::Offloaded;
                    let allocated =
                        if is_pinned { gpu.allocate_pinned(bytes) } else { gpu.allocate_patiently(bytes, fits) };
                    let memory = allocated.map_err(failed)?;
                    if region != Region::Work && !is_pinned {
                        // SAFETY: just allocated.
                        unsafe { gpu.zero(memory.address, bytes) }.map_err(failed)?;
                    }
                    memory
                }
            };
            regions.insert(region, memory);
        }
        Ok(CudaMachine { shared: shared.clone(), regions, lowered: Vec::new(), events: Vec::new() })
    }

    /// A machine that has loaded the kernels of the programs and has no buffers; for [`Machine::succeed`].
    pub(crate) fn without_buffers(shared: &Arc<Shared>, programs: &[&Compiled]) -> CudaMachine {
        let machine =
            CudaMachine { shared: shared.clone(), regions: BTreeMap::new(), lowered: Vec::new(), events: Vec::new() };
        for (c, instr) in programs.iter().flat_map(|c| c.program.instrs.iter().map(move |instr| (c, instr))) {
            // Kernels do not depend on addresses, except that two operands may be the same memory.
            let (commands, _) = lower(&c.program, instr, |v| (u64::from(v.0) + 1) << 40, 0).finish();
            for command in commands {
                if let Command::Launch(launch) = command
                    && let Err(error) = shared.kernels.load(&shared.gpu, &launch.kernel, launch.shared_bytes)
                {
                    // The first step reports it.
                    tracing::debug!(%error, "cannot load a kernel in advance");
                }
            }
        }
        machine
    }

    fn address(&self, c: &Compiled, v: ValueId) -> u64 {
        let value = c.program.value(v);
        let location = c.layout.locations[v.0 as usize].expect("the memory pass places every accessed value");
        let memory = &self.regions[&location.region];
        assert!(location.offset + value.size_bytes() <= memory.bytes, "a place lies inside its region");
        memory.address + location.offset as u64
    }

    /// The address of byte `at` of a value; `n` bytes from there on are the value's.
    fn bytes_of(&self, c: &Compiled, v: ValueId, at: usize, n: usize) -> u64 {
        assert!(at + n <= c.program.value(v).size_bytes(), "bytes {at}..{} of {}", at + n, c.program.describe_value(v));
        self.address(c, v) + at as u64
    }

    /// Index of the lowered program; lowers it if it has not run before.
    fn lowered(&mut self, c: &Compiled) -> Result<usize, ExecError> {
        if let Some(i) = self.lowered.iter().position(|lowered| lowered.program == c.program) {
            return Ok(i);
        }
        self.shared.gpu.bind().map_err(|e| failed(&e))?;
        let (scratch, scratch_bytes) = c.layout.scratch;
        let scratch = self.regions[&Region::Work].address + scratch as u64;
        let (mut starts, mut commands) = (Vec::new(), Vec::new());
        for instr in &c.program.instrs {
            starts.push(commands.len());
            let (lowered, taken) = lower(&c.program, instr, |v| self.address(c, v), scratch).finish();
            assert!(taken <= scratch_bytes, "{} takes {taken} bytes of scratch of {scratch_bytes}", instr.op.name());
            for command in lowered {
                commands.push(self.shared.ready(command).map_err(|e| failed(&e))?);
            }
        }
        starts.push(commands.len());
        self.lowered.push(Lowered { program: c.program.clone(), starts, commands });
        Ok(self.lowered.len() - 1)
    }

    fn instruction(&mut self, c: &Compiled, lowered: usize, i: usize, groups: &mut Groups) -> Result<(), ExecError> {
        let instr = &c.program.instrs[i];
        match &instr.op {
            // SAFETY: the verifier keeps operands and results of a collective untouched until it is awaited, and the
            // memory pass keeps their places.
            Op::Start(collective) => unsafe { self.start(c, instr, collective, groups) },
            Op::Await(collective) => Ok(groups.finish(collective)?),
            Op::Opaque { model, .. } => {
                Err(ExecError::Opaque { model: *model, reason: "user-defined models run on the CPU only".into() })
            }
            _ => {
                let Lowered { starts, commands, .. } = &self.lowered[lowered];
                for command in &commands[starts[i]..starts[i + 1]] {
                    // SAFETY: lowering placed all operands in this machine's regions, inside their bounds; everything
                    // that accesses them runs on the compute stream.
                    unsafe { self.shared.enqueue(command) }.map_err(|e| failed(&e))?;
                }
                Ok(())
            }
        }
    }

    /// # Safety
    /// Until the collective is finished, the results are not touched and the operands not written.
    unsafe fn start(
        &self,
        c: &Compiled,
        instr: &Instr,
        collective: &Collective,
        groups: &mut Groups,
    ) -> Result<(), ExecError> {
        let n = instr.reads.len().max(instr.writes.len());
        let value = |v: Option<&ValueId>| v.map(|v| (self.place(c, *v), c.program.value(*v)));
        let operand = |i: usize| {
            let (send, recv) = (value(instr.reads.get(i)), value(instr.writes.get(i)));
            let whole = if collective.kind == CollectiveKind::AllGather { recv.or(send) } else { send.or(recv) };
            let (_, whole) = whole.expect("an operation has operands or results");
            Operand {
                send: send.map_or(RawBuffer::EMPTY, |(place, _)| place),
                recv: recv.map_or(RawBuffer::EMPTY, |(place, _)| place),
                dtype: element_type(whole.dtype),
                n_elements: whole.n_elements(),
            }
        };
        // SAFETY: the caller's contract.
        unsafe { groups.start(collective, (0..n).map(operand)) }?;
        Ok(())
    }

    /// Appends the time of each instruction between the recorded events.
    fn measured(&self, n: usize, timings: &mut phalanx_device::Timings) -> Result<(), CudaError> {
        self.shared.gpu.synchronize()?;
        for pair in self.events[..=n].windows(2) {
            timings.push(pair[1].since(&pair[0])?);
        }
        Ok(())
    }

    fn mark(&mut self, i: usize) -> Result<(), CudaError> {
        while self.events.len() <= i {
            self.events.push(Event::new(&self.shared.gpu)?);
        }
        self.events[i].record(self.shared.gpu.compute)
    }
}

fn failed(error: &dyn std::fmt::Display) -> ExecError {
    ExecError::Device { reason: error.to_string() }
}

const fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::Bf16 => ElementType::Bf16,
        DType::F16 => ElementType::F16,
        DType::F64 => ElementType::F64,
        DType::I32 => ElementType::I32,
    }
}

/// A GPU with too little memory for the programs of a job.
#[derive(Debug, thiserror::Error)]
#[error(
    "{device} has {} of {} MiB free, and the job needs {} MiB: use a smaller micro_batch_size or sequence_len, \
     gradient_checkpointing, more ranks, or end other processes on the GPU",
    free >> 20,
    total >> 20,
    needed.div_ceil(1 << 20)
)]
struct TooLittleMemory {
    device: String,
    free: usize,
    total: usize,
    needed: usize,
    #[source]
    source: CudaError,
}

impl TooLittleMemory {
    /// Memory that others hold may become free; a job that needs more than there is never fits.
    fn kind(&self) -> std::io::ErrorKind {
        if self.needed > self.total { std::io::ErrorKind::OutOfMemory } else { std::io::ErrorKind::ResourceBusy }
    }
}

impl Shared {
    /// Why the driver refused memory.
    fn refusal(&self, source: CudaError, programs: &[&Compiled]) -> std::io::Error {
        if source.code != CudaError::OUT_OF_MEMORY {
            return std::io::Error::other(source);
        }
        let (free, total) = self.gpu.memory_bytes();
        let (device, needed) = (self.gpu.name.clone(), bytes_for(programs));
        let error = TooLittleMemory { device, free, total, needed, source };
        std::io::Error::new(error.kind(), error)
    }

    /// Compiles the kernel or plans the product of a command.
    fn ready(&self, command: Command) -> Result<Ready, CompileError> {
        Ok(match command {
            Command::Launch(mut launch) => {
                let kernel = self.kernels.load(&self.gpu, &launch.kernel, launch.shared_bytes)?;
                let pointers = launch.args.pointers();
                Ready::Launch { kernel, launch, pointers }
            }
            Command::Copy { from, to, bytes } => Ready::Copy { from, to, bytes },
            Command::Zero { at, bytes } => Ready::Zero { at, bytes },
            Command::Product(product) => Ready::Product(self.products.plan(&self.gpu, product)?),
        })
    }

    /// # Safety
    /// The command's memory is this GPU's, and only work of the compute stream accesses it.
    unsafe fn enqueue(&self, command: &Ready) -> Result<(), CudaError> {
        let (gpu, driver) = (&self.gpu, self.gpu.libraries.driver);
        // SAFETY: the caller's contract; arguments live in the command, and the driver copies them.
        unsafe {
            match command {
                Ready::Launch { kernel, launch, pointers } => {
                    let [x, y, z] = launch.grid;
                    let (threads, shared_bytes) = (launch.threads, launch.shared_bytes);
                    let (stream, args) = (gpu.compute.0, pointers.as_ptr().cast_mut());
                    let none = std::ptr::null_mut();
                    let launch = driver.cuLaunchKernel;
                    let code = launch(kernel.0, x, y, z, threads, 1, 1, shared_bytes, stream, args, none);
                    gpu.check("cuLaunchKernel", code)
                }
                Ready::Copy { from, to, bytes } => {
                    let code = (driver.cuMemcpyDtoDAsync_v2)(*to, *from, *bytes, gpu.compute.0);
                    gpu.check("cuMemcpyDtoDAsync", code)
                }
                Ready::Zero { at, bytes } => gpu.zero(*at, *bytes),
                Ready::Product(product) => product.enqueue(),
            }
        }
    }
}

// SAFETY: regions live as long as the machine and are aligned to `ALIGN_BYTES`; programs write them only through `run`, which
// borrows the machine mutably; the memory pass keeps values apart; `memory` copies from and to this GPU.
unsafe impl Machine for CudaMachine {
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError> {
        let lowered = self.lowered(c)?;
        self.shared.gpu.bind().map_err(|e| failed(&e))?;
        let n = part.len();
        if with.timings.is_some() {
            self.mark(0).map_err(|e| failed(&e))?;
        }
        for (k, i) in part.enumerate() {
            if k.is_multiple_of(MARK_EVERY) {
                self.shared.gpu.mark().map_err(|e| failed(&e))?;
            }
            self.instruction(c, lowered, i, with.groups)?;
            if with.timings.is_some() {
                self.mark(k + 1).map_err(|e| failed(&e))?;
            }
            with.groups.progress_counter().tick();
            if with.groups.progress_counter().is_left() {
                return Err(ExecError::Left);
            }
        }
        match &mut with.timings {
            Some(timings) => self.measured(n, timings).map_err(|e| failed(&e)),
            None => Ok(()),
        }
    }

    fn settle(&mut self) -> Result<(), ExecError> {
        self.shared.gpu.synchronize().map_err(|e| failed(&e))
    }

    fn get(&self, c: &Compiled, v: ValueId, at: usize, to: &mut [u8]) {
        let address = self.bytes_of(c, v, at, to.len());
        // SAFETY: the bytes are this machine's. A failed GPU has lost its state, so the process ends.
        unsafe { self.shared.gpu.read(address, to) }.unwrap_or_else(|e| panic!("{e}"));
    }

    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]) {
        let address = self.bytes_of(c, v, at, from.len());
        // SAFETY: as above.
        unsafe { self.shared.gpu.write(address, from) }.unwrap_or_else(|e| panic!("{e}"));
    }

    fn host(&self, _: &Compiled, _: ValueId) -> Option<&[u8]> {
        None
    }

    fn host_mut(&mut self, _: &Compiled, _: ValueId) -> Option<&mut [u8]> {
        None
    }

    fn place(&self, c: &Compiled, v: ValueId) -> RawBuffer {
        let bytes = c.program.value(v).size_bytes();
        RawBuffer::on_device(self.address(c, v) as usize, bytes, self.shared.gpu.ordinal)
    }

    fn memory(&self) -> Option<Arc<dyn Memory>> {
        Some(self.shared.gpu.clone())
    }

    fn has(&self, c: &Compiled, v: ValueId) -> bool {
        c.layout.locations[v.0 as usize].is_some_and(|location| self.regions.contains_key(&location.region))
    }

    fn allocated_bytes(&self) -> usize {
        self.regions.values().map(|memory| memory.bytes).sum()
    }

    fn bytes_in_shared(&self) -> usize {
        0
    }

    fn remap(&mut self, _: &Arena) {}

    fn succeed(self: Box<Self>, programs: &[&Compiled], _: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        let CudaMachine { shared, mut regions, .. } = *self;
        let before = regions.extract_if(.., |region, _| LASTING.contains(region)).collect();
        // The work region goes before the next one is allocated, so that both need not fit.
        drop(regions);
        Ok(Box::new(CudaMachine::new(&shared, programs, before)?))
    }
}
