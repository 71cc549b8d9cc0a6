//! The command queue of a connection's writer. Unlike a channel of the standard library it keeps its memory, so that
//! steps do not allocate.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::frame::Header;
use super::job::Job;

/// A command for a writer. Queued commands are bounded by the tensors and peers of the operations in flight.
#[derive(Debug)]
pub(super) enum WriterCommand {
    Frame(Header, Vec<u8>),
    Fetch(Job),
    /// Send this frame, then stop.
    Last(Header, Vec<u8>),
    /// Stop without another frame.
    Stop,
}

/// Commands of one writer.
#[derive(Debug, Default)]
pub(super) struct WriterQueue {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<WriterCommand>,
    /// Bodies of sent frames, for reuse.
    spare: Vec<Vec<u8>>,
    /// The writer has ended.
    is_closed: bool,
}

impl WriterQueue {
    /// Adds a command; returns whether the writer still runs.
    pub(super) fn push(&self, command: WriterCommand) -> bool {
        let mut inner = self.lock();
        if inner.is_closed {
            return false;
        }
        inner.waiting.push_back(command);
        drop(inner);
        self.changed.notify_one();
        true
    }

    /// Waits for the next command.
    pub(super) fn next(&self) -> WriterCommand {
        let mut inner = self.lock();
        loop {
            match inner.waiting.pop_front() {
                Some(command) => return command,
                None => inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// An empty frame body, which may reuse the memory of a sent one.
    pub(super) fn body(&self) -> Vec<u8> {
        self.lock().spare.pop().unwrap_or_default()
    }

    /// Keeps the body of a sent frame for reuse.
    pub(super) fn recycle(&self, mut body: Vec<u8>) {
        body.clear();
        self.lock().spare.push(body);
    }

    /// Drops all commands, and refuses later ones.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        inner.is_closed = true;
        inner.waiting.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
