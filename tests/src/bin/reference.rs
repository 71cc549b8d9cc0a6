//! Compares Phalanx with PyTorch's committed numbers on a device of this machine.
//!
//! `cargo run --release -p phalanx-tests --bin reference -- --device cuda`

use anyhow::Result;
use clap::Parser;
use clap::builder::PossibleValuesParser;
use phalanx::config::precision::DeviceChoice;
use phalanx_tests::reference::checks::Check;

/// Compares Phalanx with PyTorch's committed numbers. Prints the distances, and a digest of the results of each run.
#[derive(Parser)]
struct Args {
    /// The device.
    #[arg(long, value_parser = PossibleValuesParser::new(["cpu", "cuda"]), default_value = "cpu")]
    device: String,
    /// The checks; by default all.
    #[arg(value_parser = PossibleValuesParser::new(Check::ALL.map(Check::name)))]
    checks: Vec<String>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let device = if args.device == "cuda" { DeviceChoice::Cuda } else { DeviceChoice::Cpu };
    let wanted = |check: &Check| args.checks.is_empty() || args.checks.iter().any(|name| name == check.name());
    for check in Check::ALL.into_iter().filter(wanted) {
        for (run, digest) in check.run(device)? {
            println!("digest {run} {digest}");
        }
    }
    Ok(())
}
