//! Attention, forward and backward, as composite graphs over packed projections `[N, (H + 2K) D]`.

use crate::builder::*;
use crate::reference::{Shape, numbers, of_bf16, to_bf16};
use crate::support::P;

/// Ids of tensors.
pub const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
pub const O: i64 = 4;
const STATISTICS: i64 = 5;
const D_O: i64 = 6;
pub const DQ: i64 = 7;
const DK: i64 = 8;
const DV: i64 = 9;
const LENGTH_Q: i64 = 10;
const LENGTH_KV: i64 = 11;
const OFFSETS_QKV: i64 = 12;
const OFFSETS_O: i64 = 13;
const OFFSETS_STATISTICS: i64 = 14;
const SCALE: i64 = 15;
const MINUS_INFINITY: i64 = 16;
const ONE: i64 = 17;
const WINDOW: i64 = 18;
pub const SOFTMAX_SUM: i64 = 19;
pub const DQ_ACCUMULATOR: i64 = 20;

/// Builds the graphs of one shape.
pub struct Attention<'a> {
    cudnn: &'a Cudnn,
    shape: &'a Shape,
    is_ragged: bool,
    pub dtype: i32,
    pub is_deterministic: bool,
    /// Strides in the place of the right ones.
    pub accumulator_strides: Option<[i64; 4]>,
    pub sum_strides: Option<[i64; 4]>,
    pub statistics_strides: Option<[i64; 4]>,
    b: i64,
    h: i64,
    k: i64,
    s: i64,
    d: i64,
    columns: i64,
}

/// Sequences of equal lengths.
pub fn rows(b: usize, heads: usize, key_heads: usize, tokens: usize, width: usize) -> Shape {
    let starts = (0..=b).map(|i| i * tokens).collect();
    Shape { heads, key_heads, width, tokens, starts, lengths: vec![tokens; b], is_causal: true, window: None }
}

/// Sequences of other lengths, with `gap` unused tokens behind each.
pub fn documents(lengths: &[usize], gap: usize, heads: usize, key_heads: usize, width: usize) -> Shape {
    let mut starts = vec![0];
    lengths.iter().for_each(|l| starts.push(starts.last().unwrap() + l + gap));
    let tokens = *lengths.iter().max().unwrap();
    Shape { heads, key_heads, width, tokens, starts, lengths: lengths.into(), is_causal: true, window: None }
}

impl<'a> Attention<'a> {
    pub fn new(cudnn: &'a Cudnn, shape: &'a Shape) -> Attention<'a> {
        Attention {
            cudnn,
            shape,
            is_ragged: shape.is_ragged(),
            dtype: BFLOAT16,
            is_deterministic: true,
            accumulator_strides: None,
            sum_strides: None,
            statistics_strides: None,
            b: shape.sequences() as i64,
            h: shape.heads as i64,
            k: shape.key_heads as i64,
            s: shape.tokens as i64,
            d: shape.width as i64,
            columns: shape.columns() as i64,
        }
    }

    fn offsets(&self, id: i64) -> Option<P> {
        let dims = [self.b + 1, 1, 1, 1];
        self.is_ragged.then(|| self.cudnn.tensor(&spec(id, INT64, &dims, &[1; 4])).descriptor)
    }

    /// `[B, heads, S, D]` of the packed projections.
    fn packed(&self, id: i64, heads: i64) -> Tensor {
        let (dims, strides) = ([self.b, heads, self.s, self.d], [self.s * self.columns, self.d, self.columns, 1]);
        self.cudnn.tensor(&Spec { ragged: self.offsets(OFFSETS_QKV), ..spec(id, self.dtype, &dims, &strides) })
    }

    /// `[B, heads, D, S]` of the packed projections.
    fn packed_transposed(&self, id: i64) -> Tensor {
        let (dims, strides) = ([self.b, self.k, self.d, self.s], [self.s * self.columns, self.d, 1, self.columns]);
        self.cudnn.tensor(&Spec { ragged: self.offsets(OFFSETS_QKV), ..spec(id, self.dtype, &dims, &strides) })
    }

    fn output(&self, id: i64) -> Tensor {
        let strides = [self.s * self.h * self.d, self.d, self.h * self.d, 1];
        let dims = [self.b, self.h, self.s, self.d];
        self.cudnn.tensor(&Spec { ragged: self.offsets(OFFSETS_O), ..spec(id, self.dtype, &dims, &strides) })
    }

    fn statistics(&self) -> Tensor {
        let dims = [self.b, self.h, self.s, 1];
        let strides = if self.is_ragged { [self.h * self.s, 1, self.h, 1] } else { [self.h * self.s, self.s, 1, 1] };
        let strides = self.statistics_strides.unwrap_or(strides);
        self.cudnn
            .tensor(&Spec { ragged: self.offsets(OFFSETS_STATISTICS), ..spec(STATISTICS, FLOAT, &dims, &strides) })
    }

    fn lengths(&self) -> [Option<Tensor>; 2] {
        let length = |id| self.cudnn.tensor(&spec(id, INT32, &[self.b, 1, 1, 1], &[1; 4]));
        [LENGTH_Q, LENGTH_KV].map(|id| self.shape.has_lengths().then(|| length(id)))
    }

    fn select(&self, g: &mut Graph<'_>, p: &Tensor, mask: &Tensor) -> Tensor {
        let minus_infinity = self.cudnn.scalar(MINUS_INFINITY, FLOAT);
        g.pointwise(SELECT, &[p, &minus_infinity, mask])
    }

    fn mask_padding(&self, g: &mut Graph<'_>, p: Tensor) -> Tensor {
        let [Some(length_q), Some(length_kv)] = self.lengths() else { return p };
        let (row, column) = (g.index(2, &p), g.index(3, &p));
        let (a, b) = (g.pointwise(CMP_LT, &[&row, &length_q]), g.pointwise(CMP_LT, &[&column, &length_kv]));
        let mask = g.pointwise(LOGICAL_AND, &[&a, &b]);
        self.select(g, &p, &mask)
    }

    fn mask_band(&self, g: &mut Graph<'_>, mut p: Tensor) -> Tensor {
        if self.shape.is_causal {
            let (row, column) = (g.index(2, &p), g.index(3, &p));
            let mask = g.pointwise(CMP_GE, &[&row, &column]);
            p = self.select(g, &p, &mask);
        }
        if self.shape.window.is_some() {
            let (row, column) = (g.index(2, &p), g.index(3, &p));
            let reach = g.pointwise(ADD, &[&column, &self.cudnn.scalar(WINDOW, FLOAT)]);
            let mask = g.pointwise(CMP_GT, &[&reach, &row]);
            p = self.select(g, &p, &mask);
        }
        p
    }

    /// `scale q kT`, `[B, H, S, S]`.
    fn scores(&self, g: &mut Graph<'_>, q: &Tensor, k: &Tensor) -> Tensor {
        let [length_q, length_kv] = self.lengths();
        let p = g.virtual_like(&[self.b, self.h, self.s, self.s]);
        g.matmul_to(q, k, &p, [length_q.as_ref(), length_kv.as_ref(), None]);
        g.pointwise(MUL, &[&p, &self.cudnn.scalar(SCALE, FLOAT)])
    }

    pub fn forward(&self) -> Vec<P> {
        let mut g = Graph::new(self.cudnn);
        let (q, k, v) = (self.packed(Q, self.h), self.packed_transposed(K), self.packed(V, self.k));
        let [length_q, length_kv] = self.lengths();
        let p = self.scores(&mut g, &q, &k);
        let p = self.mask_padding(&mut g, p);
        let p = self.mask_band(&mut g, p);
        let per_row = [self.b, self.h, self.s, 1];
        let (max, sum) = (g.virtual_like(&per_row), g.virtual_like(&per_row));
        g.reduce_to(REDUCE_MAX, &p, &max);
        let x = g.pointwise(SUB, &[&p, &max]);
        let e = g.pointwise(EXP, &[&x]);
        g.reduce_to(REDUCE_ADD, &e, &sum);
        let log = g.pointwise(LOG, &[&sum]);
        g.pointwise_to(ADD, &[&max, &log], &self.statistics());
        let s = g.virtual_tensor(self.dtype, &e.dims, &packed(&e.dims));
        g.pointwise_to(DIV, &[&e, &sum], &s);
        g.matmul_to(&s, &v, &self.output(O), [length_q.as_ref(), None, length_kv.as_ref()]);
        g.operations
    }

    /// `xT y` summed over the heads of a group: dk and dv.
    fn gradient_of_keys(&self, g: &mut Graph<'_>, x: &Tensor, y: &Tensor, id: i64) {
        let [length_q, length_kv] = self.lengths();
        let sizes = [length_kv.as_ref(), None, length_q.as_ref()];
        let transposed = g.transpose(self.dtype, x, &packed(&x.dims));
        let to = self.packed(id, self.k);
        if self.h == self.k {
            return g.matmul_to(&transposed, y, &to, sizes);
        }
        let dims = [self.b, self.h, self.s, self.d];
        let of_heads = g.virtual_tensor(self.dtype, &dims, &packed(&dims));
        g.matmul_to(&transposed, y, &of_heads, sizes);
        g.reduce_to(REDUCE_ADD, &of_heads, &to);
    }

    pub fn backward(&self) -> Vec<P> {
        let mut g = Graph::new(self.cudnn);
        let (q, k, v) = (self.packed(Q, self.h), self.packed_transposed(K), self.packed_transposed(V));
        let (o, d_o, dims) = (self.output(O), self.output(D_O), [self.b, self.h, self.s, self.d]);
        let [length_q, length_kv] = self.lengths();
        // The declared strides of this one are wrong in NVIDIA's graphs too: those of virtual tensors mean nothing here.
        let product = g.virtual_tensor(FLOAT, &dims, &[self.h * self.s * self.d, self.s * self.d, self.h * self.d, 1]);
        g.pointwise_to(MUL, &[&d_o, &o], &product);
        let per_row = [self.b, self.h, self.s, 1];
        let sum = g.virtual_like(&per_row);
        g.reduce_to(REDUCE_ADD, &product, &sum);
        let sum_strides = self.sum_strides.map_or_else(|| packed(&per_row), Vec::from);
        let softmax_sum = self.cudnn.tensor(&spec(SOFTMAX_SUM, FLOAT, &per_row, &sum_strides));
        g.pointwise_to(MUL, &[&sum, &self.cudnn.scalar(ONE, FLOAT)], &softmax_sum);
        let p = self.scores(&mut g, &q, &k);
        let p = self.mask_padding(&mut g, p);
        let p = g.pointwise(SUB, &[&p, &self.statistics()]);
        let p = self.mask_band(&mut g, p);
        let e = g.pointwise(EXP, &[&p]);
        self.gradient_of_keys(&mut g, &e, &d_o, DV);
        let dp = g.virtual_like(&e.dims);
        g.matmul_to(&d_o, &v, &dp, [length_q.as_ref(), length_kv.as_ref(), None]);
        let dp = g.pointwise(SUB, &[&dp, &softmax_sum]);
        let dp = g.pointwise(MUL, &[&dp, &e]);
        let ds = g.pointwise(MUL, &[&dp, &self.cudnn.scalar(SCALE, FLOAT)]);
        self.gradient_of_keys(&mut g, &ds, &q, DK);
        let k = g.transpose(FLOAT, &k, &[self.s * self.columns, self.d, 1, self.columns]);
        let (dq, sizes) = (self.packed(DQ, self.h), [length_q.as_ref(), None, length_kv.as_ref()]);
        if self.is_deterministic {
            g.matmul_to(&ds, &k, &dq, sizes);
        } else {
            let strides = self.accumulator_strides.map_or_else(|| packed(&dims), Vec::from);
            let accumulator = self.cudnn.tensor(&spec(DQ_ACCUMULATOR, FLOAT, &dims, &strides));
            g.matmul_to(&ds, &k, &accumulator, sizes);
            g.pointwise_to(IDENTITY, &[&accumulator], &dq);
        }
        g.operations
    }
}

/// Memory of one attention on a device, and what its graphs read and write.
pub struct Memory<'a> {
    cudnn: &'a Cudnn,
    shape: &'a Shape,
    pub qkv: Vec<f32>,
    pub d_o: Vec<f32>,
    /// Read through pointers when a graph is executed.
    _scalars: Box<[f32; 4]>,
    pointers: Vec<(i64, u64)>,
}

impl<'a> Memory<'a> {
    pub fn new(cudnn: &'a Cudnn, shape: &'a Shape) -> Memory<'a> {
        let (n, width) = (shape.n(), shape.width);
        let (qkv, d_o) = (numbers(n * shape.columns(), 1), numbers(n * shape.heads * width, 2));
        let window = shape.window.unwrap_or(0) as f32;
        let scalars = Box::new([1.0 / (width as f32).sqrt(), f32::NEG_INFINITY, 1.0, window]);
        let gpu = &cudnn.gpu;
        let (at, gradients) = (gpu.put(&to_bf16(&qkv)), gpu.alloc(2 * qkv.len()));
        let lengths: Vec<i32> = shape.lengths.iter().map(|l| *l as i32).collect();
        let offsets =
            |per_token: usize| gpu.put(&shape.starts.iter().map(|s| (s * per_token) as i64).collect::<Vec<_>>());
        let scratch = 4 * shape.sequences() * shape.heads * shape.tokens;
        let behind = |heads: usize| 2 * (heads * width) as u64;
        let (k, v) = (behind(shape.heads), behind(shape.heads + shape.key_heads));
        let lengths = gpu.put(&lengths);
        let mut pointers = vec![
            (Q, at),
            (K, at + k),
            (V, at + v),
            (O, gpu.alloc(2 * d_o.len())),
            (STATISTICS, gpu.alloc(4 * n * shape.heads)),
            (D_O, gpu.put(&to_bf16(&d_o))),
            (DQ, gradients),
            (DK, gradients + k),
            (DV, gradients + v),
            (LENGTH_Q, lengths),
            (LENGTH_KV, lengths),
            (OFFSETS_QKV, offsets(shape.columns())),
            (OFFSETS_O, offsets(shape.heads * width)),
            (OFFSETS_STATISTICS, offsets(shape.heads)),
            (SOFTMAX_SUM, gpu.alloc(scratch)),
            (DQ_ACCUMULATOR, gpu.alloc(scratch * width)),
        ];
        for (i, id) in [SCALE, MINUS_INFINITY, ONE, WINDOW].into_iter().enumerate() {
            pointers.push((id, &raw const scalars[i] as u64));
        }
        Memory { cudnn, shape, qkv, d_o, _scalars: scalars, pointers }
    }

    pub fn at(&self, id: i64) -> u64 {
        self.pointers.iter().find(|(i, _)| *i == id).unwrap().1
    }

    fn of(&self, ids: &[i64]) -> Vec<(i64, u64)> {
        let shape = self.shape;
        let is_used = |id: i64| {
            ids.contains(&id)
                || id == SCALE
                || ([LENGTH_Q, LENGTH_KV].contains(&id) && shape.has_lengths())
                || ((OFFSETS_QKV..=OFFSETS_STATISTICS).contains(&id) && shape.is_ragged())
                || (id == MINUS_INFINITY && (shape.is_causal || shape.window.is_some() || shape.has_lengths()))
                || (id == WINDOW && shape.window.is_some())
        };
        self.pointers.iter().copied().filter(|(id, _)| is_used(*id)).collect()
    }

    pub fn of_forward(&self) -> Vec<(i64, u64)> {
        self.of(&[Q, K, V, O, STATISTICS])
    }

    pub fn of_backward(&self, is_deterministic: bool) -> Vec<(i64, u64)> {
        let ids = [Q, K, V, O, STATISTICS, D_O, DQ, DK, DV, ONE, SOFTMAX_SUM, DQ_ACCUMULATOR];
        self.of(&ids[..ids.len() - usize::from(is_deterministic)])
    }

    pub fn o(&self) -> Vec<f32> {
        of_bf16(&self.cudnn.gpu.get::<u16>(self.at(O), self.d_o.len()))
    }

    pub fn dqkv(&self) -> Vec<f32> {
        of_bf16(&self.cudnn.gpu.get::<u16>(self.at(DQ), self.qkv.len()))
    }

    pub fn statistics(&self) -> Vec<f32> {
        self.cudnn.gpu.get(self.at(STATISTICS), self.shape.n() * self.shape.heads)
    }
}

/// Compares tokens that exist, and asserts that others were not written. bf16 has steps of 2^-8 of a number; probabilities
/// and their gradients are rounded to it before a product, results after it.
#[track_caller]
fn assert_near(shape: &Shape, name: &str, found: &[f32], expected: &[f64]) {
    let per_token = found.len() / shape.n();
    let largest = expected.iter().fold(0f64, |m, e| m.max(e.abs()));
    let mut exists = vec![false; shape.n()];
    shape.starts.iter().zip(&shape.lengths).for_each(|(s, l)| exists[*s..s + l].fill(true));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        if exists[i / per_token] {
            assert!(
                (f64::from(*f) - e).abs() <= largest / 128.0,
                "{name}[{i}] is {f}, expected {e} of {largest}: {shape:?}"
            );
        } else {
            assert!(f.is_nan(), "{name}[{i}] belongs to no sequence and was written: {f}");
        }
    }
}

fn cases() -> Vec<Shape> {
    vec![
        rows(2, 4, 4, 64, 16),
        rows(1, 4, 2, 40, 64),
        Shape { is_causal: false, ..rows(2, 2, 1, 33, 32) },
        Shape { window: Some(7), ..rows(2, 2, 2, 48, 16) },
        Shape { lengths: vec![20, 48, 1], ..rows(3, 4, 2, 48, 16) },
        documents(&[17, 0, 40, 1], 0, 4, 2, 16),
        documents(&[9, 30], 3, 2, 2, 32),
        Shape { is_causal: false, window: Some(5), ..documents(&[12, 20], 1, 2, 1, 16) },
    ]
}

#[test]
fn forward_pass_agrees_with_f64() {
    let cudnn = Cudnn::new();
    for shape in cases() {
        let (attention, memory) = (Attention::new(&cudnn, &shape), Memory::new(&cudnn, &shape));
        let expected = shape.attend(&memory.qkv, &memory.d_o);

        cudnn.run(cudnn.plan(&attention.forward()).unwrap(), &memory.of_forward());

        assert_near(&shape, "o", &memory.o(), &expected.o);
        let statistics = memory.statistics();
        for (start, length) in shape.starts.iter().zip(&shape.lengths) {
            for (token, head) in (0..*length).flat_map(|t| (0..shape.heads).map(move |h| (t, h))) {
                let by_token = (start + token) * shape.heads + head;
                let by_head = start * shape.heads + head * shape.tokens + token;
                let found = statistics[if attention.is_ragged { by_token } else { by_head }];
                assert!((f64::from(found) - expected.statistics[by_token]).abs() < 1e-5, "{shape:?} {token} {head}");
            }
        }
    }
}

#[test]
fn backward_pass_agrees_with_f64() {
    let cudnn = Cudnn::new();
    for (shape, is_deterministic) in cases().into_iter().flat_map(|s| [(s.clone(), true), (s, false)]) {
        let (mut attention, memory) = (Attention::new(&cudnn, &shape), Memory::new(&cudnn, &shape));
        attention.is_deterministic = is_deterministic;
        let expected = shape.attend(&memory.qkv, &memory.d_o);

        cudnn.run(cudnn.plan(&attention.forward()).unwrap(), &memory.of_forward());
        let plan = cudnn.plan(&attention.backward()).unwrap();
        cudnn.run(plan, &memory.of_backward(is_deterministic));

        assert_near(&shape, "dqkv", &memory.dqkv(), &expected.dqkv);
    }
}
