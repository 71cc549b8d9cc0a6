//! Overhead of many nodes at one coordinator: CPU for heartbeats, memory for connections.
//!
//! `cargo bench -p phalanx-actors --bench connections -- [NODES] [DETECTION_TIME_MS …]`; default 1,000 nodes at the
//! default detection time. The nodes are real links, each with its certificate and socket. They run in a second process, so
//! that only the coordinator is measured, and share a thread: on loopback the sender pays for waking the receiver, which does
//! not happen on a network. Linux only.

use anyhow::{Context, Result, ensure};
use phalanx_actors::quic::link::{Link, LinkConfig};
use phalanx_actors::quic::listener::Listener;
use phalanx_actors::quic::listener_config::ListenerConfig;
use phalanx_actors::transport::{Downlink, Inbound, Uplink};
use phalanx_actors::trust::authority::Authority;
use phalanx_actors::trust::name::Role;
use phalanx_actors::trust::validity::Validity;
use phalanx_strategies::elastic::commit::CommitState;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, MemberId, NodeId, Step, Worker};
use phalanx_strategies::elastic::message::{DesiredStateId, MemberPhase, MemberReport, Report};
use phalanx_strategies::elastic::shadow::{Cut, Shard};
use phalanx_strategies::elastic::timing::Timing;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;

const JOB: JobId = JobId(1);
const MEASURED: Duration = Duration::from_secs(10);
const RANKS_PER_NODE: u32 = 8;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.as_slice() {
        [mode, dir, address, n_nodes, detection_ms] if mode == "nodes" => {
            nodes(Path::new(dir), address, n_nodes.parse()?, detection_ms.parse()?)
        }
        [n_nodes, detection_ms @ ..] => {
            let detection_ms: Result<Vec<u64>, _> = detection_ms.iter().map(|ms| ms.parse()).collect();
            let detection_ms = detection_ms.context("expected detection times in milliseconds")?;
            let default = vec![1_000];
            for ms in if detection_ms.is_empty() { default } else { detection_ms } {
                coordinator(n_nodes.parse().context("expected a number of nodes")?, ms)?;
            }
            Ok(())
        }
        [] => coordinator(1_000, 1_000),
    }
}

/// Waits until all nodes are connected.
fn await_nodes(n_nodes: u32, events: &mut mpsc::Receiver<Inbound>) -> Result<()> {
    let since = Instant::now();
    let mut n_connected = 0;
    while n_connected < n_nodes {
        match events.blocking_recv().context("the listener has ended")? {
            Inbound::Connected { .. } => n_connected += 1,
            Inbound::Disconnected { node, why, .. } => println!("lost {node} while other nodes connect: {why}"),
            _ => {}
        }
        ensure!(since.elapsed() < Duration::from_secs(120), "{n_connected} of {n_nodes} nodes connected within 120 s");
    }
    Ok(())
}

/// Starts the listener and the process of the nodes, and measures this process.
fn coordinator(n_nodes: u32, detection_ms: u64) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let timing = Timing::derive(Duration::from_millis(detection_ms));
    let mut config = ListenerConfig::new(dir.path(), JOB);
    config.timing = timing;
    let (listener, mut events) = Listener::start(config)?;
    let before = memory_bytes()?;
    let mut nodes = Command::new(std::env::current_exe()?)
        .args(["nodes", &dir.path().display().to_string(), &listener.address().to_string()])
        .args([n_nodes.to_string(), detection_ms.to_string()])
        .stdin(Stdio::piped())
        .spawn()?;
    let since = Instant::now();
    await_nodes(n_nodes, &mut events)?;
    let connecting = since.elapsed();
    // Excludes the handshakes of the last nodes from the measurement.
    while since.elapsed() < connecting + Duration::from_secs(2) {
        events.blocking_recv().context("the listener has ended")?;
    }
    let memory = memory_bytes()?.saturating_sub(before);
    let (start, cpu) = (Instant::now(), cpu_time()?);
    let (mut n_reports, mut n_lost) = (0_u64, 0_u64);
    while start.elapsed() < MEASURED {
        match events.blocking_recv().context("the listener has ended")? {
            Inbound::Report(_) => n_reports += 1,
            Inbound::Heartbeats(reports) => n_reports += reports.len() as u64,
            Inbound::Disconnected { node, why, .. } => {
                if n_lost == 0 {
                    println!("lost {node}: {why}");
                }
                n_lost += 1;
            }
            _ => {}
        }
    }
    let (elapsed, after) = (start.elapsed().as_secs_f64(), cpu_time()?);
    let [listener_s, rest_s] = [after.listener - cpu.listener, after.rest - cpu.rest];
    println!(
        "{n_nodes} nodes, connected in {:.1} s; a heartbeat every {:?}: {:.0}/s, {n_lost} nodes lost; \
         coordinator CPU {:.1} % of a core (sockets {:.1} %, events {:.1} %), {:.1} us per heartbeat; {:.0} KiB per connection",
        connecting.as_secs_f64(),
        timing.heartbeat,
        n_reports as f64 / elapsed,
        (listener_s + rest_s) / elapsed * 100.0,
        listener_s / elapsed * 100.0,
        rest_s / elapsed * 100.0,
        (listener_s + rest_s) / n_reports as f64 * 1e6,
        memory as f64 / 1024.0 / f64::from(n_nodes),
    );
    nodes.kill()?;
    nodes.wait()?;
    listener.close();
    Ok(())
}

/// Runs `n_nodes` links in this process. Each link sends the same report repeatedly.
fn nodes(dir: &Path, address: &str, n_nodes: u32, detection_ms: u64) -> Result<()> {
    let timing = Timing::derive(Duration::from_millis(detection_ms));
    let authority = Authority::open(dir, JOB)?;
    let validity = Validity::starting(SystemTime::now(), Validity::LIFETIME);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut links = Vec::new();
        for id in 0..n_nodes {
            let (node, boot) = (NodeId(id), Incarnation(1 << 41));
            let config = LinkConfig {
                addresses: vec![address.parse()?],
                published: None,
                dir: dir.to_path_buf(),
                timing,
                n_desired_states_max: 1,
            };
            let (link, desired_states) =
                Link::spawn(config, authority.credential(Role::Node { node, boot }, validity)?)?;
            links.push((link, desired_states, report(node, boot)));
            tokio::task::yield_now().await;
        }
        // Spreads the nodes' heartbeats over the interval, as on independent machines.
        let start = tokio::time::Instant::now();
        for beat in 0.. {
            for (idx, (link, _, report)) in links.iter_mut().enumerate() {
                let due = start + timing.heartbeat * beat + timing.heartbeat * u32::try_from(idx)? / n_nodes;
                tokio::time::sleep_until(due).await;
                report.number += 1;
                link.heartbeat(report)?;
            }
        }
        Ok(())
    })
}

/// The report of a large node without incidents.
fn report(node: NodeId, boot: Incarnation) -> Report {
    let cut = Cut { n_stages: 2, n_tensors: 2, n_parts: 4_000 };
    let shard = |part| Shard { stage: 1, tensor: 1, part: part % cut.n_parts, cut };
    let member = |slot| MemberReport {
        worker: Worker { member: MemberId { node, slot }, incarnation: boot },
        pid: Some(70_000 + slot),
        address: Some(SocketAddr::from((Ipv4Addr::from(0x0a00_0000 + node.0), 40_000))),
        device: None,
        hangs: false,
        generation: Generation(12),
        phase: MemberPhase::Running,
        entered: Step(70_000),
        progress: Default::default(),
        broken: None,
        commit_state: CommitState { entered: Generation(12), applied: None, voted: None },
        holds: vec![shard(node.0 * RANKS_PER_NODE + slot), shard(slot)],
        saved: None,
        unsaved: None,
        failure: None,
        settled: None,
        fault: None,
    };
    let members = (0..RANKS_PER_NODE).map(member).collect();
    Report {
        job: JOB,
        node,
        boot,
        number: 0,
        desired_state: DesiredStateId::default(),
        draining: false,
        n_failed_starts: 0,
        inputs: vec![],
        devices: Vec::new(),
        members,
    }
}

/// Seconds of CPU that this process has used.
struct CpuTime {
    listener: f64,
    rest: f64,
}

/// CPU time by thread. The kernel's resolution is 10 ms.
fn cpu_time() -> Result<CpuTime> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let mut time = CpuTime { listener: 0.0, rest: 0.0 };
    for task in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(task?.path().join("stat"))?;
        let (name, fields) = stat.rsplit_once(')').context("a task without a name in /proc/self/task")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let seconds = (fields[11].parse::<f64>()? + fields[12].parse::<f64>()?) / TICKS_PER_SECOND;
        if name.contains("phalanx-listen") {
            time.listener += seconds;
        } else {
            time.rest += seconds;
        }
    }
    Ok(time)
}

fn memory_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? * 1024)
}
