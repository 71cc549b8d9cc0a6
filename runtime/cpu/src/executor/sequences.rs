//! Operations of objectives that compare sequences.

use super::operands::{Operands, copy};
use crate::kernels::log_probs;
use half::{bf16, f16};
use phalanx_device::float::Float;
use phalanx_strategies::program::{DType, Op, VocabShard, op};

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn of_sequences(&mut self, op: &Op) {
        // SAFETY: the caller keeps the contract of every function called here. The results of sums and of their adjoint overlap no
        // operand (`Op::in_place_pairs` names no pair).
        unsafe {
            match op {
                Op::LogProbs(op::LogProbs { vocab }) => self.log_probs(*vocab),
                Op::LogProbsBackward(op::LogProbsBackward { first }) => match self.reads[0].dtype {
                    DType::Bf16 => self.log_probs_backward::<bf16>(*first),
                    DType::F16 => self.log_probs_backward::<f16>(*first),
                    _ => self.log_probs_backward::<f32>(*first),
                },
                Op::RowSums(_) => {
                    let (x, labels) = (self.reads[0].slice(), self.reads[1].slice());
                    log_probs::row_sums(x, labels, self.writes[0].slice_mut());
                }
                Op::RowSumsBackward(_) => {
                    let (d, labels) = (self.reads[0].slice(), self.reads[1].slice());
                    log_probs::row_sums_backward(d, labels, self.writes[0].slice_mut());
                }
                other => unreachable!("{} compares no sequences", other.name()),
            }
        }
    }

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
