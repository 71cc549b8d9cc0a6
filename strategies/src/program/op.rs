//! The instruction set: about twenty coarse operations, their adjoints, and the collectives.
//!
//! Legend of shapes: `N` tokens (batch times sequence length), `C` model width, `H` query heads, `K` key/value heads,
//! `D` head width, `F` feed-forward width, `V` vocabulary. `qkv` is packed `[N, (H + 2 K) D]`: queries, keys, values.
//! An operand in parentheses is present if the attribute of that name is set.

use super::DType;
use super::Packing;
use super::blocks::Blocks;
use super::collective::{Collective, CollectiveKind};
use super::tiles::Tiles;
use crate::mesh::Group;
use crate::optimizer::OptimizerSpec;

/// Precision in which a matrix product multiplies; sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// f32 operands.
    F32,
    /// Operands rounded to bf16.
    Bf16,
    /// Operands rounded to bf16 and then to e4m3. Each row of `a` is first divided by a power of two, so that its largest number just
    /// fits, and `b`, a weight, by [`super::packing::E4M3_STEP`]. `a` is not transposed, has all its rows, and rows of `b` and of its
    /// transpose have multiples of 16 elements.
    Fp8,
}

impl Compute {
    /// Rows of operands of FP8 have a multiple of as many elements: 16 bytes, which the matrix units of GPUs load at a time.
    pub const FP8_VECTOR: usize = 16;

    /// The precision of everything else in a program with such products: that of attention and of gradients of weights.
    #[must_use]
    pub const fn without_fp8(self) -> Compute {
        match self {
            Compute::Fp8 => Compute::Bf16,
            other => other,
        }
    }
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
    /// Use only these columns of `b` as stored.
    pub b_columns: Option<Columns>,
    /// Write only these columns of `c`. The others are those of the residual; without a residual, later products write them.
    pub c_columns: Option<Columns>,
    /// The product replaces `c_columns` of the residual, which need not be written yet, instead of being added to them.
    pub replaces: bool,
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
            b_columns: None,
            c_columns: None,
            replaces: false,
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

/// Attention to keys and values that a cache keeps from run to run. Row `p` of a sequence's cache has the keys and values of
/// its token at position `p`: `[2 K D]`, keys first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CachedAttention {
    /// Geometry of packed qkv, and the mask; `seq_len` tokens of each sequence are operands.
    pub heads: Attention,
    /// Positions `P` of each sequence in the cache.
    pub capacity: usize,
}

impl CachedAttention {
    /// Columns of the cache.
    pub const fn cache_columns(&self) -> usize {
        2 * self.heads.n_kv_heads * self.heads.head_dim
    }
}

/// Columns of packed qkv that hold queries and keys; the columns after them hold values, as many as keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QkColumns {
    /// Columns of queries, the first ones.
    pub q: usize,
    /// Columns of keys, which follow.
    pub k: usize,
}

/// RMS norm over all queries and over all keys of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// This rank's columns.
    pub columns: QkColumns,
    /// Columns whose squares are summed: those of all tensor-parallel ranks, counted on each rank that holds them.
    pub summed: QkColumns,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// Attention between the tokens of context-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPart {
    /// Heads and mask; `seq_len` counts the tokens that one rank has of a row.
    pub heads: Attention,
    /// Context-parallel ranks.
    pub n_ranks: usize,
    /// Rank of the queries.
    pub q_rank: usize,
    /// First rank of the keys and values: `n_kv_ranks` ranks from this one on, in order.
    pub kv_rank: usize,
    /// Number of ranks whose keys and values are operands.
    pub n_kv_ranks: usize,
    /// Output and statistics of other parts are merged in.
    pub carried: bool,
}

/// Columns of the logits that one tensor-parallel rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VocabShard {
    /// Token id of the first column.
    pub first: usize,
    /// Ranks that share the vocabulary.
    pub n_shards: usize,
}

/// Which elements of a matrix are zeroed. Source: Srivastava et al. 2014, Dropout (JMLR 15).
///
/// The draw of an element is a function of the key of its token, of the stream and of its column, so every rank, replay and
/// recomputation draws the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability with which an element is zeroed, below 1; the others are divided by 1 less it.
    pub rate: f32,
    /// Tells the draws of different instructions apart.
    pub stream: u32,
    /// Column of the whole matrix with which the operand begins, on a rank that has some of its columns.
    pub first_column: usize,
}

impl Dropout {
    /// Draws below this number zero their element.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 2f64.powi(32)) as u32
    }

    /// Factor of the other elements.
    pub fn factor(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }

    /// The draws of a token; [`Dropout::draw`] takes them and a column.
    pub const fn of_token(&self, key: i32) -> u32 {
        mix(mix(key as u32) ^ self.stream.wrapping_mul(0x9e37_79b9))
    }

    /// The draw of an element, by its column in the operand.
    pub const fn draw(&self, of_token: u32, column: usize) -> u32 {
        mix(of_token.wrapping_add((self.first_column + column) as u32).wrapping_mul(0x85eb_ca6b) ^ of_token)
    }
}

/// Source: Appleby 2011, the finaliser of MurmurHash3, which maps 32 bits one to one.
const fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// Rows of an adapted weight, one for each column of its product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptedRows {
    /// The columns of the product.
    pub columns: Columns,
    /// Factor of the product of the adapter's matrices.
    pub factor: f32,
    /// The weight is stored `[out, in]`, so its rows are rows; otherwise its columns are.
    pub trans_b: bool,
}

/// The update of a parameter, or the sums that it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The update rule.
    pub rule: OptimizerSpec,
    /// Position of the learning rate in [`super::Hyper`].
    pub rate: usize,
    /// First element of the parameter that is updated.
    pub first: usize,
    /// Dims of the parameter.
    pub n_dims: usize,
    /// Rounds of the rule's sums that are operands; an update reads them all.
    pub n_rounds: usize,
    /// Rows and columns of the gradient's elements, if the rule needs them.
    pub tiles: Tiles,
    /// How the state of the gradient's elements is stored, if in blocks.
    pub blocks: Blocks,
}

/// Operands of an [`Update`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateOperands<'a, T> {
    /// The parameter.
    pub param: &'a T,
    /// State of the optimizer, in the order of [`OptimizerSpec::state`].
    pub state: &'a [T],
    /// The reduced gradient.
    pub grad: &'a T,
    /// Sums over whole tensors, in the order of [`OptimizerSpec::sums`].
    pub sums: &'a [T],
    /// The scalars of the step.
    pub hyper: &'a T,
    /// The factor of the gradient.
    pub coefficient: &'a T,
}

impl Update {
    /// Tensors of the optimizer's state.
    pub fn n_state(&self) -> usize {
        self.rule.state(self.n_dims).len()
    }

    /// Sums among the operands.
    pub fn n_sums(&self) -> usize {
        self.rule.sums(self.n_dims)[..self.n_rounds].iter().map(|round| round.len()).sum()
    }

    /// Number of operands.
    pub fn n_reads(&self) -> usize {
        self.n_state() + self.n_sums() + 4
    }

    /// Splits a list of operands.
    ///
    /// # Panics
    /// If its length is not [`Update::n_reads`].
    pub fn operands<'a, T>(&self, reads: &'a [T]) -> UpdateOperands<'a, T> {
        let (param, rest) = reads.split_first().expect("an update begins with its parameter");
        let (state, rest) = rest.split_at(self.n_state());
        let [grad, sums @ .., hyper, coefficient] = rest else {
            panic!("{} operands, expected {}", reads.len(), self.n_reads())
        };
        assert_eq!(sums.len(), self.n_sums(), "{} operands, expected {}", reads.len(), self.n_reads());
        UpdateOperands { param, state, grad, sums, hyper, coefficient }
    }
}

/// One operation. Operands are listed as `[reads] -> [writes]`.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `[ids N, table [V, C], (residual [N, C])] -> [x [N, C]]`: rows of the table, which holds the ids from `first` on;
    /// other ids have rows of zeros. The table may be packed as bf16: `[V, C / 2]` words.
    Embedding {
        /// A residual is added.
        residual: bool,
        /// Id of the first row of the table.
        first: usize,
    },
    /// `[ids N, dx [N, C], (residual [V, C])] -> [dtable [V, C]]`: rows summed by id.
    EmbeddingBackward {
        /// A residual is added.
        residual: bool,
        /// Id of the first row of the table.
        first: usize,
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
        /// The norm.
        kind: NormKind,
        /// Added to the variance.
        eps: f32,
    },
    /// RMS: `[x, gain, rstd, dy, (dx0), (dgain0)] -> [dx, dgain]`; layer:
    /// `[x, gain, rstd, mean, dy, (dx0), (dgain0, dbias0), (bias)] -> [dx, dgain, dbias]`. With `again`, the last result is
    /// the norm's own `y`, in the element type of `dy`; only then the layer norm reads its bias. With `narrow`, `dx` in the
    /// element type of `dy` follows.
    NormBackward {
        /// The norm.
        kind: NormKind,
        /// A previous gradient is added to `dx`.
        residual_x: bool,
        /// Previous gradients are added to those of the parameters.
        residual_params: bool,
        /// The result of the norm is written again, with the same bits.
        again: bool,
        /// `dx` is also written for products in half width.
        narrow: bool,
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
    /// `[qkv] -> [squares [N, 2]]`: the sums of squares of the queries and of the keys of each token, f32.
    QkSquares(QkColumns),
    /// `[qkv, dsquares [N, 2], (dqkv0)] -> [dqkv]`.
    QkSquaresBackward {
        /// Columns of queries and keys.
        columns: QkColumns,
        /// A previous gradient is added.
        residual: bool,
    },
    /// `[qkv, gain_q [H D], gain_k [K D], squares [N, 2]] -> [qkv']`: RMS norm over all queries and over all keys of a
    /// token, whose squares [`Op::QkSquares`] sums. Source: OLMo Team 2024, OLMo 2 (arXiv:2501.00656).
    QkNorm(QkNorm),
    /// `[qkv, gain_q, gain_k, squares, dqkv', (dgain_q0, dgain_k0)] -> [dqkv, dsquares [N, 2], dgain_q, dgain_k]`: the
    /// gradient of qkv for given squares, and the gradient of the squares.
    QkNormBackward {
        /// The norm.
        norm: QkNorm,
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
    /// `[qkv, positions N, cache [B P, 2 K D]] -> [cache]`, for `B` sequences: replaces the keys and values at the positions of
    /// the tokens, which differ from each other.
    CacheWrite(CachedAttention),
    /// `[qkv, positions N, cache [B P, 2 K D]] -> [o [N, H D], lse [N, H]]`: a token sees the cached keys of its sequence up to
    /// its own position, which the cache has too; the keys and values of qkv are not read.
    CachedAttention(CachedAttention),
    /// `[x [N, A + B]] -> [left [N, A], right [N, B]]`: separates queries from keys and values.
    SplitColumns,
    /// `[left [N, A], right [N, B]] -> [x [N, A + B]]`: the adjoint of [`Op::SplitColumns`]; converts element types.
    JoinColumns,
    /// `[q [N, H D], kv [B N, 2 K D], doc_start N, (o0, lse0)] -> [o [N, H D] f32, lse [N, H]]`: attention of the queries
    /// of one context-parallel rank to the keys and values of `B` ranks, merged with earlier parts.
    /// Source: Liu et al. 2023, ring attention (arXiv:2310.01889).
    AttentionPart(AttentionPart),
    /// `[q, kv, doc_start, o, lse, do, (dq0, dkv0)] -> [dq f32, dkv f32]`, where `o` and `lse` cover all parts.
    AttentionPartBackward {
        /// The part.
        part: AttentionPart,
        /// `dq0` is read and added to.
        carried_q: bool,
        /// `dkv0` is read and added to.
        carried_kv: bool,
    },
    /// `[x] -> [y]`.
    Activation(ActivationFn),
    /// `[x, dy] -> [dx, (y)]`.
    ActivationBackward {
        /// The activation.
        function: ActivationFn,
        /// The result `y` of the activation is written again, with the same bits, in the element type of `dy`.
        again: bool,
    },
    /// `[a, b] -> [a + b]`.
    Add,
    /// `[x] -> [factor x]`.
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `[x [N, C], keys N] -> [y]`: zeros some elements and scales the others; see [`Dropout`]. Its own adjoint.
    Dropout(Dropout),
    /// `[x [N, C], bias [C]] -> [x + bias]`.
    AddBias,
    /// `[w, a [r, I], b [K, r]] -> [lengths K]`: the lengths of rows of `w + factor b a`, f32. They count as constants: nothing
    /// has a gradient through them.
    RowLengths(AdaptedRows),
    /// `[x [N, C], magnitude K, lengths K] -> [y]`: these columns times `magnitude / length`, and the others as they are.
    /// Source: Liu et al. 2024, DoRA, §4 (arXiv:2402.09353).
    Magnitude(Columns),
    /// `[x, magnitude, lengths, dy, (dmagnitude0)] -> [dx, dmagnitude]`.
    MagnitudeBackward {
        /// The columns.
        columns: Columns,
        /// A previous gradient is added to that of the magnitude.
        residual: bool,
    },
    /// `[x] -> [x]`: the beginning of a tensor-parallel region. The value does not change; its gradient, which has a part
    /// on every rank, is summed over the group. Erased once the program is differentiated.
    Enter {
        /// Ranks over which the gradient is summed.
        group: Group,
    },
    /// `[x] -> [y [len]]`: elements `start..start + len`.
    Slice {
        /// First element.
        start: usize,
    },
    /// `[x, part [len]] -> [x]`: `x` with elements `start..start + len` replaced.
    Paste {
        /// First element.
        start: usize,
    },
    /// `[s…] -> [s]`: sum of f64 elements in order; zero if there are none.
    Sum,
    /// `[s…] -> [v]`: f64 scalars at their positions in a vector of zeros.
    Assemble {
        /// Position of each.
        places: Vec<usize>,
    },
    /// `[nodes…] -> [sum]`: part of a gradient, summed along the fixed tree over the microbatches of all ranks. The `k`-th
    /// operand has this part of the `k`-th node of each rank in turn; see [`crate::passes::reproducible`].
    TreeSum {
        /// Microbatches.
        n_leaves: usize,
        /// Ranks that share them.
        n_ranks: usize,
    },
    /// `[g] -> [s]`: sum of squares of each run of `block` elements, f64.
    SumSquaresBlocks {
        /// Elements of a run; the last may be shorter.
        block: usize,
    },
    /// `[x] -> [y]`: conversion to the element type of `y`.
    Cast,
    /// `[words [R, W]] -> [w [R, C]]`: the weights that are packed in the words.
    Unpack(Packing),
    /// `[logits [N, V], labels N, hyper, (stats [S, N, 3]), (loss0)] -> [loss, (dlogits)]`: summed negative
    /// log-likelihood, and its gradient times [`super::Hyper::LOSS_GRAD_SCALE`] in the same pass, in the element type of the logits. With `vocab`, the
    /// logits are this rank's columns, and `stats` has the [`Op::CrossEntropyStats`] of all ranks.
    CrossEntropy {
        /// A previous sum is added to the loss.
        residual: bool,
        /// The gradient is written.
        gradient: bool,
        /// This rank's columns.
        vocab: Option<VocabShard>,
    },
    /// `[logits [N, v], labels N] -> [stats [1, N, 3]]`: for each row the largest logit, the sum of the exponentials
    /// relative to it, and the logit of the label if this rank has it. Source: Shoeybi et al. 2019, §3 (arXiv:1909.08053).
    CrossEntropyStats(VocabShard),
    /// `[inputs…, params…, hyper, (loss0, grads0…)] -> [loss, (grads…)]`: a user-defined model, which writes its loss
    /// together with the gradients of all its parameters.
    Opaque {
        /// Which of the job's user-defined models.
        model: u32,
        /// Inputs among the reads.
        n_inputs: usize,
        /// Parameters among the reads; all of them trained.
        n_params: usize,
        /// Previous sums are added.
        residual: bool,
        /// The gradients are written; not in evaluation.
        gradient: bool,
    },
    /// `[g] -> [s]`: sum of squares, f64 scalar.
    SumSquares {
        /// Only these elements, first and number.
        elements: Option<(usize, usize)>,
    },
    /// `[s…, hyper] -> [norm, coefficient]`: L2 norm of the unscaled gradient and the factor that clips it.
    /// A non-finite norm gives a NaN coefficient, for which the optimizer changes nothing.
    ClipCoefficient {
        /// Largest norm that is not clipped.
        max_norm: Option<f64>,
    },
    /// `[p, state…, g, sums…, hyper, coefficient] -> [sums…]`: the next round of the sums over whole tensors that an update
    /// needs, over this rank's elements; see [`crate::passes::tensor_sums`].
    UpdateSums(Update),
    /// `[p, state…, g, sums…, hyper, coefficient] -> [p, state…]`: the update of an optimizer, where `state` and `g` may
    /// cover a run of the elements of `p`; see [`crate::optimizer`].
    Update(Update),
    /// `[buffers…] -> [results…]`: begins a collective; see [`CollectiveKind`]. Operands and results may not be touched
    /// before the matching await.
    Start(Collective),
    /// `[results…] -> []`: waits for the collective that writes the results.
    Await(Collective),
}

impl Op {
    /// Name in error messages, traces and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embedding { .. } => "embedding",
            Op::EmbeddingBackward { .. } => "embedding_backward",
            Op::MatMul(_) => "matmul",
            Op::ColumnSum { .. } => "column_sum",
            Op::Norm { .. } => "norm",
            Op::NormBackward { .. } => "norm_backward",
            Op::HeadNorm { .. } => "head_norm",
            Op::HeadNormBackward { .. } => "head_norm_backward",
            Op::QkSquares(_) => "qk_squares",
            Op::QkSquaresBackward { .. } => "qk_squares_backward",
            Op::QkNorm(_) => "qk_norm",
            Op::QkNormBackward { .. } => "qk_norm_backward",
            Op::Rotary { inverse: false, .. } => "rotary",
            Op::Rotary { inverse: true, .. } => "rotary_backward",
            Op::Attention(_) => "attention",
            Op::AttentionBackward(_) => "attention_backward",
            Op::CacheWrite(_) => "cache_write",
            Op::CachedAttention(_) => "cached_attention",
            Op::SplitColumns => "split_columns",
            Op::JoinColumns => "join_columns",
            Op::AttentionPart(_) => "attention_part",
            Op::AttentionPartBackward { .. } => "attention_part_backward",
            Op::Activation(_) => "activation",
            Op::ActivationBackward { .. } => "activation_backward",
            Op::Add => "add",
            Op::Scale { .. } => "scale",
            Op::Dropout(_) => "dropout",
            Op::AddBias => "add_bias",
            Op::RowLengths(_) => "row_lengths",
            Op::Magnitude(_) => "magnitude",
            Op::MagnitudeBackward { .. } => "magnitude_backward",
            Op::Enter { .. } => "enter",
            Op::Slice { .. } => "slice",
            Op::Paste { .. } => "paste",
            Op::Sum => "sum",
            Op::Assemble { .. } => "assemble",
            Op::TreeSum { .. } => "tree_sum",
            Op::SumSquaresBlocks { .. } => "sum_squares_blocks",
            Op::Cast => "cast",
            Op::Unpack(_) => "unpack",
            Op::CrossEntropy { .. } => "cross_entropy",
            Op::CrossEntropyStats(_) => "cross_entropy_stats",
            Op::Opaque { .. } => "opaque",
            Op::SumSquares { .. } => "sum_squares",
            Op::ClipCoefficient { .. } => "clip_coefficient",
            Op::UpdateSums(_) => "update_sums",
            Op::Update(update) => update.rule.name(),
            Op::Start(_) => "start",
            Op::Await(_) => "await",
        }
    }

    /// Pairs `(read, write)` of operand positions that may be the same memory: the operation reads each element before
    /// it writes it, so a result may overwrite an operand that is no longer needed.
    pub fn in_place_pairs(&self, n_reads: usize) -> Vec<(usize, usize)> {
        let last = n_reads.wrapping_sub(1);
        match self {
            Op::Embedding { residual: true, .. }
            | Op::EmbeddingBackward { residual: true, .. }
            | Op::QkSquaresBackward { residual: true, .. } => vec![(2, 0)],
            Op::MatMul(m) if m.residual => vec![(last, 0)],
            Op::ColumnSum { residual: true, .. } => vec![(1, 0)],
            // A row of `dy` is reduced before the row of `dx` is written, but `dy` may be narrower; `y` has its type.
            Op::NormBackward { kind, residual_x, residual_params, again, .. } => {
                let n_params = if *kind == NormKind::Rms { 1 } else { 2 };
                let first = if *kind == NormKind::Rms { 4 } else { 5 };
                let x = residual_x.then_some((first, 0));
                let first = first + usize::from(*residual_x);
                let params = (0..n_params).map(|i| (first + i, 1 + i)).filter(|_| *residual_params);
                let y = again.then_some((2 + n_params, 1 + n_params));
                x.into_iter().chain(params).chain(y).collect()
            }
            Op::HeadNormBackward { residual: true, .. } => vec![(5, 1), (6, 2)],
            Op::QkNormBackward { residual: true, .. } => vec![(5, 2), (6, 3)],
            Op::ActivationBackward { again: true, .. } => vec![(0, 0), (1, 1)],
            Op::Rotary { .. } | Op::ActivationBackward { function: ActivationFn::SwiGlu, .. } => vec![(0, 0)],
            Op::Add => vec![(0, 0), (1, 0)],
            Op::AddBias | Op::Scale { .. } | Op::Dropout(_) | Op::Paste { .. } | Op::Magnitude(_) => vec![(0, 0)],
            Op::MagnitudeBackward { residual: true, .. } => vec![(4, 1)],
            Op::CacheWrite(_) => vec![(2, 0)],
            Op::AttentionPart(AttentionPart { carried: true, .. }) => vec![(3, 0), (4, 1)],
            Op::AttentionPartBackward { carried_q, carried_kv, .. } => {
                let q = carried_q.then_some((6, 0));
                q.into_iter().chain(carried_kv.then_some((6 + usize::from(*carried_q), 1))).collect()
            }
            Op::CrossEntropy { residual, gradient, .. } => {
                let loss = residual.then_some((last, 0));
                gradient.then_some((0, 1)).into_iter().chain(loss).collect()
            }
            Op::Opaque { n_inputs, n_params, residual: true, gradient, .. } => {
                let (first, n_grads) = (n_inputs + n_params + 1, if *gradient { *n_params } else { 0 });
                (0..=n_grads).map(|i| (first + i, i)).collect()
            }
            Op::Update(update) => (0..=update.n_state()).map(|i| (i, i)).collect(),
            Op::Start(Collective { kind: CollectiveKind::AllReduce | CollectiveKind::Broadcast { .. }, .. }) => {
                (0..n_reads).map(|i| (i, i)).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Element type in which the operation multiplies matrices, if it does.
    pub const fn compute(&self) -> Option<DType> {
        match self {
            Op::MatMul(MatMul { compute: Compute::F32, .. }) => Some(DType::F32),
            Op::MatMul(MatMul { compute: Compute::Bf16, .. }) => Some(DType::Bf16),
            Op::MatMul(MatMul { compute: Compute::Fp8, .. }) => Some(DType::E4m3),
            _ => None,
        }
    }
}
