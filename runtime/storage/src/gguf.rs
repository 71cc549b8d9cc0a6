//! Files in the GGUF format of llama.cpp: metadata, then tensors in f32, f16, bf16 or blocks of integers.
//!
//! `mixture` says which tensor has which type, `tensor_type` what the types are; `affine` and `symmetric` find the integers of
//! their blocks, with what `fit` has for both.
//!
//! Source: ggml-org/ggml, docs/gguf.md, version 3 of the format.

mod affine;
mod fit;
mod mixture;
mod symmetric;
mod tensor_type;
#[cfg(test)]
mod tests;

use self::mixture::Mixture;
use crate::hf::error::HfError;
use crate::hf::staging::remove_abandoned;
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
    /// llama.cpp's mixture `Q4_K_M`: 4 bits and factors of groups, 6 bits for the tensors that need them most.
    Q4Km,
    /// llama.cpp's mixture `Q5_K_M`: the same with 5 bits.
    Q5Km,
}

impl Encoding {
    /// Its number as the type of most tensors of a file, for `general.file_type`.
    pub const fn file_type(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q8_0 => 7,
            Encoding::Q4Km => 15,
            Encoding::Q5Km => 17,
            Encoding::Bf16 => 32,
        }
    }
}

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
    let mixture = Mixture::of(encoding, tensors);
    for tensor in tensors {
        let kind = mixture.type_of(&tensor.name, &tensor.shape);
        text(&mut header, &tensor.name);
        header.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
        for dim in tensor.shape.iter().rev() {
            header.extend_from_slice(&(*dim as u64).to_le_bytes());
        }
        header.extend_from_slice(&kind.number().to_le_bytes());
        header.extend_from_slice(&offset.to_le_bytes());
        offset += kind.bytes_of(tensor.shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    file.write_all(&header)?;
    pad(file, header.len() as u64)?;
    for tensor in tensors {
        let values = (tensor.values)();
        let encoded = mixture.type_of(&tensor.name, &tensor.shape).encode(&values).map_err(|value| {
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
