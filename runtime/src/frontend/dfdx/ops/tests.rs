//! Each operation against the same formula in dfdx's own operations, whose autodiff is the independent oracle: value
//! and all gradients, over random shapes.
//!
//! Tolerances are those of f32 sums taken in another order over at most some hundred terms of size one.

use super::*;
use dfdx::prelude::*;
use phalanx_strategies::rng::CounterRng;
use proptest::prelude::*;

type Matrix<T = NoneTape> = Tensor<(usize, usize), f32, Cpu, T>;
type Vector = Tensor<(usize,), f32, Cpu>;
type Recorded = Matrix<OwnedTape<f32, Cpu>>;

const TOLERANCE: f32 = 2e-5;

/// Random tensors of one device, each from its own stream.
struct Draw {
    device: Cpu,
    seed: u64,
}

impl Draw {
    fn new(seed: u64) -> Draw {
        Draw { device: Cpu::default(), seed }
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        self.seed = self.seed.wrapping_add(0x1234_5679);
        let numbers = CounterRng::new(self.seed);
        (0..n as u64).map(|i| (2.0 * numbers.uniform(i) - 1.0) as f32).collect()
    }

    fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        let numbers = self.numbers(rows * columns);
        self.device.tensor_from_vec(numbers, (rows, columns))
    }

    fn vector(&mut self, n: usize) -> Vector {
        let numbers = self.numbers(n);
        self.device.tensor_from_vec(numbers, (n,))
    }

    fn integers(&mut self, n: usize, below: usize) -> Vec<i32> {
        self.numbers(n).iter().map(|x| ((x + 1.0) / 2.0 * below as f32) as i32 % below as i32).collect()
    }

    fn constant(&self, rows: usize, columns: usize, f: impl Fn(usize, usize) -> f32) -> Matrix {
        let numbers = (0..rows * columns).map(|i| f(i / columns, i % columns)).collect();
        self.device.tensor_from_vec(numbers, (rows, columns))
    }
}

/// The gradients of a scalar that depends on every element of `y` differently.
fn gradients(y: Recorded, weights: &Matrix) -> Gradients<f32, Cpu> {
    (y * weights.clone()).sum::<Rank0, _>().backward()
}

fn gradient_of<S: Shape>(grads: &mut Gradients<f32, Cpu>, t: &Tensor<S, f32, Cpu>) -> Vec<f32> {
    grads.get_or_alloc_mut(t).unwrap().to_vec()
}

fn close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "element {i} is {found}, not {expected}");
    }
}

/// Compares values and the gradients of `$wrt` of two ways to compute a matrix.
macro_rules! same {
    ($draw:expr, $ours:expr, $oracle:expr, [$($wrt:expr),+]) => {{
        let (ours, oracle) = ($ours, $oracle);
        close(&ours.as_vec(), &oracle.as_vec(), TOLERANCE);
        let weights = $draw.matrix(ours.shape().0, ours.shape().1);
        let (mut ours, mut oracle) = (gradients(ours, &weights), gradients(oracle, &weights));
        $(close(&gradient_of(&mut ours, $wrt), &gradient_of(&mut oracle, $wrt), TOLERANCE);)+
    }};
}

/// The attention of one row of the batch and one head. Products with selection matrices cut out its queries, keys and
/// values, so that only dfdx's own operations are differentiated.
struct HeadOracle<'a> {
    draw: &'a Draw,
    heads: (usize, usize, usize),
    seq_len: usize,
    theta: Option<f64>,
}

impl HeadOracle<'_> {
    /// Columns `first..first + D` of one row of the batch, rotated where `rotates`.
    fn part(&self, qkv: Recorded, row: usize, first: usize, rotates: bool, positions: &[i32]) -> Recorded {
        let (n, columns) = *qkv.shape();
        let (s, d) = (self.seq_len, self.heads.2);
        let one = |yes: bool| f32::from(u8::from(yes));
        let rows = self.draw.constant(s, n, |i, j| one(j == row * s + i));
        let picked = self.draw.constant(columns, d, |i, j| one(i == first + j));
        let x = rows.retaped::<OwnedTape<f32, Cpu>>().matmul(qkv.matmul(picked));
        let Some(theta) = self.theta.filter(|_| rotates) else { return x };
        let half = d / 2;
        let angle =
            |t: usize, i: usize| f64::from(positions[row * s + t]) * theta.powf(-2.0 * (i % half) as f64 / d as f64);
        let cos = self.draw.constant(s, d, |t, i| angle(t, i).cos() as f32);
        let sin = self.draw.constant(s, d, |t, i| angle(t, i).sin() as f32);
        // (a, b) -> (-b, a)
        let turn = self.draw.constant(d, d, |i, j| one(j >= half && i == j - half) - one(j < half && i == j + half));
        x.with_empty_tape() * cos + x.matmul(turn) * sin
    }

    fn forward(&self, qkv: Recorded, row: usize, head: usize, positions: &[i32], doc_start: &[i32]) -> Recorded {
        let ((h, kv, d), s) = (self.heads, self.seq_len);
        let group_head = head / (h / kv);
        let q = self.part(qkv.with_empty_tape(), row, head * d, true, positions);
        let k = self.part(qkv.with_empty_tape(), row, (h + group_head) * d, true, positions);
        let v = self.part(qkv, row, (h + kv + group_head) * d, false, positions);
        let hidden = |t: usize, j: usize| j > t || (j as i32) < doc_start[row * s + t];
        let mask = self.draw.constant(s, s, |t, j| if hidden(t, j) { -1e9 } else { 0.0 });
        let scores = q.matmul(k.permute::<(usize, usize), _>()) * (1.0 / (d as f32).sqrt()) + mask;
        scores.softmax::<Axis<1>>().matmul(v)
    }

    /// All heads of all rows, placed by products with selection matrices.
    fn all(&self, qkv: &Matrix, positions: &[i32], doc_start: &[i32]) -> Recorded {
        let (n, (h, _, d), s) = (qkv.shape().0, self.heads, self.seq_len);
        let one = |yes: bool| f32::from(u8::from(yes));
        let mut sum: Option<Recorded> = None;
        for (row, head) in (0..n / s).flat_map(|row| (0..h).map(move |head| (row, head))) {
            let o = self.forward(qkv.leaky_trace(), row, head, positions, doc_start);
            let down = self.draw.constant(n, s, |i, j| one(i == row * s + j));
            let across = self.draw.constant(d, h * d, |i, j| one(j == head * d + i));
            let placed = down.retaped::<OwnedTape<f32, Cpu>>().matmul(o).matmul(across);
            sum = Some(match sum {
                Some(sum) => sum + placed,
                None => placed,
            });
        }
        sum.unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn linear_is_the_product_that_dfdx_differentiates(
        n in 1usize..40, n_in in 1usize..40, n_out in 1usize..40, with_bias: bool, seed: u64,
    ) {
        let mut draw = Draw::new(seed);
        let (x, w, b) = (draw.matrix(n, n_in), draw.matrix(n_out, n_in), draw.vector(n_out));

        let ours = linear(x.leaky_trace(), &w, with_bias.then_some(&b));

        let product = x.leaky_trace().matmul(w.retaped::<OwnedTape<f32, Cpu>>().permute::<(usize, usize), _>());
        let bias = b.retaped::<OwnedTape<f32, Cpu>>().broadcast_like::<_, Axis<0>>(&(n, n_out));
        let oracle = if with_bias { product + bias } else { product };
        same!(draw, ours, oracle, [&x, &w, &b]);
    }

    #[test]
    fn rms_norm_is_the_formula_that_dfdx_differentiates(n in 1usize..40, c in 1usize..60, seed: u64) {
        let mut draw = Draw::new(seed);
        let (x, gain) = (draw.matrix(n, c), draw.vector(c));
        // Rows of small numbers make gradients large; this keeps them away from the pole.
        let eps = 1e-2;

        let ours = rms_norm(x.leaky_trace(), &gain, eps);

        let rms = (x.leaky_trace().square().mean::<(usize,), Axis<1>>() + eps).sqrt();
        let scaled = x.retaped::<OwnedTape<f32, Cpu>>() / rms.broadcast_like::<_, Axis<1>>(&(n, c));
        let oracle = scaled * gain.retaped::<OwnedTape<f32, Cpu>>().broadcast_like::<_, Axis<0>>(&(n, c));
        same!(draw, ours, oracle, [&x, &gain]);
    }

    #[test]
    fn swiglu_is_the_formula_that_dfdx_differentiates(n in 1usize..40, f in 1usize..40, seed: u64) {
        let mut draw = Draw::new(seed);
        let x = draw.matrix(n, 2 * f);

        let ours = swiglu(x.leaky_trace(), f);

        let half = |first: usize| draw.constant(2 * f, f, |i, j| f32::from(u8::from(i == first + j)));
        let gate = x.leaky_trace().matmul(half(0));
        let up = x.leaky_trace().matmul(half(f));
        let oracle = gate.with_empty_tape() * gate.sigmoid() * up;
        same!(draw, ours, oracle, [&x]);
    }

    #[test]
    fn embedding_gathers_rows_as_dfdx_does(n in 1usize..40, v in 1usize..20, c in 1usize..20, seed: u64) {
        let mut draw = Draw::new(seed);
        let table = draw.matrix(v, c);
        let ids = draw.integers(n, v);

        let ours = embedding(&table, &ids, OwnedTape::default());

        let rows: Tensor<(usize,), usize, Cpu> =
            draw.device.tensor_from_vec(ids.iter().map(|id| *id as usize).collect(), (n,));
        let oracle = table.leaky_trace().gather(rows);
        same!(draw, ours, oracle, [&table]);
    }

    #[test]
    fn cross_entropy_is_the_formula_that_dfdx_differentiates(n in 1usize..40, v in 1usize..40, seed: u64) {
        let mut draw = Draw::new(seed);
        let logits = draw.matrix(n, v);
        let labels: Vec<i32> =
            draw.integers(n, v + 1).iter().map(|l| if *l == v as i32 { -100 } else { *l }).collect();

        let ours = cross_entropy(logits.leaky_trace(), &labels) * 3.0;
        let untaped = cross_entropy(logits.clone(), &labels);

        let wanted = draw.constant(n, v, |i, j| f32::from(u8::from(labels[i] == j as i32)));
        let oracle = (logits.leaky_trace().log_softmax::<Axis<1>>() * wanted).sum::<Rank0, _>() * -3.0;
        close(&[ours.array()], &[oracle.array()], TOLERANCE);
        close(&[untaped.array() * 3.0], &[oracle.array()], TOLERANCE);
        let (mut ours, mut oracle) = (ours.backward(), oracle.backward());
        close(&gradient_of(&mut ours, &logits), &gradient_of(&mut oracle, &logits), TOLERANCE);
    }

    #[test]
    fn attention_is_the_formula_that_dfdx_differentiates(
        rows in 1usize..3, s in 1usize..9, kv in 1usize..3, group in 1usize..3, half in 1usize..5, document in 1usize..9,
        rotates: bool, seed: u64,
    ) {
        let mut draw = Draw::new(seed);
        let (n, h, d) = (rows * s, kv * group, 2 * half);
        let qkv = draw.matrix(n, (h + 2 * kv) * d);
        let doc_start: Vec<i32> = (0..n).map(|i| (i % s / document * document) as i32).collect();
        let positions: Vec<i32> = (0..n).map(|i| (i % s % document) as i32).collect();
        let mut attention = CausalAttention::new(h, kv, d, s);
        if rotates {
            attention = attention.with_rotary(10_000.0);
        }

        let ours = attention.forward(qkv.leaky_trace(), h * d, &positions, &doc_start);

        let oracle = HeadOracle { draw: &draw, heads: (h, kv, d), seq_len: s, theta: rotates.then_some(10_000.0) };
        let oracle = oracle.all(&qkv, &positions, &doc_start);
        same!(draw, ours, oracle, [&qkv]);
    }
}

#[test]
fn transposed_operands_are_read_and_differentiated_correctly() {
    let mut draw = Draw::new(4);
    let (x, w) = (draw.matrix(5, 3), draw.matrix(5, 4));

    let ours = linear(x.leaky_trace().permute::<(usize, usize), _>(), &w.clone().permute(), None);

    let oracle = x.leaky_trace().permute::<(usize, usize), _>().matmul(w.clone());
    same!(draw, ours, oracle, [&x]);
}

#[test]
fn tensor_that_several_operations_read_collects_all_their_gradients() {
    let mut draw = Draw::new(7);
    let (x, w) = (draw.matrix(6, 6), draw.matrix(6, 6));

    let once = linear(x.leaky_trace(), &w, None);
    let ours = linear(once.with_empty_tape(), &w, None) + once;

    let transposed = || w.retaped::<OwnedTape<f32, Cpu>>().permute::<(usize, usize), _>();
    let once = x.leaky_trace().matmul(transposed());
    let oracle = once.with_empty_tape().matmul(transposed()) + once;
    same!(draw, ours, oracle, [&x, &w]);
}
