//! One member's announcements in one stream, written by the member and read by its peers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::control::Control;
use super::layout::{HEAD_BYTES, OFFSETS, OperandOffsets, POSTS, Post, RingHead};
use phalanx_device::descriptor::Descriptor;

/// A ring in control memory.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    control: Arc<Control>,
    at: usize,
}

/// Byte offsets in the arena of the ring's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offsets {
    /// Where the operation reads.
    pub send: u64,
    /// Where the operation writes its result.
    pub recv: u64,
}

impl Ring {
    /// The ring at an offset of the layout.
    pub(super) fn new(control: Arc<Control>, at: usize) -> Ring {
        Ring { control, at }
    }

    /// Writes the offsets of operand `number` (counted over all operations of the stream).
    pub(super) fn write_offsets(&self, number: u64, offsets: Offsets) {
        let to = self.offsets(number);
        to.send.store(offsets.send, Ordering::Relaxed);
        to.recv.store(offsets.recv, Ordering::Relaxed);
    }

    /// Announces operation `index`, whose first operand has number `offsets_at`.
    pub(super) fn announce(&self, index: u64, descriptor: &Descriptor, offsets_at: u64) {
        let post = self.post(index);
        for (word, value) in post.descriptor.iter().zip(descriptor.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        post.offsets_at.store(offsets_at, Ordering::Relaxed);
        post.stamp.store(index + 1, Ordering::Release);
        self.head().announced.0.store(index + 1, Ordering::Release);
    }

    /// Operations that the owner has announced.
    pub(super) fn n_announced(&self) -> u64 {
        self.head().announced.0.load(Ordering::Acquire)
    }

    /// The owner's announcement of operation `index` and the number of its first operand, if it has been announced.
    pub(super) fn announced(&self, index: u64) -> Option<(Descriptor, u64)> {
        let post = self.post(index);
        if post.stamp.load(Ordering::Acquire) != index + 1 {
            return None;
        }
        let words = std::array::from_fn(|i| post.descriptor[i].load(Ordering::Relaxed));
        Some((Descriptor::decode(words), post.offsets_at.load(Ordering::Relaxed)))
    }

    /// The offsets of operand `number` as the owner wrote them; unchecked.
    pub(super) fn read_offsets(&self, number: u64) -> Offsets {
        let offsets = self.offsets(number);
        Offsets { send: offsets.send.load(Ordering::Relaxed), recv: offsets.recv.load(Ordering::Relaxed) }
    }

    /// Number of operations in which the owner has done its share.
    pub(super) fn done(&self) -> u64 {
        self.head().done.0.load(Ordering::Acquire)
    }

    /// Publishes that the owner has done its share of the first `n_done` operations.
    pub(super) fn set_done(&self, n_done: u64) {
        self.head().done.0.store(n_done, Ordering::Release);
    }

    fn head(&self) -> &RingHead {
        self.control.memory().get(self.at)
    }

    fn post(&self, index: u64) -> &Post {
        self.control.memory().get(self.at + HEAD_BYTES + 64 * (index % POSTS) as usize)
    }

    fn offsets(&self, number: u64) -> &OperandOffsets {
        self.control.memory().get(self.at + HEAD_BYTES + 64 * POSTS as usize + 16 * (number % OFFSETS) as usize)
    }
}
