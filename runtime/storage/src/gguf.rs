//! Files in the GGUF format of llama.cpp: metadata, then tensors in f32, f16, bf16 or blocks of 8-bit integers.
//!
//! Source: ggml-org/ggml, docs/gguf.md, version 3 of the format; blocks as in its `quantize_row_q8_0_ref`.

use crate::hf::error::HfError;
use crate::hf::staging::remove_abandoned;
use half::{bf16, f16};
use phalanx_device::float::Float;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "each variant is named by the type it stands for")]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// How the matrices of a model are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floats.
    Bf16,
    /// Blocks of 32 eight-bit integers with a common factor in half precision.
    Q8_0,
}

impl Encoding {
    /// Its number as the type of a tensor.
    const fn tensor_type(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q8_0 => 8,
            Encoding::Bf16 => 30,
        }
    }

    /// Its number as the type of most tensors of a file, for `general.file_type`.
    pub const fn file_type(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q8_0 => 7,
            Encoding::Bf16 => 32,
        }
    }

    const fn bytes_of(self, n_elements: usize) -> u64 {
        let n = n_elements as u64;
        match self {
            Encoding::F32 => 4 * n,
            Encoding::F16 | Encoding::Bf16 => 2 * n,
            Encoding::Q8_0 => n / BLOCK as u64 * (BLOCK as u64 + 2),
        }
    }

    /// The encoding of a tensor of this shape: only matrices are narrowed, and blocks must fill rows.
    fn of(self, shape: &[usize]) -> Encoding {
        match (shape, self) {
            ([_], _) => Encoding::F32,
            ([.., columns], Encoding::Q8_0) if columns % BLOCK != 0 => Encoding::F16,
            _ => self,
        }
    }
}

/// Elements of a quantised block.
const BLOCK: usize = 32;
/// Tensors begin at multiples of this.
const ALIGNMENT: u64 = 32;
const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;

/// A tensor of a file.
pub struct GgufTensor<'a> {
    /// Its name.
    pub name: String,
    /// Its shape, outermost dim first.
    pub shape: Vec<usize>,
    /// Its values, row-major; called once.
    pub values: Box<dyn Fn() -> Vec<f32> + 'a>,
}

/// Writes a file that appears at `path` complete or not at all.
///
/// # Errors
/// When `path` exists, a value does not fit the encoding, or writing fails.
pub fn write_gguf(
    path: &Path,
    meta: &[(String, Meta)],
    tensors: &[GgufTensor<'_>],
    encoding: Encoding,
) -> Result<(), HfError> {
    let failed = |error: &io::Error| HfError::io("write", path, error);
    if path.symlink_metadata().is_ok() {
        return Err(failed(&io::Error::new(io::ErrorKind::AlreadyExists, "it already exists")));
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| HfError::io("create", folder, &error))?;
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let staged = path.with_file_name(format!(".{name}.writing-{}", std::process::id()));
    remove_abandoned(&staged);
    let written = File::create_new(&staged).and_then(|file| {
        // Held while this process writes. Where the system has no locks of files, nobody takes the file for abandoned.
        let _ = file.try_lock();
        let mut file = BufWriter::with_capacity(1 << 20, file);
        write_all(&mut file, meta, tensors, encoding)?;
        file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        std::fs::rename(&staged, path)
    });
    written.map_err(|error| {
        let _ = std::fs::remove_file(&staged);
        failed(&error)
    })
}

fn write_all(
    file: &mut impl Write,
    meta: &[(String, Meta)],
    tensors: &[GgufTensor<'_>],
    encoding: Encoding,
) -> io::Result<()> {
    let mut header = Vec::new();
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    header.extend_from_slice(&(meta.len() as u64).to_le_bytes());
    for (key, value) in meta {
        text(&mut header, key);
        write_meta(&mut header, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        let encoding = encoding.of(&tensor.shape);
        text(&mut header, &tensor.name);
        header.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            header.extend_from_slice(&(*dim as u64).to_le_bytes());
        }
        header.extend_from_slice(&encoding.tensor_type().to_le_bytes());
        header.extend_from_slice(&offset.to_le_bytes());
        offset += encoding.bytes_of(tensor.shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    file.write_all(&header)?;
    pad(file, header.len() as u64)?;
    for tensor in tensors {
        let values = (tensor.values)();
        let encoded = encode(&values, encoding.of(&tensor.shape)).map_err(|value| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{value} in {} does not fit the type", tensor.name))
        })?;
        file.write_all(&encoded)?;
        pad(file, encoded.len() as u64)?;
    }
    Ok(())
}

fn pad(file: &mut impl Write, written: u64) -> io::Result<()> {
    let n = written.next_multiple_of(ALIGNMENT) - written;
    file.write_all(&[0; ALIGNMENT as usize][..n as usize])
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend_from_slice(&(text.len() as u64).to_le_bytes());
    to.extend_from_slice(text.as_bytes());
}

fn write_meta(to: &mut Vec<u8>, value: &Meta) {
    const ARRAY: u32 = 9;
    let number = |value: &Meta| match value {
        Meta::U32(_) => 4u32,
        Meta::F32(_) | Meta::F32s(_) => 6,
        Meta::Bool(_) => 7,
        Meta::Text(_) | Meta::Texts(_) => 8,
        Meta::I32s(_) => 5,
    };
    let n_items = match value {
        Meta::Texts(items) => Some(items.len()),
        Meta::I32s(items) => Some(items.len()),
        Meta::F32s(items) => Some(items.len()),
        _ => None,
    };
    if let Some(n) = n_items {
        to.extend_from_slice(&ARRAY.to_le_bytes());
        to.extend_from_slice(&number(value).to_le_bytes());
        to.extend_from_slice(&(n as u64).to_le_bytes());
    } else {
        to.extend_from_slice(&number(value).to_le_bytes());
    }
    match value {
        Meta::U32(x) => to.extend_from_slice(&x.to_le_bytes()),
        Meta::F32(x) => to.extend_from_slice(&x.to_le_bytes()),
        Meta::Bool(x) => to.push(u8::from(*x)),
        Meta::Text(x) => text(to, x),
        Meta::Texts(items) => items.iter().for_each(|item| text(to, item)),
        Meta::I32s(items) => items.iter().for_each(|item| to.extend_from_slice(&item.to_le_bytes())),
        Meta::F32s(items) => items.iter().for_each(|item| to.extend_from_slice(&item.to_le_bytes())),
    }
}

/// The bytes of values, or the first one that becomes infinite or is not a number.
fn encode(values: &[f32], encoding: Encoding) -> Result<Vec<u8>, f32> {
    let limit = match encoding {
        Encoding::F32 => f32::INFINITY,
        Encoding::Bf16 => f32::from_bits(0x7f7f_8000),
        Encoding::F16 | Encoding::Q8_0 => 65520.0,
    };
    if let Some(bad) = values.iter().find(|x| x.is_nan() || x.abs() >= limit) {
        return Err(*bad);
    }
    let mut bytes = Vec::with_capacity(encoding.bytes_of(values.len()) as usize);
    match encoding {
        Encoding::F32 => values.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes())),
        Encoding::F16 => values.iter().for_each(|x| bytes.extend_from_slice(&f16::from_f32(*x).to_le_bytes())),
        Encoding::Bf16 => {
            values.iter().for_each(|x| bytes.extend_from_slice(&<bf16 as Float>::from_f32(*x).to_le_bytes()));
        }
        Encoding::Q8_0 => values.chunks(BLOCK).for_each(|block| quantise(block, &mut bytes)),
    }
    Ok(bytes)
}

/// `q = round(x / d)` with `d = max|x| / 127`.
fn quantise(block: &[f32], to: &mut Vec<u8>) {
    let d = block.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    to.extend_from_slice(&f16::from_f32(d).to_le_bytes());
    to.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_eight_bits_are_within_half_a_step_of_the_values() {
        let values: Vec<f32> = (0..64).map(|i| ((i * 37) % 101) as f32 / 10.0 - 5.0).collect();

        let bytes = encode(&values, Encoding::Q8_0).unwrap();

        assert_eq!(bytes.len(), 2 * 34);
        for (block, bytes) in values.chunks(BLOCK).zip(bytes.chunks(34)) {
            let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            for (x, q) in block.iter().zip(&bytes[2..]) {
                assert!((x - d * f32::from(*q as i8)).abs() <= 0.51 * d + 127.0 * d / 1024.0, "{x} {q}");
            }
        }
        assert_eq!(encode(&[0.0; 32], Encoding::Q8_0).unwrap(), [0; 34]);
        assert_eq!(encode(&[1e6], Encoding::F16), Err(1e6));
    }

    #[test]
    fn file_has_its_header_and_aligned_tensors_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let meta = [("general.architecture".to_owned(), Meta::Text("llama".to_owned()))];
        let tensor = |name: &str, shape: &[usize]| GgufTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            values: Box::new({
                let n = shape.iter().product();
                move || vec![1.0; n]
            }),
        };
        let tensors = [tensor("norm", &[3]), tensor("odd", &[2, 5]), tensor("w", &[2, 32])];

        write_gguf(&path, &meta, &tensors, Encoding::Q8_0).unwrap();

        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(&bytes[..8], b"GGUF\x03\0\0\0");
        assert_eq!(&bytes[8..24], [3u64.to_le_bytes(), 1u64.to_le_bytes()].concat());
        // The norm in f32, the odd rows in f16, then blocks.
        assert_eq!(bytes.len() % ALIGNMENT as usize, 0);
        assert_eq!(&bytes[bytes.len() - 96 - 64..][..4], 1f32.to_le_bytes());
        let block = [&f16::from_f32(1.0 / 127.0).to_le_bytes()[..], &[127; 32]].concat();
        assert_eq!(&bytes[bytes.len() - 96..][..34], block);
        assert!(write_gguf(&path, &meta, &tensors, Encoding::F16).unwrap_err().to_string().contains("exists"));
    }
}
