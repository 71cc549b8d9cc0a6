//! How rank processes end.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// This signal terminated it.
    Signal(i32),
    /// It has ended, but the system has not released it yet, so how it ended is unknown.
    Unreleased,
    /// There was no process: the system refused to start it.
    NotStarted,
}

impl Ending {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Code(code) => return write!(f, "exited with code {code}"),
            Self::Unreleased => return f.write_str("has ended, although the system has not released it yet"),
            Self::NotStarted => return f.write_str("could not be started"),
            Self::Signal(libc::SIGKILL) => " (SIGKILL: killed by another process or by the out-of-memory killer)",
            Self::Signal(libc::SIGSEGV) => " (SIGSEGV)",
            Self::Signal(libc::SIGBUS) => " (SIGBUS)",
            Self::Signal(libc::SIGABRT) => " (SIGABRT: it panicked or aborted)",
            Self::Signal(libc::SIGTERM) => " (SIGTERM)",
            Self::Signal(libc::SIGINT) => " (SIGINT)",
            Self::Signal(libc::SIGILL) => " (SIGILL)",
            Self::Signal(libc::SIGFPE) => " (SIGFPE)",
            Self::Signal(_) => "",
        };
        let Self::Signal(signal) = self else { return Ok(()) };
        write!(f, "was terminated by signal {signal}{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ending_is_a_clause_with_the_code_or_signal() {
        assert_eq!(Ending::Code(3).to_string(), "exited with code 3");
        assert!(Ending::Signal(libc::SIGKILL).to_string().starts_with("was terminated by signal 9 (SIGKILL"));
    }
}
