//! Attention over whole rows and over the parts of context-parallel ranks, and the adjoints.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::passes::context_parallel::chunks;
use phalanx_strategies::program::{Attention, AttentionPart, DType, Op, op};

/// How far results in f32 may differ: weights and outputs of random operands are of order 1 and differ by a few roundings
/// and by those of the exponential, 2^-22 of their size; sums are over a few hundred keys.
const IN_F32: f64 = 2e-5;

/// Tolerance of results computed from operands of this type. In a half-width type both machines may, but need not, round
/// weights (of which an output is an average of values of order 1) and the gradients of scores (a gradient is their sum, and
/// their absolute values add up to about 8, since the gradient of a weight is a product over a head).
pub(super) fn tolerance(dtype: DType, is_adjoint: bool) -> Tolerance {
    let unit_roundoff = match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 0.0,
    };
    Tolerance::of(IN_F32 + if is_adjoint { 8.0 } else { 2.0 } * unit_roundoff)
}

/// Geometry of a case.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: Attention,
    /// Rows of the batch.
    rows: usize,
    /// Tokens of a document; rows end documents too.
    document: usize,
}

const fn shape(head_dim: usize, (n_heads, n_kv_heads): (usize, usize), rows: usize, seq_len: usize) -> Shape {
    let heads = Attention { n_heads, n_kv_heads, head_dim, seq_len, window: None, scale: 0.3 };
    Shape { heads, rows, document: seq_len }
}

impl Shape {
    fn windowed(mut self, window: usize) -> Shape {
        self.heads.window = Some(window);
        self
    }

    fn documents(self, document: usize) -> Shape {
        Shape { document, ..self }
    }

    fn n(&self) -> usize {
        self.rows * self.heads.seq_len
    }

    fn name(&self) -> String {
        let Attention { n_heads, n_kv_heads, head_dim, seq_len, window, .. } = self.heads;
        let window = window.map_or_else(String::new, |w| format!(", window {w}"));
        let documents =
            if self.document < seq_len { format!(", documents of {}", self.document) } else { String::new() };
        format!("{n_heads}/{n_kv_heads} heads of {head_dim}, {} x {seq_len}{window}{documents}", self.rows)
    }

    /// Starts of documents for the tokens with these indexes in each row.
    fn doc_start(&self, indexes: &[usize]) -> Operand {
        let start = |_| indexes.iter().map(|index| (index / self.document * self.document) as f64);
        let starts: Vec<f64> = (0..self.rows).flat_map(start).collect();
        Operand::of(&[starts.len()], DType::I32, starts)
    }
}

/// Tokens of each row of the batch: number in memory, and index within the row.
type Tokens = Vec<Vec<(usize, usize)>>;

/// Queries, keys and values, where they are stored, and which they see.
struct Inputs {
    shape: Shape,
    queries: Tokens,
    keys: Tokens,
    /// Elements and elements of a row; queries are the first columns.
    q: (Vec<f64>, usize),
    /// Keys and values are the last columns.
    kv: (Vec<f64>, usize),
}

impl Inputs {
    /// Outputs and statistics by the definition of attention, in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let Attention { n_heads: h, n_kv_heads: kv, head_dim: d, window, scale, .. } = self.shape.heads;
        let n: usize = self.queries.iter().map(Vec::len).sum();
        let (mut o, mut lse) = (vec![0.0; n * h * d], vec![f64::NEG_INFINITY; n * h]);
        for (queries, keys) in self.queries.iter().zip(&self.keys) {
            for (token, index, head) in queries.iter().flat_map(|(t, i)| (0..h).map(move |head| (*t, *i, head))) {
                let q = &self.q.0[token * self.q.1 + head * d..][..d];
                let of = |key: usize, block: usize| {
                    let column = self.kv.1 - (block * kv - head / (h / kv)) * d;
                    &self.kv.0[key * self.kv.1 + column..][..d]
                };
                let from = (index / self.shape.document * self.shape.document)
                    .max(window.map_or(0, |w| (index + 1).saturating_sub(w)));
                let seen = keys.iter().filter(|(_, key)| (from..=index).contains(key)).map(|(key, _)| *key);
                let score = |key| q.iter().zip(of(key, 2)).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale);
                let weights: Vec<(usize, f64)> = seen.map(|key| (key, score(key).exp())).collect();
                let total: f64 = weights.iter().map(|(_, w)| w).sum();
                lse[token * h + head] = total.ln();
                for (key, weight) in weights {
                    let o = &mut o[(token * h + head) * d..][..d];
                    o.iter_mut().zip(of(key, 1)).for_each(|(o, v)| *o += weight / total * v);
                }
            }
        }
        (o, lse)
    }
}

/// All cases. Each type and head width costs the software GPU a compilation of every kernel that it takes, so there are no
/// more of them than kinds of tiles.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // In f32 arithmetic: several tiles of queries and of keys, ragged ends, documents and windows that cross tiles.
    for shape in [
        shape(64, (2, 2), 1, 64),
        shape(64, (4, 2), 2, 131).documents(50),
        shape(64, (2, 1), 1, 197).windowed(40),
        shape(64, (2, 1), 1, 70).documents(63).windowed(20),
        shape(64, (3, 3), 2, 1),
    ] {
        cases.extend(whole(shape, DType::F32));
    }
    // Wide heads, whose tiles are smaller where blocks have less shared memory; those in half width exceed tensor cores.
    cases.extend(whole(shape(128, (2, 1), 1, 70).documents(50), DType::F32));
    cases.extend(whole(shape(256, (1, 1), 1, 40), DType::Bf16));
    // Elements that are loaded one by one.
    cases.extend(whole(shape(20, (2, 1), 2, 70).documents(1), DType::F16));
    // On tensor cores: wide tiles, narrow ones, padded ones; the last one has its adjoint in f32 arithmetic.
    for shape in [
        shape(64, (4, 2), 2, 200).documents(90),
        shape(64, (2, 1), 1, 300).windowed(70),
        shape(64, (2, 2), 1, 270).documents(127),
        shape(64, (4, 2), 2, 129).documents(64),
        shape(128, (2, 1), 1, 150).documents(40),
        shape(128, (2, 1), 2, 131),
        shape(136, (2, 1), 1, 90).documents(70),
    ] {
        cases.extend(whole(shape, DType::Bf16));
    }
    cases.extend(whole(shape(72, (2, 1), 1, 140).documents(33), DType::F16));

    for (q_rank, kv_rank) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        cases.extend(parts(shape(64, (2, 1), 2, 2 * 70).documents(90), DType::F32, 2, q_rank, (kv_rank, 1)));
    }
    for q_rank in [0, 2] {
        cases.extend(parts(shape(64, (2, 2), 2, 2 * 33).windowed(100), DType::F32, 3, q_rank, (0, 3)));
        cases.extend(parts(shape(64, (2, 2), 2, 2 * 75).windowed(190), DType::F16, 3, q_rank, (0, 3)));
    }
    cases.extend(parts(shape(64, (4, 2), 2, 50), DType::F16, 1, 0, (0, 1)));
    for (q_rank, kv_rank) in [(0, 1), (1, 0)] {
        cases.extend(parts(shape(64, (2, 1), 1, 2 * 131).documents(150), DType::F16, 2, q_rank, (kv_rank, 1)));
    }
    cases
}

/// Whole rows and parts of them for every usual head width and type, with grouped heads, documents (the last of each row is one
/// token) and ragged tiles.
pub(super) fn widths() -> Vec<Case> {
    let mut cases = Vec::new();
    for (head_dim, dtype) in super::HEAD_WIDTHS.into_iter().flat_map(|d| super::TYPES.map(|dtype| (d, dtype))) {
        cases.extend(whole(shape(head_dim, (3, 1), 2, 67).documents(33), dtype));
        cases.extend(whole(shape(head_dim, (2, 2), 1, 135).windowed(50), dtype));
        cases.extend(parts(shape(head_dim, (2, 1), 1, 2 * 33).documents(70), dtype, 2, 1, (0, 2)));
    }
    // Heads so wide that their tiles in f32 are smaller, with the usual scale: scores of order 1 have small roundings.
    for (head_dim, seq_len) in [(160, 70), (264, 37)] {
        let mut wide = shape(head_dim, (2, 1), 1, seq_len).documents(21);
        wide.heads.scale = 1.0 / (head_dim as f32).sqrt();
        cases.extend(whole(wide, DType::F32));
    }
    // Tensor cores find the largest score before it is scaled, so that a negative scale needs the kernel in f32 arithmetic.
    let mut negative = shape(64, (2, 1), 1, 70).documents(21);
    negative.heads.scale = -0.3;
    cases.extend(whole(negative, DType::Bf16));
    cases
}

/// Attention over whole rows, and its adjoint.
fn whole(shape: Shape, dtype: DType) -> [Case; 2] {
    let (a, n) = (shape.heads, shape.n());
    let (qkv, output, statistics) = ([n, a.qkv_columns()], [n, a.n_heads * a.head_dim], [n, a.n_heads]);
    let indexes: Vec<usize> = (0..a.seq_len).collect();
    let tokens: Tokens =
        (0..shape.rows).map(|row| indexes.iter().map(|i| (row * a.seq_len + i, *i)).collect()).collect();
    let reads = vec![Operand::random(&qkv, dtype, 1), shape.doc_start(&indexes)];
    let (q, kv) = ((reads[0].elements.clone(), qkv[1]), (reads[0].elements.clone(), qkv[1]));
    let (o, lse) = Inputs { shape, queries: tokens.clone(), keys: tokens, q, kv }.reference();
    let mut known = reads.clone();
    known.push(Operand::of(&output, dtype, o));
    known.push(Operand::of(&statistics, DType::F32, lse));
    known.push(Operand::random(&output, dtype, 4));
    let name = format!("{dtype}, {}", shape.name());
    [
        Case::new(format!("attention {name}"), Op::Attention(a), reads, tolerance(dtype, false))
            .writing(&output, dtype)
            .writing(&statistics, DType::F32),
        Case::new(
            format!("attention backward {name}"),
            Op::AttentionBackward(op::AttentionBackward(a)),
            known,
            tolerance(dtype, true),
        )
        .writing(&qkv, dtype),
    ]
}

/// Attention to a part of the keys with and without carried results, and its adjoint. `shape` has the tokens of one rank.
fn parts(
    shape: Shape,
    dtype: DType,
    n_ranks: usize,
    q_rank: usize,
    (kv_rank, n_kv_ranks): (usize, usize),
) -> Vec<Case> {
    let (a, n) = (shape.heads, shape.n());
    let (q, kv) = ([n, a.n_heads * a.head_dim], [n_kv_ranks * n, 2 * a.n_kv_heads * a.head_dim]);
    let of_rank =
        |rank: usize| chunks(a.seq_len * n_ranks, n_ranks, rank).into_iter().flatten().collect::<Vec<usize>>();
    let tokens = |rank: usize, before: usize, row: usize| {
        let first = (before * shape.rows + row) * a.seq_len;
        of_rank(rank).into_iter().enumerate().map(move |(i, index)| (first + i, index))
    };
    let queries = (0..shape.rows).map(|row| tokens(q_rank, 0, row).collect()).collect();
    let keys = |row: usize| (0..n_kv_ranks).flat_map(|i| tokens(kv_rank + i, i, row)).collect();
    let keys = (0..shape.rows).map(keys).collect();
    let reads = vec![Operand::random(&q, dtype, 1), Operand::random(&kv, dtype, 2), shape.doc_start(&of_rank(q_rank))];
    let (q_elements, kv_elements) = (reads[0].elements.clone(), reads[1].elements.clone());
    let inputs = Inputs { shape, queries, keys, q: (q_elements, q[1]), kv: (kv_elements, kv[1]) };
    // Statistics over all parts, of which this one has the larger share.
    let (o, lse) = inputs.reference();
    let lse = lse.into_iter().map(|lse| if lse.is_finite() { lse + 0.5 } else { 0.7 }).collect();
    let known = [Operand::of(&q, DType::F32, o), Operand::of(&[n, a.n_heads], DType::F32, lse)];

    let name = format!(
        "{dtype}, {}, queries of {q_rank}, keys of {kv_rank} and {} more of {n_ranks} ranks",
        shape.name(),
        n_kv_ranks - 1
    );
    let mut cases = Vec::new();
    for carried in [false, true] {
        let part = AttentionPart { heads: a, n_ranks, q_rank, kv_rank, n_kv_ranks, carried };
        let mut forward = reads.clone();
        let mut backward = [reads.clone(), known.to_vec(), vec![Operand::random(&q, DType::F32, 3)]].concat();
        if carried {
            forward.extend(carried_results(a, &q, n));
            backward.extend([Operand::random(&q, DType::F32, 7), Operand::random(&kv, DType::F32, 8)]);
        }
        let suffix = if carried { ", carried" } else { "" };
        let op = Op::AttentionPartBackward(op::AttentionPartBackward { part, carried_q: carried, carried_kv: carried });
        cases.extend([
            Case::new(
                format!("attention part {name}{suffix}"),
                Op::AttentionPart(part),
                forward,
                tolerance(dtype, false),
            )
            .writing(&q, DType::F32)
            .writing(&[n, a.n_heads], DType::F32),
            Case::new(format!("attention part backward {name}{suffix}"), op, backward, tolerance(dtype, true))
                .writing(&q, DType::F32)
                .writing(&kv, DType::F32),
        ]);
    }
    cases
}

/// Results of earlier parts: outputs and the logarithms of their sums. Some queries have seen no key yet.
fn carried_results(a: Attention, q: &[usize], n: usize) -> [Operand; 2] {
    let (mut o, mut lse) = (Operand::random(q, DType::F32, 5), Operand::random(&[n, a.n_heads], DType::F32, 6));
    for (i, (o, lse)) in o.elements.chunks_mut(a.head_dim).zip(&mut lse.elements).enumerate() {
        if i.is_multiple_of(7) {
            o.fill(0.0);
            *lse = f64::NEG_INFINITY;
        }
    }
    [o, lse]
}
