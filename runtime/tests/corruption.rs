//! Silent corruption: a flipped bit in one copy of the state is found, the rank is named, and the job ends with the weights of
//! an undisturbed run.

mod support;

use serde_json::Value;
use support::Project;

const STEPS: [&str; 6] = ["--max_steps", "14", "--gradient_accumulation_steps", "6", "--save_steps", "5"];

/// The incidents of a run because of corruption: culprit and detail.
fn incidents(p: &Project, out: &str) -> Vec<(Option<u64>, String)> {
    let text = std::fs::read_to_string(p.path(out).join("events.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_corruption = |line: &Value| line["why"] == "Corrupted";
    let slot = |line: &Value| line["worker"]["member"]["slot"].as_u64();
    lines.filter(of_corruption).map(|line| (slot(&line), line["detail"].to_string())).collect()
}

/// Trains with these overrides, undisturbed and with this plan of flips. Returns the corruption incidents of the second run,
/// whose weights equal those of the first one.
#[track_caller]
fn train_with_flips(mesh: &[&str], flips: &str) -> Vec<(Option<u64>, String)> {
    let p = Project::new();
    let job = [&STEPS[..], mesh].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();
    assert_eq!(incidents(&p, "straight"), [], "no false alarm");

    let args = [&["train", "job.yaml"], &job[..]].concat();
    let run = support::Run::of(p.command(&args).env("PHALANX_FLIP_BITS", flips).output().unwrap()).succeeds();

    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"), "{}", run.stdout);
    assert_eq!(p.metrics("out"), p.metrics("straight"));
    incidents(&p, "out")
}

#[test]
fn rank_that_two_replicas_contradict_is_named_and_replaced() {
    let found = train_with_flips(&["--dp_replicate_size", "3", "--elastic.verify_steps", "4"], "1:6:1:weights:1");

    let [(slot, detail)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(*slot, Some(1));
    assert!(detail.contains("differ after step 8") && detail.contains("contradict rank 1"), "{detail}");
}

#[test]
fn replica_whose_copy_was_wrong_is_named_once_the_steps_are_repeated() {
    let found = train_with_flips(&["--dp_replicate_size", "2", "--elastic.verify_steps", "4"], "1:6:1:weights:2");

    let [(nobody, differ), (slot, wrong)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((*nobody, *slot), (None, Some(1)));
    assert!(differ.contains("none has a majority"), "{differ}");
    assert!(wrong.contains("its copy of") && wrong.contains("was wrong"), "{wrong}");
}
