//! What the machine enqueues for an instruction, as plain data: checks run the kernels elsewhere than on a GPU, with the
//! launches that the GPU gets.

use crate::command::{Args, Command};
use crate::cudnn::{Call, Direction, Packing};
use crate::kernels::Source;
use crate::lower::{Engines, Lowering, cudnn_shape, lower, lower_all};
use crate::product;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Attention, DType, Instr, Op, Program, ValueId, op};

pub use crate::cudnn::TensorId;

/// All work of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkOfInstr {
    /// In the order in which they run.
    pub work: Vec<Work>,
    /// Buffers in the scratch: address and bytes of each, in the order of their addresses.
    pub scratch: Vec<(u64, usize)>,
}

/// A piece of work on the compute stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Launches a kernel.
    Launch(KernelLaunch),
    /// Copies bytes.
    Copy {
        /// Address of the bytes.
        from: u64,
        /// Address of the copy.
        to: u64,
        /// How many.
        bytes: usize,
    },
    /// Fills bytes with zeros.
    Zero {
        /// Address.
        at: u64,
        /// How many.
        bytes: usize,
    },
    /// Multiplies matrices.
    Product(MatrixProduct),
    /// Calls cuDNN.
    Attention(AttentionCall),
}

/// A kernel launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelLaunch {
    /// The source of the kernel.
    pub source: Source,
    /// Macros of its compilation, as `NAME=VALUE`.
    pub macros: Vec<String>,
    /// The function.
    pub kernel: &'static str,
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The arguments, as words of 8 bytes; of the last word of each, the kernel's parameter may have fewer bytes.
    pub args: Vec<Vec<u64>>,
}

/// `c [m, n] = (added) + alpha op(a) [m, k] op(b) [k, n] + (bias [n])`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixProduct {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// The left operand.
    pub a: Matrix,
    /// The right operand.
    pub b: Matrix,
    /// Addresses of factors of the rows of op(a) and of the columns of op(b), f32.
    pub scales: Option<[u64; 2]>,
    /// The result.
    pub c: Matrix,
    /// Factor of the product.
    pub alpha: f32,
    /// Address of a matrix to add, stored as `c`; it may be `c`.
    pub added: Option<u64>,
    /// Address of a row of f32 to add to every row.
    pub bias: Option<u64>,
}

/// Causal attention over packed qkv, or its adjoint, through cuDNN.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// Heads, window and scale; `seq_len` is the most tokens of a document.
    pub heads: Attention,
    /// The type of queries, keys, values, outputs and their gradients.
    pub dtype: DType,
    /// Documents of the batch; whole rows are documents too.
    pub n_documents: usize,
    /// Whether documents have lengths and places in memory. Otherwise each is a row of `seq_len` tokens, and statistics
    /// are `[B, H, S]`.
    pub has_places: bool,
    /// Whether the call computes gradients.
    pub is_adjoint: bool,
    /// Addresses of the tensors.
    pub tensors: Vec<(TensorId, u64)>,
}

/// A row-major matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Address of the first element.
    pub address: u64,
    /// Elements from one row to the next, as stored.
    pub stride: usize,
    /// Element type.
    pub dtype: DType,
    /// Whether the product uses the transpose.
    pub is_transposed: bool,
}

/// Lowers an instruction to kernels of this crate. `place` gives the address of each value, `scratch` is that of the scratch;
/// all are multiples of 256.
pub fn work_of(program: &Program, instr: &Instr, place: impl Fn(ValueId) -> u64, scratch: u64) -> WorkOfInstr {
    work(lower(program, instr, place, scratch, Engines::WIDE))
}

/// Lowers attention, or its adjoint, to cuDNN for a batch with these starts of documents, and to the kernels around the call;
/// nothing for what cuDNN has no plans for. Arguments as of [`work_of`].
pub fn work_beside_cudnn(
    program: &Program,
    instr: &Instr,
    doc_start: &[i32],
    place: impl Fn(ValueId) -> u64,
    scratch: u64,
) -> Option<WorkOfInstr> {
    let (Op::Attention(heads) | Op::AttentionBackward(op::AttentionBackward(heads))) = &instr.op else { return None };
    let shape = cudnn_shape(program, instr, Packing::of(doc_start, heads.seq_len))?;
    Some(work(lower(program, instr, place, scratch, Engines { cudnn: Some(shape), ..Engines::WIDE })))
}

fn work(lowering: Lowering) -> WorkOfInstr {
    let taken = lowering.taken().iter().map(|buffer| (buffer.address, buffer.bytes())).collect();
    let (commands, _) = lowering.finish();
    WorkOfInstr { work: commands.into_iter().map(Work::from).collect(), scratch: taken }
}

/// Lowers all instructions of a program, as a machine does: some share launches.
pub fn work_of_program(c: &Compiled, place: impl Fn(ValueId) -> u64, scratch: u64) -> Vec<Work> {
    lower_all(c, place, scratch, |_| Engines::WIDE).commands.into_iter().map(Work::from).collect()
}

impl From<Command> for Work {
    fn from(command: Command) -> Work {
        match command {
            Command::Launch(launch) => Work::Launch(KernelLaunch {
                source: launch.kernel.source,
                macros: launch.kernel.macros,
                kernel: launch.kernel.kernel,
                grid: launch.grid,
                threads: launch.threads,
                shared_bytes: launch.shared_bytes,
                args: words(&launch.args),
            }),
            Command::Copy { from, to, bytes } => Work::Copy { from, to, bytes },
            Command::Zero { at, bytes } => Work::Zero { at, bytes },
            Command::Attention(Call { shape, direction, tensors, workspace: _ }) => Work::Attention(AttentionCall {
                heads: shape.heads,
                dtype: shape.dtype,
                n_documents: shape.batch,
                has_places: shape.has_documents,
                is_adjoint: direction == Direction::Backward,
                tensors,
            }),
            Command::Product(product) => {
                let product::Product { m, n, k, a, b, scales, c, alpha, added, bias, workspace: _ } = product;
                let (a, b, c) = (a.into(), b.into(), c.into());
                Work::Product(MatrixProduct { m, n, k, a, b, scales, c, alpha, added, bias })
            }
        }
    }
}

fn words(args: &Args) -> Vec<Vec<u64>> {
    args.each().map(<[u64]>::to_vec).collect()
}

impl From<product::Matrix> for Matrix {
    fn from(matrix: product::Matrix) -> Matrix {
        let product::Matrix { address, stride, dtype, is_transposed } = matrix;
        Matrix { address, stride, dtype, is_transposed }
    }
}
