//! The operating system.
