//! Causal grouped-query attention over whole rows, without a matrix of scores in memory.
//!
//! Legend: `t` query token, `j` key token, both counted within a row of the batch.

pub use super::attention_backward::{attention_backward, attention_backward_scratch_len};

use super::attention_forward::{forward, slot_len};
use super::attention_operands::Operands;
use super::attention_shape::Shape;
use phalanx_device::float::Float;

/// Length of the scratch of [`attention`] for `n_threads` threads.
pub fn attention_scratch_len(shape: &Shape, n_threads: usize) -> usize {
    n_threads.max(1) * slot_len(&shape.as_part())
}

/// `o = softmax(scale q k^T + mask) v` for each head, and `lse = ln Σ_j e^(scale q·k_j)`.
///
/// Token `t` sees the tokens `j` of its row with `max(doc_start[t], t - window + 1) <= j <= t`.
///
/// # Shapes
/// `qkv: [B S, (H + 2 K) D]`, `doc_start: [B S]` (index within the row), `o: [B S, H D]`, `lse: [B S, H]`,
/// `scratch: [attention_scratch_len]`: its length bounds the number of threads.
///
/// # Panics
/// If a token does not see itself, or the scratch is too short for one thread.
pub fn attention<T: Float>(
    shape: &Shape,
    qkv: &[T],
    doc_start: &[i32],
    o: &mut [T],
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    forward(&Operands::of_rows(shape, qkv, doc_start), o, lse, false, scratch);
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        bits, close, finite_differences, inner, random, same_on_every_number_of_threads, stored, wide,
    };
    use super::*;
    use crate::kernels::Heads;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// Documents of the given length in each row.
    fn documents(n: usize, seq_len: usize, document: usize) -> Vec<i32> {
        (0..n).map(|i| (i % seq_len / document * document) as i32).collect()
    }

    /// Attention by its definition, in f64: outputs, then log-sum-exp.
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

    fn forward<T: Float>(shape: &Shape, qkv: &[T], doc_start: &[i32]) -> (Vec<T>, Vec<f32>) {
        let Heads { n_heads: h, head_dim: d, .. } = shape.heads;
        let mut o = vec![T::from_f32(7.0); doc_start.len() * h * d];
        let mut lse = vec![f32::NAN; doc_start.len() * h];
        let mut scratch = vec![f32::NAN; attention_scratch_len(shape, 2)];
        attention(shape, qkv, doc_start, &mut o, &mut lse, &mut scratch);
        (o, lse)
    }

    fn backward<T: Float>(shape: &Shape, qkv: &[T], doc_start: &[i32], dout: &[T]) -> Vec<T> {
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
    fn narrow_storage_agrees<T: Float>(rounding: f64) {
        let shape = shape(2, 2, 32, 130, None);
        let qkv: Vec<T> = stored(&random(2 * 130 * shape.heads.columns(), 7));
        let dout: Vec<T> = stored(&random(2 * 130 * 128, 8));
        let widened = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let doc_start = documents(260, 130, 50);

        let (o, _) = forward(&shape, &qkv, &doc_start);
        let dqkv = backward(&shape, &qkv, &doc_start, &dout);

        close(&o, &wide(&forward(&shape, &widened(&qkv), &doc_start).0), rounding);
        // `delta` is computed from the rounded output, hence twice the rounding of one operation.
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
