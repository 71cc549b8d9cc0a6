//! The durable store: the lease, the record and the parts of checkpoints.

use phalanx_strategies::elastic::checkpoint::{Checkpoint, Part};
use phalanx_strategies::elastic::coordinator::newest_checkpoint::Listing;
use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::snapshot::Manifests;
use phalanx_strategies::elastic::succession::Lease;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Store {
    /// The current lease.
    pub lease: Lease,
    /// The coordinators' record of decisions.
    pub record: Record,
    /// Counts the records written.
    version: u64,
    parts: BTreeMap<Checkpoint, BTreeMap<Shard, Vec<(u64, u64)>>>,
    /// Parts of checkpoints that are not committed, of the world on record (`CHECKPOINT-8`).
    manifests: Manifests,
    committed: BTreeSet<Checkpoint>,
}

/// Outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// The record is replaced.
    Now,
    /// An earlier try has replaced it.
    Before,
    /// Another record is there.
    Rejected,
}

impl Store {
    /// Replaces the lease if it equals `old`.
    pub fn replace_lease(&mut self, old: Lease, new: Lease) -> Result<Lease, Lease> {
        if self.lease != old {
            return Err(self.lease);
        }
        self.lease = new;
        Ok(new)
    }

    /// Replaces the record that has this version, unless a later term has begun. Returns whether the store has the record now,
    /// perhaps from an earlier try. `fenced` and `conditional` are false only in a deliberately broken store.
    pub fn write(&mut self, record: &Record, over: u64, fenced: bool, conditional: bool) -> Written {
        if fenced && record.term != self.lease.term {
            return Written::Rejected;
        }
        if conditional && over != self.version {
            return if self.record == *record { Written::Before } else { Written::Rejected };
        }
        if record.generation != self.record.generation {
            self.manifests.abandon();
        }
        let has_world =
            |record: &Record| record.world_plan.as_ref().map(|plan| plan.generation) == Some(record.generation);
        if let Some(world_plan) = record.world_plan.as_ref().filter(|_| has_world(record) && !has_world(&self.record)) {
            self.manifests.begin(world_plan);
        }
        self.record = record.clone();
        self.version += 1;
        Written::Now
    }

    /// Version of the record.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Makes a part of a checkpoint durable. Returns the checkpoint if it is committed now.
    pub fn save(&mut self, part: Part, atoms: Vec<(u64, u64)>) -> Option<Checkpoint> {
        self.parts.entry(part.of).or_default().insert(part.shard, atoms);
        let committed = self.manifests.handle_part(part);
        self.committed.extend(committed);
        committed
    }

    /// The newest checkpoint that counts for a listing.
    pub fn newest(&self, listing: Listing) -> Option<Checkpoint> {
        let counts = |found: &&Checkpoint| found.generation >= listing.first && found.step > listing.after;
        self.committed.iter().filter(counts).max_by_key(|found| (found.step, found.generation)).copied()
    }

    /// The pieces of a checkpoint in these runs.
    pub fn load(&self, checkpoint: Checkpoint, runs: &[Range<u64>]) -> Vec<(u64, u64)> {
        let all = self.parts.get(&checkpoint).into_iter().flat_map(BTreeMap::values).flatten();
        all.filter(|(atom, _)| runs.iter().any(|run| run.contains(atom))).copied().collect()
    }
}
