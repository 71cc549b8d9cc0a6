//! The commit marker: one line, written last, that names the manifest by its hash.

/// The content of the marker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The step, as in the manifest.
    pub step: u64,
    /// The generation, as in the manifest.
    pub generation: u64,
    /// How many writers contributed, as in the manifest.
    pub writers: u32,
    /// BLAKE3 of the manifest, in hexadecimal.
    pub manifest_blake3: String,
}

/// Upper bound on the length of the line.
pub const COMMIT_BYTES_MAX: u64 = 4096;

impl Commit {
    /// The line.
    pub fn encode(&self) -> String {
        let Self { step, generation, writers, manifest_blake3 } = self;
        format!("phalanx-checkpoint 1 blake3={manifest_blake3} step={step} generation={generation} writers={writers}\n")
    }

    /// Parses a line; `None` unless it is exactly what [`Commit::encode`] writes, so that any changed bit is detected.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut fields = text.strip_prefix("phalanx-checkpoint 1 ")?.strip_suffix('\n')?.split(' ');
        let mut field = |name: &str| fields.next()?.strip_prefix(name)?.strip_prefix('=');
        let commit = Self {
            manifest_blake3: field("blake3")?.to_owned(),
            step: field("step")?.parse().ok()?,
            generation: field("generation")?.parse().ok()?,
            writers: field("writers")?.parse().ok()?,
        };
        (commit.encode().as_bytes() == bytes).then_some(commit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_line_is_read() {
        let commit = Commit { step: 1200, generation: 7, writers: 1, manifest_blake3: "ab".into() };
        let line = commit.encode();

        assert_eq!(Commit::decode(line.as_bytes()), Some(commit));
        for changed in ["step=01200", "step=+1200", "step=1200 ", "steq=1200", "step="] {
            assert_eq!(Commit::decode(line.replace("step=1200", changed).as_bytes()), None, "{changed}");
        }
        assert_eq!(Commit::decode(line.trim_end().as_bytes()), None);
        assert_eq!(Commit::decode((line + "\n").as_bytes()), None);
    }
}
