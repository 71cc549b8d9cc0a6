//! Why ranks of a node could not begin or go on, in their own words.

use crate::error::JobError;
use crate::launch::failure::Ending;
use crate::rank::failure_report::FailureReport;
use phalanx_strategies::elastic::identity::Worker;

/// What ranks of this node said or left behind when they could not begin or go on.
#[derive(Default)]
pub(super) struct FailureReports {
    /// What a rank failed of; one that only follows from another is kept while there is none better.
    failed: Option<(Worker, FailureReport)>,
    /// The latest process that ended before its first report, and what it said of that, unless one has started since.
    unborn: Option<(Worker, Ending, Option<FailureReport>)>,
    /// The latest line of a rank.
    last_line: Option<String>,
}

impl FailureReports {
    pub(super) fn failed(&mut self, worker: Worker, failure_report: FailureReport) {
        if self.failed.as_ref().is_none_or(|(_, first)| first.is_consequence && !failure_report.is_consequence) {
            self.failed = Some((worker, failure_report));
        }
    }

    pub(super) fn ended_unborn(&mut self, worker: Worker, ending: Ending) {
        // Its successor may do better, unless the input is at fault.
        let said = self.failed.take_if(|(of, failure_report)| *of == worker && !failure_report.is_input);
        self.unborn = Some((worker, ending, said.map(|(_, failure_report)| failure_report)));
    }

    /// A process has given its first report: those that ended before theirs are of no interest any more.
    pub(super) fn started(&mut self) {
        self.unborn = None;
    }

    /// A rank has written this line.
    pub(super) fn line(&mut self, line: String) {
        self.last_line = Some(line);
    }

    /// The error with which a job ends that failed here; none if nothing failed here.
    pub(super) fn take(&mut self) -> Option<JobError> {
        let of_rank = |worker: Worker, FailureReport { text, is_input, .. }: FailureReport| JobError::OfRank {
            rank: worker.member.slot,
            text,
            is_input,
        };
        // Of a failure that only follows from another, the coordinator has the cause.
        if let Some((worker, failure_report)) =
            self.failed.take().filter(|(_, failure_report)| !failure_report.is_consequence)
        {
            return Some(of_rank(worker, failure_report));
        }
        let (worker, ending, said) = self.unborn.take()?;
        if let Some(failure_report) = said {
            return Some(of_rank(worker, failure_report));
        }
        let last = self.last_line.take().map_or(String::new(), |line| format!("; its last line was: {line}"));
        let how = format!("{worker} {ending}, and so did those before it{last}");
        Some(JobError::RankLost { how, when: "before its first step".into(), checkpoint: None })
    }
}
