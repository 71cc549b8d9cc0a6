//! Time of each fused kernel on the shapes of a small decoder: 4 rows of 256 tokens, width 512, 8 heads of 64,
//! feed-forward 1408, vocabulary 4096. `cargo bench -p phalanx-cpu --bench kernels -- [filter]`.

use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use phalanx_cpu::kernels::attention;
use phalanx_cpu::kernels::attention_part::{self, Indexes};
use phalanx_cpu::kernels::attention_shape::{PartShape, Shape};
use phalanx_cpu::kernels::{
    Heads, activation, cross_entropy, elementwise, embedding, optimizer, reduce, rms_norm, rotary,
};
use phalanx_device::float::Float;
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::program::Blocks;
use phalanx_strategies::program::tiles::Tiles;
use std::hint::black_box;

const ROWS: usize = 4;
const SEQ_LEN: usize = 256;
const N: usize = ROWS * SEQ_LEN;
const C: usize = 512;
const F: usize = 1408;
const V: usize = 4096;
const HEADS: Heads = Heads { n_heads: 8, n_kv_heads: 8, head_dim: 64 };

/// A reproducible spread of numbers in [-1, 1).
fn values<T: Float>(n: usize) -> Vec<T> {
    (0..n as u32).map(|i| T::from_f32(i.wrapping_mul(2_654_435_761) as f32 / (1u32 << 31) as f32 - 1.0)).collect()
}

fn attention_of<T: Float>(criterion: &mut Criterion, storage: &str, seq_len: usize) {
    let shape = Shape { heads: HEADS, seq_len, window: None, scale: 0.125 };
    let n_threads = rayon::current_num_threads();
    let (qkv, dout, doc_start) = (values::<T>(N * HEADS.columns()), values::<T>(N * C), vec![0; N]);
    let (mut o, mut lse, mut dqkv) = (vec![T::ZERO; N * C], vec![0.0; N * HEADS.n_heads], qkv.clone());
    let mut scratch = vec![0.0; attention::attention_scratch_len(&shape, n_threads)];
    criterion.bench_function(&format!("attention/{storage}/{seq_len}/forward"), |b| {
        b.iter(|| attention::attention(&shape, black_box(&qkv), &doc_start, &mut o, &mut lse, &mut scratch));
    });
    let mut scratch = vec![0.0; attention::attention_backward_scratch_len(&shape, n_threads)];
    criterion.bench_function(&format!("attention/{storage}/{seq_len}/backward"), |b| {
        b.iter(|| {
            let qkv = black_box(&qkv);
            attention::attention_backward(&shape, qkv, &doc_start, &o, &lse, &dout, &mut dqkv, &mut scratch);
        });
    });
}

/// One row in zigzag over a ring of `n` ranks: the work of all ranks together, to compare with the whole row.
fn attention_in_parts(criterion: &mut Criterion, n: usize) {
    let chunk = N / (2 * n);
    let shape = PartShape { heads: HEADS, n_queries: 2 * chunk, n_keys: 2 * chunk, window: None, scale: 0.125 };
    let index_of = |i: usize| -> Vec<i32> {
        [i, 2 * n - 1 - i].iter().flat_map(|c| (c * chunk..(c + 1) * chunk).map(|t| t as i32)).collect()
    };
    let index: Vec<Vec<i32>> = (0..n).map(index_of).collect();
    let (qkv, dout, doc_start) =
        (values::<f32>(2 * chunk * HEADS.columns()), values::<f32>(2 * chunk * C), vec![0; 2 * chunk]);
    let (mut o, mut lse) = (vec![0.0; 2 * chunk * C], vec![0.0; 2 * chunk * HEADS.n_heads]);
    let n_threads = rayon::current_num_threads();
    let indexes = |i: usize, j: usize| Indexes { queries: &index[i], keys: &index[j], doc_start: &doc_start };
    let mut scratch = vec![0.0; attention_part::attention_part_scratch_len(&shape, n_threads)];
    criterion.bench_function(&format!("attention_part/f32/{N} over {n}/forward"), |b| {
        b.iter(|| {
            for (i, j) in (0..n * n).map(|pair| (pair / n, pair % n)) {
                let qkv = black_box(&qkv);
                attention_part::attention_part(&shape, qkv, qkv, indexes(i, j), j > 0, &mut o, &mut lse, &mut scratch);
            }
        });
    });
    let (mut dq, mut dkv) = (vec![0.0; qkv.len()], vec![0.0; qkv.len()]);
    let mut scratch = vec![0.0; attention_part::attention_part_backward_scratch_len(&shape, n_threads)];
    criterion.bench_function(&format!("attention_part/f32/{N} over {n}/backward"), |b| {
        b.iter(|| {
            for (i, j) in (0..n * n).map(|pair| (pair / n, pair % n)) {
                let (qkv, known) = (black_box(&qkv), (&o[..], &lse[..], &dout[..]));
                let (dq, dkv, scratch) = (&mut dq, &mut dkv, &mut scratch);
                attention_part::attention_part_backward(&shape, qkv, qkv, indexes(i, j), known, dq, dkv, scratch);
            }
        });
    });
}

fn attention_kernels(criterion: &mut Criterion) {
    attention_of::<f32>(criterion, "f32", SEQ_LEN);
    attention_of::<bf16>(criterion, "bf16", SEQ_LEN);
    attention_of::<f32>(criterion, "f32", N);
    attention_in_parts(criterion, 4);
}

fn row_kernels<T: Float>(criterion: &mut Criterion, storage: &str) {
    let (x, gain, dy) = (values::<f32>(N * C), values::<f32>(C), values::<T>(N * C));
    let (mut y, mut rstd, mut dx, mut dgain) = (dy.clone(), vec![0.0; N], x.clone(), gain.clone());
    criterion.bench_function(&format!("rms_norm/{storage}/forward"), |b| {
        b.iter(|| rms_norm::rms_norm(black_box(&x), &gain, 1e-5, &mut y, &mut rstd));
    });
    let mut scratch = vec![0.0; rms_norm::rms_norm_backward_scratch_len(C)];
    criterion.bench_function(&format!("rms_norm/{storage}/backward"), |b| {
        b.iter(|| {
            let x = black_box(&x);
            rms_norm::rms_norm_backward(x, &gain, &rstd, &dy, &mut dx, true, &mut dgain, true, &mut scratch);
        });
    });
    let (gate_up, dact) = (values::<T>(N * 2 * F), values::<T>(N * F));
    let (mut act, mut dgate_up) = (dact.clone(), gate_up.clone());
    criterion.bench_function(&format!("swiglu/{storage}/forward"), |b| {
        b.iter(|| activation::swiglu(black_box(&gate_up), F, &mut act));
    });
    criterion.bench_function(&format!("swiglu/{storage}/backward"), |b| {
        b.iter(|| activation::swiglu_backward(black_box(&gate_up), &dact, F, &mut dgate_up));
    });
    // Repeated in place, gradients would become denormal and slow; a gate of zero stays zero.
    let mut in_place = vec![<T as bytemuck::Zeroable>::zeroed(); N * 2 * F];
    criterion.bench_function(&format!("swiglu/{storage}/backward in place"), |b| {
        b.iter(|| activation::swiglu_backward_in_place(black_box(&mut in_place), &dact, F));
    });
    criterion.bench_function(&format!("gelu/{storage}/forward"), |b| {
        b.iter(|| activation::gelu(black_box(&dact), &mut act));
    });
    let mut qkv = values::<T>(N * HEADS.columns());
    // True rotations, because they are repeated in place: shrinking numbers would become denormal and slow.
    let angles = || (0..SEQ_LEN * 32).map(|i| i as f32 * 0.1);
    let table: Vec<f32> = angles().map(f32::cos).chain(angles().map(f32::sin)).collect();
    let positions: Vec<i32> = (0..N).map(|t| (t % SEQ_LEN) as i32).collect();
    criterion.bench_function(&format!("rotary/{storage}"), |b| {
        b.iter(|| rotary::rotary(HEADS, black_box(&mut qkv), &positions, &table, false));
    });
}

fn loss_and_embedding(criterion: &mut Criterion) {
    let (mut logits, ids) = (values::<f32>(N * V), (0..N).map(|t| (t * 7919 % V) as i32).collect::<Vec<_>>());
    criterion.bench_function("cross_entropy", |b| b.iter(|| cross_entropy::cross_entropy(black_box(&logits), &ids, V)));
    criterion.bench_function("cross_entropy/with_gradient", |b| {
        b.iter(|| cross_entropy::cross_entropy_with_gradient(black_box(&mut logits), &ids, V, 1.0));
    });
    let (table, mut x, mut dtable) = (values::<f32>(V * C), values::<f32>(N * C), values::<f32>(V * C));
    criterion.bench_function("embedding/forward", |b| {
        b.iter(|| embedding::embedding(&ids, black_box(&table), C, &mut x, false));
    });
    criterion.bench_function("embedding/backward", |b| {
        b.iter(|| embedding::embedding_backward(&ids, black_box(&x), C, &mut dtable, false));
    });
}

fn whole_buffers(criterion: &mut Criterion) {
    let n = 1 << 22;
    let (mut p, mut m, mut v, g) = (values::<f32>(n), vec![0.0; n], vec![0.0; n], values::<f32>(n));
    let rule = OptimizerSpec::AdamW(AdamW { weight_decay: 0.01, ..AdamW::default() });
    let whole = optimizer::Whole { tiles: &Tiles::default(), blocks: &Blocks::default(), sums: &[] };
    let step = optimizer::Step { lr: 1e-3, scalars: rule.scalars(1), grad_scale: 1.0 };
    criterion.bench_function("adamw/4Mi", |b| {
        b.iter(|| optimizer::update(&rule, black_box(&mut p), &mut [&mut m, &mut v], &g, &whole, &step));
    });
    criterion.bench_function("sum_squares/4Mi", |b| b.iter(|| reduce::sum_squares(black_box(&g))));
    criterion.bench_function("add_assign/4Mi", |b| b.iter(|| elementwise::add_assign(black_box(&mut p), &g)));
}

fn rows(criterion: &mut Criterion) {
    row_kernels::<f32>(criterion, "f32");
    row_kernels::<bf16>(criterion, "bf16");
}

criterion_group! {
    name = benches;
    config = Criterion::default().without_plots().sample_size(20).warm_up_time(std::time::Duration::from_millis(300)).measurement_time(std::time::Duration::from_secs(1));
    targets = attention_kernels, rows, loss_and_embedding, whole_buffers
}
criterion_main!(benches);
