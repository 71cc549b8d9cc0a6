//! Nodes started with one command and a launcher's environment variables, here on one machine.

use crate::support::job::until;
use crate::support::{Project, Run, ranks_of};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const JOB: [&str; 8] = [
    "--reproducible",
    "true",
    "--gradient_accumulation_steps",
    "1",
    "--microbatches_per_step",
    "4",
    "--dp_shard_size",
    "2",
];

/// The exit code of a run in a batch job that a signal stopped before its last step.
const INTERRUPTED: i32 = 75;

/// `phalanx train` on each node, with the flag and the variables of a launcher. Killed when dropped.
struct Launch<'a> {
    p: &'a Project,
    nodes: Vec<Child>,
}

impl<'a> Launch<'a> {
    fn start(p: &'a Project, flags: &str, nodes: &[Vec<(&str, String)>], overrides: &[&str]) -> Launch<'a> {
        let start = |(i, variables): (usize, &Vec<(&str, String)>)| {
            let log = std::fs::File::create(p.path(&format!("node{i}.log"))).unwrap();
            let flags: Vec<&str> = flags.split(' ').collect();
            let mut command = p.command(&[&["train"], &flags[..], &["job.yaml"], &JOB[..], overrides].concat());
            command.envs(variables.iter().map(|(name, value)| (*name, value)));
            command.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null()).spawn().unwrap()
        };
        Launch { p, nodes: nodes.iter().enumerate().map(start).collect() }
    }

    fn log(&self, i: usize) -> String {
        std::fs::read_to_string(self.p.path(&format!("node{i}.log"))).unwrap_or_default()
    }

    /// Waits until the log of a node has this text.
    fn until(&self, i: usize, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.log(i).contains(text) {
            assert!(Instant::now() < deadline, "the log of node {i} has no `{text}`: {}", self.log(i));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until all nodes end with success.
    fn finish(self) {
        let codes = vec![0; self.nodes.len()];
        self.finish_with(&codes);
    }

    /// Waits until all nodes end with these exit codes.
    fn finish_with(mut self, codes: &[i32]) {
        let deadline = Instant::now() + PATIENCE;
        for i in 0..self.nodes.len() {
            let ended = loop {
                match self.nodes[i].try_wait().unwrap() {
                    Some(status) => break status,
                    None => assert!(Instant::now() < deadline, "{}\n{}", self.log(0), self.log(i)),
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            assert_eq!(ended.code(), Some(codes[i]), "node {i}, {ended}: {}", self.log(i));
        }
    }
}

impl Drop for Launch<'_> {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

/// Slurm's variables for task `i` of a step on two nodes, whose names both refer to this machine.
fn slurm(i: usize) -> Vec<(&'static str, String)> {
    let all = [
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NNODES", "2"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_JOB_NODELIST", "127.0.0.[1-1],localhost"),
        ("SLURM_CPUS_PER_TASK", "1"),
    ];
    let all = all.into_iter().map(|(name, value)| (name, value.to_owned()));
    all.chain([("SLURM_NODEID", i.to_string()), ("SLURM_PROCID", i.to_string())]).collect()
}

fn torchrun(port: u16, rank: usize, local: Option<(usize, usize)>, world: usize) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("RANK", rank.to_string()),
    ];
    if let Some((local_rank, local_world)) = local {
        all.extend([("LOCAL_RANK", local_rank.to_string()), ("LOCAL_WORLD_SIZE", local_world.to_string())]);
    }
    all
}

/// A free UDP port of this machine.
fn free_port() -> u16 {
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn straight(p: &Project) -> Vec<u8> {
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    p.model_bytes("straight")
}

#[allow(unsafe_code)] // the standard library sends no signals
fn terminate(pid: u32) {
    // SAFETY: sends a signal; no memory is involved.
    let sent = unsafe { libc::kill(pid as i32, libc::SIGTERM) };
    assert_eq!(sent, 0, "process {pid} is there");
}

#[test]
fn two_tasks_of_a_slurm_step_train_as_one_machine() {
    let p = Project::new();
    let straight = straight(&p);

    let launch = Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &[]);
    launch.until(0, "2 ranks");
    launch.until(1, "with 1 ranks");
    launch.finish();

    assert_eq!(p.model_bytes("out"), straight);
    let left: Vec<_> = std::fs::read_dir(p.path("out/control")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("join")), "{left:?}");
}

#[test]
fn torchrun_variables_of_machines_and_of_ranks_are_understood() {
    let p = Project::new();
    let straight = straight(&p);

    let port = free_port();
    let machines = [torchrun(port, 0, None, 2), torchrun(port, 1, None, 2)];
    Launch::start(&p, "--torchrun", &machines, &[]).finish();
    assert_eq!(p.model_bytes("out"), straight);

    // Two ranks on each of two machines, with one process per rank; two of these processes do nothing.
    let port = free_port();
    let ranks: Vec<_> = (0..4).map(|rank| torchrun(port, rank, Some((rank % 2, 2)), 4)).collect();
    let launch = Launch::start(&p, "--torchrun", &ranks, &["--dp_shard_size", "auto", "--output_dir", "four"]);
    launch.until(0, "4 ranks");
    launch.until(3, "nothing to do");
    launch.finish();
    assert_eq!(p.model_bytes("four"), straight);
}

/// An installed torchrun: that of `PHALANX_PYTHON`, or the first on the path.
fn launcher_of_torch() -> Option<Vec<String>> {
    let of_python = |python: String| vec![python, "-m".to_owned(), "torch.distributed.run".to_owned()];
    let named = std::env::var("PHALANX_PYTHON").ok().map(of_python);
    let candidates = named.into_iter().chain([vec!["torchrun".to_owned()], of_python("python3".to_owned())]);
    let works = |words: &Vec<String>| {
        let output = Command::new(&words[0]).args(&words[1..]).arg("--help").output();
        output.is_ok_and(|output| output.status.success())
    };
    candidates.into_iter().find(works)
}

#[test]
fn nodes_started_by_torchrun_train_as_one_machine() {
    let Some(torchrun) = launcher_of_torch() else {
        return phalanx_needs::skip(phalanx_needs::Need::Torchrun, "torchrun is not installed");
    };
    let p = Project::new();
    let straight = straight(&p);
    // For torchrun's rendezvous over TCP; `phalanx` then uses UDP on the port that torchrun passes to its workers.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |node: usize| {
        let log = std::fs::File::create(p.path(&format!("node{node}.log"))).unwrap();
        let mut command = Command::new(&torchrun[0]);
        command.args(&torchrun[1..]).args(["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", &node.to_string()]);
        command.args(["--master-addr", "127.0.0.1", "--master-port", &port, "--no-python"]);
        command.arg(env!("CARGO_BIN_EXE_phalanx")).args(["train", "--torchrun", "job.yaml"]).args(JOB);
        command.args(["--dp_shard_size", "auto"]).current_dir(p.dir.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    };

    let launch = Launch { p: &p, nodes: vec![start(0), start(1)] };
    launch.until(0, "4 ranks");
    launch.finish();

    assert_eq!(p.model_bytes("out"), straight);
}

#[test]
fn spare_node_replaces_a_dead_node() {
    // Whether node 1 trains or is the spare, two nodes remain.
    survives_the_death_of_node(1);
}

#[test]
fn standby_on_node_1_takes_over_when_node_0_dies() {
    // The coordinator is on the first node.
    survives_the_death_of_node(0);
}

/// Kills one of three nodes, one of which is spare, and compares the weights with those of an undisturbed run.
fn survives_the_death_of_node(i: usize) {
    let p = Project::new();
    let long = ["--max_steps", "300"];
    p.train(&[&JOB[..], &long, &["--output_dir", "straight"]].concat()).succeeds();
    let port = free_port();
    let nodes: Vec<_> = (0..3).map(|i| torchrun(port, i, None, 3)).collect();
    let mut launch = Launch::start(&p, "--torchrun --spare-nodes 1", &nodes, &long);
    (0..3).for_each(|i| launch.until(i, "with 1 ranks"));
    launch.until(0, "saved at step 10");

    let mut dead = launch.nodes.remove(i);
    dead.kill().unwrap();
    dead.wait().unwrap();
    launch.finish();

    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is reported once");
}

#[test]
fn terminated_job_is_saved_and_resumes_later() {
    let p = Project::new();
    let schedule = ["--lr_scheduler", "constant"];
    let long = [&schedule[..], &["--max_steps", "1000000"]].concat();
    let mut launch = Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &long);
    launch.until(0, "step     3");

    let reported = p.metrics("out").len();
    // Slurm signals every process of a job, and again when its patience ends.
    let nodes: Vec<u32> = launch.nodes.iter_mut().map(|node| node.id()).collect();
    let ranks: Vec<u32> = nodes.iter().flat_map(|node| ranks_of(*node)).collect();
    assert_eq!(ranks.len(), 2);
    ranks.into_iter().chain(nodes).for_each(terminate);
    launch.until(0, "resume with:  phalanx train --slurm job.yaml");
    let log = launch.log(0);
    launch.finish_with(&[INTERRUPTED, 0]);

    let steps = p.metrics("out").len();
    assert!(steps >= reported, "no step is lost: {steps} of {reported}");
    assert!(log.contains(&format!("saved {steps:5}")) && !log.contains("continuing from"), "{log}");
    let more = (steps + 2).to_string();
    let longer = [&schedule[..], &["--max_steps", &more]].concat();
    let again = Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &longer);
    again.finish();
    assert_eq!(p.metrics("out").len(), steps + 2);
}

#[test]
fn node_0_that_comes_back_joins_the_job_that_its_standby_leads() {
    let p = Project::new();
    let endless = ["--max_steps", "1000000", "--elastic.replace_patience", "0.5"];
    let mut launch = Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &endless);
    launch.until(0, "step     5");
    let mut dead = launch.nodes.remove(0);
    dead.kill().unwrap();
    dead.wait().unwrap();
    let until_shards = |n: u64| {
        until("a mesh", || {
            let status: Value = serde_json::from_str(&p.run(&["status", "out", "--json"]).stdout).ok()?;
            (status["activity"] == "running" && status["mesh"]["dp_shard"].as_u64() == Some(n)).then_some(())
        });
    };
    until_shards(1);

    let back = Launch::start(&p, "--slurm", &[slurm(0)], &endless);

    back.until(0, "with 1 ranks");
    until_shards(2);
}

#[test]
fn job_all_of_whose_machines_died_may_begin_again_with_other_keys() {
    let p = Project::new();
    let launch = Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &["--max_steps", "100000"]);
    launch.until(0, "saved");
    drop(launch);

    let changed = ["--max_steps", "6", "--save_steps", "3", "--resume_from_checkpoint", "none"];
    Launch::start(&p, "--slurm", &[slurm(0), slurm(1)], &changed).finish();

    let steps: Vec<u64> = p.metrics("out").iter().map(|(step, ..)| *step).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn invalid_variables_and_absent_nodes_are_refused_in_one_sentence() {
    let p = Project::new();
    let run = |args: &[&str], variables: Vec<(&str, String)>| {
        let mut command = p.command(&[&["train"], args, &["job.yaml"], &JOB[..]].concat());
        Run::of(command.envs(variables).output().unwrap())
    };
    let mut beyond = slurm(0);
    beyond.push(("SLURM_NODEID", "2".into()));

    run(&["--slurm"], vec![]).refuses(&["SLURM_JOB_ID is not set", "srun --ntasks-per-node=1"]);
    run(&["--slurm"], beyond).refuses(&["SLURM_NODEID=2 and SLURM_NNODES=2 contradict each other"]);
    run(&["--torchrun"], slurm(0)).refuses(&["MASTER_ADDR is not set"]);
    run(&["--torchrun"], torchrun(29500, 1, Some((0, 2)), 2)).refuses(&["LOCAL_RANK=0 and RANK=1"]);
    run(&["--torchrun"], torchrun(29500, 2, None, 3)).refuses(&["2 ranks, which 3 nodes cannot share evenly"]);
    run(&["--slurm", "--spare-nodes", "2"], slurm(0)).refuses(&["`--spare-nodes` is 2, but there are 2 nodes"]);
    p.train(&["--nnodes", "2", "--dp_shard_size", "2"]).refuses(&["`nnodes` is 2", "--slurm"]);
    p.run(&["train", "job.yaml", "--max_steps", "3", "--slurm"]).refuses(&["SLURM_JOB_ID is not set"]);
    assert!(!p.path("out").exists(), "nothing was written");
    run(&["--slurm", "--join-wait", "0"], slurm(1)).refuses(&["did not appear within 0 s", "node 0 on 127.0.0.1"]);
}

/// A stand-in for `srun` on this machine: its own options, then a command for each of three nodes.
const SRUN: &str = "#!/usr/bin/env bash
echo \"$@\" > srun.words
while [[ $1 == --* ]]; do shift; done
pids=()
for node in 0 1 2; do
    SLURM_NODEID=$node SLURM_PROCID=$node \"$@\" > node$node.log 2>&1 &
    pids+=($!)
done
for pid in \"${pids[@]}\"; do wait \"$pid\"; done
";

#[test]
fn script_of_the_slurm_example_trains_on_two_nodes_beside_a_spare() {
    use std::os::unix::fs::PermissionsExt;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/slurm/finetune.sbatch");
    let text = std::fs::read_to_string(script).unwrap();
    let options: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#SBATCH --")).collect();
    let option = |name: &str| options.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or("");
    let p = Project::new();
    p.write(
        "job.yaml",
        &format!(
            "{}reproducible: true\nmicrobatches_per_step: 4\ndp_shard_size: 2\n",
            crate::support::YAML.replace("gradient_accumulation_steps: 2\n", "")
        ),
    );
    std::fs::create_dir(p.path("bin")).unwrap();
    std::fs::write(p.path("bin/srun"), SRUN).unwrap();
    std::fs::set_permissions(p.path("bin/srun"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_phalanx"), p.path("bin/phalanx")).unwrap();
    let path = format!("{}:{}", p.path("bin").display(), std::env::var("PATH").unwrap());
    // What Slurm sets for a step with the options of the script, on machines with one core and without GPUs.
    let of_job = |name: &str| match name {
        "SLURM_NNODES" | "SLURM_NTASKS" => option("nodes").to_owned(),
        "SLURM_JOB_NODELIST" => "127.0.0.[1-3]".to_owned(),
        _ => String::new(),
    };

    let mut bash = Command::new("bash");
    bash.args([script, "job.yaml"]).current_dir(p.dir.path()).env("PATH", path).stdin(Stdio::null());
    for (name, value) in slurm(0).into_iter().filter(|(name, _)| !["SLURM_NODEID", "SLURM_PROCID"].contains(name)) {
        bash.env(name, Some(of_job(name)).filter(|value| !value.is_empty()).unwrap_or(value));
    }
    let run = Run::of(bash.output().unwrap());

    let log = |i: usize| std::fs::read_to_string(p.path(&format!("node{i}.log"))).unwrap_or_default();
    assert_eq!(run.code, Some(0), "{}\n{}\n{}", run.stderr, log(0), log(2));
    assert_eq!((option("nodes"), option("ntasks-per-node")), ("3", "1"));
    assert!(option("signal").starts_with("TERM@"), "the ranks get the signal, not the script alone");
    let words = std::fs::read_to_string(p.path("srun.words")).unwrap();
    assert!(words.contains("--kill-on-bad-exit=0") && words.contains("--no-kill"), "{words}");
    assert_eq!(p.metrics("out").len(), 20, "{}", log(0));
    p.train(&["--output_dir", "alone", "--dp_shard_size", "1"]).succeeds();
    assert!(p.model_bytes("out") == p.model_bytes("alone"));
    let usage =
        Command::new("bash").arg(script).current_dir(p.dir.path()).env("PATH", "/usr/bin:/bin").output().unwrap();
    assert!(!usage.status.success() && String::from_utf8_lossy(&usage.stderr).contains("usage: sbatch"), "{usage:?}");
}

/// A stand-in for a command that writes its words to a file and exits with a code.
fn stand_in(p: &Project, name: &str, code: i32) {
    use std::os::unix::fs::PermissionsExt;
    let path = p.path(&format!("bin/{name}"));
    std::fs::write(&path, format!("#!/bin/sh\necho \"$@\" >> {name}.words\nexit {code}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn script_of_the_slurm_example_queues_only_an_interrupted_job_again() {
    let p = Project::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/slurm/finetune.sbatch");
    std::fs::create_dir(p.path("bin")).unwrap();
    let path = format!("{}:{}", p.path("bin").display(), std::env::var("PATH").unwrap());
    stand_in(&p, "scontrol", 0);
    let run = |code: i32| {
        stand_in(&p, "srun", code);
        let mut bash = Command::new("bash");
        bash.args([script, "job.yaml"]).current_dir(p.dir.path()).env("PATH", &path).env("SLURM_JOB_ID", "4711");
        bash.stdin(Stdio::null()).status().unwrap().code()
    };
    let asked = || std::fs::read_to_string(p.path("scontrol.words")).unwrap_or_default();

    for code in [0, 1, 2, 3, 137] {
        assert_eq!((run(code), asked()), (Some(code), String::new()));
    }
    assert_eq!(run(INTERRUPTED), Some(INTERRUPTED));
    assert_eq!(asked(), "requeue 4711\n");
}
