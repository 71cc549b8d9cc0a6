//! The operands of one instruction.

use super::buffer::Buffer;
use super::sum_plan::SumPlan;
use crate::kernels::Heads;
use crate::kernels::attention_shape::Shape;
use crate::tasks::{Cut, Tasks};
use phalanx_strategies::program::Attention;
use std::sync::Arc;

/// Most operands of an instruction, except norms over all gradients and user models, which access operands by index.
pub(super) const MAX_OPERANDS: usize = 24;

/// The operands of one instruction.
pub(super) struct Operands<'a> {
    pub(super) reads: &'a [Buffer],
    pub(super) writes: &'a [Buffer],
    pub(super) scratch: &'a mut [u8],
    /// Tables may hold a part of the vocabulary only.
    pub(super) is_part: bool,
    /// The order of the sum, for a tree sum.
    pub(super) sum_plan: Option<Arc<SumPlan>>,
}

/// An operation as this device runs it.
pub(super) trait Kernel {
    /// # Safety
    /// The operands belong to a verified instruction with this operation, with the aliasing of [`super`].
    unsafe fn run(&self, o: &mut Operands<'_>);
}

/// Runs `$body` with `$T` bound to the element type of a buffer of activations.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            phalanx_strategies::program::DType::Bf16 => {
                type $T = half::bf16;
                $body
            }
            phalanx_strategies::program::DType::F16 => {
                type $T = half::f16;
                $body
            }
            phalanx_strategies::program::DType::F32
            | phalanx_strategies::program::DType::F64
            | phalanx_strategies::program::DType::I32
            | phalanx_strategies::program::DType::E4m3 => {
                type $T = f32;
                $body
            }
        }
    };
}

pub(super) use with_element;

pub(super) const fn heads_of(a: &Attention) -> Heads {
    Heads { n_heads: a.n_heads, n_kv_heads: a.n_kv_heads, head_dim: a.head_dim }
}

pub(super) const fn shape_of(a: &Attention) -> Shape {
    Shape { heads: heads_of(a), seq_len: a.seq_len, window: a.window, scale: a.scale }
}

/// The scratch as f32; it is aligned to 64 bytes.
pub(super) fn f32s(scratch: &mut [u8]) -> &mut [f32] {
    let whole = scratch.len() / size_of::<f32>() * size_of::<f32>();
    bytemuck::cast_slice_mut(&mut scratch[..whole])
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
