//! Sends and receives: chunk by chunk through the channel between two ranks. A send is done when its peer has received it.

use super::collective::{Descriptor, describe};
use super::communicator::Communicator;
use super::host::{Code, FAILED};
use super::report;
use super::shared::CHANNEL_BYTES;
use std::sync::atomic::Ordering::SeqCst;

/// One message under way, at one of its ends.
#[derive(Clone)]
pub struct Transfer {
    pub what: Descriptor,
    pub peer: usize,
    pub is_send: bool,
    pub address: usize,
    /// Its number in the channel, once it has begun.
    seq: Option<u64>,
    is_matched: bool,
    /// Bytes that this end has moved.
    at: usize,
}

impl Transfer {
    pub fn new(what: Descriptor, peer: usize, is_send: bool, address: usize) -> Transfer {
        Transfer { what, peer, is_send, address, seq: None, is_matched: false, at: 0 }
    }

    /// Goes on until it has to wait. Whether it is done.
    pub fn advance(&mut self, c: &Communicator) -> Result<bool, Code> {
        let (from, to) = if self.is_send { (c.rank, self.peer) } else { (self.peer, c.rank) };
        let channel = c.shared.channel(from, to);
        let (own, theirs) =
            if self.is_send { (&channel.sends, &channel.receives) } else { (&channel.receives, &channel.sends) };
        let numbers = if self.is_send { &c.n_sends } else { &c.n_receives };
        let seq = *self.seq.get_or_insert_with(|| {
            let seq = numbers[self.peer].fetch_add(1, SeqCst);
            own.post(seq, self.what.words());
            seq
        });
        if !self.is_matched {
            let Some(found) = theirs.read(seq) else { return Ok(false) };
            if found != self.what.words() {
                let (side, other) = if self.is_send { ("sends", "receives") } else { ("receives", "sends") };
                let (rank, peer, what, found) = (c.rank, self.peer, self.what, describe(found));
                report(&format!("message {seq}: rank {rank} {side} {what}, but rank {peer} {other} {found}"));
                return Err(FAILED);
            }
            self.is_matched = true;
        }
        let total = self.what.count * self.what.dtype.bytes();
        let data = c.shared.data(from, to);
        loop {
            let (sent, taken) = (channel.sent.load(SeqCst), channel.taken.load(SeqCst));
            let n = CHANNEL_BYTES.min(total - self.at);
            let memory = (self.address + self.at) as *mut u8;
            if self.is_send {
                if taken != sent || n == 0 {
                    return Ok(taken == sent);
                }
                // SAFETY: the caller of the operation keeps the operand valid; the chunk is the sender's until it says so.
                unsafe { std::ptr::copy_nonoverlapping(memory, data, n) };
                channel.sent.store(sent + 1, SeqCst);
            } else {
                if n == 0 || taken == sent {
                    return Ok(n == 0);
                }
                // SAFETY: as above; the chunk is the receiver's now.
                unsafe { std::ptr::copy_nonoverlapping(data, memory, n) };
                channel.taken.store(taken + 1, SeqCst);
            }
            self.at += n;
        }
    }
}
