//! The builder for all models, built-in and user-defined: each method appends one instruction.
//!
//! The builder never fails: it infers the shape of each result and leaves checks to [`crate::verify`], which names the
//! offending instruction and its values.
//!
//! ```
//! use phalanx_strategies::model::{BatchShape, ForwardBuilder};
//! use phalanx_strategies::program::{Init, NormKind};
//!
//! let mut b = ForwardBuilder::new(BatchShape { n_rows: 2, seq_len: 8 });
//! let table = b.param("embed.weight", &[100, 16], Init::Normal { std: 0.02 });
//! let x = b.embed_ids(table, None);
//! let gain = b.param("norm.weight", &[16], Init::Ones);
//! let h = b.rms_norm(x, gain, 1e-6);
//! let logits = b.linear(h, table, None);
//! let program = b.finish_loss(logits);
//! phalanx_strategies::verify::verify(&program).unwrap();
//! ```

use super::BatchShape;
use crate::program::formula::{Expr, Tape};
use crate::program::{
    ActivationFn, Attention, Binding, Column, DType, Hyper, Init, Kind, MatMul, NormKind, Op, Param, ParamPart, Phase,
    Program, QkColumns, QkNorm, Role, Site, Value, ValueId, op,
};
use std::sync::Arc;

/// A value under construction.
pub type Tensor = ValueId;

/// Appends instructions to a forward program.
#[derive(Debug)]
pub struct ForwardBuilder {
    program: Program,
    batch: BatchShape,
    block: Option<u32>,
    phase: Phase,
}

impl ForwardBuilder {
    /// An empty program for microbatches of this shape.
    pub fn new(batch: BatchShape) -> ForwardBuilder {
        ForwardBuilder { program: Program::default(), batch, block: None, phase: Phase::Forward }
    }

    /// The shape of the microbatches.
    pub fn batch(&self) -> BatchShape {
        self.batch
    }

    /// Appends what `pass` appends as the pass of a frozen reference: adapters leave it as it is.
    pub fn reference<T>(&mut self, pass: impl FnOnce(&mut ForwardBuilder) -> T) -> T {
        self.phase = Phase::Reference;
        let made = pass(self);
        self.phase = Phase::Forward;
        made
    }

    /// Assigns the following instructions to block `index`, or to no block. Blocks are the unit of recomputation and of
    /// pipeline stages.
    pub fn block(&mut self, index: Option<u32>) {
        self.block = index;
    }

    /// A parameter that is one tensor of the model file. A name that is known is the same parameter again.
    pub fn param(&mut self, name: &str, shape: &[usize], init: Init) -> Tensor {
        self.fused_param(name, shape, &[(name, shape[0])], init)
    }

    /// A parameter made of several tensors of the model file, stacked along the first dim.
    pub fn fused_param(&mut self, name: &str, shape: &[usize], parts: &[(&str, usize)], init: Init) -> Tensor {
        if let Some(known) = self.known(name, Kind::Parameter) {
            return known;
        }
        let value = self.program.add_value(name, shape, DType::F32, Kind::Parameter);
        let part = |(name, rows): &(&str, usize)| ParamPart::whole(*name, &[&[*rows], &shape[1..]].concat());
        let parts = parts.iter().map(part).collect();
        self.program.params.push(Param::whole(value, shape, parts, init));
        value
    }

    fn known(&self, name: &str, kind: Kind) -> Option<Tensor> {
        let is_it = |value: &Value| value.kind == kind && value.name == name;
        self.program.values.iter().position(is_it).map(|at| ValueId(at as u32))
    }

    /// An f32 table that the host computes once. A name that is known is the same table again.
    pub fn constant(&mut self, name: &str, shape: &[usize]) -> Tensor {
        if let Some(known) = self.known(name, Kind::Constant) {
            return known;
        }
        self.program.add_value(name, shape, DType::F32, Kind::Constant)
    }

    /// The input of this column, `[N]`, created on first use.
    pub fn column(&mut self, column: Column) -> Tensor {
        self.input(Role::Column(column), column.name(), &[self.batch.n_tokens()], column.dtype())
    }

    fn hyper(&mut self) -> Tensor {
        self.input(Role::Hyper, "hyper", &[Hyper::LEN], DType::F64)
    }

    fn input(&mut self, role: Role, name: &str, shape: &[usize], dtype: DType) -> Tensor {
        if let Some(value) = self.program.bound(role).next() {
            return value;
        }
        let value = self.program.add_value(name, shape, dtype, Kind::Input);
        self.program.bindings.push(Binding::new(role, value));
        value
    }

    /// Rows of `table [V, C]` by token id, plus `residual` → `[N, C]`.
    pub fn embed_ids(&mut self, table: Tensor, residual: Option<Tensor>) -> Tensor {
        let ids = self.column(Column::Ids);
        self.embed(ids, table, residual)
    }

    /// Rows of `table [P, C]` by position, plus `residual` → `[N, C]`.
    pub fn embed_positions(&mut self, table: Tensor, residual: Option<Tensor>) -> Tensor {
        let positions = self.column(Column::Positions);
        self.embed(positions, table, residual)
    }

    fn embed(&mut self, ids: Tensor, table: Tensor, residual: Option<Tensor>) -> Tensor {
        let shape = [self.batch.n_tokens(), self.columns(table)];
        self.program.params.iter_mut().filter(|param| param.value == table).for_each(|param| param.is_table = true);
        let reads = [ids, table].into_iter().chain(residual).collect();
        self.emit("embedding", Op::Embedding(op::Embedding { residual: residual.is_some(), first: 0 }), reads, &shape)
    }

    /// `x W^T + bias` with `W [out, in]`, as Hugging Face stores linear layers.
    pub fn linear(&mut self, x: Tensor, weight: Tensor, bias: Option<Tensor>) -> Tensor {
        let n_out = self.program.value(weight).shape[0];
        self.matmul(x, weight, bias, n_out, MatMul::nt())
    }

    /// `x W + bias` with `W [in, out]`, as GPT-2 stores them.
    pub fn linear_transposed(&mut self, x: Tensor, weight: Tensor, bias: Option<Tensor>) -> Tensor {
        let n_out = self.columns(weight);
        self.matmul(x, weight, bias, n_out, MatMul::nn())
    }

    fn matmul(&mut self, x: Tensor, weight: Tensor, bias: Option<Tensor>, n_out: usize, op: MatMul) -> Tensor {
        let shape = [self.program.value(x).n_rows(), n_out];
        let reads = [x, weight].into_iter().chain(bias).collect();
        let name = format!("{}.out", self.program.value(weight).name.trim_end_matches(".weight"));
        self.emit(&name, Op::MatMul(MatMul { bias: bias.is_some(), ..op }), reads, &shape)
    }

    /// `x / rms(x) * gain` over the last dim.
    pub fn rms_norm(&mut self, x: Tensor, gain: Tensor, eps: f32) -> Tensor {
        self.norm(NormKind::Rms, x, vec![x, gain], eps)
    }

    /// `(x - mean) / std * gain + bias` over the last dim.
    pub fn layer_norm(&mut self, x: Tensor, gain: Tensor, bias: Tensor, eps: f32) -> Tensor {
        self.norm(NormKind::Layer, x, vec![x, gain, bias], eps)
    }

    fn norm(&mut self, kind: NormKind, x: Tensor, reads: Vec<Tensor>, eps: f32) -> Tensor {
        let shape = self.program.value(x).shape.clone();
        let y = self.program.add_value("norm", &shape, DType::F32, Kind::Activation);
        let rows = [self.program.value(x).n_rows()];
        let mut writes = vec![y, self.program.add_value("rstd", &rows, DType::F32, Kind::Activation)];
        if kind == NormKind::Layer {
            writes.push(self.program.add_value("mean", &rows, DType::F32, Kind::Activation));
        }
        self.push(Op::Norm(op::Norm { kind, eps }), reads, writes);
        y
    }

    /// RMS norm of each query and key head of packed `qkv`, gains `[D]`.
    pub fn head_norm(&mut self, qkv: Tensor, gain_q: Tensor, gain_k: Tensor, heads: Attention, eps: f32) -> Tensor {
        let shape = self.program.value(qkv).shape.clone();
        let y = self.program.add_value("qk_norm", &shape, DType::F32, Kind::Activation);
        let rstd_shape = [self.batch.n_tokens(), heads.n_heads + heads.n_kv_heads];
        let rstd = self.program.add_value("qk_rstd", &rstd_shape, DType::F32, Kind::Activation);
        self.push(Op::HeadNorm(op::HeadNorm { heads, eps }), vec![qkv, gain_q, gain_k], vec![y, rstd]);
        y
    }

    /// RMS norm over all queries and over all keys of packed `qkv`, gains `[H D]` and `[K D]`.
    pub fn qk_norm(&mut self, qkv: Tensor, gain_q: Tensor, gain_k: Tensor, eps: f32) -> Tensor {
        let shape = self.program.value(qkv).shape.clone();
        let columns = QkColumns { q: self.columns(gain_q), k: self.columns(gain_k) };
        let squares = self.emit("qk_squares", Op::QkSquares(op::QkSquares(columns)), vec![qkv], &[shape[0], 2]);
        let norm = QkNorm { columns, summed: columns, eps };
        self.emit("qk_norm", Op::QkNorm(norm), vec![qkv, gain_q, gain_k, squares], &shape)
    }

    /// Rotary embedding of packed `qkv` with the `[2, P, D/2]` table of cosines and sines.
    pub fn rotary(&mut self, qkv: Tensor, table: Tensor, heads: Attention) -> Tensor {
        let positions = self.column(Column::Positions);
        let shape = self.program.value(qkv).shape.clone();
        self.emit("rotary", Op::Rotary(op::Rotary { heads, inverse: false }), vec![qkv, positions, table], &shape)
    }

    /// Causal attention within documents over packed `qkv [N, (H + 2 K) D]` → `[N, H D]`.
    pub fn attention(&mut self, qkv: Tensor, heads: Attention) -> Tensor {
        let doc_start = self.column(Column::DocStart);
        let n = self.batch.n_tokens();
        let o = self.program.add_value("attention", &[n, heads.n_heads * heads.head_dim], DType::F32, Kind::Activation);
        let lse = self.program.add_value("lse", &[n, heads.n_heads], DType::F32, Kind::Activation);
        self.push(Op::Attention(heads), vec![qkv, doc_start], vec![o, lse]);
        o
    }

    /// `silu(gate) * up` of packed `[N, 2 F]` → `[N, F]`.
    pub fn swiglu(&mut self, gate_up: Tensor) -> Tensor {
        let shape = [self.program.value(gate_up).n_rows(), self.columns(gate_up) / 2];
        self.emit("swiglu", Op::Activation(op::Activation(ActivationFn::SwiGlu)), vec![gate_up], &shape)
    }

    /// GELU, tanh form.
    pub fn gelu_tanh(&mut self, x: Tensor) -> Tensor {
        let shape = self.program.value(x).shape.clone();
        self.emit("gelu", Op::Activation(op::Activation(ActivationFn::GeluTanh)), vec![x], &shape)
    }

    /// `factor x`; `x` itself where the factor is 1.
    pub fn scale(&mut self, x: Tensor, factor: f32) -> Tensor {
        if factor == 1.0 {
            return x;
        }
        let shape = self.program.value(x).shape.clone();
        self.emit("scaled", Op::Scale(op::Scale { factor }), vec![x], &shape)
    }

    /// Elementwise sum.
    pub fn add(&mut self, a: Tensor, b: Tensor) -> Tensor {
        let shape = self.program.value(a).shape.clone();
        self.emit("add", Op::Add(op::Add), vec![a, b], &shape)
    }

    /// The log-probabilities of a column of ids, `[N]`, in nats; 0 where there is none.
    pub fn log_probs(&mut self, logits: Tensor, labels: Column) -> Tensor {
        let (labels, n) = (self.column(labels), self.batch.n_tokens());
        let writes =
            ["log_probs", "norms"].map(|name| self.program.add_value(name, &[n], DType::F32, Kind::Activation));
        self.push(Op::LogProbs(op::LogProbs { vocab: None }), vec![logits, labels], writes.to_vec());
        writes[0]
    }

    /// For each row, the sum of `x [N]` over the tokens that have an id in this column, and their number: `[2, R]`, f64.
    pub fn row_sums(&mut self, x: Tensor, labels: Column) -> Tensor {
        let labels = self.column(labels);
        self.sums_of(vec![x, labels])
    }

    /// The same, in which each token counts as much as its weight says.
    pub fn weighted_row_sums(&mut self, x: Tensor, labels: Column, weights: Column) -> Tensor {
        let (labels, weights) = (self.column(labels), self.column(weights));
        self.sums_of(vec![x, labels, weights])
    }

    fn sums_of(&mut self, reads: Vec<Tensor>) -> Tensor {
        let sums = self.program.add_value("rows", &[2, self.batch.n_rows], DType::F64, Kind::Activation);
        self.push(Op::RowSums(op::RowSums), reads, vec![sums]);
        sums
    }

    /// Sums of the log-probabilities of a reference that were computed before, as those of [`ForwardBuilder::row_sums`]: `[2, R]`, f64.
    pub fn reference_sums(&mut self) -> Tensor {
        self.input(Role::Reference, "reference", &[2, self.batch.n_rows], DType::F64)
    }

    /// Formulas over groups of `group` neighbouring rows, summed over the groups: `[n]`, f64. They have no gradient.
    pub fn totals(&mut self, formulas: &[Expr], operands: &[Tensor], group: usize) -> Tensor {
        let sums = self.program.add_value("totals", &[formulas.len()], DType::F64, Kind::Activation);
        self.formulas((formulas, &[]), (operands, None), group, sums);
        sums
    }

    /// Ends the program at formulas over groups of `group` neighbouring rows, summed over the groups: first the parts of the loss, each
    /// with the index of its scale in [`Hyper`], then others. They may read sums of earlier ones, `given`.
    pub fn finish_formulas(
        mut self,
        loss: &[(Expr, usize)],
        others: &[Expr],
        (operands, given): (&[Tensor], Option<Tensor>),
        group: usize,
    ) -> Program {
        let (parts, scales): (Vec<Expr>, Vec<u32>) =
            loss.iter().map(|(formula, scale)| (formula.clone(), *scale as u32)).unzip();
        let all = [&parts[..], others].concat();
        let sums = self.program.add_value("loss_sum", &[all.len()], DType::F64, Kind::Output);
        self.formulas((&all, &scales), (operands, given), group, sums);
        self.program.bindings.push(Binding::new(Role::LossSum, sums));
        self.program
    }

    fn formulas(
        &mut self,
        (formulas, scales): (&[Expr], &[u32]),
        (operands, given): (&[Tensor], Option<Tensor>),
        group: usize,
        sums: Tensor,
    ) {
        let op = op::Formulas {
            tape: Arc::new(Tape::of(formulas)),
            n_sums: formulas.len(),
            scales: scales.to_vec(),
            group,
            counts: true,
            given: given.is_some(),
            residual: false,
            gradients: Vec::new(),
        };
        let reads = operands.iter().copied().chain([self.hyper()]).chain(given).collect();
        self.push(Op::Formulas(op), reads, vec![sums]);
    }

    /// Ends the program at the sums of a reference.
    pub fn finish_reference(mut self, sums: Tensor) -> Program {
        self.program.values[sums.0 as usize].kind = Kind::Output;
        self.program.bindings.push(Binding::new(Role::Reference, sums));
        self.program
    }

    /// Ends the program at the logits.
    pub fn finish_logits(mut self, logits: Tensor) -> Program {
        self.program.values[logits.0 as usize].kind = Kind::Output;
        self.program.bindings.push(Binding::new(Role::Logits, logits));
        self.program
    }

    /// Ends the program at the negative log-likelihood, summed over the labels that are not -100.
    pub fn finish_loss(mut self, logits: Tensor) -> Program {
        let (labels, hyper) = (self.column(Column::Labels), self.hyper());
        let loss = self.program.add_value("loss_sum", &[], DType::F64, Kind::Output);
        let op = Op::CrossEntropy(op::CrossEntropy { residual: false, gradient: false, vocab: None });
        self.push(op, vec![logits, labels, hyper], vec![loss]);
        self.program.bindings.push(Binding::new(Role::LossSum, loss));
        self.program
    }

    fn columns(&self, x: Tensor) -> usize {
        self.program.value(x).n_columns()
    }

    fn emit(&mut self, name: &str, op: Op, reads: Vec<Tensor>, shape: &[usize]) -> Tensor {
        let y = self.program.add_value(name, shape, DType::F32, Kind::Activation);
        self.push(op, reads, vec![y]);
        y
    }

    fn push(&mut self, op: Op, reads: Vec<Tensor>, writes: Vec<Tensor>) {
        self.program.push(op, reads, writes, Site { phase: self.phase, block: self.block, microbatch: 0 });
    }
}
