//! Which program rank processes are, and the first line of its `main`.
//!
//! A rank is a process of its own, so that its death is not that of the host. It needs a program that can be a rank: the
//! host itself, if its `main` begins with [`rank_process`], or the `phalanx` binary. A host that is started as a rank and
//! does not notice would start ranks of its own, and these theirs; so [`Runtime`](crate::api::embed::Runtime) needs a [`RankProgram`],
//! of which that line makes one, and refuses to exist in a process that was started as a rank.

use crate::config::JobConfig;
use crate::error::JobError;
use crate::error::host::HostError;
use crate::frontend::UserModel;
use crate::rank::process;
use crate::train::plan::MakeModel;
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

/// A program that can be a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankProgram {
    path: PathBuf,
    /// Whether its ranks make user-defined models.
    makes_models: bool,
}

/// Makes this process a rank if it was started as one, and never returns then. To be called first in `main`, before
/// threads and event loops; the host's own executable is then the program of its ranks.
///
/// ```no_run
/// fn main() -> Result<(), phalanx::JobError> {
///     let runtime = phalanx::Runtime::new(phalanx::rank_process())?;
///     // …
///     Ok(())
/// }
/// ```
///
/// A rank is told all it needs by its arguments and a socket; of the environment it reads `PHALANX_LOG` only, for what it
/// writes to its standard error, of which each line is an [`Event::Note`](crate::Event::Note) of its job.
pub fn rank_process() -> RankProgram {
    this_program(None)
}

/// As [`rank_process`], of a host that trains models written in Rust: each rank process makes its own with `make`, which must
/// give the same tensors and first values in every process. The configuration tells which model is asked for.
///
/// ```no_run
/// # fn net() -> Result<phalanx::frontend::UserModel, std::fmt::Error> { unimplemented!() }
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let runtime = phalanx::Runtime::new(phalanx::rank_process_with(|_| Ok(net()?)))?;
///     let job = phalanx::Job::builder().set("output_dir", "run").model(net()?).build()?;
///     // …
///     Ok(())
/// }
/// ```
pub fn rank_process_with(
    make: impl Fn(&JobConfig) -> Result<UserModel, Box<dyn std::error::Error + Send + Sync>> + 'static,
) -> RankProgram {
    this_program(Some(&make))
}

fn this_program(make: Option<&MakeModel>) -> RankProgram {
    if let Some(start) = RankStart::of(std::env::args_os().skip(1)) {
        std::process::exit(run(&start, make));
    }
    // A program that cannot say where it lies is refused by `Runtime::new`.
    RankProgram { path: std::env::current_exe().unwrap_or_default(), makes_models: make.is_some() }
}

impl RankProgram {
    /// Another program whose `main` begins with [`rank_process`], such as the `phalanx` binary.
    pub fn at(path: impl Into<PathBuf>) -> RankProgram {
        RankProgram { path: path.into(), makes_models: false }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn makes_models(&self) -> bool {
        self.makes_models
    }

    /// Refuses what is no file, and any program in a process that is itself to be a rank and did not notice.
    pub(crate) fn check(&self, args: impl Iterator<Item = OsString>) -> Result<(), JobError> {
        if RankStart::of(args).is_some() {
            return Err(HostError::StartedAsRank.into());
        }
        if self.path.is_file() {
            return Ok(());
        }
        Err(HostError::NoProgram { path: self.path.clone() }.into())
    }
}

/// How a rank is started; made by [`crate::node::processes`].
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankStart {
    /// Its node, slot and incarnation, shown in process listings.
    worker: String,
    /// Descriptor of the socket to its node.
    channel: RawFd,
    /// Descriptor of the socket through which shared memory comes.
    fd_channel: RawFd,
}

impl RankStart {
    /// What the arguments after the program's name say, if they say that this is a rank.
    fn of(args: impl Iterator<Item = OsString>) -> Option<RankStart> {
        // One more than there may be: a longer command line is not meant.
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
    // The process is the unit of failure: a panic on any thread ends all of it, so that no half of a rank lives on.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
    log_to_stderr();
    process::run(start.channel, start.fd_channel, make).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: rank {}: {error}", start.worker);
        2
    })
}

/// Installs the log subscriber configured by `PHALANX_LOG`, for processes of our own.
pub(crate) fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PHALANX_LOG");
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> impl Iterator<Item = OsString> + '_ {
        text.split_whitespace().map(OsString::from)
    }

    const RANK: &str = "rank --worker 0.1.77 --channel 5 --fd-channel 6";

    #[test]
    fn a_rank_is_known_by_all_of_its_arguments() {
        let start = RankStart { worker: "0.1.77".into(), channel: 5, fd_channel: 6 };

        assert_eq!(RankStart::of(args(RANK)), Some(start));
        for other in
            ["", "rank", "serve --port 5", &RANK[..RANK.len() - 1], &format!("{RANK} more"), &format!("-v {RANK}")]
        {
            assert_eq!(RankStart::of(args(other)), None, "{other}");
        }
    }

    #[test]
    fn a_host_that_was_started_as_a_rank_and_did_not_notice_starts_nothing() {
        let program = RankProgram::at(std::env::current_exe().unwrap());

        assert!(program.check(args("serve")).is_ok());
        let error = program.check(args(RANK)).unwrap_err().to_string();
        assert!(error.contains("does not begin with `phalanx::rank_process()`"), "{error}");
    }

    #[test]
    fn a_program_that_is_no_file_is_refused() {
        let error = RankProgram::at("/nowhere/phalanx").check(args("")).unwrap_err().to_string();

        assert_eq!(error, "the program of ranks, /nowhere/phalanx, is not a file");
    }
}
