//! Tries the GPU in a child process before a job counts on it: a context that cannot be made, or libraries that do not fit the driver,
//! would show only when ranks start, and a driver that hangs would take the caller along.

use crate::devices;
use phalanx_cuda::OpenError;
use std::ffi::OsString;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The only argument of the child.
const ARGUMENT: &str = "probe-gpu";
/// Longest time that the child may take: the first context after the start of a machine takes seconds for each GPU.
const PROBE_MAX: Duration = Duration::from_secs(120);

/// Whether this process is no rank and runs a program that can be the child.
static CAN_PROBE: AtomicBool = AtomicBool::new(false);

/// Makes this process the child if it was started as one, and then never returns. Else it may start such children.
pub(crate) fn begin(mut args: impl Iterator<Item = OsString>) {
    let is_child = args.next().is_some_and(|first| first == ARGUMENT) && args.next().is_none();
    if !is_child {
        CAN_PROBE.store(true, Ordering::Relaxed);
        return;
    }
    let outcome = devices::gpu().and_then(|gpu| gpu.probe());
    if let Err(error) = outcome {
        println!("{error}");
        std::process::exit(1);
    }
    std::process::exit(0);
}

/// Whether the first GPU can be opened and runs the kernels that are compiled for it. Does nothing in ranks, and in hosts whose
/// `main` does not begin with `rank_process`.
///
/// # Errors
/// [`OpenError::Probe`] with the reason.
pub(crate) fn gpu() -> Result<(), OpenError> {
    if !CAN_PROBE.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg(ARGUMENT).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let failed = |reason: String| OpenError::Probe { reason };
    let child = command.spawn().map_err(|error| failed(format!("a process that tries it cannot start: {error}")))?;
    wait(child).map_err(failed)
}

/// # Errors
/// What the child has written, or how it ended.
fn wait(mut child: Child) -> Result<(), String> {
    let begin = Instant::now();
    loop {
        match child.try_wait() {
            Ok(None) if begin.elapsed() > PROBE_MAX => {
                // It may be stuck in the driver; nobody waits for its end then.
                let _ = child.kill();
                return Err(format!("it does not answer for {} s", PROBE_MAX.as_secs()));
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(2)),
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => {
                let text = child.wait_with_output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
                let text = text.unwrap_or_default().trim().to_owned();
                return Err(if text.is_empty() { format!("a process that tries it ends with {status}") } else { text });
            }
            Err(error) => return Err(format!("a process that tries it is lost: {error}")),
        }
    }
}
