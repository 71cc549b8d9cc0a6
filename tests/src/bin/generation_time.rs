//! Times a token of generation after texts of growing length, with the cache of keys and values and without; prints a table.
//!
//! `generation_time MODEL_DIR [ROUNDS]`

use anyhow::{Context, Result};
use phalanx::api::generate::{Generator, with_generator_on};
use phalanx::config::precision::DeviceChoice;
use std::path::PathBuf;
use std::time::Instant;

/// Lengths of the text, the new token included.
const LENGTHS: [usize; 4] = [64, 128, 256, 512];
const THREADS: usize = 2;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let model = PathBuf::from(args.next().context("usage: generation_time MODEL_DIR [ROUNDS]")?);
    let rounds: usize = args.next().map_or(Ok(20), |rounds| rounds.parse())?;
    println!("| tokens | without cache, ms | with cache, ms | ratio |\n|--:|--:|--:|--:|");
    for length in LENGTHS {
        let [without, with] = with_generator_on(DeviceChoice::Cpu, &model, length, Some(THREADS), |g| {
            let ids: Vec<u32> = (0..length as u32).map(|i| i % 100).collect();
            let mut times = [Vec::new(), Vec::new()];
            let timed = |g: &mut Generator, is_cached: bool| {
                let start = Instant::now();
                if is_cached {
                    g.logits(&ids)?
                } else {
                    g.all_logits(&ids)?
                };
                Ok::<f64, phalanx::error::JobError>(start.elapsed().as_secs_f64() * 1e3)
            };
            // The two alternate, so that both see the same other load of the machine. The first round prepares.
            for _ in 0..=rounds {
                times[0].push(timed(g, false)?);
                times[1].push(timed(g, true)?);
            }
            // The fastest round is the one that other work disturbed least.
            Ok(times.map(|times| times[1..].iter().copied().fold(f64::INFINITY, f64::min)))
        })?;
        println!("| {length} | {without:.3} | {with:.3} | {:.0} |", without / with);
    }
    Ok(())
}
