//! Measures its own memory in a process where nothing else runs. With other arguments it is the `phalanx` command line.
//!
//! `memory_probe measure-step f32|bf16 ROWS`: three steps of the benchmark model.
//! `memory_probe measure-job JOB.yaml`: a whole job. Both print one JSON line.
//! `memory_probe measure-ranks JOB.yaml`: a job with rank processes, until its first checkpoint. Prints the buffer bytes of each
//! rank and the largest sum of their processes' memory (PSS).

use phalanx::{Control, Event, Job, JobError, Runtime};
use phalanx_actors::control::block_on;
use phalanx_strategies::model::BatchShape;
use phalanx_tests::step::{BenchProgram, small_model};
use phalanx_tests::{children_pss_bytes, peak_rss_bytes, rss_bytes};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

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
        ["measure-job", yaml] => code(measure_job(Path::new(yaml)).map_err(Into::into)),
        ["measure-ranks", yaml] => code(measure_ranks(Path::new(yaml))),
        _ => phalanx::cli::main(None),
    }
}

fn code(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_step(bf16: bool, n_rows: usize) {
    let program = BenchProgram::new(small_model(), bf16, BatchShape { n_rows, seq_len: 256 });
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

/// Ranks are processes of this program, and children of this process.
fn measure_ranks(yaml: &Path) -> anyhow::Result<()> {
    let job = Job::from_yaml(yaml)?;
    let checkpoints = job.config().output.output_dir.join("checkpoints");
    let runtime = Runtime::new(phalanx::rank_process())?;
    let running = block_on(runtime.start(job))??;
    let events = running.clone();
    let planned = std::thread::spawn(move || {
        block_on(async {
            let mut events = events.events();
            while let Some(event) = events.next().await {
                if let Ok(Event::Started(started)) = event {
                    return started.buffer_bytes;
                }
            }
            Vec::new()
        })
    });
    // Until the first save: the export after it takes memory that is not planned.
    let is_saved =
        || std::fs::read_dir(&checkpoints).into_iter().flatten().flatten().any(|c| c.path().join("COMMIT").exists());
    let (mut peak, mut n_samples) = (0, 0);
    while running.outcome().is_none() && !is_saved() {
        let of_ranks: u64 = children_pss_bytes().iter().sum();
        if !is_saved() {
            (peak, n_samples) = (peak.max(of_ranks), n_samples + 1);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    block_on(running.wait())??;
    let planned = planned.join().expect("nothing in it panics")?;
    println!("{{\"planned\": {planned:?}, \"peak\": {peak}, \"samples\": {n_samples}}}");
    Ok(())
}

/// `peak`: until the last step; `end`: including the checkpoint and the export after it.
fn print(planned: u64, baseline: u64, peak: u64, end: u64) {
    println!("{{\"planned\": {planned}, \"baseline\": {baseline}, \"peak\": {peak}, \"end\": {end}}}");
}
