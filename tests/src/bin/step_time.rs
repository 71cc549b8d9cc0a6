//! Times the training step of the benchmark model in a process of its own; prints one JSON line.
//!
//! `step_time f32|bf16 STEPS [--profile]`; compared with PyTorch by `tests/peers/compare_step.py`.

use phalanx_tests::step::BenchStep;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let bf16 = args.get(1).is_some_and(|m| m == "bf16");
    let n_steps: usize = args.get(2).and_then(|n| n.parse().ok()).unwrap_or(12);
    let profile = args.iter().any(|a| a == "--profile");
    phalanx::devices::host().on_device_thread(2, || run(bf16, n_steps, profile)).expect("two threads start");
}

fn run(bf16: bool, n_steps: usize, profile: bool) {
    let mut step = BenchStep::new(bf16);
    let mut times = Vec::new();
    let mut loss = 0.0;
    for _ in 0..n_steps {
        let start = Instant::now();
        loss = step.run();
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    if profile {
        step.print_profile(5);
    }
    let mut timed = times.split_off(2.min(n_steps - 1));
    timed.sort_by(f64::total_cmp);
    println!(
        "{{\"name\": \"phalanx {}\", \"median_ms\": {:.1}, \"min_ms\": {:.1}, \"peak_rss_mib\": {:.1}, \"loss\": {loss:.4}}}",
        if bf16 { "bf16" } else { "f32" },
        timed[timed.len() / 2],
        timed[0],
        phalanx_tests::peak_rss_bytes() as f64 / f64::from(1 << 20),
    );
}
