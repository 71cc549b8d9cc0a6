//! Adjoint of attention. Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
//!
//! With the weights `p = e^(scale q·k - lse)` and `delta = do·o`: `dv_j = Σ_t p do_t`, `ds = p (do·v_j - delta)`,
//! `dq = scale Σ_j ds k_j`, `dk = scale Σ_t ds q_t`. We differ: a task is a key/value head, with all queries of its
//! group in the outer loop, so key and value gradients are summed in one fixed order without atomics. Since `lse` and
//! `delta` belong to whole rows, the parts of a row can be processed one by one, in any order.
#![allow(unsafe_code)] // Tasks write disjoint columns of the gradients.

use super::Heads;
use super::attention_forward::narrow;
use super::attention_operands::{BLOCK, Cover, Operands, Visible, key_column};
use super::attention_shape::{PartShape, Shape};
use super::math::{exp, sum2};
use super::parallel::{Shared, for_each_task};
use super::simd::simd;
use super::strided::{Strided, VECTOR};
use super::tile::{Multiplier, pack};
use super::transpose::transpose;
use phalanx_device::float::Float;

/// Length of the scratch of [`attention_backward`] for `n_threads` threads.
pub fn attention_backward_scratch_len(shape: &Shape, n_threads: usize) -> usize {
    n_threads.max(1) * slot_len(&shape.as_part())
}

// Keys, values and their gradients of a whole row; five tiles of the block of queries; two tiles of scores; packed operands.
pub(super) fn slot_len(shape: &PartShape) -> usize {
    (4 * shape.n_keys + 5 * BLOCK) * shape.padded_dim() + 2 * BLOCK * BLOCK + shape.packed_len()
}

/// Writes all three parts of `dqkv`.
///
/// # Shapes
/// `qkv, dqkv: [B S, (H + 2 K) D]`, `doc_start: [B S]`, `o, dout: [B S, H D]`, `lse: [B S, H]`,
/// `scratch: [attention_backward_scratch_len]`: its length bounds the number of threads.
///
/// # Panics
/// If a token does not see itself, or the scratch is too short for one thread.
pub fn attention_backward<T: Float>(
    shape: &Shape,
    qkv: &[T],
    doc_start: &[i32],
    o: &[T],
    lse: &[f32],
    dout: &[T],
    dqkv: &mut [T],
    scratch: &mut [f32],
) {
    assert_eq!(dqkv.len(), qkv.len());
    let (columns, dqkv) = (shape.heads.columns(), Shared::new(dqkv));
    let gradients = Gradients { dq: dqkv, dq_columns: columns, dkv: dqkv, dkv_columns: columns, accumulate: false };
    backward(&Operands::of_rows(shape, qkv, doc_start), &Known { o, lse, dout }, &gradients, scratch);
}

/// The outputs of whole rows of the batch and their gradients: `o, dout: [N, H D]`, `lse: [N, H]`.
pub(super) struct Known<'a, O> {
    pub o: &'a [O],
    pub lse: &'a [f32],
    pub dout: &'a [O],
}

/// Destination of the gradients: the first `H D` columns of `dq`, the last `2 K D` columns of `dkv`.
pub(super) struct Gradients<'a, O> {
    pub dq: Shared<'a, O>,
    pub dq_columns: usize,
    pub dkv: Shared<'a, O>,
    pub dkv_columns: usize,
    /// Whether gradients are added to existing values.
    pub accumulate: bool,
}

/// Gradients of all queries and keys, one task for each key/value head of each row.
pub(super) fn backward<T: Float, O: Float>(
    operands: &Operands<T>,
    known: &Known<O>,
    gradients: &Gradients<O>,
    scratch: &mut [f32],
) {
    let PartShape { heads: Heads { n_heads: h, n_kv_heads: kv, head_dim: d }, n_queries, .. } = operands.shape;
    let n = operands.n_rows * n_queries;
    assert!(known.o.len() == n * h * d && known.dout.len() == n * h * d && known.lse.len() == n * h);
    for_each_task(operands.n_rows * kv, scratch, slot_len(&operands.shape), |task, slot| {
        let pass = Pass { operands, known, gradients, row: task / kv };
        pass.key_value_head(task % kv, slot);
    });
}

/// The backward pass of one row of the batch.
struct Pass<'a, T, O> {
    operands: &'a Operands<'a, T>,
    known: &'a Known<'a, O>,
    gradients: &'a Gradients<'a, O>,
    row: usize,
}

/// Keys and values of one head over a row of the batch `[S, padded D]`, and their gradients.
struct KeyValues<'a> {
    k: &'a mut [f32],
    v: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

/// A block of queries: `[BLOCK, padded D]`, or `[D, BLOCK]` transposed (`_t`).
struct Queries<'a> {
    n: usize,
    q: &'a mut [f32],
    q_t: &'a mut [f32],
    dout: &'a mut [f32],
    dout_t: &'a mut [f32],
    dq: &'a mut [f32],
    lse: [f32; BLOCK],
    delta: [f32; BLOCK],
}

impl<T: Float, O: Float> Pass<'_, T, O> {
    fn key_value_head(&self, kv_head: usize, slot: &mut [f32]) {
        if !self.gradients.accumulate || self.operands.sees_anything(self.row) {
            let shape = &self.operands.shape;
            let (n, dp) = (shape.n_keys, shape.padded_dim());
            let (whole, rest) = slot.split_at_mut(4 * n * dp);
            let (k, whole) = whole.split_at_mut(n * dp);
            let (v, whole) = whole.split_at_mut(n * dp);
            let (dk, dv) = whole.split_at_mut(n * dp);
            self.operands.pack_keys(self.row, kv_head, 0, n, k, v);
            dk.fill(0.0);
            dv.fill(0.0);
            let mut kvs = KeyValues { k, v, dk, dv };
            let group = shape.heads.n_heads / shape.heads.n_kv_heads;
            for head in kv_head * group..(kv_head + 1) * group {
                for t0 in (0..shape.n_queries).step_by(BLOCK) {
                    self.query_block(head, t0, &mut kvs, rest);
                }
            }
            self.put_keys(kv_head, &kvs);
        }
    }

    fn put_keys(&self, kv_head: usize, kvs: &KeyValues) {
        let (shape, Gradients { dkv, dkv_columns, accumulate, .. }) = (&self.operands.shape, self.gradients);
        let (d, dp) = (shape.heads.head_dim, shape.padded_dim());
        let column = key_column(*dkv_columns, shape.heads, kv_head);
        for j in 0..shape.n_keys {
            let first = (self.row * shape.n_keys + j) * dkv_columns + column;
            // SAFETY: only this task accesses the columns of this key head and this value head in this row.
            let (dk, dv) = unsafe { (dkv.part(first, d), dkv.part(first + shape.heads.n_kv_heads * d, d)) };
            put(&kvs.dk[j * dp..j * dp + d], dk, *accumulate);
            put(&kvs.dv[j * dp..j * dp + d], dv, *accumulate);
        }
    }

    fn query_block(&self, head: usize, t0: usize, kvs: &mut KeyValues, scratch: &mut [f32]) {
        let shape = &self.operands.shape;
        let (d, dp) = (shape.heads.head_dim, shape.padded_dim());
        let (tiles, scores) = scratch.split_at_mut(5 * BLOCK * dp);
        let (weights, rest) = scores.split_at_mut(BLOCK * BLOCK);
        let (ds, packed) = rest.split_at_mut(BLOCK * BLOCK);
        let mut multiplier = Multiplier::of::<T>(packed);
        let (on_queries, on_products) = multiplier.split_factor(shape.scale);
        let mut tiles = tiles.chunks_exact_mut(BLOCK * dp);
        let mut tile = || tiles.next().expect("the slot has five tiles");
        let (q, q_t, dout, dout_t, dq) = (tile(), tile(), tile(), tile(), tile());
        let n = BLOCK.min(shape.n_queries - t0);
        let mut queries = Queries { n, q, q_t, dout, dout_t, dq, lse: [0.0; BLOCK], delta: [0.0; BLOCK] };

        let visible = self.operands.visible(self.row, t0, n);
        let (candidates, mut loaded) = (self.operands.candidates(&visible), false);
        for j0 in candidates.clone().step_by(BLOCK) {
            let n_keys = BLOCK.min(candidates.end - j0);
            let indexes = self.operands.key_indexes(self.row, j0, n_keys);
            let cover = visible.cover(&indexes[..n_keys]);
            if cover == Cover::Nothing {
                continue;
            }
            if !loaded {
                loaded = true;
                self.load(head, t0, on_queries, &mut queries);
            }
            let mask = (cover == Cover::Some).then_some(&visible);
            let scores = Scores { indexes: &indexes[..n_keys], mask, factor: on_products, weights, ds };
            tile_adjoint(d, &mut multiplier, &mut queries, kvs, j0, scores);
        }
        let Gradients { dq, dq_columns, accumulate, .. } = self.gradients;
        if loaded {
            scale(&mut queries.dq[..n * dp], shape.scale);
        } else if *accumulate {
            return;
        } else {
            queries.dq.fill(0.0);
        }
        for i in 0..n {
            let first = (self.row * shape.n_queries + t0 + i) * dq_columns + head * d;
            // SAFETY: only the task of this head's group accesses the columns of this query head in this row.
            put(&queries.dq[i * dp..i * dp + d], unsafe { dq.part(first, d) }, *accumulate);
        }
    }

    fn load(&self, head: usize, t0: usize, on_queries: f32, queries: &mut Queries) {
        let shape = &self.operands.shape;
        let (h, d, dp, n) = (shape.heads.n_heads, shape.heads.head_dim, shape.padded_dim(), queries.n);
        self.operands.pack_queries(self.row, head, t0, n, on_queries, queries.q);
        transpose(queries.q, dp, n, d, queries.q_t, BLOCK);
        let first = (self.row * shape.n_queries + t0) * h + head;
        pack(&self.known.dout[first * d..], h * d, n, d, 1.0, queries.dout, dp);
        transpose(queries.dout, dp, n, d, queries.dout_t, BLOCK);
        for i in 0..n {
            let at = first + i * h;
            queries.lse[i] = self.known.lse[at];
            queries.delta[i] = dot(&queries.dout[i * dp..i * dp + d], &self.known.o[at * d..(at + 1) * d]);
        }
        queries.dq.fill(0.0);
    }
}

/// A tile of scores `[keys, queries]`: the indexes of its keys, the mask, the factor that the queries do not yet
/// contain, and buffers for weights and gradients.
struct Scores<'a> {
    indexes: &'a [i32],
    mask: Option<&'a Visible>,
    factor: f32,
    weights: &'a mut [f32],
    ds: &'a mut [f32],
}

/// Adds the gradients of a block of queries and a block of keys.
fn tile_adjoint(
    d: usize,
    multiplier: &mut Multiplier,
    queries: &mut Queries,
    kvs: &mut KeyValues,
    j0: usize,
    scores: Scores,
) {
    let Scores { indexes, mask, factor, weights, ds } = scores;
    let (dp, n_queries, n_keys) = (d.next_multiple_of(VECTOR), queries.n, indexes.len());
    let width = n_queries.next_multiple_of(VECTOR);
    let keys = j0 * dp..(j0 + n_keys) * dp;
    let (k, v) = (&kvs.k[keys.clone()], &kvs.v[keys.clone()]);
    let (dk, dv) = (&mut kvs.dk[keys.clone()], &mut kvs.dv[keys]);
    let by_key = |tile| Strided::rows(tile, BLOCK);
    let by_query = |tile| Strided::transposed(tile, BLOCK);
    let score_shape = (n_keys, width, d);
    multiplier.product(score_shape, factor, Strided::rows(k, dp), (queries.q_t, BLOCK), (weights, BLOCK), false);
    multiplier.product(score_shape, 1.0, Strided::rows(v, dp), (queries.dout_t, BLOCK), (ds, BLOCK), false);
    score_gradients(weights, ds, indexes, width, mask, &queries.lse, &queries.delta);
    multiplier.product((n_keys, dp, n_queries), 1.0, by_key(weights), (queries.dout, dp), (dv, dp), true);
    multiplier.product((n_keys, dp, n_queries), factor, by_key(ds), (queries.q, dp), (dk, dp), true);
    multiplier.product((n_queries, dp, n_keys), 1.0, by_query(ds), (k, dp), (queries.dq, dp), true);
}

simd! {
    /// Turns scores into weights, and gradients of weights into gradients of scores, in place.
    fn score_gradients(
        weights: &mut [f32],
        ds: &mut [f32],
        indexes: &[i32],
        width: usize,
        mask: Option<&Visible>,
        lse: &[f32; BLOCK],
        delta: &[f32; BLOCK],
    ) {
        let width = width.min(BLOCK);
        let rows = weights.as_chunks_mut::<BLOCK>().0.iter_mut().zip(ds.as_chunks_mut::<BLOCK>().0);
        for ((weights, ds), index) in rows.zip(indexes) {
            for i in 0..width {
                weights[i] = exp(weights[i] - lse[i]);
            }
            if let Some(Visible { from, to, .. }) = mask {
                for i in 0..width {
                    let seen = (from[i] <= *index) & (*index <= to[i]);
                    weights[i] = if seen { weights[i] } else { 0.0 };
                }
            }
            for i in 0..width {
                ds[i] = weights[i] * (ds[i] - delta[i]);
            }
        }
    }
}

simd! {
    fn put<O: Float>(from: &[f32], to: &mut [O], accumulate: bool) {
        if accumulate {
            for (to, from) in to.iter_mut().zip(from) {
                *to = O::from_f32(to.to_f32() + from);
            }
        } else {
            narrow(from, to);
        }
    }
}

simd! {
    fn dot<T: Float>(a: &[f32], b: &[T]) -> f32 {
        sum2(a, b, |a, b| a * b)
    }
}

simd! {
    fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}
