//! A rank in one world: its trainer, and which shards of state are in its memory.

use crate::rank::arena_contents::ArenaContents;
use crate::rank::heal::{HeldState, StateToFill};
use crate::train::trainer::Trainer;
use phalanx_strategies::elastic::identity::{Generation, Step};
use phalanx_strategies::elastic::shadow::Shard;
use std::collections::BTreeSet;

/// A rank in one world, with the state of its shards.
pub(crate) struct RankInstance<'a> {
    pub(super) memory: ArenaContents,
    /// The shards whose state is in the arena, all of one version.
    pub(crate) has: BTreeSet<Shard>,
    pub(crate) generation: Generation,
    /// Number of requested checkpoints that are complete.
    pub(super) n_saves: u64,
    /// Whether the frozen tensors are loaded.
    pub(super) is_filled: bool,
    /// Whether the state came from a checkpoint or from initialization, at a start or restart of the run.
    pub(super) from_disk: bool,
    /// Steps whose copies of state differed in an earlier world.
    pub(super) disputed: Vec<Step>,
    pub(crate) trainer: Trainer<'a>,
}

impl RankInstance<'_> {
    /// The held state, by shard.
    pub(crate) fn held_states(&self) -> impl Iterator<Item = (Shard, HeldState<'_>)> {
        let (compiled, machine) = self.trainer.memory();
        let own = self.memory.shards.first().map(|shard| (*shard, HeldState { compiled, machine }));
        let shadows = self.trainer.shadows().iter();
        let all = own
            .into_iter()
            .chain(shadows.map(|s| (s.shard, HeldState { compiled: &s.compiled, machine: &*s.machine })));
        all.filter(|(shard, _)| self.has.contains(shard))
    }

    /// Marks the state as complete.
    pub(crate) fn completed(&mut self) {
        self.has = self.memory.shards.iter().copied().collect();
    }

    /// The memory to fill, by shard.
    pub(crate) fn spans_mut(&mut self) -> impl Iterator<Item = (Shard, StateToFill<'_>)> {
        let ((compiled, machine), shadows) = self.trainer.memories_mut();
        let own = self.memory.shards.first().map(|shard| (*shard, StateToFill { compiled, machine }));
        let shadows = shadows.iter_mut();
        own.into_iter()
            .chain(shadows.map(|s| (s.shard, StateToFill { compiled: &s.compiled, machine: &mut *s.machine })))
    }
}
