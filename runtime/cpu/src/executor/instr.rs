//! One instruction: its buffers, and the kernel that runs it.

use super::CpuMachine;
use super::buffer::Buffer;
use super::operands::{Kernel, MAX_OPERANDS, Operands, copy};
use super::sum_plan::SumPlan;
use phalanx_device::groups::Groups;
use phalanx_device::{ElementType, ExecError, OpaqueModel, Operand, RawBuffer};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Collective, CollectiveKind, DType, Hyper, Instr, Op, ValueId, op};
use std::sync::Arc;

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
        unsafe { run(&instr.op, &mut operands) };
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

/// Calls the kernel of an operation. Those of the second list are run before operands are gathered, or erased by the compiler.
macro_rules! run {
    ($op:expr, $operands:expr, { $($kernel:ident)* }, { $($other:ident)* }) => {
        match $op {
            // SAFETY: the caller's contract.
            $(Op::$kernel(kernel) => unsafe { kernel.run($operands) },)*
            $(Op::$other(_) => unreachable!("run before operands are gathered, or erased when the program was compiled"),)*
        }
    };
}

/// # Safety
/// As [`Kernel::run`].
unsafe fn run(op: &Op, operands: &mut Operands<'_>) {
    run!(op, operands, {
        Embedding EmbeddingBackward
        MatMul ColumnSum TreeSum SumSquares SumSquaresBlocks
        Norm NormBackward HeadNorm HeadNormBackward QkSquares QkSquaresBackward QkNorm QkNormBackward
        Rotary Attention AttentionBackward CacheWrite CachedAttention AttentionPart AttentionPartBackward
        Activation ActivationBackward Add Scale Cast Dropout Unpack
        AddBias SplitColumns JoinColumns Slice Paste
        RowLengths Magnitude MagnitudeBackward
        CrossEntropy CrossEntropyStats LogProbs LogProbsBackward RowSums RowSumsBackward
        UpdateSums Update
    }, {
        ClipCoefficient Opaque Formulas Sum Assemble Start Await Enter
    });
}
