//! LAUNCH-1 to LAUNCH-3 with real processes: this test binary, started as a rank or a launcher, and shells.
#![allow(unsafe_code)] // A rank takes its inherited descriptors.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::channel;
use super::error::LaunchError;
use super::failure::Ending;
use super::liveness;
use super::slots::{SlotEvent, Slots};
use super::sys;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Role of this binary when a test starts it. Absent in a normal run of the tests.
const ROLE: &str = "PHALANX_TEST_ROLE";

/// This binary as `test`, which reads its role.
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

fn shells(scripts: &[&str]) -> Slots {
    let mut slots = Slots::new(scripts.len() as u32);
    for (slot, script) in (0..).zip(scripts) {
        slots.start(slot, &[], |_, _| shell(script)).unwrap();
    }
    slots
}

fn ranks(n_ranks: u32, role: &str) -> Slots {
    let mut slots = Slots::new(n_ranks);
    for slot in 0..n_ranks {
        slots.start(slot, &[], |channel, _| myself("a_rank", &format!("{role} {channel}"))).unwrap();
    }
    slots
}

fn next(slots: &mut Slots) -> SlotEvent {
    slots.next_event(Some(PATIENCE)).unwrap().expect("an event comes in time")
}

/// All events until all processes have exited.
fn rest(slots: &mut Slots) -> Vec<SlotEvent> {
    let mut events = Vec::new();
    while slots.n_taken() > 0 {
        events.push(next(slots));
    }
    while let Some(event) = slots.next_event(Some(Duration::ZERO)).unwrap() {
        events.push(event);
    }
    events
}

fn message(slot: u32, json: &str) -> SlotEvent {
    SlotEvent::Message { slot, bytes: json.into() }
}

fn exited(slot: u32, ending: Ending) -> SlotEvent {
    SlotEvent::Exited { slot, ending }
}

fn has_ended(process: &OwnedFd, timeout: Duration) -> bool {
    let fd = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    sys::poll(&mut [fd], Some(timeout)).unwrap()
}

/// Not a test by itself: the rank process that other tests start.
#[test]
fn a_rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, fd) = role.split_once(' ').unwrap();
    // SAFETY: the launcher opened the descriptor for this call.
    let (mut sender, mut receiver) = unsafe { channel::adopt(fd.parse().unwrap()) }.unwrap();
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
        "aborts" => {
            (0..20).for_each(|i| sender.send(&(i, "x".repeat(5000))).unwrap());
            std::process::abort();
        }
        "threads" => sender.send(&std::thread::available_parallelism().unwrap().get()).unwrap(),
        "fd_channel" => {
            let fd: i32 = serde_json::from_slice(&receiver.receive().unwrap().unwrap()).unwrap();
            // SAFETY: as above.
            let mut fd_channel = unsafe { channel::adopt_fd_channel(fd) }.unwrap();
            let mut byte = [0];
            fd_channel.read_exact(&mut byte).unwrap();
            fd_channel.write_all(&[byte[0] + 1]).unwrap();
        }
        "closes-liveness" => {
            sys::replace_stdin().unwrap();
            std::thread::sleep(PATIENCE * 10);
        }
        "holds-liveness" => {
            liveness::hold().unwrap();
            // SAFETY: lets any process trace this one, where the system restricts it.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
            sender.send(&"ready").unwrap();
            std::thread::sleep(PATIENCE * 10);
        }
        "never-reads" => {
            sender.send(&"ready").unwrap();
            std::thread::sleep(PATIENCE * 10);
        }
        _ => unreachable!("no such role: {role}"),
    }
    std::process::exit(0);
}

/// Not a test by itself: a launcher of two ranks that prints their process ids and waits to be killed.
#[test]
fn launcher() {
    let Ok(role) = std::env::var(ROLE) else { return };
    assert_eq!(role, "launcher");
    let mut slots = shells(&["exec sleep 1000", "exec sleep 1000"]);
    println!("pids {} {}", slots.pid(0).unwrap(), slots.pid(1).unwrap());
    let _ = slots.next_event(None);
    unreachable!("no rank ends before its launcher");
}

#[test]
fn messages_reach_each_process_and_answers_carry_its_slot() {
    let mut slots = ranks(3, "echo");
    for slot in 0..3 {
        slots.send(slot, &(u64::from(slot) * 10 + 1)).unwrap();
    }

    let mut answers: Vec<SlotEvent> = (0..3).map(|_| next(&mut slots)).collect();
    answers.sort_by_key(|event| if let SlotEvent::Message { slot, .. } = event { *slot } else { 99 });

    assert_eq!(answers, [message(0, "2"), message(1, "12"), message(2, "22")]);
    slots.send(1, &0u64).unwrap();
    assert_eq!([next(&mut slots), next(&mut slots)], [message(1, "1"), exited(1, Ending::Code(7))]);
    assert_eq!((slots.n_taken(), slots.pid(1)), (2, None));
    assert_eq!(slots.send(1, &5u64), Ok(()), "sending to a free slot does nothing");
}

#[test]
fn killed_process_is_reported_with_its_slot_and_signal_within_a_tenth_of_a_second() {
    let mut delays = Vec::new();
    for _ in 0..5 {
        let mut slots = shells(&["exec sleep 1000", "exec sleep 1000", "exec sleep 1000"]);
        let pidfd = sys::pidfd_open(slots.pid(1).unwrap()).unwrap();
        let killed = Instant::now();
        sys::pidfd_signal(pidfd.as_fd(), libc::SIGKILL).unwrap();

        let event = next(&mut slots);

        delays.push(killed.elapsed());
        assert_eq!(event, exited(1, Ending::Signal(libc::SIGKILL)));
        assert_eq!((slots.n_taken(), slots.pid(1)), (2, None), "the slot is free");
    }
    // The fastest of five: a busy machine may delay some, but only polling would delay all.
    assert!(delays.iter().min().unwrap() < &Duration::from_millis(100), "{delays:?}");
}

#[test]
fn frames_sent_before_a_process_dies_are_reported_before_its_exit() {
    let mut slots = ranks(1, "aborts");
    let process = sys::pidfd_open(slots.pid(0).unwrap()).unwrap();
    assert!(has_ended(&process, PATIENCE), "the process exits although its output is not read");

    let events = rest(&mut slots);

    let is_message = |event: &&SlotEvent| matches!(event, SlotEvent::Message { bytes, .. } if bytes.len() > 5000);
    assert_eq!(events.iter().filter(is_message).count(), 20);
    assert_eq!(events.last(), Some(&exited(0, Ending::Signal(libc::SIGABRT))));
}

#[test]
fn lines_of_standard_error_are_reported_whole_and_before_the_exit() {
    let mut slots = shells(&["for i in $(seq 100); do echo line $i >&2; done; printf 'no end' >&2; exit 3"]);

    let events = rest(&mut slots);

    let mut expected: Vec<String> = (1..=100).map(|i| format!("line {i}")).collect();
    expected.push("no end".to_owned());
    let lines: Vec<SlotEvent> = expected.into_iter().map(|text| SlotEvent::Line { slot: 0, text }).collect();
    assert_eq!(events[..101], lines);
    assert_eq!(events[101..], [exited(0, Ending::Code(3))]);
}

#[test]
fn processes_die_with_their_killed_launcher() {
    let mut launcher = myself("launcher", "launcher").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let pids = lines.find_map(|line| line.unwrap().split_once("pids ").map(|(_, pids)| pids.to_owned())).unwrap();
    let processes: Vec<OwnedFd> = pids.split(' ').map(|pid| sys::pidfd_open(pid.parse().unwrap()).unwrap()).collect();
    assert!(!processes.iter().any(|process| has_ended(process, Duration::ZERO)));

    launcher.kill().unwrap();
    launcher.wait().unwrap();

    assert!(processes.iter().all(|process| has_ended(process, PATIENCE)));
}

#[test]
fn dropping_the_slots_kills_their_processes() {
    let slots = shells(&["exec sleep 1000"]);
    let process = sys::pidfd_open(slots.pid(0).unwrap()).unwrap();

    drop(slots);

    assert!(has_ended(&process, PATIENCE));
}

#[test]
fn killed_slot_is_free_even_if_its_process_ignores_sigterm() {
    let mut slots = shells(&["trap '' TERM; echo ready >&2; while true; do sleep 0.05; done"]);
    assert_eq!(next(&mut slots), SlotEvent::Line { slot: 0, text: "ready".into() });
    slots.signal(0, libc::SIGTERM).unwrap();

    slots.kill(0).unwrap();

    assert_eq!(slots.pid(0), None);
    slots.start(0, &[], |_, _| shell("exit 5")).unwrap();
    assert_eq!(rest(&mut slots), [exited(0, Ending::Signal(libc::SIGKILL)), exited(0, Ending::Code(5))]);
}

#[test]
fn process_that_sends_an_invalid_frame_is_killed() {
    let mut slots = Slots::new(1);
    slots.start(0, &[], |channel, _| myself("rank_that_sends_invalid_frames", &channel.to_string())).unwrap();

    let events = rest(&mut slots);

    assert_eq!(events.last(), Some(&exited(0, Ending::Signal(libc::SIGKILL))));
}

/// Not a test by itself: a rank that sends bytes that are not a frame.
#[test]
fn rank_that_sends_invalid_frames() {
    let Ok(fd) = std::env::var(ROLE) else { return };
    // SAFETY: the launcher opened the descriptor for this call.
    let mut socket = unsafe { sys::inherited_socket(fd.parse().unwrap()) }.unwrap();
    socket.write_all(b"not a frame").unwrap();
    std::thread::sleep(PATIENCE * 10);
}

/// Not a test by itself: holds the process of its role in the exit until the test closes its standard input.
#[test]
fn tracer() {
    let Ok(pid) = std::env::var(ROLE) else { return };
    let (pid, none): (libc::pid_t, _) = (pid.parse().unwrap(), std::ptr::null_mut::<libc::c_void>());
    // SAFETY: the call uses no memory of this process.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, libc::PTRACE_O_TRACEEXIT as usize) };
    println!("seized {seized}");
    let _ = std::io::stdin().read(&mut [0]);
}

/// As a driver does, a tracer holds one thread of the process where it has begun to exit and its descriptors are open, until the
/// tracer's standard input is closed.
fn held_in_exit(pid: u32) -> Child {
    let mut tracer = myself("tracer", &pid.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(tracer.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("seized 0")), "the process cannot be traced");
    tracer
}

// LAUNCH-4
#[test]
fn process_that_the_system_does_not_release_is_reported_when_its_liveness_pipe_closes() {
    let mut slots = ranks(1, "holds-liveness");
    assert_eq!(next(&mut slots), message(0, "\"ready\""));
    let pid = slots.pid(0).unwrap();
    let process = sys::pidfd_open(pid).unwrap();
    let mut tracer = held_in_exit(pid);
    let killed = Instant::now();
    slots.signal(0, libc::SIGKILL).unwrap();

    let event = next(&mut slots);

    assert_eq!(event, exited(0, Ending::Unreleased));
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    assert!(!has_ended(&process, Duration::ZERO), "the process is held");
    slots.start(0, &[], |_, _| shell("exit 5")).unwrap();
    assert_eq!(next(&mut slots), exited(0, Ending::Code(5)), "a successor starts meanwhile");
    drop(tracer.stdin.take());
    tracer.wait().unwrap();
    assert!(has_ended(&process, PATIENCE));
}

// LAUNCH-4
#[test]
fn end_of_a_process_is_reported_before_its_release_once_its_ending_is_forgone() {
    let mut slots = Slots::new(2);
    slots.start(0, &[], |channel, _| myself("a_rank", &format!("holds-liveness {channel}"))).unwrap();
    assert_eq!(next(&mut slots), message(0, "\"ready\""));
    let mut tracer = held_in_exit(slots.pid(0).unwrap());
    slots.forgo_ending(0);

    slots.signal(0, libc::SIGKILL).unwrap();
    // Ends within the wait for a release.
    slots.start(1, &[], |_, _| shell("sleep 0.05")).unwrap();
    let events = rest(&mut slots);
    drop(tracer.stdin.take());
    tracer.wait().unwrap();

    assert_eq!(events, [exited(0, Ending::Unreleased), exited(1, Ending::Code(0))]);
}

// LAUNCH-4
#[test]
fn process_that_closes_its_liveness_pipe_is_killed() {
    let mut slots = ranks(1, "closes-liveness");

    let events = rest(&mut slots);

    assert!(matches!(
        events[..],
        [SlotEvent::Exited { slot: 0, ending: Ending::Signal(libc::SIGKILL) | Ending::Unreleased }]
    ));
}

#[test]
fn process_that_does_not_read_does_not_block_its_launcher() {
    let mut slots = ranks(1, "never-reads");
    assert_eq!(next(&mut slots), message(0, "\"ready\""));
    let text = "x".repeat(1 << 19);

    let refused = (0..20).find_map(|_| slots.send(0, &text).err());

    assert!(matches!(refused, Some(LaunchError::Congested { rank: 0, n_bytes }) if n_bytes <= 2 << 20), "{refused:?}");
    assert_eq!(slots.next_event(Some(Duration::from_millis(1))), Ok(None));
}

#[test]
fn bound_process_uses_only_its_cores() {
    let cpus = sys::allowed_cpus().unwrap();
    let mut slots = Slots::new(1);
    slots.start(0, &cpus[..1], |channel, _| myself("a_rank", &format!("threads {channel}"))).unwrap();

    assert_eq!(next(&mut slots), message(0, "1"));
}

#[test]
fn readable_waker_ends_the_wait() {
    let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut slots = shells(&["exec sleep 1000"]);
    slots.wake_on(reader.into());
    assert_eq!(slots.next_event(Some(Duration::ZERO)), Ok(None));

    writer.write_all(b"x").unwrap();

    assert_eq!(next(&mut slots), SlotEvent::Woken);
}

#[test]
fn each_process_has_an_fd_channel_beside_its_channel() {
    let (mut slots, mut fds) = (Slots::new(2), Vec::new());
    for slot in 0..2 {
        let command = |channel, fd_channel| {
            fds.push(fd_channel);
            myself("a_rank", &format!("fd_channel {channel}"))
        };
        slots.start(slot, &[], command).unwrap();
    }

    for slot in 0..2 {
        let mut answer = [0];
        slots.send(slot, &fds[slot as usize]).unwrap();
        let mut fd_channel = slots.fd_channel(slot).unwrap();
        fd_channel.write_all(&[slot as u8 * 10]).unwrap();
        fd_channel.read_exact(&mut answer).unwrap();

        assert_eq!(answer, [slot as u8 * 10 + 1]);
    }
}

#[test]
fn failed_start_is_reported_and_its_slot_stays_free() {
    let mut slots = Slots::new(2);

    let refused = slots.start(1, &[], |_, _| Command::new("/nonexistent/phalanx"));

    assert!(matches!(refused, Err(LaunchError::Start { rank: 1, .. })), "{refused:?}");
    assert_eq!((slots.n_taken(), slots.pid(1)), (0, None));
    let outside = slots.start(2, &[], |_, _| Command::new("/bin/cat"));
    assert_eq!(outside, Err(LaunchError::NoSuchRank { rank: 2, n_ranks: 2 }));
}

#[test]
fn descriptor_that_is_not_a_channel_is_rejected() {
    for fd in [0, 2, 999_999] {
        // SAFETY: standard streams are rejected by their numbers, and the last number is not a descriptor.
        assert_eq!(unsafe { channel::adopt(fd) }.err(), Some(LaunchError::NoChannel { fd }));
    }
}

// LAUNCH-5
#[test]
fn requests_to_end_that_reach_a_rank_leave_it_running_from_its_first_instruction() {
    // A shell cannot take back that a signal was ignored when it started.
    let mut slots = shells(&[
        "for signal in TERM INT HUP USR1 USR2 TSTP TTIN TTOU; do kill -$signal $$; done; echo alive >&2; exit 4",
    ]);

    let events = rest(&mut slots);

    assert_eq!(events, [SlotEvent::Line { slot: 0, text: "alive".into() }, exited(0, Ending::Code(4))]);
}
