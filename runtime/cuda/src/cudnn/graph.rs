//! Attention and its adjoint as graphs of elementary operations, in the form that cuDNN's attention engines recognise.
//!
//! `B` rows or documents, `H` query heads, `K` key heads, `S` tokens of a row, `D` columns of a head, `C = (H + 2 K) D`
//! columns of packed qkv. All strides come from [`Strides`]: engines accept others for tensors in their workspace and then
//! compute wrong gradients without an error.
//!
//! Source of the formulas: Dao 2023, FlashAttention-2 (arXiv:2307.08691). The order of the operations, the places of the
//! masks and the virtual tensors are those that cuDNN's documentation of fused attention describes.

use super::descriptor::{Attribute, Descriptor, Kind, Library, Type};
use super::packing::Packing;
use crate::error::CudaError;
use phalanx_strategies::program::{Attention, DType};

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Rows of the batch; for documents, the most documents of a batch.
    pub(crate) batch: usize,
    pub(crate) heads: Attention,
    /// The type of queries, keys, values, outputs and their gradients.
    pub(crate) dtype: DType,
    /// The batch consists of documents, each with its own length and place.
    pub(crate) has_documents: bool,
    /// The same operands have gradients of the same bits in every run.
    pub(crate) is_deterministic: bool,
}

/// Tensors that are in memory, by the ids that a call gives addresses for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorId {
    /// Queries, inside packed qkv.
    Q = 1,
    /// Keys, inside packed qkv.
    K = 2,
    /// Values, inside packed qkv.
    V = 3,
    /// Outputs.
    O = 4,
    /// Logarithms of the sums of exponentials.
    Lse = 5,
    /// Gradients of outputs.
    DO = 6,
    /// Gradients of queries, inside packed qkv.
    DQ = 7,
    /// Gradients of keys, inside packed qkv.
    DK = 8,
    /// Gradients of values, inside packed qkv.
    DV = 9,
    /// Tokens of each document: of queries.
    QueryLengths = 10,
    /// Tokens of each document: of keys.
    KeyLengths = 11,
    /// Offsets of documents in packed qkv, in elements.
    PackedOffsets = 12,
    /// Offsets of documents in outputs, in elements.
    OutputOffsets = 13,
    /// Offsets of documents in statistics, in elements.
    LseOffsets = 14,
    /// Sums of `do o`, computed on the way.
    Delta = 19,
    /// Gradients of queries in f32, computed on the way.
    DQSums = 20,
}

/// Scalars that a call passes by value, and their indexes in [`Shape::scalars`].
pub(super) fn scalars(shape: &Shape, direction: Direction) -> Vec<(i64, usize)> {
    let all = [
        (SCALE, true),
        (HIDDEN, true),
        (ONE, direction == Direction::Backward),
        (WINDOW, shape.heads.window.is_some()),
    ];
    all.into_iter().enumerate().filter(|(_, (_, is_read))| *is_read).map(|(i, (id, _))| (id, i)).collect()
}
const SCALE: i64 = 15;
const HIDDEN: i64 = 16;
const ONE: i64 = 17;
const WINDOW: i64 = 18;
/// The first id of tensors that are never in memory.
const VIRTUAL: i64 = 100;
/// Alignment of addresses: rows of heads are multiples of 8 elements.
const ALIGNMENT: i64 = 16;

/// Documents take part as if all were as long as the longest; then a batch has at most this many times its tokens.
pub(crate) const DOCUMENT_TOKENS: usize = 2;
/// Scratch of any engine, whatever the shape.
const WORKSPACE_BYTES: usize = 1 << 20;
/// Scratch of any engine for one row or document.
const WORKSPACE_BYTES_OF_ROW: usize = 1 << 10;

impl Shape {
    /// Whole attention with these element types of operands and results, if the library may have engines for it.
    pub(crate) fn of(heads: &Attention, dtypes: &[DType], n_tokens: usize, packing: Packing) -> Option<Shape> {
        let dtype = dtypes[0];
        let is_half_width = matches!(dtype, DType::Bf16 | DType::F16) && dtypes.iter().all(|other| *other == dtype);
        let has_engines = heads.head_dim.is_multiple_of(8) && heads.head_dim <= 128 && heads.seq_len > 1;
        if !is_half_width || !has_engines || n_tokens == 0 {
            return None;
        }
        let (batch, seq_len, has_documents) = match packing {
            Packing::Whole { .. } => (n_tokens / heads.seq_len, heads.seq_len, false),
            Packing::Documents { n, longest } if n * longest <= DOCUMENT_TOKENS * n_tokens => (n, longest, true),
            Packing::Documents { .. } | Packing::Unknown => return None,
        };
        let window = heads.window.filter(|window| *window < seq_len);
        let heads = Attention { seq_len, window, ..*heads };
        Some(Shape { batch, heads, dtype, has_documents, is_deterministic: false })
    }

    /// Most bytes of scratch that an engine may take: gradients in f32 of each query, and gradients of each query head's keys and
    /// values.
    pub(crate) fn workspace_bytes(&self, direction: Direction) -> usize {
        let heads = &self.heads;
        let elements = self.batch * heads.seq_len * heads.n_heads * heads.head_dim;
        let of_gradients = match direction {
            Direction::Forward => 0,
            // In the deterministic form also what `DQSums` has otherwise.
            Direction::Backward => elements * if self.is_deterministic { 12 } else { 8 },
        };
        WORKSPACE_BYTES + self.batch * WORKSPACE_BYTES_OF_ROW + of_gradients
    }

    /// Values of the scalars.
    pub(super) fn scalars(&self) -> [f32; 4] {
        let window = self.heads.window.unwrap_or(0) as f32;
        [self.heads.scale, f32::NEG_INFINITY, 1.0, window]
    }
}

/// Element types, by their numbers in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataType {
    Float = 0,
    Half = 2,
    Int32 = 4,
    Bfloat16 = 9,
    Int64 = 10,
    Boolean = 11,
}

/// Pointwise operations, by their numbers in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Add = 0,
    Mul = 1,
    Div = 6,
    Sub = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    Greater = 302,
    GreaterOrEqual = 303,
    Less = 304,
    And = 400,
    /// The index of an element along an axis.
    Index = 501,
    /// `t ? x : b`.
    Select = 601,
}

/// Reductions, by their numbers in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduction {
    Add = 0,
    Max = 3,
}

/// Dims and strides of the tensors of a shape.
#[derive(Clone, Copy, Debug)]
struct Strides {
    b: i64,
    h: i64,
    k: i64,
    s: i64,
    d: i64,
    /// Columns of packed qkv.
    c: i64,
}

/// Dims and strides.
type Layout = ([i64; 4], [i64; 4]);

impl Strides {
    fn of(shape: &Shape) -> Strides {
        let a = &shape.heads;
        let [b, h, k, s, d, c] =
            [shape.batch, a.n_heads, a.n_kv_heads, a.seq_len, a.head_dim, a.qkv_columns()].map(|n| n as i64);
        Strides { b, h, k, s, d, c }
    }

    /// Queries inside packed qkv.
    fn q(self) -> Layout {
        ([self.b, self.h, self.s, self.d], [self.s * self.c, self.d, self.c, 1])
    }

    /// Keys or values inside packed qkv.
    fn kv(self) -> Layout {
        ([self.b, self.k, self.s, self.d], [self.s * self.c, self.d, self.c, 1])
    }

    fn kv_transposed(self) -> Layout {
        transposed(self.kv())
    }

    /// Outputs and their gradients.
    fn o(self) -> Layout {
        ([self.b, self.h, self.s, self.d], [self.s * self.h * self.d, self.d, self.h * self.d, 1])
    }

    /// Queries, heads apart.
    fn of_heads(self) -> Layout {
        ([self.b, self.h, self.s, self.d], [self.h * self.s * self.d, self.s * self.d, self.d, 1])
    }

    /// One element for each query, heads apart.
    fn of_queries(self) -> Layout {
        ([self.b, self.h, self.s, 1], [self.h * self.s, self.s, 1, 1])
    }

    /// One element for each query, tokens apart.
    fn of_tokens(self) -> Layout {
        ([self.b, self.h, self.s, 1], [self.h * self.s, 1, self.h, 1])
    }

    /// Scores of all keys for all queries.
    fn scores(self) -> Layout {
        ([self.b, self.h, self.s, self.s], [self.h * self.s * self.s, self.s * self.s, self.s, 1])
    }

    fn scalar(self) -> Layout {
        ([1; 4], [1; 4])
    }

    /// `n` numbers.
    fn list(self, n: i64) -> Layout {
        ([n, 1, 1, 1], [1; 4])
    }
}

const fn transposed(([b, h, s, d], [of_b, of_h, of_s, of_d]): Layout) -> Layout {
    ([b, h, d, s], [of_b, of_h, of_d, of_s])
}

/// A tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tensor(usize);

/// Operations, in an order in which each comes after those whose results it reads.
#[derive(Debug)]
pub(super) struct Graph<'a> {
    library: &'a Library,
    shape: &'a Shape,
    strides: Strides,
    tensors: Vec<(Descriptor, Layout)>,
    /// Lengths of queries' and keys' documents, if there are documents.
    lengths: Option<[Tensor; 2]>,
    hidden: Tensor,
    /// Descriptors of operations, and those that they name.
    pub(super) operations: Vec<Descriptor>,
    named: Vec<Descriptor>,
    n_virtual: i64,
}

impl<'a> Graph<'a> {
    fn new(library: &'a Library, shape: &'a Shape) -> Result<Graph<'a>, CudaError> {
        let strides = Strides::of(shape);
        let (operations, named, tensors) = (Vec::new(), Vec::new(), Vec::new());
        let mut graph = Graph {
            library,
            shape,
            strides,
            tensors,
            lengths: None,
            hidden: Tensor(0),
            operations,
            named,
            n_virtual: 0,
        };
        graph.hidden = graph.scalar(HIDDEN)?;
        if shape.has_documents {
            let list = strides.list(strides.b);
            let queries = graph.tensor(TensorId::QueryLengths as i64, DataType::Int32, list, None)?;
            let keys = graph.tensor(TensorId::KeyLengths as i64, DataType::Int32, list, None)?;
            graph.lengths = Some([queries, keys]);
        }
        Ok(graph)
    }

    /// `[q, k, v] -> [o, lse]`.
    ///
    /// # Errors
    /// When the library refuses a descriptor.
    pub(super) fn forward(library: &'a Library, shape: &'a Shape) -> Result<Graph<'a>, CudaError> {
        let mut g = Graph::new(library, shape)?;
        let (s, operand) = (g.strides, g.operand_type());
        let packed = g.offsets(TensorId::PackedOffsets)?;
        let q = g.tensor(TensorId::Q as i64, operand, s.q(), packed)?;
        let k = g.tensor(TensorId::K as i64, operand, s.kv_transposed(), packed)?;
        let v = g.tensor(TensorId::V as i64, operand, s.kv(), packed)?;
        let scale = g.scalar(SCALE)?;

        let scores = g.scaled_scores(q, k, scale)?;
        let scores = g.masked(scores)?;
        let max = g.reduced(Reduction::Max, scores)?;
        let below_max = g.binary(Mode::Sub, scores, max)?;
        let exp = g.unary(Mode::Exp, below_max)?;
        let sum = g.reduced(Reduction::Add, exp)?;
        let log = g.unary(Mode::Log, sum)?;
        let lse = g.lse()?;
        g.pointwise(Mode::Add, DataType::Float, [Some(max), Some(log), None], lse)?;
        let weights = g.scratch(operand, s.scores(), None)?;
        g.pointwise(Mode::Div, DataType::Float, [Some(exp), Some(sum), None], weights)?;
        let offsets = g.offsets(TensorId::OutputOffsets)?;
        let o = g.tensor(TensorId::O as i64, operand, s.o(), offsets)?;
        let [of_queries, of_keys] = g.lengths();
        g.product(weights, v, o, [of_queries, None, of_keys], false)?;
        Ok(g)
    }

    /// `[q, k, v, o, lse, do] -> [dq, dk, dv]`.
    ///
    /// # Errors
    /// When the library refuses a descriptor.
    pub(super) fn backward(library: &'a Library, shape: &'a Shape) -> Result<Graph<'a>, CudaError> {
        let mut g = Graph::new(library, shape)?;
        let (s, operand) = (g.strides, g.operand_type());
        let packed = g.offsets(TensorId::PackedOffsets)?;
        let q = g.tensor(TensorId::Q as i64, operand, s.q(), packed)?;
        let k = g.tensor(TensorId::K as i64, operand, s.kv_transposed(), packed)?;
        let v = g.tensor(TensorId::V as i64, operand, s.kv_transposed(), packed)?;
        let outputs = g.offsets(TensorId::OutputOffsets)?;
        let o = g.tensor(TensorId::O as i64, operand, s.o(), outputs)?;
        let dout = g.tensor(TensorId::DO as i64, operand, s.o(), outputs)?;
        let scale = g.scalar(SCALE)?;
        let delta = g.delta(o, dout)?;

        let scores = g.scaled_scores(q, k, scale)?;
        let lse = g.lse()?;
        let below_lse = g.binary(Mode::Sub, scores, lse)?;
        let below_lse = g.masked(below_lse)?;
        let weights = g.unary(Mode::Exp, below_lse)?;
        g.gradient_of_keys(TensorId::DV, weights, dout, packed)?;

        let [of_queries, of_keys] = g.lengths();
        let dweights = g.scratch(DataType::Float, s.scores(), None)?;
        g.product(dout, v, dweights, [of_queries, of_keys, None], false)?;
        let above_delta = g.binary(Mode::Sub, dweights, delta)?;
        let dscores = g.binary(Mode::Mul, above_delta, weights)?;
        let dscores = g.binary(Mode::Mul, dscores, scale)?;
        g.gradient_of_keys(TensorId::DK, dscores, q, packed)?;
        g.gradient_of_queries(dscores, k, packed)?;
        Ok(g)
    }

    /// The descriptors that the operations name, which live as long as the plan.
    pub(super) fn into_descriptors(self) -> Vec<Descriptor> {
        let tensors = self.tensors.into_iter().map(|(descriptor, _)| descriptor);
        self.operations.into_iter().chain(self.named).chain(tensors).collect()
    }

    /// `scale q k`.
    fn scaled_scores(&mut self, q: Tensor, k: Tensor, scale: Tensor) -> Result<Tensor, CudaError> {
        let [of_queries, of_keys] = self.lengths();
        let scores = self.scratch(DataType::Float, self.strides.scores(), None)?;
        self.product(q, k, scores, [of_queries, of_keys, None], self.shape.has_documents)?;
        self.binary(Mode::Mul, scores, scale)
    }

    /// `x`, and minus infinity for pairs outside the documents, for keys behind the query, and for keys before its window.
    fn masked(&mut self, mut x: Tensor) -> Result<Tensor, CudaError> {
        if let Some([of_queries, of_keys]) = self.lengths {
            let (row, column) = (self.index(x, 2)?, self.index(x, 3)?);
            let row = self.compared(Mode::Less, row, of_queries)?;
            let column = self.compared(Mode::Less, column, of_keys)?;
            let inside = self.compared(Mode::And, row, column)?;
            x = self.selected(x, inside)?;
        }
        let (row, column) = (self.index(x, 2)?, self.index(x, 3)?);
        let before = self.compared(Mode::GreaterOrEqual, row, column)?;
        x = self.selected(x, before)?;
        if self.shape.heads.window.is_some() {
            let window = self.scalar(WINDOW)?;
            let (row, column) = (self.index(x, 2)?, self.index(x, 3)?);
            let last = self.binary(Mode::Add, column, window)?;
            let inside = self.compared(Mode::Greater, last, row)?;
            x = self.selected(x, inside)?;
        }
        Ok(x)
    }

    /// The sums of `do o` over each head.
    fn delta(&mut self, o: Tensor, dout: Tensor) -> Result<Tensor, CudaError> {
        let s = self.strides;
        let products = self.scratch(DataType::Float, s.o(), None)?;
        self.pointwise(Mode::Mul, DataType::Float, [Some(dout), Some(o), None], products)?;
        let sums = self.reduced(Reduction::Add, products)?;
        let one = self.scalar(ONE)?;
        let delta = self.tensor(TensorId::Delta as i64, DataType::Float, s.of_queries(), None)?;
        self.pointwise(Mode::Mul, DataType::Float, [Some(sums), Some(one), None], delta)?;
        Ok(delta)
    }

    /// `x^T y`, summed over the query heads of each key head.
    fn gradient_of_keys(
        &mut self,
        id: TensorId,
        x: Tensor,
        y: Tensor,
        offsets: Option<Tensor>,
    ) -> Result<(), CudaError> {
        let (s, operand) = (self.strides, self.operand_type());
        let transpose = self.scratch(operand, transposed(s.scores()), None)?;
        self.reshape(x, transpose)?;
        let gradient = self.tensor(id as i64, operand, s.kv(), offsets)?;
        let [of_queries, of_keys] = self.lengths();
        let lengths = [of_keys, None, of_queries];
        if s.h == s.k {
            return self.product(transpose, y, gradient, lengths, false);
        }
        let of_heads = self.scratch(operand, s.of_heads(), None)?;
        self.product(transpose, y, of_heads, lengths, false)?;
        self.reduction(Reduction::Add, of_heads, gradient)
    }

    /// `dscores k`. Blocks of keys add to it in memory; in the deterministic form the library chooses the way and the order.
    fn gradient_of_queries(&mut self, dscores: Tensor, k: Tensor, offsets: Option<Tensor>) -> Result<(), CudaError> {
        let (s, operand) = (self.strides, self.operand_type());
        let keys = self.scratch(operand, s.kv(), offsets)?;
        self.reshape(k, keys)?;
        let dq = self.tensor(TensorId::DQ as i64, operand, s.q(), offsets)?;
        let [of_queries, of_keys] = self.lengths();
        let lengths = [of_queries, None, of_keys];
        if self.shape.is_deterministic {
            return self.product(dscores, keys, dq, lengths, false);
        }
        let sums = self.tensor(TensorId::DQSums as i64, DataType::Float, s.of_heads(), None)?;
        self.product(dscores, keys, sums, lengths, false)?;
        self.pointwise(Mode::Identity, DataType::Float, [Some(sums), None, None], dq)
    }
}

/// Tensors and operations.
impl Graph<'_> {
    fn operand_type(&self) -> DataType {
        match self.shape.dtype {
            DType::F16 => DataType::Half,
            _ => DataType::Bfloat16,
        }
    }

    fn lengths(&self) -> [Option<Tensor>; 2] {
        self.lengths.map_or([None; 2], |lengths| lengths.map(Some))
    }

    /// Places of documents, and of the end, in elements.
    fn offsets(&mut self, id: TensorId) -> Result<Option<Tensor>, CudaError> {
        if !self.shape.has_documents {
            return Ok(None);
        }
        self.tensor(id as i64, DataType::Int64, self.strides.list(self.strides.b + 1), None).map(Some)
    }

    /// The statistics. Engines for whole rows want heads apart; a document's are tokens apart, so that one offset places them.
    fn lse(&mut self) -> Result<Tensor, CudaError> {
        let s = self.strides;
        let layout = if self.shape.has_documents { s.of_tokens() } else { s.of_queries() };
        let offsets = self.offsets(TensorId::LseOffsets)?;
        self.tensor(TensorId::Lse as i64, DataType::Float, layout, offsets)
    }

    fn tensor(&mut self, id: i64, of: DataType, layout: Layout, offsets: Option<Tensor>) -> Result<Tensor, CudaError> {
        self.describe(id, of, layout, offsets, None)
    }

    fn scalar(&mut self, id: i64) -> Result<Tensor, CudaError> {
        self.describe(id, DataType::Float, self.strides.scalar(), None, Some(Attribute::TensorIsByValue))
    }

    /// A tensor that is never in memory.
    fn scratch(&mut self, of: DataType, layout: Layout, offsets: Option<Tensor>) -> Result<Tensor, CudaError> {
        self.n_virtual += 1;
        self.describe(VIRTUAL + self.n_virtual, of, layout, offsets, Some(Attribute::TensorIsVirtual))
    }

    fn describe(
        &mut self,
        id: i64,
        of: DataType,
        layout: Layout,
        offsets: Option<Tensor>,
        flag: Option<Attribute>,
    ) -> Result<Tensor, CudaError> {
        let (dims, strides) = layout;
        let mut tensor = Descriptor::new(self.library, Kind::Tensor)?;
        tensor.set(self.library, Attribute::TensorType, Type::Elements, &[of as u32])?;
        tensor.set(self.library, Attribute::TensorDims, Type::Int64, &dims)?;
        tensor.set(self.library, Attribute::TensorStrides, Type::Int64, &strides)?;
        tensor.set(self.library, Attribute::TensorId, Type::Int64, &[id])?;
        tensor.set(self.library, Attribute::TensorAlignment, Type::Int64, &[ALIGNMENT])?;
        if let Some(flag) = flag {
            tensor.set(self.library, flag, Type::Boolean, &[1u8])?;
        }
        if let Some(Tensor(offsets)) = offsets {
            tensor.refer(self.library, Attribute::TensorRaggedOffset, &[&self.tensors[offsets].0])?;
        }
        tensor.finalize(self.library)?;
        self.tensors.push((tensor, layout));
        Ok(Tensor(self.tensors.len() - 1))
    }

    fn unary(&mut self, mode: Mode, x: Tensor) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Float, self.tensors[x.0].1, None)?;
        self.pointwise(mode, DataType::Float, [Some(x), None, None], y)?;
        Ok(y)
    }

    fn binary(&mut self, mode: Mode, x: Tensor, b: Tensor) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Float, self.tensors[x.0].1, None)?;
        self.pointwise(mode, DataType::Float, [Some(x), Some(b), None], y)?;
        Ok(y)
    }

    fn compared(&mut self, mode: Mode, x: Tensor, b: Tensor) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Boolean, self.strides.scores(), None)?;
        self.pointwise(mode, DataType::Boolean, [Some(x), Some(b), None], y)?;
        Ok(y)
    }

    fn selected(&mut self, x: Tensor, mask: Tensor) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Float, self.strides.scores(), None)?;
        self.pointwise(Mode::Select, DataType::Float, [Some(x), Some(self.hidden), Some(mask)], y)?;
        Ok(y)
    }

    /// Indexes along an axis of scores.
    fn index(&mut self, x: Tensor, axis: i64) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Int32, self.strides.scores(), None)?;
        self.operation(Mode::Index, DataType::Float, Some(axis), [Some(x), None, None], y)?;
        Ok(y)
    }

    fn pointwise(
        &mut self,
        mode: Mode,
        precision: DataType,
        operands: [Option<Tensor>; 3],
        y: Tensor,
    ) -> Result<(), CudaError> {
        self.operation(mode, precision, None, operands, y)
    }

    fn operation(
        &mut self,
        mode: Mode,
        precision: DataType,
        axis: Option<i64>,
        operands: [Option<Tensor>; 3],
        y: Tensor,
    ) -> Result<(), CudaError> {
        let library = self.library;
        let mut how = Descriptor::new(library, Kind::Pointwise)?;
        how.set(library, Attribute::PointwiseMode, Type::PointwiseMode, &[mode as u32])?;
        how.set(library, Attribute::PointwisePrecision, Type::Elements, &[precision as u32])?;
        if let Some(axis) = axis {
            how.set(library, Attribute::PointwiseAxis, Type::Int64, &[axis])?;
        }
        how.finalize(library)?;
        let names = [Attribute::PointwiseX, Attribute::PointwiseB, Attribute::PointwiseT];
        let operands = names.into_iter().zip(operands).filter_map(|(name, tensor)| Some((name, tensor?)));
        let of_tensors: Vec<_> = operands.chain([(Attribute::PointwiseY, y)]).collect();
        self.push(Kind::PointwiseOperation, Some((Attribute::PointwiseDescriptor, how)), &of_tensors)
    }

    /// `c = a b`, each of the sizes `m`, `n` and `k` as long as the documents. Elements of `c` outside them are zeros if
    /// `is_padded`.
    fn product(
        &mut self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        lengths: [Option<Tensor>; 3],
        is_padded: bool,
    ) -> Result<(), CudaError> {
        let mut how = Descriptor::new(self.library, Kind::MatMul)?;
        how.set(self.library, Attribute::MatMulPrecision, Type::Elements, &[DataType::Float as u32])?;
        if is_padded {
            how.set(self.library, Attribute::MatMulPadding, Type::Double, &[0.0f64])?;
        }
        how.finalize(self.library)?;
        let names = [Attribute::MatMulM, Attribute::MatMulN, Attribute::MatMulK];
        let lengths = names.into_iter().zip(lengths).filter_map(|(name, tensor)| Some((name, tensor?)));
        let matrices = [(Attribute::MatMulA, a), (Attribute::MatMulB, b), (Attribute::MatMulC, c)];
        let of_tensors: Vec<_> = matrices.into_iter().chain(lengths).collect();
        self.push(Kind::MatMulOperation, Some((Attribute::MatMulDescriptor, how)), &of_tensors)
    }

    /// The reduction over the last dim.
    fn reduced(&mut self, of: Reduction, x: Tensor) -> Result<Tensor, CudaError> {
        let y = self.scratch(DataType::Float, self.strides.of_queries(), None)?;
        self.reduction(of, x, y)?;
        Ok(y)
    }

    /// The reduction over the dims that `y` does not have.
    fn reduction(&mut self, of: Reduction, x: Tensor, y: Tensor) -> Result<(), CudaError> {
        let mut how = Descriptor::new(self.library, Kind::Reduction)?;
        how.set(self.library, Attribute::ReductionOperator, Type::ReductionOperator, &[of as u32])?;
        how.set(self.library, Attribute::ReductionPrecision, Type::Elements, &[DataType::Float as u32])?;
        how.finalize(self.library)?;
        let of_tensors = [(Attribute::ReductionX, x), (Attribute::ReductionY, y)];
        self.push(Kind::ReductionOperation, Some((Attribute::ReductionDescriptor, how)), &of_tensors)
    }

    fn reshape(&mut self, x: Tensor, y: Tensor) -> Result<(), CudaError> {
        self.push(Kind::ReshapeOperation, None, &[(Attribute::ReshapeX, x), (Attribute::ReshapeY, y)])
    }

    fn push(
        &mut self,
        kind: Kind,
        how: Option<(Attribute, Descriptor)>,
        of_tensors: &[(Attribute, Tensor)],
    ) -> Result<(), CudaError> {
        let mut operation = Descriptor::new(self.library, kind)?;
        for (name, Tensor(tensor)) in of_tensors {
            operation.refer(self.library, *name, &[&self.tensors[*tensor].0])?;
        }
        if let Some((name, how)) = how {
            operation.refer(self.library, name, &[&how])?;
            self.named.push(how);
        }
        operation.finalize(self.library)?;
        self.operations.push(operation);
        Ok(())
    }
}

/// Whether a graph is attention or its adjoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}
