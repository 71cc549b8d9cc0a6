//! Causal grouped-query attention that never holds the matrix of scores.
//! Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 1.
//!
//! We differ in the layout: tiles of scores are kept transposed, `[keys, queries]`, so that the softmax of a query runs
//! down a column, sixteen queries to a register and no sum across one, and so that keys and values are used as they lie.
//!
//! Legend: `t` query token, `j` key token, both counted within a row of the batch; `BLOCK` queries and keys of a tile.
#![allow(unsafe_code)] // Tasks write disjoint columns of the output.

pub use super::attention_backward::{attention_backward, attention_backward_scratch_len};

use super::Heads;
use super::math::exp;
use super::parallel::{Shared, for_each_task};
use super::simd::simd;
use super::tile::{Strided, VECTOR, pack, tile_product};
use super::transpose::transpose;
use crate::cpu::element::Element;

/// Queries and keys of a tile of scores.
pub(super) const BLOCK: usize = 64;

/// Geometry and mask of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Heads of the packed qkv.
    pub heads: Heads,
    /// Tokens `S` of a row of the batch.
    pub seq_len: usize,
    /// Token `t` sees `j > t - window` only.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
}

impl Shape {
    /// First token that `t` sees, given the first one of its document.
    pub(super) fn first_visible(&self, t: usize, doc_start: i32) -> usize {
        let of_window = self.window.map_or(0, |w| (t + 1).saturating_sub(w));
        let of_document = usize::try_from(doc_start).expect("a document starts within its row");
        assert!(of_document <= t && self.window != Some(0), "token {t} does not see itself");
        of_window.max(of_document)
    }

    /// First visible token of each query of a block, and a value that hides everything for columns beyond.
    pub(super) fn visible_from(&self, t0: usize, doc_start: &[i32]) -> [i32; BLOCK] {
        let mut from = [i32::MAX; BLOCK];
        for (i, (from, start)) in from.iter_mut().zip(doc_start).enumerate() {
            *from = self.first_visible(t0 + i, *start) as i32;
        }
        from
    }

    pub(super) fn padded_dim(&self) -> usize {
        self.heads.head_dim.next_multiple_of(VECTOR)
    }
}

/// Length of the scratch of [`attention`] for as many threads.
pub fn attention_scratch_len(shape: &Shape, n_threads: usize) -> usize {
    n_threads.max(1) * slot_len(shape)
}

// Queries (as they lie, and transposed), keys, values, scores, output (transposed, and as it lies).
fn slot_len(shape: &Shape) -> usize {
    6 * BLOCK * shape.padded_dim() + BLOCK * BLOCK
}

/// `o = softmax(scale q k^T + mask) v` for each head, and `lse = ln Σ_j e^(scale q·k_j)`.
///
/// Token `t` sees the tokens `j` of its row with `max(doc_start[t], t - window + 1) <= j <= t`.
///
/// # Shapes
/// `qkv: [B S, (H + 2 K) D]`, `doc_start: [B S]` (index within the row; not decreasing within a row), `o: [B S, H D]`,
/// `lse: [B S, H]`, `scratch: [attention_scratch_len]`: its length bounds the number of threads that are used.
///
/// # Panics
/// If a token does not see itself, or the scratch is too short for one thread.
pub fn attention<T: Element>(
    shape: &Shape,
    qkv: &[T],
    doc_start: &[i32],
    o: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let (h, d, s) = (shape.heads.n_heads, shape.heads.head_dim, shape.seq_len);
    let n = doc_start.len();
    assert!(
        n.is_multiple_of(s) && qkv.len() == n * shape.heads.columns() && o.len() == n * h * d && lse.len() == n * h
    );
    let (n_heads_of_all_rows, n_blocks) = (n / s * h, s.div_ceil(BLOCK));
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    for_each_task(n_heads_of_all_rows * n_blocks, scratch, slot_len(shape), |task, slot| {
        // The last blocks see the most keys: begun first, they leave no thread with a long task at the end.
        let t0 = (n_blocks - 1 - task / n_heads_of_all_rows) * BLOCK;
        let (row, head) = (task % n_heads_of_all_rows / h, task % h);
        forward_task(shape, qkv, doc_start, row, head, t0, &o, &lse, slot);
    });
}

/// One block of queries of one head against all keys that it sees.
fn forward_task<T: Element>(
    shape: &Shape,
    qkv: &[T],
    doc_start: &[i32],
    row: usize,
    head: usize,
    t0: usize,
    o: &Shared<T>,
    lse: &Shared<f32>,
    slot: &mut [f32],
) {
    let Heads { n_heads: h, n_kv_heads: kv, head_dim: d } = shape.heads;
    let (ld, dp, first) = (shape.heads.columns(), shape.padded_dim(), row * shape.seq_len);
    let n_queries = BLOCK.min(shape.seq_len - t0);
    let width = n_queries.next_multiple_of(VECTOR);
    let (tiles, scores) = slot.split_at_mut(6 * BLOCK * dp);
    let mut tiles = tiles.chunks_exact_mut(BLOCK * dp);
    let mut tile = || tiles.next().expect("the slot has six tiles");
    let (rows, q_t, k, v, o_t, o_rows) = (tile(), tile(), tile(), tile(), tile(), tile());

    pack(&qkv[(first + t0) * ld + head * d..], ld, n_queries, d, shape.scale, rows, dp);
    transpose(rows, dp, n_queries, d, q_t, BLOCK);
    let from = shape.visible_from(t0, &doc_start[first + t0..first + t0 + n_queries]);
    let (mut largest, mut total) = ([f32::NEG_INFINITY; BLOCK], [0.0; BLOCK]);
    let first_key = from[0] as usize;
    let mut j0 = first_key;
    while j0 < t0 + n_queries {
        let n_keys = BLOCK.min(t0 + n_queries - j0);
        let keys = (first + j0) * ld + (h + head / (h / kv)) * d;
        pack(&qkv[keys..], ld, n_keys, d, 1.0, k, dp);
        pack(&qkv[keys + kv * d..], ld, n_keys, d, 1.0, v, dp);
        tile_product((n_keys, width, d), Strided::rows(k, dp), (q_t, BLOCK), (scores, BLOCK), false);
        let shrink = online_softmax(scores, n_keys, width, (t0, j0), &from, &mut largest, &mut total);
        let accumulate = j0 > first_key;
        if accumulate {
            scale_columns(o_t, d, width, &shrink);
        }
        tile_product((d, width, n_keys), Strided::transposed(v, dp), (scores, BLOCK), (o_t, BLOCK), accumulate);
        j0 += n_keys;
    }
    scale_columns(o_t, d, width, &total.map(|x| 1.0 / x));
    transpose(o_t, BLOCK, d, n_queries, o_rows, d.next_multiple_of(VECTOR));
    for i in 0..n_queries {
        let token = first + t0 + i;
        // SAFETY: this task alone writes the columns of this head in the rows of this block.
        let (o, lse) = unsafe { (o.part(token * h * d + head * d, d), lse.part(token * h + head, 1)) };
        narrow(&o_rows[i * dp..i * dp + d], o);
        lse[0] = largest[i] + total[i].ln();
    }
}

simd! {
    /// Rounds a row to its storage type.
    pub(super) fn narrow<T: Element>(from: &[f32], to: &mut [T]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = T::from_f32(*from);
        }
    }
}

/// Whether key `j` is seen by the query `t` that sees nothing before `from`.
#[inline(always)]
pub(super) fn sees(t: i32, from: i32, j: i32) -> bool {
    (from <= j) & (j <= t)
}

simd! {
    /// Turns a tile of scores `[keys, queries]` into weights relative to the largest score so far, and returns the factor
    /// by which what was summed before shrinks. A hidden key gets a weight of exactly 0.
    fn online_softmax(
        scores: &mut [f32],
        n_keys: usize,
        width: usize,
        origin: (usize, usize),
        from: &[i32; BLOCK],
        largest: &mut [f32; BLOCK],
        total: &mut [f32; BLOCK],
    ) -> [f32; BLOCK] {
        let (t0, j0, width) = (origin.0 as i32, origin.1 as i32, width.min(BLOCK));
        let rows = &mut scores.as_chunks_mut::<BLOCK>().0[..n_keys];
        let mut reference = *largest;
        for (j, row) in rows.iter_mut().enumerate() {
            for i in 0..width {
                let seen = sees(t0 + i as i32, from[i], j0 + j as i32);
                let x = if seen { row[i] } else { f32::NEG_INFINITY };
                row[i] = x;
                reference[i] = if x > reference[i] { x } else { reference[i] };
            }
        }
        let mut shrink = [1.0; BLOCK];
        for i in 0..width {
            let old = largest[i];
            largest[i] = reference[i];
            // A query that has seen no key yet: any finite reference makes its weights 0.
            reference[i] = if reference[i] == f32::NEG_INFINITY { 0.0 } else { reference[i] };
            shrink[i] = exp(old - reference[i]);
            total[i] *= shrink[i];
        }
        for row in rows.iter_mut() {
            for i in 0..width {
                row[i] = exp(row[i] - reference[i]);
                total[i] += row[i];
            }
        }
        shrink
    }
}

simd! {
    fn scale_columns(tile: &mut [f32], n_rows: usize, width: usize, factors: &[f32; BLOCK]) {
        for row in &mut tile.as_chunks_mut::<BLOCK>().0[..n_rows] {
            for i in 0..width {
                row[i] *= factors[i];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        bits, close, finite_differences, inner, random, same_on_every_number_of_threads, stored, wide,
    };
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// Documents of the given length in each row.
    fn documents(n: usize, seq_len: usize, document: usize) -> Vec<i32> {
        (0..n).map(|i| (i % seq_len / document * document) as i32).collect()
    }

    /// Attention as it is defined, in f64: outputs, then log-sum-exp.
    fn reference(shape: &Shape, qkv: &[f64], doc_start: &[i32]) -> (Vec<f64>, Vec<f64>) {
        let Heads { n_heads: h, n_kv_heads: kv, head_dim: d } = shape.heads;
        let (ld, n) = (shape.heads.columns(), doc_start.len());
        let (mut o, mut lse) = (vec![0.0; n * h * d], vec![0.0; n * h]);
        for (token, head) in (0..n).flat_map(|token| (0..h).map(move |head| (token, head))) {
            let (row, t) = (token / shape.seq_len * shape.seq_len, token % shape.seq_len);
            let (k, v) = ((h + head / (h / kv)) * d, (h + kv + head / (h / kv)) * d);
            let q = &qkv[token * ld + head * d..][..d];
            let seen = (0..=t).filter(|j| *j as i32 >= doc_start[token] && shape.window.is_none_or(|w| j + w > t));
            let scores: Vec<(usize, f64)> =
                seen.map(|j| (j, inner(q, &qkv[(row + j) * ld + k..][..d]) * shape.scale as f64)).collect();
            let total: f64 = scores.iter().map(|(_, s)| s.exp()).sum();
            lse[token * h + head] = total.ln();
            for (j, s) in scores {
                for i in 0..d {
                    o[(token * h + head) * d + i] += s.exp() / total * qkv[(row + j) * ld + v + i];
                }
            }
        }
        (o, lse)
    }

    fn forward<T: Element>(shape: &Shape, qkv: &[T], doc_start: &[i32]) -> (Vec<T>, Vec<f32>) {
        let Heads { n_heads: h, head_dim: d, .. } = shape.heads;
        let mut o = vec![T::from_f32(7.0); doc_start.len() * h * d];
        let mut lse = vec![f32::NAN; doc_start.len() * h];
        let mut scratch = vec![f32::NAN; attention_scratch_len(shape, 2)];
        attention(shape, qkv, doc_start, &mut o, &mut lse, &mut scratch);
        (o, lse)
    }

    fn backward<T: Element>(shape: &Shape, qkv: &[T], doc_start: &[i32], dout: &[T]) -> Vec<T> {
        let (o, lse) = forward(shape, qkv, doc_start);
        let mut dqkv = vec![T::from_f32(7.0); qkv.len()];
        let mut scratch = vec![f32::NAN; attention_backward_scratch_len(shape, 2)];
        attention_backward(shape, qkv, doc_start, &o, &lse, dout, &mut dqkv, &mut scratch);
        dqkv
    }

    fn shape(group: usize, n_kv_heads: usize, head_dim: usize, seq_len: usize, window: Option<usize>) -> Shape {
        let heads = Heads { n_heads: group * n_kv_heads, n_kv_heads, head_dim };
        Shape { heads, seq_len, window, scale: 1.0 / (head_dim as f32).sqrt() }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn forward_matches_the_definition(
            group in 1usize..4, kv in 1usize..3, d in 1usize..40, s in 1usize..200, document in 1usize..220,
            window in proptest::option::of(1usize..150), seed in any::<u64>(),
        ) {
            let shape = shape(group, kv, d, s, window);
            let qkv: Vec<f32> = random(2 * s * shape.heads.columns(), seed).iter().map(|x| 3.0 * x).collect();
            let doc_start = documents(2 * s, s, document);

            let (o, lse) = forward(&shape, &qkv, &doc_start);

            let (expected_o, expected_lse) = reference(&shape, &wide(&qkv), &doc_start);
            // f32 rounding of scores of size up to 50.
            close(&o, &expected_o, 1e-5);
            close(&lse, &expected_lse, 1e-5);
        }

        #[test]
        fn backward_matches_finite_differences(
            group in 1usize..4, kv in 1usize..3, half in 1usize..4, s in 1usize..9, document in 1usize..10,
            window in proptest::option::of(1usize..8), seed in any::<u64>(),
        ) {
            let shape = shape(group, kv, 2 * half - 1, s, window);
            let qkv = random(2 * s * shape.heads.columns(), seed);
            let doc_start = documents(2 * s, s, document);
            let dout = random(2 * s * shape.heads.n_heads * shape.heads.head_dim, seed ^ 1);

            let dqkv = backward(&shape, &qkv, &doc_start, &dout);

            let loss = |qkv: &[f64]| inner(&reference(&shape, qkv, &doc_start).0, &wide(&dout));
            close(&dqkv, &finite_differences(&wide(&qkv), loss), 1e-5);
        }
    }

    #[test]
    fn backward_across_blocks_matches_finite_differences() {
        for window in [None, Some(70)] {
            let shape = shape(2, 1, 3, 150, window);
            let qkv = random(150 * shape.heads.columns(), 5);
            let doc_start: Vec<i32> = (0..150).map(|t| if t < 20 { 0 } else { 20 }).collect();
            let dout = random(150 * 6, 6);

            let dqkv = backward(&shape, &qkv, &doc_start, &dout);

            let loss = |qkv: &[f64]| inner(&reference(&shape, qkv, &doc_start).0, &wide(&dout));
            close(&dqkv, &finite_differences(&wide(&qkv), loss), 1e-5);
        }
    }

    /// Both directions on storage `T`, against f32 storage of the same numbers.
    fn narrow_storage_agrees<T: Element>(rounding: f64) {
        let shape = shape(2, 2, 32, 130, None);
        let qkv: Vec<T> = stored(&random(2 * 130 * shape.heads.columns(), 7));
        let dout: Vec<T> = stored(&random(2 * 130 * 128, 8));
        let widened = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let doc_start = documents(260, 130, 50);

        let (o, _) = forward(&shape, &qkv, &doc_start);
        let dqkv = backward(&shape, &qkv, &doc_start, &dout);

        close(&o, &wide(&forward(&shape, &widened(&qkv), &doc_start).0), rounding);
        // `delta` is taken from the rounded output, hence twice the rounding of one operation.
        let expected = backward(&shape, &widened(&qkv), &doc_start, &widened(&dout));
        close(&dqkv, &wide(&expected), 2.0 * rounding);
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        narrow_storage_agrees::<bf16>(1.0 / 256.0);
        narrow_storage_agrees::<f16>(1.0 / 2048.0);
    }

    #[test]
    fn documents_do_not_see_each_other() {
        let shape = shape(2, 1, 16, 100, None);
        let columns = shape.heads.columns();
        let doc_start = documents(100, 100, 37);
        let qkv = random(100 * columns, 9);
        let dout = random(100 * 32, 10);
        let mut changed = qkv.clone();
        changed[..37 * columns].iter_mut().for_each(|x| *x = 5.0 - *x);

        let (before, after) = (forward(&shape, &qkv, &doc_start), forward(&shape, &changed, &doc_start));
        let (dbefore, dafter) =
            (backward(&shape, &qkv, &doc_start, &dout), backward(&shape, &changed, &doc_start, &dout));

        assert_ne!(before.0[..37 * 32], after.0[..37 * 32]);
        assert_eq!(bits(&before.0[37 * 32..]), bits(&after.0[37 * 32..]));
        assert_eq!(bits(&before.1[37 * 2..]), bits(&after.1[37 * 2..]));
        assert_eq!(bits(&dbefore[37 * columns..]), bits(&dafter[37 * columns..]));
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let shape = shape(2, 2, 24, 150, Some(90));
        let qkv = random(2 * 150 * shape.heads.columns(), 11);
        let (doc_start, dout) = (documents(300, 150, 100), random(300 * 96, 12));

        same_on_every_number_of_threads(|| {
            let (o, lse) = forward(&shape, &qkv, &doc_start);
            (bits(&o), bits(&lse), bits(&backward(&shape, &qkv, &doc_start, &dout)))
        });
    }
}
