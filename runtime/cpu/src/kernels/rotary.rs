//! Rotary position embedding. Source: Su et al. 2021 (arXiv:2104.09864), with pairs `(i, i + D/2)` as in Hugging Face.

use super::Heads;
use super::parallel::rows_per_task;
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// Pairs rotated at once. A constant, because half a head is too short for vectorised loops of variable length.
const LANES: usize = 16;

/// Rotates each query and key head in place by the angles of its position; backwards if `inverse`, which is the adjoint.
///
/// `(a, b) -> (a cos - b sin, b cos + a sin)`.
///
/// # Shapes
/// `qkv: [N, (H + 2 K) D]`, `positions: [N]`, `table: [2, P, D/2]`, cosines first.
///
/// # Panics
/// If the table has no such position.
pub fn rotary<T: Float>(heads: Heads, qkv: &mut [T], positions: &[i32], table: &[f32], inverse: bool) {
    let columns = heads.columns();
    let rows = rows_per_task(columns);
    assert_eq!(qkv.len(), positions.len() * columns);
    qkv.par_chunks_mut(rows * columns)
        .zip(positions.par_chunks(rows))
        .for_each(|(qkv, positions)| rotate_rows(heads, qkv, positions, table, inverse));
}

simd! {
    fn rotate_rows<T: Float>(heads: Heads, qkv: &mut [T], positions: &[i32], table: &[f32], inverse: bool) {
        let half = heads.head_dim / 2;
        let (cosines, sines) = table.split_at(table.len() / 2);
        let sign = if inverse { -1.0 } else { 1.0 };
        for (row, position) in qkv.chunks_exact_mut(heads.columns()).zip(positions) {
            let first = usize::try_from(*position).expect("positions are not negative") * half;
            let (cos, sin) = (&cosines[first..first + half], &sines[first..first + half]);
            for head in row.chunks_exact_mut(heads.head_dim).take(heads.n_heads + heads.n_kv_heads) {
                let (a, b) = head.split_at_mut(half);
                let ((a, a_tail), (b, b_tail)) = (a.as_chunks_mut::<LANES>(), b.as_chunks_mut::<LANES>());
                let ((cos, cos_tail), (sin, sin_tail)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    // Read all before writing: the compiler cannot prove that `a` and `b` do not alias.
                    let (x, y) = (a.map(T::to_f32), b.map(T::to_f32));
                    for i in 0..LANES {
                        a[i] = T::from_f32(x[i] * cos[i] - y[i] * (sign * sin[i]));
                    }
                    for i in 0..LANES {
                        b[i] = T::from_f32(y[i] * cos[i] + x[i] * (sign * sin[i]));
                    }
                }
                for (((a, b), cos), sin) in a_tail.iter_mut().zip(b_tail).zip(cos_tail).zip(sin_tail) {
                    let (x, y, sin) = (a.to_f32(), b.to_f32(), sign * sin);
                    (*a, *b) = (T::from_f32(x * cos - y * sin), T::from_f32(y * cos + x * sin));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, inner, random, stored, wide};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    fn table(n_positions: usize, half: usize) -> Vec<f32> {
        let angle = |e: usize| (e / half) as f64 / 10f64.powf((e % half) as f64 / half as f64);
        let (cosines, sines) =
            ((0..n_positions * half).map(|e| angle(e).cos()), (0..n_positions * half).map(|e| angle(e).sin()));
        cosines.chain(sines).map(|x| x as f32).collect()
    }

    fn reference(heads: Heads, qkv: &[f64], positions: &[i32], table: &[f32]) -> Vec<f64> {
        let (d, n_rotated) = (heads.head_dim, heads.n_heads + heads.n_kv_heads);
        let mut out = qkv.to_vec();
        for (token, head) in (0..positions.len()).flat_map(|t| (0..n_rotated).map(move |h| (t, h))) {
            let first = token * heads.columns() + head * d;
            for i in 0..d / 2 {
                let at = positions[token] as usize * (d / 2) + i;
                let (cos, sin) = (table[at] as f64, table[table.len() / 2 + at] as f64);
                let (a, b) = (qkv[first + i], qkv[first + d / 2 + i]);
                out[first + i] = a * cos - b * sin;
                out[first + d / 2 + i] = b * cos + a * sin;
            }
        }
        out
    }

    proptest! {
        #[test]
        fn forward_matches_the_definition_and_inverse_is_the_adjoint(
            n in 1usize..40, group in 1usize..3, kv in 1usize..3, half in 1usize..20, seed in any::<u64>(),
        ) {
            let heads = Heads { n_heads: group * kv, n_kv_heads: kv, head_dim: 2 * half };
            let (x, y) = (random(n * heads.columns(), seed), random(n * heads.columns(), seed ^ 1));
            let positions: Vec<i32> = (0..n).map(|t| (t * 7 % 11) as i32).collect();
            let table = table(11, half);

            let (mut forward, mut adjoint, mut narrow) = (x.clone(), y.clone(), stored::<bf16>(&x));
            rotary(heads, &mut forward, &positions, &table, false);
            rotary(heads, &mut adjoint, &positions, &table, true);
            rotary(heads, &mut narrow, &positions, &table, false);

            close(&forward, &reference(heads, &wide(&x), &positions, &table), 1e-6);
            // Inputs and outputs are rounded once each, and every output depends on two inputs.
            close(&narrow, &wide(&forward), 3.0 / 256.0);
            let difference = inner(&wide(&forward), &wide(&y)) - inner(&wide(&x), &wide(&adjoint));
            prop_assert!(difference.abs() < 1e-6 * x.len() as f64);
        }
    }
}
