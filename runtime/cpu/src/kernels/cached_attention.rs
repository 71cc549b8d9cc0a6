//! Attention of new tokens to a cache of keys and values.
//!
//! There is no tile of queries that would make this a matrix product. A task reads the keys and values of one key/value head once,
//! for all query heads that share it, with the softmax of Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 1.
//!
//! Legend: `B` sequences, `S` new tokens of each; `P` positions of a sequence in the cache; `G = H / K` query heads of a
//! key/value head.

use super::Heads;
use super::math::{exp, max, sum, sum2};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// Keys whose scores exist at once.
const BLOCK: usize = 64;

/// Geometry and mask of attention to a cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheShape {
    /// Heads of the packed qkv.
    pub heads: Heads,
    /// New tokens `S` of each sequence.
    pub seq_len: usize,
    /// Positions `P` of each sequence.
    pub capacity: usize,
    /// A token at position `p` sees only positions above `p - window`.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
}

impl CacheShape {
    /// Columns of the cache: keys, then values.
    const fn columns(&self) -> usize {
        2 * self.heads.n_kv_heads * self.heads.head_dim
    }

    /// Query heads of a key/value head.
    const fn group(&self) -> usize {
        self.heads.n_heads / self.heads.n_kv_heads
    }

    // Queries, weighted values, scores, sums of weights.
    const fn slot_len(&self) -> usize {
        self.group() * (2 * self.heads.head_dim + BLOCK + 1)
    }

    /// Row of the cache for a new token.
    fn row(&self, token: usize, position: i32) -> usize {
        let position = usize::try_from(position).ok().filter(|position| *position < self.capacity);
        let position = position.expect("the position of a token is in the cache");
        token / self.seq_len * self.capacity + position
    }
}

/// Copies the keys and values of new tokens to the cache.
///
/// # Shapes
/// `qkv: [B S, (H + 2 K) D]`, `positions: [B S]`, `cache: [B P, 2 K D]`.
///
/// # Panics
/// If a shape differs from these, or a position is not in the cache.
pub fn cache_write<T: Float>(shape: &CacheShape, qkv: &[T], positions: &[i32], cache: &mut [T]) {
    let (from, to) = (shape.heads.columns(), shape.columns());
    assert!(
        qkv.len() == positions.len() * from && cache.len() == positions.len() / shape.seq_len * shape.capacity * to
    );
    for (token, (qkv, position)) in qkv.chunks_exact(from).zip(positions).enumerate() {
        cache[shape.row(token, *position) * to..][..to].copy_from_slice(&qkv[from - to..]);
    }
}

/// Length of the scratch of [`cached_attention`] for `n_tokens` new tokens.
pub const fn cached_attention_scratch_len(shape: &CacheShape, n_tokens: usize) -> usize {
    n_tokens * shape.heads.n_kv_heads * shape.slot_len()
}

/// `o = softmax(scale q k^T + mask) v` for each head, and `lse = ln Σ_j e^(scale q·k_j)`, over cached keys and values.
///
/// A token at position `p` sees the positions `j` of its sequence with `max(0, p - window + 1) <= j <= p`.
///
/// # Shapes
/// `qkv: [B S, (H + 2 K) D]` (the kernel reads the queries only), `positions: [B S]`, `cache: [B P, 2 K D]`, `o: [B S, H D]`,
/// `lse: [B S, H]`, `scratch: [cached_attention_scratch_len]`.
///
/// # Panics
/// If a shape differs from these, or a position is not in the cache.
pub fn cached_attention<T: Float>(
    shape: &CacheShape,
    qkv: &[T],
    positions: &[i32],
    cache: &[T],
    o: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let Heads { n_heads, n_kv_heads, head_dim } = shape.heads;
    let (n, group) = (positions.len(), shape.group());
    assert!(shape.window != Some(0) && qkv.len() == n * shape.heads.columns());
    assert!(cache.len() == n / shape.seq_len * shape.capacity * shape.columns());
    assert!(o.len() == n * n_heads * head_dim && lse.len() == n * n_heads);
    let scratch = &mut scratch[..cached_attention_scratch_len(shape, n)];
    let results = o.par_chunks_mut(group * head_dim).zip(lse.par_chunks_mut(group));
    results.zip(scratch.par_chunks_mut(shape.slot_len())).enumerate().for_each(|(task, ((o, lse), slot))| {
        let (token, kv_head) = (task / n_kv_heads, task % n_kv_heads);
        let last = shape.row(token, positions[token]);
        let n_seen = shape.window.unwrap_or(usize::MAX).min(positions[token] as usize + 1);
        let queries = &qkv[token * shape.heads.columns() + kv_head * group * head_dim..][..group * head_dim];
        attend(shape, kv_head, queries, &cache[..(last + 1) * shape.columns()], n_seen, o, lse, slot);
    });
}

/// Attention of the queries `[G, D]` of a token to the last `n_seen` rows of `cache`.
fn attend<T: Float>(
    shape: &CacheShape,
    kv_head: usize,
    queries: &[T],
    cache: &[T],
    n_seen: usize,
    o: &mut [T],
    lse: &mut [f32],
    slot: &mut [f32],
) {
    let (columns, d) = (shape.columns(), shape.heads.head_dim);
    let (q, rest) = slot.split_at_mut(queries.len());
    let (sums, rest) = rest.split_at_mut(queries.len());
    let (scores, totals) = rest.split_at_mut(lse.len() * BLOCK);
    q.iter_mut().zip(queries).for_each(|(to, from)| *to = shape.scale * from.to_f32());
    sums.fill(0.0);
    totals.fill(0.0);
    // The largest score so far; the totals are relative to it.
    lse.fill(f32::NEG_INFINITY);
    let first = cache.len() / columns - n_seen;
    for block in cache[first * columns..].chunks(BLOCK * columns) {
        let n_keys = block.len() / columns;
        score(q, &block[kv_head * d..], columns, d, scores);
        for (head, (largest, total)) in lse.iter_mut().zip(totals.iter_mut()).enumerate() {
            let shrink = weigh(&mut scores[head * BLOCK..][..n_keys], largest, total);
            sums[head * d..][..d].iter_mut().for_each(|sum| *sum *= shrink);
        }
        accumulate(scores, &block[(shape.heads.n_kv_heads + kv_head) * d..], columns, d, sums);
    }
    for (head, (lse, total)) in lse.iter_mut().zip(totals).enumerate() {
        let sums = &sums[head * d..][..d];
        o[head * d..][..d].iter_mut().zip(sums).for_each(|(o, sum)| *o = T::from_f32(*sum / *total));
        *lse += total.ln();
    }
}

simd! {
    /// `to[head, j] = q[head] · keys[j]`; the rows of `keys` begin every `columns` elements.
    fn score<T: Float>(q: &[f32], keys: &[T], columns: usize, head_dim: usize, to: &mut [f32]) {
        for (j, key) in keys.chunks(columns).enumerate() {
            for (head, q) in q.chunks_exact(head_dim).enumerate() {
                to[head * BLOCK + j] = sum2(q, &key[..head_dim], |q, k| q * k);
            }
        }
    }
}

simd! {
    /// Turns scores into weights relative to the largest score so far, adds them to the total, and returns the factor that
    /// rescales earlier sums.
    fn weigh(scores: &mut [f32], largest: &mut f32, total: &mut f32) -> f32 {
        let top = max(scores);
        let reference = if top > *largest { top } else { *largest };
        let shrink = exp(*largest - reference);
        for score in scores.iter_mut() {
            *score = exp(*score - reference);
        }
        (*largest, *total) = (reference, *total * shrink + sum(scores, |w| w));
        shrink
    }
}

simd! {
    /// `sums[head] += Σ_j weights[head, j] values[j]`.
    fn accumulate<T: Float>(weights: &[f32], values: &[T], columns: usize, head_dim: usize, sums: &mut [f32]) {
        for (j, value) in values.chunks(columns).enumerate() {
            for (head, sums) in sums.chunks_exact_mut(head_dim).enumerate() {
                let weight = weights[head * BLOCK + j];
                for (sum, v) in sums.iter_mut().zip(value) {
                    *sum += weight * v.to_f32();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, close, random, same_on_every_number_of_threads, stored, wide};
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    const SEQUENCES: usize = 2;

    /// New tokens, their positions, and a cache whose rows beyond the positions are NaN.
    struct Case<T> {
        shape: CacheShape,
        qkv: Vec<T>,
        positions: Vec<i32>,
        cache: Vec<T>,
    }

    impl<T: Float> Case<T> {
        /// The last new token of sequence `i` is at position `last - i`, the earlier ones before it.
        fn new(heads: Heads, seq_len: usize, last: usize, window: Option<usize>, seed: u64) -> Case<T> {
            let capacity = last + 1 + seed as usize % 3;
            let shape = CacheShape { heads, seq_len, capacity, window, scale: 1.0 / (heads.head_dim as f32).sqrt() };
            let qkv: Vec<f32> = random(SEQUENCES * seq_len * heads.columns(), seed).iter().map(|x| 3.0 * x).collect();
            let mut cache = random(SEQUENCES * capacity * shape.columns(), seed ^ 1);
            let ends = (0..SEQUENCES).map(|i| last + 1 - i);
            for (cache, end) in cache.chunks_mut(capacity * shape.columns()).zip(ends.clone()) {
                cache[(end - seq_len) * shape.columns()..].fill(f32::NAN);
            }
            let positions = ends.flat_map(|end| (end - seq_len..end).map(|position| position as i32)).collect();
            Case { shape, qkv: stored(&qkv), positions, cache: stored(&cache) }
        }

        fn run(&self) -> (Vec<T>, Vec<T>, Vec<f32>) {
            let (n, Heads { n_heads, head_dim, .. }) = (self.positions.len(), self.shape.heads);
            let mut cache = self.cache.clone();
            let (mut o, mut lse) = (vec![T::from_f32(f32::NAN); n * n_heads * head_dim], vec![f32::NAN; n * n_heads]);
            let mut scratch = vec![f32::NAN; cached_attention_scratch_len(&self.shape, n)];
            cache_write(&self.shape, &self.qkv, &self.positions, &mut cache);
            cached_attention(&self.shape, &self.qkv, &self.positions, &cache, &mut o, &mut lse, &mut scratch);
            (cache, o, lse)
        }

        /// By definition, in f64: the cache with the new tokens, outputs, log-sum-exp.
        fn definition(&self) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
            let Heads { n_heads, n_kv_heads, head_dim: d } = self.shape.heads;
            let (qkv, mut cache, columns) = (wide(&self.qkv), wide(&self.cache), self.shape.columns());
            let start = |token: usize| token / self.shape.seq_len * self.shape.capacity;
            for (token, qkv) in qkv.chunks(self.shape.heads.columns()).enumerate() {
                let row = start(token) + self.positions[token] as usize;
                cache[row * columns..][..columns].copy_from_slice(&qkv[n_heads * d..]);
            }
            let (mut o, mut lse) = (Vec::new(), Vec::new());
            for (token, head) in (0..self.positions.len()).flat_map(|token| (0..n_heads).map(move |head| (token, head)))
            {
                let q = &qkv[token * self.shape.heads.columns() + head * d..][..d];
                let position = self.positions[token] as usize;
                let of = |j: usize, block: usize| {
                    &cache[(start(token) + j) * columns + (block * n_kv_heads + head / (n_heads / n_kv_heads)) * d..]
                        [..d]
                };
                let seen = self.shape.window.map_or(0, |w| (position + 1).saturating_sub(w))..=position;
                let dot = |j: usize| q.iter().zip(of(j, 0)).map(|(q, k)| q * k).sum::<f64>();
                let weights: Vec<(usize, f64)> =
                    seen.map(|j| (j, (dot(j) * f64::from(self.shape.scale)).exp())).collect();
                let total: f64 = weights.iter().map(|(_, w)| w).sum();
                lse.push(total.ln());
                o.extend((0..d).map(|i| weights.iter().map(|(j, w)| w / total * of(*j, 1)[i]).sum::<f64>()));
            }
            (cache, o, lse)
        }
    }

    fn agrees<T: Float>(case: &Case<T>, rounding: f64) {
        let (cache, o, lse) = case.run();

        let (expected_cache, expected_o, expected_lse) = case.definition();
        assert!(wide(&cache).iter().zip(&expected_cache).all(|(x, y)| x == y || x.is_nan() && y.is_nan()));
        close(&o, &expected_o, rounding);
        close(&lse, &expected_lse, 5e-6);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn new_tokens_attend_to_the_cache_as_by_definition(
            group in 1usize..5, n_kv_heads in 1usize..4, head_dim in 1usize..70, seq_len in 1usize..4,
            last in 4usize..200, window in proptest::option::of(1usize..150), seed in any::<u64>(),
        ) {
            let heads = Heads { n_heads: group * n_kv_heads, n_kv_heads, head_dim };

            agrees(&Case::<f32>::new(heads, seq_len, last, window, seed), 5e-6);
            agrees(&Case::<bf16>::new(heads, seq_len, last, window, seed), 1.0 / 256.0);
            agrees(&Case::<f16>::new(heads, seq_len, last, window, seed), 1.0 / 2048.0);
        }
    }

    #[test]
    fn first_token_of_an_empty_cache_sees_itself() {
        let heads = Heads { n_heads: 2, n_kv_heads: 1, head_dim: 8 };
        let shape = CacheShape { heads, seq_len: 1, capacity: 1, window: None, scale: 1.0 };
        let case = Case { shape, qkv: random(heads.columns(), 1), positions: vec![0], cache: vec![f32::NAN; 16] };

        let (_, o, _) = case.run();

        let value = &case.qkv[24..];
        assert_eq!(o, [value, value].concat());
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let case = Case::<f32>::new(Heads { n_heads: 8, n_kv_heads: 4, head_dim: 32 }, 3, 700, None, 5);

        same_on_every_number_of_threads(|| {
            let (cache, o, lse) = case.run();
            (bits(&cache), bits(&o), bits(&lse))
        });
    }
}
