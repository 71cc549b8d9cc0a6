//! Times the training step of a benchmark model in a separate process; prints one JSON line.
//!
//! `step_time f32|bf16 STEPS [--shape SHAPE] [--profile] [--write FILE]`; `tests/peers/compare_step.py` compares it with
//! PyTorch, which starts from the weights and the batch in FILE. SHAPE is `small`, `medium` or `WIDTHxLAYERSxVOCABULARYxROWSxTOKENS`.

use phalanx_tests::step::{BenchProgram, BenchStep, shape_named};
use std::path::Path;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let bf16 = args.get(1).is_some_and(|m| m == "bf16");
    let n_steps: usize = args.get(2).and_then(|n| n.parse().ok()).unwrap_or(12);
    let profile = args.iter().any(|a| a == "--profile");
    let after = |option: &str| args.iter().position(|a| a == option).and_then(|i| args.get(i + 1)).map(String::as_str);
    let written = after("--write").map(Path::new);
    let (model, batch) = shape_named(after("--shape").unwrap_or("small"))
        .expect("`small`, `medium`, or five numbers with x between them");
    let start = || BenchProgram::new(model, bf16, batch).allocate();
    phalanx::devices::host()
        .on_device_thread(2, || run(start(), n_steps, profile, written))
        .expect("two threads start");
}

fn run(mut step: BenchStep, n_steps: usize, profile: bool, written: Option<&Path>) {
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
        "{{\"name\": \"phalanx\", \"median_ms\": {:.1}, \"min_ms\": {:.1}, \"losses\": {losses:?}}}",
        timed[timed.len() / 2],
        timed[0],
    );
}
