//! Causal attention with rotary positions. Sources: Dao 2023, FlashAttention-2 (arXiv:2307.08691); Su et al. 2021,
//! RoFormer (arXiv:2104.09864).

use super::super::grad_slot::GradSlot;
use super::{result, values};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Tape, Tensor};
use phalanx_cpu::kernels::attention as kernel;
use phalanx_cpu::kernels::attention_shape::Shape;
use phalanx_cpu::kernels::elementwise::add_assign;
use phalanx_cpu::kernels::{Heads, rotary};
use std::sync::Arc;

/// Causal grouped-query attention over packed queries, keys and values, within documents.
#[derive(Clone, Debug)]
pub struct CausalAttention {
    shape: Shape,
    /// Cosines, then sines, `[2, seq_len, head_dim / 2]`.
    rotary: Option<Arc<Vec<f32>>>,
}

impl CausalAttention {
    /// Attention for rows of `seq_len` tokens, without positions; scores are divided by `sqrt(head_dim)`.
    ///
    /// # Panics
    /// If `n_kv_heads` does not divide `n_heads`, or one of the numbers is 0.
    pub fn new(n_heads: usize, n_kv_heads: usize, head_dim: usize, seq_len: usize) -> CausalAttention {
        assert!(
            n_kv_heads > 0 && n_heads > 0 && n_heads.is_multiple_of(n_kv_heads),
            "{n_heads} heads share {n_kv_heads}"
        );
        assert!(head_dim > 0 && seq_len > 0, "heads of {head_dim} over rows of {seq_len}");
        let heads = Heads { n_heads, n_kv_heads, head_dim };
        let scale = 1.0 / (head_dim as f32).sqrt();
        CausalAttention { shape: Shape { heads, seq_len, window: None, scale }, rotary: None }
    }

    /// Rotates queries and keys by their positions: element `i` of the first half of a head with element `i` of the
    /// second by the angle `position * theta^(-2 i / head_dim)`.
    ///
    /// # Panics
    /// If heads have an odd width.
    #[must_use]
    pub fn with_rotary(mut self, theta: f64) -> CausalAttention {
        let d = self.shape.heads.head_dim;
        assert!(d.is_multiple_of(2), "heads of odd width {d} have no halves to rotate");
        let angle = |i: usize| (i / (d / 2)) as f64 * theta.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
        let n = self.shape.seq_len * d / 2;
        let table = (0..n).map(|i| angle(i).cos()).chain((0..n).map(|i| angle(i).sin()));
        self.rotary = Some(Arc::new(table.map(|x| x as f32).collect()));
        self
    }

    /// `o = softmax(q kᵀ / sqrt(D)) v` for each head, over the tokens of the same row that are neither later nor before
    /// `doc_start`. `width` is the width of the result, as a number or as `Const`.
    ///
    /// # Shapes
    /// `qkv: (N, P)` with `P = (H + 2 K) D`: queries, keys, values; `positions, doc_start: [N]`, as in a
    /// [`super::super::Batch`]; result `(N, C)` with `C = H D`.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn forward<N: Dim, P: Dim, C: Dim, T: Tape<f32, Cpu>>(
        &self,
        qkv: Tensor<(N, P), f32, Cpu, T>,
        width: C,
        positions: &[i32],
        doc_start: &[i32],
    ) -> Tensor<(N, C), f32, Cpu, T> {
        let (shape, heads) = (self.shape, self.shape.heads);
        let n = qkv.shape().0;
        assert_eq!(qkv.shape().1.size(), heads.columns(), "columns of queries, keys and values");
        assert_eq!(width.size(), heads.n_heads * heads.head_dim, "columns of the result");
        let (mut rotated, qkv, mut tape) = values(qkv);
        if let Some(table) = &self.rotary {
            rotary::rotary(heads, &mut rotated, positions, table, false);
        }
        let mut o = vec![0.0; n.size() * width.size()];
        let mut lse = vec![0.0; n.size() * heads.n_heads];
        let mut scratch = vec![0.0; kernel::attention_scratch_len(&shape, rayon::current_num_threads())];
        kernel::attention(&shape, &rotated, doc_start, &mut o, &mut lse, &mut scratch);
        if !T::OWNS_TAPE {
            return result(o, (n, width), &qkv).put_tape(tape);
        }
        let out = result(o.clone(), (n, width), &qkv);
        let (qkv_slot, out_slot) = (GradSlot::of(&qkv), GradSlot::of(&out));
        let (table, positions, doc_start) = (self.rotary.clone(), positions.to_vec(), doc_start.to_vec());
        tape.add_backward_op(move |grads| {
            let (dout, mut dqkv) = (out_slot.take(grads)?, qkv_slot.take(grads)?);
            let mut scratch = vec![0.0; kernel::attention_backward_scratch_len(&shape, rayon::current_num_threads())];
            let mut drotated = vec![0.0; rotated.len()];
            kernel::attention_backward(&shape, &rotated, &doc_start, &o, &lse, &dout, &mut drotated, &mut scratch);
            if let Some(table) = table {
                rotary::rotary(heads, &mut drotated, &positions, &table, true);
            }
            add_assign(&mut dqkv, &drotated);
            qkv_slot.put(grads, dqkv)?;
            out_slot.put(grads, dout)
        });
        out.put_tape(tape)
    }
}
