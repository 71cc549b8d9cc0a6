//! The rank processes of one machine, followed by one `poll` over all of them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::cores::Cores;
use super::error::LaunchError;
use super::failure::{Cause, Ending, Failure, root_cause};
use super::frame::encode;
use super::process::RankProcess;
use super::sys;

/// How long killed processes are waited for; only one that hangs in the kernel takes longer.
const KILLED_WAIT: Duration = Duration::from_secs(10);
/// Events that are kept while ranks are being ended and nobody takes them; further frames and lines are dropped.
const EVENTS_KEPT_MAX: usize = 1 << 14;

/// The processes of ranks `0 .. n`. Dropped, it kills those that live.
#[must_use = "dropped, it kills its ranks"]
pub struct RankSet {
    ranks: Vec<RankProcess>,
    events: VecDeque<RankEvent>,
    waker: Option<OwnedFd>,
    is_ending: bool,
    failure: Option<Failure>,
}

/// What a rank is started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankStart {
    /// Its number.
    pub rank: u32,
    /// How many there are.
    pub n_ranks: u32,
    /// The descriptor that it inherits, for [`super::channel::adopt`]; goes into its arguments.
    pub channel: RawFd,
    /// The descriptor of the other end of [`RankSet::take_passage`], for [`super::channel::adopt_passage`]; goes into its
    /// arguments, if it is used.
    pub passage: RawFd,
    /// Threads that it should compute with; goes into its arguments.
    pub n_threads: usize,
}

/// What happened to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankEvent {
    /// It sent a frame.
    Message {
        /// The rank.
        rank: u32,
        /// The content of the frame: JSON, if the rank is well.
        bytes: Vec<u8>,
    },
    /// It wrote a line to its standard error.
    Line {
        /// The rank.
        rank: u32,
        /// The line, without control characters.
        text: String,
    },
    /// It ended; nothing follows from it.
    Exited {
        /// The rank.
        rank: u32,
        /// How.
        ending: Ending,
    },
    /// The descriptor of [`RankSet::wake_on`] is readable.
    Woken,
}

impl RankSet {
    /// Starts a process for every rank that `cores` has room for, as `make_command` describes it: normally this binary with
    /// a hidden subcommand, and the number of the channel and of threads among its arguments. Standard input is closed and
    /// standard error captured; everything else is as the command says.
    ///
    /// Ranks die with the *thread* that calls this (that is how Linux watches parents), so it must live as long as they.
    ///
    /// # Errors
    /// When a process cannot be started; those that were are killed.
    pub fn spawn(cores: &Cores, mut make_command: impl FnMut(&RankStart) -> Command) -> Result<Self, LaunchError> {
        let mut set = Self { ranks: Vec::new(), events: VecDeque::new(), waker: None, is_ending: false, failure: None };
        let (n_ranks, n_threads) = (cores.n_ranks(), cores.n_threads());
        for rank in 0..n_ranks {
            let command = |channel, passage| make_command(&RankStart { rank, n_ranks, channel, passage, n_threads });
            set.ranks.push(RankProcess::start(rank, cores.of(rank), command)?);
        }
        Ok(set)
    }

    /// Also reports [`RankEvent::Woken`] whenever `waker` is readable, so that one wait covers signals and a user's orders
    /// too. Whoever owns its other end makes it unreadable again.
    pub fn wake_on(&mut self, waker: OwnedFd) {
        self.waker = Some(waker);
    }

    /// How many ranks there are.
    pub fn n_ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// How many of them live, as far as was reported.
    pub fn n_live(&self) -> u32 {
        self.ranks.iter().filter(|rank| rank.is_live()).count() as u32
    }

    /// The process id of a rank, for a message to a person; it may have ended.
    ///
    /// # Errors
    /// When there is no such rank.
    pub fn pid(&self, rank: u32) -> Result<u32, LaunchError> {
        self.ranks.get(rank as usize).map(RankProcess::pid).ok_or_else(|| self.no_such(rank))
    }

    /// A second socket to a rank, without frames: descriptors of shared memory are handed over through it. `None` when it
    /// was taken before, or the rank has ended. It blocks; a rank that does not read holds up whoever writes.
    pub fn take_passage(&mut self, rank: u32) -> Option<UnixStream> {
        self.ranks.get_mut(rank as usize)?.take_passage()
    }

    /// Waits for the next event; `None` when `timeout` has passed, or all ranks have ended and everything was reported.
    ///
    /// # Errors
    /// When the system refuses to wait.
    pub fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<RankEvent>, LaunchError> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if self.n_live() == 0 || !self.wait(left)? {
                return Ok(None);
            }
        }
    }

    /// Sends a value to a rank as a frame; returns at once. To a rank that has ended it is nothing.
    ///
    /// # Errors
    /// When it is no frame, there is no such rank, or the rank has not read what it was sent before.
    pub fn send(&mut self, rank: u32, value: &impl Serialize) -> Result<(), LaunchError> {
        let frame = encode(value)?;
        let no_such = self.no_such(rank);
        self.ranks.get_mut(rank as usize).ok_or(no_such)?.send(&frame)
    }

    /// The first failure, which is the root cause of those that followed (L-3); `None` while no rank has failed by itself.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// The last lines that a rank wrote to its standard error, for the message about its failure.
    pub fn last_lines(&self, rank: u32) -> Vec<&str> {
        self.ranks.get(rank as usize).map_or(Vec::new(), |rank| rank.last_lines().collect())
    }

    /// Ends all ranks: asks them (SIGTERM), and kills those that live after `grace`. When this returns none lives; what
    /// they said and how they ended is still to be taken with [`RankSet::next_event`].
    ///
    /// # Errors
    /// When a killed process does not end, or the system refuses to wait.
    pub fn terminate_all(&mut self, grace: Duration) -> Result<(), LaunchError> {
        // What had happened before is no consequence of this, though nobody may have looked yet.
        self.wait(Some(Duration::ZERO))?;
        self.is_ending = true;
        for (signal, patience) in [(libc::SIGTERM, grace), (libc::SIGKILL, KILLED_WAIT)] {
            for rank in &self.ranks {
                rank.signal(signal).map_err(|error| LaunchError::system("end a rank", &error))?;
            }
            let deadline = Instant::now() + patience;
            while self.n_live() > 0 {
                let left = deadline.saturating_duration_since(Instant::now());
                self.wait_for_ranks(Some(left))?;
                if left.is_zero() {
                    break;
                }
            }
        }
        let ranks: Vec<u32> = (0..).zip(&self.ranks).filter(|(_, rank)| rank.is_live()).map(|(i, _)| i).collect();
        if ranks.is_empty() { Ok(()) } else { Err(LaunchError::StillAlive { ranks }) }
    }

    fn no_such(&self, rank: u32) -> LaunchError {
        LaunchError::NoSuchRank { rank, n_ranks: self.n_ranks() }
    }

    /// Waits for anything to happen and takes note of it; `false` when nothing did in time.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, LaunchError> {
        let waker = self.waker.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        self.wait_for(waker, timeout)
    }

    /// As [`RankSet::wait`], without the waker: nobody makes it unreadable while ranks are being ended.
    fn wait_for_ranks(&mut self, timeout: Option<Duration>) -> Result<bool, LaunchError> {
        self.wait_for(-1, timeout)
    }

    fn wait_for(&mut self, waker: RawFd, timeout: Option<Duration>) -> Result<bool, LaunchError> {
        let mut fds: Vec<libc::pollfd> = self.ranks.iter().flat_map(RankProcess::wanted).collect();
        fds.push(libc::pollfd { fd: waker, events: libc::POLLIN, revents: 0 });
        match sys::poll(&mut fds, timeout) {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            // A signal came; whoever handles it has a waker.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(LaunchError::system("wait for ranks", &error)),
        }
        let mut failures = Vec::new();
        for (rank, fds) in fds.chunks_exact(3).take(self.ranks.len()).enumerate() {
            let is_ready = [0, 1, 2].map(|i| fds[i].revents != 0);
            if is_ready.contains(&true) {
                failures.extend(self.attend(rank as u32, is_ready));
            }
        }
        if !self.is_ending {
            self.failure = root_cause(self.failure.take(), failures);
        }
        if fds.last().is_some_and(|fd| fd.revents != 0) {
            self.events.push_back(RankEvent::Woken);
        }
        Ok(true)
    }

    /// Takes what a rank said and whether it ended; gives its failure, if that is what it was.
    fn attend(&mut self, rank: u32, is_ready: [bool; 3]) -> Option<Failure> {
        let process = &mut self.ranks[rank as usize];
        let (said, ending) = process.attend(is_ready);
        if said.garbled.is_some() {
            // A rank that cannot be understood cannot be led. Its end is reported like any other.
            let _ = process.signal(libc::SIGKILL);
        }
        let messages = said.frames.into_iter().map(|bytes| RankEvent::Message { rank, bytes });
        let lines = said.lines.into_iter().map(|text| RankEvent::Line { rank, text });
        let room = if self.is_ending { EVENTS_KEPT_MAX.saturating_sub(self.events.len()) } else { usize::MAX };
        self.events.extend(messages.chain(lines).take(room));
        self.events.extend(ending.map(|ending| RankEvent::Exited { rank, ending }));
        let garbled = said.garbled.map(|error| Failure { rank, cause: Cause::Garbled(error) });
        garbled.or_else(|| Failure::of(rank, ending?))
    }
}

impl Drop for RankSet {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.signal(libc::SIGKILL);
            rank.reap();
        }
    }
}
