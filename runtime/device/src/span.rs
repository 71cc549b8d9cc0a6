//! Runs of memory on any device that are lent for a while, and copies between them and the host.
#![allow(unsafe_code)] // Addresses that others have borrowed.

use crate::RawBuffer;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

/// Bytes that are staged at a time where state is not in the memory of the host.
pub const STAGING_BYTES: usize = 4 << 20;

/// What copies between the host and memory that the host cannot reach, from any thread.
pub trait Memory: Debug + Send + Sync {
    /// Copies `from` to the host, when all is done that its machine was told to do before.
    ///
    /// # Safety
    /// Nobody writes `from` meanwhile, which lies in this memory and is as long as `to`.
    unsafe fn read(&self, from: RawBuffer, to: &mut [u8]);

    /// Copies from the host to `to`, before anything that its machine is told to do later.
    ///
    /// # Safety
    /// Nobody reads or writes `to` meanwhile, which lies in this memory and is as long as `from`.
    unsafe fn write(&self, to: RawBuffer, from: &[u8]);
}

/// A run of memory, and how the host reaches it.
#[derive(Clone, Debug)]
pub struct Stretch {
    buffer: RawBuffer,
    /// None where the host reaches it itself.
    memory: Option<Arc<dyn Memory>>,
}

impl Stretch {
    /// Where it lies.
    pub const fn buffer(&self) -> RawBuffer {
        self.buffer
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    /// Whether the host, and so every transport, reaches it as it is.
    pub const fn is_on_host(&self) -> bool {
        self.memory.is_none()
    }

    /// The bytes `range` of it.
    ///
    /// # Panics
    /// If they do not lie in it.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Stretch {
        Stretch { buffer: self.buffer.slice(range), memory: self.memory.clone() }
    }

    /// Copies it to the host.
    ///
    /// # Safety
    /// It is still lent for reading.
    ///
    /// # Panics
    /// If it is not as long as `to`.
    pub unsafe fn read(&self, to: &mut [u8]) {
        assert_eq!(self.bytes(), to.len(), "a copy is as long as what it is of");
        match &self.memory {
            // SAFETY: the caller's promise.
            Some(memory) => unsafe { memory.read(self.buffer, to) },
            // SAFETY: as above; and `to` is borrowed mutably, so it lies apart.
            None => unsafe { std::ptr::copy_nonoverlapping(self.buffer.start(), to.as_mut_ptr(), to.len()) },
        }
    }

    /// Copies from the host to it.
    ///
    /// # Safety
    /// It is still lent for writing.
    ///
    /// # Panics
    /// If it is not as long as `from`.
    pub unsafe fn write(&self, from: &[u8]) {
        assert_eq!(self.bytes(), from.len(), "a copy is as long as what it is of");
        match &self.memory {
            // SAFETY: the caller's promise.
            Some(memory) => unsafe { memory.write(self.buffer, from) },
            // SAFETY: as above; whoever may write it lends nobody else a part of it.
            None => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.buffer.start(), from.len()) },
        }
    }
}

/// A run of memory that may be read as long as it is lent.
#[derive(Clone, Debug)]
pub struct Source<'a> {
    stretch: Stretch,
    recycled_arenas: PhantomData<&'a [u8]>,
}

impl<'a> Source<'a> {
    /// A run that is lent for `'a`.
    ///
    /// # Safety
    /// Nobody writes it as long as the result is there, and `memory` reaches it, or the host where that is none.
    pub unsafe fn new(buffer: RawBuffer, memory: Option<Arc<dyn Memory>>) -> Source<'a> {
        Source { stretch: Stretch { buffer, memory }, recycled_arenas: PhantomData }
    }

    /// Without the loan: whoever uses it answers for that.
    pub fn stretch(&self) -> Stretch {
        self.stretch.clone()
    }
}

impl<'a> From<&'a [f32]> for Source<'a> {
    fn from(elements: &'a [f32]) -> Source<'a> {
        Source { stretch: Stretch { buffer: RawBuffer::of(elements), memory: None }, recycled_arenas: PhantomData }
    }
}

/// A run of memory that may be written as long as it is lent.
#[derive(Debug)]
pub struct Room<'a> {
    stretch: Stretch,
    recycled_arenas: PhantomData<&'a mut [u8]>,
}

impl<'a> Room<'a> {
    /// A run that is lent for `'a`.
    ///
    /// # Safety
    /// Nobody else reads or writes it as long as the result is there, and `memory` reaches it, or the host where that is
    /// none.
    pub unsafe fn new(buffer: RawBuffer, memory: Option<Arc<dyn Memory>>) -> Room<'a> {
        Room { stretch: Stretch { buffer, memory }, recycled_arenas: PhantomData }
    }

    /// Without the loan: whoever uses it answers for that.
    pub fn stretch(&self) -> Stretch {
        self.stretch.clone()
    }
}

impl<'a> From<&'a mut [f32]> for Room<'a> {
    fn from(elements: &'a mut [f32]) -> Room<'a> {
        Room { stretch: Stretch { buffer: RawBuffer::of_mut(elements), memory: None }, recycled_arenas: PhantomData }
    }
}

/// Copies what is cut into runs in one way to where it is cut in another; by way of a staging buffer between two runs that
/// the host cannot both reach.
///
/// # Panics
/// If `to` has more bytes than `from`.
pub fn copy(from: &[Source<'_>], to: &[Room<'_>]) {
    let mut staging = Vec::new();
    let mut runs = from.iter().map(Source::stretch);
    let mut rest: Option<Stretch> = None;
    for room in to {
        let mut at = 0;
        while at < room.stretch.bytes() {
            let now = match rest.take().filter(|rest| rest.bytes() > 0) {
                Some(rest) => rest,
                None => {
                    rest = Some(runs.next().expect("both sides have as many bytes"));
                    continue;
                }
            };
            let n = now.bytes().min(room.stretch.bytes() - at);
            copy_run(&now.slice(0..n), &room.stretch.slice(at..at + n), &mut staging);
            rest = Some(now.slice(n..now.bytes()));
            at += n;
        }
    }
}

fn copy_run(from: &Stretch, to: &Stretch, staging: &mut Vec<u8>) {
    if from.is_on_host() && to.is_on_host() {
        // SAFETY: both are lent to the caller of `copy`, one of them mutably, so they lie apart.
        unsafe { std::ptr::copy_nonoverlapping(from.buffer.start(), to.buffer.start(), to.bytes()) };
        return;
    }
    staging.resize(STAGING_BYTES.min(to.bytes()).max(staging.len()), 0);
    for start in (0..to.bytes()).step_by(STAGING_BYTES) {
        let piece = start..to.bytes().min(start + STAGING_BYTES);
        let staged = &mut staging[..piece.len()];
        // SAFETY: both are lent to the caller of `copy`.
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
        fn a_copy_is_what_was_copied_however_both_sides_are_cut(
            n in 0usize..300, sent in prop::collection::vec(0usize..60, 0..9), came in prop::collection::vec(0usize..60, 0..9),
        ) {
            let from: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let mut to = vec![-1.0f32; n];
            let sources: Vec<Source<'_>> = cut(&from[..], &sent, |s| s.len(), |s, n| s.split_at(n)).into_iter().map(Source::from).collect();
            let rooms: Vec<Room<'_>> = cut(&mut to[..], &came, |s| s.len(), |s, n| s.split_at_mut(n)).into_iter().map(Room::from).collect();

            copy(&sources, &rooms);

            prop_assert_eq!(to, from);
        }
    }
}
