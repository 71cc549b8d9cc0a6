//! What can go wrong before or instead of a run. Errors of the kernel itself are findings, not errors.

/// Why a PTX text cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PtxError {
    /// The text does not follow the grammar of PTX.
    #[error("PTX line {line}: expected {expected}, found {found}")]
    Syntax {
        /// Line of the PTX text, from 1.
        line: u32,
        /// What the grammar requires here.
        expected: String,
        /// What the text has here.
        found: String,
    },
    /// The interpreter does not implement an instruction or one of its variants.
    #[error("PTX line {line}: instruction `{instruction}` is not supported: {reason}")]
    Unsupported {
        /// Line of the PTX text, from 1.
        line: u32,
        /// The opcode with all its modifiers.
        instruction: String,
        /// The part that is not supported.
        reason: String,
    },
    /// A register, label or variable has no declaration.
    #[error("PTX line {line}: `{name}` is not declared")]
    Undeclared {
        /// Line of the PTX text, from 1.
        line: u32,
        /// The unknown name.
        name: String,
    },
    /// A function calls itself, directly or through others.
    #[error("function `{name}` is recursive, which the interpreter does not support")]
    Recursive {
        /// The function.
        name: String,
    },
    /// The module has no kernel of this name.
    #[error("no kernel `{name}` in the module, which has {known:?}")]
    NoSuchKernel {
        /// The name asked for.
        name: String,
        /// The kernels of the module.
        known: Vec<String>,
    },
}

/// Why a kernel cannot be launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The number of arguments differs from the number of parameters.
    #[error("kernel `{kernel}` has {expected} parameters, but {found} arguments were given")]
    ArgumentCount {
        /// The kernel.
        kernel: String,
        /// Its parameters.
        expected: usize,
        /// The arguments given.
        found: usize,
    },
    /// An argument has another size than its parameter.
    #[error("argument {index} of kernel `{kernel}` has {found} bytes, but its parameter has {expected}")]
    ArgumentSize {
        /// The kernel.
        kernel: String,
        /// Position of the argument.
        index: usize,
        /// Size of the parameter, bytes.
        expected: usize,
        /// Size of the argument, bytes.
        found: usize,
    },
    /// A grid or block dimension is zero, or the block exceeds the limit of the kernel or of the hardware.
    #[error(
        "block of {threads} threads in a grid of {grid:?} blocks: a block needs 1 to {threads_max} threads, a grid at least one \
         block, and at most 65,535 in the second and the third direction"
    )]
    Shape {
        /// Threads of the block.
        threads: u64,
        /// Blocks of the grid in each direction.
        grid: [u32; 3],
        /// Limit on the threads of a block: `__launch_bounds__`, or 1,024.
        threads_max: u64,
    },
    /// The block needs more shared memory than any GPU has.
    #[error("the block needs {bytes} bytes of shared memory; the limit is {bytes_max}")]
    SharedMemory {
        /// Static plus dynamic shared memory, bytes.
        bytes: usize,
        /// The limit, bytes.
        bytes_max: usize,
    },
}
