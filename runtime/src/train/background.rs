//! A save beside training: a thread of every rank writes the rank's part, and the ranks compute the sums for their threads
//! at step boundaries, where they synchronize anyway.
//!
//! Invariants:
//! - BACKGROUND-1 A save runs on all ranks or on none: it begins and ends at the same boundary everywhere.
//! - BACKGROUND-2 A sum is complete when the threads of all ranks wait for it. A thread waits for at most one sum, and all
//!   threads wait for the same one.
//! - BACKGROUND-3 A store that does not answer stops no step: ranks wait for a save only while no rank's store is stalled.

use super::state_copy::{Cancel, StateCopy};
use super::team::Team;
use crate::error::JobError;
use phalanx_storage::checkpoint::background::{BackgroundSave, EndedSave, Snapshot};
use phalanx_storage::checkpoint::catalog::Keep;
use phalanx_storage::checkpoint::checkpoint_meta::CheckpointMeta;
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::writer::{CheckpointWriter, WriterRank};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// How the save of a rank stands at a step boundary, or the sums over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ballot {
    /// Threads that wait for a sum.
    n_terms: u64,
    /// The terms of that sum.
    sum: u64,
    /// Threads that have ended.
    n_ended: u64,
    /// Ranks whose store does not answer.
    n_stalled: u64,
}

impl Ballot {
    /// As numbers that ranks add up.
    pub(super) const fn numbers(self) -> [u64; 4] {
        [self.n_terms, self.sum, self.n_ended, self.n_stalled]
    }

    /// Of these numbers.
    pub(super) const fn of([n_terms, sum, n_ended, n_stalled]: [u64; 4]) -> Ballot {
        Ballot { n_terms, sum, n_ended, n_stalled }
    }
}

/// Time between two ballots of ranks that only wait for their saves.
const PAUSE: Duration = Duration::from_millis(1);

/// A running save.
#[derive(Debug)]
pub(crate) struct Ongoing {
    step: u64,
    writer: Box<CheckpointWriter>,
    save: BackgroundSave,
    /// The thread's terms of sums. Dropping this end makes the thread's sum fail.
    terms: Receiver<u64>,
    sums: SyncSender<u64>,
    /// The term of the current sum.
    term: Option<u64>,
    /// Ends the copy of the state, if it still goes on when the save is dropped.
    _cancel: Option<Cancel>,
}

/// What a wait for a save has led to.
#[derive(Debug)]
pub(crate) enum Waited {
    /// It has ended.
    Ended(EndedSave),
    /// It continues: the store of some rank is stalled.
    Stalled(Ongoing),
}

impl Ongoing {
    /// Begins to write a snapshot, whose bytes come from `copy` if it is given.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn begin(
        writer: &CheckpointWriter,
        meta: CheckpointMeta,
        writer_rank: WriterRank,
        snapshot: Snapshot,
        copy: Option<StateCopy>,
        keep: Option<Keep>,
    ) -> Result<Ongoing, CheckpointError> {
        let (terms_tx, terms) = sync_channel(1);
        let (sums, sums_rx) = sync_channel(1);
        let sum = move |value| {
            terms_tx.send(value).map_err(|_| "the run has ended")?;
            sums_rx.recv().map_err(|_| "the run has ended")
        };
        let step = meta.step;
        let cancel = copy.as_ref().map(StateCopy::cancel);
        let complete = move |snapshot: &mut Snapshot| {
            let completed = copy.map_or(Ok(()), |copy| copy.finish(|bytes| snapshot.append(bytes)));
            completed.map_err(|error| CheckpointError::Copy { step, reason: error.reason })
        };
        let save = writer.save_in_background(meta, writer_rank, snapshot, complete, keep, sum)?;
        Ok(Ongoing { step, writer: Box::new(writer.clone()), save, terms, sums, term: None, _cancel: cancel })
    }

    /// The step of the checkpoint.
    pub(crate) const fn step(&self) -> u64 {
        self.step
    }

    /// Whether the thread waits for a sum, its term, whether the thread has ended, and whether its store is stalled.
    pub(crate) fn ballot(&mut self) -> Ballot {
        self.term = self.term.or_else(|| self.terms.try_recv().ok());
        let is_stalled = self.writer.is_stalled();
        Ballot {
            n_terms: self.term.is_some().into(),
            sum: self.term.unwrap_or(0),
            n_ended: self.save.is_finished().into(),
            n_stalled: is_stalled.into(),
        }
    }

    /// Counts the ballots of all ranks: sends the thread its sum, or ends the save.
    pub(crate) fn count(mut self, ballots: Ballot, n_ranks: u64) -> Result<EndedSave, Ongoing> {
        let Ballot { n_terms, sum, n_ended, n_stalled: _ } = ballots;
        // A thread that ends while others wait for a sum has panicked: that sum will never be complete.
        let is_broken = n_ended > 0 && n_terms > 0;
        if n_ended == n_ranks || is_broken {
            drop((self.sums, self.terms));
            return Ok(self.save.wait());
        }
        if n_terms == n_ranks {
            // A thread that has ended meanwhile is counted next time.
            let _ = self.sums.send(sum);
            self.term = None;
        }
        Err(self)
    }

    /// Waits together with all other ranks: to the end, or only while the stores of all ranks answer.
    ///
    /// # Errors
    /// When a peer is lost.
    pub(crate) fn wait(mut self, team: &mut Team, to_the_end: bool) -> Result<Waited, JobError> {
        loop {
            let ballots = team.sums(self.ballot().numbers()).map(Ballot::of)?;
            let n_stalled = ballots.n_stalled;
            match self.count(ballots, team.n_ranks() as u64) {
                Ok(ended) => return Ok(Waited::Ended(ended)),
                Err(ongoing) if n_stalled > 0 && !to_the_end => return Ok(Waited::Stalled(ongoing)),
                Err(ongoing) => self = ongoing,
            }
            std::thread::sleep(PAUSE);
        }
    }
}
