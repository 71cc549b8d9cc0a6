//! The limit of CPU time of a rank.
//!
//! Batch systems and `ulimit -St` limit the CPU time of each process, and a process that reaches the soft limit gets SIGXCPU. A rank
//! gets it long before its launcher, which computes little. It asks for the end of the job, which only the launcher can save.

use signal_hook::consts::SIGXCPU;
use signal_hook::iterator::Signals;
use std::thread::Builder;

use crate::launch::sys::pass_to_parent;

/// Tells the launcher when this process has reached its limit. Without a thread for it, the launcher is not told, and the process
/// ends at its hard limit.
pub(super) fn watch() {
    let Ok(mut signals) = Signals::new([SIGXCPU]) else { return };
    // The system repeats the signal every second.
    let listen = move || {
        if signals.forever().next().is_some() {
            tracing::warn!("the limit of CPU time is reached; asking for the end of the job");
            pass_to_parent(SIGXCPU);
        }
        signals.forever().for_each(drop);
    };
    let started = Builder::new().name("cpu-limit".into()).spawn(listen);
    if let Err(error) = started {
        tracing::debug!(%error, "no thread for the limit of CPU time");
    }
}
