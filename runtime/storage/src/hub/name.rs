//! Names of repositories of the Hub: `owner/name`, or `name` for the oldest ones.

use std::fmt;

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A model with its tokenizer.
    Model,
    /// A data set.
    Dataset,
}

impl Kind {
    /// The word for it in messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }

    /// The word for several of them, in addresses and names of folders.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

/// A name that the Hub allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoName(String);

impl RepoName {
    /// Reads a name; `None` if the Hub allows no such name.
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let is_part = |part: &&str| {
            (1..=96).contains(&part.len())
                && part.chars().all(is_allowed)
                && !part.starts_with(['-', '.'])
                && !part.ends_with(['-', '.'])
                && !part.contains("--")
                && !part.contains("..")
        };
        (parts.len() <= 2 && parts.iter().all(is_part)).then(|| Self(text.to_owned()))
    }

    /// Its folder in the cache, as `models--owner--name`.
    pub(super) fn folder(&self, kind: Kind) -> String {
        format!("{}--{}", kind.plural(), self.0.replace('/', "--"))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RepoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The branch that is meant where none is named.
pub const MAIN: &str = "main";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_that_leaves_the_cache_is_no_name() {
        for text in ["a/b", "gpt2", "NousResearch/Llama-3.2-1B", "a_b/c.d-e"] {
            assert_eq!(RepoName::parse(text).unwrap().as_str(), text);
        }
        let long = "x".repeat(97);
        for text in ["", "/", "a/", "../a", "a/..", "a/b/c", "a--b/c", "./a", "a/.b", "a b", "a\\b", "é/a", &long] {
            assert_eq!(RepoName::parse(text), None, "{text}");
        }
        assert_eq!(RepoName::parse("a/b").unwrap().folder(Kind::Dataset), "datasets--a--b");
    }
}
