//! Hashes of files, as git and its large file storage make them.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use super::listing::Hash;

/// A hash in the making.
pub(super) struct Hasher(Context);

impl Hasher {
    /// Of the kind of `hash`, for a file of `n_bytes`.
    pub(super) fn new(hash: &Hash, n_bytes: u64) -> Self {
        match hash {
            Hash::Sha256(_) => Self(Context::new(&SHA256)),
            Hash::Git(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {n_bytes}\0").as_bytes());
                Self(context)
            }
        }
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn hex(self) -> String {
        self.0.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // `printf hello | git hash-object --stdin` and `printf hello | sha256sum`
    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        let of = |hash: Hash| {
            let mut hasher = Hasher::new(&hash, 5);
            hasher.update(b"hel");
            hasher.update(b"lo");
            hasher.hex()
        };

        assert_eq!(of(Hash::Git(String::new())), "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0");
        assert_eq!(of(Hash::Sha256(String::new())), "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824");
    }
}
