//! Silent corruption: a flipped bit in one copy of the state is found, the rank is named, and the job ends with the weights of
//! an undisturbed run.
//!
//! `PHALANX_FLIPS=200 cargo test --release --workspace --test jobs -- --nocapture random_flips` is the campaign: it
//! plants 200 random flips instead of [`N_FLIPS`], and prints a line for each and a table.

use crate::support::job::{Addresses, JOB as JOB_OF_NODES, Job};
use crate::support::{Project, Run};
use phalanx_strategies::rng::CounterRng;
use serde_json::Value;
use std::collections::BTreeMap;

const JOB: [&str; 10] = [
    "--max_steps",
    "14",
    "--gradient_accumulation_steps",
    "6",
    "--save_steps",
    "5",
    "--elastic.verify_steps",
    "4",
    // No rank is lost because other programs take the cores for some seconds: plans of flips count worlds.
    "--elastic.detection_time",
    "30",
];
/// Steps between comparisons in [`JOB`].
const EVERY: u64 = 4;
/// Random flips in CI.
const N_FLIPS: u64 = 6;

/// A cause of incidents: the slot of the rank that is named, and the details.
type Found = (Option<u64>, String);

/// The incidents of a run because of corruption.
fn incidents(p: &Project, out: &str) -> Vec<Found> {
    found_in(p, out, "Corrupted")
}

/// The incidents of the last run for this reason.
fn of_kind(p: &Project, why: &str) -> Vec<Found> {
    found_in(p, "out", why)
}

fn found_in(p: &Project, out: &str, why: &str) -> Vec<Found> {
    let text = std::fs::read_to_string(p.path(out).join("events.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let slot = |line: &Value| line["worker"]["member"]["slot"].as_u64();
    lines.filter(|line| line["why"] == why).map(|line| (slot(&line), line["detail"].to_string())).collect()
}

/// A project with an undisturbed run in this mesh.
fn undisturbed(mesh: &[&str]) -> Project {
    let p = Project::new();
    p.train(&[&JOB[..], mesh, &["--output_dir", "straight"]].concat()).succeeds();
    assert_eq!(incidents(&p, "straight"), [], "no false alarm");
    p
}

/// Trains with this plan of flips.
///
/// # Panics
/// If the run had an incident that flips do not cause: nothing else may disturb it.
#[track_caller]
fn train_with(p: &Project, mesh: &[&str], flips: &str) -> Run {
    let args = [&["train", "job.yaml"], &JOB[..], mesh].concat();
    let _ = std::fs::remove_dir_all(p.path("out"));
    let run = Run::of(p.command(&args).env("PHALANX_FLIP_BITS", flips).output().unwrap());
    let text = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
    for line in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let is_planted = matches!(line["why"].as_str(), None | Some("Started" | "Corrupted" | "NotFinite" | "Fails"));
        let has_others = line["also"].as_array().is_some_and(|also| !also.is_empty());
        assert!(is_planted && !has_others, "{flips}: another incident: {line}");
    }
    run
}

#[track_caller]
fn equals_undisturbed(p: &Project, run: &Run) {
    assert_eq!(run.code, Some(0), "{}\n{}", run.stdout, run.stderr);
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"), "{}", run.stdout);
    assert_eq!(p.metrics("out"), p.metrics("straight"));
}

const THREE: [&str; 2] = ["--dp_replicate_size", "3"];
const TWO: [&str; 2] = ["--dp_replicate_size", "2"];
const SHARDS: [&str; 2] = ["--dp_shard_size", "2"];
const TENSORS: [&str; 4] = ["--tensor_parallel_size", "2", "--dp_replicate_size", "2"];

#[test]
fn rank_that_two_replicas_contradict_is_named_and_replaced() {
    let p = undisturbed(&THREE);

    let run = train_with(&p, &THREE, "1:6:1:weights:1");

    equals_undisturbed(&p, &run);
    let found = incidents(&p, "out");
    let [(slot, detail)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(*slot, Some(1));
    assert!(detail.contains("differ after step 8") && detail.contains("contradict rank 1"), "{detail}");
}

#[test]
fn replica_whose_copy_was_wrong_is_named_once_the_steps_are_repeated() {
    let p = undisturbed(&TWO);

    let run = train_with(&p, &TWO, "1:6:1:weights:2");

    equals_undisturbed(&p, &run);
    let found = incidents(&p, "out");
    let [(nobody, differ), (slot, wrong)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((*nobody, *slot), (None, Some(1)));
    assert!(differ.contains("none has a majority"), "{differ}");
    assert!(wrong.contains("its copy of") && wrong.contains("was wrong"), "{wrong}");
}

#[test]
fn copies_that_differ_again_and_again_after_a_step_end_the_job_with_one_sentence() {
    let p = Project::new();

    let run = train_with(&p, &TWO, "1:7:1:weights:2,2:7:1:weights:2,3:7:1:weights:2");

    assert_eq!(run.code, Some(1), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("differed after step 8 3 times"), "{}", run.stderr);
}

#[test]
fn weight_that_makes_the_loss_infinite_is_found_before_the_job_counts_as_diverged() {
    let p = undisturbed(&TWO);

    // Bit 30 of a weight: its magnitude exceeds 10^30.
    let flips = (0..).map(|seed| (seed, CounterRng::new(seed).bits(2) % 32)).find(|(_, bit)| *bit == 30).unwrap();
    let run = train_with(&p, &TWO, &format!("1:5:0:weights:{}", flips.0));

    equals_undisturbed(&p, &run);
    assert!(!incidents(&p, "out").is_empty());
}

#[test]
fn rank_that_alone_computes_a_loss_that_is_not_finite_is_replaced_and_the_step_repeated() {
    let p = undisturbed(&TWO);

    let run = train_with(&p, &TWO, "1:7:1:compute:2");

    equals_undisturbed(&p, &run);
    let found = of_kind(&p, "NotFinite");
    let [(slot, detail)] = &found[..] else { panic!("{found:?}\n{}", run.stdout) };
    assert!(*slot == Some(1) && detail.contains("the loss of step 7 is not finite"), "{found:?}");
    assert_eq!(incidents(&p, "out"), [], "no copy was wrong");
}

#[test]
fn diverged_model_ends_the_job_after_the_step_was_repeated_once() {
    let p = Project::new();
    let diverges = ["--learning_rate", "1e30", "--max_grad_norm", "none", "--warmup_steps", "0", "--output_dir", "out"];

    p.train(&[&JOB[..], &TWO, &diverges].concat()).refuses(&["step ", "not finite, first in "]);

    let found = of_kind(&p, "NotFinite");
    assert!(found.len() == 1 && found[0].1.contains("is not finite in the first computation"), "{found:?}");
}

#[test]
fn checkpoint_whose_copy_has_a_flipped_bit_is_never_committed_and_others_are_verified() {
    let p = Project::new();

    let run = train_with(&p, &TWO, "1:5:0:checkpoint:3").succeeds();

    let reason = "for the checkpoint of step 5 differs from the state: a bit has flipped in memory";
    assert!(run.stdout.contains(reason) || run.stderr.contains(reason), "{}\n{}", run.stdout, run.stderr);
    let saved = p.checkpoints("out");
    let names: Vec<&str> = saved.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["step-0000000010.g0001", "step-0000000014.g0001"]);
    for path in saved {
        let shown = p.run(&["inspect", path.to_str().unwrap(), "--json"]).succeeds();
        let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
        assert_eq!(shown["verified"], true, "{shown}");
    }
}

#[test]
fn run_resumes_from_the_newest_checkpoint_whose_copies_were_compared() {
    let p = Project::new();
    let train = |steps: &str, verify_steps: &str| {
        let steps = ["--max_steps", steps, "--lr_scheduler", "constant", "--elastic.verify_steps", verify_steps];
        p.train(&[&TWO[..], &steps, &["--output_dir", "out", "--save_total_limit", "none"]].concat()).succeeds()
    };

    train("5", "auto");
    let unverified = train("10", "0");
    let resumed = train("12", "auto");

    assert!(unverified.stdout.contains("resuming at step 5"), "{}", unverified.stdout);
    assert!(resumed.stdout.contains("resuming at step 5"), "{}", resumed.stdout);
    assert!(resumed.stdout.contains("it was saved unverified"), "{}", resumed.stdout);
    let verified = |path: &std::path::PathBuf| {
        let shown = p.run(&["inspect", path.to_str().unwrap(), "--json"]).succeeds();
        let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
        (shown["step"].as_u64().unwrap(), shown["verified"] == true, shown["compared"] == true)
    };
    let mut saved: Vec<(u64, bool, bool)> = p.checkpoints("out").iter().map(verified).collect();
    saved.sort_unstable();
    assert_eq!((saved.first(), saved.last()), (Some(&(5, true, true)), Some(&(12, true, true))), "{saved:?}");
    assert!(saved.contains(&(10, false, false)), "{saved:?}");
}

#[test]
fn time_of_a_comparison_is_reported_with_the_step_after_it() {
    let p = undisturbed(&TWO);

    let text = std::fs::read_to_string(p.path("straight/metrics.jsonl")).unwrap();

    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut reported = Vec::new();
    for line in lines.filter(|line| line["loss"].is_number()) {
        if let Some(pct) = line["verify_pct"].as_f64() {
            assert!(pct > 0.0 && pct < 100.0, "{line}");
            reported.push(line["step"].as_u64().unwrap());
        }
    }
    // After every fourth step, and before the saves of steps 5 and 10.
    assert_eq!(reported, [5, 6, 9, 11, 13]);
}

/// A job of two nodes, whose ranks exchange gradients over TCP.
const NODES: [&str; 6] = ["--max_steps", "40", "--elastic.verify_steps", "4", "--learning_rate", "1e-4"];

/// Trains over two nodes with this plan of flips; returns the causes of incidents, with their details.
fn train_on_nodes(p: &Project, flips: &str) -> Vec<(String, String)> {
    for file in ["out", "node0", "node1"] {
        let _ = std::fs::remove_dir_all(p.path(file));
    }
    let _ = std::fs::remove_file(p.path("coordinator.log"));
    let variables = vec![("PHALANX_FLIP_BITS", flips.to_owned())];
    let job = Job::start_at(p, 2, &NODES, Addresses { variables, ..Addresses::default() });
    assert_eq!(job.finish(), p.model_bytes("straight"), "{flips}");
    assert_eq!(p.metrics("out"), p.metrics("straight"), "{flips}");
    let text = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let incidents = lines.filter(|line| line["why"].is_string() && line["why"] != "Started");
    incidents.map(|line| (line["why"].to_string(), line["detail"].to_string())).collect()
}

#[test]
fn gradient_that_is_damaged_on_the_wire_reaches_no_update() {
    let p = undisturbed_on_nodes();

    let found = train_on_nodes(&p, "1:20:1:wire:1");

    assert!(found.iter().any(|(_, detail)| detail.contains("the checksum of a frame differs")), "{found:?}");
    assert!(found.iter().all(|(why, _)| !why.contains("Corrupted")), "no copy was wrong: {found:?}");
}

fn undisturbed_on_nodes() -> Project {
    let p = Project::new();
    p.train(&[&JOB_OF_NODES[..], &NODES, &["--output_dir", "straight"]].concat()).succeeds();
    p
}

/// Where random flips strike: mesh, ranks and place. The first ones are those of CI. Only the first replica saves.
const TARGETS: [(&str, &[&str], u64, &str); 18] = [
    ("dp 3", &THREE, 3, "weights"),
    ("dp 2", &TWO, 2, "gradient"),
    ("shard 2", &SHARDS, 2, "shadow"),
    ("tp 2 dp 2", &TENSORS, 4, "optimizer"),
    ("dp 2", &TWO, 1, "checkpoint"),
    ("shard 2", &SHARDS, 2, "weights"),
    ("two nodes", &NODES, 2, "wire"),
    ("tp 2 dp 2", &TENSORS, 4, "weights"),
    ("dp 3", &THREE, 3, "gradient"),
    ("dp 2", &TWO, 2, "weights"),
    ("shard 2", &SHARDS, 2, "optimizer"),
    ("tp 2 dp 2", &TENSORS, 4, "gradient"),
    ("dp 3", &THREE, 3, "optimizer"),
    ("shard 2", &SHARDS, 2, "gradient"),
    ("tp 2 dp 2", &TENSORS, 2, "checkpoint"),
    ("dp 2", &TWO, 2, "optimizer"),
    ("shard 2", &SHARDS, 2, "checkpoint"),
    ("dp 3", &THREE, 1, "checkpoint"),
];

/// A random flip.
struct Drawn {
    name: &'static str,
    mesh: &'static [&'static str],
    rank: u64,
    step: u64,
    place: &'static str,
    plan: String,
}

fn draw(number: u64) -> Drawn {
    let rng = CounterRng::new(number);
    let (name, mesh, n_ranks, place) = TARGETS[number as usize % TARGETS.len()];
    let step = match place {
        // The steps of saves that go on beside training.
        "checkpoint" => 5 + 5 * (rng.bits(1) % 2),
        "wire" => 2 + rng.bits(1) % 38,
        _ => 1 + rng.bits(1) % 13,
    };
    let rank = rng.bits(0) % n_ranks;
    Drawn { name, mesh, rank, step, place, plan: format!("1:{step}:{rank}:{place}:{}", rng.bits(2)) }
}

/// What became of the flips of a kind.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    n_planted: u64,
    /// Flips that changed a committed value.
    n_changed: u64,
    n_found: u64,
    /// Most steps from a flip to the comparison that found it.
    steps_max: u64,
    /// Changes whose rank was named, and no other one.
    n_named: u64,
}

/// Plants a flip; all that changes a committed value is found, and the weights are those of an undisturbed run.
fn strike(p: &Project, drawn: &Drawn) -> Tally {
    let Drawn { mesh, rank, step, place, plan, .. } = drawn;
    let mut tally = Tally { n_planted: 1, ..Tally::default() };
    if *place == "wire" {
        let found = train_on_nodes(p, plan);
        let is_found = found.iter().any(|(_, detail)| detail.contains("the checksum of a frame differs"));
        assert!(is_found, "{plan}: {found:?}");
        return Tally { n_found: 1, ..tally };
    }
    let run = train_with(p, mesh, plan);
    equals_undisturbed(p, &run);
    let found = incidents(p, "out");
    let named: Vec<u64> = found.iter().filter_map(|(slot, _)| *slot).collect();
    println!("{mesh:?} {plan}: {named:?} {found:?}");
    assert!(named.iter().all(|slot| slot == rank), "{plan}: {found:?}");
    if *place == "checkpoint" {
        let is_refused = run.stdout.contains(&format!("for the checkpoint of step {step} differs from the state"));
        assert!(is_refused && found.is_empty(), "{plan}: {}", run.stdout);
        assert!(p.checkpoints("out").iter().all(|path| !path.to_string_lossy().contains(&format!("{step:010}."))));
        return Tally { n_found: 1, ..tally };
    }
    // A bit of a gradient may be below the rounding of the update; a flip in the state always changes it.
    let Some((_, detail)) = found.first() else {
        assert_eq!(*place, "gradient", "{plan} was not found within {EVERY} steps");
        return tally;
    };
    let after = detail.split("differ after step ").nth(1).and_then(|rest| rest.split(':').next()?.parse::<u64>().ok());
    let after = after.unwrap_or_else(|| panic!("{plan}: {detail}"));
    assert!((*step..=step + EVERY).contains(&after), "{plan}: {detail}");
    (tally.n_changed, tally.n_found, tally.steps_max) = (1, 1, after - step);
    tally.n_named = u64::from(!named.is_empty());
    tally
}

#[test]
fn random_flips_are_found_and_named_and_the_weights_equal_an_undisturbed_run() {
    let n_flips = std::env::var("PHALANX_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(N_FLIPS);
    let mut projects: BTreeMap<&str, Project> = BTreeMap::new();
    let mut tallies: BTreeMap<(&str, &str), Tally> = BTreeMap::new();
    for drawn in (0..n_flips).map(draw) {
        let new = || if drawn.place == "wire" { undisturbed_on_nodes() } else { undisturbed(drawn.mesh) };
        let p = projects.entry(drawn.name).or_insert_with(new);
        let one = strike(p, &drawn);
        let sum = tallies.entry((drawn.place, drawn.name)).or_default();
        sum.n_planted += one.n_planted;
        sum.n_changed += one.n_changed;
        sum.n_found += one.n_found;
        sum.steps_max = sum.steps_max.max(one.steps_max);
        sum.n_named += one.n_named;
    }
    println!("| kind | mesh | planted | changed a committed value | found | steps until found, most | named right |");
    println!("|---|---|---|---|---|---|---|");
    for ((place, mesh), Tally { n_planted, n_changed, n_found, steps_max, n_named }) in &tallies {
        println!("| {place} | {mesh} | {n_planted} | {n_changed} | {n_found} | {steps_max} | {n_named} |");
    }
    let named_of = |is_it: fn(&str) -> bool| {
        let own = tallies.iter().filter(|((_, mesh), _)| is_it(mesh));
        own.fold((0, 0), |sum, (_, tally)| (sum.0 + tally.n_named, sum.1 + tally.n_changed))
    };
    let (with_majority, with_repetition) = (named_of(|mesh| mesh == "dp 3"), named_of(|mesh| mesh != "dp 3"));
    assert_eq!(with_majority.0, with_majority.1, "three copies name the rank");
    assert!(20 * with_repetition.0 >= 19 * with_repetition.1, "{with_repetition:?} are named");
}
