//! Places for rank processes on one machine, each with at most one process at a time, followed by one `poll` over all.

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

/// How long to wait for killed processes; only a process stuck in the kernel takes longer.
const KILLED_WAIT: Duration = Duration::from_secs(10);

/// Places `0 .. n`. Dropping it kills the processes in its slots.
#[must_use = "dropped, it kills its processes"]
pub struct Slots {
    processes: Vec<Option<RankProcess>>,
    events: VecDeque<SlotEvent>,
    waker: Option<OwnedFd>,
}

/// What happened in a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotEvent {
    /// Its process sent a frame.
    Message {
        /// The place.
        slot: u32,
        /// The content of the frame: JSON, if the process is well.
        bytes: Vec<u8>,
    },
    /// Its process wrote a line to its standard error.
    Line {
        /// The place.
        slot: u32,
        /// The line, without control characters.
        text: String,
    },
    /// Its process is gone; the place is free.
    Exited {
        /// The place.
        slot: u32,
        /// How it ended.
        ending: Ending,
    },
    /// The descriptor of [`Slots::wake_on`] is readable.
    Woken,
}

impl Slots {
    /// Free places.
    pub fn new(n: u32) -> Slots {
        Slots { processes: (0..n).map(|_| None).collect(), events: VecDeque::new(), waker: None }
    }

    /// Also reports [`SlotEvent::Woken`] whenever `waker` is readable. Whoever owns its other end makes it unreadable again.
    pub fn wake_on(&mut self, waker: OwnedFd) {
        self.waker = Some(waker);
    }

    /// Starts a process in a free place, as `make_command` describes it when it is told the numbers of the inherited
    /// channel and fd channel: normally this binary with a hidden subcommand, and both numbers among its arguments.
    /// Standard input is closed and standard error captured; everything else is as the command says. The process dies
    /// with the *thread* that calls this (that is how Linux watches parents), so that must live as long. Returns its
    /// id.
    ///
    /// # Errors
    /// When it cannot be started, or there is no such place.
    ///
    /// # Panics
    /// If the place is taken.
    pub fn start(
        &mut self,
        slot: u32,
        cpus: &[usize],
        make_command: impl FnOnce(RawFd, RawFd) -> Command,
    ) -> Result<u32, LaunchError> {
        let n_ranks = self.processes.len() as u32;
        let slot_process =
            self.processes.get_mut(slot as usize).ok_or(LaunchError::NoSuchRank { rank: slot, n_ranks })?;
        assert!(slot_process.is_none(), "a place has one process at a time");
        let process = RankProcess::start(slot, cpus, make_command)?;
        let pid = process.pid();
        *slot_process = Some(process);
        Ok(pid)
    }

    /// The process id in a slot.
    pub fn pid(&self, slot: u32) -> Option<u32> {
        self.process(slot).map(RankProcess::pid)
    }

    /// How many places are taken.
    pub fn n_taken(&self) -> usize {
        self.processes.iter().flatten().count()
    }

    /// The second socket to a process, through which descriptors of shared memory go. It blocks.
    pub fn fd_channel(&self, slot: u32) -> Option<&UnixStream> {
        self.process(slot).and_then(RankProcess::fd_channel)
    }

    /// Sends a value as a frame; to a free place it is nothing.
    ///
    /// # Errors
    /// When it is no frame, or the process has not read what it was sent before.
    pub fn send(&mut self, slot: u32, value: &impl Serialize) -> Result<(), LaunchError> {
        let frame = encode(value)?;
        self.processes.get_mut(slot as usize).and_then(Option::as_mut).map_or(Ok(()), |process| process.send(&frame))
    }

    /// Sends a signal; to a free place it is nothing.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn signal(&self, slot: u32, signal: libc::c_int) -> Result<(), LaunchError> {
        let sent = self.process(slot).map_or(Ok(()), |process| process.signal(signal));
        sent.map_err(|error| LaunchError::system("signal a rank", &error))
    }

    /// Kills the process in a slot and waits for its exit, which is still reported.
    ///
    /// # Errors
    /// When it does not end.
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

    fn process(&self, slot: u32) -> Option<&RankProcess> {
        self.processes.get(slot as usize).and_then(Option::as_ref)
    }

    fn wait(&mut self, waker: RawFd, timeout: Option<Duration>) -> Result<bool, LaunchError> {
        let nothing = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let wanted =
            |slot_process: &Option<RankProcess>| slot_process.as_ref().map_or([nothing; 3], RankProcess::wanted);
        let mut fds: Vec<libc::pollfd> = self.processes.iter().flat_map(wanted).collect();
        fds.push(libc::pollfd { fd: waker, events: libc::POLLIN, revents: 0 });
        match sys::poll(&mut fds, timeout) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(LaunchError::system("wait for ranks", &error)),
        }
        for slot in 0..self.processes.len() {
            let is_ready = [0, 1, 2].map(|i| fds[3 * slot + i].revents != 0);
            if is_ready.contains(&true) {
                self.attend(slot as u32, is_ready);
            }
        }
        if fds.last().is_some_and(|fd| fd.revents != 0) {
            self.events.push_back(SlotEvent::Woken);
        }
        Ok(true)
    }

    fn attend(&mut self, slot: u32, is_ready: [bool; 3]) {
        let Some(process) = &mut self.processes[slot as usize] else { return };
        let (said, ending) = process.attend(is_ready);
        if let Some(error) = said.garbled {
            // A process that cannot be understood cannot be led. Its end is reported like any other.
            tracing::warn!(slot, %error, "a rank sent an invalid frame and is terminated");
            let _ = process.signal(libc::SIGKILL);
        }
        self.events.extend(said.frames.into_iter().map(|bytes| SlotEvent::Message { slot, bytes }));
        self.events.extend(said.lines.into_iter().map(|text| SlotEvent::Line { slot, text }));
        if let Some(ending) = ending {
            self.processes[slot as usize] = None;
            self.events.push_back(SlotEvent::Exited { slot, ending });
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().flatten() {
            let _ = process.signal(libc::SIGKILL);
            process.reap();
        }
    }
}
