//! Sums, conversions and fills, element by element.

use super::parallel::{CHUNK, rows_per_task};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;
use phalanx_strategies::program::Dropout;

/// `out = a + b`.
///
/// # Shapes
/// All equal.
pub fn add<A: Float, B: Float, Y: Float>(a: &[A], b: &[B], out: &mut [Y]) {
    assert!(a.len() == out.len() && b.len() == out.len());
    let operands = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK));
    out.par_chunks_mut(CHUNK).zip(operands).for_each(|(out, (a, b))| add_chunk(a, b, out));
}

/// `a += b`.
///
/// # Shapes
/// Equal.
pub fn add_assign<A: Float, B: Float>(a: &mut [A], b: &[B]) {
    assert_eq!(a.len(), b.len());
    a.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK)).for_each(|(a, b)| add_assign_chunk(a, b));
}

/// `out[t, :] = x[t, :] + bias`, `N = x.len() / C`.
///
/// # Shapes
/// `x, out: [N, C]`, `bias: [C]`.
pub fn add_bias<X: Float, B: Float, Y: Float>(x: &[X], bias: &[B], out: &mut [Y]) {
    let c = bias.len().max(1);
    assert!(x.len() == out.len() && x.len().is_multiple_of(c) && (x.is_empty() || !bias.is_empty()));
    let len = rows_per_task(c) * c;
    out.par_chunks_mut(len).zip(x.par_chunks(len)).for_each(|(out, x)| {
        for (out, x) in out.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
            add_chunk(x, bias, out);
        }
    });
}

/// Zeroes the elements of `x` that are drawn, and scales the others.
///
/// # Shapes
/// `x: [N, C]`, `keys: [N]`.
pub fn dropout<X: Float>(x: &mut [X], keys: &[i32], dropout: &Dropout) {
    let c = x.len() / keys.len().max(1);
    assert_eq!(x.len(), keys.len() * c);
    let (threshold, factor) = (dropout.threshold(), dropout.factor());
    let rows = rows_per_task(c.max(1));
    x.par_chunks_mut(rows * c.max(1)).zip(keys.par_chunks(rows)).for_each(|(x, keys)| {
        for (x, key) in x.chunks_exact_mut(c.max(1)).zip(keys) {
            let of_token = dropout.of_token(*key);
            for (column, x) in x.iter_mut().enumerate() {
                let kept = dropout.draw(of_token, column) >= threshold;
                *x = X::from_f32(if kept { x.to_f32() * factor } else { 0.0 });
            }
        }
    });
}

/// `x[t, :] += bias`, `N = x.len() / C`.
///
/// # Shapes
/// `x: [N, C]`, `bias: [C]`.
pub fn add_bias_assign<X: Float, B: Float>(x: &mut [X], bias: &[B]) {
    let c = bias.len().max(1);
    assert!(x.len().is_multiple_of(c) && (x.is_empty() || !bias.is_empty()));
    x.par_chunks_mut(rows_per_task(c) * c).for_each(|x| {
        for x in x.chunks_exact_mut(c) {
            add_assign_chunk(x, bias);
        }
    });
}

/// `out = x`, rounded to the element type of `out`.
///
/// # Shapes
/// Equal.
pub fn cast<X: Float, Y: Float>(x: &[X], out: &mut [Y]) {
    assert_eq!(x.len(), out.len());
    out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(out, x)| cast_chunk(x, out));
}

/// `x *= factor`.
pub fn scale<X: Float>(x: &mut [X], factor: f32) {
    x.par_chunks_mut(CHUNK).for_each(|x| scale_chunk(x, factor));
}

simd! {
    fn add_chunk<A: Float, B: Float, Y: Float>(a: &[A], b: &[B], out: &mut [Y]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = Y::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

simd! {
    fn add_assign_chunk<A: Float, B: Float>(a: &mut [A], b: &[B]) {
        for (a, b) in a.iter_mut().zip(b) {
            *a = A::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

simd! {
    fn cast_chunk<X: Float, Y: Float>(x: &[X], out: &mut [Y]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = Y::from_f32(x.to_f32());
        }
    }
}

simd! {
    fn scale_chunk<X: Float>(x: &mut [X], factor: f32) {
        for x in x {
            *x = X::from_f32(x.to_f32() * factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, random, stored, wide};
    use super::*;
    use half::{bf16, f16};

    // Two chunks and a ragged tail.
    const N: usize = 2 * CHUNK + 77;

    #[test]
    fn dropout_zeroes_the_share_of_its_rate_and_keeps_the_mean() {
        let (n, c) = (64, 1000);
        let keys: Vec<i32> = (0..n).map(|t: i32| t.wrapping_mul(0x3779_b9b9)).collect();
        for rate in [0.05, 0.5] {
            let mut x = vec![1.0f32; n as usize * c];
            let drops = Dropout { rate, stream: 3, first_column: 0 };

            dropout(&mut x, &keys, &drops);

            let n_zeros = x.iter().filter(|x| **x == 0.0).count() as f32 / x.len() as f32;
            // Four standard deviations of 64,000 draws are below 0.008.
            assert!((n_zeros - rate).abs() < 0.008, "{n_zeros} of {rate}");
            assert!(x.iter().all(|x| *x == 0.0 || *x == drops.factor()));
            // No column and no token stands out.
            let of_column = |column: usize| x.iter().skip(column).step_by(c).filter(|x| **x == 0.0).count() as f32;
            assert!((0..c).all(|column| of_column(column) < 64.0 * rate + 6.0 * (64.0 * rate).sqrt()));
            assert!(
                x.chunks_exact(c).all(|x| (x.iter().filter(|x| **x == 0.0).count() as f32 / 1e3 - rate).abs() < 0.08)
            );
        }
    }

    #[test]
    fn dropout_of_some_columns_is_that_of_the_whole_and_differs_between_streams_and_keys() {
        let whole = Dropout { rate: 0.4, stream: 1, first_column: 0 };
        let drawn = |drops: Dropout, n: usize, key: i32| {
            let mut x = vec![1.0f32; n];
            dropout(&mut x, &[key], &drops);
            x
        };

        let x = drawn(whole, 100, 7);

        assert_eq!(drawn(Dropout { first_column: 30, ..whole }, 50, 7), x[30..80]);
        assert_ne!(drawn(Dropout { stream: 2, ..whole }, 100, 7), x);
        assert_ne!(drawn(whole, 100, 8), x);
    }

    #[test]
    fn sums_are_rounded_once_to_the_type_of_the_result() {
        let (a, b) = (random(N, 1), stored::<bf16>(&random(N, 2)));
        let expected: Vec<f64> = wide(&a).iter().zip(wide(&b)).map(|(a, b)| a + b).collect();
        let (mut out, mut narrow, mut assigned) = (vec![f32::NAN; N], vec![f16::ZERO; N], a.clone());

        add(&a, &b, &mut out);
        add(&a, &b, &mut narrow);
        add_assign(&mut assigned, &b);

        close(&out, &expected, 1e-7);
        close(&narrow, &expected, 1.0 / 2048.0);
        assert_eq!(out, assigned);
    }

    #[test]
    fn bias_is_added_to_every_row_and_rounded_once() {
        for (n, c) in [(0usize, 5usize), (1, 1), (3, 7), (300, 77), (2, CHUNK + 3)] {
            let (x, bias) = (stored::<bf16>(&random(n * c, 5)), random(c, 6));
            let expected: Vec<f64> =
                wide(&x).iter().enumerate().map(|(i, x)| (*x as f32 + bias[i % c]) as f64).collect();
            let (mut out, mut narrow, mut assigned) = (vec![f32::NAN; n * c], vec![bf16::NAN; n * c], x.clone());

            add_bias(&x, &bias, &mut out);
            add_bias(&x, &bias, &mut narrow);
            add_bias_assign(&mut assigned, &bias);

            assert_eq!(wide(&out), expected);
            assert!(narrow.iter().zip(&out).all(|(y, x)| *y == bf16::from_f32(*x)));
            assert_eq!(assigned, narrow);
        }
    }

    #[test]
    fn casts_round_to_nearest_and_widen_exactly() {
        let x = random(N, 3);
        let (mut narrow, mut half, mut back) = (vec![bf16::ZERO; N], vec![f16::ZERO; N], vec![f32::NAN; N]);

        cast(&x, &mut narrow);
        cast(&x, &mut half);
        cast(&narrow, &mut back);

        assert!(x.iter().zip(&narrow).all(|(x, y)| bf16::from_f32(*x) == *y));
        assert!(x.iter().zip(&half).all(|(x, y)| f16::from_f32(*x) == *y));
        assert!(back.iter().zip(&narrow).all(|(x, y)| *x == half::bf16::to_f32(*y)));
    }

    #[test]
    fn scale_reaches_every_element() {
        let x = random(N, 4);
        let mut y = x.clone();

        scale(&mut y, 3.0);

        assert!(x.iter().zip(&y).all(|(x, y)| 3.0 * x == *y));
    }
}
