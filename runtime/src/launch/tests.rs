//! L-1 to L-4 with real processes: this test binary, started again as a rank or as a launcher, and shells.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::channel;
use super::cores::Cores;
use super::error::LaunchError;
use super::failure::{Cause, EXIT_PEER_LOST, Ending, Failure};
use super::frame::FrameError;
use super::rank_set::{RankEvent, RankSet, RankStart};
use super::sys;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tells this binary, started again, what to be. Absent in a normal run of the tests.
const ROLE: &str = "PHALANX_TEST_ROLE";

/// This binary as `test`, which looks at its role.
fn myself(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let path = module_path!().split_once("::").unwrap().1;
    command.args([&format!("{path}::{test}"), "--exact", "--nocapture"]).env(ROLE, role).stdout(Stdio::null());
    command
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    command
}

fn unbound(n_ranks: u32) -> Cores {
    Cores::split(&[], n_ranks, false)
}

fn shells(scripts: &[&str]) -> RankSet {
    RankSet::spawn(&unbound(scripts.len() as u32), |start| shell(scripts[start.rank as usize])).unwrap()
}

fn ranks(n_ranks: u32, role: &str) -> RankSet {
    let command = |start: &RankStart| myself("a_rank", &format!("{role} {}", start.channel));
    RankSet::spawn(&unbound(n_ranks), command).unwrap()
}

fn next(set: &mut RankSet) -> RankEvent {
    set.next_event(Some(PATIENCE)).unwrap().expect("an event comes in time")
}

/// Everything that happens until all ranks have ended.
fn rest(set: &mut RankSet) -> Vec<RankEvent> {
    let events = std::iter::from_fn(|| set.next_event(Some(PATIENCE)).unwrap()).collect();
    assert_eq!(set.n_live(), 0, "all ranks end in time");
    events
}

fn message(rank: u32, json: &str) -> RankEvent {
    RankEvent::Message { rank, bytes: json.into() }
}

fn exited(rank: u32, ending: Ending) -> RankEvent {
    RankEvent::Exited { rank, ending }
}

fn has_ended(process: &OwnedFd, timeout: Duration) -> bool {
    let fd = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    sys::poll(&mut [fd], Some(timeout)).unwrap()
}

/// Not a test by itself: what a rank does when a test starts this binary as one.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, fd) = role.split_once(' ').unwrap();
    let (mut sender, mut receiver) = channel::adopt(fd.parse().unwrap()).unwrap();
    match role {
        "echo" => {
            while let Some(frame) = receiver.receive().unwrap() {
                let number: u64 = serde_json::from_slice(&frame).unwrap();
                sender.send(&(number + 1)).unwrap();
                if number == 0 {
                    std::process::exit(7);
                }
            }
        }
        "last-words" => {
            (0..20).for_each(|i| sender.send(&(i, "x".repeat(5000))).unwrap());
            std::process::abort();
        }
        "threads" => sender.send(&std::thread::available_parallelism().unwrap().get()).unwrap(),
        "passage" => {
            let fd: i32 = serde_json::from_slice(&receiver.receive().unwrap().unwrap()).unwrap();
            let mut passage = channel::adopt_passage(fd).unwrap();
            let mut byte = [0];
            passage.read_exact(&mut byte).unwrap();
            passage.write_all(&[byte[0] + 1]).unwrap();
        }
        "deaf" => {
            sender.send(&"ready").unwrap();
            std::thread::sleep(PATIENCE * 10);
        }
        _ => unreachable!("no such role: {role}"),
    }
    std::process::exit(0);
}

/// Not a test by itself: a launcher of two ranks that prints their process ids and waits to be killed.
#[test]
fn a_launcher() {
    let Ok(role) = std::env::var(ROLE) else { return };
    assert_eq!(role, "launcher");
    let mut set = shells(&["exec sleep 1000", "exec sleep 1000"]);
    println!("pids {} {}", set.pid(0).unwrap(), set.pid(1).unwrap());
    let _ = set.next_event(None);
    unreachable!("no rank ends before its launcher");
}

#[test]
fn orders_reach_each_rank_and_answers_come_back_with_its_number() {
    let mut set = ranks(3, "echo");
    for rank in 0..3 {
        set.send(rank, &(u64::from(rank) * 10 + 1)).unwrap();
    }

    let mut answers: Vec<RankEvent> = (0..3).map(|_| next(&mut set)).collect();
    answers.sort_by_key(|event| if let RankEvent::Message { rank, .. } = event { *rank } else { 99 });

    assert_eq!(answers, [message(0, "2"), message(1, "12"), message(2, "22")]);
    set.send(1, &0u64).unwrap();
    assert_eq!([next(&mut set), next(&mut set)], [message(1, "1"), exited(1, Ending::Code(7))]);
    assert_eq!(set.failure().unwrap().to_string(), "rank 1 ended with code 7");
    assert_eq!(set.n_live(), 2);
    assert_eq!(set.send(1, &5u64), Ok(()), "an order to a rank that has ended is nothing");
    assert_eq!(set.send(3, &5u64), Err(LaunchError::NoSuchRank { rank: 3, n_ranks: 3 }));
}

#[test]
fn a_killed_rank_is_reported_with_its_number_and_signal_within_a_tenth_of_a_second() {
    let mut delays = Vec::new();
    for _ in 0..5 {
        let mut set = shells(&["exec sleep 1000", "exec sleep 1000", "exec sleep 1000"]);
        let pidfd = sys::pidfd_open(set.pid(1).unwrap()).unwrap();
        let killed = Instant::now();
        sys::pidfd_signal(pidfd.as_fd(), libc::SIGKILL).unwrap();

        let event = next(&mut set);

        delays.push(killed.elapsed());
        assert_eq!(event, exited(1, Ending::Signal(libc::SIGKILL)));
        let cause = Cause::Ended(Ending::Signal(libc::SIGKILL));
        assert_eq!(set.failure(), Some(&Failure { rank: 1, cause }));
    }
    // The fastest of a few: one may be late because the machine is busy, all are late only if somebody polls.
    assert!(delays.iter().min().unwrap() < &Duration::from_millis(100), "{delays:?}");
}

#[test]
fn everything_that_a_rank_said_before_it_died_is_reported_before_its_end() {
    let mut set = ranks(1, "last-words");
    let process = sys::pidfd_open(set.pid(0).unwrap()).unwrap();
    assert!(has_ended(&process, PATIENCE), "it need not be heard to end");

    let events = rest(&mut set);

    let is_message = |event: &&RankEvent| matches!(event, RankEvent::Message { bytes, .. } if bytes.len() > 5000);
    assert_eq!(events.iter().filter(is_message).count(), 20);
    assert_eq!(events.last(), Some(&exited(0, Ending::Signal(libc::SIGABRT))));
}

#[test]
fn ranks_end_with_their_launcher_however_it_ends() {
    let mut launcher = myself("a_launcher", "launcher").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let pids = lines.find_map(|line| line.unwrap().split_once("pids ").map(|(_, pids)| pids.to_owned())).unwrap();
    let processes: Vec<OwnedFd> = pids.split(' ').map(|pid| sys::pidfd_open(pid.parse().unwrap()).unwrap()).collect();
    assert!(!processes.iter().any(|process| has_ended(process, Duration::ZERO)));

    launcher.kill().unwrap();
    launcher.wait().unwrap();

    assert!(processes.iter().all(|process| has_ended(process, PATIENCE)));
}

#[test]
fn ranks_end_with_their_set() {
    let set = shells(&["exec sleep 1000"]);
    let process = sys::pidfd_open(set.pid(0).unwrap()).unwrap();

    drop(set);

    assert!(has_ended(&process, PATIENCE));
}

#[test]
fn the_last_lines_of_a_rank_are_kept_for_the_message_about_it() {
    let mut set = shells(&["for i in $(seq 100); do echo line $i >&2; done; printf 'no end' >&2; exit 3"]);

    let events = rest(&mut set);

    let lines = set.last_lines(0);
    assert_eq!((lines.len(), lines[38], lines[39]), (40, "line 100", "no end"));
    assert_eq!(events[0], RankEvent::Line { rank: 0, text: "line 1".into() });
    assert_eq!(events.last(), Some(&exited(0, Ending::Code(3))));
    assert!(set.last_lines(1).is_empty());
}

#[test]
fn ranks_that_end_because_another_was_lost_or_because_they_were_told_to_are_not_the_cause() {
    let lost_peer = format!("exit {EXIT_PEER_LOST}");
    let mut set = shells(&[&lost_peer, "exec sleep 1000", "exec sleep 1000"]);
    assert_eq!(next(&mut set), exited(0, Ending::Code(EXIT_PEER_LOST)));
    assert_eq!(set.failure().unwrap().rank, 0, "there is no better explanation yet");
    let pidfd = sys::pidfd_open(set.pid(2).unwrap()).unwrap();
    sys::pidfd_signal(pidfd.as_fd(), libc::SIGSEGV).unwrap();
    assert_eq!(next(&mut set), exited(2, Ending::Signal(libc::SIGSEGV)));

    set.terminate_all(PATIENCE).unwrap();

    assert_eq!(rest(&mut set), [exited(1, Ending::Signal(libc::SIGTERM))]);
    assert_eq!(set.failure().unwrap().to_string(), "rank 2 was ended by signal 11 (SIGSEGV)");
}

#[test]
fn ranks_that_are_told_to_end_have_not_failed() {
    let mut set = shells(&["exec sleep 1000", "exec sleep 1000"]);

    set.terminate_all(PATIENCE).unwrap();

    assert_eq!((set.failure(), set.n_live()), (None, 0));
}

#[test]
fn a_rank_that_does_not_end_when_asked_is_killed_after_the_grace() {
    let mut set = shells(&["trap '' TERM; echo ready >&2; while true; do sleep 0.05; done", "exec sleep 1000"]);
    assert_eq!(next(&mut set), RankEvent::Line { rank: 0, text: "ready".into() });

    set.terminate_all(Duration::from_millis(50)).unwrap();

    let events = rest(&mut set);
    assert!(events.contains(&exited(0, Ending::Signal(libc::SIGKILL))), "{events:?}");
    assert!(events.contains(&exited(1, Ending::Signal(libc::SIGTERM))), "{events:?}");
}

#[test]
fn a_rank_that_sends_no_frames_is_killed_and_to_blame() {
    let mut set = RankSet::spawn(&unbound(1), |start| myself("a_garbler", &start.channel.to_string())).unwrap();

    let events = rest(&mut set);

    assert_eq!(events.last(), Some(&exited(0, Ending::Signal(libc::SIGKILL))));
    let found = u32::from_le_bytes(*b"not ") as usize;
    assert_eq!(set.failure(), Some(&Failure { rank: 0, cause: Cause::Garbled(FrameError::TooLong { found }) }));
}

/// Not a test by itself: a rank that does not speak in frames.
#[test]
fn a_garbler() {
    let Ok(fd) = std::env::var(ROLE) else { return };
    let mut socket = sys::inherited_socket(fd.parse().unwrap()).unwrap();
    socket.write_all(b"not a frame").unwrap();
    std::thread::sleep(PATIENCE * 10);
}

#[test]
fn a_rank_that_does_not_read_does_not_hold_up_its_launcher() {
    let mut set = ranks(1, "deaf");
    assert_eq!(next(&mut set), message(0, "\"ready\""));
    let order = "x".repeat(1 << 19);

    let refused = (0..20).find_map(|_| set.send(0, &order).err());

    assert!(matches!(refused, Some(LaunchError::Congested { rank: 0, n_bytes }) if n_bytes <= 2 << 20), "{refused:?}");
    assert_eq!(set.next_event(Some(Duration::from_millis(1))), Ok(None));
}

#[test]
fn bound_ranks_may_use_their_cores_only() {
    let cpus = sys::allowed_cpus().unwrap();
    let cores = Cores::split(&cpus[..1], 1, true);
    let command = |start: &RankStart| myself("a_rank", &format!("threads {}", start.channel));
    let mut set = RankSet::spawn(&cores, command).unwrap();

    assert_eq!(next(&mut set), message(0, "1"));
}

#[test]
fn a_descriptor_of_the_callers_ends_the_wait_too() {
    let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut set = shells(&["exec sleep 1000"]);
    set.wake_on(reader.into());
    assert_eq!(set.next_event(Some(Duration::ZERO)), Ok(None));

    writer.write_all(b"x").unwrap();

    assert_eq!(next(&mut set), RankEvent::Woken);
    set.terminate_all(PATIENCE).unwrap();
}

#[test]
fn each_rank_has_a_passage_beside_its_channel() {
    let mut fds = Vec::new();
    let command = |start: &RankStart| {
        fds.push(start.passage);
        myself("a_rank", &format!("passage {}", start.channel))
    };
    let mut set = RankSet::spawn(&unbound(2), command).unwrap();
    let passages = [0, 1].map(|rank| set.take_passage(rank).unwrap());
    assert!(set.take_passage(0).is_none());

    for (rank, mut passage) in (0..).zip(passages) {
        let mut answer = [0];
        set.send(rank, &fds[rank as usize]).unwrap();
        passage.write_all(&[rank as u8 * 10]).unwrap();
        passage.read_exact(&mut answer).unwrap();

        assert_eq!(answer, [rank as u8 * 10 + 1]);
    }
}

#[test]
fn a_rank_that_cannot_be_started_is_named() {
    let command = |start: &RankStart| Command::new(if start.rank == 1 { "/nonexistent/phalanx" } else { "/bin/cat" });

    let error = RankSet::spawn(&unbound(2), command).err();

    assert!(matches!(error, Some(LaunchError::Start { rank: 1, .. })));
}

#[test]
fn descriptors_that_are_no_channel_are_refused() {
    for fd in [0, 2, 999_999] {
        assert_eq!(channel::adopt(fd).err(), Some(LaunchError::NoChannel { fd }));
    }
}
