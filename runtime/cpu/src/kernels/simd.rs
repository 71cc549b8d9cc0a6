//! Run-time choice of the vector instructions, so that one binary is fast on every CPU.

use crate::isa::{Isa, isa};

/// The instruction set that element-wise kernels use.
pub fn level() -> Isa {
    #[cfg(test)]
    return isa().min(tests::limit());
    #[cfg(not(test))]
    isa()
}

/// Defines a function whose body is compiled for AVX-512, for AVX2 and for every CPU of the target. A call uses the widest of them
/// that [`isa`](crate::isa::isa) permits.
///
/// The body must be plain loops that vectorise, and all functions that it calls must be `#[inline(always)]`: only
/// inlined code is compiled with the wider instructions. `FMA` is disabled on purpose: without contraction all three
/// versions compute the same bits, and these kernels are bound by memory, not by arithmetic.
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident: $bound:ident),+>)? (
        $($arg:ident: $ty:ty),* $(,)?
    ) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code, reason = "functions compiled for an instruction set may only be called where it exists")]
        $vis fn $name $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                let level = $crate::kernels::simd::level();
                if level >= $crate::isa::Isa::Avx512 {
                    // SAFETY: the CPU has the four features that `avx512` is compiled for.
                    return unsafe { avx512($($arg),*) };
                }
                if level >= $crate::isa::Isa::Avx2 {
                    // SAFETY: the CPU has the feature that `avx2` is compiled for.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

pub(super) use simd;

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, random};
    use super::super::{activation, cross_entropy, elementwise, optimizer, rms_norm};
    use super::*;
    use half::bf16;
    use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
    use phalanx_strategies::program::Blocks;
    use phalanx_strategies::program::tiles::Tiles;
    use std::sync::atomic::{AtomicU8, Ordering};

    // Lowering it during other tests is harmless, because the level changes no bit of a result.
    static LIMIT: AtomicU8 = AtomicU8::new(u8::MAX);

    /// The widest instruction set that the current test permits.
    pub fn limit() -> Isa {
        match LIMIT.load(Ordering::Relaxed) {
            0 => Isa::Baseline,
            1 => Isa::Avx2,
            _ => Isa::Avx512,
        }
    }

    /// One kernel of each kind: sums over rows, exponentials, roots, narrow storage, ragged lengths.
    fn results() -> Vec<Vec<u8>> {
        let (n, c) = (7, 77);
        let (x, gain) = (random(n * 2 * c, 1), random(c, 2));
        let (mut y, mut rstd) = (vec![bf16::ZERO; n * c], vec![0.0; n]);
        rms_norm::rms_norm(&x[..n * c], &gain, 1e-5, &mut y, &mut rstd);
        let mut act = vec![0.0f32; n * c];
        activation::swiglu(&x, c, &mut act);
        let mut dlogits = x.clone();
        let loss = cross_entropy::cross_entropy_with_gradient(&mut dlogits, &[5; 7], 2 * c, 0.5);
        let mut sum = vec![bf16::ZERO; n * c];
        elementwise::add(&y, &act, &mut sum);
        let (mut p, mut m, mut v) = (x.clone(), x.clone(), vec![0.5; x.len()]);
        let rule = OptimizerSpec::AdamW(AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 });
        let step = optimizer::Step { lr: 0.1, scalars: [0.1, 0.01], grad_scale: 0.7 };
        let whole = optimizer::Whole { tiles: &Tiles::default(), blocks: &Blocks::default(), sums: &[] };
        optimizer::update(&rule, &mut p, &mut [&mut m, &mut v], &dlogits, &whole, &step);
        vec![bits(&y), bits(&rstd), bits(&act), bits(&dlogits), bits(&sum), bits(&p), loss.to_le_bytes().to_vec()]
    }

    #[test]
    fn every_level_computes_the_same_bits() {
        if level() < Isa::Avx512 {
            phalanx_needs::skip(phalanx_needs::Need::Avx512, "this CPU has no AVX-512: narrower levels only");
        }
        let widest = results();
        for limit in [0, 1] {
            LIMIT.store(limit, Ordering::Relaxed);

            let narrower = results();

            LIMIT.store(u8::MAX, Ordering::Relaxed);
            assert_eq!(narrower, widest, "level {limit}");
        }
    }
}
