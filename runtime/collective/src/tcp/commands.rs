//! What the writer of a connection is to do, in order. Unlike a channel of the standard library it keeps its memory, so that
//! steps allocate nothing.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::frame::Header;
use super::plane::Job;

/// What a writer is to do next. There are never more waiting than operations in flight have tensors and peers.
#[derive(Debug)]
pub(super) enum WriterCommand {
    Frame(Header, Vec<u8>),
    Fetch(Job),
    /// Send this and nothing more.
    Last(Header, Vec<u8>),
    /// Nothing more is sent.
    Stop,
}

/// Orders of one writer.
#[derive(Debug, Default)]
pub(super) struct WriterQueue {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: VecDeque<WriterCommand>,
    /// Bodies of frames that were sent, to be used again.
    spare: Vec<Vec<u8>>,
    /// The writer has ended.
    is_closed: bool,
}

impl WriterQueue {
    /// Adds an order; whether there is a writer to carry it out.
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

    /// Waits for the next order.
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

    /// Takes back the body of a frame that was sent.
    pub(super) fn recycle(&self, mut body: Vec<u8>) {
        body.clear();
        self.lock().spare.push(body);
    }

    /// From now on nobody carries out orders.
    pub(super) fn close(&self) {
        let mut inner = self.lock();
        inner.is_closed = true;
        inner.waiting.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
