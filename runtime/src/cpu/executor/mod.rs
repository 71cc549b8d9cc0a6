//! Runs compiled programs over preallocated buffers: kernels in program order, no allocation, no lock.
//!
//! Aliasing: the memory pass gives overlapping places only to an operand and a result of one instruction that may share
//! one (`Op::in_place_pairs`), and then the two places are equal. Each case below therefore asks whether the two are the
//! same buffer, and calls the kernel that works in place.
// Values live in arenas and are borrowed instruction by instruction, which lifetimes cannot express.
#![allow(unsafe_code)]

mod arena;
mod buffer;
mod instr;
mod parts;
mod product;
mod scratch;

pub use arena::AllocError;
pub use scratch::scratch_bytes;

use crate::groups::{GroupError, Groups};
use arena::Arena;
use buffer::Buffer;
use bytemuck::Pod;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::program::ValueId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A user-defined model: one opaque operation of the program.
pub trait OpaqueModel {
    /// Computes the summed loss of a microbatch and its gradients times `grad_scale`.
    ///
    /// `inputs` are the i32 inputs of the microbatch; `params` and `grads` follow the trained parameters of the table.
    /// Without gradients to compute `grads` is empty. With `accumulate`, gradients are added to what `grads` holds.
    ///
    /// # Errors
    /// Whatever the model reports, as one sentence.
    fn step(
        &mut self,
        inputs: &[&[i32]],
        params: &[&[f32]],
        grad_scale: f64,
        grads: &mut [&mut [f32]],
        accumulate: bool,
    ) -> Result<f64, String>;
}

/// Why a program stopped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecError {
    /// A user-defined model failed.
    #[error("user-defined model {model}: {reason}")]
    Opaque {
        /// Its number.
        model: u32,
        /// What it said.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] GroupError),
}

/// How long each instruction took in a run.
pub type Timings = Vec<Duration>;

/// The buffers of one or more programs over the same parameters.
#[derive(Debug)]
pub struct CpuMachine {
    arenas: BTreeMap<Region, Arena>,
}

impl CpuMachine {
    /// Allocates the regions, each as large as the largest of the programs needs. Constants must agree between the
    /// programs, since they share them.
    ///
    /// # Errors
    /// When the system has not enough memory.
    pub fn new(programs: &[&Compiled]) -> Result<CpuMachine, AllocError> {
        let mut arenas = BTreeMap::new();
        for region in [Region::Parameters, Region::OptimizerState, Region::Constants, Region::Work] {
            let bytes = programs.iter().map(|c| c.layout.bytes(region)).max().unwrap_or(0);
            arenas.insert(region, Arena::new(bytes)?);
        }
        Ok(CpuMachine { arenas })
    }

    /// The elements of a value.
    ///
    /// # Panics
    /// If `T` is not as wide as the value's elements, or the value has no place.
    pub fn read<T: Pod>(&self, c: &Compiled, v: ValueId) -> &[T] {
        let buffer = self.checked::<T>(c, v);
        // SAFETY: no program runs while `self` is borrowed, and writers borrow it mutably.
        unsafe { buffer.slice() }
    }

    /// The elements of a value, to be written by the host.
    ///
    /// # Panics
    /// As [`CpuMachine::read`].
    pub fn write<T: Pod>(&mut self, c: &Compiled, v: ValueId) -> &mut [T] {
        let buffer = self.checked::<T>(c, v);
        // SAFETY: `self` is borrowed mutably.
        unsafe { buffer.slice_mut() }
    }

    /// Runs a program once, on the threads of the current rayon pool, with the groups that its rank belongs to.
    ///
    /// # Errors
    /// See [`ExecError`]; parameters and optimizer state are unchanged then, since updates come last.
    pub fn run(
        &mut self,
        c: &Compiled,
        models: &mut [Box<dyn OpaqueModel>],
        groups: &mut Groups,
    ) -> Result<(), ExecError> {
        (0..c.program.instrs.len()).try_for_each(|i| self.exec(c, i, models, groups))
    }

    /// Runs a program once and measures every instruction into `timings`, one entry each.
    ///
    /// # Errors
    /// As [`CpuMachine::run`].
    pub fn run_timed(
        &mut self,
        c: &Compiled,
        models: &mut [Box<dyn OpaqueModel>],
        groups: &mut Groups,
        timings: &mut Timings,
    ) -> Result<(), ExecError> {
        timings.clear();
        for i in 0..c.program.instrs.len() {
            let start = Instant::now();
            self.exec(c, i, models, groups)?;
            timings.push(start.elapsed());
        }
        Ok(())
    }

    fn checked<T: Pod>(&self, c: &Compiled, v: ValueId) -> Buffer {
        let buffer = self.buffer(c, v);
        assert_eq!(size_of::<T>(), buffer.dtype.size_bytes(), "{} elements", c.program.describe_value(v));
        buffer
    }

    fn buffer(&self, c: &Compiled, v: ValueId) -> Buffer {
        let value = c.program.value(v);
        let place = c.layout.places[v.0 as usize].expect("the memory pass places every value that is touched");
        let arena = &self.arenas[&place.region];
        assert!(place.offset + value.size_bytes() <= arena.len(), "a place lies inside its region");
        Buffer {
            // SAFETY: the assertion above keeps the address inside the mapping.
            ptr: unsafe { arena.base().add(place.offset) },
            rows: value.n_rows(),
            cols: value.n_columns(),
            dtype: value.dtype,
        }
    }

    /// The working space of the operations.
    fn scratch(&mut self, c: &Compiled) -> *mut [u8] {
        let (offset, bytes) = c.layout.scratch;
        let arena = &self.arenas[&Region::Work];
        assert!(offset + bytes <= arena.len(), "the scratch lies inside the work region");
        // SAFETY: in bounds by the assertion.
        std::ptr::slice_from_raw_parts_mut(unsafe { arena.base().add(offset) }, bytes)
    }
}
