//! Compiles CUDA kernels with the real NVRTC for every architecture that Phalanx supports, and finds what a GPU would show
//! only as lost speed: registers that spill to memory, and tensor instructions that the compiler dropped.
//!
//! Code map: [`check`] compiles and collects, `resources` reads the assembler's report, `disassembly` counts tensor
//! instructions, `table` prints. Deliberately absent: time, occupancy, and any judgement of register counts.

mod disassembly;
mod resources;
mod table;

pub use table::table;

use phalanx_ptxsim::nvrtc::{Nvrtc, NvrtcError};
use serde::Serialize;
use std::path::PathBuf;

/// The architectures that Phalanx ships kernels for.
pub const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90a", "sm_100a"];

/// A CUDA source with everything it includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// What reports call it.
    pub name: String,
    /// The text.
    pub text: String,
}

/// What to compile for, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Real architectures. Default: [`ARCHITECTURES`].
    pub architectures: Vec<String>,
    /// Sets of macros, such as `HEAD_DIM=128`; the source is compiled once for each set. Default: one empty set.
    pub define_sets: Vec<Vec<String>>,
    /// Further options of NVRTC, such as `--fmad=false`. Default: none.
    pub compiler_options: Vec<String>,
    /// The program nvdisasm; without it, tensor instructions are not counted. Default: none.
    pub nvdisasm: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            architectures: ARCHITECTURES.map(str::to_owned).to_vec(),
            define_sets: vec![Vec::new()],
            compiler_options: Vec::new(),
            nvdisasm: None,
        }
    }
}

/// What a kernel needs on one architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelReport {
    /// Name of the source.
    pub source: String,
    /// Macros of the compilation.
    pub defines: Vec<String>,
    /// The architecture.
    pub architecture: String,
    /// The kernel, or a device function that was not inlined.
    pub kernel: String,
    /// Registers of a thread; `None` for a device function.
    pub registers: Option<u32>,
    /// Bytes of registers that the kernel stores to memory for want of registers.
    pub spill_store_bytes: u64,
    /// Bytes that it loads back.
    pub spill_load_bytes: u64,
    /// Memory of a thread for arrays and spilled registers, bytes.
    pub stack_bytes: u64,
    /// Static shared memory of a block, bytes.
    pub shared_bytes: u64,
    /// Tensor instructions that the PTX has.
    pub tensor_wanted: usize,
    /// Tensor instructions that the machine code has; `None` without a disassembler.
    pub tensor_found: Option<usize>,
}

/// Why a kernel is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure<'a> {
    /// Registers spill.
    Spill(&'a KernelReport),
    /// The PTX has tensor instructions, the machine code none.
    NoTensorInstructions(&'a KernelReport),
}

impl std::fmt::Display for Failure<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Failure::Spill(kernel) | Failure::NoTensorInstructions(kernel)) = self;
        let KernelReport { source, architecture, kernel: name, .. } = kernel;
        write!(f, "{source}: kernel `{name}` for {architecture}")?;
        if !kernel.defines.is_empty() {
            write!(f, " with {}", kernel.defines.join(" "))?;
        }
        match self {
            Failure::Spill(k) => {
                write!(f, " spills: {} bytes stored, {} bytes loaded", k.spill_store_bytes, k.spill_load_bytes)
            }
            Failure::NoTensorInstructions(k) => {
                write!(f, " has no tensor instruction in its machine code, but {} in its PTX", k.tensor_wanted)
            }
        }
    }
}

/// All kernels of some sources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// One entry for each source, set of macros, architecture and kernel, in this order.
    pub kernels: Vec<KernelReport>,
}

impl Report {
    /// The kernels that are not accepted.
    pub fn failures(&self) -> Vec<Failure<'_>> {
        let spills = |k: &KernelReport| k.spill_store_bytes + k.spill_load_bytes > 0;
        let mut failures: Vec<Failure<'_>> = self.kernels.iter().filter(|k| spills(k)).map(Failure::Spill).collect();
        let no_tensor = |k: &KernelReport| k.tensor_wanted > 0 && k.tensor_found == Some(0);
        failures.extend(self.kernels.iter().filter(|k| no_tensor(k)).map(Failure::NoTensorInstructions));
        failures
    }
}

/// Why a source cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// A source does not compile.
    #[error("{source_name} for {architecture}: {error}")]
    Compile {
        /// Name of the source.
        source_name: String,
        /// The architecture.
        architecture: String,
        /// The compiler's answer.
        error: NvrtcError,
    },
    /// The disassembler does not run, or rejects the machine code.
    #[error("cannot disassemble with {}: {reason}", program.display())]
    Disassembly {
        /// The disassembler.
        program: PathBuf,
        /// What went wrong.
        reason: String,
    },
}

/// Compiles a source for every architecture and set of macros.
///
/// # Errors
/// When the source does not compile, or the disassembler fails.
pub fn check(nvrtc: &Nvrtc, source: &Source, options: &Options) -> Result<Report, CheckError> {
    let mut report = Report::default();
    for defines in &options.define_sets {
        for architecture in &options.architectures {
            report.kernels.extend(compile(nvrtc, source, options, defines, architecture)?);
        }
    }
    Ok(report)
}

fn compile(
    nvrtc: &Nvrtc,
    source: &Source,
    options: &Options,
    defines: &[String],
    architecture: &str,
) -> Result<Vec<KernelReport>, CheckError> {
    let target = format!("--gpu-architecture={architecture}");
    let macros: Vec<String> = defines.iter().map(|d| format!("-D{d}")).collect();
    let mut arguments = vec![target.as_str(), "--std=c++17", "--ptxas-options=-v"];
    arguments.extend(macros.iter().chain(&options.compiler_options).map(String::as_str));
    let compiled = nvrtc.compile(&source.name, &source.text, &arguments).map_err(|error| CheckError::Compile {
        source_name: source.name.clone(),
        architecture: architecture.to_owned(),
        error,
    })?;
    let found = match &options.nvdisasm {
        Some(program) => Some(disassembly::tensor_instructions(program, &compiled.cubin)?),
        None => None,
    };
    let wanted = disassembly::tensor_instructions_of_ptx(&compiled.ptx);
    let report = |r: resources::Resources| KernelReport {
        source: source.name.clone(),
        defines: defines.to_vec(),
        architecture: architecture.to_owned(),
        tensor_wanted: wanted.get(&r.name).copied().unwrap_or(0),
        tensor_found: found.as_ref().map(|counts| counts.get(&r.name).copied().unwrap_or(0)),
        kernel: r.name,
        registers: r.registers,
        spill_store_bytes: r.spill_store_bytes,
        spill_load_bytes: r.spill_load_bytes,
        stack_bytes: r.stack_bytes,
        shared_bytes: r.shared_bytes,
    };
    Ok(resources::parse(&compiled.log).into_iter().map(report).collect())
}
