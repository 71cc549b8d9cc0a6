//! Helpers for tests of the kernels: inputs, comparisons, pools.

use phalanx_device::float::Float;

/// Reproducible numbers in [-1, 1) (splitmix64).
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Rounds to a storage type.
pub fn stored<T: Float>(x: &[f32]) -> Vec<T> {
    x.iter().map(|x| T::from_f32(*x)).collect()
}

/// Widens for a reference in f64.
pub fn wide<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| x.to_f32() as f64).collect()
}

/// Asserts `|found - expected| <= tolerance (1 + |expected|)` for each element.
pub fn close<T: Float>(found: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = found.to_f32() as f64;
        let error = (found - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "element {i} is {found}, not {expected}");
    }
}

/// Gradient of `f` at `x` by central differences.
pub fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let old = x[i];
            x[i] = old + STEP;
            let above = f(&x);
            x[i] = old - STEP;
            let below = f(&x);
            x[i] = old;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// `Σ a b`: turns an output into a scalar whose gradient with respect to it is `b`.
pub fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Asserts that `kernel` gives the same bits on 1, 2 and 3 threads; it returns the bits to compare.
pub fn same_on_every_number_of_threads<R: PartialEq + std::fmt::Debug + Send>(kernel: impl Fn() -> R + Sync) {
    let on = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool of threads").install(&kernel);
    let single = on(1);
    for n in [2, 3] {
        assert_eq!(on(n), single, "{n} threads differ from one");
    }
}

/// The bits of a buffer, so that a comparison distinguishes zeros and accepts NaN.
pub fn bits<T: Float>(x: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(x).to_vec()
}
