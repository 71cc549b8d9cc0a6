//! Attention: every query's weights over the keys that it sees, without tiles.

use super::{Matrix, dot};
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::{Attention, AttentionPart, CachedAttention};

/// Queries, keys and values, each with the first column of its first head.
struct Operands<'a> {
    part: AttentionPart,
    q: (&'a Matrix, usize),
    k: (&'a Matrix, usize),
    v: (&'a Matrix, usize),
    /// For each query, the keys that it sees.
    seen: Vec<Vec<usize>>,
}

impl<'a> Operands<'a> {
    fn whole(a: &Attention, qkv: &'a Matrix, doc_start: &Matrix) -> Operands<'a> {
        let part = AttentionPart { heads: *a, n_ranks: 1, q_rank: 0, kv_rank: 0, n_kv_ranks: 1, carried: false };
        let (h, k) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
        let seen = seen(&part, &doc_start.at);
        Operands { part, q: (qkv, 0), k: (qkv, h), v: (qkv, h + k), seen }
    }

    fn part(part: &AttentionPart, q: &'a Matrix, kv: &'a Matrix, doc_start: &Matrix) -> Operands<'a> {
        let seen = seen(part, &doc_start.at);
        Operands { part: *part, q: (q, 0), k: (kv, 0), v: (kv, kv.cols / 2), seen }
    }

    fn cached(a: &CachedAttention, x: &'a [Matrix]) -> Operands<'a> {
        let part = AttentionPart { heads: a.heads, n_ranks: 1, q_rank: 0, kv_rank: 0, n_kv_ranks: 1, carried: false };
        let of_token = |(token, position): (usize, &f64)| {
            let (first, position) = (first_row(a, token), *position as usize);
            let from = a.heads.window.map_or(0, |window| (position + 1).saturating_sub(window));
            (first + from..=first + position).collect()
        };
        let seen = x[1].at.iter().enumerate().map(of_token).collect();
        Operands { part, q: (&x[0], 0), k: (&x[2], 0), v: (&x[2], x[2].cols / 2), seen }
    }

    fn head(&self, of: (&'a Matrix, usize), token: usize, head: usize) -> &'a [f64] {
        let d = self.part.heads.head_dim;
        &of.0.row(token)[of.1 + head * d..][..d]
    }

    /// The key head of a query head.
    fn group(&self, head: usize) -> usize {
        head / (self.part.heads.n_heads / self.part.heads.n_kv_heads)
    }

    fn score(&self, query: usize, key: usize, head: usize) -> f64 {
        let (q, k) = (self.head(self.q, query, head), self.head(self.k, key, self.group(head)));
        dot(q, k) * f64::from(self.part.heads.scale)
    }

    /// Outputs and the logarithms of the sums of weights, merged with those over other keys.
    fn forward(&self, carried: Option<(&Matrix, &Matrix)>) -> Vec<Vec<f64>> {
        let Attention { n_heads: h, head_dim: d, .. } = self.part.heads;
        let n = self.seen.len();
        let (mut o, mut lse) = (vec![0.0; n * h * d], vec![f64::NEG_INFINITY; n * h]);
        for (query, head) in (0..n).flat_map(|query| (0..h).map(move |head| (query, head))) {
            let at = query * h + head;
            let weights: Vec<f64> = self.seen[query].iter().map(|key| self.score(query, *key, head).exp()).collect();
            let before = carried.map_or(0.0, |(_, lse)| lse.at[at].exp());
            let total = before + weights.iter().sum::<f64>();
            if total == 0.0 {
                continue;
            }
            lse[at] = total.ln();
            let o = &mut o[at * d..][..d];
            if let Some((o0, _)) = carried {
                o.iter_mut().zip(&o0.at[at * d..]).for_each(|(o, o0)| *o += before / total * o0);
            }
            for (key, weight) in self.seen[query].iter().zip(weights) {
                let v = self.head(self.v, *key, self.group(head));
                o.iter_mut().zip(v).for_each(|(o, v)| *o += weight / total * v);
            }
        }
        vec![o, lse]
    }

    /// Adds the gradients to those of `to`: matrices with the columns of `q`, `k` and `v`.
    fn backward(&self, o: &Matrix, lse: &Matrix, dout: &Matrix, mut to: impl FnMut(Operand, usize, usize, &[f64])) {
        let Attention { n_heads: h, head_dim: d, scale, .. } = self.part.heads;
        for (query, head) in (0..self.seen.len()).flat_map(|query| (0..h).map(move |head| (query, head))) {
            let at = query * h + head;
            let (o, dout) = (&o.at[at * d..][..d], &dout.at[at * d..][..d]);
            let delta = dot(o, dout);
            let group = self.group(head);
            for key in &self.seen[query] {
                let (k, v) = (self.head(self.k, *key, group), self.head(self.v, *key, group));
                let weight = (self.score(query, *key, head) - lse.at[at]).exp();
                let dscore = weight * (dot(dout, v) - delta) * f64::from(scale);
                let times = |x: &[f64], by: f64| x.iter().map(|x| x * by).collect::<Vec<f64>>();
                to(Operand::Query, query, head, &times(k, dscore));
                to(Operand::Key, *key, group, &times(self.head(self.q, query, head), dscore));
                to(Operand::Value, *key, group, &times(dout, weight));
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Operand {
    Query,
    Key,
    Value,
}

/// A query sees the keys of its row, its document and its window up to its own index.
fn seen(part: &AttentionPart, doc_start: &[f64]) -> Vec<Vec<usize>> {
    let Attention { seq_len, window, .. } = part.heads;
    let n_rows = doc_start.len() / seq_len;
    let indexes = |rank| chunks(seq_len * part.n_ranks, part.n_ranks, rank).into_iter().flatten().enumerate();
    let keys = |row: usize| {
        let of_rank =
            move |b: usize| indexes(part.kv_rank + b).map(move |(i, index)| ((b * n_rows + row) * seq_len + i, index));
        (0..part.n_kv_ranks).flat_map(of_rank)
    };
    let of_query = |(row, i, index): (usize, usize, usize)| {
        let of_window = window.map_or(0, |window| (index + 1).saturating_sub(window));
        let from = of_window.max(doc_start[row * seq_len + i] as usize);
        keys(row).filter(|(_, key)| (from..=index).contains(key)).map(|(token, _)| token).collect()
    };
    let queries = |row| indexes(part.q_rank).map(move |(i, index)| (row, i, index));
    (0..n_rows).flat_map(queries).map(of_query).collect()
}

pub fn whole(a: &Attention, x: &[Matrix]) -> Vec<Vec<f64>> {
    Operands::whole(a, &x[0], &x[1]).forward(None)
}

pub fn whole_backward(a: &Attention, x: &[Matrix]) -> Vec<Vec<f64>> {
    let operands = Operands::whole(a, &x[0], &x[1]);
    let (firsts, cols, d) = ([operands.q.1, operands.k.1, operands.v.1], x[0].cols, a.head_dim);
    let mut dqkv = vec![0.0; x[0].at.len()];
    operands.backward(&x[2], &x[3], &x[4], |of, token, head, gradient| {
        add(&mut dqkv, token * cols + firsts[of as usize] + head * d, gradient);
    });
    vec![dqkv]
}

/// The first row of the cache of a token's sequence.
fn first_row(a: &CachedAttention, token: usize) -> usize {
    token / a.heads.seq_len * a.capacity
}

pub fn cached(a: &CachedAttention, x: &[Matrix]) -> Vec<Vec<f64>> {
    Operands::cached(a, x).forward(None)
}

pub fn cache_write(a: &CachedAttention, x: &[Matrix]) -> Vec<f64> {
    let (mut cache, columns) = (x[2].at.clone(), x[2].cols);
    for (token, (qkv, position)) in x[0].rows().zip(&x[1].at).enumerate() {
        let row = first_row(a, token) + *position as usize;
        cache[row * columns..][..columns].copy_from_slice(&qkv[qkv.len() - columns..]);
    }
    cache
}

pub fn part(part: &AttentionPart, x: &[Matrix]) -> Vec<Vec<f64>> {
    let carried = part.carried.then(|| (&x[3], &x[4]));
    Operands::part(part, &x[0], &x[1], &x[2]).forward(carried)
}

pub fn part_backward(part: &AttentionPart, carried_q: bool, carried_kv: bool, x: &[Matrix]) -> Vec<Vec<f64>> {
    let operands = Operands::part(part, &x[0], &x[1], &x[2]);
    let (q_cols, kv_cols, d) = (x[0].cols, x[1].cols, part.heads.head_dim);
    let mut carried = x[6..].iter();
    let mut next = |is_carried: bool, n: usize| match is_carried {
        true => carried.next().expect("as many operands as attributes say").at.clone(),
        false => vec![0.0; n],
    };
    let (mut dq, mut dkv) = (next(carried_q, x[0].at.len()), next(carried_kv, x[1].at.len()));
    operands.backward(&x[3], &x[4], &x[5], |of, token, head, gradient| match of {
        Operand::Query => add(&mut dq, token * q_cols + head * d, gradient),
        Operand::Key => add(&mut dkv, token * kv_cols + head * d, gradient),
        Operand::Value => add(&mut dkv, token * kv_cols + kv_cols / 2 + head * d, gradient),
    });
    vec![dq, dkv]
}

fn add(sums: &mut [f64], first: usize, terms: &[f64]) {
    sums[first..].iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
}
