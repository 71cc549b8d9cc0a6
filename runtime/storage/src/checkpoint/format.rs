//! What manifests and indexes have in common: version, limits, names and errors.

use thiserror::Error;

/// The format version that is written. Format 1, with one writer and no indexes, is read too.
pub const FORMAT: u32 = 2;

/// How a manifest or an index contradicts itself or exceeds a limit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ManifestError {
    /// Not JSON of this form.
    #[error("{0}")]
    Json(String),
    /// Another version.
    #[error("it has format {0}, but this build reads formats 1 to {FORMAT}")]
    Format(u32),
    /// A field differs from the commit marker, the directory's name or the writer's number.
    #[error("its job, step, generation or writers differ from its COMMIT, its directory or the other parts")]
    Identity,
    /// The manifest or index exceeds a limit.
    #[error("it lists {found} {what}, more than the {max} allowed")]
    TooMany {
        /// The kind of entry.
        what: &'static str,
        /// The number found.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// A name that could be a path, or is too long.
    #[error("{0:?} is not a name of 1 to 128 letters, digits, dots, underscores and hyphens")]
    Name(String),
    /// A writer lists a file of another writer.
    #[error("writer {writer} lists `{file}`, which is not one of its files")]
    Foreign {
        /// The writer.
        writer: u32,
        /// The file.
        file: String,
    },
    /// The hashes of a file are malformed, too few or too many.
    #[error("the hashes of `{0}` do not cover its length")]
    Hashes(String),
    /// A tensor or extra refers to a file that is not listed.
    #[error("`{owner}` refers to `{file}`, which is not listed")]
    NoFile {
        /// Tensor or extra.
        owner: String,
        /// The file.
        file: String,
    },
    /// A box's bytes do not match its shape or lie outside its file.
    #[error("the byte range of a box of `{0}` does not match its shape or its file")]
    Bytes(String),
    /// Writers disagree about a tensor's type or shape.
    #[error("writer {writer} gives `{name}` another type or shape than an earlier writer")]
    Disagreement {
        /// The tensor.
        name: String,
        /// The first writer that differs.
        writer: u32,
    },
    /// Two writers give extras of the same name.
    #[error("`{0}` was written twice")]
    Twice(String),
    /// Boxes leave a hole or overlap.
    #[error("the boxes of `{0}` do not tile its shape")]
    Tiling(String),
    /// A size of the mesh or the number of writers is zero, or a number exceeds its limits.
    #[error("its {0} is out of range")]
    Number(&'static str),
}

/// Whether a name is an id: letters, digits, dots, underscores and hyphens, at most 128, not starting with a dot.
pub fn is_name(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

pub(super) fn check_name(name: &str) -> Result<(), ManifestError> {
    if is_name(name) { Ok(()) } else { Err(ManifestError::Name(name.chars().take(200).collect())) }
}

pub(super) fn limit(what: &'static str, found: usize, max: usize) -> Result<(), ManifestError> {
    if found <= max { Ok(()) } else { Err(ManifestError::TooMany { what, found, max }) }
}

/// Whether this is a BLAKE3 hash in lower-case hexadecimal.
pub(super) fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}
