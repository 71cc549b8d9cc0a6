//! Handlers of Ctrl-C and SIGTERM. Only the command line installs them; the library leaves signals to its host.

use crate::error::JobError;

/// The first Ctrl-C or SIGTERM runs the callback; the second ends the process.
pub(super) fn on_signal(act: impl FnOnce() + Send + 'static) -> Result<(), JobError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let io = |source| JobError::Io { action: "listen for signals of", path: "this process".into(), source };
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]).map_err(io)?;
    let listen = move || {
        let mut seen = signals.forever();
        if seen.next().is_some() {
            act();
        }
        if let Some(signal) = seen.next() {
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(io)?;
    Ok(())
}
