//! Overhead of elasticity while nothing fails: `cargo bench -p phalanx --bench elasticity -- ROUNDS STEPS`.
//!
//! Alternates the same job on the same mesh (`dp_replicate_size: 2`, two ranks of one thread each) between threads of this
//! process, without coordinator, supervisor, votes and heartbeats, and elastic rank processes. Shadows are enabled, but a
//! replica needs none. Prints the median step of each and their ratio for every round, and the median ratio with its
//! confidence interval. Not a criterion benchmark, since only alternating runs are comparable on a noisy machine.

use phalanx::{Event, Job, JobError, Runtime, rank_process};
use std::path::Path;

/// Steps at the start of a run, which touch their memory for the first time.
const N_WARM_UP: usize = 4;

fn main() -> anyhow::Result<()> {
    let program = rank_process();
    let args: Vec<usize> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .map(|arg| arg.parse())
        .collect::<Result<_, _>>()?;
    // `cargo bench` of the whole workspace passes no arguments.
    let (n_rounds, n_steps) = (args.first().copied().unwrap_or(2), args.get(1).copied().unwrap_or(10));
    let dir = tempfile::tempdir()?;
    let text: String = (0..6000u64).map(|i| format!("The {}th hoplite holds the line. ", i * i % 977)).collect();
    std::fs::write(dir.path().join("text.txt"), text)?;
    let events = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let runtime = Runtime::new(program)?;
    let run_bare = |round: usize| -> anyhow::Result<f64> {
        let mut steps = Vec::new();
        let job = job(dir.path(), &format!("bare-{round}"), n_steps)?;
        job.run_with(&phalanx::Control::default(), |event| note(event, &mut steps))?;
        Ok(median(&steps[N_WARM_UP..]))
    };
    let run_elastic = |round: usize| -> anyhow::Result<f64> {
        let mut steps = Vec::new();
        events.block_on(async {
            let job = runtime.start(job(dir.path(), &format!("elastic-{round}"), n_steps)?).await?;
            let mut events = job.events();
            while let Some(event) = events.next().await {
                note(&event?, &mut steps);
            }
            job.wait().await?;
            anyhow::Ok(())
        })?;
        Ok(median(&steps[N_WARM_UP..]))
    };
    let mut ratios = Vec::new();
    for round in 0..n_rounds {
        // The order alternates too, since the machine's speed drifts.
        let first_bare = (round % 2 == 0).then(|| run_bare(round)).transpose()?;
        let elastic = run_elastic(round)?;
        let bare = first_bare.map_or_else(|| run_bare(round), Ok)?;
        ratios.push(elastic / bare);
        println!("round {round}: bare {bare:.2} ms, elastic {elastic:.2} ms, ratio {:.4}", elastic / bare);
    }
    let (low, high) = interval(&ratios);
    println!("median ratio {:.4} of {n_rounds} rounds, 95 % interval {low:.4} to {high:.4}", median(&ratios));
    Ok(())
}

fn job(dir: &Path, name: &str, n_steps: usize) -> Result<Job, JobError> {
    let keys = [
        ("model.model_type", "llama"),
        ("model.vocab_size", "512"),
        ("model.hidden_size", "256"),
        ("model.intermediate_size", "704"),
        ("model.num_hidden_layers", "6"),
        ("model.num_attention_heads", "8"),
        ("model.num_key_value_heads", "8"),
        ("model.max_position_embeddings", "128"),
        ("tokenizer", "bytes"),
        ("datasets.0.type", "completion"),
        ("sequence_len", "128"),
        ("micro_batch_size", "2"),
        ("microbatches_per_step", "4"),
        ("learning_rate", "1e-4"),
        ("dp_replicate_size", "2"),
        ("threads", "1"),
        ("bf16", "false"),
        ("save_steps", "none"),
        ("resume_from_checkpoint", "none"),
    ];
    let job = keys.into_iter().fold(Job::builder(), |job, (key, value)| job.set(key, value));
    let job = job.set("datasets.0.path", dir.join("text.txt").display()).set("max_steps", n_steps);
    job.set("output_dir", dir.join(name).display()).build()
}

fn note(event: &Event, steps: &mut Vec<f64>) {
    if let Event::Step(step) = event {
        steps.push(step.step_ms);
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// The 95 % confidence interval of the median, from order statistics: the `k` smallest and largest values lie outside it if `n`
/// fair coins show fewer than `k` heads with a probability of at most 2.5 %. All values, if there are fewer than six.
/// Source: Conover 1999, Practical Nonparametric Statistics, §3.2.
fn interval(values: &[f64]) -> (f64, f64) {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let n = sorted.len();
    let (mut k, mut probability, mut fewer) = (0, 0.5f64.powi(n as i32), 0.0);
    while fewer + probability <= 0.025 {
        fewer += probability;
        probability *= (n - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    let k = k.saturating_sub(1);
    (sorted[k], sorted[n - 1 - k])
}
