//! Memory of a rank process: the arena of its current rank, and a recycled arena from an earlier, larger world.
//!
//! First-touching new memory takes ten times as long as filling it (50 against 5 ms for 64 MB on the machine of
//! `BENCHMARKS.md`), and the whole world waits. After a member is lost and the job shrinks, the next change is usually
//! growth. A member that moves to a rank with another arena therefore keeps the arena of the larger world, without its
//! contents, until the world is that large again. It keeps at most one.
//!
//! Invariant:
//! - `RECYCLED-ARENAS-1` An arena is recycled when the next world runs, not before: until then another failure may need
//!   its contents (`MEMBER-2`). After that no peer writes it.

use crate::rank::arena_contents::ArenaContents;
use phalanx_device::shared_memory::SharedMemory;
use std::sync::Arc;

/// A recycled arena, and the size of the world it comes from.
pub(crate) type Spare = (usize, Arc<SharedMemory>);

/// The arena to keep for a member that now has a rank in a world of `n_ranks`, in this memory.
pub(crate) fn largest_spare(
    spares: impl Iterator<Item = Spare>,
    n_ranks: usize,
    memory: &SharedMemory,
) -> Option<Spare> {
    let may_return = spares.filter(|(size, arena)| *size > n_ranks && !arena.is_same(memory));
    may_return.max_by_key(|(size, _)| *size)
}

pub(crate) struct RecycledArenas {
    arena: Arc<SharedMemory>,
    /// Contents from its last world.
    assignment: Option<ArenaContents>,
    /// The arena of the last world that ran, if it is a different one that no peer writes.
    before: Option<Spare>,
    spare: Option<Spare>,
}

impl RecycledArenas {
    /// The memory of a process that has had no rank.
    pub(crate) fn new(arena: Arc<SharedMemory>) -> RecycledArenas {
        RecycledArenas { arena, assignment: None, before: None, spare: None }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.len()
    }

    /// An arena of at least `bytes` bytes for the next rank. Excludes the arena of the last world while peers may still
    /// write it (`no_writers`).
    pub(crate) fn for_rank(&self, next: &ArenaContents, bytes: u64, no_writers: bool) -> Option<&Arc<SharedMemory>> {
        let may_stay = self.assignment.as_ref().is_none_or(|before| no_writers && before.may_become(next));
        let same = may_stay.then_some(&self.arena);
        let spare = self.spare.as_ref().map(|(_, arena)| arena);
        [same, spare].into_iter().flatten().find(|arena| arena.len() as u64 >= bytes)
    }

    /// The process has this rank now, in this arena.
    pub(crate) fn moved(&mut self, assignment: ArenaContents, arena: Arc<SharedMemory>, no_writers: bool) {
        let last = self.assignment.replace(assignment);
        if arena.is_same(&self.arena) {
            return;
        }
        self.spare.take_if(|(_, spare)| spare.is_same(&arena));
        let left = std::mem::replace(&mut self.arena, arena);
        // Worlds that never ran may lie between the two arenas.
        let of_last = || last.filter(|_| no_writers).map(|last| (last.mesh.size(), left));
        self.before = self.before.take().or_else(of_last);
    }

    /// The world of its rank runs.
    pub(crate) fn runs(&mut self) {
        let Some(assignment) = &self.assignment else { return };
        let spares = [self.before.take(), self.spare.take()];
        self.spare = largest_spare(spares.into_iter().flatten(), assignment.mesh.size(), &self.arena);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::arena_contents::tests::memory;
    use phalanx_strategies::mesh::Mesh;

    fn arena(bytes: u64) -> Arc<SharedMemory> {
        Arc::new(SharedMemory::create(bytes).unwrap())
    }

    fn assignment(dp_shard: usize) -> ArenaContents {
        memory(Mesh { dp_shard, ..Mesh::ONE }, 0, &[])
    }

    /// A process with a rank in a running world of four, and its memory.
    fn in_world_of_four() -> (RecycledArenas, Arc<SharedMemory>) {
        let of_four = arena(8192);
        let mut recycled_arenas = RecycledArenas::new(of_four.clone());
        recycled_arenas.moved(assignment(4), of_four.clone(), true);
        recycled_arenas.runs();
        (recycled_arenas, of_four)
    }

    #[test]
    fn survivor_reuses_its_arena_when_the_world_grows_back() {
        let (mut recycled_arenas, of_four) = in_world_of_four();
        assert!(
            recycled_arenas.for_rank(&assignment(3), 4096, true).is_none(),
            "peers may need its contents until the next world runs"
        );
        let of_three = arena(8192);
        recycled_arenas.moved(assignment(3), of_three.clone(), true);
        assert!(
            recycled_arenas.for_rank(&assignment(4), 4096, true).is_none(),
            "the world of three is not running yet"
        );
        recycled_arenas.runs();

        let again = recycled_arenas.for_rank(&assignment(4), 8192, true).expect("it has a spare").clone();

        assert!(again.is_same(&of_four));
        assert!(recycled_arenas.for_rank(&assignment(4), 8193, true).is_none(), "it is too small");
        recycled_arenas.moved(assignment(4), again, true);
        recycled_arenas.runs();
        assert_eq!(Arc::strong_count(&of_three), 1, "the arena of a smaller world is not kept");
    }

    #[test]
    fn arena_of_the_largest_world_is_kept() {
        let (mut recycled_arenas, of_four) = in_world_of_four();
        let of_three = arena(8192);
        recycled_arenas.moved(assignment(3), of_three.clone(), true);
        recycled_arenas.runs();

        recycled_arenas.moved(assignment(2), arena(8192), true);
        recycled_arenas.runs();

        let spare = recycled_arenas.for_rank(&assignment(4), 1, true).expect("it has a spare");
        assert!(spare.is_same(&of_four));
        assert_eq!(Arc::strong_count(&of_three), 1);
    }

    #[test]
    fn world_that_never_ran_neither_adds_nor_removes_a_spare() {
        let (mut recycled_arenas, of_four) = in_world_of_four();
        let of_three = arena(8192);
        recycled_arenas.moved(assignment(3), of_three.clone(), true);
        recycled_arenas.moved(assignment(2), arena(8192), true);
        assert_eq!(Arc::strong_count(&of_three), 1);

        recycled_arenas.runs();

        assert!(recycled_arenas.for_rank(&assignment(4), 1, true).expect("it has a spare").is_same(&of_four));
    }

    #[test]
    fn memory_that_peers_may_still_write_is_not_reused() {
        let (mut recycled_arenas, of_four) = in_world_of_four();
        assert!(recycled_arenas.for_rank(&assignment(4), 1, true).is_some_and(|arena| arena.is_same(&of_four)));
        assert!(recycled_arenas.for_rank(&assignment(4), 1, false).is_none());

        recycled_arenas.moved(assignment(3), arena(8192), false);
        recycled_arenas.runs();

        assert!(recycled_arenas.for_rank(&assignment(4), 1, true).is_none());
        assert_eq!(Arc::strong_count(&of_four), 1);
    }

    #[test]
    fn arena_in_use_is_not_a_spare() {
        let (mut recycled_arenas, of_four) = in_world_of_four();
        recycled_arenas.moved(assignment(3), arena(8192), true);
        recycled_arenas.runs();

        // Another member is lost before any joins, and the arena of four serves the world of two.
        recycled_arenas.moved(assignment(2), of_four, true);
        assert!(recycled_arenas.for_rank(&assignment(4), 1, true).is_none(), "the arena of four is in use");
        recycled_arenas.runs();

        let three = recycled_arenas.for_rank(&assignment(4), 1, true).expect("the arena of three is a spare now");
        assert!(!three.is_same(&recycled_arenas.arena));
    }
}
