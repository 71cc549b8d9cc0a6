//! The program of rank processes, and the first line of its `main`.
//!
//! A rank is a separate process, so that its death does not end the host. Its program is the host itself, if the host's
//! `main` begins with [`rank_process`], or the `phalanx` binary. A host without that line would start ranks that start ranks
//! in turn. Therefore [`Runtime`](crate::api::embed::Runtime) requires a [`RankProgram`], which that line returns, and
//! cannot be created in a process that was started as a rank.

use crate::config::JobConfig;
use crate::console::printable;
use crate::devices::probe;
use crate::error::JobError;
use crate::error::host::HostError;
use crate::frontend::UserModel;
use crate::launch::executable::Executable;
use crate::process_end::end_with;
use crate::process_limits::prepare_process;
use crate::rank::process;
use crate::train::plan::MakeModel;
use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Write};
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use tracing_subscriber::fmt::MakeWriter;

/// A program that can be a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankProgram {
    /// The file that was there when this value was made: an upgrade of the program concerns only later jobs.
    executable: Executable,
    /// Whether its ranks make user-defined models.
    makes_models: bool,
}

/// Makes this process a rank if it was started as one, and then never returns. Call it first in `main`, before threads and
/// event loops start; the host's executable is then the program of its ranks.
///
/// ```no_run
/// fn main() -> Result<(), phalanx::JobError> {
///     let runtime = phalanx::Runtime::new(phalanx::rank_process())?;
///     // …
///     Ok(())
/// }
/// ```
///
/// A rank gets its configuration from its arguments and a socket. The only environment variable that it reads is
/// `PHALANX_LOG`, the filter of its log. Each line on its standard error becomes an [`Event::Note`](crate::Event::Note).
pub fn rank_process() -> RankProgram {
    this_program(None)
}

/// As [`rank_process`], for a host that trains models written in Rust. Each rank process makes its model with `make`, which
/// must return the same tensors and initial values in every process. The configuration identifies the model.
///
/// ```no_run
/// # use phalanx::frontend::{UserModel, UserModelError};
/// # fn host(net: fn() -> Result<UserModel, UserModelError>) -> Result<(), Box<dyn std::error::Error>> {
/// let runtime = phalanx::Runtime::new(phalanx::rank_process_with(move |_| Ok(net()?)))?;
/// let job = phalanx::Job::builder().set("output_dir", "run").model(net()?).build()?;
/// # Ok(()) }
/// ```
pub fn rank_process_with(
    make: impl Fn(&JobConfig) -> Result<UserModel, Box<dyn std::error::Error + Send + Sync>> + 'static,
) -> RankProgram {
    this_program(Some(&make))
}

fn this_program(make: Option<&MakeModel>) -> RankProgram {
    if let Some(start) = RankStart::of(std::env::args_os().skip(1)) {
        end_with(run(&start, make));
    }
    probe::begin(std::env::args_os().skip(1));
    // `Runtime::new` rejects an empty path.
    RankProgram { executable: Executable::running(), makes_models: make.is_some() }
}

impl RankProgram {
    /// Another program whose `main` begins with [`rank_process`], such as the `phalanx` binary.
    pub fn at(path: impl Into<PathBuf>) -> RankProgram {
        RankProgram { executable: Executable::at(path), makes_models: false }
    }

    /// The path of the program.
    pub fn path(&self) -> &Path {
        self.executable.path()
    }

    pub(crate) const fn executable(&self) -> &Executable {
        &self.executable
    }

    pub(crate) const fn makes_models(&self) -> bool {
        self.makes_models
    }

    /// Rejects a path that is not a file, and any program in a process that was itself started as a rank.
    pub(crate) fn check(&self, args: impl Iterator<Item = OsString>) -> Result<(), JobError> {
        if RankStart::of(args).is_some() {
            return Err(HostError::StartedAsRank.into());
        }
        if self.path().is_file() {
            return Ok(());
        }
        Err(HostError::NoProgram { path: self.path().to_owned() }.into())
    }
}

/// The arguments of a rank process, written by [`crate::node::processes`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankStart {
    /// Node, slot and incarnation, for process listings.
    worker: String,
    /// Descriptor of the socket to the node.
    channel: RawFd,
    /// Descriptor of the socket that passes descriptors of shared memory.
    fd_channel: RawFd,
}

impl RankStart {
    /// Parses the arguments after the program's name; `None` if they are not those of a rank.
    fn of(args: impl Iterator<Item = OsString>) -> Option<RankStart> {
        // One more than a rank has, so that a longer command line does not match.
        let args: Vec<OsString> = args.take(8).collect();
        let args: Vec<&str> = args.iter().map(OsString::as_os_str).map(OsStr::to_str).collect::<Option<_>>()?;
        let ["rank", "--worker", worker, "--channel", channel, "--fd-channel", fd_channel] = args[..] else {
            return None;
        };
        Some(RankStart {
            worker: worker.to_owned(),
            channel: channel.parse().ok()?,
            fd_channel: fd_channel.parse().ok()?,
        })
    }
}

fn run(start: &RankStart, make: Option<&MakeModel>) -> i32 {
    prepare_process();
    // The process is the unit of failure: a panic on any thread ends all of it, so that no rank survives in part.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    log_to(std::io::stderr);
    process::run(start.channel, start.fd_channel, make).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "{}", printable(&format!("error: rank {}: {error}", start.worker)));
        2
    })
}

/// Installs the log subscriber configured by `PHALANX_LOG`, in the `phalanx` binary and in rank processes.
pub(crate) fn log_to(writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PHALANX_LOG");
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // https://no-color.org: any value but the empty one.
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stderr().is_terminal() && !no_color;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(colours).with_target(false).init();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> impl Iterator<Item = OsString> + '_ {
        text.split_whitespace().map(OsString::from)
    }

    const RANK: &str = "rank --worker 0.1.77 --channel 5 --fd-channel 6";

    #[test]
    fn rank_is_recognised_by_its_complete_arguments() {
        let start = RankStart { worker: "0.1.77".into(), channel: 5, fd_channel: 6 };

        assert_eq!(RankStart::of(args(RANK)), Some(start));
        for other in
            ["", "rank", "serve --port 5", &RANK[..RANK.len() - 1], &format!("{RANK} more"), &format!("-v {RANK}")]
        {
            assert_eq!(RankStart::of(args(other)), None, "{other}");
        }
    }

    #[test]
    fn host_that_was_started_as_a_rank_without_becoming_one_is_rejected() {
        let program = RankProgram::at(std::env::current_exe().unwrap());

        assert!(program.check(args("serve")).is_ok());
        let error = program.check(args(RANK)).unwrap_err().to_string();
        assert!(error.contains("does not begin with `phalanx::rank_process()`"), "{error}");
    }

    #[test]
    fn rank_program_that_is_not_a_file_is_rejected() {
        let error = RankProgram::at("/nowhere/phalanx").check(args("")).unwrap_err().to_string();

        assert_eq!(error, "the rank program /nowhere/phalanx is not a file");
    }
}
