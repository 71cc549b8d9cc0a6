//! Modules, kernels and launches: the front door.

use crate::decode::decode;
use crate::error::{LaunchError, PtxError};
use crate::exec::{Block, Launch, Limits};
use crate::memory::device::{Device, Ptr};
use crate::program::{BlockPlace, Program};
use crate::report::{Finding, Report, coordinates};
use crate::syntax;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Threads of a block, at most.
const THREADS_MAX: u64 = 1024;
/// Blocks of a grid in each direction, at most.
const GRID_MAX: [u32; 3] = [i32::MAX as u32, u16::MAX as u32, u16::MAX as u32];
/// Shared memory of a block, at most: that of sm_90.
const SHARED_BYTES_MAX: usize = 227 * 1024;

/// A parsed PTX text.
pub struct Module {
    syntax: syntax::Module,
    id: u64,
}

impl Module {
    /// Parses a PTX text. Instructions are decoded kernel by kernel, in [`Module::kernel`].
    ///
    /// # Errors
    /// [`PtxError::Syntax`] with the line.
    pub fn parse(ptx: &str) -> Result<Module, PtxError> {
        let mut hasher = DefaultHasher::new();
        ptx.hash(&mut hasher);
        Ok(Module { syntax: syntax::parse(ptx)?, id: hasher.finish() })
    }

    /// Names of the kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.syntax.functions.iter().filter(|f| f.is_kernel && f.has_body).map(|f| f.name.as_str())
    }

    /// Decodes a kernel.
    ///
    /// # Errors
    /// When the module has no such kernel, or the kernel has an instruction that the interpreter does not support.
    pub fn kernel(&self, name: &str) -> Result<Kernel, PtxError> {
        Ok(Kernel { program: decode(&self.syntax, name)?, module: self.id, options: Options::default() })
    }
}

/// How a kernel is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Chooses the order of blocks and the interleaving of warps. Default: 1.
    pub seed: u64,
    /// Instructions that a warp may execute before its loop counts as infinite. Default: 50 million.
    pub instructions_max: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { seed: 1, instructions_max: 50_000_000 }
    }
}

/// An argument of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// A pointer to device memory.
    Ptr(Ptr),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit signed integer.
    I32(i32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// A single-precision number.
    F32(f32),
    /// A double-precision number.
    F64(f64),
    /// A struct, as it lies in memory. Pointers in it come from [`Ptr::address`].
    Bytes(Vec<u8>),
}

impl Arg {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Arg::Ptr(ptr) => ptr.address().to_le_bytes().to_vec(),
            Arg::U32(v) => v.to_le_bytes().to_vec(),
            Arg::I32(v) => v.to_le_bytes().to_vec(),
            Arg::U64(v) => v.to_le_bytes().to_vec(),
            Arg::F32(v) => v.to_le_bytes().to_vec(),
            Arg::F64(v) => v.to_le_bytes().to_vec(),
            Arg::Bytes(bytes) => bytes.clone(),
        }
    }
}

/// The result of a launch.
#[derive(Debug)]
pub struct Run {
    /// Everything that is wrong, in the order of first occurrence.
    pub findings: Vec<Finding>,
    /// Instructions executed, counted once for each active lane.
    pub n_lane_instructions: u64,
}

/// A decoded kernel.
pub struct Kernel {
    program: Program,
    module: u64,
    options: Options,
}

impl Kernel {
    /// The kernel with other options.
    #[must_use]
    pub fn with(self, options: Options) -> Kernel {
        Kernel { options, ..self }
    }

    /// Bytes of each parameter, in order.
    pub fn param_bytes(&self) -> impl Iterator<Item = usize> {
        self.program.params.iter().map(|param| param.bytes)
    }

    /// Runs the kernel to its end, or to the first error that leaves no way to go on.
    ///
    /// Blocks run one after the other, in an order that the seed chooses; their accesses are checked against each other all the
    /// same.
    ///
    /// # Errors
    /// When arguments or shapes do not fit the kernel. Errors of the kernel are findings.
    pub fn launch(
        &self,
        device: &mut Device,
        grid: [u32; 3],
        block: [u32; 3],
        dynamic_shared_bytes: usize,
        args: &[Arg],
    ) -> Result<Run, LaunchError> {
        let program = &self.program;
        let params = self.params(args)?;
        let shared_bytes = self.check_shape(grid, block, dynamic_shared_bytes)?;
        let globals = device.start_launch(self.module, program);
        let report = Report::new(program, pointers(device, args));
        let mut launch = Launch {
            program,
            device,
            report,
            params: &params,
            globals,
            published: BTreeMap::new(),
            limits: Limits { instructions_max: self.options.instructions_max },
            random: self.options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            n_lane_instrs: 0,
            aborted: false,
        };
        let mut order: Vec<u32> = (0..grid.iter().product()).collect();
        for at in (1..order.len()).rev() {
            let other = launch.next_random() as usize % (at + 1);
            order.swap(at, other);
        }
        for index in order {
            let place = BlockPlace { grid, block, index: coordinates(index, grid), dynamic_shared_bytes, shared_bytes };
            Block::new(&mut launch, place).run();
            if launch.aborted {
                break;
            }
        }
        Ok(Run { n_lane_instructions: launch.n_lane_instrs, findings: launch.report.into_findings() })
    }

    fn params(&self, args: &[Arg]) -> Result<Vec<u8>, LaunchError> {
        let program = &self.program;
        if args.len() != program.params.len() {
            let (kernel, expected) = (program.name.clone(), program.params.len());
            return Err(LaunchError::ArgumentCount { kernel, expected, found: args.len() });
        }
        let mut params = vec![0; program.param_bytes];
        for (index, (arg, param)) in args.iter().zip(&program.params).enumerate() {
            let bytes = arg.bytes();
            if bytes.len() != param.bytes {
                let (kernel, expected) = (program.name.clone(), param.bytes);
                return Err(LaunchError::ArgumentSize { kernel, index, expected, found: bytes.len() });
            }
            params[param.offset..param.offset + param.bytes].copy_from_slice(&bytes);
        }
        Ok(params)
    }

    /// Checks the shape; returns the shared memory of a block.
    fn check_shape(&self, grid: [u32; 3], block: [u32; 3], dynamic_shared_bytes: usize) -> Result<usize, LaunchError> {
        let product = |shape: [u32; 3]| shape.iter().map(|n| u64::from(*n)).product::<u64>();
        let (threads, blocks) = (product(block), product(grid));
        let threads_max = self.program.threads_max.unwrap_or(THREADS_MAX).min(THREADS_MAX);
        let fits = grid.iter().zip(GRID_MAX).all(|(n, max)| *n <= max);
        if threads == 0 || threads > threads_max || blocks == 0 || blocks > u64::from(u32::MAX) || !fits {
            return Err(LaunchError::Shape { threads, grid, threads_max });
        }
        let fixed = self.program.shared_static_bytes.next_multiple_of(self.program.shared_align);
        let bytes = fixed + dynamic_shared_bytes;
        if bytes > SHARED_BYTES_MAX {
            return Err(LaunchError::SharedMemory { bytes, bytes_max: SHARED_BYTES_MAX });
        }
        Ok(bytes)
    }
}

/// The allocations that arguments point to, with the positions of the arguments; also pointers inside of structs.
fn pointers(device: &Device, args: &[Arg]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (index, arg) in args.iter().enumerate() {
        let addresses: Vec<u64> = match arg {
            Arg::Ptr(ptr) => vec![ptr.address()],
            Arg::Bytes(bytes) => {
                let word = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                bytes.chunks_exact(8).map(word).collect()
            }
            _ => Vec::new(),
        };
        found.extend(addresses.iter().filter_map(|address| device.allocation(*address)).map(|a| (a, index)));
    }
    found
}
