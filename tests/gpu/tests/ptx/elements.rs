//! Elements of a value as bytes, and back.

use half::{bf16, f16};
use phalanx_device::e4m3;
use phalanx_gpu::case::Operand;
use phalanx_strategies::program::DType;

/// The elements, rounded to their type.
pub fn encode(dtype: DType, elements: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => elements.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
        DType::Bf16 => elements.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        DType::F16 => elements.iter().flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect(),
        DType::F64 => elements.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I32 => elements.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        DType::E4m3 => elements.iter().map(|x| e4m3::encode(*x as f32)).collect(),
    }
}

/// One element.
pub fn decode_one(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(array(bytes))),
        DType::Bf16 => f64::from(bf16::from_le_bytes(array(bytes))),
        DType::F16 => f64::from(f16::from_le_bytes(array(bytes))),
        DType::F64 => f64::from_le_bytes(array(bytes)),
        DType::I32 => f64::from(i32::from_le_bytes(array(bytes))),
        DType::E4m3 => f64::from(e4m3::decode(bytes[0])),
    }
}

/// All elements.
pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(dtype.size_bytes()).map(|bytes| decode_one(dtype, bytes)).collect()
}

/// The bytes of f32 numbers as those of a split weight: the upper halves, one more where the lower half is at least 0x8000, and then
/// the lower halves.
pub fn split(bytes: &[u8]) -> Vec<u8> {
    let halves = |bytes: &[u8]| [[bytes[0], bytes[1]], [bytes[2], bytes[3]]].map(u16::from_le_bytes);
    let pairs = bytes.chunks_exact(4).map(halves);
    let upper = pairs.clone().flat_map(|[low, high]| high.wrapping_add(low >> 15).to_le_bytes());
    upper.chain(pairs.flat_map(|[low, _]| low.to_le_bytes())).collect()
}

/// The opposite of [`split`].
pub fn joined(bytes: &[u8]) -> Vec<u8> {
    let (upper, lower) = bytes.split_at(bytes.len() / 2);
    let pairs = upper.as_chunks::<2>().0.iter().zip(lower.as_chunks::<2>().0);
    let number = |(upper, lower): (&[u8; 2], &[u8; 2])| {
        let (high, low) = (u16::from_le_bytes(*upper), u16::from_le_bytes(*lower));
        u32::from(high.wrapping_sub(low >> 15)) << 16 | u32::from(low)
    };
    pairs.flat_map(|pair| number(pair).to_le_bytes()).collect()
}

/// The nearest number of a type.
pub fn rounded(dtype: DType, x: f64) -> f64 {
    decode_one(dtype, &encode(dtype, &[x]))
}

/// An operand's elements as the kernels see them.
pub fn stored(operand: &Operand) -> Vec<f64> {
    decode(operand.dtype, &encode(operand.dtype, &operand.elements))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes[..N].try_into().expect("an element has the bytes of its type")
}
