//! The identity of a node is its key: no two running nodes have one key, and a node whose key another one uses ends with the
//! reason. Nodes find a coordinator that returns, and requests to a job without nodes do not seem to succeed.

use crate::support::job::{Job, signal, until};
use crate::support::{Project, Run};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

/// A node without `--dir` in the folder of the project.
fn node(p: &Project, join: &str) -> Child {
    let log = std::fs::File::create(p.path("default.log")).unwrap();
    p.command(&["node", "--join", join]).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

fn exit_code(child: &mut Child) -> Option<i32> {
    until("the end of a node", || child.try_wait().unwrap()).code()
}

#[test]
fn second_node_in_a_folder_is_refused_and_the_first_one_continues() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 0, &["--dp_shard_size", "1", "--max_steps", "1000000"]);
    let first = node(&p, &job.join);
    job.nodes.push(first);
    job.until_step(5);

    let second = p.run(&["node", "--join", &job.join]);

    second.refuses(&["another running node uses the folder .phalanx-node/", "`--dir`"]);
    job.until_step(job.n_steps() + 5);
    let folders = std::fs::read_dir(p.path(".phalanx-node")).unwrap().count();
    assert_eq!(folders, 1, "the folder has the name of this machine");
}

#[test]
fn node_whose_key_is_used_elsewhere_ends_with_the_reason() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 1, &["--dp_shard_size", "1", "--max_steps", "1000000"]);
    job.until_step(5);
    let copied = Command::new("cp").args(["-r", "node0", "node1"]).current_dir(p.dir.path()).status().unwrap();
    assert!(copied.success());

    job.add_node(1);
    let code = exit_code(&mut job.nodes[0]);

    let log = std::fs::read_to_string(p.path("node0.log")).unwrap();
    let reason = log.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert_eq!(code, Some(2), "{log}");
    assert!(reason.contains("node 0 has started again with the same key"), "{log}");
    // The later one trains.
    job.until_step(job.n_steps() + 5);
}

#[test]
fn node_of_an_earlier_job_ends_when_the_folder_has_another_job() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 1, &["--dp_shard_size", "1", "--max_steps", "1000000"]);
    job.until_step(5);
    // The coordinator and its folder are lost; another job begins at its address, with the same authority.
    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();
    std::fs::remove_file(p.path("out/control/job")).unwrap();
    std::fs::remove_dir_all(p.path("out/control/store")).unwrap();

    job.restart_coordinator_after_its_end();
    let code = exit_code(&mut job.nodes[0]);

    let log = std::fs::read_to_string(p.path("node0.log")).unwrap();
    assert_eq!(code, Some(2), "{log}");
    assert!(log.contains("the coordinator refuses this node: its certificate is for job "), "{log}");
}

/// Whether the job has replaced a rank, which needs a coordinator.
fn replaces_a_rank(job: &Job<'_>) {
    signal(job.ranks(0)[0], libc::SIGKILL);
    let before = job.n_steps();
    job.until_step(before + 5);
}

/// A job whose coordinator was started at a free port, and that port.
fn job_at_a_free_port(p: &Project) -> (Job<'_>, String) {
    let job = Job::start_with(p, 1, &["--max_steps", "1000000", "--dp_shard_size", "1", "--save_steps", "5"]);
    job.until_step(5);
    let address = job.address.clone();
    (job, address)
}

#[test]
fn coordinator_returns_to_its_port_with_the_same_command() {
    let p = Project::new();
    let (mut job, before) = job_at_a_free_port(&p);

    job.address = "127.0.0.1:0".into();
    job.restart_coordinator();
    replaces_a_rank(&job);

    assert_eq!(std::fs::read_to_string(p.path("out/control/address")).unwrap(), before);
}

#[test]
fn nodes_find_a_coordinator_whose_port_is_taken_by_its_published_address() {
    let p = Project::new();
    let (mut job, before) = job_at_a_free_port(&p);

    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();
    let _other = until("the port", || UdpSocket::bind(&before).ok());
    job.address = "127.0.0.1:0".into();
    job.restart_coordinator_after_its_end();
    replaces_a_rank(&job);

    assert_ne!(std::fs::read_to_string(p.path("out/control/address")).unwrap(), before);
}

#[test]
fn coordinator_without_the_key_of_its_nodes_is_refused_and_they_go_on() {
    let p = Project::new();
    let (mut job, address) = job_at_a_free_port(&p);
    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();
    let key = p.path("out/control/authority.key");
    std::fs::rename(&key, p.path("kept.key")).unwrap();

    let of_job = ["--max_steps", "1000000", "--dp_shard_size", "1", "--save_steps", "5"];
    let command = ["coordinator", "--listen", &address, "job.yaml"];
    let refused = p.run(&[&command[..], &crate::support::job::JOB, &of_job].concat());
    std::fs::rename(p.path("kept.key"), &key).unwrap();
    job.restart_coordinator_after_its_end();

    refused.refuses(&["authority.key is missing, but 1 node"]);
    replaces_a_rank(&job);
}

#[test]
fn requests_to_a_job_without_nodes_fail_until_nodes_return() {
    let p = Project::new();
    // Without saves of its own, so that the last steps are in no checkpoint.
    let mut job = Job::start_with(&p, 1, &["--max_steps", "1000000", "--dp_shard_size", "1"]);
    job.until_step(5);
    p.run(&["save", "job.yaml"]).succeeds();
    assert!(!p.checkpoints("out").is_empty(), "a request that succeeds has saved");
    job.until_step(job.n_steps() + 2);

    job.nodes[0].kill().unwrap();
    job.nodes[0].wait().unwrap();
    until("the loss of the node", || {
        let status = p.run(&["status", "job.yaml", "--json"]).succeeds();
        let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
        status["nodes"][0]["silent"].as_bool().filter(|silent| *silent)
    });
    for request in ["save", "stop"] {
        p.run(&[request, "job.yaml"]).refuses(&["no node is connected"]);
    }
    // The requests were recorded: the job stops once its node is back, whose ranks took the last steps with them.
    job.add_node(0);
    let ended = until("the end", || job.coordinator.try_wait().unwrap());

    assert_eq!(ended.code(), Some(1));
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    assert!(events.contains("without its last steps: no member holds them any more"), "{events}");
}

#[test]
fn join_string_of_a_coordinator_at_all_addresses_can_be_used_or_the_address_is_asked_for() {
    let p = Project::new();
    let mut command = p.command(&["coordinator", "--listen", "0.0.0.0:0", "job.yaml"]);
    let log = std::fs::File::create(p.path("all.log")).unwrap();
    let mut coordinator = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();

    let text = until("a join string or a refusal", || {
        let text = std::fs::read_to_string(p.path("all.log")).unwrap();
        (text.contains("--join ") || coordinator.try_wait().unwrap().is_some()).then_some(text)
    });
    let _ = coordinator.kill();
    coordinator.wait().unwrap();

    let is_usable = text.contains("--join ") && !text.contains("@0.0.0.0");
    assert!(is_usable || text.contains("--advertise HOST:PORT"), "{text}");
}

#[test]
fn folder_that_cannot_be_created_is_named() {
    let p = Project::new();
    let job = Job::start(&p, 0);

    let run = p.command(&["node", "--join", &job.join, "--dir", "job.yaml/node"]).stdin(Stdio::null()).output();

    Run::of(run.unwrap()).refuses(&["job.yaml/node"]);
}
