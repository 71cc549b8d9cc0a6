//! The newest checkpoint that the store has.
//!
//! The record names the newest checkpoint that members have reported. A member that dies right after its checkpoint was
//! committed has reported nothing, and a record from a backup is older than the store.
//!
//! Invariant:
//! - `COORDINATOR-22` A world begins from a checkpoint only after the store was listed in the same generation: the latest worlds
//!   commit no checkpoint any more (`CHECKPOINT-8`), and the newest one of their lineage is on record. Checkpoints of earlier
//!   lineages, and of earlier runs in the same folder, are none of this list.

use super::super::identity::{Generation, Step};
use super::super::message::{Record, WorldPlan};
use super::super::quorum::Blocked;
use super::{Command, Coordinator, Phase, Purpose};
use crate::elastic::checkpoint::Checkpoint;
use std::time::{Duration, Instant};

/// A request for the newest checkpoint that the store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The generation that asks.
    pub generation: Generation,
    /// The first generation whose checkpoints count.
    pub first: Generation,
    /// The step after which a checkpoint is newer than the one on record.
    pub after: Step,
}

/// How far the listing of a generation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Listed {
    #[default]
    NotYet,
    Asked(Generation),
    Done(Generation),
}

impl Coordinator {
    /// Handles the newest checkpoint that counts for a listing, if there is one.
    pub fn handle_listed(&mut self, now: Instant, listing: Listing, newest: Option<Checkpoint>) {
        if self.listed != Listed::Asked(listing.generation) || listing.generation != self.record.generation {
            return;
        }
        self.listed = Listed::Done(listing.generation);
        if let Phase::Regrouping { retry, .. } = &mut self.phase {
            *retry = Some(now);
            self.complete = newest;
        }
        self.handle_timeout(now);
    }

    /// Whether the next world has to wait for a listing; asks for it once. A stopped job waits no longer than it waits for
    /// members.
    pub(super) fn awaits_listing(&mut self, waited: Duration, next: &Result<WorldPlan, Blocked>) -> bool {
        let generation = self.record.generation;
        // The checkpoints of a job that has had no world yet were listed when it began.
        let has_had_world = self.record.world_plan.is_some() || self.record.unrecorded;
        let begins_from_checkpoint = next.as_ref().is_ok_and(|next| next.base.lineage == next.generation);
        let stops = self.record.requests.stop;
        if !has_had_world || self.listed == Listed::Done(generation) || !(begins_from_checkpoint || stops) {
            return false;
        }
        if self.listed != Listed::Asked(generation) {
            self.listed = Listed::Asked(generation);
            let lineage = self.record.world_plan.as_ref().map(|world_plan| world_plan.base.lineage);
            let first = lineage.unwrap_or(self.record.began.next());
            let after = self.record.checkpoint.step;
            self.commands.push_back(Command::ListCheckpoints(Listing { generation, first, after }));
        }
        begins_from_checkpoint && !(stops && waited >= self.stop_patience())
    }

    /// Makes a checkpoint of the list the newest one on record, before the next world is planned. Returns whether it is being written.
    pub(super) fn write_listed(&mut self) -> bool {
        matches!(self.phase, Phase::Regrouping { .. }) && self.write_checkpoint()
    }

    /// Makes a complete checkpoint the newest one on record. Returns whether it is being written.
    pub(super) fn write_checkpoint(&mut self) -> bool {
        let newer = self.complete.take().filter(|new| new.step > self.record.checkpoint.step);
        let Some(checkpoint) = newer else { return false };
        let n_saves = self.n_saves_with(checkpoint);
        self.write(Record { checkpoint, n_saves, ..self.record.clone() }, Purpose::Save);
        true
    }
}
