//! How rank processes end.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
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
            Self::Code(code) => return write!(f, "ended with code {code}"),
            Self::Signal(libc::SIGKILL) => " (SIGKILL: killed by somebody, or by the system for want of memory)",
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
        write!(f, "was ended by signal {signal}{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_is_a_clause_that_names_its_code_or_signal() {
        assert_eq!(Ending::Code(3).to_string(), "ended with code 3");
        assert!(Ending::Signal(libc::SIGKILL).to_string().starts_with("was ended by signal 9 (SIGKILL"));
    }
}
