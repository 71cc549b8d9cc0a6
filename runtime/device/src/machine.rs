//! A machine: the buffers of one or more programs in the memory of a device, and what runs programs over them.
//!
//! Nobody outside a machine's crate dereferences an address in it. State is copied out and in by [`Machine::get`] and
//! [`Machine::put`]; where the memory is the host's, [`Machine::host`] lends it without a copy. The methods of `dyn Machine`
//! below are written once over both, with a staging buffer of [`STAGING_BYTES`].
#![allow(unsafe_code)] // `place` answers for addresses.

use crate::RawBuffer;
use crate::groups::{GroupError, Groups};
use crate::shared_memory::Arena;
use crate::span::{Memory, Room, STAGING_BYTES, Source};
use bytemuck::Pod;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::ValueId;
use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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
    /// The world for which the program ran is over.
    #[error("the world of this computation has ended")]
    Left,
}

/// Not enough memory for a region.
#[derive(Debug, thiserror::Error)]
#[error("cannot allocate {bytes} bytes for the program's buffers")]
pub struct AllocError {
    /// Size of the region.
    pub bytes: usize,
    /// The system's reason.
    #[source]
    pub source: std::io::Error,
}

/// Memory for the regions of a machine, where it is not the machine's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backing<'a> {
    /// For what lives within a step, and other regions that hold operands of collectives; at least
    /// [`crate::Device::shared_bytes`], used by nobody else.
    pub shared: Option<&'a Arena>,
    /// Folder of the file that holds what is offloaded.
    pub offload_dir: Option<&'a Path>,
}

/// How long each instruction took in a run.
pub type Timings = Vec<Duration>;

/// What a run of instructions uses besides the machine's buffers.
pub struct Run<'a> {
    /// The groups that the rank belongs to.
    pub groups: &'a mut Groups,
    /// User-defined models, by their number.
    pub models: &'a mut [Box<dyn OpaqueModel>],
    /// Gets the time of every instruction, behind what it holds.
    pub timings: Option<&'a mut Timings>,
}

impl<'a> Run<'a> {
    /// Of a program without user-defined models, not measured.
    pub fn with(groups: &'a mut Groups) -> Run<'a> {
        Run { groups, models: &mut [], timings: None }
    }
}

/// The buffers of one or more programs over the same parameters, on one device. It belongs to one thread at a time.
///
/// Offsets `at` are bytes from the start of a value.
///
/// # Safety
/// The buffer that [`Machine::place`] names lies in memory that is valid as long as the machine is there, holds the value,
/// is at least aligned to 64 bytes, and is written by nobody while the machine is borrowed, but through a mutable borrow of
/// it; values of programs that may not share memory ([`phalanx_strategies::passes::memory`]) lie apart.
/// [`Machine::memory`] reaches it.
pub unsafe trait Machine: Debug + Send {
    /// Runs a range of a program's instructions; see [`phalanx_strategies::passes::commit::Turn`] for those that make sense.
    /// What comes after sees their results, though a device may still be at work when this returns.
    ///
    /// # Errors
    /// See [`ExecError`]; parameters and optimizer state are unchanged then, unless the range has updates.
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError>;

    /// Waits until all that was run is done.
    ///
    /// # Errors
    /// What the device reports of it.
    fn settle(&mut self) -> Result<(), ExecError>;

    /// Copies the bytes of a value from `at` on to the host.
    ///
    /// # Panics
    /// If the value has no place, or not so many bytes.
    fn get(&self, c: &Compiled, v: ValueId, at: usize, to: &mut [u8]);

    /// Copies bytes of the host to a value, from its byte `at` on.
    ///
    /// # Panics
    /// As [`Machine::get`].
    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]);

    /// The bytes of a value, if they are in memory of the host.
    ///
    /// # Panics
    /// If the value has no place.
    fn host(&self, c: &Compiled, v: ValueId) -> Option<&[u8]>;

    /// As [`Machine::host`], to be written by the host.
    ///
    /// # Panics
    /// As [`Machine::host`].
    fn host_mut(&mut self, c: &Compiled, v: ValueId) -> Option<&mut [u8]>;

    /// Location of a value.
    ///
    /// # Panics
    /// If the value has no place.
    fn place(&self, c: &Compiled, v: ValueId) -> RawBuffer;

    /// What copies between the host and the places in it that are not the host's.
    fn memory(&self) -> Option<Arc<dyn Memory>>;

    /// Whether it has room for this value.
    fn has(&self, c: &Compiled, v: ValueId) -> bool;

    /// Bytes of all regions as they were allocated, those in shared memory and in a file included.
    fn allocated_bytes(&self) -> usize;

    /// Bytes of all regions in shared memory of the host.
    fn bytes_in_shared(&self) -> usize;

    /// The same memory where another mapping has it: what lies in shared memory is there at another address.
    ///
    /// # Panics
    /// If `memory` is smaller.
    fn remap(&mut self, memory: &Arena);

    /// A machine for other programs whose regions of what outlasts a step are the same, and their memory is this machine's.
    /// Where that is shared, `on` is the same memory.
    ///
    /// # Errors
    /// When the system has not enough memory, or the folder for offloaded state cannot be written.
    ///
    /// # Panics
    /// If `on.shared` is too small.
    fn succeed(self: Box<Self>, programs: &[&Compiled], on: &Backing<'_>) -> Result<Box<dyn Machine>, AllocError>;
}

impl dyn Machine + '_ {
    /// Runs a whole program, without user-defined models.
    ///
    /// # Errors
    /// As [`Machine::run`].
    pub fn run_all(&mut self, c: &Compiled, groups: &mut Groups) -> Result<(), ExecError> {
        self.run(c, 0..c.program.instrs.len(), &mut Run::with(groups))
    }

    /// The first element of a value.
    ///
    /// # Panics
    /// If `T` is not as wide as the value's elements, or the value has no place.
    pub fn first<T: Pod>(&self, c: &Compiled, v: ValueId) -> T {
        check::<T>(c, v);
        let mut element = [T::zeroed()];
        self.get(c, v, 0, bytemuck::cast_slice_mut(&mut element));
        element[0]
    }

    /// A copy of all elements of a value.
    ///
    /// # Panics
    /// As [`Machine::first`](trait.Machine.html).
    pub fn read<T: Pod>(&self, c: &Compiled, v: ValueId) -> Vec<T> {
        check::<T>(c, v);
        let mut elements = vec![T::zeroed(); c.program.value(v).n_elements()];
        self.get(c, v, 0, bytemuck::cast_slice_mut(&mut elements));
        elements
    }

    /// Elements of a value, in the machine where that is the host's memory, else a copy.
    ///
    /// # Panics
    /// If the value has not these elements, `T` is not as wide as they are, or it has no place.
    pub fn elements<T: Pod>(&self, c: &Compiled, v: ValueId, run: Range<usize>) -> Cow<'_, [T]> {
        check::<T>(c, v);
        if let Some(bytes) = self.host(c, v) {
            return Cow::Borrowed(&bytemuck::cast_slice(bytes)[run]);
        }
        let mut elements = vec![T::zeroed(); run.len()];
        self.get(c, v, run.start * size_of::<T>(), bytemuck::cast_slice_mut(&mut elements));
        Cow::Owned(elements)
    }

    /// Replaces elements of a value, from the one at `first` on.
    ///
    /// # Panics
    /// As `elements`.
    pub fn write<T: Pod>(&mut self, c: &Compiled, v: ValueId, first: usize, elements: &[T]) {
        check::<T>(c, v);
        self.put(c, v, first * size_of::<T>(), bytemuck::cast_slice(elements));
    }

    /// Shows elements of a value to `see`, in order: all at once where they are in the host's memory, else in pieces.
    ///
    /// # Errors
    /// The first one of `see`.
    ///
    /// # Panics
    /// As `elements`.
    pub fn visit<T: Pod, E>(
        &self,
        c: &Compiled,
        v: ValueId,
        run: Range<usize>,
        mut see: impl FnMut(&[T]) -> Result<(), E>,
    ) -> Result<(), E> {
        check::<T>(c, v);
        if let Some(bytes) = self.host(c, v) {
            return see(&bytemuck::cast_slice(bytes)[run]);
        }
        let mut staging = vec![T::zeroed(); run.len().min(STAGING_BYTES / size_of::<T>())];
        for piece in pieces::<T>(run) {
            let staged = &mut staging[..piece.len()];
            self.get(c, v, piece.start * size_of::<T>(), bytemuck::cast_slice_mut(staged));
            see(staged)?;
        }
        Ok(())
    }

    /// Has elements of a value written by `fill`, which is told how far behind `run.start` what it gets begins, and writes
    /// all of it: where the elements are in the host's memory there, else piece by piece in a staging buffer.
    ///
    /// # Panics
    /// As `elements`.
    pub fn fill<T: Pod>(&mut self, c: &Compiled, v: ValueId, run: Range<usize>, mut fill: impl FnMut(usize, &mut [T])) {
        let filled: Result<(), Infallible> = self.change(c, v, run, false, |at, to| {
            fill(at, to);
            Ok(())
        });
        filled.unwrap_or_else(|never| match never {});
    }

    /// As `edit`, where something may fail.
    ///
    /// # Errors
    /// The first one of `edit`.
    ///
    /// # Panics
    /// As `elements`.
    pub fn try_edit<T: Pod, E>(
        &mut self,
        c: &Compiled,
        v: ValueId,
        run: Range<usize>,
        edit: impl FnMut(usize, &mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.change(c, v, run, true, edit)
    }

    /// As `fill`, of elements of which `edit` may read what they were and keep some.
    ///
    /// # Panics
    /// As `elements`.
    pub fn edit<T: Pod>(&mut self, c: &Compiled, v: ValueId, run: Range<usize>, mut edit: impl FnMut(usize, &mut [T])) {
        let edited: Result<(), Infallible> = self.change(c, v, run, true, |at, to| {
            edit(at, to);
            Ok(())
        });
        edited.unwrap_or_else(|never| match never {});
    }

    fn change<T: Pod, E>(
        &mut self,
        c: &Compiled,
        v: ValueId,
        run: Range<usize>,
        reads: bool,
        mut change: impl FnMut(usize, &mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        check::<T>(c, v);
        if let Some(bytes) = self.host_mut(c, v) {
            return change(0, &mut bytemuck::cast_slice_mut(bytes)[run]);
        }
        let mut staging = vec![T::zeroed(); run.len().min(STAGING_BYTES / size_of::<T>())];
        for piece in pieces::<T>(run.clone()) {
            let staged = &mut staging[..piece.len()];
            let at = piece.start * size_of::<T>();
            if reads {
                self.get(c, v, at, bytemuck::cast_slice_mut(staged));
            }
            change(piece.start - run.start, staged)?;
            self.put(c, v, at, bytemuck::cast_slice(staged));
        }
        Ok(())
    }

    /// Elements of a value, to be sent from where they are.
    ///
    /// # Panics
    /// As `elements`.
    pub fn source(&self, c: &Compiled, v: ValueId, run: Range<usize>) -> Source<'_> {
        check::<f32>(c, v);
        // SAFETY: the machine is borrowed as long as the source is there, and by its contract nobody writes meanwhile.
        unsafe { Source::new(elements_of(self.place(c, v), run), self.memory()) }
    }

    /// Elements of values, to be filled where they are; none if two of the runs have a byte in common.
    ///
    /// # Panics
    /// As `elements`.
    pub fn rooms<'m>(&'m mut self, c: &Compiled, runs: &[(ValueId, Range<usize>)]) -> Option<Vec<Room<'m>>> {
        let memory = self.memory();
        let of = |(v, run): &(ValueId, Range<usize>)| {
            check::<f32>(c, *v);
            elements_of(self.place(c, *v), run.clone())
        };
        let buffers: Vec<RawBuffer> = runs.iter().map(of).collect();
        let mut sorted: Vec<&RawBuffer> = buffers.iter().filter(|buffer| buffer.bytes() > 0).collect();
        sorted.sort_unstable_by_key(|buffer| buffer.address());
        if sorted.windows(2).any(|pair| pair[0].overlaps(*pair[1])) {
            return None;
        }
        // SAFETY: the machine is borrowed mutably as long as the rooms are there, which lie apart.
        Some(buffers.into_iter().map(|buffer| unsafe { Room::new(buffer, memory.clone()) }).collect())
    }
}

fn check<T>(c: &Compiled, v: ValueId) {
    let dtype = c.program.value(v).dtype;
    assert_eq!(size_of::<T>(), dtype.size_bytes(), "{} elements", c.program.describe_value(v));
}

/// The bytes of elements of f32.
fn elements_of(buffer: RawBuffer, run: Range<usize>) -> RawBuffer {
    buffer.slice(run.start * size_of::<f32>()..run.end * size_of::<f32>())
}

/// A run of elements, cut in pieces that fit the staging buffer.
fn pieces<T>(run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let n = STAGING_BYTES / size_of::<T>();
    let end = run.end;
    run.step_by(n).map(move |start| start..end.min(start + n))
}
