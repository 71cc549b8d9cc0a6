//! Run-time choice of the vector instructions, so that one binary is fast on every CPU.

/// Defines a function whose body is compiled three times: for AVX-512, for AVX2, and for the baseline of the target. A
/// call picks the widest version that the CPU has.
///
/// The body must be plain loops that vectorise, and whatever it calls must be `#[inline(always)]`: only inlined code is
/// compiled with the wider instructions. `FMA` is not enabled on purpose: without contraction all three versions
/// compute the same bits, and these kernels are bound by memory, not by arithmetic.
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
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the CPU has the four features that `avx512` is compiled for.
                    return unsafe { avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has the feature that `avx2` is compiled for.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

pub(super) use simd;
