//! Why a template cannot be read or refuses to render.

use std::fmt;

/// A sentence, and the line of the template that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::data) struct Error {
    message: String,
    line: Option<u32>,
}

impl Error {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), line: None }
    }

    /// The same error at `line`, unless it has one already: the innermost line is the exact one.
    #[must_use]
    pub(super) fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{} (template line {line})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}
