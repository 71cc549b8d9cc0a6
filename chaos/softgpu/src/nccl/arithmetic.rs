//! Element types and reductions.

/// An `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl DType {
    /// The type of this number, except the 8-bit floats, which are not imitated.
    pub fn of(number: i32) -> Option<DType> {
        use DType::{Bf16, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16].get(usize::try_from(number).ok()?).copied()
    }

    pub fn bytes(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::Bf16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 => 8,
        }
    }
}

/// A built-in `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

impl Reduction {
    /// The reduction of this number.
    pub fn of(number: i32) -> Option<Reduction> {
        use Reduction::{Avg, Max, Min, Prod, Sum};
        [Sum, Prod, Max, Min, Avg].get(usize::try_from(number).ok()?).copied()
    }
}

/// A type in which elements are combined.
trait Number: Copy {
    fn combine(self, other: Self, how: Reduction) -> Self;
    fn divide(self, n: usize) -> Self;
}

macro_rules! float {
    ($($t:ty),*) => { $(impl Number for $t {
        fn combine(self, other: Self, how: Reduction) -> Self {
            match how {
                Reduction::Sum | Reduction::Avg => self + other,
                Reduction::Prod => self * other,
                Reduction::Max => self.max(other),
                Reduction::Min => self.min(other),
            }
        }
        fn divide(self, n: usize) -> Self {
            self / n as $t
        }
    })* };
}
float!(f32, f64);

macro_rules! integer {
    ($($t:ty),*) => { $(impl Number for $t {
        fn combine(self, other: Self, how: Reduction) -> Self {
            match how {
                Reduction::Sum | Reduction::Avg => self.wrapping_add(other),
                Reduction::Prod => self.wrapping_mul(other),
                Reduction::Max => self.max(other),
                Reduction::Min => self.min(other),
            }
        }
        fn divide(self, n: usize) -> Self {
            self / n as $t
        }
    })* };
}
integer!(i8, u8, i32, u32, i64, u64);

/// Combines `n` elements of all sources, in order.
///
/// # Safety
/// The sources can be read and `to` can be written for `n` elements; they do not overlap.
pub unsafe fn reduce(dtype: DType, how: Reduction, sources: &[*const u8], to: *mut u8, n: usize) {
    // SAFETY: the caller's contract; the width of each type is that of `dtype`.
    unsafe {
        match dtype {
            DType::I8 => each::<i8, i8>(how, sources, to, n, |x| x, |x| x),
            DType::U8 => each::<u8, u8>(how, sources, to, n, |x| x, |x| x),
            DType::I32 => each::<i32, i32>(how, sources, to, n, |x| x, |x| x),
            DType::U32 => each::<u32, u32>(how, sources, to, n, |x| x, |x| x),
            DType::I64 => each::<i64, i64>(how, sources, to, n, |x| x, |x| x),
            DType::U64 => each::<u64, u64>(how, sources, to, n, |x| x, |x| x),
            DType::F32 => each::<f32, f32>(how, sources, to, n, |x| x, |x| x),
            DType::F64 => each::<f64, f64>(how, sources, to, n, |x| x, |x| x),
            DType::F16 => each::<u16, f32>(how, sources, to, n, from_f16, to_f16),
            DType::Bf16 => each::<u16, f32>(how, sources, to, n, from_bf16, to_bf16),
        }
    }
}

/// # Safety
/// As [`reduce`], for elements of `S`.
unsafe fn each<S: Copy, W: Number>(
    how: Reduction,
    sources: &[*const u8],
    to: *mut u8,
    n: usize,
    widen: impl Fn(S) -> W,
    narrow: impl Fn(W) -> S,
) {
    for i in 0..n {
        // SAFETY: the caller's contract.
        let element = |source: &*const u8| widen(unsafe { source.cast::<S>().add(i).read_unaligned() });
        let first = element(&sources[0]);
        let total = sources[1..].iter().fold(first, |total, source| total.combine(element(source), how));
        let total = if how == Reduction::Avg { total.divide(sources.len()) } else { total };
        // SAFETY: the caller's contract.
        unsafe { to.cast::<S>().add(i).write_unaligned(narrow(total)) };
    }
}

fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn from_f16(x: u16) -> f32 {
    let (sign, exponent, fraction) = (u32::from(x >> 15) << 31, u32::from(x >> 10) & 31, u32::from(x) & 0x3ff);
    match exponent {
        0 => {
            let magnitude = fraction as f32 * 2f32.powi(-24);
            f32::from_bits(magnitude.to_bits() | sign)
        }
        31 => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
    }
}

/// Rounds to the nearest, ties to even.
fn to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, magnitude) = ((bits >> 16) as u16 & 0x8000, bits & 0x7fff_ffff);
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | ((magnitude >> 13) as u16 & 0x3ff);
    }
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00; // 65520 and above rounds to infinity.
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: a multiple of 2^-24. The addition rounds, since 0.5 has that unit in its last place.
        let rounded = f32::from_bits(magnitude) + 0.5;
        return sign | (rounded.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let odd = (magnitude >> 13) & 1;
    let rounded = magnitude - (112 << 23) + 0xfff + odd;
    sign | (rounded >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_narrow_float_survives_widening() {
        for x in 0..=u16::MAX {
            let (half, brain) = (from_f16(x), from_bf16(x));

            assert!(half.is_nan() || to_f16(half) == x, "{x:#x}");
            assert!(brain.is_nan() || to_bf16(brain) == x, "{x:#x}");
            assert!(!half.is_nan() || from_f16(to_f16(half)).is_nan());
            assert!(!brain.is_nan() || from_bf16(to_bf16(brain)).is_nan());
        }
    }

    #[test]
    fn value_halfway_between_two_halves_rounds_to_the_even_one() {
        for x in 0..0x7bff_u16 {
            let middle = ((f64::from(from_f16(x)) + f64::from(from_f16(x + 1))) / 2.0) as f32;

            assert_eq!(to_f16(middle), if x % 2 == 0 { x } else { x + 1 }, "{x:#x}");
        }
        assert_eq!([to_f16(65519.9), to_f16(65520.0)], [0x7bff, 0x7c00]);
    }

    #[test]
    fn narrow_sum_is_rounded_once_and_average_divides_it() {
        // 256 + 1 is not a bf16 value, 256 + 1 + 1 is.
        let sources = [256.0f32, 1.0, 1.0].map(to_bf16);
        let pointers = [0, 1, 2].map(|i: usize| (&raw const sources[i]).cast::<u8>());
        let (mut sum, mut mean) = (0u16, 0u16);

        // SAFETY: one element each.
        unsafe { reduce(DType::Bf16, Reduction::Sum, &pointers, (&raw mut sum).cast(), 1) };
        // SAFETY: as above.
        unsafe { reduce(DType::Bf16, Reduction::Avg, &pointers, (&raw mut mean).cast(), 1) };

        assert_eq!([from_bf16(sum), from_bf16(mean)], [258.0, 86.0]);
    }
}
