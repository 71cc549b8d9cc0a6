//! Types of elements, and their conversions.

/// A `cudaDataType_t` that products know.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Element {
    F32,
    F16,
    Bf16,
    E4m3,
}

impl Element {
    pub fn of(dtype: u32) -> Option<Element> {
        match dtype {
            0 => Some(Element::F32),
            2 => Some(Element::F16),
            14 => Some(Element::Bf16),
            28 => Some(Element::E4m3),
            _ => None,
        }
    }

    pub fn number(self) -> u32 {
        match self {
            Element::F32 => 0,
            Element::F16 => 2,
            Element::Bf16 => 14,
            Element::E4m3 => 28,
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::E4m3 => 1,
        }
    }

    /// The value at an address.
    ///
    /// # Safety
    /// The address is that of an element.
    pub unsafe fn load(self, at: usize) -> f32 {
        // SAFETY: by the caller.
        unsafe {
            match self {
                Element::F32 => *(at as *const f32),
                Element::F16 => f32_of_f16(*(at as *const u16)),
                Element::Bf16 => f32::from_bits(u32::from(*(at as *const u16)) << 16),
                Element::E4m3 => f32_of_e4m3(*(at as *const u8)),
            }
        }
    }

    /// Rounds to nearest, ties to even.
    ///
    /// # Safety
    /// The address is that of an element.
    pub unsafe fn store(self, at: usize, value: f32) {
        // SAFETY: by the caller.
        unsafe {
            match self {
                Element::F32 => *(at as *mut f32) = value,
                Element::F16 => *(at as *mut u16) = f16_of_f32(value),
                Element::Bf16 => *(at as *mut u16) = bf16_of_f32(value),
                Element::E4m3 => unreachable!("no product writes e4m3"),
            }
        }
    }
}

pub fn bf16_of_f32(value: f32) -> u16 {
    let u = value.to_bits();
    if value.is_nan() { 0x7fff } else { ((u + 0x7fff + (u >> 16 & 1)) >> 16) as u16 }
}

pub fn f32_of_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

pub fn f32_of_f16(bits: u16) -> f32 {
    let (sign, exponent, mantissa) =
        (u32::from(bits & 0x8000) << 16, u32::from(bits >> 10 & 31), u32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => return f32::from_bits(sign | (mantissa as f32 * 2f32.powi(-24)).to_bits()),
        31 => 0x7f80_0000 | mantissa << 13,
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

fn f16_of_f32(value: f32) -> u16 {
    let (sign, magnitude) = ((value.to_bits() >> 16 & 0x8000) as u16, value.to_bits() & 0x7fff_ffff);
    if value.is_nan() {
        return 0x7fff;
    }
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // The mantissa counts units of 2^-24.
        return sign | (f32::from_bits(magnitude) * 2f32.powi(24)).round_ties_even() as u16;
    }
    let rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    sign | ((rounded >> 13) - (112 << 10)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_the_way_to_f32_and_back() {
        for bits in 0..=u16::MAX {
            let value = f32_of_f16(bits);
            assert!(value.is_nan() || f16_of_f32(value) == bits, "{bits:#x}");
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        assert_eq!(f16_of_f32(1.0 + 2f32.powi(-11)), 0x3c00);
        assert_eq!(f16_of_f32(1.0 + 3.0 * 2f32.powi(-11)), 0x3c02);
        assert_eq!([65519.0, 65520.0, -1e9].map(f16_of_f32), [0x7bff, 0x7c00, 0xfc00]);
        assert_eq!(bf16_of_f32(1.0 + 2f32.powi(-8)), 0x3f80);
        assert_eq!(bf16_of_f32(f32::NAN), 0x7fff);
    }
}
