//! Rank processes of one machine: starts them on their cores, talks to them over sockets, and watches them until they exit.
//!
//! ```text
//!            launcher                               rank process (this binary, a hidden subcommand)
//!   Slots::start ──── fork, exec ────────────────▶  channel::adopt(descriptor from its arguments)
//!   Slots::send ───── frames down: stop, save ───▶  FrameReceiver::receive
//!   Slots::next_event ◀──── frames up: events ────  FrameSender::send
//!   Slots::fd_channel ◀─── descriptors of memory ───▶  channel::adopt_fd_channel
//!        ▲ exit (pidfd) · lines of stderr · liveness::hold
//! ```
//!
//! Invariants, cited by the tests:
//! - **LAUNCH-1** No rank outlives its launcher, however the launcher ends: the kernel kills the rank (`PR_SET_PDEATHSIG`).
//! - **LAUNCH-2** The kernel reports an exit at once (pidfd). The launcher reports it after all earlier output of the rank.
//! - **LAUNCH-3** The size of a rank's output is limited: a frame that is too long ends the rank. The launcher never blocks on
//!   a rank.
//! - **LAUNCH-4** A rank whose liveness pipe has closed counts as ended, even if the system takes longer to release it. The launcher
//!   waits for the exit, which tells how the rank ended, only until the caller forgoes that.
//! - **LAUNCH-5** Requests to end concern the launcher alone, which saves before it ends its ranks: ranks ignore them from
//!   their first instruction. Batch systems and service managers signal every process of a job. So do those that suspend a job,
//!   with SIGTSTP before SIGSTOP: a launcher without a terminal does not obey the first, and ranks that did would seem to hang.
//!
//! Map: [`slots`] has all processes, `process` one of them, [`cores`] their cores, [`numa`] those near a device, [`channel`] the
//! rank's end of the sockets, [`executable`] the file that they run, `liveness` that of the pipe that closes first,
//! [`frame`] the encoding, [`failure`] how processes end; `sys` wraps Linux system calls that are missing from the standard
//! library. [`environment`] reads the variables of cluster launchers.
//!
//! Deliberately absent: the meaning of frames, decisions to stop or restart (left to the caller), and other machines.

pub mod channel;
pub mod cores;
pub mod environment;
pub mod error;
pub mod executable;
pub mod failure;
pub mod frame;
pub(crate) mod liveness;
pub mod numa;
mod output;
mod process;
pub mod slots;
pub(crate) mod sys;

#[cfg(test)]
mod tests;
