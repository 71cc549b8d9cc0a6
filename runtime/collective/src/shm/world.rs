//! A world on one machine: its control memory and an arena per rank.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::collective::ShmCollective;
use super::control::Control;
use super::plane::{ControlWakeup, Plane};
use crate::engine::{Engine, HasWakeup};
use phalanx_device::CollectiveError;
use phalanx_device::shared_memory::{Arena, SharedMemory};
use phalanx_device::world::World;

/// The memory that the ranks of one machine share. The process that starts the ranks makes it and passes it on (see
/// [`super::passing`]); its holder is not yet a rank.
#[derive(Clone, Debug)]
pub struct ShmWorld {
    control: Arc<Control>,
    /// By rank.
    arenas: Vec<Arc<SharedMemory>>,
    staging_bytes: usize,
}

impl ShmWorld {
    /// Makes a world whose rank `r` has an arena of `arena_bytes[r]`, preceded by `staging_bytes` for tensors that lie
    /// elsewhere. Pages are allocated when they are first touched.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if the number of arenas differs from the number of ranks, or the world exceeds one
    /// machine; [`CollectiveError::System`].
    pub fn create(world: &World, arena_bytes: &[u64], staging_bytes: u64) -> Result<ShmWorld, CollectiveError> {
        if arena_bytes.len() != world.n_ranks() as usize {
            let (expected, found) = (world.n_ranks().to_string(), arena_bytes.len() as u64);
            return Err(CollectiveError::Shape { field: "number of arenas", expected, found });
        }
        let control = Arc::new(Control::create(world)?);
        let arenas = arena_bytes.iter().map(|bytes| {
            let total = staging_bytes.saturating_add(*bytes).max(1).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
            Ok(Arc::new(SharedMemory::create(total)?.with_huge_pages()))
        });
        let arenas = arenas.collect::<Result<_, CollectiveError>>()?;
        Ok(ShmWorld { control, arenas, staging_bytes: staging_bytes as usize })
    }

    /// As [`ShmWorld::create`], but some ranks keep their arena of an earlier world, with its contents.
    ///
    /// # Errors
    /// As [`ShmWorld::create`]; [`CollectiveError::Invalid`] if a kept arena is too small.
    pub fn succeed(
        world: &World,
        arenas: Vec<(u64, Option<Arc<SharedMemory>>)>,
        staging_bytes: u64,
    ) -> Result<ShmWorld, CollectiveError> {
        let bytes: Vec<u64> = arenas.iter().map(|(bytes, kept)| if kept.is_some() { 0 } else { *bytes }).collect();
        let mut next = ShmWorld::create(world, &bytes, staging_bytes)?;
        for (arena, (bytes, kept)) in next.arenas.iter_mut().zip(arenas) {
            let Some(kept) = kept else { continue };
            let expected = staging_bytes.saturating_add(bytes);
            if (kept.len() as u64) < expected {
                return Err(CollectiveError::Invalid {
                    field: "bytes of an arena",
                    expected,
                    found: kept.len() as u64,
                });
            }
            *arena = kept;
        }
        Ok(next)
    }

    /// The memory of a rank.
    pub fn arena_of(&self, rank: u32) -> Option<&Arc<SharedMemory>> {
        self.arenas.get(rank as usize)
    }

    /// A world in memory created by another process.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if the number of arenas differs from the number of ranks, or an arena is smaller
    /// than its staging area.
    pub(super) fn from_parts(
        control: Control,
        arenas: Vec<Arc<SharedMemory>>,
        staging_bytes: u64,
    ) -> Result<ShmWorld, CollectiveError> {
        let invalid = |field, expected: u64, found: u64| Err(CollectiveError::Invalid { field, expected, found });
        let n_ranks = control.world().n_ranks();
        if arenas.len() != n_ranks as usize {
            return invalid("number of arenas", n_ranks.into(), arenas.len() as u64);
        }
        if let Some(small) = arenas.iter().find(|arena| (arena.len() as u64) < staging_bytes) {
            return invalid("bytes of an arena", staging_bytes, small.len() as u64);
        }
        Ok(ShmWorld { control: Arc::new(control), arenas, staging_bytes: staging_bytes as usize })
    }

    /// The memory of all ranks.
    pub fn arenas(&self) -> &[Arc<SharedMemory>] {
        &self.arenas
    }

    /// Abort, progress, and the awaited operation of each rank.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Joins the world as `rank`. Each rank can be taken only once per world, even if its process dies.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`], [`CollectiveError::RankTaken`].
    pub fn join(&self, rank: u32) -> Result<ShmRank, CollectiveError> {
        if self.control.slot(rank)?.taken.swap(1, Ordering::AcqRel) != 0 {
            return Err(CollectiveError::RankTaken { rank });
        }
        let plane = Plane::new(self.control.clone(), self.arenas.clone(), rank, self.staging_bytes);
        let wakeup = Arc::new(ControlWakeup(self.control.clone(), rank));
        let engine = Arc::new(Engine::new(wakeup, self.control.world().n_ranks()));
        Ok(ShmRank { plane: Arc::new(plane), engine, staging_bytes: self.staging_bytes })
    }

    /// The same world with new mappings, as in another process.
    ///
    /// # Errors
    /// [`CollectiveError::System`].
    pub fn mapped_again(&self) -> Result<ShmWorld, CollectiveError> {
        let fds = self.memories().map(|memory| memory.fd().try_clone_to_owned());
        let mut fds = fds.collect::<Result<Vec<_>, _>>().map_err(|error| CollectiveError::io("dup", &error))?;
        let attach = |fd| SharedMemory::attach_or_keep(fd, &[]);
        let arenas = fds.split_off(1).into_iter().map(attach).collect::<Result<_, _>>()?;
        let control = fds.pop().expect("control memory comes first");
        ShmWorld::from_parts(Control::attach(control, self.control.world())?, arenas, self.staging_bytes())
    }

    /// All memory that is passed to another process, control memory first.
    pub(super) fn memories(&self) -> impl Iterator<Item = &SharedMemory> {
        std::iter::once(self.control.memory()).chain(self.arenas.iter().map(AsRef::as_ref))
    }

    /// Bytes of each staging area.
    pub(super) fn staging_bytes(&self) -> u64 {
        self.staging_bytes as u64
    }
}

const PAGE: u64 = 4096;

/// One rank of a machine. One thread at a time starts and finishes its operations: of two threads that wait at once,
/// each can miss a wake-up of the other until it polls again after 50 ms.
#[derive(Debug)]
pub struct ShmRank {
    plane: Arc<Plane>,
    engine: Arc<Engine>,
    staging_bytes: usize,
}

impl ShmRank {
    /// The communicator of group number `group`.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub fn communicator(&self, group: usize) -> Result<ShmCollective, CollectiveError> {
        ShmCollective::new(self.plane.clone(), self.engine.clone(), group)
    }

    /// This rank's arena.
    ///
    /// # Safety
    /// As [`Arena::new`].
    #[allow(unsafe_code)] // Clones of an arena name the same memory.
    pub unsafe fn arena(&self) -> Arena {
        let memory = self.plane.arenas[self.plane.rank as usize].clone();
        // SAFETY: the caller's contract; by the protocol of this module, peers access operands only.
        unsafe { Arena::new(memory, self.staging_bytes.next_multiple_of(64)) }
    }

    /// Abort, progress, and the awaited operation of each rank.
    pub fn control(&self) -> &Arc<Control> {
        &self.plane.control
    }

    /// The engine that drives all of this rank's streams.
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The wake-up on which this rank sleeps.
    pub(crate) fn wakeup(&self) -> Arc<dyn HasWakeup> {
        Arc::new(ControlWakeup(self.plane.control.clone(), self.plane.rank))
    }
}
