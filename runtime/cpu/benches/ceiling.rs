//! The ceiling of matrix products: multiply-adds on registers alone, on all threads at once, in GFLOP/s. No product can be faster. Prints
//! one line for each kind of instruction that this CPU has. Not a criterion benchmark: the loop is its own statistics.
#![allow(unsafe_code)] // Intrinsics.

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::time::Instant;

    const REPEATS: u64 = 3_000_000;
    /// Runs; the fastest one counts.
    const RUNS: usize = 5;

    /// GFLOP/s of one thread, for a loop whose passes have `flop` operations each.
    fn fastest(flop: u64, run: impl Fn()) -> f64 {
        let time = |_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        };
        (flop * REPEATS) as f64 / (0..RUNS).map(time).fold(f64::INFINITY, f64::min) / 1e9
    }

    /// A function that repeats a multiply-add on as many sums as a kernel keeps in registers.
    macro_rules! repeated {
        ($name:ident, $features:literal, $sums:literal, $zero:expr, $one:expr, |$sum:ident, $x:ident| $step:expr) => {
            #[target_feature(enable = $features)]
            fn $name() {
                let mut sums = [$zero; $sums];
                let $x = black_box($one);
                for _ in 0..REPEATS {
                    for $sum in &mut sums {
                        *$sum = $step;
                    }
                }
                black_box(sums);
            }
        };
    }
    repeated!(fma_256, "avx2,fma", 12, _mm256_setzero_ps(), _mm256_set1_ps(1.0), |sum, x| _mm256_fmadd_ps(x, x, *sum));
    repeated!(fma_512, "avx512f", 28, _mm512_setzero_ps(), _mm512_set1_ps(1.0), |sum, x| _mm512_fmadd_ps(x, x, *sum));
    repeated!(pairs_512, "avx512f,avx512bf16", 28, _mm512_setzero_ps(), _mm512_set1_epi32(0x3f80_3f80), |sum, x| {
        // SAFETY: both types are 512 plain bits.
        let x: __m512bh = unsafe { std::mem::transmute::<__m512i, __m512bh>(x) };
        _mm512_dpbf16_ps(*sum, x, x)
    });

    /// On all threads at once: the sum of their rates.
    fn on_all(name: &str, rate: impl Fn() -> f64 + Sync) {
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        let barrier = std::sync::Barrier::new(n_threads);
        let of_thread = || {
            barrier.wait();
            rate()
        };
        let total: f64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(of_thread)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no thread panics")).sum()
        });
        println!("{name}: {total:.0} GFLOP/s on {n_threads} threads");
    }

    pub fn print() {
        // SAFETY: each loop runs only where the CPU has its instructions.
        unsafe {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                on_all("f32, AVX2 and FMA", || fastest(12 * 16, || fma_256()));
            }
            if is_x86_feature_detected!("avx512f") {
                on_all("f32, AVX-512", || fastest(28 * 32, || fma_512()));
            }
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
                on_all("bf16, AVX-512 BF16", || fastest(28 * 64, || pairs_512()));
            }
        }
    }
}

fn main() {
    #[cfg(target_arch = "x86_64")]
    x86::print();
}
