//! Handlers of Ctrl-C and of the notices with which batch systems, service managers and container runtimes ask a job to end. Only
//! the command line installs them; the library leaves signals to its host.

use super::END_PATIENCE;
use super::ended::Ended;
use crate::console::Console;
use crate::control::Control;
use crate::error::JobError;
use crate::launch::sys::REQUESTS_TO_END;
use signal_hook::consts::{SIGHUP, SIGINT};
use signal_hook::iterator::Signals;
use std::ffi::c_int;
use std::process::exit;
use std::sync::Arc;
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Signals so soon after the first are the same request: `timeout` and batch systems signal a process, and then its group.
const ONE_REQUEST: Duration = Duration::from_millis(500);
/// The first process of a container, to which the kernel applies no default action of a signal.
const INIT: u32 = 1;

/// The control of a job that the first request to end stops. With `ends_early`, the process ends at once while there is nothing to
/// save: data may be tokenized for hours.
///
/// # Errors
/// As [`on_signal`].
pub(super) fn stopped_by_signals(console: &Console, ends_early: bool) -> Result<Arc<Control>, JobError> {
    let control = Arc::new(Control::default());
    let (asked, followed, terminal) = (Arc::clone(&control), Arc::clone(&control), console.clone());
    let stop = move || {
        if ends_early && !asked.has_ranks() {
            terminal.say("\nstopped before the first step");
            terminal.finish(END_PATIENCE);
            Ended::BySignal.exit();
        }
        asked.stop();
        terminal.say("\nstopping after the current step and saving (Ctrl-C again exits at once)");
    };
    on_signal(stop, move || followed.has_ranks())?;
    Ok(control)
}

/// The first request to end runs `act`. A later one ends the process, with two exceptions: a closed terminal may send several
/// SIGHUPs, the kernel one and its shell another; and while `saves` returns true, only Ctrl-C ends the process. A batch system
/// repeats its notice before it kills, which must not end a save.
///
/// # Errors
/// When the system installs no handler or starts no thread.
pub(super) fn on_signal(
    act: impl FnOnce() + Send + 'static,
    saves: impl Fn() -> bool + Send + 'static,
) -> Result<(), JobError> {
    // Under `nohup` the job outlives its terminal; in the background of a script, Ctrl-C is for the script.
    let stays_ignored = |signal: &c_int| [SIGHUP, SIGINT].contains(signal) && is_ignored(*signal);
    let wanted = REQUESTS_TO_END.into_iter().filter(|signal| !stays_ignored(signal));
    let mut signals = Signals::new(wanted).map_err(cannot_listen)?;
    let listen = move || {
        let mut seen = signals.forever();
        if seen.next().is_some() {
            act();
        }
        let first = Instant::now();
        let ends = |signal: &c_int| *signal == SIGINT || *signal != SIGHUP && !saves();
        if let Some(signal) = seen.find(|signal| first.elapsed() > ONE_REQUEST && ends(signal)) {
            end(signal);
        }
    };
    Builder::new().name("signals".into()).spawn(listen).map_err(cannot_listen).map(drop)
}

/// Gives the first process of a container the default actions of requests to end. A command without a handler of its own would
/// otherwise be killed only after the patience of `docker stop`.
///
/// # Errors
/// As [`on_signal`].
pub(super) fn end_as_first_process() -> Result<(), JobError> {
    if std::process::id() != INIT {
        return Ok(());
    }
    let mut signals = Signals::new(REQUESTS_TO_END).map_err(cannot_listen)?;
    let listen = move || signals.forever().next().map(end);
    Builder::new().name("signals".into()).spawn(listen).map_err(cannot_listen).map(drop)
}

/// Ends the process as the signal would without a handler.
fn end(signal: c_int) {
    if std::process::id() == INIT {
        exit(128 + signal);
    }
    let _ = signal_hook::low_level::emulate_default_handler(signal);
}

fn cannot_listen(source: std::io::Error) -> JobError {
    JobError::Io { action: "listen for signals of", path: "this process".into(), source }
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
