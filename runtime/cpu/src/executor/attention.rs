//! Attention and positions.

use super::operands::{Operands, copy, f32s, heads_of, shape_of, with_element};
use crate::kernels::{attention, attention_backward, rotary};
use phalanx_device::float::Float;
use phalanx_strategies::program::{Attention, Op, op};

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn of_attention(&mut self, op: &Op) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            match op {
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
                Op::AttentionPart(part) => {
                    with_element!(self.reads[0].dtype, T => self.attention_part::<T>(part));
                }
                Op::AttentionPartBackward(op::AttentionPartBackward { part, carried_q, carried_kv }) => {
                    with_element!(self.reads[0].dtype, T => {
                        self.attention_part_backward::<T>(part, *carried_q, *carried_kv);
                    });
                }
                _ => unreachable!("of another family"),
            }
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
}
