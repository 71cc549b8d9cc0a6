//! Measures its own memory, in a process in which nothing else runs; otherwise it is the `phalanx` command line.
//!
//! `memory_probe measure-step f32|bf16 ROWS`: three steps of the benchmark model.
//! `memory_probe measure-job JOB.yaml`: a whole job. Both print one JSON line.

use phalanx::{Control, Event, Job, JobError};
use phalanx_strategies::model::BatchShape;
use phalanx_tests::step::{BenchProgram, bench_model};
use phalanx_tests::{peak_rss_bytes, rss_bytes};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["measure-step", precision, rows] => {
            let n_rows = rows.parse().expect("ROWS is a number");
            phalanx::devices::host()
                .on_device_thread(2, || measure_step(precision == "bf16", n_rows))
                .expect("two threads start");
            ExitCode::SUCCESS
        }
        ["measure-job", yaml] => match measure_job(Path::new(yaml)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
        _ => phalanx::cli::main(),
    }
}

fn measure_step(bf16: bool, n_rows: usize) {
    let program = BenchProgram::new(bench_model(), bf16, BatchShape { n_rows, seq_len: 256 });
    let planned = program.total_bytes();
    let baseline = rss_bytes();
    let mut step = program.allocate();
    (0..3).for_each(|_| assert!(step.run().is_finite(), "the loss is a number"));
    print(planned, baseline, peak_rss_bytes(), peak_rss_bytes());
}

fn measure_job(yaml: &Path) -> Result<(), JobError> {
    let job = Job::from_yaml(yaml)?;
    let baseline = rss_bytes();
    let (mut planned, mut in_steps) = (0, 0);
    job.run_with(&Control::default(), |event| match event {
        Event::Started(started) => planned = started.buffer_bytes.iter().sum(),
        Event::Step(_) => in_steps = peak_rss_bytes(),
        _ => {}
    })?;
    print(planned, baseline, in_steps, peak_rss_bytes());
    Ok(())
}

/// `peak`: until the last step; `end`: with the checkpoint and the export behind it.
fn print(planned: u64, baseline: u64, peak: u64, end: u64) {
    println!("{{\"planned\": {planned}, \"baseline\": {baseline}, \"peak\": {peak}, \"end\": {end}}}");
}
