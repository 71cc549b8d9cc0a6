//! The `phalanx` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The process is the unit of failure: a panic on any thread ends all of it, so that no rank survives in part.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    phalanx::cli::main()
}
