//! A job over machines whose network fails: one-way partitions, and connections that are reset. The machines are network namespaces
//! on one bridge; a wrong neighbour entry drops all packets from one to another. The tests are skipped where this process may not
//! create namespaces.

use crate::support::Project;
use crate::support::job::{Addresses, Job, UNENDING, equals_undisturbed_run, until};
use phalanx_needs::{Need, skip};
use std::process::Command;
use std::time::{Duration, Instant};

/// Three machines on one network: the coordinator's, and two nodes.
struct Network {
    names: Vec<String>,
}

const COORDINATOR: usize = 0;

impl Network {
    /// `None` if this process may not create one.
    fn new(what: &str) -> Option<Network> {
        let names: Vec<String> = (0..3).map(|i| format!("phx{}{what}{i}", std::process::id())).collect();
        let network = Network { names };
        for name in &network.names {
            if !ip(&["netns", "add", name]) {
                skip(Need::NetworkNamespaces, "`ip netns add` is not permitted");
                return None;
            }
        }
        let made = network.connect();
        if made.is_none() {
            skip(Need::NetworkNamespaces, "bridges or virtual links are not permitted");
        }
        made.map(|()| network)
    }

    fn connect(&self) -> Option<()> {
        let all = |commands: &[&[&str]]| commands.iter().all(|command| ip(command)).then_some(());
        let home = self.names[COORDINATOR].as_str();
        all(&[
            &["-n", home, "link", "set", "lo", "up"],
            &["-n", home, "link", "add", "br0", "type", "bridge"],
            &["-n", home, "addr", "add", &format!("{}/24", address(COORDINATOR)), "dev", "br0"],
            &["-n", home, "link", "set", "br0", "up"],
        ])?;
        for (i, name) in self.names.iter().enumerate().skip(1) {
            let port = format!("port{i}");
            all(&[
                &["-n", name, "link", "set", "lo", "up"],
                &["-n", name, "link", "add", "net", "type", "veth", "peer", "name", &port, "netns", home],
                &["-n", name, "addr", "add", &format!("{}/24", address(i)), "dev", "net"],
                &["-n", name, "link", "set", "net", "up"],
                &["-n", home, "link", "set", &port, "master", "br0", "up"],
            ])?;
        }
        Some(())
    }

    fn addresses(&self) -> Addresses {
        let nodes = self.names[1..].to_vec();
        let coordinator = Some(self.names[COORDINATOR].clone());
        Addresses { listen: "10.7.7.1:0".into(), coordinator, nodes, ..Addresses::default() }
    }

    /// Drops all packets from one machine to another.
    fn cut(&self, from: usize, to: usize) {
        let nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "net"];
        let there = address(to);
        let entry = [&["-n", &self.names[from], "neigh", "replace", &there], &nowhere[..]].concat();
        assert!(ip(&entry), "{entry:?}");
    }

    fn restore(&self, from: usize, to: usize) {
        assert!(ip(&["-n", &self.names[from], "neigh", "del", &address(to), "dev", "net"]));
    }

    /// Resets all TCP connections from one machine to another; what they carry is lost.
    fn reset(&self, from: usize, to: usize) {
        let kill = ["netns", "exec", &self.names[from], "ss", "-K", "dst", &address(to)];
        assert!(ip(&kill), "{kill:?}");
    }

    /// The status of the job, from its coordinator.
    fn status(&self, p: &Project) -> Option<serde_json::Value> {
        let place = Some(self.names[COORDINATOR].as_str());
        let output = p.command_in(place, &["status", "out", "--json"]).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&["netns", "del", name]);
        }
    }
}

fn address(i: usize) -> String {
    format!("10.7.7.{}", i + 1)
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
}

/// Two shards on two machines, without waiting for a replacement.
const KEYS: [&str; 2] = ["--elastic.replace_patience", "0"];
/// The promise is half a second beyond the detection time; machines that run many tests at once are slower.
const SLACK: Duration = Duration::from_secs(4);

/// How long the link is cut.
const OUTAGE: Duration = Duration::from_secs(2);

/// Cuts the link, waits until one node trains alone, restores the link, waits for both nodes, and compares the weights.
fn survives(what: &str, from: usize, to: usize) {
    let p = Project::new();
    let Some(network) = Network::new(what) else { return };
    let job = Job::start_at(&p, 2, &[&UNENDING[..], &KEYS].concat(), network.addresses());
    let until_mesh = |n| until_mesh(&network, &p, n);
    until_mesh(2);
    job.until_step(20);

    let began = Instant::now();
    network.cut(from, to);
    until_mesh(1);
    job.until_step(job.n_steps() + 2);
    let took = began.elapsed();
    // Long enough for a failed attempt to reach the node.
    std::thread::sleep(OUTAGE.saturating_sub(began.elapsed()));
    network.restore(from, to);
    let restored = Instant::now();
    until_mesh(2);
    let back = restored.elapsed();

    println!("{what}: trains again after {took:?}, on both nodes {back:?} after the end of the partition");
    assert!(took < Duration::from_secs(1) + SLACK, "{took:?}");
    assert!(back < OUTAGE + SLACK, "{back:?}");
    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "1"]);
}

/// Waits until the job trains with `n` shards.
fn until_mesh(network: &Network, p: &Project, n: u64) {
    until("a mesh", || {
        let status = network.status(p)?;
        (status["activity"] == "running" && status["mesh"]["dp_shard"].as_u64() == Some(n)).then_some(())
    });
}

#[test]
fn nodes_whose_connections_are_reset_again_and_again_train_together_soon_after_the_last_reset() {
    let p = Project::new();
    let Some(network) = Network::new("reset") else { return };
    let job = Job::start_at(&p, 2, &[&UNENDING[..], &KEYS].concat(), network.addresses());
    until_mesh(&network, &p, 2);
    job.until_step(20);

    let began = Instant::now();
    while began.elapsed() < OUTAGE {
        network.reset(1, 2);
        std::thread::sleep(Duration::from_millis(50));
    }
    let n_steps = job.n_steps();
    let last = Instant::now();
    until_mesh(&network, &p, 2);
    let back = last.elapsed();
    job.until_step(n_steps + 2);

    println!("reset: both nodes train {back:?} after the last reset");
    assert!(back < OUTAGE + SLACK, "{back:?}");
    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "1"]);
}

#[test]
fn node_that_cannot_reach_the_coordinator_is_left_out_until_it_can() {
    survives("mute", 2, COORDINATOR);
}

#[test]
fn one_of_two_nodes_that_cannot_reach_each_other_is_left_out_until_they_can() {
    survives("partition", 1, 2);
}
