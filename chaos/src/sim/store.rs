//! The durable store: the lease, the record and the parts of checkpoints.

use phalanx_strategies::elastic::message::Record;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::elastic::snapshot::{Checkpoint, Part};
use phalanx_strategies::elastic::succession::Lease;
use std::collections::BTreeMap;
use std::ops::Range;

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Store {
    /// The current lease.
    pub lease: Lease,
    /// The coordinators' record of decisions.
    pub record: Record,
    parts: BTreeMap<Checkpoint, BTreeMap<Shard, Vec<(u64, u64)>>>,
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

    /// Replaces the record unless a later term has begun; `fenced` is false only in a deliberately broken store.
    pub fn write(&mut self, record: Record, fenced: bool) -> bool {
        if fenced && record.term != self.lease.term {
            return false;
        }
        self.record = record;
        true
    }

    /// Makes a part of a checkpoint durable.
    pub fn save(&mut self, part: Part, atoms: Vec<(u64, u64)>) {
        self.parts.entry(part.of).or_default().insert(part.shard, atoms);
    }

    /// The pieces of a checkpoint in these runs.
    pub fn load(&self, checkpoint: Checkpoint, runs: &[Range<u64>]) -> Vec<(u64, u64)> {
        let all = self.parts.get(&checkpoint).into_iter().flat_map(BTreeMap::values).flatten();
        all.filter(|(atom, _)| runs.iter().any(|run| run.contains(atom))).copied().collect()
    }
}
