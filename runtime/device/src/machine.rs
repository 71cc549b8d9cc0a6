//! A machine: the buffers of one or more programs in the memory of a device, and the execution of programs over them.
//!
//! Only a machine's own crate dereferences its addresses. [`Machine::get`] and [`Machine::put`] copy state out and in;
//! [`Machine::host`] borrows host memory without a copy. The methods of `dyn Machine` below work with both, with a
//! staging buffer of [`STAGING_BYTES`].
#![allow(unsafe_code)] // Callers rely on the addresses that `place` returns.

use crate::RawBuffer;
use crate::groups::{GroupError, Groups};
use crate::shared_memory::Arena;
use crate::span::{Memory, STAGING_BYTES, SpanMut, SpanRef};
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
    /// If no gradients are needed, `grads` is empty. With `accumulate`, gradients are added to the values in `grads`.
    ///
    /// # Errors
    /// The model's own error, as one sentence.
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
        /// The model's number.
        model: u32,
        /// The model's error.
        reason: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] GroupError),
    /// The device failed. Its state is lost, and only a new process can use it again.
    #[error("{reason}")]
    Device {
        /// The failed call and the device.
        reason: String,
    },
    /// The world for which the program ran has ended.
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

/// Memory for regions that a machine does not allocate itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backing<'a> {
    /// For values that live within a step, and other regions that hold operands of collectives; at least
    /// [`crate::Device::shared_bytes`], for this machine alone.
    pub shared: Option<&'a Arena>,
    /// Folder of the file that holds offloaded state.
    pub offload_dir: Option<&'a Path>,
}

/// How long each instruction took in a run.
pub type Timings = Vec<Duration>;

/// The inputs of a run of instructions besides the machine's buffers.
pub struct Run<'a> {
    /// The groups that the rank belongs to.
    pub groups: &'a mut Groups,
    /// User-defined models, by their number.
    pub models: &'a mut [Box<dyn OpaqueModel>],
    /// The time of every instruction is appended here.
    pub timings: Option<&'a mut Timings>,
}

impl<'a> Run<'a> {
    /// A run without user-defined models and without timings.
    pub fn with(groups: &'a mut Groups) -> Run<'a> {
        Run { groups, models: &mut [], timings: None }
    }
}

/// The buffers of one or more programs over the same parameters, on one device. It belongs to one thread at a time.
///
/// Offsets `at` are bytes from the start of a value.
///
/// # Safety
/// The buffer that [`Machine::place`] returns is valid for the lifetime of the machine, holds the value, is at least
/// aligned to 64 bytes, and is written only through a mutable borrow of the machine while the machine is borrowed;
/// values that must not share memory ([`phalanx_strategies::passes::memory`]) do not overlap. [`Machine::memory`]
/// reaches it.
pub unsafe trait Machine: Debug + Send {
    /// Runs a range of a program's instructions; see [`phalanx_strategies::passes::commit::StepPhases`] for the meaningful
    /// ranges. Later calls see the results, though the device may still be computing when this returns.
    ///
    /// # Errors
    /// See [`ExecError`]; parameters and optimizer state are then unchanged, unless the range has updates.
    fn run(&mut self, c: &Compiled, part: Range<usize>, with: &mut Run<'_>) -> Result<(), ExecError>;

    /// Waits until all earlier runs are complete.
    ///
    /// # Errors
    /// Errors of the device in those runs.
    fn settle(&mut self) -> Result<(), ExecError>;

    /// Copies `to.len()` bytes of a value, from its byte `at` on, to the host.
    ///
    /// # Panics
    /// If the value has no place, or too few bytes.
    fn get(&self, c: &Compiled, v: ValueId, at: usize, to: &mut [u8]);

    /// Copies host bytes to a value, from its byte `at` on.
    ///
    /// # Panics
    /// As [`Machine::get`].
    fn put(&mut self, c: &Compiled, v: ValueId, at: usize, from: &[u8]);

    /// The bytes of a value, if they are in host memory.
    ///
    /// # Panics
    /// If the value has no place.
    fn host(&self, c: &Compiled, v: ValueId) -> Option<&[u8]>;

    /// As [`Machine::host`], mutable.
    ///
    /// # Panics
    /// As [`Machine::host`].
    fn host_mut(&mut self, c: &Compiled, v: ValueId) -> Option<&mut [u8]>;

    /// Location of a value.
    ///
    /// # Panics
    /// If the value has no place.
    fn place(&self, c: &Compiled, v: ValueId) -> RawBuffer;

    /// Copies between the host and device memory; none if all places are in host memory.
    fn memory(&self) -> Option<Arc<dyn Memory>>;

    /// Whether the machine has a place for this value.
    fn has(&self, c: &Compiled, v: ValueId) -> bool;

    /// Allocated bytes of all regions, including regions in shared memory and in a file.
    fn allocated_bytes(&self) -> usize;

    /// Bytes of all regions in shared memory.
    fn bytes_in_shared(&self) -> usize;

    /// Moves the regions in shared memory to the addresses of another mapping of the same memory.
    ///
    /// # Panics
    /// If `memory` is smaller.
    fn remap(&mut self, memory: &Arena);

    /// Prepares, without buffers, a piece of what the first run would have to do; `false` if nothing is left to prepare.
    fn rehearse(&mut self) -> bool {
        false
    }

    /// A machine for other programs with the same regions that outlast a step; it takes over this machine's memory for
    /// them. If that memory is shared, `on` names the same memory.
    ///
    /// # Errors
    /// When the system is out of memory, or the folder for offloaded state cannot be written.
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

    /// Elements of a value: borrowed from host memory, or a copy of device memory.
    ///
    /// # Panics
    /// If `run` exceeds the value, `T` is not as wide as its elements, or the value has no place.
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

    /// Passes elements of a value to `see`, in order: all at once from host memory, in pieces from device memory.
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

    /// Calls `fill` to write elements of a value: all at once in host memory, or piece by piece in a staging buffer.
    /// `fill` gets the offset of the piece from `run.start`, and writes the whole piece.
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

    /// As `edit`, with an `edit` that may fail.
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

    /// As `fill`, but `edit` also gets the elements' current values and may keep them.
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

    /// Elements of a value, to be sent in place.
    ///
    /// # Panics
    /// As `elements`.
    pub fn source(&self, c: &Compiled, v: ValueId, run: Range<usize>) -> SpanRef<'_> {
        check::<f32>(c, v);
        // SAFETY: the source borrows the machine, whose contract excludes writes meanwhile.
        unsafe { SpanRef::new(elements_of(self.place(c, v), run), self.memory()) }
    }

    /// Elements of values, to be filled in place; none if two of the runs overlap.
    ///
    /// # Panics
    /// As `elements`.
    pub fn spans_mut<'m>(&'m mut self, c: &Compiled, runs: &[(ValueId, Range<usize>)]) -> Option<Vec<SpanMut<'m>>> {
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
        // SAFETY: the rooms borrow the machine mutably, and do not overlap.
        Some(buffers.into_iter().map(|buffer| unsafe { SpanMut::new(buffer, memory.clone()) }).collect())
    }
}

fn check<T>(c: &Compiled, v: ValueId) {
    let dtype = c.program.value(v).dtype;
    assert_eq!(size_of::<T>(), dtype.size_bytes(), "{} elements", c.program.describe_value(v));
}

/// The bytes of a run of f32 elements.
fn elements_of(buffer: RawBuffer, run: Range<usize>) -> RawBuffer {
    buffer.slice(run.start * size_of::<f32>()..run.end * size_of::<f32>())
}

/// Divides a run of elements into pieces that fit the staging buffer.
fn pieces<T>(run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let n = STAGING_BYTES / size_of::<T>();
    let end = run.end;
    run.step_by(n).map(move |start| start..end.min(start + n))
}
