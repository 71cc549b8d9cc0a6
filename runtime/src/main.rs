//! The `phalanx` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Whoever builds a release names the commit: see `runtime/packaging/build`.
    phalanx::cli::main(option_env!("PHALANX_COMMIT"))
}
