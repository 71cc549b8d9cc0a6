//! Losses over a vocabulary.

use super::operands::{Kernel, Operands, copy, f32s, with_element};
use crate::kernels::{cross_entropy, cross_entropy_part, elementwise};
use phalanx_strategies::program::{DType, Hyper, VocabShard, op};

impl Kernel for op::CrossEntropy {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::CrossEntropy { residual, gradient, vocab } = self;
            o.cross_entropy(*residual, *gradient, *vocab);
        }
    }
}

impl Kernel for op::CrossEntropyStats {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::CrossEntropyStats(vocab) = self;
            o.cross_entropy_stats(*vocab);
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
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
}
