//! Runs compiled programs over preallocated buffers: kernels in program order, without allocation or locks.
//!
//! Aliasing: the memory pass overlaps only an operand and a result of one instruction that may share memory
//! (`Op::in_place_pairs`), and then the two are equal. Each case below therefore checks whether the two are the same
//! buffer, and calls the kernel that works in place.
// Values live in arenas and are borrowed instruction by instruction, which lifetimes cannot express.
#![allow(unsafe_code)]

mod arena;
mod attention;
mod buffer;
mod cache;
mod elements;
mod instr;
mod losses;
mod machine;
mod magnitudes;
mod norms;
mod operands;
mod parts;
mod product;
mod scalars;
mod scratch;
mod sequences;
mod sum_plan;
mod sums;
mod tables;
mod updates;

pub(crate) use scratch::scratch_bytes;

use crate::thread::with_team;
use arena::Arena;
use buffer::Buffer;
use bytemuck::Pod;
use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena as SharedArena;
use phalanx_device::{AllocError, Backing, ExecError, Run};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::program::{Op, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use sum_plan::SumPlan;

/// The buffers of one or more programs over the same parameters.
#[derive(Debug)]
pub(crate) struct CpuMachine {
    arenas: BTreeMap<Region, Arena>,
    /// Cached plans of tree sums, by number of leaves and ranks.
    sum_plans: BTreeMap<(usize, usize), Arc<SumPlan>>,
}

impl CpuMachine {
    /// Allocates the regions, each as large as the largest of the programs needs. Constants must agree between the
    /// programs, since they share them.
    ///
    /// # Errors
    /// When the system is out of memory, or the folder for offloaded state cannot be written.
    ///
    /// # Panics
    /// If `backing.shared` is too small.
    pub(crate) fn on(programs: &[&Compiled], backing: &Backing<'_>) -> Result<CpuMachine, AllocError> {
        CpuMachine::new_with(programs, backing, BTreeMap::new())
    }

    /// As [`CpuMachine::on`], without offloaded state, for [`CpuMachine::succeed`]. Regions that outlast a step and are
    /// not shared are allocated at once.
    ///
    /// # Errors
    /// As [`CpuMachine::on`].
    ///
    /// # Panics
    /// As [`CpuMachine::on`].
    pub(crate) fn warm(programs: &[&Compiled], shared: &SharedArena) -> Result<CpuMachine, AllocError> {
        let mut machine = CpuMachine::on(programs, &Backing { shared: Some(shared), offload_dir: None })?;
        machine.arenas.remove(&Region::Offloaded);
        let lasts = machine.arenas.iter().filter(|(region, _)| LASTING.contains(region));
        lasts.filter(|(_, arena)| !matches!(arena, Arena::Shared { .. })).for_each(|(_, arena)| arena.populate());
        Ok(machine)
    }

    /// Whether the machine has a place for this value.
    fn has(&self, c: &Compiled, v: ValueId) -> bool {
        c.layout.locations[v.0 as usize].is_some_and(|location| self.arenas.contains_key(&location.region))
    }

    /// As [`CpuMachine::on`], for other programs with the same regions that outlast a step; takes over this machine's
    /// memory for them. If that memory is shared, `backing` names the same memory.
    ///
    /// # Errors
    /// As [`CpuMachine::on`].
    ///
    /// # Panics
    /// As [`CpuMachine::on`].
    fn succeed(self, programs: &[&Compiled], backing: &Backing<'_>) -> Result<CpuMachine, AllocError> {
        let lasts = |region: &Region, _: &mut Arena| LASTING.contains(region);
        CpuMachine::new_with(programs, backing, { self.arenas }.extract_if(.., lasts).collect())
    }

    fn new_with(
        programs: &[&Compiled],
        backing: &Backing<'_>,
        mut before: BTreeMap<Region, Arena>,
    ) -> Result<CpuMachine, AllocError> {
        let is_shared = shared_regions(programs);
        let mut arenas = BTreeMap::new();
        let mut offset = 0;
        for region in Region::ALL {
            let bytes = region_bytes(programs, region);
            let shared = backing.shared.filter(|_| is_shared.contains(&region));
            let offload_dir = backing.offload_dir.filter(|_| region == Region::Offloaded);
            let arena = match (shared, before.remove(&region), offload_dir) {
                (Some(memory), ..) => Arena::within(memory, offset, bytes),
                (None, Some(arena), _) if arena.len() == bytes => arena,
                (None, _, Some(dir)) => Arena::in_file(dir, bytes)?,
                (None, _, None) => Arena::new(bytes)?,
            };
            if let Arena::Shared { .. } = arena {
                offset += Arena::shared_bytes(bytes);
            }
            arenas.insert(region, arena);
        }
        Ok(CpuMachine { arenas, sum_plans: BTreeMap::new() })
    }

    /// As [`CpuMachine::on`], with all regions in shared memory, from `first` on: see [`CpuMachine::bytes_within`].
    ///
    /// # Panics
    /// If `memory` is smaller.
    pub(crate) fn within(programs: &[&Compiled], memory: &SharedArena, first: usize) -> CpuMachine {
        let mut offset = first;
        let region = |region| {
            let bytes = region_bytes(programs, region);
            let arena = Arena::within(memory, offset, bytes);
            offset += Arena::shared_bytes(bytes);
            (region, arena)
        };
        CpuMachine { arenas: Region::ALL.into_iter().map(region).collect(), sum_plans: BTreeMap::new() }
    }

    /// Bytes of shared memory that [`CpuMachine::within`] takes.
    pub(crate) fn bytes_within(programs: &[&Compiled]) -> usize {
        Region::ALL.into_iter().map(|region| Arena::shared_bytes(region_bytes(programs, region))).sum()
    }

    /// Moves the regions in shared memory to the addresses of another mapping of the same memory.
    ///
    /// # Panics
    /// If `memory` is smaller.
    fn remap(&mut self, memory: &SharedArena) {
        for arena in self.arenas.values_mut() {
            if let Arena::Shared { offset, bytes, .. } = arena {
                *arena = Arena::within(memory, *offset, *bytes);
            }
        }
    }

    /// Bytes that a machine for these programs allocates, known before it exists: [`CpuMachine::allocated_bytes`].
    pub(crate) fn bytes_for(programs: &[&Compiled]) -> usize {
        Region::ALL.into_iter().map(|region| region_bytes(programs, region)).sum()
    }

    /// Allocated bytes of all regions, including regions in shared memory and in a file.
    fn allocated_bytes(&self) -> usize {
        self.arenas.values().map(Arena::len).sum()
    }

    /// Bytes of the regions that lie in shared memory when a machine gets any.
    pub(crate) fn shared_bytes(programs: &[&Compiled]) -> usize {
        let of_region = |region: Region| Arena::shared_bytes(region_bytes(programs, region));
        shared_regions(programs).into_iter().map(of_region).sum()
    }

    /// The regions that outlast a step: bytes, and whether they lie in shared memory when a machine gets any.
    pub(crate) fn lasting_regions(programs: &[&Compiled]) -> [(usize, bool); 3] {
        let is_shared = shared_regions(programs);
        LASTING.map(|region| (region_bytes(programs, region), is_shared.contains(&region)))
    }

    /// Bytes of all regions in shared memory.
    fn bytes_in_shared(&self) -> usize {
        self.arenas.values().filter(|arena| matches!(arena, Arena::Shared { .. })).map(Arena::len).sum()
    }

    /// The elements of a value.
    ///
    /// # Panics
    /// If `T` is not as wide as the value's elements, or the value has no place.
    fn read<T: Pod>(&self, c: &Compiled, v: ValueId) -> &[T] {
        let buffer = self.checked::<T>(c, v);
        // SAFETY: no program runs on this machine while `self` is borrowed, and writers borrow it mutably. For a shared
        // arena, the caller of `SharedArena::new` promised that no other machine in it is used meanwhile.
        unsafe { buffer.slice() }
    }

    /// The elements of a value, mutable.
    ///
    /// # Panics
    /// As [`CpuMachine::read`].
    fn write<T: Pod>(&mut self, c: &Compiled, v: ValueId) -> &mut [T] {
        let buffer = self.checked::<T>(c, v);
        // SAFETY: `self` is borrowed mutably; other machines in a shared arena are not used meanwhile, as in `read`.
        unsafe { buffer.slice_mut() }
    }

    /// Runs a range of a program's instructions on the threads of the current rayon pool.
    fn run_part(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError> {
        with_team(|| {
            for i in part {
                let start = with.timings.is_some().then(Instant::now);
                self.exec(c, i, with.models, with.groups)?;
                if let (Some(timings), Some(start)) = (&mut with.timings, start) {
                    timings.push(start.elapsed());
                }
                end_of_instruction(with.groups)?;
            }
            Ok(())
        })
    }

    fn checked<T: Pod>(&self, c: &Compiled, v: ValueId) -> Buffer {
        let buffer = self.buffer(c, v);
        assert_eq!(size_of::<T>(), buffer.dtype.size_bytes(), "{} elements", c.program.describe_value(v));
        buffer
    }

    fn buffer(&self, c: &Compiled, v: ValueId) -> Buffer {
        let value = c.program.value(v);
        let location = c.layout.locations[v.0 as usize].expect("the memory pass places every accessed value");
        let arena = &self.arenas[&location.region];
        assert!(location.offset + value.size_bytes() <= arena.len(), "a place lies inside its region");
        Buffer {
            // SAFETY: the assertion above keeps the address inside the mapping.
            ptr: unsafe { arena.base().add(location.offset) },
            rows: value.n_rows(),
            cols: value.n_columns(),
            dtype: value.dtype,
        }
    }

    /// The scratch of the operations.
    fn scratch(&mut self, c: &Compiled) -> *mut [u8] {
        let (offset, bytes) = c.layout.scratch;
        let arena = &self.arenas[&Region::Work];
        assert!(offset + bytes <= arena.len(), "the scratch lies inside the work region");
        // SAFETY: in bounds by the assertion.
        std::ptr::slice_from_raw_parts_mut(unsafe { arena.base().add(offset) }, bytes)
    }
}

/// Counts progress, and stops the run if its world has ended.
fn end_of_instruction(groups: &Groups) -> Result<(), ExecError> {
    groups.progress_counter().tick();
    if groups.progress_counter().is_left() { Err(ExecError::Left) } else { Ok(()) }
}

/// The regions that outlast a step.
const LASTING: [Region; 3] = [Region::Parameters, Region::OptimizerState, Region::Offloaded];

fn region_bytes(programs: &[&Compiled], region: Region) -> usize {
    programs.iter().map(|c| c.layout.bytes(region)).max().unwrap_or(0)
}

/// Regions that hold operands or results of collectives. Always includes the work region, so that it stays in place
/// when a rank loses its peers.
fn shared_regions(programs: &[&Compiled]) -> BTreeSet<Region> {
    let mut regions = BTreeSet::from([Region::Work]);
    for c in programs {
        for instr in c.program.instrs.iter().filter(|i| matches!(i.op, Op::Start(_))) {
            let locations = instr.reads.iter().chain(&instr.writes).filter_map(|v| c.layout.locations[v.0 as usize]);
            regions.extend(locations.map(|location| location.region));
        }
    }
    regions
}
