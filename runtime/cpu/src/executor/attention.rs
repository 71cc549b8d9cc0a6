//! Attention and positions.

use super::operands::{Kernel, Operands, copy, f32s, heads_of, shape_of, with_element};
use crate::kernels::{attention, attention_backward, rotary};
use phalanx_device::float::Float;
use phalanx_strategies::program::{Attention, op};

impl Kernel for op::Rotary {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::Rotary { heads, inverse } = self;
            copy(o.reads[0], o.writes[0]);
            let (positions, table) = (o.reads[1].slice(), o.reads[2].slice());
            with_element!(o.writes[0].dtype, T => {
                rotary::rotary::<T>(heads_of(heads), o.writes[0].slice_mut(), positions, table, *inverse);
            });
        }
    }
}

impl Kernel for op::Attention {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.reads[0].dtype, T => o.attention::<T>(self));
        }
    }
}

impl Kernel for op::AttentionBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::AttentionBackward(a) = self;
            with_element!(o.reads[0].dtype, T => o.attention_backward::<T>(a));
        }
    }
}

impl Kernel for op::CacheWrite {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::CacheWrite(a) = self;
            with_element!(o.reads[0].dtype, T => o.cache_write::<T>(a));
        }
    }
}

impl Kernel for op::CachedAttention {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.reads[0].dtype, T => o.cached_attention::<T>(self));
        }
    }
}

impl Kernel for op::AttentionPart {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            with_element!(o.reads[0].dtype, T => o.attention_part::<T>(self));
        }
    }
}

impl Kernel for op::AttentionPartBackward {
    unsafe fn run(&self, o: &mut Operands<'_>) {
        // SAFETY: the caller keeps the contract of every function called here.
        unsafe {
            let op::AttentionPartBackward { part, carried_q, carried_kv } = self;
            with_element!(o.reads[0].dtype, T => {
                o.attention_part_backward::<T>(part, *carried_q, *carried_kv);
            });
        }
    }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
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
