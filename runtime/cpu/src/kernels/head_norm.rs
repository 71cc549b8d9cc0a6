//! RMS norm of each query and key head of packed qkv, as in Qwen3; values pass through.

use super::Heads;
use super::math::{sum, sum3};
use super::parallel::{PARTS, rows_per_part, rows_per_task, sum_parts};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// `out = head rstd gain` with `rstd = 1 / sqrt(mean(head²) + eps)`; the gain is `gain_q` for queries and `gain_k` for
/// keys.
///
/// # Shapes
/// `qkv, out: [N, (H + 2 K) D]`, `gain_q, gain_k: [D]`, `rstd: [N, H + K]`.
pub fn head_norm<T: Float>(
    heads: Heads,
    qkv: &[T],
    gain_q: &[f32],
    gain_k: &[f32],
    eps: f32,
    out: &mut [T],
    rstd: &mut [f32],
) {
    let (columns, n_normed) = (heads.columns(), heads.n_heads + heads.n_kv_heads);
    let rows = rows_per_task(columns);
    assert!(qkv.len() == out.len() && qkv.len() * n_normed == rstd.len() * columns);
    let tasks = qkv.par_chunks(rows * columns).zip(out.par_chunks_mut(rows * columns));
    tasks
        .zip(rstd.par_chunks_mut(rows * n_normed))
        .for_each(|((qkv, out), rstd)| forward_rows(heads, qkv, gain_q, gain_k, eps, out, rstd));
}

/// Length of the scratch of [`head_norm_backward`].
pub const fn head_norm_backward_scratch_len(heads: Heads) -> usize {
    2 * PARTS * heads.head_dim
}

/// Adjoint of [`head_norm`]; adds to `dgain_q` and `dgain_k` if `accumulate`.
///
/// # Shapes
/// `qkv, dout, dqkv: [N, (H + 2 K) D]`, `rstd: [N, H + K]`, `gain_q, gain_k, dgain_q, dgain_k: [D]`,
/// `scratch: [head_norm_backward_scratch_len]`.
pub fn head_norm_backward<T: Float>(
    heads: Heads,
    qkv: &[T],
    gain_q: &[f32],
    gain_k: &[f32],
    rstd: &[f32],
    dout: &[T],
    dqkv: &mut [T],
    dgain_q: &mut [f32],
    dgain_k: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (columns, n_normed, d) = (heads.columns(), heads.n_heads + heads.n_kv_heads, heads.head_dim);
    let n = qkv.len() / columns;
    let rows = rows_per_part(n, columns);
    assert!(dout.len() == qkv.len() && dqkv.len() == qkv.len() && rstd.len() == n * n_normed);
    assert!(dgain_q.len() == d && dgain_k.len() == d);
    let (queries, keys) = scratch[..2 * PARTS * d].split_at_mut(PARTS * d);
    let operands = qkv.par_chunks(rows * columns).zip(dout.par_chunks(rows * columns));
    let results = dqkv.par_chunks_mut(rows * columns).zip(queries.par_chunks_mut(d)).zip(keys.par_chunks_mut(d));
    operands.zip(rstd.par_chunks(rows * n_normed)).zip(results).for_each(
        |(((qkv, dout), rstd), ((dqkv, dgain_q), dgain_k))| {
            dgain_q.fill(0.0);
            dgain_k.fill(0.0);
            backward_rows(heads, qkv, gain_q, gain_k, rstd, dout, dqkv, dgain_q, dgain_k);
        },
    );
    sum_parts(queries, n.div_ceil(rows), dgain_q, accumulate);
    sum_parts(keys, n.div_ceil(rows), dgain_k, accumulate);
}

simd! {
    fn forward_rows<T: Float>(
        heads: Heads,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        eps: f32,
        out: &mut [T],
        rstd: &mut [f32],
    ) {
        let (d, n_normed) = (heads.head_dim, heads.n_heads + heads.n_kv_heads);
        let rows = qkv.chunks_exact(heads.columns()).zip(out.chunks_exact_mut(heads.columns()));
        for ((row, out), rstd) in rows.zip(rstd.chunks_exact_mut(n_normed)) {
            let each = row.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(rstd);
            for (i, ((x, y), rstd)) in each.enumerate() {
                let gain = if i < heads.n_heads { &gain_q[..d] } else { &gain_k[..d] };
                let r = 1.0 / (sum(x, |x| x * x) / d as f32 + eps).sqrt();
                *rstd = r;
                for i in 0..d {
                    y[i] = T::from_f32(x[i].to_f32() * r * gain[i]);
                }
            }
            out[n_normed * d..].copy_from_slice(&row[n_normed * d..]);
        }
    }
}

simd! {
    fn backward_rows<T: Float>(
        heads: Heads,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        rstd: &[f32],
        dout: &[T],
        dqkv: &mut [T],
        dgain_q: &mut [f32],
        dgain_k: &mut [f32],
    ) {
        let (d, n_normed, columns) = (heads.head_dim, heads.n_heads + heads.n_kv_heads, heads.columns());
        let rows = qkv.chunks_exact(columns).zip(dout.chunks_exact(columns)).zip(dqkv.chunks_exact_mut(columns));
        for (((row, dout), dqkv), rstd) in rows.zip(rstd.chunks_exact(n_normed)) {
            let each = row.chunks_exact(d).zip(dout.chunks_exact(d)).zip(dqkv.chunks_exact_mut(d)).zip(rstd);
            for (i, (((x, dy), dx), r)) in each.enumerate() {
                let is_query = i < heads.n_heads;
                let gain = if is_query { &gain_q[..d] } else { &gain_k[..d] };
                let dgain = if is_query { &mut dgain_q[..d] } else { &mut dgain_k[..d] };
                let along = sum3(x, dy, gain, |x, dy, gain| dy * gain * x) * r * r * r / d as f32;
                for i in 0..d {
                    let (x, dy) = (x[i].to_f32(), dy[i].to_f32());
                    dx[i] = T::from_f32(dy * gain[i] * r - x * along);
                    dgain[i] += dy * x * r;
                }
            }
            dqkv[n_normed * d..].copy_from_slice(&dout[n_normed * d..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        bits, close, finite_differences, inner, random, same_on_every_number_of_threads, stored, wide,
    };
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    const EPS: f32 = 1e-2;

    fn reference(heads: Heads, qkv: &[f64], gain_q: &[f64], gain_k: &[f64]) -> Vec<f64> {
        let d = heads.head_dim;
        let normed = |(i, x): (usize, &[f64])| {
            let i = i % (heads.n_heads + 2 * heads.n_kv_heads);
            let rstd = 1.0 / (inner(x, x) / d as f64 + EPS as f64).sqrt();
            let gain = if i < heads.n_heads { gain_q } else { gain_k };
            let is_value = i >= heads.n_heads + heads.n_kv_heads;
            x.iter().zip(gain).map(|(x, g)| if is_value { *x } else { x * rstd * g }).collect::<Vec<_>>()
        };
        qkv.chunks(d).enumerate().flat_map(normed).collect()
    }

    fn forward<T: Float>(heads: Heads, qkv: &[T], gain_q: &[f32], gain_k: &[f32]) -> (Vec<T>, Vec<f32>) {
        let n = qkv.len() / heads.columns();
        let mut out = vec![T::ZERO; qkv.len()];
        let mut rstd = vec![f32::NAN; n * (heads.n_heads + heads.n_kv_heads)];
        head_norm(heads, qkv, gain_q, gain_k, EPS, &mut out, &mut rstd);
        (out, rstd)
    }

    fn backward<T: Float>(
        heads: Heads,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        dout: &[T],
        old: Option<f32>,
    ) -> (Vec<T>, Vec<f32>, Vec<f32>) {
        let (_, rstd) = forward(heads, qkv, gain_q, gain_k);
        let start = old.unwrap_or(f32::NAN);
        let (mut dq, mut dk) = (vec![start; heads.head_dim], vec![start; heads.head_dim]);
        let mut dqkv = vec![T::ZERO; qkv.len()];
        let mut scratch = vec![f32::NAN; head_norm_backward_scratch_len(heads)];
        let add = old.is_some();
        head_norm_backward(heads, qkv, gain_q, gain_k, &rstd, dout, &mut dqkv, &mut dq, &mut dk, add, &mut scratch);
        (dqkv, dq, dk)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn both_directions_match_the_definition(
            n in 1usize..40, group in 1usize..3, kv in 1usize..3, d in 1usize..9, seed in any::<u64>(),
        ) {
            let heads = Heads { n_heads: group * kv, n_kv_heads: kv, head_dim: d };
            let (qkv, dout) = (random(n * heads.columns(), seed), random(n * heads.columns(), seed ^ 1));
            let (gain_q, gain_k) = (random(d, seed ^ 2), random(d, seed ^ 3));

            let (out, _) = forward(heads, &qkv, &gain_q, &gain_k);
            let (dqkv, dgain_q, dgain_k) = backward(heads, &qkv, &gain_q, &gain_k, &dout, None);

            let (qkv, q, k, dout) = (wide(&qkv), wide(&gain_q), wide(&gain_k), wide(&dout));
            close(&out, &reference(heads, &qkv, &q, &k), 2e-6);
            close(&dqkv, &finite_differences(&qkv, |x| inner(&reference(heads, x, &q, &k), &dout)), 1e-5);
            close(&dgain_q, &finite_differences(&q, |q| inner(&reference(heads, &qkv, q, &k), &dout)), 1e-5);
            close(&dgain_k, &finite_differences(&k, |k| inner(&reference(heads, &qkv, &q, k), &dout)), 1e-5);
        }
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 33 };
        let qkv: Vec<bf16> = stored(&random(50 * heads.columns(), 1));
        let dout: Vec<bf16> = stored(&random(50 * heads.columns(), 2));
        let (gain_q, gain_k) = (random(33, 3), random(33, 4));
        let widened = |x: &[bf16]| x.iter().map(|x| Float::to_f32(*x)).collect::<Vec<f32>>();

        let (out, _) = forward(heads, &qkv, &gain_q, &gain_k);
        let (dqkv, dgain_q, dgain_k) = backward(heads, &qkv, &gain_q, &gain_k, &dout, None);

        let (expected, expected_q, expected_k) =
            backward(heads, &widened(&qkv), &gain_q, &gain_k, &widened(&dout), None);
        close(&out, &reference(heads, &wide(&qkv), &wide(&gain_q), &wide(&gain_k)), 1.0 / 256.0);
        close(&dqkv, &wide(&expected), 1.0 / 256.0);
        assert_eq!((dgain_q, dgain_k), (expected_q, expected_k));
    }

    #[test]
    fn gradients_of_the_gains_are_summed_over_all_parts() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 8 };
        let (qkv, dout) = (random(300 * heads.columns(), 10), random(300 * heads.columns(), 11));
        let (gain_q, gain_k) = (random(8, 12), random(8, 13));
        assert!(rows_per_part(300, heads.columns()) < 150);

        let (_, dgain_q, dgain_k) = backward(heads, &qkv, &gain_q, &gain_k, &dout, None);

        let (qkv, q, k, dout) = (wide(&qkv), wide(&gain_q), wide(&gain_k), wide(&dout));
        close(&dgain_q, &finite_differences(&q, |q| inner(&reference(heads, &qkv, q, &k), &dout)), 1e-5);
        close(&dgain_k, &finite_differences(&k, |k| inner(&reference(heads, &qkv, &q, k), &dout)), 1e-5);
    }

    #[test]
    fn accumulation_and_threads_keep_the_bits_in_order() {
        let heads = Heads { n_heads: 4, n_kv_heads: 2, head_dim: 16 };
        let (qkv, dout) = (random(200 * heads.columns(), 5), random(200 * heads.columns(), 6));
        let (gain_q, gain_k) = (random(16, 7), random(16, 8));

        let (_, fresh_q, fresh_k) = backward(heads, &qkv, &gain_q, &gain_k, &dout, None);
        let (_, added_q, added_k) = backward(heads, &qkv, &gain_q, &gain_k, &dout, Some(2.0));

        // A sum that starts at 2 is rounded to the spacing of 2 or 4 at each of its parts.
        close(&added_q, &wide(&fresh_q).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        close(&added_k, &wide(&fresh_k).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        same_on_every_number_of_threads(|| {
            let (dqkv, dq, dk) = backward(heads, &qkv, &gain_q, &gain_k, &dout, Some(2.0));
            (bits(&dqkv), bits(&dq), bits(&dk))
        });
    }
}
