//! Operations that only occur where several ranks share a model.

use super::instr::{Operands, copy};
use crate::cpu::element::Element;
use crate::cpu::kernels::copy::copy_columns;
use crate::cpu::kernels::{cross_entropy_part, elementwise};
use half::{bf16, f16};
use phalanx_strategies::program::{DType, VocabShard};

/// # Safety
/// All functions here: the operands are those of a verified instruction, with the aliasing that [`super`] describes.
impl Operands<'_> {
    pub(super) unsafe fn cross_entropy_stats(&mut self, vocab: VocabShard) {
        // SAFETY: see the impl block.
        unsafe {
            let (logits, labels) = (self.reads[0], self.reads[1].slice());
            let stats = self.writes[0].slice_mut();
            cross_entropy_part::cross_entropy_stats(logits.slice(), labels, logits.cols, vocab.first, stats);
        }
    }

    pub(super) unsafe fn split_columns(&mut self) {
        // SAFETY: see the impl block.
        unsafe {
            let (x, parts) = (self.reads[0], [self.writes[0], self.writes[1]]);
            let mut first = 0;
            for part in parts {
                match x.dtype.size_bytes() {
                    2 => copy_columns::<u16>((x.slice(), x.cols, first), (part.slice_mut(), part.cols, 0), part.cols),
                    _ => copy_columns::<f32>((x.slice(), x.cols, first), (part.slice_mut(), part.cols, 0), part.cols),
                }
                first += part.cols;
            }
        }
    }

    /// Gradients come in f32, whatever the whole is stored in.
    pub(super) unsafe fn join_columns(&mut self) {
        // SAFETY: see the impl block.
        unsafe {
            let x = self.writes[0];
            let mut first = 0;
            for part in [self.reads[0], self.reads[1]] {
                match (part.dtype, x.dtype) {
                    (DType::F32, DType::F32) => {
                        copy_columns::<f32>((part.slice(), part.cols, 0), (x.slice_mut(), x.cols, first), part.cols);
                    }
                    (_, DType::Bf16) => place::<bf16>(part.slice(), part.cols, x.slice_mut(), x.cols, first),
                    _ => place::<f16>(part.slice(), part.cols, x.slice_mut(), x.cols, first),
                }
                first += part.cols;
            }
        }
    }

    pub(super) unsafe fn attention_part<T: Element>(&mut self, _part: &phalanx_strategies::program::AttentionPart) {
        unimplemented!()
    }

    pub(super) unsafe fn attention_part_backward<T: Element>(&mut self, _part: &phalanx_strategies::program::AttentionPart, _q: bool, _kv: bool) {
        unimplemented!()
    }

    pub(super) unsafe fn add_bias<Y: Element>(&mut self) {
        // SAFETY: see the impl block.
        unsafe {
            let (x, bias, y) = (self.reads[0], self.reads[1].slice::<f32>(), self.writes[0]);
            copy(x, y);
            elementwise::add_bias_assign::<Y, f32>(y.slice_mut(), bias);
        }
    }

    pub(super) unsafe fn slice(&mut self, start: usize) {
        // SAFETY: see the impl block.
        unsafe {
            let to = self.writes[0].slice_mut::<f32>();
            let from = self.reads[0].slice::<f32>();
            to.copy_from_slice(&from[start..start + to.len()]);
        }
    }

    pub(super) unsafe fn paste(&mut self, start: usize) {
        // SAFETY: see the impl block.
        unsafe {
            copy(self.reads[0], self.writes[0]);
            let part = self.reads[1].slice::<f32>();
            self.writes[0].slice_mut::<f32>()[start..start + part.len()].copy_from_slice(part);
        }
    }
}

/// Writes narrowed columns into a wider matrix.
fn place<T: Element>(from: &[f32], from_columns: usize, to: &mut [T], to_columns: usize, first: usize) {
    for (to, from) in to.chunks_exact_mut(to_columns).zip(from.chunks_exact(from_columns)) {
        for (to, from) in to[first..].iter_mut().zip(from) {
            *to = T::from_f32(*from);
        }
    }
}
