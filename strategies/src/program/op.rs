//! The instruction set: about twenty coarse operations, their adjoints, and the collectives.
//!
//! Legend of shapes: `N` tokens (batch times sequence length), `C` model width, `H` query heads, `K` key/value heads,
//! `D` head width, `F` feed-forward width, `V` vocabulary. `qkv` is packed `[N, (H + 2 K) D]`: queries, keys, values.
//! An operand in parentheses is present when the attribute of that name says so.

use super::DType;

/// Precision in which a matrix product multiplies; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 operands.
    F32,
    /// Operands rounded to bf16.
    Bf16,
}

/// A run of columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Columns {
    /// First column.
    pub start: usize,
    /// Number of columns.
    pub len: usize,
}

/// `c = residual + alpha * op(a) op(b) + bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatMul {
    /// Use `a` transposed.
    pub trans_a: bool,
    /// Use `b` transposed.
    pub trans_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// A bias row is added to every row.
    pub bias: bool,
    /// A matrix of the shape of `c` is added.
    pub residual: bool,
    /// Precision of the products.
    pub compute: Compute,
    /// Use only these columns of `a` as stored.
    pub a_columns: Option<Columns>,
    /// Add the product to these columns of the residual only.
    pub c_columns: Option<Columns>,
}

impl MatMul {
    /// `a b^T`: a linear layer whose weight is stored `[out, in]`.
    pub const fn nt() -> MatMul {
        MatMul {
            trans_a: false,
            trans_b: true,
            alpha: 1.0,
            bias: false,
            residual: false,
            compute: Compute::F32,
            a_columns: None,
            c_columns: None,
        }
    }

    /// `a b`.
    pub const fn nn() -> MatMul {
        MatMul { trans_b: false, ..MatMul::nt() }
    }

    /// `a^T b`.
    pub const fn tn() -> MatMul {
        MatMul { trans_a: true, trans_b: false, ..MatMul::nt() }
    }
}

/// Normalisation over the last dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// `x / rms(x) * gain`. Source: Zhang and Sennrich 2019 (arXiv:1910.07467).
    Rms,
    /// `(x - mean) / std * gain + bias`. Source: Ba et al. 2016 (arXiv:1607.06450).
    Layer,
}

/// Non-linearity of the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFn {
    /// `silu(gate) * up` on `[N, 2 F]`, gate first. Source: Shazeer 2020 (arXiv:2002.05202).
    SwiGlu,
    /// GELU in its tanh form. Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
    GeluTanh,
}

/// Causal grouped-query attention over packed qkv.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads `H`.
    pub n_heads: usize,
    /// Key/value heads `K`; divides `H`.
    pub n_kv_heads: usize,
    /// Head width `D`.
    pub head_dim: usize,
    /// Tokens of one row of the batch.
    pub seq_len: usize,
    /// Sliding window: token `t` sees `j > t - window`.
    pub window: Option<usize>,
    /// Factor of the scores, usually `1 / sqrt(D)`.
    pub scale: f32,
}

impl Attention {
    /// Columns of packed qkv.
    pub const fn qkv_columns(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}

/// An axis of the mesh, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Pipeline stages.
    Pp,
    /// Replicas of the data-parallel group.
    DpReplicate,
    /// Shards of the data-parallel group.
    DpShard,
    /// Context (sequence) shards.
    Cp,
    /// Tensor shards.
    Tp,
}

/// What a collective does with its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Sum over the group, result everywhere.
    AllReduce,
    /// Sum over the group, each member keeps its part of the first dim.
    ReduceScatter,
    /// Concatenation along the first dim, everywhere.
    AllGather,
    /// Transpose of parts between members.
    AllToAll,
    /// Copy from one member to all.
    Broadcast {
        /// Position in the group that has the data.
        root: u32,
    },
    /// To one member.
    Send {
        /// Position in the group.
        to: u32,
    },
    /// From one member.
    Recv {
        /// Position in the group.
        from: u32,
    },
}

/// A collective of a mesh group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// Axis whose group takes part.
    pub axis: Axis,
    /// Position in that group's schedule, from 0 in each step.
    pub sequence: u32,
}

/// One operation. Operands are listed as `[reads] -> [writes]`.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `[ids N, table [V, C], (residual [N, C])] -> [x [N, C]]`: rows of the table.
    Embedding {
        /// A residual is added.
        residual: bool,
    },
    /// `[ids N, dx [N, C], (residual [V, C])] -> [dtable [V, C]]`: rows summed by id.
    EmbeddingBackward {
        /// A residual is added.
        residual: bool,
    },
    /// `[a, b, (bias), (residual)] -> [c]`.
    MatMul(MatMul),
    /// `[dy [N, C], (residual [C])] -> [db [C]]`: gradient of a bias.
    ColumnSum {
        /// A residual is added.
        residual: bool,
        /// Use only these columns of `dy`.
        columns: Option<Columns>,
    },
    /// RMS: `[x [N, C], gain] -> [y, rstd N]`; layer: `[x, gain, bias] -> [y, rstd N, mean N]`.
    Norm {
        /// Which.
        kind: NormKind,
        /// Added to the variance.
        eps: f32,
    },
    /// RMS: `[x, gain, rstd, dy, (dx0), (dgain0)] -> [dx, dgain]`; layer:
    /// `[x, gain, rstd, mean, dy, (dx0), (dgain0, dbias0)] -> [dx, dgain, dbias]`.
    NormBackward {
        /// Which.
        kind: NormKind,
        /// A previous gradient is added to `dx`.
        residual_x: bool,
        /// Previous gradients are added to those of the parameters.
        residual_params: bool,
    },
    /// `[qkv, gain_q D, gain_k D] -> [qkv', rstd [N, H + K]]`: RMS norm of each query and key head (Qwen3).
    HeadNorm {
        /// Geometry of the packed heads.
        heads: Attention,
        /// Added to the variance.
        eps: f32,
    },
    /// `[qkv, gain_q, gain_k, rstd, dqkv', (dgain_q0, dgain_k0)] -> [dqkv, dgain_q, dgain_k]`.
    HeadNormBackward {
        /// Geometry of the packed heads.
        heads: Attention,
        /// Previous gradients are added to those of the gains.
        residual: bool,
    },
    /// `[qkv, positions N, table [2, P, D/2]] -> [qkv']`: rotary embedding of queries and keys.
    /// Source: Su et al. 2021 (arXiv:2104.09864), pairs `(i, i + D/2)` as Hugging Face stores them.
    Rotary {
        /// Geometry of the packed heads.
        heads: Attention,
        /// Rotate backwards: the adjoint.
        inverse: bool,
    },
    /// `[qkv, doc_start N] -> [o [N, H D], lse [N, H]]`. Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691).
    Attention(Attention),
    /// `[qkv, doc_start, o, lse, do] -> [dqkv]`.
    AttentionBackward(Attention),
    /// `[x] -> [y]`.
    Activation(ActivationFn),
    /// `[x, dy] -> [dx]`.
    ActivationBackward(ActivationFn),
    /// `[a, b] -> [a + b]`.
    Add,
    /// `[x] -> [y]`: conversion to the element type of `y`.
    Cast,
    /// `[logits [N, V], labels N, hyper, (loss0)] -> [loss, (dlogits)]`: summed negative log-likelihood, and its
    /// gradient times [`super::Hyper::LOSS_GRAD_SCALE`] in the same pass.
    CrossEntropy {
        /// A previous sum is added to the loss.
        residual: bool,
        /// The gradient is written.
        gradient: bool,
    },
    /// `[inputs…, params…, hyper, (loss0, grads0…)] -> [loss, (grads…)]`: a user-defined model; like the loss of other
    /// models it comes with its gradients, those of all its parameters.
    Opaque {
        /// Which of the job's user-defined models.
        model: u32,
        /// Inputs among the reads.
        n_inputs: usize,
        /// Parameters among the reads; all of them trained.
        n_params: usize,
        /// Previous sums are added.
        residual: bool,
        /// The gradients are written; evaluation does without.
        gradient: bool,
    },
    /// `[g] -> [s]`: sum of squares, f64 scalar.
    SumSquares,
    /// `[s…, hyper] -> [norm, coefficient]`: L2 norm of the unscaled gradient and the factor that clips it.
    /// A non-finite norm gives a NaN coefficient, on which the optimizer leaves everything as it is.
    ClipCoefficient {
        /// Largest norm that is left alone.
        max_norm: Option<f64>,
    },
    /// `[p, m, v, g, hyper, coefficient] -> [p, m, v]`. Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// `[p, momentum, g, hyper, coefficient] -> [p, momentum]`. Source: Sutskever et al. 2013, in PyTorch's form.
    Sgd {
        /// Decay of the momentum buffer.
        momentum: f64,
        /// L2 penalty added to the gradient.
        weight_decay: f64,
    },
    /// `[buffer] -> [result]`: begins a collective; its result may be read after the matching await.
    Start(Collective),
    /// `[result] -> []`: waits for the collective that writes `result`.
    Await {
        /// Axis of the group.
        axis: Axis,
        /// Position in that group's schedule.
        sequence: u32,
    },
}

impl Op {
    /// Name for people: error messages, traces, tables.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embedding { .. } => "embedding",
            Op::EmbeddingBackward { .. } => "embedding_backward",
            Op::MatMul(_) => "matmul",
            Op::ColumnSum { .. } => "column_sum",
            Op::Norm { .. } => "norm",
            Op::NormBackward { .. } => "norm_backward",
            Op::HeadNorm { .. } => "head_norm",
            Op::HeadNormBackward { .. } => "head_norm_backward",
            Op::Rotary { inverse: false, .. } => "rotary",
            Op::Rotary { inverse: true, .. } => "rotary_backward",
            Op::Attention(_) => "attention",
            Op::AttentionBackward(_) => "attention_backward",
            Op::Activation(_) => "activation",
            Op::ActivationBackward(_) => "activation_backward",
            Op::Add => "add",
            Op::Cast => "cast",
            Op::CrossEntropy { .. } => "cross_entropy",
            Op::Opaque { .. } => "opaque",
            Op::SumSquares => "sum_squares",
            Op::ClipCoefficient { .. } => "clip_coefficient",
            Op::AdamW { .. } => "adamw",
            Op::Sgd { .. } => "sgd",
            Op::Start(_) => "start",
            Op::Await { .. } => "await",
        }
    }

    /// Pairs `(read, write)` of operand positions that may be the same memory: the operation reads each element before
    /// it writes it, so a result may take the place of an operand that is not needed any more.
    pub fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        let last = n_reads.wrapping_sub(1);
        match self {
            Op::Embedding { residual: true } | Op::EmbeddingBackward { residual: true } => vec![(2, 0)],
            Op::MatMul(m) if m.residual => vec![(last, 0)],
            Op::ColumnSum { residual: true, .. } => vec![(1, 0)],
            // Only the residuals: a row of `dy` is reduced before the row of `dx` is written, but `dy` may be narrower.
            Op::NormBackward { kind, residual_x, residual_params } => {
                let n_params = if *kind == NormKind::Rms { 1 } else { 2 };
                let first = if *kind == NormKind::Rms { 4 } else { 5 };
                let x = residual_x.then_some((first, 0));
                let first = first + usize::from(*residual_x);
                let params = (0..n_params).map(|i| (first + i, 1 + i)).filter(|_| *residual_params);
                x.into_iter().chain(params).collect()
            }
            Op::HeadNormBackward { residual: true, .. } => vec![(5, 1), (6, 2)],
            Op::Rotary { .. } | Op::ActivationBackward(ActivationFn::SwiGlu) => vec![(0, 0)],
            Op::Add => vec![(0, 0), (1, 0)],
            Op::CrossEntropy { residual: false, gradient: true } => vec![(0, 1)],
            Op::CrossEntropy { residual: true, gradient: true } => vec![(0, 1), (3, 0)],
            Op::CrossEntropy { residual: true, gradient: false } => vec![(3, 0)],
            Op::Opaque { n_inputs, n_params, residual: true, gradient, .. } => {
                let (first, n_grads) = (n_inputs + n_params + 1, if *gradient { *n_params } else { 0 });
                (0..=n_grads).map(|i| (first + i, i)).collect()
            }
            Op::AdamW { .. } => vec![(0, 0), (1, 1), (2, 2)],
            Op::Sgd { .. } => vec![(0, 0), (1, 1)],
            Op::Start(Collective { kind: CollectiveKind::AllReduce | CollectiveKind::Broadcast { .. }, .. }) => {
                vec![(0, 0)]
            }
            _ => Vec::new(),
        }
    }

    /// Element type in which the operation multiplies matrices, if it does.
    pub const fn compute(&self) -> Option<DType> {
        match self {
            Op::MatMul(MatMul { compute: Compute::F32, .. }) => Some(DType::F32),
            Op::MatMul(MatMul { compute: Compute::Bf16, .. }) => Some(DType::Bf16),
            _ => None,
        }
    }
}
