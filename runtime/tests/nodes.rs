//! A job over several nodes, whose processes are killed and stopped while it trains: the weights are those of a run in
//! which nothing happened.

mod support;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::Project;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const JOB: [&str; 12] = [
    "--gradient_accumulation_steps",
    "1",
    "--microbatches_per_step",
    "4",
    "--max_steps",
    "300",
    "--reproducible",
    "true",
    "--dp_shard_size",
    "2",
    "--save_steps",
    "none",
];

/// Coordinator and nodes of a job. Killed when dropped.
struct Job<'a> {
    p: &'a Project,
    coordinator: Child,
    overrides: Vec<String>,
    address: String,
    join: String,
    nodes: Vec<Child>,
}

impl<'a> Job<'a> {
    fn start(p: &'a Project, n_nodes: usize) -> Job<'a> {
        Job::start_with(p, n_nodes, &[])
    }

    fn start_with(p: &'a Project, n_nodes: usize, overrides: &[&str]) -> Job<'a> {
        let overrides: Vec<String> = overrides.iter().map(|word| (*word).to_owned()).collect();
        let coordinator = coordinate(p, "127.0.0.1:0", &overrides);
        let control = p.path("out/control");
        let address = until("an address", || std::fs::read_to_string(control.join("address")).ok());
        let join = until("a join string", || {
            let said = std::fs::read_to_string(p.path("coordinator.log")).ok()?;
            said.lines().find_map(|line| Some(line.split_once("--join ")?.1.to_owned()))
        });
        let mut job = Job { p, coordinator, overrides, address, join, nodes: vec![] };
        (0..n_nodes).for_each(|i| job.add_node(i));
        job
    }

    /// Starts the node that has its key in folder `i`.
    fn add_node(&mut self, i: usize) {
        let log =
            std::fs::File::options().append(true).create(true).open(self.p.path(&format!("node{i}.log"))).unwrap();
        let mut command = self.p.command(&["node", "--join", &self.join, "--dir", &format!("node{i}")]);
        self.nodes.push(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    }

    fn restart_coordinator(&mut self) {
        self.coordinator.kill().unwrap();
        self.coordinator.wait().unwrap();
        self.coordinator = coordinate(self.p, &self.address, &self.overrides);
    }

    fn until_step(&self, n: usize) {
        until("a step", || {
            let text = std::fs::read_to_string(self.p.path("out/metrics.jsonl")).ok()?;
            (text.lines().count() >= n).then_some(())
        });
    }

    fn n_steps(&self) -> usize {
        self.p.metrics("out").len()
    }

    /// The rank processes of a node.
    fn ranks(&self, node: usize) -> Vec<u32> {
        let parent = format!("PPid:\t{}\n", self.nodes[node].id());
        let status = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok());
        pids.filter(|pid| status(pid).contains(&parent)).collect()
    }

    /// Waits for the end of all and returns the exported weights.
    fn finish(mut self) -> Vec<u8> {
        let said = |name: &str| std::fs::read_to_string(self.p.path(name)).unwrap_or_default();
        let deadline = Instant::now() + PATIENCE;
        let ended = loop {
            match self.coordinator.try_wait().unwrap() {
                Some(status) => break status.success(),
                None => assert!(Instant::now() < deadline, "{}{}", said("coordinator.log"), said("node0.log")),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(ended, "{}{}", said("coordinator.log"), said("node0.log"));
        self.p.model_bytes("out")
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        for child in self.nodes.iter_mut().chain([&mut self.coordinator]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn coordinate(p: &Project, listen: &str, overrides: &[String]) -> Child {
    let log = std::fs::File::options().append(true).create(true).open(p.path("coordinator.log")).unwrap();
    let args = [&["coordinator", "--listen", listen, "job.yaml"], &JOB[..]].concat();
    p.command(&args).args(overrides).stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null()).spawn().unwrap()
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[allow(unsafe_code)] // the standard library sends no signals
fn signal(pid: u32, signal: i32) {
    // SAFETY: sends a signal; no memory is involved.
    let sent = unsafe { libc::kill(pid as i32, signal) };
    assert_eq!(sent, 0, "process {pid} is there");
}

#[test]
fn nodes_and_coordinator_may_die_and_ranks_may_hang_without_a_trace_in_the_weights() {
    let p = Project::new();
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    let mut job = Job::start(&p, 2);

    job.until_step(10);
    signal(job.ranks(0)[0], libc::SIGKILL);
    job.until_step(30);
    signal(job.ranks(1)[0], libc::SIGSTOP);
    job.until_step(job.n_steps() + 10);
    // A whole node; its ranks go with it.
    job.nodes[1].kill().unwrap();
    job.nodes[1].wait().unwrap();
    job.add_node(1);
    job.until_step(job.n_steps() + 10);
    job.restart_coordinator();
    let before = job.n_steps();
    job.until_step(before + 5);

    assert_eq!(job.finish(), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is told of once");
}

#[test]
fn a_node_that_is_to_be_taken_away_leaves_its_state_to_another() {
    let p = Project::new();
    let long = ["--max_steps", "800"];
    p.train(&[&JOB[..], &long, &["--output_dir", "straight"]].concat()).succeeds();
    let mut job = Job::start_with(&p, 2, &long);
    job.until_step(10);
    job.add_node(2);
    until("a spare", || {
        let status = p.run(&["status", "out", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&status.stdout).ok()?;
        let nodes = status["nodes"].as_array()?;
        (nodes.iter().filter(|node| node["workers"][0]["pid"].is_u64()).count() == 3).then_some(())
    });

    signal(job.nodes[1].id(), libc::SIGTERM);
    let left = job.nodes[1].wait().unwrap();

    assert!(left.success(), "{left}");
    assert_eq!(job.finish(), p.model_bytes("straight"));
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    assert!(events.contains("\"why\":\"Drains\""), "{events}");
}

#[test]
fn a_job_shrinks_without_a_lost_node_and_grows_when_it_returns() {
    let p = Project::new();
    // Long enough that it is not over before the lost node is noticed.
    let long = ["--max_steps", "1500"];
    p.train(&[&JOB[..], &long, &["--dp_shard_size", "1", "--output_dir", "straight"]].concat()).succeeds();
    let three = ["--dp_shard_size", "3", "--elastic.replace_patience", "0"];
    let mut job = Job::start_with(&p, 3, &[&long[..], &three].concat());
    let until_mesh = |n: u64| {
        until("a mesh", || {
            let status = p.run(&["status", "out", "--json"]);
            let status: serde_json::Value = serde_json::from_str(&status.stdout).ok()?;
            (status["activity"] == "running" && status["mesh"]["dp_shard"].as_u64() == Some(n)).then_some(())
        });
    };

    until_mesh(3);
    job.nodes[2].kill().unwrap();
    job.nodes[2].wait().unwrap();
    until_mesh(2);
    job.add_node(2);
    until_mesh(3);
    p.run(&["save", "out"]).succeeds();

    assert_eq!(job.finish(), p.model_bytes("straight"));
}

#[test]
fn who_has_no_token_of_the_job_is_refused() {
    let p = Project::new();
    let job = Job::start(&p, 0);
    let (head, address) = job.join.rsplit_once('@').unwrap();
    let other = head[..head.len() - 1].to_owned() + if head.ends_with('a') { "b" } else { "a" };

    p.run(&["node", "--join", &format!("{other}@{address}"), "--dir", "stranger"]).refuses(&["join"]);
    p.run(&["node", "--join", "phx1.nonsense"]).refuses(&["--join"]);
}
