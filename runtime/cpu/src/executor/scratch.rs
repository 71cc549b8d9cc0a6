//! Bytes of scratch of each instruction, for the compiler.

use super::cache::shape_of_cache;
use super::operands::{heads_of, shape_of};
use super::parts::{index_bytes, shape_of_part};
use super::product::product_scratch;
use crate::kernels::attention_part::{attention_part_backward_scratch_len, attention_part_scratch_len};
use crate::kernels::cached_attention::cached_attention_scratch_len;
use crate::kernels::{attention, attention_backward, head_norm, layer_norm, qk_norm, reduce, rms_norm};
use crate::thread::available_threads;
use phalanx_strategies::program::{DType, Instr, NormKind, Op, Program, op};

/// Bytes of scratch of one instruction.
pub(crate) fn scratch_bytes(p: &Program, instr: &Instr) -> usize {
    let value = |i: usize| p.value(instr.reads[i]);
    let f32s = |n: usize| n * size_of::<f32>();
    match &instr.op {
        Op::MatMul(m) => product_scratch(p, m, instr.reads[0], instr.writes[0]),
        Op::CrossEntropy(_) | Op::CrossEntropyStats(_) | Op::LogProbs(_) if value(0).dtype != DType::F32 => {
            f32s(value(0).n_elements())
        }
        Op::ColumnSum(_) => f32s(reduce::column_sum_scratch_len(p.value(instr.writes[0]).n_columns())),
        Op::NormBackward(op::NormBackward { kind: NormKind::Rms, .. }) => {
            f32s(rms_norm::rms_norm_backward_scratch_len(value(0).n_columns()))
        }
        Op::NormBackward(op::NormBackward { kind: NormKind::Layer, .. }) => {
            f32s(layer_norm::layer_norm_backward_scratch_len(value(0).n_columns()))
        }
        Op::HeadNormBackward(op::HeadNormBackward { heads, .. }) => {
            f32s(head_norm::head_norm_backward_scratch_len(heads_of(heads)))
        }
        Op::QkNormBackward(op::QkNormBackward { norm, .. }) => {
            f32s(qk_norm::qk_norm_backward_scratch_len(norm.columns))
        }
        Op::Attention(a) => f32s(attention::attention_scratch_len(&shape_of(a), available_threads())),
        Op::AttentionBackward(op::AttentionBackward(a)) => {
            f32s(attention_backward::attention_backward_scratch_len(&shape_of(a), available_threads()))
        }
        Op::CachedAttention(a) => f32s(cached_attention_scratch_len(&shape_of_cache(a), value(0).n_rows())),
        Op::AttentionPart(part) => {
            let shape = shape_of_part(part);
            index_bytes(value(0).n_rows()) + f32s(attention_part_scratch_len(&shape, available_threads()))
        }
        Op::AttentionPartBackward(op::AttentionPartBackward { part, .. }) => {
            let shape = shape_of_part(part);
            index_bytes(value(0).n_rows()) + f32s(attention_part_backward_scratch_len(&shape, available_threads()))
        }
        _ => 0,
    }
}
