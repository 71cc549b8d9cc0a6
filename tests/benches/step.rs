//! The whole training step of the benchmark model, f32 and bf16: `cargo bench -p phalanx-tests --bench step`.

use criterion::Criterion;
use phalanx_tests::step::BenchStep;

fn main() {
    // On the device thread, where steps run in production.
    phalanx::devices::host()
        .on_device_thread(2, || {
            let mut criterion = Criterion::default().sample_size(10).configure_from_args();
            for (name, bf16) in [("step/f32", false), ("step/bf16", true)] {
                let mut step = BenchStep::new(bf16);
                criterion.bench_function(name, |b| b.iter(|| step.run()));
            }
            criterion.final_summary();
        })
        .expect("two threads start");
}
