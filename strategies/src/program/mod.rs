//! The step as data: a list of instructions over typed values.
//!
//! A program is in single-assignment form: every value is written once, by one instruction, before it is read. Only
//! values of *state* kind are written again: the optimizer updates parameters and its state in place, and generation
//! writes its cache. Programs do not specify which values share memory; [`crate::passes::memory`] decides that from what
//! each operation permits.

pub mod blocks;
pub mod collective;
mod column;
mod display;
pub mod dtype;
pub mod formula;
pub mod held;
pub mod held_box;
pub mod op;
pub mod packing;
pub mod param;
pub mod tiles;

pub use blocks::Blocks;
pub use collective::{Collective, CollectiveKind, Stream};
pub use column::Column;
pub use dtype::DType;
pub use op::{
    ActivationFn, AdaptedRows, Attention, AttentionPart, CachedAttention, Columns, Compute, Cost, Dropout, MatMul,
    NormKind, Op, QkColumns, QkNorm, Update, VocabShard,
};
pub use packing::Packing;
pub use param::{GradSum, Init, Measured, Param, ParamPart};

use crate::mesh::MeshRank;
use crate::optimizer::N_SCALARS;

/// Index of a value in [`Program::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// The purpose of a value, which determines the owner and the lifetime of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A trained or frozen weight; kept between steps.
    Parameter,
    /// State of the optimizer; kept between steps.
    OptimizerState,
    /// State of the optimizer outside device memory; kept between steps.
    OffloadedState,
    /// A table computed once (rotary angles); kept between steps, never written.
    Constant,
    /// The bytes of this frozen parameter, or of an activation that holds a gathered one, as elements of another type; or the first part of
    /// a split weight ([`Program::split`]). Never written.
    View(ValueId),
    /// Keys and values of earlier tokens; kept between runs. Unlike other state, it is not part of what a step commits.
    Cache,
    /// Written by the host before the program runs.
    Input,
    /// Gradient of a parameter.
    Gradient,
    /// Anything else that lives within one step, gradients of activations included.
    Activation,
    /// Read by the host after the program has run.
    Output,
}

impl Kind {
    /// Kept from one step to the next.
    pub const fn is_state(self) -> bool {
        self.is_updated() || matches!(self, Kind::Constant | Kind::View(_))
    }

    /// Kept from one step to the next, and written in place.
    pub const fn is_updated(self) -> bool {
        matches!(self, Kind::Parameter | Kind::OptimizerState | Kind::OffloadedState | Kind::Cache)
    }

    /// Present before the first instruction runs.
    pub const fn is_given(self) -> bool {
        self.is_state() || matches!(self, Kind::Input)
    }
}

/// A typed, named buffer. Row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Name in error messages and traces.
    pub name: String,
    /// Extent of each dim; empty for a scalar.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Its purpose.
    pub kind: Kind,
    /// Whether it is a weight in two parts: see [`Program::split`].
    pub is_split: bool,
}

impl Value {
    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes it occupies.
    pub fn size_bytes(&self) -> usize {
        self.n_elements() * self.dtype.size_bytes()
    }

    /// Extent of the last dim; 1 for a scalar.
    pub fn n_columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Elements over [`Value::n_columns`].
    pub fn n_rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }
}

/// Part of the step an instruction belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Forward pass of a frozen reference, with which an objective compares the model.
    Reference,
    /// Forward pass.
    Forward,
    /// Backward pass, recomputation included.
    Backward,
    /// Gradient clipping and parameter update.
    Optimizer,
}

/// Position of an instruction in the step; traces and crash points are named by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// Part of the step.
    pub phase: Phase,
    /// Transformer block, if it is inside one.
    pub block: Option<u32>,
    /// Microbatch it works on.
    pub microbatch: u32,
}

/// One operation on values.
#[derive(Clone, Debug, PartialEq)]
pub struct Instr {
    /// What to do.
    pub op: Op,
    /// Operands, in the order [`Op`] documents.
    pub reads: Vec<ValueId>,
    /// Results, in the order [`Op`] documents.
    pub writes: Vec<ValueId>,
    /// Position in the step.
    pub site: Site,
}

/// What the host binds to an input or output value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A column of the data.
    Column(Column),
    /// The scalars of the step, f64 `[Hyper::LEN]`; see [`Hyper`].
    Hyper,
    /// Sum of the negative log-likelihoods over all predicted tokens of the step, f64 scalar, nats; or the sums of an objective's
    /// formulas, f64 `[M]`: the parts of the loss, then what is reported beside it.
    LossSum,
    /// This rank's part of [`Role::LossSum`], before the sum over the world: one or more f64, nats.
    OwnLoss,
    /// Log-probabilities of a frozen reference: for each row, their sum over the labels and the number of these, f64 `[2, R]`, nats. An
    /// output of the program that computes them, and an input of steps that read what was computed before. They read no numbers.
    Reference,
    /// Logits, f32 `[batch * seq_len, vocab]`.
    Logits,
    /// L2 norm of the whole gradient before clipping, f64 scalar.
    GradNorm,
    /// Sum of squares of one parameter's gradient, f64 scalar; the binding's microbatch is the index of the parameter.
    GradSumSquares,
    /// In a shadow: a reduced gradient or the sums of its update, in the order of [`crate::passes::shadow::log`].
    Gradient,
    /// The factor by which updates scale gradients, f64 scalar; the same on all ranks, and an input of shadows.
    ClipCoefficient,
}

/// Layout of the [`Role::Hyper`] input: the scalars that the host computes for each step.
#[derive(Clone, Copy, Debug)]
pub struct Hyper;

impl Hyper {
    /// Learning rate of this step.
    pub const LEARNING_RATE: usize = 0;
    /// First of the scalars that the optimizer derives from the number of the update:
    /// [`crate::optimizer::OptimizerSpec::scalars`].
    pub const RULE: usize = 1;
    /// Factor of the loss gradient: loss scale / number of predicted tokens in the global batch.
    pub const LOSS_GRAD_SCALE: usize = Hyper::RULE + N_SCALARS;
    /// Loss scale of fp16; 1 otherwise.
    pub const LOSS_SCALE: usize = Hyper::LOSS_GRAD_SCALE + 1;
    /// Learning rate of this step for parameters that have one of their own.
    pub const ADAPTER_LEARNING_RATE: usize = Hyper::LOSS_SCALE + 1;
    /// Factor of the gradient of a second part of the loss, which is averaged over something else: tokens of texts beside pairs.
    pub const TEXT_GRAD_SCALE: usize = Hyper::ADAPTER_LEARNING_RATE + 1;
    /// Number of scalars.
    pub const LEN: usize = Hyper::TEXT_GRAD_SCALE + 1;
}

/// A value that the host writes before, or reads after, the program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// What it means.
    pub role: Role,
    /// Microbatch it belongs to, 0 for values of the whole step; for [`Role::GradSumSquares`] the index of the parameter.
    pub microbatch: u32,
    /// The value.
    pub value: ValueId,
    /// The part of the tokens, on a sequence-parallel rank.
    pub slice: Option<TokenSlice>,
}

impl Binding {
    /// A value of the whole step.
    pub const fn new(role: Role, value: ValueId) -> Binding {
        Binding { role, microbatch: 0, value, slice: None }
    }
}

/// One of the parts into which sequence-parallel ranks cut the tokens; see [`collective::part`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenSlice {
    /// Index of the part.
    pub index: usize,
    /// Number of parts.
    pub of: usize,
    /// The value has all tokens, and those of other parts have no label.
    pub masked: bool,
}

/// The program of one rank for one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// All values, indexed by [`ValueId`].
    pub values: Vec<Value>,
    /// Instructions in the order in which they run.
    pub instrs: Vec<Instr>,
    /// Parameter table.
    pub params: Vec<Param>,
    /// What the host writes and reads.
    pub bindings: Vec<Binding>,
    /// The rank that runs it.
    pub mesh_rank: MeshRank,
}

impl Program {
    /// The value with this id.
    ///
    /// # Panics
    /// If the program has no such value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// The value that has the memory of this one: another one for views.
    pub fn storage(&self, id: ValueId) -> ValueId {
        match self.value(id).kind {
            Kind::View(of) => of,
            _ => id,
        }
    }

    /// Splits an f32 weight, and returns a view of its first part.
    ///
    /// A split weight of `n` elements is stored in two parts: `n` bf16 numbers, and `n` rests of 16 bits. The rest is the lower half of
    /// the f32 number. The bf16 number is the upper half, plus one if the rest is at least 0x8000: the f32 number rounded to the nearest,
    /// ties away from zero. So both together are the f32 number, with all of its bits. A number that is none has the bits 0x7fc00000.
    pub fn split(&mut self, weight: ValueId) -> ValueId {
        let value = &mut self.values[weight.0 as usize];
        value.is_split = true;
        let (name, shape) = (format!("{} as bf16", value.name), value.shape.clone());
        self.add_value(name, &shape, DType::Bf16, Kind::View(weight))
    }

    /// Whether a weight is stored in two parts: see [`Program::split`].
    pub fn is_split(&self, weight: ValueId) -> bool {
        self.value(weight).is_split
    }

    /// Adds a value.
    pub fn add_value(&mut self, name: impl Into<String>, shape: &[usize], dtype: DType, kind: Kind) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name: name.into(), shape: shape.to_vec(), dtype, kind, is_split: false });
        id
    }

    /// Appends an instruction.
    pub fn push(&mut self, op: Op, reads: Vec<ValueId>, writes: Vec<ValueId>, site: Site) {
        self.instrs.push(Instr { op, reads, writes, site });
    }

    /// Values bound to `role`, ordered by microbatch.
    pub fn bound(&self, role: Role) -> impl Iterator<Item = ValueId> + '_ {
        self.bindings.iter().filter(move |b| b.role == role).map(|b| b.value)
    }

    /// The parameter stored in `value`, if there is one.
    pub fn param_of(&self, value: ValueId) -> Option<&Param> {
        self.params.iter().find(|p| p.value == value)
    }

    /// Number of trained elements.
    pub fn n_trainable(&self) -> usize {
        self.params.iter().filter(|p| p.trainable).map(|p| self.value(p.value).n_elements()).sum()
    }

    /// Number of elements of all parameters.
    pub fn n_params(&self) -> usize {
        self.params.iter().map(|p| self.value(p.value).n_elements()).sum()
    }
}
