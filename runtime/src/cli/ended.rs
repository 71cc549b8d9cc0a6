//! How a run ended, and its exit code.

use std::process::ExitCode;

/// How a run without an error ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// All steps are completed, or the command runs no steps.
    Finished,
    /// A signal stopped the run before its last step; its state is saved.
    BySignal,
    /// `phalanx stop` stopped the run before its last step; its state is saved.
    ByRequest,
}

/// Variables that the processes of a batch job have: of Slurm, PBS, LSF, Grid Engine, HTCondor, Flux, AWS Batch and Kubernetes.
const BATCH_JOB: [&str; 8] = [
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "SGE_TASK_ID",
    "_CONDOR_JOB_AD",
    "FLUX_JOB_ID",
    "AWS_BATCH_JOB_ID",
    "KUBERNETES_SERVICE_HOST",
];
/// `EX_TEMPFAIL` of sysexits.h: the same command, run again, continues.
const BY_SIGNAL: u8 = 75;
const BY_REQUEST: u8 = 3;

impl Ended {
    /// `signalled`: whether this process was asked to stop the run.
    pub(super) const fn of(is_finished: bool, signalled: bool) -> Ended {
        match (is_finished, signalled) {
            (true, _) => Ended::Finished,
            (false, true) => Ended::BySignal,
            (false, false) => Ended::ByRequest,
        }
    }

    /// The exit code. A user who stops a run gets what was asked for, which is success. To a batch system, success means that
    /// jobs that depend on this one may start.
    pub(super) fn exit_code(self) -> ExitCode {
        self.code(is_in_batch_job()).into()
    }

    /// Ends the process with the exit code.
    pub(super) fn exit(self) -> ! {
        std::process::exit(self.code(is_in_batch_job()).into())
    }

    const fn code(self, in_batch_job: bool) -> u8 {
        match self {
            Ended::BySignal if in_batch_job => BY_SIGNAL,
            Ended::ByRequest if in_batch_job => BY_REQUEST,
            _ => 0,
        }
    }
}

fn is_in_batch_job() -> bool {
    BATCH_JOB.iter().any(|name| std::env::var_os(name).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_finished_run_succeeds_in_a_batch_job() {
        let all = [Ended::of(true, true), Ended::of(true, false), Ended::of(false, true), Ended::of(false, false)];

        assert_eq!(all.map(|ended| ended.code(true)), [0, 0, BY_SIGNAL, BY_REQUEST]);
        assert_eq!(all.map(|ended| ended.code(false)), [0; 4]);
    }
}
