//! Rank processes of one machine: started on their cores, spoken to over sockets, watched until the last has ended.
//!
//! ```text
//!            launcher                               rank process (this binary, a hidden subcommand)
//!   Slots::start ──── fork, exec ────────────────▶  channel::adopt(descriptor from its arguments)
//!   Slots::send ───── frames down: stop, save ───▶  FrameReceiver::receive
//!   Slots::next_event ◀──── frames up: events ────  FrameSender::send
//!   Slots::fd_channel ◀─── descriptors of memory ───▶  channel::adopt_fd_channel
//!        ▲ exit (pidfd) · lines of stderr
//! ```
//!
//! Invariants, cited by the tests:
//! - **LAUNCH-1** No rank outlives its launcher, however that ends: the kernel kills it (`PR_SET_PDEATHSIG`).
//! - **LAUNCH-2** An exit is pushed by the kernel (pidfd) and reported after everything that the rank had said before
//!   it.
//! - **LAUNCH-3** What a rank says is data with a limit: a frame that is too long ends the rank. No rank can hold up
//!   the launcher: it never blocks on one.
//!
//! Map: [`slots`] is all of them, `process` one of them, [`cores`] where they run, [`channel`] the rank's end,
//! [`frame`] the bytes between them, [`failure`] how they end; `sys` wraps Linux system calls that are missing from the
//! standard library. [`environment`] reads the variables of cluster launchers.
//!
//! Deliberately absent: what frames mean, when to stop, whether to start again (the caller knows). Other machines.

pub mod channel;
pub mod cores;
pub mod environment;
pub mod error;
pub mod failure;
pub mod frame;
mod output;
mod process;
pub mod slots;
mod sys;

#[cfg(test)]
mod tests;
