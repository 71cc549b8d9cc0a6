//! Handlers of Ctrl-C, SIGTERM and SIGHUP. Only the command line installs them; the library leaves signals to its host.

use crate::error::JobError;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::c_int;
use std::time::{Duration, Instant};

/// Signals so soon after the first are the same request: `timeout` and batch systems signal a process, and then its group.
const ONE_REQUEST: Duration = Duration::from_millis(500);

/// The first Ctrl-C, SIGTERM or SIGHUP runs the callback; a later Ctrl-C or SIGTERM ends the process. A closed terminal may
/// send several SIGHUPs, the kernel one and its shell another, so that none of them ends the process.
///
/// # Errors
/// When the system installs no handler or starts no thread.
pub(super) fn on_signal(act: impl FnOnce() + Send + 'static) -> Result<(), JobError> {
    let io = |source| JobError::Io { action: "listen for signals of", path: "this process".into(), source };
    // Under `nohup` the job outlives its terminal.
    let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let wanted = [SIGINT, SIGTERM].into_iter().chain(hang_up);
    let mut signals = signal_hook::iterator::Signals::new(wanted).map_err(io)?;
    let listen = move || {
        let mut seen = signals.forever();
        if seen.next().is_some() {
            act();
        }
        let first = Instant::now();
        if let Some(signal) = seen.find(|signal| *signal != SIGHUP && first.elapsed() > ONE_REQUEST) {
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(io)?;
    Ok(())
}

/// Whether this process was started with the signal ignored.
#[allow(unsafe_code)] // The standard library does not tell how a signal is handled.
fn is_ignored(signal: c_int) -> bool {
    // SAFETY: a plain structure, for which zero is valid.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the null pointer means that nothing is changed; `now` outlives the call.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) };
    asked == 0 && now.sa_sigaction == libc::SIG_IGN
}
