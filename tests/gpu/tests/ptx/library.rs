//! Attention as cuDNN computes it, in f64: over documents whose lengths and places kernels have found, or over whole rows.

use crate::simulator::Execution;
use phalanx_cuda::work::{AttentionCall, Matrix, TensorId};
use phalanx_strategies::program::DType;

/// One document.
struct Document {
    n_tokens: usize,
    /// First elements in packed qkv, in outputs and in statistics.
    in_packed: u64,
    in_outputs: u64,
    in_statistics: u64,
}

/// A query head of a document; rows are tokens.
struct Head {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d: usize,
    scale: f64,
    window: usize,
}

impl Head {
    /// The keys that a query sees, and their scores.
    fn scores(&self, query: usize) -> impl Iterator<Item = (usize, f64)> {
        let score = move |key| (key, self.scale * dot(self.row(&self.q, query), self.row(&self.k, key)));
        ((query + 1).saturating_sub(self.window)..=query).map(score)
    }

    fn row<'a>(&self, of: &'a [f64], token: usize) -> &'a [f64] {
        &of[token * self.d..][..self.d]
    }
}

/// Executes a call.
pub fn attention(run: &mut Execution, call: &AttentionCall) {
    for document in documents(run, call) {
        if call.is_adjoint { backward(run, call, &document) } else { forward(run, call, &document) }
    }
}

fn documents(run: &mut Execution, call: &AttentionCall) -> Vec<Document> {
    let (a, n) = (&call.heads, call.n_documents);
    if !call.has_places {
        let row = |row: usize| {
            let first = (row * a.seq_len) as u64;
            let at = |columns: usize| first * columns as u64;
            let [in_packed, in_outputs] = [at(a.qkv_columns()), at(a.n_heads * a.head_dim)];
            Document { n_tokens: a.seq_len, in_packed, in_outputs, in_statistics: at(a.n_heads) }
        };
        return (0..n).map(row).collect();
    }
    let of_lengths = |id| Matrix { address: address(call, id), stride: 1, dtype: DType::I32, is_transposed: false };
    let lengths = run.matrix(&of_lengths(TensorId::QueryLengths), n, 1);
    assert_eq!(
        lengths,
        run.matrix(&of_lengths(TensorId::KeyLengths), n, 1),
        "a document is as long for queries and keys"
    );
    let places = [TensorId::PackedOffsets, TensorId::OutputOffsets, TensorId::LseOffsets];
    let [packed, outputs, statistics] = places.map(|id| run.longs(address(call, id), n + 1));
    let document = |i: usize| Document {
        n_tokens: lengths[i] as usize,
        in_packed: packed[i] as u64,
        in_outputs: outputs[i] as u64,
        in_statistics: statistics[i] as u64,
    };
    let documents: Vec<Document> = (0..n).map(document).collect();
    assert!(documents.iter().all(|document| document.n_tokens <= a.seq_len), "the longest document bounds all");
    documents
}

fn forward(run: &mut Execution, call: &AttentionCall, document: &Document) {
    for h in 0..call.heads.n_heads {
        let head = head(run, call, document, h);
        for query in 0..document.n_tokens {
            let weights: Vec<(usize, f64)> = head.scores(query).map(|(key, score)| (key, score.exp())).collect();
            let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
            let mut o = vec![0.0; head.d];
            for (key, weight) in weights {
                add(&mut o, head.row(&head.v, key), weight / total);
            }
            let (at, _) = output(call, document, TensorId::O, h);
            run.write(at.address + 2 * (query * at.stride) as u64, call.dtype, &o);
            run.write(statistic(call, document, h, query).address, DType::F32, &[total.ln()]);
        }
    }
}

fn backward(run: &mut Execution, call: &AttentionCall, document: &Document) {
    let (a, n) = (&call.heads, document.n_tokens);
    let group = a.n_heads / a.n_kv_heads;
    for of_keys in 0..a.n_kv_heads {
        let (mut dk, mut dv) = (vec![0.0; n * a.head_dim], vec![0.0; n * a.head_dim]);
        for h in of_keys * group..(of_keys + 1) * group {
            let head = head(run, call, document, h);
            let [o, dout] = [TensorId::O, TensorId::DO].map(|id| {
                let (matrix, d) = output(call, document, id, h);
                run.matrix(&matrix, n, d)
            });
            let mut dq = vec![0.0; n * head.d];
            for query in 0..n {
                let lse = run.matrix(&statistic(call, document, h, query), 1, 1)[0];
                let (dout, o) = (head.row(&dout, query), head.row(&o, query));
                for (key, score) in head.scores(query) {
                    let weight = (score - lse).exp();
                    let dscore = head.scale * weight * (dot(dout, head.row(&head.v, key)) - dot(dout, o));
                    add(&mut dq[query * head.d..], head.row(&head.k, key), dscore);
                    add(&mut dk[key * head.d..], head.row(&head.q, query), dscore);
                    add(&mut dv[key * head.d..], dout, weight);
                }
            }
            write_rows(run, &packed(call, document, TensorId::DQ, h), &dq, head.d);
        }
        write_rows(run, &packed(call, document, TensorId::DK, of_keys), &dk, a.head_dim);
        write_rows(run, &packed(call, document, TensorId::DV, of_keys), &dv, a.head_dim);
    }
}

fn head(run: &mut Execution, call: &AttentionCall, document: &Document, h: usize) -> Head {
    let a = &call.heads;
    let of_keys = h / (a.n_heads / a.n_kv_heads);
    let mut rows = |id, head| run.matrix(&packed(call, document, id, head), document.n_tokens, a.head_dim);
    let (q, k, v) = (rows(TensorId::Q, h), rows(TensorId::K, of_keys), rows(TensorId::V, of_keys));
    Head { q, k, v, d: a.head_dim, scale: f64::from(a.scale), window: a.window.unwrap_or(usize::MAX) }
}

/// A head of queries, keys, values or their gradients, inside packed qkv.
fn packed(call: &AttentionCall, document: &Document, id: TensorId, head: usize) -> Matrix {
    let a = &call.heads;
    let address = address(call, id) + 2 * (document.in_packed + (head * a.head_dim) as u64);
    Matrix { address, stride: a.qkv_columns(), dtype: call.dtype, is_transposed: false }
}

/// A head of outputs or their gradients, and its columns.
fn output(call: &AttentionCall, document: &Document, id: TensorId, head: usize) -> (Matrix, usize) {
    let a = &call.heads;
    let address = address(call, id) + 2 * (document.in_outputs + (head * a.head_dim) as u64);
    (Matrix { address, stride: a.n_heads * a.head_dim, dtype: call.dtype, is_transposed: false }, a.head_dim)
}

/// The statistic of a query: tokens apart for documents with places, heads apart for whole rows.
fn statistic(call: &AttentionCall, document: &Document, head: usize, query: usize) -> Matrix {
    let a = &call.heads;
    let within = if call.has_places { query * a.n_heads + head } else { head * a.seq_len + query };
    let address = address(call, TensorId::Lse) + 4 * (document.in_statistics + within as u64);
    Matrix { address, stride: 1, dtype: DType::F32, is_transposed: false }
}

fn address(call: &AttentionCall, id: TensorId) -> u64 {
    let found = call.tensors.iter().find(|(of, _)| *of == id);
    found.unwrap_or_else(|| panic!("the call has no {id:?}")).1
}

fn write_rows(run: &mut Execution, to: &Matrix, elements: &[f64], cols: usize) {
    for (i, row) in elements.chunks(cols).enumerate() {
        run.write(to.address + (i * to.stride * to.dtype.size_bytes()) as u64, to.dtype, row);
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(sums: &mut [f64], terms: &[f64], factor: f64) {
    sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += factor * term);
}
