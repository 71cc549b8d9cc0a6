//! A save beside training: a thread of every rank writes the rank's part, and the ranks compute the sums for their threads
//! at step boundaries, where they synchronize anyway.
//!
//! Invariants:
//! - BACKGROUND-1 A save runs on all ranks or on none: it begins and ends at the same boundary everywhere.
//! - BACKGROUND-2 A sum is complete when the threads of all ranks wait for it. A thread waits for at most one sum, and all
//!   threads wait for the same one.

use super::team::Team;
use crate::error::JobError;
use phalanx_storage::checkpoint::background::{BackgroundSave, Snapshot};
use phalanx_storage::checkpoint::error::CheckpointError;
use phalanx_storage::checkpoint::writer::{CheckpointMeta, CheckpointWriter, WriterRank};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// A rank's save state at a step boundary, summed over all ranks.
pub(crate) type Ballot = [u64; 3];

/// Time between two ballots of ranks that only wait for their saves.
const PAUSE: Duration = Duration::from_millis(1);

/// A running save.
#[derive(Debug)]
pub(crate) struct Ongoing {
    step: u64,
    save: BackgroundSave,
    /// The thread's terms of sums. Dropping this end makes the thread's sum fail.
    terms: Receiver<u64>,
    sums: SyncSender<u64>,
    /// The term of the current sum.
    term: Option<u64>,
}

/// A save that has ended, and the memory for the next one.
pub(crate) struct Ended {
    pub(crate) step: u64,
    pub(crate) snapshot: Snapshot,
    pub(crate) outcome: Result<PathBuf, CheckpointError>,
}

impl Ongoing {
    /// Begins to write a snapshot.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(crate) fn begin(
        writer: &CheckpointWriter,
        meta: CheckpointMeta,
        writer_rank: WriterRank,
        snapshot: Snapshot,
        keep: Option<usize>,
    ) -> Result<Ongoing, CheckpointError> {
        let (terms_tx, terms) = sync_channel(1);
        let (sums, sums_rx) = sync_channel(1);
        let sum = move |value| {
            terms_tx.send(value).map_err(|_| "the run has ended")?;
            sums_rx.recv().map_err(|_| "the run has ended")
        };
        let step = meta.step;
        let save = writer.save_in_background(meta, writer_rank, snapshot, keep, sum)?;
        Ok(Ongoing { step, save, terms, sums, term: None })
    }

    /// Whether the thread waits for a sum, its term, and whether the thread has ended.
    pub(crate) fn ballot(&mut self) -> Ballot {
        self.term = self.term.or_else(|| self.terms.try_recv().ok());
        [u64::from(self.term.is_some()), self.term.unwrap_or(0), u64::from(self.save.is_finished())]
    }

    /// Counts the ballots of all ranks: sends the thread its sum, or ends the save.
    pub(crate) fn count(mut self, [n_terms, sum, n_ended]: Ballot, n_ranks: u64) -> Result<Ended, Ongoing> {
        // A thread that ends while others wait for a sum has panicked: that sum will never be complete.
        let is_broken = n_ended > 0 && n_terms > 0;
        if n_ended == n_ranks || is_broken {
            drop((self.sums, self.terms));
            let (snapshot, saved) = self.save.wait();
            return Ok(Ended { step: self.step, snapshot, outcome: saved.map(|id| id.path) });
        }
        if n_terms == n_ranks {
            // A thread that has ended meanwhile is counted next time.
            let _ = self.sums.send(sum);
            self.term = None;
        }
        Err(self)
    }

    /// Waits for the end, together with all other ranks.
    ///
    /// # Errors
    /// When a peer is lost.
    pub(crate) fn wait(mut self, team: &mut Team) -> Result<Ended, JobError> {
        loop {
            let ballots = team.sums(self.ballot())?;
            match self.count(ballots, team.n_ranks() as u64) {
                Ok(ended) => return Ok(ended),
                Err(ongoing) => self = ongoing,
            }
            std::thread::sleep(PAUSE);
        }
    }
}
