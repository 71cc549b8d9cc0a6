//! The control memory of a world on one machine: abort, progress, and wake-ups.
//!
//! Its holder need not be a rank: the supervisor of the ranks observes and aborts the world through it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::{AbortWords, Header, Layout, MAGIC, REASON_BYTES, Slot, VERSION, WaitingWords};
use crate::wakeup::Wakeup;
use phalanx_device::communicator::Waiting;
use phalanx_device::descriptor::Descriptor;
use phalanx_device::operation::Stream;
use phalanx_device::shared_memory::SharedMemory;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{CollectiveError, Progress};

/// A mapping of the control memory.
#[derive(Debug)]
pub struct Control {
    memory: SharedMemory,
    layout: Layout,
    world: World,
}

/// Marks that a rank writes memory of its peers.
#[must_use = "dropping the guard ends the write"]
pub(super) struct Writing<'a> {
    writes: &'a AtomicU32,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.writes.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Control {
    /// New control memory for `world`.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if the world is too large for one machine; [`CollectiveError::System`].
    pub fn create(world: &World) -> Result<Control, CollectiveError> {
        let layout = Layout::new(world)?;
        let memory = SharedMemory::create(layout.total_bytes() as u64)?;
        let control = Control { memory, layout, world: world.clone() };
        let header = control.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.total_bytes.store(control.layout.total_bytes() as u64, Ordering::Relaxed);
        for (word, value) in header.id.iter().zip(words_of(world.id())) {
            word.store(value, Ordering::Relaxed);
        }
        header.world_digest.store(world.digest(), Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(control)
    }

    /// Maps control memory that another process created for `world`, after validating its header.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if it is not control memory of this build for these ranks and groups;
    /// [`CollectiveError::Stale`] if it belongs to another generation; [`CollectiveError::System`].
    pub fn attach(fd: OwnedFd, world: &World) -> Result<Control, CollectiveError> {
        let layout = Layout::new(world)?;
        let memory = SharedMemory::attach(fd)?;
        let check = |field, expected: u64, found: u64| {
            if expected == found { Ok(()) } else { Err(CollectiveError::Invalid { field, expected, found }) }
        };
        if memory.len() < size_of::<Header>() {
            check("size of the memory", layout.total_bytes() as u64, memory.len() as u64)?;
        }
        let control = Control { memory, layout, world: world.clone() };
        let header = control.header();
        check("magic", MAGIC, header.magic.load(Ordering::Acquire))?;
        check("version", VERSION, header.version.load(Ordering::Relaxed))?;
        let [job, generation, incarnation] = [0, 1, 2].map(|i| header.id[i].load(Ordering::Relaxed));
        let (expected, found) = (world.id(), WorldId { job, generation, incarnation });
        if found != expected {
            return Err(CollectiveError::Stale { expected, found });
        }
        check("digest of ranks and groups", world.digest(), header.world_digest.load(Ordering::Relaxed))?;
        let total_bytes = control.layout.total_bytes() as u64;
        check("total in the header", total_bytes, header.total_bytes.load(Ordering::Relaxed))?;
        check("size of the memory", total_bytes, control.memory.len() as u64)?;
        Ok(control)
    }

    /// Its world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The memory, to be passed to another process.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Progress of `rank`, over all groups.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub fn progress(&self, rank: u32) -> Result<Progress, CollectiveError> {
        let slot = self.slot(rank)?;
        let finished = slot.finished.load(Ordering::Acquire);
        Ok(Progress { entered: slot.entered.load(Ordering::Acquire), finished })
    }

    /// The operation for which `rank` sleeps; none if the rank computes, or has waited for microseconds only.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub fn waiting(&self, rank: u32) -> Result<Option<Waiting>, CollectiveError> {
        Ok(self.slot(rank)?.waiting.read())
    }

    /// Aborts the world: every waiter returns at once, every later call fails with `reason` (truncated to 1024 bytes).
    /// The first reason stands. Callable from any thread or process, any number of times.
    pub fn abort(&self, reason: &str) {
        self.header().abort.raise(reason);
        for rank in 0..self.layout.n_ranks() {
            self.wakeup(rank).wake_always();
        }
    }

    /// The error that every call returns once the world is aborted.
    pub fn aborted(&self) -> Option<CollectiveError> {
        self.header().abort.read()
    }

    /// As [`Control::abort`], for one group: other groups continue.
    ///
    /// # Panics
    /// If the world has no such group.
    pub(super) fn abort_group(&self, group: usize, reason: &str) {
        self.abort_words(group).raise(reason);
        self.world.groups()[group].iter().for_each(|rank| self.wakeup(*rank).wake_always());
    }

    /// The error that every call in this group returns once the group or the world is aborted.
    pub(super) fn aborted_in(&self, group: usize) -> Option<CollectiveError> {
        self.aborted().or_else(|| self.abort_words(group).read())
    }

    fn abort_words(&self, group: usize) -> &AbortWords {
        self.memory.get(self.layout.abort_at(group))
    }

    /// Whether `rank` is writing memory of other ranks. No write begins in an aborted world.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub fn writes(&self, rank: u32) -> Result<bool, CollectiveError> {
        // Sequentially consistent with the abort: see `writing`.
        Ok(self.slot(rank)?.writes.load(Ordering::SeqCst) > 0)
    }

    /// Marks `rank` as writing memory of other ranks until the guard is dropped. The world may end during a write, and
    /// the writer may be descheduled until the next world begins: check [`Control::writes`] before the memory is
    /// reused.
    ///
    /// # Errors
    /// When the world is aborted; [`CollectiveError::NoSuchRank`].
    pub(super) fn writing(&self, rank: u32) -> Result<Writing<'_>, CollectiveError> {
        let writes = &self.slot(rank)?.writes;
        writes.fetch_add(1, Ordering::SeqCst);
        let writing = Writing { writes };
        match self.header().abort.aborted.load(Ordering::SeqCst) {
            0 => Ok(writing),
            _ => Err(self.aborted().expect("an abort is never revoked")),
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The slot of a rank.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub(super) fn slot(&self, rank: u32) -> Result<&Slot, CollectiveError> {
        if rank >= self.layout.n_ranks() {
            return Err(CollectiveError::NoSuchRank { rank, size: self.layout.n_ranks() });
        }
        Ok(self.memory.get(self.layout.slot_at(rank)))
    }

    /// The wake-up on which a rank sleeps.
    ///
    /// # Panics
    /// If it is not a rank of the world.
    pub(super) fn wakeup(&self, rank: u32) -> &Wakeup {
        &self.slot(rank).expect("a rank of the world").wakeup
    }

    /// Writes arbitrary bytes to the memory, as any process that maps it can. For fuzz targets.
    #[cfg(feature = "fuzzing")]
    pub fn scribble(&self, at: usize, bytes: &[u8]) {
        let room = self.memory.len() - at % self.memory.len();
        for (i, byte) in bytes.iter().take(room).enumerate() {
            self.memory.get::<super::layout::Byte>(at % self.memory.len() + i).0.store(*byte, Ordering::Relaxed);
        }
    }

    fn header(&self) -> &Header {
        self.memory.get(0)
    }
}

impl AbortWords {
    /// Aborts; the first reason stands.
    fn raise(&self, reason: &str) {
        if self.reason_claim.swap(1, Ordering::AcqRel) == 0 {
            let bytes = &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES)];
            for (to, from) in self.reason.iter().zip(bytes) {
                to.store(*from, Ordering::Relaxed);
            }
            self.reason_len.store(bytes.len() as u32, Ordering::Relaxed);
            self.aborted.store(1, Ordering::SeqCst);
        } else {
            // The process that claimed the reason may have died before writing it; the abort must not depend on it.
            let _ = self.aborted.compare_exchange(0, 2, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    fn read(&self) -> Option<CollectiveError> {
        match self.aborted.load(Ordering::Acquire) {
            0 => None,
            1 => {
                let len = (self.reason_len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
                let bytes: Vec<u8> = self.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
                Some(CollectiveError::aborted(String::from_utf8_lossy(&bytes)))
            }
            _ => Some(CollectiveError::aborted("reason not recorded")),
        }
    }
}

impl WaitingWords {
    /// Publishes the operation for which the rank waits; if several threads wait, that of one of them.
    pub(super) fn show(&self, waiting: &Waiting) {
        let before = self.version.load(Ordering::Relaxed);
        let version = before & !3;
        let writes = |before| self.version.compare_exchange(before, version | 1, Ordering::SeqCst, Ordering::Relaxed);
        if before & 1 == 1 || writes(before).is_err() {
            return;
        }
        let stream = match waiting.stream {
            Stream::Group => 0,
            Stream::SendTo(to) => 1 | (u64::from(to) << 32),
            Stream::RecvFrom(from) => 2 | (u64::from(from) << 32),
        };
        let head = [waiting.group as u64, stream, waiting.index];
        let words = head.into_iter().chain(waiting.descriptor.encode());
        self.words.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::SeqCst));
        self.version.store((version | 2) + 4, Ordering::SeqCst);
    }

    /// Publishes that the rank no longer waits.
    pub(super) fn clear(&self) {
        let version = self.version.load(Ordering::Relaxed);
        if version & 3 == 2 {
            let cleared = (version & !3).wrapping_add(4);
            // On failure another thread has announced a later operation, and will clear it.
            let _ = self.version.compare_exchange(version, cleared, Ordering::Release, Ordering::Relaxed);
        }
    }

    fn read(&self) -> Option<Waiting> {
        let version = self.version.load(Ordering::SeqCst);
        let words: Vec<u64> = self.words.iter().map(|word: &AtomicU64| word.load(Ordering::SeqCst)).collect();
        if version & 3 != 2 || self.version.load(Ordering::SeqCst) != version {
            return None;
        }
        let peer = (words[1] >> 32) as u32;
        let stream = match words[1] as u32 {
            0 => Stream::Group,
            1 => Stream::SendTo(peer),
            _ => Stream::RecvFrom(peer),
        };
        let descriptor = Descriptor::decode(words[3..].try_into().expect("the remaining words hold a descriptor"));
        Some(Waiting { group: words[0] as usize, stream, index: words[2], descriptor })
    }
}

fn words_of(id: WorldId) -> [u64; 3] {
    [id.job, id.generation, id.incarnation]
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    fn attached(control: &Control, world: &World) -> Result<Control, CollectiveError> {
        Control::attach(control.memory().fd().try_clone_to_owned().unwrap(), world)
    }

    #[test]
    fn memory_of_another_generation_or_other_groups_is_refused() {
        let world = World::of_one_group(ID, 2).unwrap();
        let control = Control::create(&world).unwrap();
        let later = WorldId { generation: 9, ..ID };

        let stale = attached(&control, &World::of_one_group(later, 2).unwrap()).unwrap_err();
        let other = attached(&control, &World::new(ID, 2, vec![vec![1, 0]]).unwrap()).unwrap_err();

        assert_eq!(stale, CollectiveError::Stale { expected: later, found: ID });
        assert!(matches!(other, CollectiveError::Invalid { field: "digest of ranks and groups", .. }), "{other}");
        assert!(attached(&control, &world).is_ok());
    }

    #[test]
    fn first_abort_reason_is_kept_and_truncated_between_characters() {
        let control = Control::create(&World::of_one_group(ID, 1).unwrap()).unwrap();
        let long = "é".repeat(REASON_BYTES);

        control.abort(&format!("x{long}"));
        control.abort("later");

        let kept = format!("x{}", "é".repeat((REASON_BYTES - 1) / 2));
        assert_eq!(control.aborted(), Some(CollectiveError::aborted(kept)));
    }

    #[test]
    fn writes_to_peer_memory_are_announced_and_none_start_in_an_aborted_world() {
        let control = Control::create(&World::of_one_group(ID, 2).unwrap()).unwrap();
        let shown = || [0, 1].map(|rank| control.writes(rank).unwrap());

        let writing = control.writing(1).unwrap();
        control.abort("node lost");
        let refused = [0, 1].map(|rank| control.writing(rank).err());

        assert_eq!(refused, [0, 1].map(|_| Some(CollectiveError::aborted("node lost"))));
        assert_eq!(shown(), [false, true], "a write that began before the abort continues");
        drop(writing);
        assert_eq!(shown(), [false, false]);
    }

    #[test]
    fn awaited_operation_is_readable_until_cleared() {
        let control = Control::create(&World::of_one_group(ID, 1).unwrap()).unwrap();
        let words = &control.slot(0).unwrap().waiting;
        let descriptor = Descriptor::decode([1, 2, 3, 4, 5]);
        let waiting = Waiting { group: 3, stream: Stream::RecvFrom(7), index: 9, descriptor };

        assert_eq!(control.waiting(0), Ok(None));
        for _ in 0..3 {
            words.show(&waiting);
            assert_eq!(control.waiting(0), Ok(Some(waiting)));
            words.clear();
            assert_eq!(control.waiting(0), Ok(None));
        }
    }
}
