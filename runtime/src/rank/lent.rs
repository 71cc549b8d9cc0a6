//! The memory that a node lends a rank process: that of its seat, and that of a seat in an earlier, larger world.
//!
//! To take memory from the system that nobody has touched costs ten times as much as to fill it (50 against 5 ms for 64 MB
//! on the machine of `BENCHMARKS.md`), and the whole world waits. When somebody is lost and the others go on in a smaller
//! world, what comes next is a larger one again. So whoever goes to a seat that needs other memory keeps what it had in the
//! larger world: at most that of one seat, without the state in it, and until it has a seat in a world as large.
//!
//! Invariant:
//! - `L-1` Memory becomes a spare when the next world runs, not before: until then another failure may need what is in it
//!   (`B-2`). Then nobody writes it any more.

use crate::rank::seat_memory::SeatMemory;
use phalanx_device::shared_memory::SharedMemory;
use std::sync::Arc;

/// Memory of a seat that somebody had, and of how many ranks its world was.
pub(crate) type Spare = (usize, Arc<SharedMemory>);

/// What is kept of these by whoever now has a seat in a world of `n_ranks`, in this memory.
pub(crate) fn kept(spares: impl Iterator<Item = Spare>, n_ranks: usize, memory: &SharedMemory) -> Option<Spare> {
    let may_return = spares.filter(|(size, arena)| *size > n_ranks && !arena.is_same(memory));
    may_return.max_by_key(|(size, _)| *size)
}

/// See the [module](self).
pub(crate) struct Lent {
    arena: Arc<SharedMemory>,
    /// What of its last world is in it.
    seat: Option<SeatMemory>,
    /// That of the last world that ran, if it is another and nobody writes it.
    before: Option<Spare>,
    spare: Option<Spare>,
}

impl Lent {
    /// Memory of a process that has had no seat.
    pub(crate) fn new(arena: Arc<SharedMemory>) -> Lent {
        Lent { arena, seat: None, before: None, spare: None }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.len()
    }

    /// Memory of at least so many bytes for the next seat. Where others may still write that of the last world
    /// (`nobody_writes`), it is not that.
    pub(crate) fn for_seat(&self, next: &SeatMemory, bytes: u64, nobody_writes: bool) -> Option<&Arc<SharedMemory>> {
        let may_stay = self.seat.as_ref().is_none_or(|before| nobody_writes && before.may_become(next));
        let same = may_stay.then_some(&self.arena);
        let spare = self.spare.as_ref().map(|(_, arena)| arena);
        [same, spare].into_iter().flatten().find(|arena| arena.len() as u64 >= bytes)
    }

    /// It has this seat now, in this memory.
    pub(crate) fn moved(&mut self, seat: SeatMemory, arena: Arc<SharedMemory>, nobody_writes: bool) {
        let last = self.seat.replace(seat);
        if arena.is_same(&self.arena) {
            return;
        }
        self.spare.take_if(|(_, spare)| spare.is_same(&arena));
        let left = std::mem::replace(&mut self.arena, arena);
        // Worlds that never ran may have come between.
        let of_last = || last.filter(|_| nobody_writes).map(|last| (last.mesh.size(), left));
        self.before = self.before.take().or_else(of_last);
    }

    /// The world of its seat runs.
    pub(crate) fn runs(&mut self) {
        let Some(seat) = &self.seat else { return };
        let spares = [self.before.take(), self.spare.take()];
        self.spare = kept(spares.into_iter().flatten(), seat.mesh.size(), &self.arena);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rank::seat_memory::tests::memory;
    use phalanx_strategies::mesh::Mesh;

    fn arena(bytes: u64) -> Arc<SharedMemory> {
        Arc::new(SharedMemory::create(bytes).unwrap())
    }

    fn seat(dp_shard: usize) -> SeatMemory {
        memory(Mesh { dp_shard, ..Mesh::ONE }, 0, &[])
    }

    /// A process with a seat in a running world of four, and its memory.
    fn in_world_of_four() -> (Lent, Arc<SharedMemory>) {
        let of_four = arena(8192);
        let mut lent = Lent::new(of_four.clone());
        lent.moved(seat(4), of_four.clone(), true);
        lent.runs();
        (lent, of_four)
    }

    #[test]
    fn who_comes_back_to_a_world_as_large_has_the_memory_that_it_had_there() {
        let (mut lent, of_four) = in_world_of_four();
        assert!(lent.for_seat(&seat(3), 4096, true).is_none(), "what is in it may be needed until the next world runs");
        let of_three = arena(8192);
        lent.moved(seat(3), of_three.clone(), true);
        assert!(lent.for_seat(&seat(4), 4096, true).is_none(), "the world of three does not run yet");
        lent.runs();

        let again = lent.for_seat(&seat(4), 8192, true).expect("it has a spare").clone();

        assert!(again.is_same(&of_four));
        assert!(lent.for_seat(&seat(4), 8193, true).is_none(), "it is too small");
        lent.moved(seat(4), again, true);
        lent.runs();
        assert_eq!(Arc::strong_count(&of_three), 1, "nothing larger is to be expected");
    }

    #[test]
    fn the_largest_world_is_the_one_that_may_return() {
        let (mut lent, of_four) = in_world_of_four();
        let of_three = arena(8192);
        lent.moved(seat(3), of_three.clone(), true);
        lent.runs();

        lent.moved(seat(2), arena(8192), true);
        lent.runs();

        let spare = lent.for_seat(&seat(4), 1, true).expect("it has a spare");
        assert!(spare.is_same(&of_four));
        assert_eq!(Arc::strong_count(&of_three), 1);
    }

    #[test]
    fn a_world_that_never_ran_leaves_nothing_and_takes_nothing_away() {
        let (mut lent, of_four) = in_world_of_four();
        let of_three = arena(8192);
        lent.moved(seat(3), of_three.clone(), true);
        lent.moved(seat(2), arena(8192), true);
        assert_eq!(Arc::strong_count(&of_three), 1);

        lent.runs();

        assert!(lent.for_seat(&seat(4), 1, true).expect("it has a spare").is_same(&of_four));
    }

    #[test]
    fn memory_that_somebody_may_still_write_is_not_used_again() {
        let (mut lent, of_four) = in_world_of_four();
        assert!(lent.for_seat(&seat(4), 1, true).is_some_and(|arena| arena.is_same(&of_four)));
        assert!(lent.for_seat(&seat(4), 1, false).is_none());

        lent.moved(seat(3), arena(8192), false);
        lent.runs();

        assert!(lent.for_seat(&seat(4), 1, true).is_none());
        assert_eq!(Arc::strong_count(&of_four), 1);
    }

    #[test]
    fn a_spare_that_is_in_use_is_none() {
        let (mut lent, of_four) = in_world_of_four();
        lent.moved(seat(3), arena(8192), true);
        lent.runs();

        // One more was lost before anybody came, and two fit where four were.
        lent.moved(seat(2), of_four, true);
        assert!(lent.for_seat(&seat(4), 1, true).is_none(), "the seat of two is in it");
        lent.runs();

        let three = lent.for_seat(&seat(4), 1, true).expect("that of the world of three is a spare now");
        assert!(!three.is_same(&lent.arena));
    }
}
