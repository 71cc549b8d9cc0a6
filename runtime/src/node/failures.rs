//! Failures of the ranks of a node.

use crate::error::JobError;
use crate::launch::failure::Ending;
use crate::rank::failure_report::FailureReport;
use phalanx_strategies::elastic::identity::Worker;

/// Failure reports, endings and last lines of this node's ranks.
#[derive(Default)]
pub(super) struct FailureReports {
    /// The first failure report. A consequence of another failure is replaced by a later cause.
    failed: Option<(Worker, FailureReport)>,
    /// The latest process that exited before its first status report, with its failure report, unless another process has
    /// started since.
    failed_start: Option<(Worker, Ending, Option<FailureReport>)>,
    /// The latest line of a rank.
    last_line: Option<String>,
}

impl FailureReports {
    pub(super) fn failed(&mut self, worker: Worker, failure_report: FailureReport) {
        if self.failed.as_ref().is_none_or(|(_, first)| first.is_consequence && !failure_report.is_consequence) {
            self.failed = Some((worker, failure_report));
        }
    }

    pub(super) fn failed_start(&mut self, worker: Worker, ending: Ending) {
        // The next process may succeed, unless the input is at fault.
        let report = self.failed.take_if(|(of, failure_report)| *of == worker && !failure_report.is_input);
        self.failed_start = Some((worker, ending, report.map(|(_, failure_report)| failure_report)));
    }

    /// A process has sent its first status report, so earlier failed starts no longer matter.
    pub(super) fn started(&mut self) {
        self.failed_start = None;
    }

    /// A rank has written this line.
    pub(super) fn line(&mut self, line: String) {
        self.last_line = Some(line);
    }

    /// The error of a job that failed on this node; `None` if nothing failed here.
    pub(super) fn take(&mut self) -> Option<JobError> {
        let of_rank = |worker: Worker, FailureReport { text, is_input, .. }: FailureReport| JobError::OfRank {
            rank: worker.member.slot,
            text,
            is_input,
        };
        // If the failure is a consequence, the coordinator has the cause.
        if let Some((worker, failure_report)) =
            self.failed.take().filter(|(_, failure_report)| !failure_report.is_consequence)
        {
            return Some(of_rank(worker, failure_report));
        }
        let (worker, ending, report) = self.failed_start.take()?;
        if let Some(failure_report) = report {
            return Some(of_rank(worker, failure_report));
        }
        let last = self.last_line.take().map_or(String::new(), |line| format!("; its last line was: {line}"));
        let how = format!("{worker} {ending}, like its predecessors{last}");
        Some(JobError::RankLost { how, when: "before its first step".into(), checkpoint: None })
    }
}
