//! `phalanx --version`: what this program was built from.

use std::fmt::{Display, Formatter, Result};

/// The build of this program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Build {
    /// The commit of its sources. Only the binary knows it: a library that read it would be compiled again after every commit.
    pub(super) commit: Option<&'static str>,
}

/// Cargo features of this crate that change what the program can do, with whether it has them.
const FEATURES: [(&str, bool); 1] = [("dfdx", cfg!(feature = "dfdx"))];

impl Build {
    /// The names of its features.
    pub(super) fn features() -> impl Iterator<Item = &'static str> {
        FEATURES.into_iter().filter_map(|(name, is_there)| is_there.then_some(name))
    }

    /// How it is linked: only a dynamic program can load NVIDIA's libraries.
    const fn linking() -> &'static str {
        if cfg!(target_feature = "crt-static") { "static" } else { "dynamic" }
    }
}

/// One line, such as `0.1.0 (commit 0123456789ab, features dfdx, dynamic)`.
impl Display for Build {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        // As many digits as Git shows of a large repository's.
        let commit = self.commit.map_or("unknown", |commit| commit.get(..12).unwrap_or(commit));
        let features: Vec<&str> = Build::features().collect();
        let features =
            if features.is_empty() { "no features".to_owned() } else { format!("features {}", features.join(" ")) };
        write!(f, "{} (commit {commit}, {features}, {})", env!("CARGO_PKG_VERSION"), Build::linking())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_names_the_commit_in_twelve_digits_or_says_that_it_is_unknown() {
        let of = |commit| Build { commit }.to_string();

        let known = of(Some("0123456789abcdef0123456789abcdef01234567"));
        let unknown = of(None);

        assert!(known.starts_with(&format!("{} (commit 0123456789ab, ", env!("CARGO_PKG_VERSION"))), "{known}");
        assert!(unknown.contains("(commit unknown, "), "{unknown}");
        assert_eq!(known.contains("dfdx"), cfg!(feature = "dfdx"), "{known}");
    }
}
