//! The header of a safetensors file: eight bytes of length, JSON, then the tensors without gaps.
//!
//! Parsed here rather than by the `safetensors` crate because its errors do not name the tensor, and because
//! checkpoints need a payload that starts at a page boundary. The tests compare reading and writing with the crate.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use thiserror::Error;

use super::dtype::Dtype;

/// The longest header that is read; the limit of the format's reference implementation.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// More dimensions than any tensor of a model has.
const DIMS_MAX: usize = 8;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// Where its bytes start, counted from the start of the file.
    pub start: u64,
    /// How many bytes it has.
    pub len: u64,
}

/// How a header fails to describe its file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// Reading failed, or the file ended early.
    #[error("its header cannot be read: {0}")]
    Io(String),
    /// Shorter than the length field.
    #[error("it has {0} bytes, fewer than the 8 that every safetensors file starts with")]
    TooShort(u64),
    /// The header would exceed the file or the limit.
    #[error("its header claims {declared} bytes, but at most {max} are possible")]
    HeaderLength {
        /// The length field.
        declared: u64,
        /// What the file and the limit allow.
        max: u64,
    },
    /// The header is not JSON of this form.
    #[error("its header is not valid: {0}")]
    Json(String),
    /// An unknown type.
    #[error("tensor `{tensor}` has the type {dtype}, which is not read; store it as F32, F16 or BF16")]
    UnknownType {
        /// The tensor.
        tensor: String,
        /// The type as written.
        dtype: String,
    },
    /// Shape and type do not give the length of the byte range.
    #[error("tensor `{tensor}` of type {} and shape {shape:?} does not fill the bytes {start}..{end}", dtype.name())]
    Extent {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<usize>,
        /// First byte of the payload.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
    /// Byte ranges overlap or leave a hole.
    #[error("tensor `{tensor}` starts at byte {found} of the payload, but the one before it ends at {expected}")]
    Gap {
        /// The tensor.
        tensor: String,
        /// Where it should start.
        expected: u64,
        /// Where it starts.
        found: u64,
    },
    /// The file ends before or after its tensors.
    #[error("it has {found} bytes, but its header describes {expected}")]
    FileLength {
        /// Bytes that header and tensors take.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
}

/// The content of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes.
    pub entries: Vec<Entry>,
    /// Where the bytes of the first one start in the file.
    pub payload_start: u64,
    /// BLAKE3 of the payload, in hexadecimal, if the metadata has it: only our own exports do.
    pub payload_blake3: Option<String>,
    /// Hash of the length field and the header.
    pub blake3: blake3::Hash,
}

/// Reads and checks the header of a file of `file_len` bytes; `read` fills a buffer with the bytes from an offset on.
///
/// # Errors
/// When the header is not valid or does not describe exactly the bytes of the file.
pub fn read_header(read: impl Fn(&mut [u8], u64) -> std::io::Result<()>, file_len: u64) -> Result<Header, LayoutError> {
    let io = |error: std::io::Error| LayoutError::Io(error.to_string());
    if file_len < 8 {
        return Err(LayoutError::TooShort(file_len));
    }
    let mut length = [0; 8];
    read(&mut length, 0).map_err(io)?;
    let declared = u64::from_le_bytes(length);
    let max = (file_len - 8).min(HEADER_BYTES_MAX);
    if declared > max {
        return Err(LayoutError::HeaderLength { declared, max });
    }
    let mut json = vec![0; declared as usize];
    read(&mut json, 8).map_err(io)?;
    let blake3 = blake3::Hasher::new().update(&length).update(&json).finalize();
    let raw: RawHeader = serde_json::from_slice(&json).map_err(|error| LayoutError::Json(error.to_string()))?;
    let payload_blake3 = raw.1.as_ref().and_then(|m| m.get(PAYLOAD_HASH)?.as_str().map(str::to_owned));
    let payload_start = 8 + declared;
    Ok(Header { entries: check_entries(raw, payload_start, file_len)?, payload_start, payload_blake3, blake3 })
}

fn check_entries(raw: RawHeader, payload_start: u64, file_len: u64) -> Result<Vec<Entry>, LayoutError> {
    let mut entries = Vec::with_capacity(raw.0.len());
    for (tensor, raw) in raw.0 {
        let RawEntry { dtype, shape, data_offsets: (start, end) } = raw;
        let Some(dtype) = Dtype::from_name(&dtype) else {
            return Err(LayoutError::UnknownType { tensor, dtype });
        };
        if shape.len() > DIMS_MAX || dtype.bytes_of(&shape).is_none_or(|bytes| start.checked_add(bytes) != Some(end)) {
            return Err(LayoutError::Extent { tensor, dtype, shape, start, end });
        }
        entries.push(Entry { name: tensor, dtype, shape, start, len: end - start });
    }
    entries.sort_by_key(|entry| (entry.start, entry.len));
    let mut expected = 0;
    for entry in &entries {
        if entry.start != expected {
            return Err(LayoutError::Gap { tensor: entry.name.clone(), expected, found: entry.start });
        }
        expected += entry.len;
    }
    match payload_start.checked_add(expected) {
        Some(described) if described == file_len => {}
        described => {
            return Err(LayoutError::FileLength { expected: described.unwrap_or(u64::MAX), found: file_len });
        }
    }
    // All tensors end within the file, so the sums fit in 64 bits.
    entries.iter_mut().for_each(|entry| entry.start += payload_start);
    Ok(entries)
}

/// Encodes the first bytes of a file whose tensors follow in this order without gaps: length field and header, padded with
/// spaces so that the payload starts at a multiple of `align`.
///
/// # Panics
/// When `align` is not a power of two of at least 8, a tensor exceeds 64 bits of bytes, or two names are equal: all are
/// faults of the caller.
pub fn encode_header(tensors: &[(&str, Dtype, &[usize])], metadata: &BTreeMap<&str, &str>, align: usize) -> Vec<u8> {
    assert!(align.is_power_of_two() && align >= 8, "alignment {align} is not a power of two of at least 8");
    let mut header = serde_json::Map::with_capacity(tensors.len() + 1);
    header.insert("__metadata__".into(), serde_json::json!(metadata));
    let mut start = 0u64;
    for (name, dtype, shape) in tensors {
        let bytes = dtype.bytes_of(shape).expect("a tensor in memory has fewer than 2^64 bytes");
        let end = start.checked_add(bytes).expect("tensors in memory have fewer than 2^64 bytes together");
        let described = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [start, end]});
        assert!(header.insert((*name).into(), described).is_none(), "two tensors are named `{name}`");
        start = end;
    }
    let mut json = serde_json::Value::Object(header).to_string().into_bytes();
    json.resize((8 + json.len()).next_multiple_of(align) - 8, b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    bytes
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Tensors in the order written; a map would hide duplicate names.
struct RawHeader(Vec<(String, RawEntry)>, Option<serde_json::Value>);

/// Key of the metadata under which our exports keep the hash of the payload.
pub const PAYLOAD_HASH: &str = "blake3";

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = RawHeader;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let (mut pairs, mut metadata) = (Vec::new(), None);
                let mut names = std::collections::HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format_args!("`{name}` is described twice")));
                    }
                    if name == "__metadata__" {
                        metadata = Some(map.next_value()?);
                    } else {
                        pairs.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(pairs, metadata))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}
