//! Borrowed runs of memory on any device, and copies between them and the host.
#![allow(unsafe_code)] // Runs hold raw addresses of borrowed memory.

use crate::RawBuffer;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

/// Bytes staged at a time when state is not in host memory.
pub const STAGING_BYTES: usize = 4 << 20;

/// Memory that the host cannot access.
pub trait Memory: Debug + Send + Sync {
    /// A ring of `n_slots` buffers of `slot_bytes` bytes each.
    ///
    /// # Errors
    /// When the host has too little memory, or the device has failed.
    fn ring(self: Arc<Self>, n_slots: usize, slot_bytes: usize) -> Result<Box<dyn Ring>, CopyError>;
}

/// Buffers of the host, to and from which a device copies beside its other work. Any thread may use one.
///
/// Copies of a ring are done in the order in which they begin. A copy of a machine's *lasting state*, which only updates
/// change, has the state after its last change, and does not wait for what the machine does apart from that; other memory
/// is copied after the machine's earlier work. The machine's next change of the state waits for such a copy.
pub trait Ring: Debug + Send {
    /// Begins to copy runs to a slot, each from a byte of the slot on.
    ///
    /// # Errors
    /// When the device has failed, or the state is about to be freed.
    ///
    /// # Safety
    /// The runs lie in this memory. Until [`Ring::wait`] returns for the slot, nothing but updates of lasting state writes
    /// them.
    ///
    /// # Panics
    /// If the runs exceed the slot.
    unsafe fn read(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError>;

    /// Begins to copy from bytes of a slot to runs, after the machine's earlier work and before its later work.
    ///
    /// # Errors
    /// As [`Ring::read`].
    ///
    /// # Safety
    /// As [`Ring::read`], for any access.
    ///
    /// # Panics
    /// As [`Ring::read`].
    unsafe fn write(&mut self, slot: usize, runs: &[(usize, RawBuffer)]) -> Result<(), CopyError>;

    /// The bytes of a slot, after its copies.
    ///
    /// # Errors
    /// When the device has failed.
    fn wait(&mut self, slot: usize) -> Result<&mut [u8], CopyError>;

    /// From now on, changes of the lasting state in which this run lies wait until [`Ring::let_go`], or until the ring is
    /// dropped.
    fn hold(&mut self, run: RawBuffer);

    /// All reads of held state have begun: changes no longer wait for the host, only for the copies.
    fn let_go(&mut self);
}

/// A copy between the host and a device is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct CopyError {
    /// The failed call and the device, or why the memory is no longer there.
    pub reason: String,
}

/// A run of memory, and how the host reaches it.
#[derive(Clone, Debug)]
pub struct Span {
    buffer: RawBuffer,
    /// None if the run is in host memory.
    memory: Option<Arc<dyn Memory>>,
}

impl Span {
    /// Its address and length.
    pub const fn buffer(&self) -> RawBuffer {
        self.buffer
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Whether it is in host memory, which every transport can access.
    pub const fn is_on_host(&self) -> bool {
        self.memory.is_none()
    }

    /// The bytes `range` of it.
    ///
    /// # Panics
    /// If the range exceeds the run.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Span {
        Span { buffer: self.buffer.slice(range), memory: self.memory.clone() }
    }

    /// The memory in which it lies; none if it is in host memory.
    pub const fn memory(&self) -> Option<&Arc<dyn Memory>> {
        self.memory.as_ref()
    }
}

/// Divides runs of memory into lists of `bytes_max` bytes, in order; the last list may have fewer.
pub fn chunks(runs: impl IntoIterator<Item = Span>, bytes_max: usize) -> Vec<Vec<Span>> {
    let mut chunks: Vec<Vec<Span>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut at = 0;
        while at < run.bytes() {
            if room == 0 {
                chunks.push(Vec::new());
                room = bytes_max;
            }
            let n = room.min(run.bytes() - at);
            chunks.last_mut().expect("a chunk with room is last").push(run.slice(at..at + n));
            (at, room) = (at + n, room - n);
        }
    }
    chunks
}

/// A run of memory, borrowed for reading.
#[derive(Clone, Debug)]
pub struct SpanRef<'a> {
    span: Span,
    borrow: PhantomData<&'a [u8]>,
}

impl<'a> SpanRef<'a> {
    /// A run that is borrowed for `'a`.
    ///
    /// # Safety
    /// The run is not written for the lifetime of the result. `memory` can access it, or the host if `memory` is none.
    pub unsafe fn new(buffer: RawBuffer, memory: Option<Arc<dyn Memory>>) -> SpanRef<'a> {
        SpanRef { span: Span { buffer, memory }, borrow: PhantomData }
    }

    /// The run without the borrow, for which the caller becomes responsible.
    pub fn span(&self) -> Span {
        self.span.clone()
    }
}

impl<'a> From<&'a [f32]> for SpanRef<'a> {
    fn from(elements: &'a [f32]) -> SpanRef<'a> {
        SpanRef { span: Span { buffer: RawBuffer::of(elements), memory: None }, borrow: PhantomData }
    }
}

/// A run of memory, borrowed for writing.
#[derive(Debug)]
pub struct SpanMut<'a> {
    span: Span,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> SpanMut<'a> {
    /// A run that is borrowed for `'a`.
    ///
    /// # Safety
    /// The run is not accessed otherwise for the lifetime of the result. `memory` can access it, or the host if
    /// `memory` is none.
    pub unsafe fn new(buffer: RawBuffer, memory: Option<Arc<dyn Memory>>) -> SpanMut<'a> {
        SpanMut { span: Span { buffer, memory }, borrow: PhantomData }
    }

    /// The run without the borrow, for which the caller becomes responsible.
    pub fn span(&self) -> Span {
        self.span.clone()
    }
}

impl<'a> From<&'a mut [f32]> for SpanMut<'a> {
    fn from(elements: &'a mut [f32]) -> SpanMut<'a> {
        SpanMut { span: Span { buffer: RawBuffer::of_mut(elements), memory: None }, borrow: PhantomData }
    }
}
