//! The `phalanx` binary.
fn main() {}
