//! One instruction: its buffers, and the kernel that runs it.

use super::CpuMachine;
use super::buffer::Buffer;
use super::product::product;
use super::sum_plan::SumPlan;
use crate::kernels::attention_shape::Shape;
use crate::kernels::{
    Heads, activation, attention, attention_backward, cross_entropy, cross_entropy_part, elementwise, embedding,
    head_norm, layer_norm, optimizer, qk_norm, reduce, rms_norm, rotary, unpack,
};
use crate::tasks::{Cut, Tasks};
use half::{bf16, f16};
use phalanx_device::float::Float;
use phalanx_device::groups::Groups;
use phalanx_device::{ElementType, ExecError, OpaqueModel, Operand, RawBuffer};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::op::UpdateOperands;
use phalanx_strategies::program::{
    ActivationFn, Attention, Collective, CollectiveKind, DType, Hyper, Instr, NormKind, Op, QkColumns, QkNorm, Update,
    ValueId, VocabShard, op,
};
use std::sync::Arc;

/// Runs `$body` with `$T` bound to the element type of a buffer of activations.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::Bf16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::F32 | DType::F64 | DType::I32 | DType::E4m3 => {
                type $T = f32;
                $body
            }
        }
    };
}

pub(super) const fn heads_of(a: &Attention) -> Heads {
    Heads { n_heads: a.n_heads, n_kv_heads: a.n_kv_heads, head_dim: a.head_dim }
}

pub(super) const fn shape_of(a: &Attention) -> Shape {
    Shape { heads: heads_of(a), seq_len: a.seq_len, window: a.window, scale: a.scale }
}

const fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F32 => ElementType::F32,
        DType::Bf16 => ElementType::Bf16,
        DType::F16 => ElementType::F16,
        DType::F64 => ElementType::F64,
        DType::I32 => ElementType::I32,
        DType::E4m3 => panic!("ranks exchange the words that a view is of"),
    }
}

/// The operands of one instruction.
pub(super) struct Operands<'a> {
    pub(super) reads: &'a [Buffer],
    pub(super) writes: &'a [Buffer],
    pub(super) scratch: &'a mut [u8],
    /// Tables may hold a part of the vocabulary only.
    is_part: bool,
    /// The order of the sum, for a tree sum.
    sum_plan: Option<Arc<SumPlan>>,
}

/// Most state tensors of an optimizer per parameter.
const MAX_STATE: usize = 4;
/// Most sums over whole tensors that an update reads.
const MAX_SUMS: usize = 8;

/// Most operands of an instruction, except norms over all gradients and user models, which access operands by index.
pub(super) const MAX_OPERANDS: usize = 24;

impl CpuMachine {
    pub(super) fn exec(
        &mut self,
        c: &Compiled,
        index: usize,
        models: &mut [Box<dyn OpaqueModel>],
        groups: &mut Groups,
    ) -> Result<(), ExecError> {
        let instr = &c.program.instrs[index];
        match &instr.op {
            Op::ClipCoefficient(op::ClipCoefficient { max_norm }) => {
                self.clip(c, index, *max_norm);
                return Ok(());
            }
            Op::Opaque(_) => return self.opaque(c, index, models),
            Op::Formulas(formulas) => {
                self.formulas(c, instr, formulas);
                return Ok(());
            }
            Op::Sum(_) => {
                self.sum(c, instr);
                return Ok(());
            }
            Op::Assemble(op::Assemble { places }) => {
                self.assemble(c, instr, places);
                return Ok(());
            }
            // SAFETY: the verifier keeps operands and results of a collective untouched until it is awaited, and the
            // memory pass keeps their places.
            Op::Start(op::Start(collective)) => return unsafe { self.start(c, instr, collective, groups) },
            Op::Await(op::Await(collective)) => return Ok(groups.finish(collective)?),
            _ => {}
        }
        let sum_plan = match instr.op {
            Op::TreeSum(op::TreeSum { n_leaves, n_ranks }) => Some(self.sum_plan(n_leaves, n_ranks)),
            _ => None,
        };
        let none = Buffer { ptr: std::ptr::null_mut(), rows: 0, cols: 0, dtype: DType::F32 };
        let (mut reads, mut writes) = ([none; MAX_OPERANDS], [none; MAX_OPERANDS]);
        instr.reads.iter().zip(&mut reads).for_each(|(v, b)| *b = self.buffer(c, *v));
        instr.writes.iter().zip(&mut writes).for_each(|(v, b)| *b = self.buffer(c, *v));
        // SAFETY: no reference into this machine's own mappings lives while `self` is borrowed mutably; for shared
        // mappings, the caller of `SharedArena::new` promised that no other machine in the arena is used meanwhile, and
        // peers touch only operands of collectives in flight, which the verifier keeps from other instructions. The
        // scratch overlaps no value.
        let scratch = unsafe { &mut *self.scratch(c) };
        let is_part = c.program.mesh_rank.mesh.tp > 1;
        let (reads, writes) = (&reads[..instr.reads.len()], &writes[..instr.writes.len()]);
        let mut operands = Operands { reads, writes, scratch, is_part, sum_plan };
        // SAFETY: the program was verified, and values in its layout overlap only where an operation permits it.
        unsafe { operands.run(&instr.op) };
        Ok(())
    }

    /// Returns the cached plan, made in the first step.
    fn sum_plan(&mut self, n_leaves: usize, n_ranks: usize) -> Arc<SumPlan> {
        self.sum_plans.entry((n_leaves, n_ranks)).or_insert_with(|| Arc::new(SumPlan::new(n_leaves, n_ranks))).clone()
    }

    /// # Safety
    /// Until the collective is finished, the results are not touched and the operands not written.
    unsafe fn start(
        &mut self,
        c: &Compiled,
        instr: &Instr,
        collective: &Collective,
        groups: &mut Groups,
    ) -> Result<(), ExecError> {
        let n = instr.reads.len().max(instr.writes.len());
        let raw = |v: Option<&ValueId>| {
            v.map(|v| {
                let b = self.buffer(c, *v);
                (RawBuffer::new(b.ptr, b.len() * b.dtype.size_bytes()), b.len(), b.dtype)
            })
        };
        let operand = |i: usize| {
            let (send, recv) = (raw(instr.reads.get(i)), raw(instr.writes.get(i)));
            let whole = if collective.kind == CollectiveKind::AllGather { recv.or(send) } else { send.or(recv) };
            let (_, n_elements, dtype) = whole.expect("an operation has operands or results");
            let buffer = |b: Option<(RawBuffer, usize, DType)>| b.map_or(RawBuffer::EMPTY, |b| b.0);
            Operand { send: buffer(send), recv: buffer(recv), dtype: element_type(dtype), n_elements }
        };
        // SAFETY: the caller's contract.
        unsafe { groups.start(collective, (0..n).map(operand)) }?;
        Ok(())
    }

    fn clip(&mut self, c: &Compiled, index: usize, max_norm: Option<f64>) {
        let instr = &c.program.instrs[index];
        let (hyper, sums) = instr.reads.split_last().expect("the verifier requires the scalars of the step");
        let loss_scale = self.read::<f64>(c, *hyper)[Hyper::LOSS_SCALE];
        let total: f64 = sums.iter().flat_map(|s| self.read::<f64>(c, *s)).sum();
        let norm = total.sqrt() / loss_scale;
        let clip = max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0));
        let coefficient = if norm.is_finite() { clip / loss_scale } else { f64::NAN };
        self.write::<f64>(c, instr.writes[0])[0] = norm;
        self.write::<f64>(c, instr.writes[1])[0] = coefficient;
    }

    fn opaque(&mut self, c: &Compiled, index: usize, models: &mut [Box<dyn OpaqueModel>]) -> Result<(), ExecError> {
        let instr = &c.program.instrs[index];
        let Op::Opaque(op::Opaque { model, n_inputs, n_params, residual, gradient }) = instr.op else {
            unreachable!("called for user-defined models only")
        };
        let n_grads = if gradient { n_params } else { 0 };
        let buffer = |i: usize| self.buffer(c, instr.reads[i]);
        let written = |i: usize| self.buffer(c, instr.writes[i]);
        // SAFETY: as in `exec`; a gradient shares memory only with the gradient that it continues.
        unsafe {
            let inputs: Vec<&[i32]> = (0..n_inputs).map(|i| buffer(i).slice()).collect();
            let params: Vec<&[f32]> = (n_inputs..n_inputs + n_params).map(|i| buffer(i).slice()).collect();
            let hyper: &[f64] = buffer(n_inputs + n_params).slice();
            let carried = n_inputs + n_params + 1;
            if residual {
                (0..=n_grads).for_each(|i| copy(buffer(carried + i), written(i)));
            }
            let mut grads: Vec<&mut [f32]> = (1..=n_grads).map(|i| written(i).slice_mut()).collect();
            let scale = hyper[Hyper::LOSS_GRAD_SCALE];
            let unknown = || ExecError::Opaque { model, reason: "the job has no model of this number".into() };
            let step = models.get_mut(model as usize).ok_or_else(unknown)?;
            let loss = step
                .step(&inputs, &params, scale, &mut grads, residual)
                .map_err(|reason| ExecError::Opaque { model, reason })?;
            let sum: &mut [f64] = written(0).slice_mut();
            sum[0] = if residual { sum[0] + loss } else { loss };
        }
        Ok(())
    }
}

/// Copies a residual to the buffer that accumulates it, unless both are the same buffer.
///
/// # Safety
/// As [`Buffer::slice_mut`]; the two are equal or do not overlap.
pub(super) unsafe fn copy(from: Buffer, to: Buffer) {
    if from.is(&to) {
        return;
    }
    const CHUNK: usize = 1 << 16;
    let bytes = from.len() * from.dtype.size_bytes();
    // SAFETY: both hold `bytes` bytes, by the verifier, and do not overlap.
    let (from, to) =
        unsafe { (std::slice::from_raw_parts(from.ptr, bytes), std::slice::from_raw_parts_mut(to.ptr, bytes)) };
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn run(&mut self, op: &Op) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            match op {
                Op::Embedding(op::Embedding { residual, first }) => self.embedding(*residual, *first),
                Op::EmbeddingBackward(op::EmbeddingBackward { residual, first }) => {
                    self.embedding_backward(*residual, *first)
                }
                Op::MatMul(m) => {
                    let bias = m.bias.then(|| self.reads[2]);
                    if m.residual {
                        copy(self.reads[self.reads.len() - 1], self.writes[0]);
                    }
                    product(m, self.reads[0], self.reads[1], bias, self.writes[0], self.scratch);
                }
                Op::ColumnSum(op::ColumnSum { residual, columns }) => {
                    if *residual {
                        copy(self.reads[1], self.writes[0]);
                    }
                    let first = columns.map_or(0, |c| c.start);
                    let (dy, db) = (self.reads[0], self.writes[0].slice_mut());
                    with_element!(dy.dtype, T => {
                        reduce::column_sum::<T>(dy.slice(), dy.cols, first, db, *residual, f32s(self.scratch));
                    });
                }
                Op::Norm(op::Norm { kind, eps }) => {
                    with_element!(self.writes[0].dtype, T => self.norm::<T>(*kind, *eps))
                }
                Op::NormBackward(op::NormBackward { kind, residual_x, residual_params, again, narrow }) => {
                    let n_stats = if *kind == NormKind::Rms { 1 } else { 2 };
                    let dy = self.reads[2 + n_stats];
                    with_element!(dy.dtype, T => self.norm_backward::<T>(*kind, *residual_x, *residual_params, *again));
                    if *narrow {
                        let (dx, narrow) = (self.writes[0], self.writes[self.writes.len() - 1]);
                        with_element!(dx.dtype, X => with_element!(narrow.dtype, Y => {
                            elementwise::cast::<X, Y>(dx.slice(), narrow.slice_mut());
                        }));
                    }
                }
                Op::HeadNorm(op::HeadNorm { heads, eps }) => {
                    with_element!(self.reads[0].dtype, T => self.head_norm::<T>(heads_of(heads), *eps));
                }
                Op::HeadNormBackward(op::HeadNormBackward { heads, residual }) => {
                    with_element!(self.reads[0].dtype, T => self.head_norm_backward::<T>(heads_of(heads), *residual));
                }
                Op::QkSquares(op::QkSquares(columns)) => {
                    let (qkv, squares) = (self.reads[0], self.writes[0].slice_mut());
                    with_element!(qkv.dtype, T => qk_norm::qk_squares::<T>(*columns, qkv.slice(), squares));
                }
                Op::QkSquaresBackward(op::QkSquaresBackward { columns, residual }) => {
                    with_element!(self.reads[0].dtype, T => self.qk_squares_backward::<T>(*columns, *residual));
                }
                Op::QkNorm(norm) => with_element!(self.reads[0].dtype, T => self.qk_norm::<T>(*norm)),
                Op::QkNormBackward(op::QkNormBackward { norm, residual }) => {
                    with_element!(self.reads[0].dtype, T => self.qk_norm_backward::<T>(*norm, *residual));
                }
                Op::Rotary(op::Rotary { heads, inverse }) => {
                    copy(self.reads[0], self.writes[0]);
                    let (positions, table) = (self.reads[1].slice(), self.reads[2].slice());
                    with_element!(self.writes[0].dtype, T => {
                        rotary::rotary::<T>(heads_of(heads), self.writes[0].slice_mut(), positions, table, *inverse);
                    });
                }
                Op::Attention(a) => with_element!(self.reads[0].dtype, T => self.attention::<T>(a)),
                Op::AttentionBackward(op::AttentionBackward(a)) => {
                    with_element!(self.reads[0].dtype, T => self.attention_backward::<T>(a))
                }
                Op::CacheWrite(op::CacheWrite(a)) => with_element!(self.reads[0].dtype, T => self.cache_write::<T>(a)),
                Op::CachedAttention(a) => with_element!(self.reads[0].dtype, T => self.cached_attention::<T>(a)),
                Op::Activation(op::Activation(f)) => with_element!(self.reads[0].dtype, T => self.activation::<T>(*f)),
                Op::ActivationBackward(op::ActivationBackward { function, again: false }) => {
                    with_element!(self.reads[0].dtype, T => self.activation_backward::<T>(*function));
                }
                Op::ActivationBackward(op::ActivationBackward { function, again: true }) => {
                    with_element!(self.reads[0].dtype, T => self.activation_backward_again::<T>(*function));
                }
                Op::Add(_) => with_element!(self.writes[0].dtype, T => self.add::<T>()),
                Op::Cast(_) => {
                    with_element!(self.reads[0].dtype, X => with_element!(self.writes[0].dtype, Y => {
                        elementwise::cast::<X, Y>(self.reads[0].slice(), self.writes[0].slice_mut());
                    }))
                }
                Op::Unpack(op::Unpack(packing)) => with_element!(self.writes[0].dtype, T => {
                    unpack::unpack::<T>(*packing, self.reads[0].slice(), self.writes[0].slice_mut());
                }),
                Op::CrossEntropy(op::CrossEntropy { residual, gradient, vocab }) => {
                    self.cross_entropy(*residual, *gradient, *vocab)
                }
                Op::CrossEntropyStats(op::CrossEntropyStats(vocab)) => self.cross_entropy_stats(*vocab),
                Op::LogProbs(_) | Op::LogProbsBackward(_) | Op::RowSums(_) | Op::RowSumsBackward(_) => {
                    self.of_sequences(op);
                }
                Op::SplitColumns(_) => self.split_columns(),
                Op::JoinColumns(_) => self.join_columns(),
                Op::AttentionPart(part) => {
                    with_element!(self.reads[0].dtype, T => self.attention_part::<T>(part));
                }
                Op::AttentionPartBackward(op::AttentionPartBackward { part, carried_q, carried_kv }) => {
                    with_element!(self.reads[0].dtype, T => {
                        self.attention_part_backward::<T>(part, *carried_q, *carried_kv);
                    });
                }
                Op::Scale(op::Scale { factor }) => {
                    copy(self.reads[0], self.writes[0]);
                    with_element!(self.writes[0].dtype, T => {
                        elementwise::scale::<T>(self.writes[0].slice_mut(), *factor);
                    });
                }
                Op::Dropout(dropout) => {
                    copy(self.reads[0], self.writes[0]);
                    let keys = self.reads[1].slice();
                    with_element!(self.writes[0].dtype, T => {
                        elementwise::dropout::<T>(self.writes[0].slice_mut(), keys, dropout);
                    });
                }
                Op::AddBias(_) => with_element!(self.writes[0].dtype, T => self.add_bias::<T>()),
                Op::RowLengths(op::RowLengths(rows)) => self.row_lengths(rows),
                Op::Magnitude(op::Magnitude(columns)) => {
                    with_element!(self.writes[0].dtype, T => self.magnitude::<T>(*columns))
                }
                Op::MagnitudeBackward(op::MagnitudeBackward { columns, residual }) => {
                    with_element!(self.writes[0].dtype, T => self.magnitude_backward::<T>(*columns, *residual));
                }
                Op::Slice(op::Slice { start }) => self.slice(*start),
                Op::Paste(op::Paste { start }) => self.paste(*start),
                Op::TreeSum(_) => {
                    let plan = self.sum_plan.take().expect("the executor passes a plan for every tree sum");
                    self.tree_sum(&plan);
                }
                Op::SumSquaresBlocks(op::SumSquaresBlocks { block }) => {
                    reduce::sum_squares_blocks(self.reads[0].slice::<f32>(), *block, self.writes[0].slice_mut());
                }
                Op::SumSquares(op::SumSquares { elements }) => {
                    let g = self.reads[0];
                    let (first, len) = elements.unwrap_or((0, g.len()));
                    self.writes[0].slice_mut::<f64>()[0] =
                        with_element!(g.dtype, T => reduce::sum_squares::<T>(&g.slice()[first..first + len]));
                }
                Op::UpdateSums(op::UpdateSums(update)) => self.update_sums(update),
                Op::Update(update) => self.update(update),
                Op::ClipCoefficient(_)
                | Op::Opaque(_)
                | Op::Sum(_)
                | Op::Assemble(_)
                | Op::Formulas(_)
                | Op::Start(_)
                | Op::Await(_) => {
                    unreachable!("handled before operands are gathered")
                }
                Op::Enter(_) => unreachable!("erased when the program was compiled"),
            }
        }
    }

    unsafe fn embedding(&mut self, residual: bool, first: usize) {
        // SAFETY: `x` may be the residual (operand 2), which is not read after `copy`; ids and table do not overlap it
        // and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            }
            let (ids, table, x) = (self.reads[0].slice(), self.reads[1], self.writes[0]);
            let part = (first > 0 || self.is_part).then_some(first);
            with_element!(x.dtype, Y => match table.dtype {
                // Words of two bf16 numbers each.
                DType::I32 => {
                    let numbers: &[bf16] = bytemuck::cast_slice(table.slice::<u32>());
                    look_up::<Y, bf16>(ids, numbers, part, x.slice_mut(), x.cols, residual);
                }
                _ => look_up::<Y, f32>(ids, table.slice(), part, x.slice_mut(), x.cols, residual),
            });
        }
    }

    unsafe fn embedding_backward(&mut self, residual: bool, first: usize) {
        // SAFETY: `dtable` may be the residual (operand 2), which is not read after `copy`; ids and `dx` do not overlap
        // it and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            }
            let (ids, dx, dtable) = (self.reads[0].slice(), self.reads[1], self.writes[0].slice_mut());
            with_element!(dx.dtype, T => {
                match first > 0 || self.is_part {
                    true => embedding::embedding_part_backward::<T>(ids, dx.slice(), dx.cols, first, dtable, residual),
                    false => embedding::embedding_backward::<T>(ids, dx.slice(), dx.cols, dtable, residual),
                }
            });
        }
    }

    unsafe fn norm<Y: Float>(&mut self, kind: NormKind, eps: f32) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (x, gain) = (self.reads[0], self.reads[1].slice());
            let (y, rstd) = (self.writes[0].slice_mut::<Y>(), self.writes[1].slice_mut());
            with_element!(x.dtype, X => match kind {
                NormKind::Rms => rms_norm::rms_norm::<X, Y>(x.slice(), gain, eps, y, rstd),
                NormKind::Layer => {
                    let (bias, mean) = (self.reads[2].slice(), self.writes[2].slice_mut());
                    layer_norm::layer_norm::<X, Y>(x.slice(), gain, bias, eps, y, rstd, mean);
                }
            });
        }
    }

    unsafe fn norm_backward<Y: Float>(&mut self, kind: NormKind, residual_x: bool, residual_params: bool, again: bool) {
        // SAFETY: a result may be its carried operand, and `y` may be `dy`; neither is read after `copy`. Results overlap
        // neither each other nor `x`, the gain and the statistics, nor `dy` but for `y`, and then no slice of `dy` is made.
        unsafe {
            let n_stats = if kind == NormKind::Rms { 1 } else { 2 };
            let mut carried = self.reads[3 + n_stats..].iter();
            for (write, wanted) in self.writes.iter().zip([residual_x, residual_params, residual_params]) {
                if let Some(from) = carried.as_slice().first().filter(|_| wanted) {
                    copy(*from, *write);
                    carried.next();
                }
            }
            let (x, gain, rstd) = (self.reads[0], self.reads[1].slice(), self.reads[2].slice());
            let dy = self.reads[2 + n_stats];
            let (dx, dgain) = (self.writes[0], self.writes[1].slice_mut());
            let scratch = f32s(self.scratch);
            let (add_x, add) = (residual_x, residual_params);
            if again {
                copy(dy, self.writes[1 + n_stats]);
            }
            with_element!(x.dtype, X => match (kind, again) {
                (NormKind::Rms, false) => rms_norm::rms_norm_backward::<X, Y>(
                    x.slice(), gain, rstd, dy.slice(), dx.slice_mut(), add_x, dgain, add, scratch,
                ),
                (NormKind::Rms, true) => rms_norm::rms_norm_backward_again::<X, Y>(
                    x.slice(), gain, rstd, self.writes[2].slice_mut(), dx.slice_mut(), add_x, dgain, add, scratch,
                ),
                (NormKind::Layer, false) => {
                    let (mean, dbias) = (self.reads[3].slice(), self.writes[2].slice_mut());
                    layer_norm::layer_norm_backward::<X, Y>(
                        x.slice(), gain, rstd, mean, dy.slice(), dx.slice_mut(), add_x, dgain, dbias, add, scratch,
                    );
                }
                (NormKind::Layer, true) => {
                    let (mean, dbias) = (self.reads[3].slice(), self.writes[2].slice_mut());
                    let (bias, y) = (self.reads[self.reads.len() - 1].slice(), self.writes[3].slice_mut());
                    layer_norm::layer_norm_backward_again::<X, Y>(
                        x.slice(), gain, bias, rstd, mean, y, dx.slice_mut(), add_x, dgain, dbias, add, scratch,
                    );
                }
            });
        }
    }

    unsafe fn qk_squares_backward<T: Float>(&mut self, columns: QkColumns, residual: bool) {
        // SAFETY: `dqkv` may be the residual (operand 2), which is not read after `copy`; the others do not overlap it
        // and are only read.
        unsafe {
            if residual {
                copy(self.reads[2], self.writes[0]);
            } else {
                self.writes[0].slice_mut::<T>().fill(T::ZERO);
            }
            let (qkv, dsquares, dqkv) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.writes[0].slice_mut());
            qk_norm::qk_squares_backward(columns, qkv, dsquares, dqkv);
        }
    }

    unsafe fn qk_norm<T: Float>(&mut self, norm: QkNorm) {
        // SAFETY: the result overlaps no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            qk_norm::qk_norm(norm, qkv, gain_q, gain_k, self.reads[3].slice(), self.writes[0].slice_mut::<T>());
        }
    }

    unsafe fn qk_norm_backward<T: Float>(&mut self, norm: QkNorm, residual: bool) {
        // SAFETY: results 2 and 3 may be operands 5 and 6, which are not read after `copy`; no others overlap.
        unsafe {
            if residual {
                copy(self.reads[5], self.writes[2]);
                copy(self.reads[6], self.writes[3]);
            }
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (squares, dy) = (self.reads[3].slice(), self.reads[4].slice::<T>());
            let (dqkv, dsquares) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            let (dgain_q, dgain_k) = (self.writes[2].slice_mut(), self.writes[3].slice_mut());
            let scratch = f32s(self.scratch);
            qk_norm::qk_norm_backward(
                norm, qkv, gain_q, gain_k, squares, dy, dqkv, dsquares, dgain_q, dgain_k, residual, scratch,
            );
        }
    }

    unsafe fn head_norm<T: Float>(&mut self, heads: Heads, eps: f32) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (y, rstd) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            head_norm::head_norm(heads, qkv, gain_q, gain_k, eps, y, rstd);
        }
    }

    unsafe fn head_norm_backward<T: Float>(&mut self, heads: Heads, residual: bool) {
        // SAFETY: results 1 and 2 may be operands 5 and 6, which are not read after `copy`; no others overlap.
        unsafe {
            if residual {
                copy(self.reads[5], self.writes[1]);
                copy(self.reads[6], self.writes[2]);
            }
            let (qkv, gain_q, gain_k) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (rstd, dy) = (self.reads[3].slice(), self.reads[4].slice::<T>());
            let (dgain_q, dgain_k) = (self.writes[1].slice_mut(), self.writes[2].slice_mut());
            let dqkv = self.writes[0].slice_mut::<T>();
            let scratch = f32s(self.scratch);
            head_norm::head_norm_backward(
                heads, qkv, gain_q, gain_k, rstd, dy, dqkv, dgain_q, dgain_k, residual, scratch,
            );
        }
    }

    unsafe fn attention<T: Float>(&mut self, a: &Attention) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, doc_start) = (self.reads[0].slice::<T>(), self.reads[1].slice());
            let (o, lse) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            attention::attention(&shape_of(a), qkv, doc_start, o, lse, f32s(self.scratch));
        }
    }

    unsafe fn attention_backward<T: Float>(&mut self, a: &Attention) {
        // SAFETY: the result overlaps no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, doc_start) = (self.reads[0].slice::<T>(), self.reads[1].slice());
            let (o, lse, dout) = (self.reads[2].slice::<T>(), self.reads[3].slice(), self.reads[4].slice::<T>());
            let dqkv = self.writes[0].slice_mut::<T>();
            attention_backward::attention_backward(
                &shape_of(a),
                qkv,
                doc_start,
                o,
                lse,
                dout,
                dqkv,
                f32s(self.scratch),
            );
        }
    }

    unsafe fn activation<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: the result does not overlap the operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (x, y) = (self.reads[0].slice::<X>(), self.writes[0]);
            with_element!(y.dtype, Y => match f {
                ActivationFn::SwiGlu => activation::swiglu::<X, Y>(x, y.cols, y.slice_mut()),
                ActivationFn::GeluTanh => activation::gelu::<X, Y>(x, y.slice_mut()),
            });
        }
    }

    unsafe fn activation_backward<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: `dx` may be `x` for SwiGLU only, and then no slice of `x` is made; `dy` overlaps neither.
        unsafe {
            let (x, dy, dx) = (self.reads[0], self.reads[1], self.writes[0]);
            with_element!(dy.dtype, Y => match f {
                ActivationFn::SwiGlu if x.is(&dx) => {
                    activation::swiglu_backward_in_place::<X, Y>(dx.slice_mut(), dy.slice(), dy.cols);
                }
                ActivationFn::SwiGlu => {
                    activation::swiglu_backward::<X, Y>(x.slice(), dy.slice(), dy.cols, dx.slice_mut());
                }
                ActivationFn::GeluTanh => activation::gelu_backward::<X, Y>(x.slice(), dy.slice(), dx.slice_mut()),
            });
        }
    }

    unsafe fn activation_backward_again<X: Float>(&mut self, f: ActivationFn) {
        // SAFETY: `dx` may be `x` and `y` may be `dy`, which are not read after `copy`; no others overlap.
        unsafe {
            let (dx, y) = (self.writes[0], self.writes[1]);
            copy(self.reads[0], dx);
            copy(self.reads[1], y);
            with_element!(y.dtype, Y => match f {
                ActivationFn::SwiGlu => {
                    activation::swiglu_backward_again::<X, Y>(dx.slice_mut(), y.slice_mut(), y.cols);
                }
                ActivationFn::GeluTanh => activation::gelu_backward_again::<X, Y>(dx.slice_mut(), y.slice_mut()),
            });
        }
    }

    unsafe fn add<Y: Float>(&mut self) {
        // SAFETY: `out` may be one or both of the operands, and then no slice of them is made.
        unsafe {
            let (a, b, out) = (self.reads[0], self.reads[1], self.writes[0]);
            // The sum overwrites an operand; the other operand may be the same value.
            let (there, other) = if b.is(&out) { (b, a) } else { (a, b) };
            if there.is(&out) && other.is(&out) {
                return out.slice_mut::<Y>().iter_mut().for_each(|y| *y = Y::from_f32(y.to_f32() + y.to_f32()));
            }
            if there.is(&out) {
                return with_element!(other.dtype, B => elementwise::add_assign::<Y, B>(out.slice_mut(), other.slice()));
            }
            with_element!(a.dtype, A => with_element!(b.dtype, B => {
                elementwise::add::<A, B, Y>(a.slice(), b.slice(), out.slice_mut());
            }));
        }
    }

    unsafe fn cross_entropy(&mut self, residual: bool, gradient: bool, vocab: Option<VocabShard>) {
        // SAFETY: result 1 may be the logits, which are not read after `copy`, and result 0 the carried loss, which is
        // read before it is written.
        unsafe {
            let (logits, labels) = (self.reads[0], self.reads[1].slice());
            let carried = if residual { self.reads[self.reads.len() - 1].slice::<f64>()[0] } else { 0.0 };
            let scale = self.reads[2].slice::<f64>()[Hyper::LOSS_GRAD_SCALE] as f32;
            let wide = match gradient {
                _ if logits.dtype != DType::F32 => self.converted_logits(),
                true => {
                    copy(logits, self.writes[1]);
                    self.writes[1].slice_mut()
                }
                // Only read.
                false => logits.slice_mut(),
            };
            let loss = match (gradient, vocab) {
                (true, None) => cross_entropy::cross_entropy_with_gradient(wide, labels, logits.cols, scale),
                (false, None) => cross_entropy::cross_entropy(wide, labels, logits.cols),
                (true, Some(vocab)) => cross_entropy_part::cross_entropy_from_stats_with_gradient(
                    wide,
                    labels,
                    logits.cols,
                    vocab.first,
                    self.reads[3].slice(),
                    scale,
                ),
                (false, Some(_)) => cross_entropy_part::cross_entropy_from_stats(labels, self.reads[3].slice()),
            };
            if gradient && logits.dtype != DType::F32 {
                with_element!(logits.dtype, T => elementwise::cast::<f32, T>(wide, self.writes[1].slice_mut()));
            }
            self.writes[0].slice_mut::<f64>()[0] = carried + loss;
        }
    }

    /// Narrow logits, converted to f32 in the scratch. This device makes no programs with narrow logits; those that do are
    /// compared with it.
    ///
    /// # Safety
    /// Nothing else uses the scratch while the result lives.
    pub(super) unsafe fn converted_logits<'b>(&mut self) -> &'b mut [f32] {
        let logits = self.reads[0];
        let wide = &mut f32s(self.scratch)[..logits.rows * logits.cols];
        // SAFETY: the scratch outlasts the instruction, and the caller's contract.
        let wide = unsafe { std::slice::from_raw_parts_mut(wide.as_mut_ptr(), wide.len()) };
        // SAFETY: the scratch overlaps no value.
        with_element!(logits.dtype, T => elementwise::cast::<T, f32>(unsafe { logits.slice() }, wide));
        wide
    }

    unsafe fn update_sums(&mut self, update: &Update) {
        let UpdateOperands { param, state, grad, sums, hyper, coefficient } = update.operands(self.reads);
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (g, p) = (grad.slice(), param.slice());
            let mut of_state: [&[f32]; MAX_STATE] = Default::default();
            state.iter().zip(&mut of_state).for_each(|(r, s)| *s = r.slice());
            let mut of_sums: [&[f32]; MAX_SUMS] = Default::default();
            sums.iter().zip(&mut of_sums).for_each(|(r, s)| *s = r.slice());
            let mut out: [&mut [f32]; MAX_SUMS] = Default::default();
            self.writes.iter().zip(&mut out).for_each(|(w, s)| *s = w.slice_mut());
            let p = &p[update.first..update.first + g.len()];
            let whole = whole(update, &of_sums[..sums.len()]);
            let (state, out) = (&of_state[..state.len()], &mut out[..self.writes.len()]);
            optimizer::sums(&update.rule, p, state, g, &whole, &step_of(update, hyper, coefficient), out);
        }
    }

    unsafe fn update(&mut self, update: &Update) {
        let UpdateOperands { state, grad, sums, hyper, coefficient, .. } = update.operands(self.reads);
        // SAFETY: this function makes one slice of the parameter and one of each state tensor. The memory plan keeps the
        // gradient, the sums and the scalars in other buffers.
        unsafe {
            let (g, p) = (grad.slice(), self.writes[0].slice_mut());
            let mut of_state: [&mut [f32]; MAX_STATE] = Default::default();
            self.writes[1..].iter().zip(&mut of_state).for_each(|(w, s)| *s = w.slice_mut());
            let mut of_sums: [&[f32]; MAX_SUMS] = Default::default();
            sums.iter().zip(&mut of_sums).for_each(|(r, s)| *s = r.slice());
            let p = &mut p[update.first..update.first + g.len()];
            let whole = whole(update, &of_sums[..sums.len()]);
            let state = &mut of_state[..state.len()];
            optimizer::update(&update.rule, p, state, g, &whole, &step_of(update, hyper, coefficient));
        }
    }
}

/// Rows of a table by id; with `part`, the table has the rows from there on, and other ranks have the others.
fn look_up<Y: Float, T: Float>(
    ids: &[i32],
    table: &[T],
    part: Option<usize>,
    x: &mut [Y],
    n_columns: usize,
    accumulate: bool,
) {
    match part {
        Some(first) => embedding::embedding_part(ids, table, n_columns, first, x, accumulate),
        None => embedding::embedding(ids, table, n_columns, x, accumulate),
    }
}

/// What the elements of an update belong to.
fn whole<'a>(update: &'a Update, sums: &'a [&'a [f32]]) -> optimizer::Whole<'a> {
    optimizer::Whole { tiles: &update.tiles, blocks: &update.blocks, sums }
}

/// The scalars of an update.
///
/// # Safety
/// The operands are not written meanwhile.
unsafe fn step_of(update: &Update, hyper: &Buffer, coefficient: &Buffer) -> optimizer::Step {
    // SAFETY: the caller's contract.
    unsafe {
        let hyper = hyper.slice::<f64>();
        optimizer::Step {
            lr: hyper[update.rate],
            scalars: std::array::from_fn(|i| hyper[Hyper::RULE + i]),
            grad_scale: coefficient.slice::<f64>()[0],
        }
    }
}

/// The scratch as f32; it is aligned to 64 bytes.
pub(super) fn f32s(scratch: &mut [u8]) -> &mut [f32] {
    let whole = scratch.len() / size_of::<f32>() * size_of::<f32>();
    bytemuck::cast_slice_mut(&mut scratch[..whole])
}
