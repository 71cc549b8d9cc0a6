//! A save beside training: every rank has a thread that writes its part, and what the threads must agree on is settled at
//! the boundaries of steps, where all ranks meet anyway.
//!
//! Invariants:
//! - BACKGROUND-1 A save is under way at all ranks or at none: it begins and ends at the same boundary everywhere.
//! - BACKGROUND-2 A sum of the threads is settled when all of them wait for it. They wait for at most one, and all for
//!   the same.

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

/// How long ranks that have nothing else to do leave their saves alone.
const PAUSE: Duration = Duration::from_millis(1);

/// A save under way.
#[derive(Debug)]
pub(crate) struct Ongoing {
    step: u64,
    save: BackgroundSave,
    /// What the thread gives to a sum, until the sum is told. When this end goes, the thread gives up.
    gives: Receiver<u64>,
    told: SyncSender<u64>,
    given: Option<u64>,
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
    /// When the system refuses a thread.
    pub(crate) fn begin(
        writer: &CheckpointWriter,
        meta: CheckpointMeta,
        writer_rank: WriterRank,
        snapshot: Snapshot,
        keep: Option<usize>,
    ) -> Result<Ongoing, CheckpointError> {
        let (give, gives) = sync_channel(1);
        let (told, sums) = sync_channel(1);
        let sum = move |value| {
            give.send(value).map_err(|_| "the run has ended")?;
            sums.recv().map_err(|_| "the run has ended")
        };
        let step = meta.step;
        let save = writer.save_in_background(meta, writer_rank, snapshot, keep, sum)?;
        Ok(Ongoing { step, save, gives, told, given: None })
    }

    /// Whether the thread waits for a sum, what it gives to it, and whether it has ended.
    pub(crate) fn ballot(&mut self) -> Ballot {
        self.given = self.given.or_else(|| self.gives.try_recv().ok());
        [u64::from(self.given.is_some()), self.given.unwrap_or(0), u64::from(self.save.is_finished())]
    }

    /// Counts the ballots of all ranks: tells the thread its sum, or ends the save.
    pub(crate) fn count(mut self, [n_given, sum, n_ended]: Ballot, n_ranks: u64) -> Result<Ended, Ongoing> {
        // A thread that ends while others wait for a sum has panicked: theirs will never be told.
        let is_broken = n_ended > 0 && n_given > 0;
        if n_ended == n_ranks || is_broken {
            drop((self.told, self.gives));
            let (snapshot, saved) = self.save.wait();
            return Ok(Ended { step: self.step, snapshot, outcome: saved.map(|id| id.path) });
        }
        if n_given == n_ranks {
            // A thread that has ended meanwhile is counted next time.
            let _ = self.told.send(sum);
            self.given = None;
        }
        Err(self)
    }

    /// Waits for the end, together with all ranks.
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
