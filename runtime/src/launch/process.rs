//! One rank process and the descriptors of its channel, its standard error and its exit.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use super::error::LaunchError;
use super::failure::Ending;
use super::frame::{FrameCutter, FrameError};
use super::output::Output;
use super::sys;

/// Bytes read at a time: several status reports and events.
const READ_BYTES: usize = 4 << 10;
/// Bytes read from a rank after it exited: more than sockets and pipes hold, and a bound on the output of a child process that
/// outlives the rank.
const REST_BYTES_MAX: usize = 1 << 20;
/// Wait for the exit of a rank whose liveness pipe has closed, which tells how it ended. A driver that tears a context down takes
/// longer.
const RELEASE_WAIT: Duration = Duration::from_millis(100);
/// The same wait once the caller has forgone to learn how the rank ended. The system ends all threads of a process together, but some
/// may still be in the middle of an instruction when the pipe closes.
const THREADS_WAIT: Duration = Duration::from_millis(2);
/// Maximum bytes that wait for the rank to read.
const WAITING_BYTES_MAX: usize = 2 << 20;

pub(super) struct RankProcess {
    rank: u32,
    child: Child,
    pidfd: OwnedFd,
    channel: Option<UnixStream>,
    fd_channel: Option<UnixStream>,
    stderr: Option<ChildStderr>,
    /// Closed when the rank ends; see [`super::liveness`].
    liveness: Option<PipeReader>,
    /// Wait for its exit after its liveness pipe has closed.
    release_wait: Duration,
    /// When the rank counts as ended, after its liveness pipe has closed.
    given_up_at: Option<Instant>,
    cutter: FrameCutter,
    waiting: VecDeque<u8>,
    output: Output,
    ending: Option<Ending>,
}

/// Output of a rank, read at one time.
#[derive(Default)]
pub(super) struct Received {
    pub(super) frames: Vec<Vec<u8>>,
    pub(super) lines: Vec<String>,
    pub(super) invalid_frame: Option<FrameError>,
}

impl RankProcess {
    /// Starts the process of the command that `make_command` returns for the numbers of the inherited channel and fd
    /// channel.
    pub(super) fn start(
        rank: u32,
        cpus: &[usize],
        make_command: impl FnOnce(RawFd, RawFd) -> Command,
    ) -> Result<Self, LaunchError> {
        let refused = |error: io::Error| LaunchError::Start { rank, reason: error.to_string() };
        let (ours, theirs) = UnixStream::pair().map_err(refused)?;
        ours.set_nonblocking(true).map_err(refused)?;
        let (fd_channel, their_fd_channel) = UnixStream::pair().map_err(refused)?;
        let inherited = [theirs.as_raw_fd(), their_fd_channel.as_raw_fd()];
        let mut command = make_command(inherited[0], inherited[1]);
        // A separate process group, so that the terminal neither stops (Ctrl-Z) nor interrupts a rank.
        let (liveness, held) = io::pipe().map_err(refused)?;
        command.stdin(held).stderr(Stdio::piped()).process_group(0);
        sys::prepare(&mut command, inherited, cpus);
        let mut child = command.spawn().map_err(refused)?;
        // The command holds the launcher's copy of the writing end of the pipe.
        drop(command);
        let stderr = child.stderr.take();
        let followed = sys::pidfd_open(child.id()).and_then(|pidfd| {
            stderr.as_ref().map_or(Ok(()), |stderr| sys::set_nonblocking(stderr.as_fd()))?;
            Ok(pidfd)
        });
        let pidfd = followed.map_err(|error| {
            // Without this, the process would never be collected.
            let _ = child.kill();
            let _ = child.wait();
            refused(error)
        })?;
        Ok(Self {
            rank,
            child,
            pidfd,
            channel: Some(ours),
            fd_channel: Some(fd_channel),
            stderr,
            liveness: Some(liveness),
            release_wait: RELEASE_WAIT,
            given_up_at: None,
            cutter: FrameCutter::default(),
            waiting: VecDeque::new(),
            output: Output::default(),
            ending: None,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn is_live(&self) -> bool {
        self.ending.is_none()
    }

    pub(super) const fn fd_channel(&self) -> Option<&UnixStream> {
        self.fd_channel.as_ref()
    }

    /// The descriptors to poll: channel, standard error, exit, liveness. `poll` ignores negative numbers.
    pub(super) fn wanted(&self) -> [libc::pollfd; 4] {
        let wanted = |fd, events| libc::pollfd { fd, events, revents: 0 };
        if !self.is_live() {
            return [wanted(-1, 0); 4];
        }
        let writing = if self.waiting.is_empty() { 0 } else { libc::POLLOUT };
        let channel = self.channel.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let stderr = self.stderr.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let pidfd = self.pidfd.as_raw_fd();
        let liveness = self.liveness.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let reads = libc::POLLIN;
        [wanted(channel, reads | writing), wanted(stderr, reads), wanted(pidfd, reads), wanted(liveness, 0)]
    }

    /// When the process counts as ended although it has not exited (LAUNCH-4).
    pub(super) const fn given_up_at(&self) -> Option<Instant> {
        self.given_up_at
    }

    /// From now on, the end of the process is reported without a wait for how it ended (LAUNCH-4).
    pub(super) const fn forgo_ending(&mut self) {
        self.release_wait = THREADS_WAIT;
    }

    /// Reads from each ready descriptor once and writes waiting bytes. If the process has ended, reads all remaining output and
    /// returns its ending.
    pub(super) fn attend(&mut self, is_ready: [bool; 4]) -> (Received, Option<Ending>) {
        let [channel, stderr, has_exited, has_no_liveness] = is_ready;
        if has_no_liveness {
            // A process that has only closed the pipe ends too.
            let _ = self.signal(libc::SIGKILL);
            self.liveness = None;
            self.given_up_at = Some(Instant::now() + self.release_wait);
        }
        let has_ended = has_exited || self.given_up_at.is_some_and(|at| Instant::now() >= at);
        let n_bytes = if has_ended { REST_BYTES_MAX } else { 1 };
        let mut received = Received::default();
        if channel || has_ended {
            self.flush();
            self.read_channel(n_bytes, &mut received);
        }
        if stderr || has_ended {
            self.read_stderr(n_bytes, &mut received);
        }
        if !has_ended {
            return (received, None);
        }
        // An error means that its status was already collected.
        let status = self.child.try_wait();
        self.ending = Some(status.map_or(Ending::Code(-1), |status| status.map_or(Ending::Unreleased, Ending::of)));
        received.lines.extend(self.output.finish());
        (self.channel, self.fd_channel, self.stderr, self.liveness) = (None, None, None, None);
        self.waiting.clear();
        (received, self.ending)
    }

    /// Sends a frame, and queues the part that the socket does not accept. For a rank that has exited or closed the channel,
    /// this does nothing, because its exit will be reported.
    pub(super) fn send(&mut self, frame: &[u8]) -> Result<(), LaunchError> {
        if self.channel.is_none() {
            return Ok(());
        }
        let n_bytes = self.waiting.len();
        if n_bytes + frame.len() > WAITING_BYTES_MAX {
            return Err(LaunchError::Congested { rank: self.rank, n_bytes });
        }
        self.waiting.extend(frame);
        self.flush();
        Ok(())
    }

    /// Sends a signal. Does nothing if the process has exited.
    pub(super) fn signal(&self, signal: libc::c_int) -> io::Result<()> {
        if self.is_live() { sys::pidfd_signal(self.pidfd.as_fd(), signal) } else { Ok(()) }
    }

    /// Collects the status of the process if it has exited, without waiting, so that no zombie remains. Returns whether it had
    /// exited.
    pub(super) fn reap(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn flush(&mut self) {
        let Some(mut channel) = self.channel.as_ref() else { return };
        while !self.waiting.is_empty() {
            match channel.write(self.waiting.as_slices().0) {
                Ok(n) => drop(self.waiting.drain(..n)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The other end is closed. Earlier output of the rank can still be read.
                Err(_) => return self.waiting.clear(),
            }
        }
    }

    fn read_channel(&mut self, n_bytes: usize, received: &mut Received) {
        let Some(channel) = &mut self.channel else { return };
        let cutter = &mut self.cutter;
        let is_open = read(channel, n_bytes, |bytes| {
            cutter.push(bytes);
            loop {
                match cutter.next_frame() {
                    Ok(Some(frame)) => received.frames.push(frame),
                    Ok(None) => return true,
                    Err(error) => {
                        received.invalid_frame = Some(error);
                        return false;
                    }
                }
            }
        });
        if !is_open {
            self.channel = None;
        }
    }

    fn read_stderr(&mut self, n_bytes: usize, received: &mut Received) {
        let Some(stderr) = &mut self.stderr else { return };
        let output = &mut self.output;
        let is_open = read(stderr, n_bytes, |bytes| {
            received.lines.extend(output.push(bytes));
            true
        });
        if !is_open {
            self.stderr = None;
        }
    }
}

/// Reads until it has at least `n_bytes` or nothing is left, without waiting; `false` at the end of the stream, or when `take` returns `false`.
fn read(source: &mut impl Read, n_bytes: usize, mut take: impl FnMut(&[u8]) -> bool) -> bool {
    let mut buffer = [0; READ_BYTES];
    let mut n_read = 0;
    while n_read < n_bytes {
        match source.read(&mut buffer) {
            Ok(0) => return false,
            Ok(n) if !take(&buffer[..n]) => return false,
            Ok(n) => n_read += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
    true
}
