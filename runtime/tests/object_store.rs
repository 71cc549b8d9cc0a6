//! Runs with checkpoints in an object store: a folder as the store, and a stand-in for S3 on loopback.

#[path = "support/s3.rs"]
mod s3;
mod support;

use s3::S3;
use support::{Project, Run};

#[test]
fn run_resumes_from_an_object_store_alone_bit_for_bit() {
    let p = Project::new();
    p.train(&["--output_dir", "straight"]).succeeds();
    let url = format!("file://{}", p.path("store/first run").display());
    let saved = p.train(&["--output_dir", "first", "--checkpoint_dir", &url, "--save_total_limit", "none"]).succeeds();
    assert!(saved.stdout.contains(&format!("{url}/step-0000000010")), "{}", saved.stdout);
    assert_eq!(p.checkpoints("first"), [] as [std::path::PathBuf; 0], "the output folder has no checkpoints");
    std::fs::remove_dir_all(p.path("first")).unwrap();
    // The suffix of the names is the generation of the saving world, which is not fixed.
    for later in std::fs::read_dir(p.path("store/first run")).unwrap().map(|entry| entry.unwrap().path()) {
        let name = later.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("step-0000000015.") || name.starts_with("step-0000000020.") {
            std::fs::remove_dir_all(later).unwrap();
        }
    }

    let resumed = p.train(&["--output_dir", "again", "--checkpoint_dir", &url]).succeeds();

    assert!(resumed.stdout.contains("resuming at step 10"), "{}", resumed.stdout);
    assert_eq!(p.metrics("again"), p.metrics("straight")[10..]);
    assert!(p.model_bytes("again") == p.model_bytes("straight"), "the weights have the same bits");
}

/// Runs `phalanx` with access to the bucket.
fn run(p: &Project, s3: &S3, args: &[&str]) -> Run {
    Run::of(s3.open_to(&mut p.command(args)).output().unwrap())
}

const URL: &str = "s3://bucket/runs/one";

#[test]
fn two_ranks_save_to_s3_and_one_rank_resumes() {
    let (p, s3) = (Project::new(), S3::start());
    p.train(&["--output_dir", "straight", "--reproducible", "true"]).succeeds();
    let train = |out: &str, mesh: &str, accumulation: &str| {
        let args = ["train", "job.yaml", "--output_dir", out, "--checkpoint_dir", URL, "--save_total_limit", "2"];
        let step = ["--dp_shard_size", mesh, "--gradient_accumulation_steps", accumulation, "--reproducible", "true"];
        run(&p, &s3, &[&args[..], &step[..]].concat()).succeeds()
    };

    train("first", "2", "1");
    let kept: Vec<String> = s3.names().into_iter().filter(|name| name.ends_with("/COMMIT")).collect();
    s3.delete(|name| name.contains("step-0000000020"));
    let resumed = train("again", "1", "2");

    assert!(kept.len() == 2 && kept[0].starts_with("runs/one/step-0000000015.g"), "{kept:?}");
    assert!(resumed.stdout.contains("resuming at step 15"), "{}", resumed.stdout);
    assert!(p.model_bytes("again") == p.model_bytes("straight"), "the weights equal those of one rank");
    let inspected = run(&p, &s3, &["inspect", URL, "--json"]).succeeds();
    assert!(inspected.stdout.contains("s3://bucket/runs/one/step-0000000020"), "{}", inspected.stdout);
    run(&p, &s3, &["export", URL, "exported"]).succeeds();
    assert!(p.path("exported/model.safetensors").exists());
}

#[test]
fn unusable_store_is_refused_before_ranks_start() {
    let (p, s3) = (Project::new(), S3::start());
    p.train(&["--checkpoint_dir", "ftp://host/folder"]).refuses(&["ftp://host/folder", "s3://bucket/"]);
    p.train(&["--checkpoint_dir", "s3:///folder"]).refuses(&["s3:///folder", "names no bucket"]);
    p.train(&["--resume_from_checkpoint", "gs:///x"]).refuses(&["gs:///x", "names no bucket"]);

    let args = ["train", "job.yaml", "--checkpoint_dir", URL];
    let refused = Run::of(s3.known_to(&mut p.command(&args), "stranger").output().unwrap());

    refused.refuses(&["cannot read s3://bucket/runs/one", "credentials"]);
    assert!(!p.path("out").exists(), "nothing was written");
}
