//! Slots for rank processes on one machine, each with at most one process at a time. One `poll` watches all of them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::error::LaunchError;
use super::failure::Ending;
use super::frame::encode;
use super::process::RankProcess;
use super::sys;

/// Maximum wait for killed processes; only a process stuck in the kernel takes longer.
const KILLED_WAIT: Duration = Duration::from_secs(10);

/// Maximum reads from each process at a time: more than its socket holds, and a bound if it sends faster than the launcher reads.
const READS_MAX: usize = 64;

/// Slots `0..n`. Dropping them kills their processes.
#[must_use = "dropping the slots kills their processes"]
pub struct Slots {
    processes: Vec<Option<RankProcess>>,
    /// Processes that have ended and that the system has not released yet.
    unreleased: Vec<RankProcess>,
    events: VecDeque<SlotEvent>,
    waker: Option<OwnedFd>,
}

/// An event of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotEvent {
    /// The process in the slot sent a frame.
    Message {
        /// The slot.
        slot: u32,
        /// The content of the frame.
        bytes: Vec<u8>,
    },
    /// The process in the slot wrote a line to its standard error.
    Line {
        /// The slot.
        slot: u32,
        /// The line, without control characters.
        text: String,
    },
    /// The process exited; the slot is free.
    Exited {
        /// The slot.
        slot: u32,
        /// How the process ended.
        ending: Ending,
    },
    /// The descriptor of [`Slots::wake_on`] is readable.
    Woken,
}

impl Slots {
    /// Makes `n` free slots.
    pub fn new(n: u32) -> Slots {
        let processes = (0..n).map(|_| None).collect();
        Slots { processes, unreleased: Vec::new(), events: VecDeque::new(), waker: None }
    }

    /// Also reports [`SlotEvent::Woken`] while `waker` is readable. The caller drains it.
    pub fn wake_on(&mut self, waker: OwnedFd) {
        self.waker = Some(waker);
    }

    /// Starts a process in a free slot, from the command that `make_command` returns for the numbers of the inherited
    /// channel and fd channel: normally this binary with a hidden subcommand and both numbers as arguments. Standard
    /// input is closed and standard error is captured. The process dies with the *thread* that calls this, because Linux
    /// ties `PR_SET_PDEATHSIG` to threads; that thread must outlive the process. Returns the process id.
    ///
    /// # Errors
    /// When the process cannot be started, or the slot does not exist.
    ///
    /// # Panics
    /// If the slot is taken.
    pub fn start(
        &mut self,
        slot: u32,
        cpus: &[usize],
        make_command: impl FnOnce(RawFd, RawFd) -> Command,
    ) -> Result<u32, LaunchError> {
        let n_ranks = self.processes.len() as u32;
        let slot_process =
            self.processes.get_mut(slot as usize).ok_or(LaunchError::NoSuchRank { rank: slot, n_ranks })?;
        assert!(slot_process.is_none(), "a slot has one process at a time");
        let process = RankProcess::start(slot, cpus, make_command)?;
        let pid = process.pid();
        *slot_process = Some(process);
        Ok(pid)
    }

    /// The process id in a slot.
    pub fn pid(&self, slot: u32) -> Option<u32> {
        self.process(slot).map(RankProcess::pid)
    }

    /// Number of taken slots.
    pub fn n_taken(&self) -> usize {
        self.processes.iter().flatten().count()
    }

    /// The second socket to a process, which passes descriptors of shared memory. It blocks.
    pub fn fd_channel(&self, slot: u32) -> Option<&UnixStream> {
        self.process(slot).and_then(RankProcess::fd_channel)
    }

    /// Sends a value as a frame. Does nothing if the slot is free.
    ///
    /// # Errors
    /// When the value cannot be encoded, or the process does not read its messages.
    pub fn send(&mut self, slot: u32, value: &impl Serialize) -> Result<(), LaunchError> {
        let frame = encode(value)?;
        self.processes.get_mut(slot as usize).and_then(Option::as_mut).map_or(Ok(()), |process| process.send(&frame))
    }

    /// Sends a signal. Does nothing if the slot is free.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn signal(&self, slot: u32, signal: libc::c_int) -> Result<(), LaunchError> {
        let sent = self.process(slot).map_or(Ok(()), |process| process.signal(signal));
        sent.map_err(|error| LaunchError::system("signal a rank", &error))
    }

    /// From now on, the end of the process in a slot is reported as soon as it is known, even if it is not known yet how it ended: the
    /// system may take long to release a process with a device.
    pub fn forgo_ending(&mut self, slot: u32) {
        if let Some(process) = self.processes.get_mut(slot as usize).and_then(Option::as_mut) {
            process.forgo_ending();
        }
    }

    /// Kills the process in a slot and waits for its exit, which is still reported.
    ///
    /// # Errors
    /// When the process does not exit.
    pub fn kill(&mut self, slot: u32) -> Result<(), LaunchError> {
        self.signal(slot, libc::SIGKILL)?;
        let deadline = Instant::now() + KILLED_WAIT;
        while self.process(slot).is_some() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LaunchError::StillAlive { ranks: vec![slot] });
            }
            self.wait(-1, Some(left))?;
        }
        Ok(())
    }

    /// Waits for the next event; `None` when `timeout` has passed.
    ///
    /// # Errors
    /// When the system refuses to wait.
    pub fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<SlotEvent>, LaunchError> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let waker = self.waker.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !self.wait(waker, left)? {
                return Ok(None);
            }
        }
    }

    /// Everything that the processes have sent so far, without waiting.
    ///
    /// # Errors
    /// When the system refuses to poll.
    pub fn take_pending(&mut self) -> Result<Vec<SlotEvent>, LaunchError> {
        for _ in 0..READS_MAX {
            if !self.wait(-1, Some(Duration::ZERO))? {
                break;
            }
        }
        Ok(self.events.drain(..).collect())
    }

    fn process(&self, slot: u32) -> Option<&RankProcess> {
        self.processes.get(slot as usize).and_then(Option::as_ref)
    }

    fn wait(&mut self, waker: RawFd, timeout: Option<Duration>) -> Result<bool, LaunchError> {
        let nothing = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let wanted =
            |slot_process: &Option<RankProcess>| slot_process.as_ref().map_or([nothing; 4], RankProcess::wanted);
        let mut fds: Vec<libc::pollfd> = self.processes.iter().flat_map(wanted).collect();
        fds.push(libc::pollfd { fd: waker, events: libc::POLLIN, revents: 0 });
        self.unreleased.retain_mut(|process| !process.reap());
        let given_up_at = self.processes.iter().flatten().filter_map(RankProcess::given_up_at).min();
        let give_up = given_up_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.into_iter().chain(give_up).min();
        match sys::poll(&mut fds, timeout) {
            Ok(true) => {}
            Ok(false) if give_up.is_some() => {}
            Ok(false) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(LaunchError::system("wait for ranks", &error)),
        }
        for slot in 0..self.processes.len() {
            let is_ready = [0, 1, 2, 3].map(|i| fds[4 * slot + i].revents != 0);
            let process = self.processes[slot].as_ref();
            if is_ready.contains(&true) || process.is_some_and(|process| process.given_up_at().is_some()) {
                self.attend(slot as u32, is_ready);
            }
        }
        if fds.last().is_some_and(|fd| fd.revents != 0) {
            self.events.push_back(SlotEvent::Woken);
        }
        Ok(true)
    }

    fn attend(&mut self, slot: u32, is_ready: [bool; 4]) {
        let Some(process) = &mut self.processes[slot as usize] else { return };
        let (received, ending) = process.attend(is_ready);
        if let Some(error) = received.invalid_frame {
            // The exit of the process is reported like any other.
            tracing::warn!(slot, %error, "a rank sent an invalid frame and is terminated");
            let _ = process.signal(libc::SIGKILL);
        }
        self.events.extend(received.frames.into_iter().map(|bytes| SlotEvent::Message { slot, bytes }));
        self.events.extend(received.lines.into_iter().map(|text| SlotEvent::Line { slot, text }));
        if let Some(ending) = ending {
            let process = self.processes[slot as usize].take();
            self.unreleased.extend(process.filter(|_| ending == Ending::Unreleased));
            self.events.push_back(SlotEvent::Exited { slot, ending });
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().flatten().chain(&mut self.unreleased) {
            let _ = process.signal(libc::SIGKILL);
            process.reap();
        }
    }
}
