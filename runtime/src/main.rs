//! The `phalanx` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    phalanx::cli::main()
}
