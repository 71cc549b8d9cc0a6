//! A job over several nodes. Coordinator and nodes are processes that a test can kill, stop and disconnect.

use super::{Project, Run, ranks_of};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Longer than any wait of these tests takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(600);
pub const JOB: [&str; 12] = [
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
/// Further keys of a job that trains until it is stopped. Its steps do not depend on their number.
pub const UNENDING: [&str; 4] = ["--max_steps", "1000000", "--lr_scheduler", "constant"];

/// Addresses and network namespaces of a job's processes; the namespace of the test by default.
#[derive(Debug)]
pub struct Addresses {
    pub listen: String,
    /// The addresses of all coordinators, if there are several.
    pub advertise: Option<String>,
    pub coordinator: Option<String>,
    pub nodes: Vec<String>,
    pub ranks_per_node: usize,
    /// Folders of the project in which the nodes run, each with its own data; by default all share the project.
    pub disks: Vec<&'static str>,
    /// Environment variables of the nodes.
    pub variables: Vec<(&'static str, String)>,
}

impl Default for Addresses {
    fn default() -> Addresses {
        Addresses {
            listen: "127.0.0.1:0".into(),
            advertise: None,
            coordinator: None,
            nodes: vec![],
            ranks_per_node: 1,
            disks: vec![],
            variables: vec![],
        }
    }
}

/// Coordinator and nodes of a job. Killed when dropped.
pub struct Job<'a> {
    pub p: &'a Project,
    pub coordinator: Child,
    overrides: Vec<String>,
    pub address: String,
    pub join: String,
    pub nodes: Vec<Child>,
    addresses: Addresses,
}

impl<'a> Job<'a> {
    pub fn start(p: &'a Project, n_nodes: usize) -> Job<'a> {
        Job::start_with(p, n_nodes, &[])
    }

    pub fn start_with(p: &'a Project, n_nodes: usize, overrides: &[&str]) -> Job<'a> {
        Job::start_at(p, n_nodes, overrides, Addresses::default())
    }

    pub fn start_at(p: &'a Project, n_nodes: usize, overrides: &[&str], addresses: Addresses) -> Job<'a> {
        let overrides: Vec<String> = overrides.iter().map(|word| (*word).to_owned()).collect();
        let coordinator = coordinate(p, &addresses.listen, &overrides, &addresses);
        let control = p.path("out/control");
        let address = until("an address", || std::fs::read_to_string(control.join("address")).ok());
        let join = until("a join string", || {
            let log = std::fs::read_to_string(p.path("coordinator.log")).ok()?;
            log.lines().find_map(|line| Some(line.split_once("--join ")?.1.to_owned()))
        });
        let mut job = Job { p, coordinator, overrides, address, join, nodes: vec![], addresses };
        (0..n_nodes).for_each(|i| job.add_node(i));
        job
    }

    /// Starts a node with its key in folder `node{i}`.
    pub fn add_node(&mut self, i: usize) {
        self.add_node_of(i, self.addresses.ranks_per_node);
    }

    /// Starts a node with `n_ranks` rank processes.
    pub fn add_node_of(&mut self, i: usize, n_ranks: usize) {
        let log =
            std::fs::File::options().append(true).create(true).open(self.p.path(&format!("node{i}.log"))).unwrap();
        let place = self.addresses.nodes.get(i).map(String::as_str);
        let ranks = n_ranks.to_string();
        let dir = format!("node{i}");
        let mut command = self.p.command_in(place, &["node", "--join", &self.join, "--dir", &dir, "--ranks", &ranks]);
        if let Some(disk) = self.addresses.disks.get(i) {
            command.current_dir(self.p.path(disk));
        }
        command.envs(self.addresses.variables.iter().cloned());
        self.nodes.push(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    }

    pub fn restart_coordinator(&mut self) {
        self.coordinator.kill().unwrap();
        self.coordinator.wait().unwrap();
        self.restart_coordinator_after_its_end();
    }

    /// Starts a coordinator at the address of the one that has ended.
    pub fn restart_coordinator_after_its_end(&mut self) {
        self.coordinator = coordinate(self.p, &self.address, &self.overrides, &self.addresses);
    }

    /// Starts a second coordinator, and kills the first when the second is a standby.
    pub fn replace_coordinator(&mut self, listen: &str) {
        let standby = coordinate(self.p, listen, &self.overrides, &self.addresses);
        until("a standby", || {
            std::fs::read_to_string(self.p.path("coordinator.log"))
                .ok()?
                .contains("to take over if it fails")
                .then_some(())
        });
        let mut before = std::mem::replace(&mut self.coordinator, standby);
        before.kill().unwrap();
        before.wait().unwrap();
    }

    pub fn until_step(&self, n: usize) {
        until("a step", || {
            let text = std::fs::read_to_string(self.p.path("out/metrics.jsonl")).ok()?;
            (text.lines().count() >= n).then_some(())
        });
    }

    pub fn n_steps(&self) -> usize {
        self.p.metrics("out").len()
    }

    /// The rank processes of a node.
    pub fn ranks(&self, node: usize) -> Vec<u32> {
        let parent = format!("PPid:\t{}\n", self.nodes[node].id());
        let status = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok());
        pids.filter(|pid| status(pid).contains(&parent)).collect()
    }

    /// Stops the job as an operator does. Returns the number of its steps.
    pub fn stop(mut self) -> usize {
        signal(self.coordinator.id(), libc::SIGTERM);
        self.end();
        self.n_steps()
    }

    /// Waits for the end of the job and returns the exported weights.
    pub fn finish(mut self) -> Vec<u8> {
        self.end();
        self.p.model_bytes("out")
    }

    fn end(&mut self) {
        let log = |name: &str| std::fs::read_to_string(self.p.path(name)).unwrap_or_default();
        let deadline = Instant::now() + PATIENCE;
        let ended = loop {
            match self.coordinator.try_wait().unwrap() {
                Some(status) => break status.success(),
                None => assert!(Instant::now() < deadline, "{}{}", log("coordinator.log"), log("node0.log")),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(ended, "{}{}", log("coordinator.log"), log("node0.log"));
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

/// Trains one more step after a job of `keys` was stopped at `n_steps`, and compares its measurements and weights with those of an
/// undisturbed run. Every step is reported once.
#[track_caller]
pub fn equals_undisturbed_run(p: &Project, n_steps: usize, keys: &[&str]) {
    let one_more = (n_steps + 1).to_string();
    let keys = [&JOB[..], &UNENDING, keys, &["--max_steps", &one_more]].concat();
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();
    let resumed = p.train(&keys).succeeds().stdout;

    assert!(resumed.contains(&format!("resuming at step {n_steps} ")), "{n_steps} steps: {resumed}");
    assert_eq!(p.metrics("out"), p.metrics("straight"));
    let weights = |out: &str| {
        let files = ["model/model.safetensors", "model/adapter_model.safetensors"];
        files
            .map(|file| p.path(out).join(file))
            .into_iter()
            .find_map(|file| std::fs::read(file).ok())
            .expect("an export")
    };
    assert!(weights("out") == weights("straight"), "the weights differ");
}

fn coordinate(p: &Project, listen: &str, overrides: &[String], addresses: &Addresses) -> Child {
    let log = std::fs::File::options().append(true).create(true).open(p.path("coordinator.log")).unwrap();
    let advertise: Vec<&str> = addresses.advertise.iter().flat_map(|all| ["--advertise", all]).collect();
    let args = [&["coordinator", "--listen", listen], &advertise[..], &["job.yaml"], &JOB[..]].concat();
    p.command_in(addresses.coordinator.as_deref(), &args)
        .args(overrides)
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// Runs a job of two ranks on this machine, and kills the rank at each of these places of the list of its processes when the job has done
/// so many steps.
#[track_caller]
pub fn with_kills(p: &Project, keys: &[&str], kills: &[(usize, usize)]) -> Run {
    let mut command = p.command(&[&["train", "job.yaml"], keys].concat());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for &(victim, n_steps) in kills {
        until("steps", || (p.path("out/metrics.jsonl").exists() && p.metrics("out").len() >= n_steps).then_some(()));
        let ranks = until("two ranks", || Some(ranks_of(child.id())).filter(|ranks| ranks.len() == 2));
        signal(ranks[victim], libc::SIGKILL);
    }
    let run = Run::of(child.wait_with_output().unwrap()).succeeds();
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    assert!(events.contains("\"why\":\"Died\""), "{events}");
    run
}

pub fn until<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "timeout while waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn signal(pid: u32, signal: i32) {
    assert!(reaches(pid, signal), "process {pid} exists");
}

/// Sends a signal to a process; returns whether the process exists.
#[allow(unsafe_code)] // the standard library sends no signals
pub fn reaches(pid: u32, signal: i32) -> bool {
    // SAFETY: sends a signal; no memory is involved.
    unsafe { libc::kill(pid as i32, signal) == 0 }
}
