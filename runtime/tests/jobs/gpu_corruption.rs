//! Silent corruption of GPU ranks, on the software GPU: a flipped bit in device memory is found by the fingerprints of copies, the rank
//! is named, and the job ends with the weights of an undisturbed run.

use crate::support::{Project, Run};
use phalanx_softgpu::Installation;
use serde_json::Value;
use std::sync::Mutex;

/// Copies are compared after every fourth step.
const JOB: [&str; 14] = [
    "--device",
    "cuda",
    "--max_steps",
    "12",
    "--save_steps",
    "none",
    "--elastic.verify_steps",
    "4",
    "--gradient_accumulation_steps",
    "3",
    "--sequence_len",
    "16",
    // No rank is lost because other programs take the cores for some seconds.
    "--elastic.detection_time",
    "30",
];
/// One test at a time: ranks on software GPUs need all cores of a small machine.
static ALONE: Mutex<()> = Mutex::new(());

/// A run with this plan of flips, and its incidents: why, the slot that is named, and details.
///
/// # Panics
/// If the run had an incident that flips do not cause.
#[track_caller]
fn train(p: &Project, mesh: &[&str], flips: &str) -> (Run, Vec<(String, Option<u64>, String)>) {
    let gpu = Installation::new().expect("the software GPU is built with the tests");
    let _ = std::fs::remove_dir_all(p.path("out"));
    let mut command = p.command(&[&["train", "job.yaml"], &JOB[..], mesh].concat());
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("XDG_CACHE_HOME", p.path("cache"));
    command.env("SOFTGPU_DEVICES", "4").env("PHALANX_FLIP_BITS", flips);
    let run = Run::of(command.output().expect("the binary is built"));
    let text = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let incidents = lines.filter(|line| line["why"].is_string() && line["why"] != "Started").map(|line| {
        let slot = line["worker"]["member"]["slot"].as_u64();
        (line["why"].as_str().unwrap().to_owned(), slot, line["detail"].to_string())
    });
    let incidents: Vec<_> = incidents.collect();
    assert!(incidents.iter().all(|(why, ..)| why == "Corrupted"), "{flips}: another incident: {incidents:?}");
    (run, incidents)
}

/// Trains undisturbed, then with each flip: it is found, `slot` is named, and the weights are equal.
#[track_caller]
fn is_found(mesh: &[&str], slot: u64, flips: &[&str]) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let p = Project::new();
    let (run, incidents) = train(&p, mesh, "");
    assert_eq!((run.code, incidents), (Some(0), Vec::new()), "no false alarm: {}", run.stderr);
    let undisturbed = p.model_bytes("out");

    for flip in flips {
        let (run, incidents) = train(&p, mesh, flip);

        assert_eq!(run.code, Some(0), "{flip}: {}\n{}", run.stdout, run.stderr);
        assert!(!incidents.is_empty(), "{flip} was not found");
        let named: Vec<u64> = incidents.iter().filter_map(|(_, slot, _)| *slot).collect();
        assert!(!named.is_empty() && named.iter().all(|named| *named == slot), "{flip}: {incidents:?}");
        assert!(p.model_bytes("out") == undisturbed, "{flip}: other weights");
    }
}

#[test]
fn bit_that_flips_in_the_memory_of_one_of_three_gpus_is_found_and_healed() {
    let mesh = ["--dp_replicate_size", "3", "--reproducible", "true"];

    is_found(&mesh, 1, &["1:3:1:weights:7", "1:5:1:optimizer:8"]);
}

#[test]
fn bit_that_flips_in_a_shard_or_in_its_shadow_in_host_memory_is_found_and_healed() {
    let mesh = ["--dp_shard_size", "2", "--reproducible", "true"];

    is_found(&mesh, 1, &["1:3:1:weights:11", "1:5:1:shadow:12"]);
}
