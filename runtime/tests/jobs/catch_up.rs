//! A new rank catches up while the others train, on one and on several machines. If a rank dies meanwhile, the weights still
//! equal those of an undisturbed run.

use crate::support::Project;
use crate::support::job::{Addresses, Job, UNENDING, equals_undisturbed_run, signal, until};
use serde_json::Value;

/// Replicas that do not wait for a replacement, and state that is always too large to fetch at rest.
const CATCHING_UP: [&str; 6] =
    ["--dp_replicate_size", "2", "--elastic.replace_patience", "0", "--elastic.rest_bytes_max", "0"];
const ONE_SHARD: [&str; 2] = ["--dp_shard_size", "1"];

/// The worlds of the job, from its events.
fn worlds(p: &Project) -> Vec<Value> {
    events(p, "world")
}

fn events(p: &Project, kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let events = whole.map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == kind).collect()
}

fn incidents(p: &Project) -> Vec<Value> {
    events(p, "incident")
}

fn n_catching_up(world: &Value) -> usize {
    world["catching_up"].as_array().map_or(0, Vec::len)
}

/// Waits for a world after the first `n_before` in which `n` members catch up and the others train with this mesh.
fn until_world(p: &Project, n_before: usize, n: usize, dp_replicate: u64) -> usize {
    let is_it = |world: &Value| n_catching_up(world) == n && world["mesh"]["dp_replicate"] == dp_replicate;
    until("a world", || worlds(p).iter().skip(n_before).position(is_it).map(|at| n_before + at + 1))
}

#[test]
fn successor_on_one_machine_catches_up_and_is_replaced_if_it_dies_meanwhile() {
    let p = Project::new();
    let addresses = Addresses { ranks_per_node: 2, ..Addresses::default() };
    let job = Job::start_at(&p, 1, &[&UNENDING[..], &CATCHING_UP, &ONE_SHARD].concat(), addresses);
    let whole = until_world(&p, 0, 0, 2);
    job.until_step(10);

    let first = job.ranks(0)[0];
    signal(first, libc::SIGKILL);
    let catching_up = until_world(&p, whole, 1, 1);
    // A fast machine may finish the transfer before the kill, so kill several times.
    let mut n_known = catching_up;
    for _ in 0..3 {
        signal(*job.ranks(0).iter().max().unwrap(), libc::SIGKILL);
        n_known = until_world(&p, n_known, 1, 1);
    }
    until_world(&p, n_known, 0, 2);

    equals_undisturbed_run(&p, job.stop(), &ONE_SHARD);
}

#[test]
fn returning_machine_catches_up_over_the_network_while_the_others_train() {
    let p = Project::new();
    let addresses = Addresses { ranks_per_node: 2, ..Addresses::default() };
    let mut job = Job::start_at(&p, 2, &[&UNENDING[..], &CATCHING_UP].concat(), addresses);
    let whole = until_world(&p, 0, 0, 2);
    job.until_step(10);

    job.nodes[1].kill().unwrap();
    job.nodes[1].wait().unwrap();
    let alone = until_world(&p, whole, 0, 1);
    job.add_node(1);
    let catching_up = until_world(&p, alone, 2, 1);
    let together = until_world(&p, catching_up, 0, 2);
    job.until_step(job.n_steps() + 5);
    // One of the two ranks of a replica dies. The other one has all its state and needs no transfer.
    signal(job.ranks(0)[0], libc::SIGKILL);
    let catching_up = until_world(&p, together, 2, 1);
    until_world(&p, catching_up, 0, 2);

    equals_undisturbed_run(&p, job.stop(), &ONE_SHARD);
}

/// Process id of a rank.
fn process(p: &Project, rank: u64) -> u32 {
    let status = p.run(&["status", "out", "--json"]).succeeds().stdout;
    let status: Value = serde_json::from_str(&status).unwrap();
    let nodes = status["nodes"].as_array().unwrap().iter();
    let members = nodes.flat_map(|node| node["ranks"].as_array().unwrap());
    let pid = members.filter(|member| member["rank"] == rank).find_map(|member| member["pid"].as_u64());
    pid.unwrap() as u32
}

/// Three processes on one machine and two on the other. The rank of the second shard on the other machine holds a shadow of the
/// first shard only while all ranks of the first shard are on the first machine.
#[test]
fn holder_that_gains_or_drops_a_shadow_keeps_training_during_catch_up() {
    let p = Project::new();
    let addresses = Addresses { ranks_per_node: 3, ..Addresses::default() };
    let two = ["--elastic.dp_shard_min", "2"];
    let mut job = Job::start_at(&p, 1, &[&UNENDING[..], &CATCHING_UP, &two].concat(), addresses);
    // The first machine trains alone, and each of its ranks holds a shadow of the other one. Later ranks fetch both shards from
    // the same ranks.
    let alone = until_world(&p, 0, 0, 1);
    job.until_step(5);
    job.add_node_of(1, 2);
    let mut n_known = until_world(&p, alone, 0, 2);
    for _ in 0..3 {
        job.until_step(job.n_steps() + 5);
        let n_incidents = incidents(&p).len();
        signal(process(&p, 2), libc::SIGKILL);
        n_known = until_world(&p, n_known, 0, 2);
        until("the end of an incident", || (incidents(&p).len() > n_incidents).then_some(()));
    }
    let worlds = worlds(&p);

    equals_undisturbed_run(&p, job.stop(), &ONE_SHARD);
    assert!(worlds.iter().skip(1).all(|world| world["step"] != 0), "no world starts from step 0 again: {worlds:?}");
    assert!(worlds.iter().filter(|world| n_catching_up(world) == 2).count() > 1, "two catch up: {worlds:?}");
}

#[test]
fn rank_catching_up_on_an_adapter_loads_frozen_weights_from_the_base_model() {
    let p = Project::new();
    p.train(&["--max_steps", "5", "--output_dir", "base"]).succeeds();
    let yaml = crate::support::YAML.split_once("datasets:").unwrap().1;
    let adapter =
        "base_model: base/model\nadapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj, down_proj]\n";
    p.write("job.yaml", &format!("{adapter}datasets:{yaml}"));
    let addresses = Addresses { ranks_per_node: 2, ..Addresses::default() };
    let job = Job::start_at(&p, 1, &[&UNENDING[..], &CATCHING_UP, &ONE_SHARD].concat(), addresses);
    let whole = until_world(&p, 0, 0, 2);
    job.until_step(10);

    signal(job.ranks(0)[0], libc::SIGKILL);
    let catching_up = until_world(&p, whole, 1, 1);
    until_world(&p, catching_up, 0, 2);

    equals_undisturbed_run(&p, job.stop(), &ONE_SHARD);
}
