//! The commit marker: one line, written last, that names the manifest by its hash; or, in its place, the seal of a save that
//! never finishes.

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

/// The line in place of a marker, by which a later world keeps the world that has begun the save from finishing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal {
    /// The generation of the later world.
    pub generation: u64,
}

impl Seal {
    /// The line.
    pub fn encode(self) -> String {
        format!("phalanx-checkpoint sealed generation={}\n", self.generation)
    }

    /// Parses a line, as exactly as [`Commit::decode`].
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let number = text.strip_prefix("phalanx-checkpoint sealed generation=")?.strip_suffix('\n')?;
        let seal = Self { generation: number.parse().ok()? };
        (seal.encode().as_bytes() == bytes).then_some(seal)
    }
}

/// File name of the marker.
pub(super) const COMMIT: &str = "COMMIT";

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
        let seal = Seal { generation: 12 }.encode();
        assert_eq!(
            (Seal::decode(seal.as_bytes()), Commit::decode(seal.as_bytes())),
            (Some(Seal { generation: 12 }), None)
        );
        for changed in ["=012", "=+12", "=12 ", "="] {
            assert_eq!(Seal::decode(seal.replace("=12", changed).as_bytes()), None, "{changed}");
        }
    }
}
