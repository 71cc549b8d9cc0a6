//! Times the training step of the benchmark model in a separate process; prints one JSON line.
//!
//! `step_time f32|bf16 STEPS [--profile] [--write FILE]`; `tests/peers/compare_step.py` compares it with PyTorch, which starts
//! from the weights and the batch in FILE.

use phalanx_tests::step::BenchStep;
use std::path::Path;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let bf16 = args.get(1).is_some_and(|m| m == "bf16");
    let n_steps: usize = args.get(2).and_then(|n| n.parse().ok()).unwrap_or(12);
    let profile = args.iter().any(|a| a == "--profile");
    let written = args.iter().position(|a| a == "--write").and_then(|i| args.get(i + 1)).map(Path::new);
    phalanx::devices::host().on_device_thread(2, || run(bf16, n_steps, profile, written)).expect("two threads start");
}

fn run(bf16: bool, n_steps: usize, profile: bool, written: Option<&Path>) {
    let mut step = BenchStep::new(bf16);
    if let Some(path) = written {
        step.write_start(path).expect("the file can be written");
    }
    let mut times = Vec::new();
    let mut losses = Vec::new();
    for _ in 0..n_steps {
        let start = Instant::now();
        losses.push(step.run());
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    if profile {
        step.print_profile(5);
    }
    let mut timed = times.split_off(2.min(n_steps - 1));
    timed.sort_by(f64::total_cmp);
    println!(
        "{{\"name\": \"phalanx {}\", \"median_ms\": {:.1}, \"min_ms\": {:.1}, \"losses\": {losses:?}}}",
        if bf16 { "bf16" } else { "f32" },
        timed[timed.len() / 2],
        timed[0],
    );
}
