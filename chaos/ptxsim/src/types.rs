//! Scalar types and state spaces of PTX.

/// A scalar type: how many bytes, and how they are interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ty {
    Pred,
    Bits(u8),
    Unsigned(u8),
    Signed(u8),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    E4m3x2,
    Tf32,
    F32,
    F32x2,
    F64,
}

impl Ty {
    /// The type of a modifier such as `s32`, without its dot.
    pub(crate) fn parse(word: &str) -> Option<Ty> {
        Some(match word {
            "pred" => Ty::Pred,
            "f16" => Ty::F16,
            "f16x2" => Ty::F16x2,
            "bf16" => Ty::Bf16,
            "bf16x2" => Ty::Bf16x2,
            "e4m3x2" => Ty::E4m3x2,
            "tf32" => Ty::Tf32,
            "f32" => Ty::F32,
            "f32x2" => Ty::F32x2,
            "f64" => Ty::F64,
            _ => {
                let bytes = match word.get(1..)? {
                    "8" => 1,
                    "16" => 2,
                    "32" => 4,
                    "64" => 8,
                    "128" => 16,
                    _ => return None,
                };
                match word.as_bytes()[0] {
                    b'b' => Ty::Bits(bytes),
                    b'u' => Ty::Unsigned(bytes),
                    b's' => Ty::Signed(bytes),
                    _ => return None,
                }
            }
        })
    }

    /// Size in memory; a predicate has none.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Ty::Pred => 0,
            Ty::Bits(n) | Ty::Unsigned(n) | Ty::Signed(n) => usize::from(n),
            Ty::F16 | Ty::Bf16 | Ty::E4m3x2 => 2,
            Ty::F16x2 | Ty::Bf16x2 | Ty::Tf32 | Ty::F32 => 4,
            Ty::F64 | Ty::F32x2 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        !matches!(self, Ty::Pred | Ty::Bits(_) | Ty::Unsigned(_) | Ty::Signed(_))
    }

    pub(crate) fn is_signed(self) -> bool {
        matches!(self, Ty::Signed(_))
    }
}

/// A state space: which memory an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Param,
    Const,
}

impl Space {
    /// The space of a modifier such as `shared::cta`, without its dot. Clusters have one block here, so `shared::cluster` is the
    /// block's own memory.
    pub(crate) fn parse(word: &str) -> Option<Space> {
        Some(match word {
            "global" => Space::Global,
            "shared" | "shared::cta" | "shared::cluster" => Space::Shared,
            "local" => Space::Local,
            "param" | "param::entry" | "param::func" => Space::Param,
            "const" => Space::Const,
            _ => return None,
        })
    }
}

/// The low `bytes` bytes of a register.
pub(crate) const fn mask_of(bytes: usize) -> u64 {
    if bytes >= 8 { u64::MAX } else { (1 << (8 * bytes)) - 1 }
}

/// Sign extension from `bytes` bytes.
pub(crate) const fn sign_extend(value: u64, bytes: usize) -> u64 {
    if bytes >= 8 {
        return value;
    }
    let shift = 64 - 8 * bytes as u32;
    (((value << shift) as i64) >> shift) as u64
}
