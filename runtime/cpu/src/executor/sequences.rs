//! Operations of objectives that compare sequences.

use super::operands::{Kernel, Operands, copy};
use crate::kernels::log_probs;
use half::{bf16, f16};
use phalanx_device::float::Float;
use phalanx_strategies::program::{DType, VocabShard, op};

impl Kernel for op::LogProbs {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::LogProbs { vocab } = self;
            o.log_probs(*vocab);
        }
    }
}

impl Kernel for op::LogProbsBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::LogProbsBackward { first } = self;
            match o.reads[0].dtype {
                DType::Bf16 => o.log_probs_backward::<bf16>(*first),
                DType::F16 => o.log_probs_backward::<f16>(*first),
                _ => o.log_probs_backward::<f32>(*first),
            }
        }
    }
}

impl Kernel for op::RowSums {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the results overlap no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (x, labels) = (o.reads[0].slice(), o.reads[1].slice());
            let weights = o.reads.get(2).map(|weights| weights.slice());
            log_probs::row_sums(x, labels, weights, o.writes[0].slice_mut());
        }
    }
}

impl Kernel for op::RowSumsBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the results overlap no operand (`Op::in_place_pairs` names no pair).
        unsafe {
            let (d, labels) = (o.reads[0].slice(), o.reads[1].slice());
            let weights = o.reads.get(2).map(|weights| weights.slice());
            log_probs::row_sums_backward(d, labels, weights, o.writes[0].slice_mut());
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    unsafe fn log_probs(&mut self, vocab: Option<VocabShard>) {
        // SAFETY: the results do not overlap the operands, which are only read (`Op::in_place_pairs` names no pair).
        unsafe {
            let (logits, labels) = (self.reads[0], self.reads[1].slice());
            let (found, norms) = (self.writes[0].slice_mut(), self.writes[1].slice_mut());
            match vocab {
                Some(_) => log_probs::log_probs_from_stats(labels, self.reads[2].slice(), found, norms),
                None => {
                    let wide = if logits.dtype == DType::F32 { logits.slice() } else { self.converted_logits() };
                    log_probs::log_probs(wide, labels, logits.cols, found, norms);
                }
            }
        }
    }

    unsafe fn log_probs_backward<T: Float>(&mut self, first: usize) {
        // SAFETY: the result may be the logits, which are not read after `copy`; it overlaps no other operand.
        unsafe {
            copy(self.reads[0], self.writes[0]);
            let (labels, norms, d) = (self.reads[1].slice(), self.reads[2].slice(), self.reads[3].slice());
            let dlogits = self.writes[0].slice_mut::<T>();
            log_probs::log_probs_backward(dlogits, labels, self.writes[0].cols, first, norms, d);
        }
    }
}
