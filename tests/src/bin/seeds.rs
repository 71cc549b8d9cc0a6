//! Writes the seeds of all fuzz targets below a folder:
//! `cargo run --release -p phalanx-tests --features decoders --bin seeds -- tests/fuzz/corpus`.

use anyhow::Context;
use clap::Parser;
use phalanx_tests::decoders::TARGETS;
use std::path::PathBuf;

/// Writes seeds for fuzz targets.
#[derive(Parser)]
struct Args {
    /// Folder that gets one folder per target.
    folder: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let Args { folder } = Args::parse();
    for target in TARGETS {
        let dir = folder.join(target.name);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let seeds = (target.seeds)();
        for (number, seed) in seeds.iter().enumerate() {
            let path = dir.join(format!("seed-{number:03}"));
            std::fs::write(&path, seed).with_context(|| format!("cannot write {}", path.display()))?;
        }
        println!("{}: {} seeds", target.name, seeds.len());
    }
    Ok(())
}
