//! A running job changes its mesh repeatedly, in any combination: no step is lost, and its losses equal those of an
//! undisturbed job.

use crate::support::Project;
use crate::support::job::{Job as Nodes, UNENDING, equals_undisturbed_run, signal, until};
use phalanx::config::JobConfig;
use phalanx::{Job, RankProgram, RequestError, Resize, RunningJob, Runtime};
use phalanx_strategies::mesh::Mesh;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Long enough for every change; jobs are stopped after the last one.
const JOB: [&str; 12] = [
    "--max_steps",
    "1000000",
    "--save_steps",
    "none",
    "--gradient_accumulation_steps",
    "1",
    "--microbatches_per_step",
    "4",
    // Small, since the drift of sums in another order grows with it and with the number of steps.
    "--learning_rate",
    "1e-4",
    "--elastic.spare_ranks",
    "0",
];
/// Least number of steps in each mesh.
const STEPS: u64 = 5;
/// As in `ranks`, for sums in another order.
const LOSS_TOLERANCE: f64 = 2e-5;
/// Steps within which [`LOSS_TOLERANCE`] holds. Differences grow with the number of steps, which is larger on a fast machine.
const LOSS_TOLERANCE_STEPS: f64 = 500.0;

fn start_of(p: &Project, overrides: &[&str]) -> Job {
    let all = [&JOB[..], overrides].concat();
    let keys = all.chunks(2).map(|pair| (pair[0].trim_start_matches('-').into(), pair[1].into()));
    let keys: Vec<(String, String)> = keys.collect();
    Job::from_config(JobConfig::load(&p.path("job.yaml"), &keys).unwrap())
}

async fn start(p: &Project, overrides: &[&str]) -> (Runtime, RunningJob) {
    let runtime = Runtime::new(RankProgram::at(env!("CARGO_BIN_EXE_phalanx"))).unwrap();
    let job = runtime.start(start_of(p, overrides)).await.unwrap();
    (runtime, job)
}

fn resize(mesh: Mesh) -> Resize {
    Resize {
        dp_replicate_size: Some(mesh.dp_replicate),
        dp_shard_size: Some(mesh.dp_shard),
        tensor_parallel_size: Some(mesh.tp),
        context_parallel_size: Some(mesh.cp),
        pipeline_parallel_size: Some(mesh.pp),
    }
}

/// Waits until the job has done [`STEPS`] steps in this mesh, and returns the last one.
async fn steps_in(job: &RunningJob, mesh: Mesh) -> u64 {
    let mut first = None;
    let poll = async {
        loop {
            if let Ok(status) = job.status().await
                && status.mesh == Some(mesh)
                && status.blocked.is_none()
            {
                let entered = status.nodes.iter().flat_map(|node| &node.ranks).map(|worker| worker.entered.0).max();
                let now = entered.unwrap_or_default();
                if now >= *first.get_or_insert(now) + STEPS {
                    return now;
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, poll).await.unwrap_or_else(|_| panic!("timeout while waiting for {mesh}"))
}

/// Starts in the first mesh, changes to the others, and stops; returns the metrics of each step as bits.
async fn through(p: &Project, out: &str, overrides: &[&str], chain: &[Mesh]) -> Vec<(u64, u64, u64)> {
    let first = chain[0];
    let sizes = [first.dp_replicate, first.dp_shard, first.tp, first.cp, first.pp].map(|n| n.to_string());
    let out_dir = p.path(out).display().to_string();
    let mesh: [&str; 12] = [
        "--dp_replicate_size",
        &sizes[0],
        "--dp_shard_size",
        &sizes[1],
        "--tensor_parallel_size",
        &sizes[2],
        "--context_parallel_size",
        &sizes[3],
        "--pipeline_parallel_size",
        &sizes[4],
        "--output_dir",
        &out_dir,
    ];
    let (_runtime, job) = start(p, &[overrides, &mesh].concat()).await;
    for (i, mesh) in chain.iter().enumerate() {
        if i > 0 {
            job.resize(resize(*mesh)).await.unwrap_or_else(|error| panic!("{mesh}: {error}"));
        }
        steps_in(&job, *mesh).await;
    }
    stop(&job).await;
    p.metrics(out)
}

async fn stop(job: &RunningJob) {
    job.stop();
    timeout(PATIENCE, job.wait()).await.expect("the job ends in time").unwrap();
}

/// Trains `n_steps` steps or more in one mesh, and returns the metrics of the first `n_steps`.
async fn undisturbed(p: &Project, overrides: &[&str], n_steps: usize) -> Vec<(u64, u64, u64)> {
    let out_dir = p.path("alone").display().to_string();
    let (_runtime, job) = start(p, &[overrides, &["--output_dir", &out_dir, "--dp_shard_size", "2"]].concat()).await;
    let enough = async {
        while std::fs::read_to_string(p.path("alone/metrics.jsonl")).map_or(0, |text| text.lines().count()) < n_steps {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, enough).await.expect("the steps are done in time");
    stop(&job).await;
    let mut metrics = p.metrics("alone");
    metrics.truncate(n_steps);
    metrics
}

const SHARDS: Mesh = Mesh { dp_shard: 4, ..Mesh::ONE };

#[tokio::test]
async fn job_resized_along_every_axis_has_the_losses_of_an_undisturbed_job() {
    let p = Project::new();
    let chain = [
        SHARDS,
        Mesh { tp: 2, dp_shard: 2, ..Mesh::ONE },
        Mesh { pp: 2, tp: 2, ..Mesh::ONE },
        Mesh { cp: 2, dp_shard: 2, ..Mesh::ONE },
        Mesh { tp: 4, ..Mesh::ONE },
        Mesh { dp_replicate: 2, pp: 2, ..Mesh::ONE },
        Mesh { tp: 2, ..Mesh::ONE },
        SHARDS,
    ];

    let metrics = through(&p, "out", &[], &chain).await;
    let alone = undisturbed(&p, &[], metrics.len()).await;

    let steps: Vec<u64> = metrics.iter().map(|(step, ..)| *step).collect();
    assert_eq!(steps, (1..=metrics.len() as u64).collect::<Vec<_>>(), "every step is reported exactly once");
    let losses = |of: &[(u64, u64, u64)]| -> Vec<f64> { of.iter().map(|(_, loss, _)| f64::from_bits(*loss)).collect() };
    let (losses, expected) = (losses(&metrics), losses(&alone));
    // Relative to the tolerance at the step.
    let excess = |(i, (a, b)): (usize, (&f64, &f64))| {
        (a - b).abs() / (LOSS_TOLERANCE * (i as f64 / LOSS_TOLERANCE_STEPS).max(1.0))
    };
    let worst = losses.iter().zip(&expected).enumerate().map(excess).fold(0.0, f64::max);
    println!("{} steps, the losses differ by {worst} of the tolerance", losses.len());
    assert!(losses.len() == expected.len() && worst <= 1.0, "{worst}: {losses:?}\n{expected:?}");
}

#[tokio::test]
async fn changing_stages_replicas_and_shards_changes_no_bit() {
    let p = Project::new();
    p.write("job.yaml", &crate::support::YAML.replace("  max_position", "  tie_word_embeddings: true\n  max_position"));
    let exact = ["--reproducible", "true"];
    let chain = [
        SHARDS,
        Mesh { pp: 2, dp_shard: 2, ..Mesh::ONE },
        Mesh { dp_replicate: 2, pp: 2, ..Mesh::ONE },
        Mesh { dp_shard: 3, ..Mesh::ONE },
        Mesh { pp: 2, ..Mesh::ONE },
        Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE },
    ];

    let metrics = through(&p, "out", &exact, &chain).await;
    let alone = undisturbed(&p, &exact, metrics.len()).await;

    assert_eq!(metrics, alone);
}

#[tokio::test]
async fn resize_to_a_mesh_that_does_not_fit_is_refused_without_side_effects() {
    let p = Project::new();
    let (_runtime, job) = start(&p, &["--dp_shard_size", "2"]).await;
    steps_in(&job, Mesh { dp_shard: 2, ..Mesh::ONE }).await;
    let before = job.status().await.unwrap();

    let cli = |args: &[&str], parts: &[&str]| {
        p.run(&[&["resize", "job.yaml"], args].concat()).refuses(parts);
    };
    cli(&["--tensor_parallel_size", "3"], &["4 attention heads", "1, 2, 4"]);
    cli(&["--pipeline_parallel_size", "3"], &["2 blocks", "at most 2"]);
    cli(&["--cp_size", "3"], &["32 tokens", "30 would fit"]);
    cli(&["--tp_size", "0"], &["tp 0", "at least one rank"]);
    cli(&["--pp_size", "18446744073709551615"], &["at most 4096"]);
    cli(&["--tp_size", "2"], &["has 4 ranks", "2 rank processes"]);
    cli(&["--dp_shard_size", "1", "--dp_replicate_size", "0"], &["dp_replicate 0"]);
    let from_host = job.resize(Resize { tensor_parallel_size: Some(8), ..Resize::default() }).await;

    assert!(matches!(from_host, Err(RequestError::Refused(why)) if why.contains("4 attention heads")));
    let after = job.status().await.unwrap();
    assert_eq!((after.wanted, after.generation), (before.wanted, before.generation));
    stop(&job).await;
}

/// Waits until the job over several nodes has done steps in this mesh.
fn until_mesh(job: &Nodes<'_>, axis: &str, size: u64) {
    until("the mesh", || {
        let status = job.p.run(&["status", "out", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&status.stdout).ok()?;
        (status["mesh"][axis] == size && status["activity"] == "running").then_some(())
    });
    job.until_step(job.n_steps() + 3);
}

#[test]
fn nodes_become_stages_and_replicas_and_a_rank_that_dies_meanwhile_leaves_the_weights_unchanged() {
    let p = Project::new();
    let job = Nodes::start_with(&p, 2, &UNENDING);
    job.until_step(10);

    p.run(&["resize", "out", "--pipeline_parallel_size", "3"]).refuses(&["2 blocks", "at most 2"]);
    p.run(&["resize", "out", "--pipeline_parallel_size", "2", "--dp_shard_size", "1"]).succeeds();
    until_mesh(&job, "pp", 2);
    signal(job.ranks(0)[0], libc::SIGKILL);
    p.run(&["resize", "out", "--pipeline_parallel_size", "1", "--dp_replicate_size", "2"]).succeeds();
    until_mesh(&job, "dp_replicate", 2);

    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "1"]);
}
