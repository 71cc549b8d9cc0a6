//! Translates one instruction of a program into commands. Pure: no call of a library.
//!
//! One file per family of operations, beside the source file of its kernels. Aliasing: the memory pass overlaps only an
//! operand and a result that `Op::in_place_pairs` names, and then the two are equal; each case below that starts with a copy
//! skips it if both are the same memory, and each kernel reads an element of such an operand before it writes it.

mod activation;
mod adafactor;
mod attention;
mod bias;
mod cache;
mod columns;
mod cross_entropy;
mod elementwise;
mod embedding;
mod formulas;
mod fp8;
mod head_norm;
mod magnitude;
mod merged;
mod norm;
mod optimizer;
mod product;
mod qk_norm;
mod rotary;
mod rows;
mod sums;
mod unpack;

pub(crate) use merged::{Commands, lower_all};

use crate::command::{Args, Buffer, Command, Launch};
use crate::cudnn::{Packing, Shape};
use crate::kernels::Instance;
use phalanx_strategies::program::{DType, Instr, Op, Program, ValueId, op};

/// Alignment of all buffers, scratch included: a transaction of global memory is 128 bytes, and tensor copies want 256.
pub(crate) const ALIGN_BYTES: usize = 256;

/// Threads of a block, for kernels without shared memory.
pub(crate) const THREADS: u32 = 256;
/// Most blocks of a launch whose threads run over their elements with a stride: a few for each multiprocessor.
const BLOCKS_MAX: usize = 1024;

/// The instruction being lowered: its operands, and the commands so far.
#[derive(Debug)]
pub(crate) struct Lowering {
    pub(crate) reads: Vec<Buffer>,
    pub(crate) writes: Vec<Buffer>,
    /// First byte of the scratch.
    scratch: u64,
    /// What is taken of it, in order.
    taken: Vec<Buffer>,
    commands: Vec<Command>,
    engines: Engines,
    /// Whether the weight that it updates, or the table that it reads, is split.
    is_split: bool,
}

/// What a GPU and its libraries do for an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engines {
    /// The shape for which cuDNN runs the instruction.
    pub(crate) cudnn: Option<Shape>,
    /// Most bytes of shared memory that a block of this crate's kernels may have.
    pub(crate) shared_bytes_max: usize,
    /// Whether cuBLASLt multiplies e4m3 numbers with a scale for each row.
    pub(crate) has_fp8: bool,
}

impl Engines {
    /// The GPUs with the least: sm_86, sm_89, sm_120.
    const NARROW: Engines = Engines { cudnn: None, shared_bytes_max: 99 << 10, has_fp8: false };
    /// The GPUs with the most: sm_90.
    pub(crate) const WIDE: Engines = Engines { cudnn: None, shared_bytes_max: 227 << 10, has_fp8: true };
}

/// Lowers an instruction; `place` is the address of a value, `scratch` that of the scratch.
pub(crate) fn lower(
    p: &Program,
    instr: &Instr,
    place: impl Fn(ValueId) -> u64,
    scratch: u64,
    engines: Engines,
) -> Lowering {
    let buffer = |v: &ValueId| {
        let value = p.value(*v);
        Buffer { address: place(*v), rows: value.n_rows(), cols: value.n_columns(), dtype: value.dtype }
    };
    let (reads, writes) = (instr.reads.iter().map(buffer).collect(), instr.writes.iter().map(buffer).collect());
    let is_split = match instr.op {
        Op::Update(_) => p.is_split(instr.writes[0]),
        Op::Embedding(_) => p.is_split(instr.reads[1]),
        _ => false,
    };
    let (taken, commands) = (Vec::new(), Vec::new());
    let mut lowering = Lowering { reads, writes, scratch, taken, commands, engines, is_split };
    lowering.op(p, &instr.op);
    lowering
}

/// Bytes of scratch that an instruction needs: the most that its lowerings take.
pub(crate) fn scratch_bytes(p: &Program, instr: &Instr, has_cudnn: bool) -> usize {
    // Different addresses, so that no operand is taken for the memory of another.
    let taken = |engines| lower(p, instr, |v| (u64::from(v.0) + 1) << 40, 0, engines).taken_bytes();
    let documents = Packing::Documents { n: 1, longest: 2 };
    let packings = [Packing::Whole { rows: 0, seq_len: 0 }, documents].into_iter().filter(|_| has_cudnn);
    let shapes = packings.filter_map(|packing| cudnn_shape(p, instr, packing));
    let of_library = shapes.map(|shape| Engines { cudnn: Some(shape), ..Engines::WIDE });
    of_library.chain([Engines::NARROW, Engines::WIDE]).map(taken).max().unwrap_or(0)
}

/// The shape for which cuDNN may run an instruction on a batch of this packing.
pub(crate) fn cudnn_shape(p: &Program, instr: &Instr, packing: Packing) -> Option<Shape> {
    let (Op::Attention(heads) | Op::AttentionBackward(op::AttentionBackward(heads))) = &instr.op else { return None };
    let is_statistics = |v: &ValueId| p.value(*v).n_columns() == heads.n_heads && p.value(*v).dtype == DType::F32;
    let operands = instr.reads.iter().chain(&instr.writes);
    let dtypes = operands.filter(|v| p.value(**v).dtype != DType::I32 && !is_statistics(v));
    let dtypes: Vec<DType> = dtypes.map(|v| p.value(*v).dtype).collect();
    let shape = Shape::of(heads, &dtypes, p.value(instr.reads[0]).n_rows(), packing)?;
    Some(Shape { is_deterministic: is_reproducible(p), ..shape })
}

/// Whether a program's results have the same bits on every mesh: such programs add up gradients along a tree, and squares in blocks.
pub(crate) fn is_reproducible(p: &Program) -> bool {
    p.instrs.iter().any(|i| matches!(i.op, Op::TreeSum(_) | Op::SumSquaresBlocks(_)))
}

impl Lowering {
    /// The commands, and the bytes of scratch that they use.
    pub(crate) fn finish(self) -> (Vec<Command>, usize) {
        let bytes = self.taken_bytes();
        (self.commands, bytes)
    }

    /// The buffers in the scratch.
    pub(crate) fn taken(&self) -> &[Buffer] {
        &self.taken
    }

    fn taken_bytes(&self) -> usize {
        let end = |last: &Buffer| (last.address - self.scratch) as usize + last.bytes().next_multiple_of(ALIGN_BYTES);
        self.taken.last().map_or(0, end)
    }

    fn op(&mut self, p: &Program, op: &Op) {
        match op {
            Op::MatMul(m) => self.product(m),
            Op::Attention(a) => self.attention(a),
            Op::AttentionBackward(op::AttentionBackward(a)) => self.attention_backward(a),
            Op::CacheWrite(op::CacheWrite(a)) => self.cache_write(a),
            Op::CachedAttention(a) => self.cached_attention(a),
            Op::AttentionPart(part) => self.attention_part(part),
            Op::AttentionPartBackward(op::AttentionPartBackward { part, carried_q, carried_kv }) => {
                self.attention_part_backward(part, *carried_q, *carried_kv);
            }
            Op::Embedding(op::Embedding { residual, first }) => {
                self.embedding(*residual, *first, p.mesh_rank.mesh.tp > 1)
            }
            Op::EmbeddingBackward(op::EmbeddingBackward { residual, first }) => {
                self.embedding_backward(*residual, *first)
            }
            Op::Activation(op::Activation(f)) => self.activation(*f),
            Op::ActivationBackward(op::ActivationBackward { function, again }) => {
                self.activation_backward(*function, *again)
            }
            Op::Add(_) => self.add(),
            Op::Scale(op::Scale { factor }) => self.scale(*factor),
            Op::Dropout(dropout) => self.dropout(dropout),
            Op::Slice(op::Slice { start }) => self.slice(*start),
            Op::Paste(op::Paste { start }) => self.paste(*start),
            Op::Sum(_) => self.sum(),
            Op::Assemble(op::Assemble { places }) => self.assemble(places),
            Op::TreeSum(op::TreeSum { n_leaves, n_ranks }) => self.tree_sum(*n_leaves, *n_ranks),
            Op::SumSquares(op::SumSquares { elements }) => self.sum_squares(*elements),
            Op::SumSquaresBlocks(op::SumSquaresBlocks { block }) => self.sum_squares_blocks(*block),
            Op::ClipCoefficient(op::ClipCoefficient { max_norm }) => self.clip_coefficient(*max_norm),
            Op::CrossEntropy(op::CrossEntropy { residual, gradient, vocab }) => {
                self.cross_entropy(*residual, *gradient, *vocab)
            }
            Op::CrossEntropyStats(op::CrossEntropyStats(vocab)) => self.cross_entropy_stats(*vocab),
            Op::LogProbs(_) | Op::LogProbsBackward(_) | Op::RowSums(_) | Op::RowSumsBackward(_) | Op::Formulas(_) => {
                self.of_sequences(op)
            }
            Op::Update(update) => self.update(update),
            Op::UpdateSums(op::UpdateSums(update)) => self.update_sums(update),
            Op::Cast(_) => self.cast(self.reads[0], self.writes[0]),
            Op::Unpack(op::Unpack(packing)) => self.unpack(*packing),
            Op::Norm(op::Norm { kind, eps }) => self.norm(*kind, *eps),
            Op::NormBackward(op::NormBackward { kind, residual_x, residual_params, again, narrow }) => {
                self.norm_backward(*kind, *residual_x, *residual_params, *again, *narrow);
            }
            Op::HeadNorm(op::HeadNorm { heads, eps }) => self.head_norm(heads, *eps),
            Op::HeadNormBackward(op::HeadNormBackward { heads, residual }) => self.head_norm_backward(heads, *residual),
            Op::QkSquares(op::QkSquares(columns)) => self.qk_squares(columns),
            Op::QkSquaresBackward(op::QkSquaresBackward { columns, residual }) => {
                self.qk_squares_backward(columns, *residual)
            }
            Op::QkNorm(norm) => self.qk_norm(norm),
            Op::QkNormBackward(op::QkNormBackward { norm, residual }) => self.qk_norm_backward(norm, *residual),
            Op::Rotary(op::Rotary { heads, inverse }) => self.rotary(heads, *inverse),
            Op::SplitColumns(_) => self.split_columns(),
            Op::JoinColumns(_) => self.join_columns(),
            Op::AddBias(_) => self.add_bias(),
            Op::RowLengths(op::RowLengths(rows)) => self.row_lengths(rows),
            Op::Magnitude(op::Magnitude(columns)) => self.magnitude(*columns),
            Op::MagnitudeBackward(op::MagnitudeBackward { columns, residual }) => {
                self.magnitude_backward(*columns, *residual)
            }
            Op::ColumnSum(op::ColumnSum { residual, columns }) => self.column_sum(*residual, *columns),
            // Run by the machine.
            Op::Start(_) | Op::Await(_) | Op::Opaque(_) => {}
            Op::Enter(_) => unreachable!("erased when the program was compiled"),
        }
    }

    /// Takes scratch for `rows` x `cols` elements.
    pub(crate) fn take(&mut self, rows: usize, cols: usize, dtype: DType) -> Buffer {
        let buffer = Buffer { address: self.scratch + self.taken_bytes() as u64, rows, cols, dtype };
        self.taken.push(buffer);
        buffer
    }

    /// Launches a kernel on this many blocks.
    pub(crate) fn launch(&mut self, kernel: Instance, grid: [u32; 3], threads: u32, shared_bytes: u32, args: Args) {
        if grid.contains(&0) {
            return;
        }
        self.commands.push(Command::Launch(Launch { kernel, grid, threads, shared_bytes, args }));
    }

    /// Launches a kernel whose threads run over `n` elements with a stride (`GRID_STRIDE`).
    pub(crate) fn launch_strided(&mut self, kernel: Instance, n: usize, args: Args) {
        let blocks = n.div_ceil(THREADS as usize).min(BLOCKS_MAX);
        self.launch(kernel, [blocks as u32, 1, 1], THREADS, 0, args);
    }

    /// Copies a value to another of the same type and size, unless both are the same memory.
    pub(crate) fn copy(&mut self, from: Buffer, to: Buffer) {
        assert_eq!((from.len(), from.dtype), (to.len(), to.dtype), "a copy keeps its elements");
        if !from.is(&to) && from.len() > 0 {
            self.commands.push(Command::Copy { from: from.address, to: to.address, bytes: from.bytes() });
        }
    }

    /// Fills a value with zeros.
    pub(crate) fn zero(&mut self, at: Buffer) {
        if at.len() > 0 {
            self.commands.push(Command::Zero { at: at.address, bytes: at.bytes() });
        }
    }

    pub(crate) fn push(&mut self, command: Command) {
        self.commands.push(command);
    }
}

/// Name of an element type in the kernels' sources.
pub(crate) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        DType::F64 => "double",
        DType::I32 => "int",
        DType::E4m3 => "e4m3",
    }
}
