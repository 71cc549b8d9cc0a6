//! Adjoint of attention. Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
//!
//! With the weights `p = e^(scale q·k - lse)` and `delta = do·o`: `dv_j = Σ_t p do_t`, `ds = p (do·v_j - delta)`,
//! `dq = scale Σ_j ds k_j`, `dk = scale Σ_t ds q_t`. We differ in that a task is a key/value head with the queries of its
//! whole group in the outer loop: its key and value gradients are summed in one place and one order, without atomics.
#![allow(unsafe_code)] // Tasks write disjoint columns of the gradient.

use super::Heads;
use super::attention::{BLOCK, Shape, narrow, sees};
use super::math::{exp, sum2};
use super::parallel::{Shared, for_each_task};
use super::simd::simd;
use super::tile::{Strided, VECTOR, pack, tile_product};
use super::transpose::transpose;
use crate::cpu::element::Element;

/// Length of the scratch of [`attention_backward`] for as many threads.
pub fn attention_backward_scratch_len(shape: &Shape, n_threads: usize) -> usize {
    n_threads.max(1) * slot_len(shape)
}

// Keys, values and their gradients of a whole row; five tiles of the block of queries; two tiles of scores.
fn slot_len(shape: &Shape) -> usize {
    (4 * shape.seq_len + 5 * BLOCK) * shape.padded_dim() + 2 * BLOCK * BLOCK
}

/// Writes all three parts of `dqkv`.
///
/// # Shapes
/// `qkv, dqkv: [B S, (H + 2 K) D]`, `doc_start: [B S]`, `o, dout: [B S, H D]`, `lse: [B S, H]`,
/// `scratch: [attention_backward_scratch_len]`: its length bounds the number of threads that are used.
///
/// # Panics
/// If a token does not see itself, or the scratch is too short for one thread.
pub fn attention_backward<T: Element>(
    shape: &Shape,
    qkv: &[T],
    doc_start: &[i32],
    o: &[T],
    lse: &[f32],
    dout: &[T],
    dqkv: &mut [T],
    scratch: &mut [f32],
) {
    let (h, d, s) = (shape.heads.n_heads, shape.heads.head_dim, shape.seq_len);
    let n = doc_start.len();
    assert!(n.is_multiple_of(s) && qkv.len() == n * shape.heads.columns() && dqkv.len() == qkv.len());
    assert!(o.len() == n * h * d && dout.len() == o.len() && lse.len() == n * h);
    let dqkv = Shared::new(dqkv);
    let operands = Operands { shape, qkv, doc_start, o, lse, dout };
    let kv = shape.heads.n_kv_heads;
    for_each_task(n / s * kv, scratch, slot_len(shape), |task, slot| {
        operands.key_value_head(task / kv, task % kv, &dqkv, slot);
    });
}

struct Operands<'a, T> {
    shape: &'a Shape,
    qkv: &'a [T],
    doc_start: &'a [i32],
    o: &'a [T],
    lse: &'a [f32],
    dout: &'a [T],
}

/// Keys and values of one head over a row of the batch `[S, padded D]`, and their gradients.
struct KeyValues<'a> {
    k: &'a mut [f32],
    v: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

/// What is known of a block of queries: `[BLOCK, padded D]` as it lies, `[D, BLOCK]` transposed (`_t`).
struct Queries<'a> {
    q: &'a mut [f32],
    q_t: &'a mut [f32],
    dout: &'a mut [f32],
    dout_t: &'a mut [f32],
    dq: &'a mut [f32],
    from: [i32; BLOCK],
    lse: [f32; BLOCK],
    delta: [f32; BLOCK],
}

impl<T: Element> Operands<'_, T> {
    fn key_value_head(&self, row: usize, kv_head: usize, dqkv: &Shared<T>, slot: &mut [f32]) {
        let Heads { n_heads: h, n_kv_heads: kv, head_dim: d } = self.shape.heads;
        let (s, dp, ld) = (self.shape.seq_len, self.shape.padded_dim(), self.shape.heads.columns());
        let (whole, rest) = slot.split_at_mut(4 * s * dp);
        let mut whole = whole.chunks_exact_mut(s * dp);
        let mut next = || whole.next().expect("the slot has four whole rows");
        let mut kvs = KeyValues { k: next(), v: next(), dk: next(), dv: next() };
        let key_column = (h + kv_head) * d;
        let keys = row * s * ld + key_column;
        pack(&self.qkv[keys..], ld, s, d, 1.0, kvs.k, dp);
        pack(&self.qkv[keys + kv * d..], ld, s, d, 1.0, kvs.v, dp);
        kvs.dk.fill(0.0);
        kvs.dv.fill(0.0);
        for head in kv_head * (h / kv)..(kv_head + 1) * (h / kv) {
            for t0 in (0..s).step_by(BLOCK) {
                self.query_block(row, head, t0, &mut kvs, dqkv, rest);
            }
        }
        for t in 0..s {
            let first = (row * s + t) * ld + key_column;
            // SAFETY: this task alone writes the columns of this key head and of this value head in this row.
            let (dk, dv) = unsafe { (dqkv.part(first, d), dqkv.part(first + kv * d, d)) };
            narrow(&kvs.dk[t * dp..t * dp + d], dk);
            narrow(&kvs.dv[t * dp..t * dp + d], dv);
        }
    }

    fn query_block(
        &self,
        row: usize,
        head: usize,
        t0: usize,
        kvs: &mut KeyValues,
        dqkv: &Shared<T>,
        scratch: &mut [f32],
    ) {
        let (shape, dp) = (self.shape, self.shape.padded_dim());
        let (d, ld) = (shape.heads.head_dim, shape.heads.columns());
        let n_queries = BLOCK.min(shape.seq_len - t0);
        let (tiles, scores) = scratch.split_at_mut(5 * BLOCK * dp);
        let (weights, ds) = scores[..2 * BLOCK * BLOCK].split_at_mut(BLOCK * BLOCK);
        let mut queries = self.load(row, head, t0, n_queries, tiles);
        queries.dq.fill(0.0);
        let mut j0 = queries.from[0] as usize;
        while j0 < t0 + n_queries {
            let n_keys = BLOCK.min(t0 + n_queries - j0);
            tile_adjoint(shape, &mut queries, kvs, (t0, j0), (n_queries, n_keys), weights, ds);
            j0 += n_keys;
        }
        scale(&mut queries.dq[..n_queries * dp], shape.scale);
        for i in 0..n_queries {
            let first = (row * shape.seq_len + t0 + i) * ld + head * d;
            // SAFETY: the task of this head's group alone writes the columns of this query head in this row.
            narrow(&queries.dq[i * dp..i * dp + d], unsafe { dqkv.part(first, d) });
        }
    }

    fn load<'s>(&self, row: usize, head: usize, t0: usize, n: usize, tiles: &'s mut [f32]) -> Queries<'s> {
        let (shape, dp) = (self.shape, self.shape.padded_dim());
        let (h, d, ld) = (shape.heads.n_heads, shape.heads.head_dim, shape.heads.columns());
        let first = row * shape.seq_len + t0;
        let mut tiles = tiles.chunks_exact_mut(BLOCK * dp);
        let mut tile = || tiles.next().expect("the slot has five tiles");
        let (q, q_t, dout, dout_t, dq) = (tile(), tile(), tile(), tile(), tile());
        pack(&self.qkv[first * ld + head * d..], ld, n, d, shape.scale, q, dp);
        transpose(q, dp, n, d, q_t, BLOCK);
        let of_head = first * h * d + head * d;
        pack(&self.dout[of_head..], h * d, n, d, 1.0, dout, dp);
        transpose(dout, dp, n, d, dout_t, BLOCK);
        let (mut lse, mut delta) = ([0.0; BLOCK], [0.0; BLOCK]);
        for i in 0..n {
            lse[i] = self.lse[(first + i) * h + head];
            let o = &self.o[of_head + i * h * d..of_head + i * h * d + d];
            delta[i] = dot(&dout[i * dp..i * dp + d], o);
        }
        let from = shape.visible_from(t0, &self.doc_start[first..first + n]);
        Queries { q, q_t, dout, dout_t, dq, from, lse, delta }
    }
}

/// Adds what a block of queries and a block of keys owe each other.
fn tile_adjoint(
    shape: &Shape,
    queries: &mut Queries,
    kvs: &mut KeyValues,
    (t0, j0): (usize, usize),
    (n_queries, n_keys): (usize, usize),
    weights: &mut [f32],
    ds: &mut [f32],
) {
    let (d, dp) = (shape.heads.head_dim, shape.padded_dim());
    let width = n_queries.next_multiple_of(VECTOR);
    let keys = j0 * dp..(j0 + n_keys) * dp;
    let (k, v) = (&kvs.k[keys.clone()], &kvs.v[keys.clone()]);
    let (dk, dv) = (&mut kvs.dk[keys.clone()], &mut kvs.dv[keys]);
    tile_product((n_keys, width, d), Strided::rows(k, dp), (queries.q_t, BLOCK), (weights, BLOCK), false);
    tile_product((n_keys, width, d), Strided::rows(v, dp), (queries.dout_t, BLOCK), (ds, BLOCK), false);
    score_gradients(weights, ds, n_keys, width, (t0, j0), &queries.from, &queries.lse, &queries.delta);
    let by_key = |tile| Strided::rows(tile, BLOCK);
    tile_product((n_keys, dp, n_queries), by_key(weights), (queries.dout, dp), (dv, dp), true);
    tile_product((n_keys, dp, n_queries), by_key(ds), (queries.q, dp), (dk, dp), true);
    tile_product((n_queries, dp, n_keys), Strided::transposed(ds, BLOCK), (k, dp), (queries.dq, dp), true);
}

simd! {
    /// Scores to weights, and gradients of weights to gradients of scores, in place.
    fn score_gradients(
        weights: &mut [f32],
        ds: &mut [f32],
        n_keys: usize,
        width: usize,
        origin: (usize, usize),
        from: &[i32; BLOCK],
        lse: &[f32; BLOCK],
        delta: &[f32; BLOCK],
    ) {
        let (t0, j0) = (origin.0 as i32, origin.1 as i32);
        let rows = weights.as_chunks_mut::<BLOCK>().0.iter_mut().zip(ds.as_chunks_mut::<BLOCK>().0);
        for (j, (weights, ds)) in rows.take(n_keys).enumerate() {
            for i in 0..width.min(BLOCK) {
                let p = exp(weights[i] - lse[i]);
                let p = if sees(t0 + i as i32, from[i], j0 + j as i32) { p } else { 0.0 };
                weights[i] = p;
                ds[i] = p * (ds[i] - delta[i]);
            }
        }
    }
}

simd! {
    fn dot<T: Element>(a: &[f32], b: &[T]) -> f32 {
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
