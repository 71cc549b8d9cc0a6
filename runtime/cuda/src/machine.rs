//! The machine: the regions of programs in the memory of a GPU, and the execution of programs over them.
//!
//! A program is lowered when it first runs; after that a step only replays commands, or graphs of them. Everything runs on one
//! stream, in the order of the program; copies of lasting state run beside it ([`ring`](crate::ring)), and the first
//! instruction of a run that changes the state waits for them.

use crate::command::{Command, Launch, Ready};
use crate::cudnn::{Direction, Packing, Shape};
use crate::error::CudaError;
use crate::gpu::{DeviceMemory, Event, Stream};
use crate::kernels::CompileError;
use crate::lower::{Engines, cudnn_shape, lower};
use crate::lowered::{LASTING, Lowered};
use crate::product::Choice;
use crate::rehearsal::{Rehearsal, nowhere};
use crate::shared::Shared;
use crate::split::{SplitWeights, halves, join, split};
use crate::state_fence::OwnedFence;
use cudarc::driver::sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig};
use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena;
use phalanx_device::span::Memory;
use phalanx_device::{AllocError, Backing, ElementType, ExecError, Machine, Operand, RawBuffer, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::program::{
    Collective, CollectiveKind, Compute, DType, Instr, Kind, MatMul, Op, Program, ValueId, op,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a region: those of the largest of the programs.
pub(crate) fn region_bytes(programs: &[&Compiled], region: Region) -> usize {
    programs.iter().map(|c| c.layout.bytes(region)).max().unwrap_or(0)
}

/// Bytes of all regions.
pub(crate) fn bytes_for(programs: &[&Compiled]) -> usize {
    Region::ALL.into_iter().map(|region| region_bytes(programs, region)).sum()
}

/// The regions that outlast a step: bytes, and that none is in shared memory.
pub(crate) fn lasting_regions(programs: &[&Compiled]) -> [(usize, bool); 3] {
    LASTING.map(|region| (region_bytes(programs, region), false))
}

#[derive(Debug)]
pub(crate) struct CudaMachine {
    shared: Arc<Shared>,
    /// Dropped first: then no copy of the regions is under way.
    fence: OwnedFence,
    /// Programs that have run. Their graphs refer to the regions, so they are dropped first.
    lowered: Vec<Lowered>,
    regions: BTreeMap<Region, DeviceMemory>,
    /// Where graphs are captured; none if the machine runs without graphs.
    capture: Option<CaptureStream>,
    /// The packing of the batches that were put, by the addresses of their starts of documents.
    packings: BTreeMap<u64, Packing>,
    /// Marks the end of each instruction when times are measured; kept between runs.
    events: Vec<Event>,
    /// What can be prepared without buffers.
    rehearsal: Rehearsal,
}

/// A stream that runs nothing, which the GPU gets back.
#[derive(Debug)]
struct CaptureStream {
    shared: Arc<Shared>,
    stream: Stream,
}

impl Drop for CaptureStream {
    fn drop(&mut self) {
        self.shared.gpu.return_stream(self.stream);
    }
}

impl CudaMachine {
    /// Allocates the regions; takes those of `before` that fit. Commands run as graphs if `graphs`.
    ///
    /// # Errors
    /// When the GPU has too little memory.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        programs: &[&Compiled],
        mut before: BTreeMap<Region, DeviceMemory>,
        graphs: bool,
    ) -> Result<CudaMachine, AllocError> {
        let gpu = &shared.gpu;
        let fits = bytes_for(programs) <= gpu.memory_bytes().1;
        let mut regions = BTreeMap::new();
        for region in Region::ALL {
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
                        unsafe { gpu.zero(memory.address, bytes, gpu.compute) }.map_err(failed)?;
                    }
                    memory
                }
            };
            regions.insert(region, memory);
        }
        let place = |c: &Compiled, v| address(&regions, c, v);
        let split = SplitWeights::of(programs, place);
        CudaMachine::with_regions(shared, regions, split, graphs)
    }

    fn with_regions(
        shared: &Arc<Shared>,
        regions: BTreeMap<Region, DeviceMemory>,
        split: SplitWeights,
        graphs: bool,
    ) -> Result<CudaMachine, AllocError> {
        let stream = if graphs { Some(shared.gpu.take_stream()) } else { None };
        let refused = |e: CudaError| AllocError { bytes: 0, source: std::io::Error::other(e) };
        let stream = stream.transpose().map_err(refused)?;
        let lasting = LASTING.iter().filter_map(|region| regions.get(region));
        let lasting = lasting.map(|memory| memory.address..memory.address + memory.bytes as u64).collect();
        let fence = OwnedFence::new(&shared.gpu, &shared.memory.fences, lasting, split).map_err(refused)?;
        let capture = stream.map(|stream| CaptureStream { shared: shared.clone(), stream });
        let (shared, packings) = (shared.clone(), BTreeMap::new());
        let (lowered, events, rehearsal) = (Vec::new(), Vec::new(), Rehearsal::default());
        Ok(CudaMachine { fence, shared, lowered, regions, packings, capture, events, rehearsal })
    }

    /// Parts of a program that run as graphs.
    #[cfg(test)]
    pub(crate) fn n_graphs(&mut self, c: &Compiled) -> usize {
        let packing = self.packing(c);
        Lowered::find(&mut self.lowered, c, packing).map_or(0, |i| self.lowered[i].n_graphs())
    }

    /// A machine that has loaded the kernels of the programs and has no buffers; for [`Machine::succeed`].
    ///
    /// # Errors
    /// When the GPU has failed.
    pub(crate) fn without_buffers(
        shared: &Arc<Shared>,
        programs: &[&Compiled],
        graphs: bool,
    ) -> Result<CudaMachine, AllocError> {
        // The first step reports what cannot be loaded.
        let load = |launch: &Launch| {
            if let Err(error) = shared.kernels.load(&shared.gpu, &launch.kernel, launch.shared_bytes) {
                tracing::debug!(%error, "cannot load a kernel in advance");
            }
        };
        load(&Launch::of_place(&shared.gpu, 0));
        for (c, instr) in programs.iter().flat_map(|c| c.program.instrs.iter().map(move |instr| (c, instr))) {
            // Kernels do not depend on addresses, except that two operands may be the same memory.
            let (commands, _) = lower(&c.program, instr, |v| nowhere(v.0), 0, shared.engines(&instr.op, None)).finish();
            for command in commands {
                if let Command::Launch(launch) = command {
                    load(&launch);
                }
            }
        }
        let rehearsal = Rehearsal::of(shared, programs);
        Ok(CudaMachine {
            rehearsal,
            ..CudaMachine::with_regions(shared, BTreeMap::new(), SplitWeights::default(), graphs)?
        })
    }

    fn address(&self, c: &Compiled, v: ValueId) -> u64 {
        address(&self.regions, c, v)
    }

    /// The address of byte `at` of a value; `n` bytes from there on are the value's.
    fn bytes_of(&self, c: &Compiled, v: ValueId, at: usize, n: usize) -> u64 {
        assert!(at + n <= c.program.value(v).size_bytes(), "bytes {at}..{} of {}", at + n, c.program.describe_value(v));
        self.address(c, v) + at as u64
    }

    /// Where these bytes of a value are if it is a split weight; see [`SplitWeights::parts`].
    fn parts(&self, c: &Compiled, v: ValueId, address: u64, bytes: usize) -> Option<[u64; 2]> {
        // A view has the bf16 numbers as they are.
        let is_weight = c.program.value(v).kind == Kind::Parameter;
        self.fence.split.parts(address, bytes).filter(|_| is_weight)
    }

    /// Index of the lowered program; lowers it, before the run of the instruction `first`, if it has not run before.
    fn lowered(&mut self, c: &Compiled, first: usize) -> Result<usize, ExecError> {
        let packing = self.packing(c);
        if let Some(i) = Lowered::find(&mut self.lowered, c, packing) {
            return Ok(i);
        }
        self.shared.gpu.bind().map_err(|e| failed(&e))?;
        let scratch = self.regions[&Region::Work].address + c.layout.scratch.0 as u64;
        let offered = |instr: &Instr| self.shared.offered(cudnn_shape(&c.program, instr, packing), &instr.op);
        let engines = |instr: &Instr| self.shared.engines(&instr.op, offered(instr));
        // SAFETY: all values lie in this machine's regions; before the first instruction of a step only inputs and what outlasts
        // steps have contents.
        let lowered =
            unsafe { Lowered::new(&self.shared, c, packing, |v| self.address(c, v), scratch, engines, first == 0) };
        let lowered = lowered.map_err(|e| failed(&e))?;
        self.lowered.push(lowered);
        Ok(self.lowered.len() - 1)
    }

    /// The packing of all batches of the program, which only cuDNN's plans depend on.
    fn packing(&self, c: &Compiled) -> Packing {
        if self.shared.cudnn.is_none() {
            return Packing::Unknown;
        }
        let packing = |(_, v)| self.packings.get(&self.address(c, v)).copied().unwrap_or(Packing::Unknown);
        doc_starts(&c.program).map(packing).reduce(Packing::or).unwrap_or(Packing::Unknown)
    }

    /// Runs a range of a lowered program; `changes` is set before the first instruction that changes lasting state.
    fn run_part(
        &mut self,
        c: &Compiled,
        lowered: usize,
        part: Range<usize>,
        with: &mut Run<'_>,
        changes: &mut bool,
    ) -> Result<(), ExecError> {
        let mut next = part.start;
        while next < part.end {
            if next == part.start || self.lowered[lowered].is_marked(next) {
                self.shared.gpu.mark().map_err(|e| failed(&e))?;
            }
            let segment = self.capture.as_ref().filter(|_| with.timings.is_none());
            let segment = segment.and_then(|_| self.lowered[lowered].segment(next, part.end));
            let now = segment.map_or(next..next + 1, |segment| self.lowered[lowered].instrs(segment));
            if !*changes && self.lowered[lowered].changes_state(now.clone()) {
                *changes = true;
                self.fence.before_change(&self.shared.gpu).map_err(|e| failed(&e))?;
            }
            self.advance(c, lowered, next, segment, with)?;
            next = now.end;
            if with.timings.is_some() {
                self.mark(next - part.start).map_err(|e| failed(&e))?;
            }
            now.for_each(|_| with.groups.progress_counter().tick());
            if with.groups.progress_counter().is_left() {
                return Err(ExecError::Left);
            }
        }
        Ok(())
    }

    /// Runs the instruction `first`, or those of the `segment` that begins there.
    fn advance(
        &mut self,
        c: &Compiled,
        lowered: usize,
        first: usize,
        segment: Option<usize>,
        with: &mut Run<'_>,
    ) -> Result<(), ExecError> {
        let instr = &c.program.instrs[first];
        match &instr.op {
            // SAFETY: the verifier keeps operands and results of a collective untouched until it is awaited, and the
            // memory pass keeps their places.
            Op::Start(op::Start(collective)) => unsafe { self.start(c, instr, collective, with.groups) }?,
            Op::Await(op::Await(collective)) => with.groups.finish(collective)?,
            Op::Opaque(op::Opaque { model, .. }) => {
                let reason = "user-defined models run on the CPU only".into();
                return Err(ExecError::Opaque { model: *model, reason });
            }
            _ => {
                let (shared, lowered) = (&*self.shared, &mut self.lowered[lowered]);
                let segment = self.capture.as_ref().zip(segment);
                // SAFETY: lowering placed all operands in this machine's regions, inside their bounds; everything that
                // accesses them runs on the compute stream, or is ordered by the fence.
                let enqueued = unsafe {
                    match segment {
                        Some((capture, segment)) => lowered.run_segment(shared, &shared.gpu, segment, capture.stream),
                        None => lowered.enqueue(shared, first..first + 1, shared.gpu.compute),
                    }
                };
                return enqueued.map_err(|e| failed(&e));
            }
        }
        Ok(())
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

fn address(regions: &BTreeMap<Region, DeviceMemory>, c: &Compiled, v: ValueId) -> u64 {
    let value = c.program.value(v);
    let location = c.layout.locations[v.0 as usize].expect("the memory pass places every accessed value");
    let memory = &regions[&location.region];
    assert!(location.offset + value.size_bytes() <= memory.bytes, "a place lies inside its region");
    memory.address + location.offset as u64
}

/// Tokens of a row, and the starts of documents, of every attention over whole rows.
fn doc_starts(program: &Program) -> impl Iterator<Item = (usize, ValueId)> {
    program.instrs.iter().filter_map(|instr| match &instr.op {
        Op::Attention(heads) | Op::AttentionBackward(op::AttentionBackward(heads)) => {
            Some((heads.seq_len, instr.reads[1]))
        }
        _ => None,
    })
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
        DType::E4m3 => panic!("ranks exchange the words that a view is of"),
    }
}

/// A GPU with too little memory for the programs of a job.
#[derive(Debug, thiserror::Error)]
#[error(
    "{device} has {} of {} MiB free{users}, and the job needs {} MiB: use a smaller micro_batch_size or sequence_len, \
     gradient_checkpointing, more ranks, or end other processes on the GPU",
    free >> 20,
    total >> 20,
    needed.div_ceil(1 << 20)
)]
struct TooLittleMemory {
    device: String,
    /// The processes that use it, as a clause; empty if unknown.
    users: String,
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
        let users = self.gpu.users();
        let error = TooLittleMemory { device, users, free, total, needed, source };
        std::io::Error::new(error.kind(), error)
    }

    /// The shape, if cuDNN runs it.
    fn offered(&self, shape: Option<Shape>, op: &Op) -> Option<Shape> {
        let (cudnn, shape) = (self.cudnn.as_ref()?, shape?);
        let is_adjoint = matches!(op, Op::AttentionBackward(_));
        let direction = if is_adjoint { Direction::Backward } else { Direction::Forward };
        cudnn.offers(&shape, direction).then_some(shape)
    }

    /// What this GPU does for an instruction: attention through cuDNN if there is a shape.
    pub(crate) fn engines(&self, op: &Op, cudnn: Option<Shape>) -> Engines {
        let is_fp8 = matches!(op, Op::MatMul(MatMul { compute: Compute::Fp8, .. }));
        let has_fp8 = is_fp8 && self.products.has_fp8(&self.gpu);
        Engines { cudnn, shared_bytes_max: self.gpu.shared_bytes_max, has_fp8 }
    }

    /// Compiles the kernel or plans the product of a command.
    ///
    /// # Safety
    /// For [`Choice::Fastest`], the command's memory is this GPU's, and nothing needs the contents of the results of products.
    pub(crate) unsafe fn ready(&self, command: Command, choice: Choice) -> Result<Ready, CompileError> {
        Ok(match command {
            Command::Launch(mut launch) => {
                let kernel = self.kernels.load(&self.gpu, &launch.kernel, launch.shared_bytes)?;
                let pointers = launch.args.pointers();
                Ready::Launch { kernel, launch, pointers }
            }
            Command::Copy { from, to, bytes } => Ready::Copy { from, to, bytes },
            Command::Zero { at, bytes } => Ready::Zero { at, bytes },
            // SAFETY: the caller's contract.
            Command::Product(product) => Ready::Product(unsafe { self.products.plan(&self.gpu, product, choice) }?),
            Command::Attention(call) => {
                let cudnn = self.cudnn.as_ref().expect("lowered only if cuDNN offers the shape");
                Ready::Attention(cudnn.ready(&call)?)
            }
        })
    }

    /// # Safety
    /// The command's memory is this GPU's, and only work of the stream accesses it.
    pub(crate) unsafe fn enqueue(&self, command: &Ready, stream: Stream) -> Result<(), CudaError> {
        let (gpu, driver) = (&self.gpu, self.gpu.libraries.driver);
        // SAFETY: the caller's contract; arguments live in the command, and the driver copies them.
        unsafe {
            match command {
                Ready::Launch { kernel, launch, pointers } => {
                    let args = pointers.as_ptr().cast_mut();
                    let none = std::ptr::null_mut();
                    if let Some(launch_early) = driver.cuLaunchKernelEx.filter(|_| self.launches_early) {
                        let mut attribute = early_start();
                        let config = launch_config(launch, stream, &mut attribute);
                        return gpu.check("cuLaunchKernelEx", launch_early(&raw const config, kernel.0, args, none));
                    }
                    let [x, y, z] = launch.grid;
                    let (threads, shared_bytes) = (launch.threads, launch.shared_bytes);
                    let launch = driver.cuLaunchKernel;
                    let code = launch(kernel.0, x, y, z, threads, 1, 1, shared_bytes, stream.0, args, none);
                    gpu.check("cuLaunchKernel", code)
                }
                Ready::Copy { from, to, bytes } => gpu.copy(*from, *to, *bytes, stream),
                Ready::Zero { at, bytes } => gpu.zero(*at, *bytes, stream),
                Ready::Product(product) => product.enqueue(stream),
                Ready::Attention(call) => call.enqueue(stream),
            }
        }
    }
}

/// The attribute of a kernel that may start before the one before it in its stream has ended: each of ours waits for that end first
/// (`wait_for_predecessor` of the prelude), and so do all that come later. After anything else than a kernel it starts in order.
fn early_start() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

fn launch_config(launch: &Launch, stream: Stream, attribute: &mut CUlaunchAttribute) -> CUlaunchConfig {
    let [x, y, z] = launch.grid;
    CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared_bytes,
        hStream: stream.0,
        attrs: attribute,
        numAttrs: 1,
    }
}

// SAFETY: regions live as long as the machine and are aligned to `ALIGN_BYTES`; programs write them only through `run`, which
// borrows the machine mutably; the memory pass keeps values apart; `memory` copies from and to this GPU, in the order of the
// fence.
unsafe impl Machine for CudaMachine {
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError> {
        let lowered = self.lowered(c, part.start)?;
        self.lowered[lowered].check(&part);
        self.shared.gpu.bind().map_err(|e| failed(&e))?;
        let n = part.len();
        if with.timings.is_some() {
            self.mark(0).map_err(|e| failed(&e))?;
        }
        let mut changes = false;
        let ran = self.run_part(c, lowered, part, with, &mut changes);
        let marked = if changes { self.fence.after_change(&self.shared.gpu) } else { Ok(()) };
        ran.and(marked.map_err(|e| failed(&e)))?;
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
        let gpu = &self.shared.gpu;
        let parts = self.parts(c, v, address, to.len());
        let read = match parts {
            // SAFETY: the bytes are this machine's.
            Some(parts) => std::iter::zip(parts, halves(0..to.len()))
                .try_for_each(|(part, half)| unsafe { gpu.read(part, &mut to[half]) }),
            // SAFETY: as above.
            None => unsafe { gpu.read(address, to) },
        };
        // A failed GPU has lost its state, so the process ends.
        read.unwrap_or_else(|e| panic!("{e}"));
        if parts.is_some() {
            join(to, &mut Vec::new());
        }
    }

    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]) {
        let address = self.bytes_of(c, v, at, from.len());
        let value = c.program.value(v);
        if self.shared.cudnn.is_some()
            && value.dtype == DType::I32
            && let Some((seq_len, _)) = doc_starts(&c.program).find(|(_, starts)| *starts == v)
        {
            let is_all = from.len() == value.size_bytes();
            let packing =
                if is_all { Packing::of(&bytemuck::pod_collect_to_vec(from), seq_len) } else { Packing::Unknown };
            self.packings.insert(self.address(c, v), packing);
        }
        let is_state = self.fence.is_around(address);
        let gpu = &self.shared.gpu;
        let before = gpu.bind().and_then(|()| if is_state { self.fence.before_change(gpu) } else { Ok(()) });
        // SAFETY: as above.
        let write = |at: u64, bytes: &[u8]| unsafe { gpu.write(at, bytes) };
        let written = before.and_then(|()| match self.parts(c, v, address, from.len()) {
            Some(parts) => {
                let mut halved = from.to_vec();
                split(&mut halved, &mut Vec::new());
                std::iter::zip(parts, halves(0..from.len())).try_for_each(|(part, half)| write(part, &halved[half]))
            }
            None => write(address, from),
        });
        let written = written.and_then(|()| if is_state { self.fence.after_change(gpu) } else { Ok(()) });
        written.unwrap_or_else(|e| panic!("{e}"));
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
        Some(self.shared.memory.clone())
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

    fn rehearse(&mut self) -> bool {
        self.capture.as_ref().is_some_and(|capture| self.rehearsal.next(&self.shared, capture.stream))
    }

    fn succeed(self: Box<Self>, programs: &[&Compiled], _: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError> {
        let CudaMachine { fence, shared, lowered, mut regions, capture, .. } = *self;
        drop((fence, lowered));
        let before = regions.extract_if(.., |region, _| LASTING.contains(region)).collect();
        // The work region goes before the next one is allocated, so that both need not fit.
        drop(regions);
        Ok(Box::new(CudaMachine::new(&shared, programs, before, capture.is_some())?))
    }
}
