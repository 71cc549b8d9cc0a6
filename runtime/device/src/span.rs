//! Borrowed runs of memory on any device, and copies between them and the host.
#![allow(unsafe_code)] // Runs hold raw addresses of borrowed memory.

use crate::RawBuffer;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

/// Bytes staged at a time when state is not in host memory.
pub const STAGING_BYTES: usize = 4 << 20;

/// Copies between the host and memory that the host cannot access, from any thread.
pub trait Memory: Debug + Send + Sync {
    /// Copies `from` to the host, after the machine's earlier work is complete.
    ///
    /// # Safety
    /// `from` lies in this memory, is as long as `to`, and is not written meanwhile.
    unsafe fn read(&self, from: RawBuffer, to: &mut [u8]);

    /// Copies from the host to `to`, before the machine's later work starts.
    ///
    /// # Safety
    /// `to` lies in this memory, is as long as `from`, and is not otherwise accessed meanwhile.
    unsafe fn write(&self, to: RawBuffer, from: &[u8]);
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

    /// Copies it to the host.
    ///
    /// # Safety
    /// The run is still borrowed for reading.
    ///
    /// # Panics
    /// If it is not as long as `to`.
    pub unsafe fn read(&self, to: &mut [u8]) {
        assert_eq!(self.bytes(), to.len(), "both sides of a copy have the same length");
        match &self.memory {
            // SAFETY: the caller's promise.
            Some(memory) => unsafe { memory.read(self.buffer, to) },
            // SAFETY: as above; `to` is borrowed mutably, so the two do not overlap.
            None => unsafe { std::ptr::copy_nonoverlapping(self.buffer.start(), to.as_mut_ptr(), to.len()) },
        }
    }

    /// Copies from the host to it.
    ///
    /// # Safety
    /// The run is still borrowed for writing.
    ///
    /// # Panics
    /// If it is not as long as `from`.
    pub unsafe fn write(&self, from: &[u8]) {
        assert_eq!(self.bytes(), from.len(), "both sides of a copy have the same length");
        match &self.memory {
            // SAFETY: the caller's promise.
            Some(memory) => unsafe { memory.write(self.buffer, from) },
            // SAFETY: as above; the run is borrowed exclusively, so `from` does not overlap it.
            None => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.buffer.start(), from.len()) },
        }
    }
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

/// Copies runs to runs of other lengths, in order; through a staging buffer unless the host can access both runs.
///
/// # Panics
/// If `to` has more bytes than `from`.
pub fn copy(from: &[SpanRef<'_>], to: &[SpanMut<'_>]) {
    let mut staging = Vec::new();
    let mut runs = from.iter().map(SpanRef::span);
    let mut rest: Option<Span> = None;
    for room in to {
        let mut at = 0;
        while at < room.span.bytes() {
            let now = match rest.take().filter(|rest| rest.bytes() > 0) {
                Some(rest) => rest,
                None => {
                    rest = Some(runs.next().expect("`from` has at least as many bytes as `to`"));
                    continue;
                }
            };
            let n = now.bytes().min(room.span.bytes() - at);
            copy_run(&now.slice(0..n), &room.span.slice(at..at + n), &mut staging);
            rest = Some(now.slice(n..now.bytes()));
            at += n;
        }
    }
}

fn copy_run(from: &Span, to: &Span, staging: &mut Vec<u8>) {
    if from.is_on_host() && to.is_on_host() {
        // SAFETY: the caller of `copy` borrows both, one of them mutably, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.buffer.start(), to.buffer.start(), to.bytes()) };
        return;
    }
    staging.resize(STAGING_BYTES.min(to.bytes()).max(staging.len()), 0);
    for start in (0..to.bytes()).step_by(STAGING_BYTES) {
        let piece = start..to.bytes().min(start + STAGING_BYTES);
        let staged = &mut staging[..piece.len()];
        // SAFETY: the caller of `copy` borrows both.
        unsafe {
            from.slice(piece.clone()).read(staged);
            to.slice(piece).write(staged);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut<T>(mut all: T, lengths: &[usize], len: impl Fn(&T) -> usize, split: impl Fn(T, usize) -> (T, T)) -> Vec<T> {
        let mut runs = Vec::new();
        for n in lengths {
            let n = (*n).min(len(&all));
            let (run, rest) = split(all, n);
            runs.push(run);
            all = rest;
        }
        runs.push(all);
        runs
    }

    proptest! {
        #[test]
        fn copy_preserves_the_bytes_for_any_run_lengths_of_both_sides(
            n in 0usize..300, sent in prop::collection::vec(0usize..60, 0..9), came in prop::collection::vec(0usize..60, 0..9),
        ) {
            let from: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let mut to = vec![-1.0f32; n];
            let sources: Vec<SpanRef<'_>> = cut(&from[..], &sent, |s| s.len(), |s, n| s.split_at(n)).into_iter().map(SpanRef::from).collect();
            let rooms: Vec<SpanMut<'_>> = cut(&mut to[..], &came, |s| s.len(), |s, n| s.split_at_mut(n)).into_iter().map(SpanMut::from).collect();

            copy(&sources, &rooms);

            prop_assert_eq!(to, from);
        }
    }
}
