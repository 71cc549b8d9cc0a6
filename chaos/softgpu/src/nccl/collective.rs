//! Collectives: in each turn every rank writes a chunk to its slot and reads those of all ranks.

use super::arithmetic::{DType, Reduction, reduce};
use super::communicator::Communicator;
use super::host::{Code, FAILED};
use super::order::Ticket;
use super::report;
use super::shared::{SLOT_BYTES, Words};
use std::fmt;
use std::sync::atomic::Ordering::SeqCst;

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    AlltoAll,
    Broadcast,
    Reduce,
    Message,
}

/// An operation as a rank issues it. Ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub kind: Kind,
    pub dtype: DType,
    pub reduction: Reduction,
    pub root: usize,
    /// Elements, as the caller counts them.
    pub count: usize,
}

impl Descriptor {
    pub fn words(&self) -> Words {
        let head = [self.kind as u64, self.dtype as u64, self.reduction as u64, self.root as u64];
        [head.iter().fold(0, |word, byte| (word << 8) | byte), self.count as u64]
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", describe(self.words()))
    }
}

/// An operation as another rank announced it.
pub fn describe(words: Words) -> String {
    const KINDS: [&str; 7] =
        ["AllReduce", "ReduceScatter", "AllGather", "AlltoAll", "Broadcast", "Reduce", "a message"];
    const DTYPES: [&str; 10] = ["i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"];
    const REDUCTIONS: [&str; 5] = ["sum", "product", "maximum", "minimum", "average"];
    let [root, reduction, dtype, kind] = [0, 8, 16, 24].map(|shift| (words[0] >> shift) as usize & 0xff);
    let (kind, dtype) = (KINDS.get(kind).unwrap_or(&"?"), DTYPES.get(dtype).unwrap_or(&"?"));
    let reduction = REDUCTIONS.get(reduction).unwrap_or(&"?");
    format!("{kind} of {} {dtype}, {reduction}, root {root}", words[1])
}

/// One collective under way.
#[derive(Clone)]
pub struct Collective {
    pub what: Descriptor,
    pub send: usize,
    pub recv: usize,
    stage: Stage,
    /// Its number in the communicator.
    seq: u64,
    /// Elements done.
    at: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    New,
    Announced,
    Writes,
    Reads,
    Done,
}

impl Collective {
    pub fn new(what: Descriptor, send: usize, recv: usize) -> Collective {
        Collective { what, send, recv, stage: Stage::New, seq: 0, at: 0 }
    }

    /// Goes on until it has to wait. Whether it is done.
    pub fn advance(&mut self, c: &Communicator, ticket: &Ticket) -> Result<bool, Code> {
        let own = c.shared.rank(c.rank);
        loop {
            let turn = c.turn.load(SeqCst);
            match self.stage {
                Stage::New => {
                    self.seq = c.n_collectives.fetch_add(1, SeqCst);
                    own.begun.store(self.seq + 1, SeqCst);
                    own.posted.post(self.seq, self.what.words());
                    self.stage = Stage::Announced;
                }
                Stage::Announced => {
                    if !self.is_matched(c, ticket)? {
                        return Ok(false);
                    }
                    self.stage = Stage::Writes;
                }
                Stage::Writes => {
                    if c.ranks().any(|r| c.shared.rank(r).read.load(SeqCst) < turn) {
                        return Ok(false);
                    }
                    self.write(c);
                    own.wrote.store(turn + 1, SeqCst);
                    self.stage = Stage::Reads;
                }
                Stage::Reads => {
                    if c.ranks().any(|r| c.shared.rank(r).wrote.load(SeqCst) <= turn) {
                        return Ok(false);
                    }
                    self.read(c);
                    c.turn.store(turn + 1, SeqCst);
                    own.read.store(turn + 1, SeqCst);
                    self.at += self.chunk(c);
                    self.stage = if self.at == self.what.count { Stage::Done } else { Stage::Writes };
                }
                Stage::Done => return Ok(true),
            }
        }
    }

    /// Whether all ranks have announced the same operation.
    fn is_matched(&self, c: &Communicator, ticket: &Ticket) -> Result<bool, Code> {
        let mut is_complete = true;
        for rank in c.ranks() {
            match c.shared.rank(rank).posted.read(self.seq) {
                None => is_complete = false,
                Some(theirs) if theirs == self.what.words() => {}
                Some(theirs) => {
                    let (own, seq) = (c.rank, self.seq);
                    let theirs = describe(theirs);
                    report(&format!(
                        "collective {seq}: rank {own} issued {}, but rank {rank} issued {theirs}",
                        self.what
                    ));
                    return Err(FAILED);
                }
            }
        }
        if !is_complete && let Some(violation) = ticket.violation(c, self.seq) {
            report(&violation);
            return Err(FAILED);
        }
        Ok(is_complete)
    }

    /// Whether a rank's chunk has a piece for each rank.
    fn is_divided(&self) -> bool {
        matches!(self.what.kind, Kind::ReduceScatter | Kind::AlltoAll)
    }

    /// Elements of this turn, of each piece.
    fn chunk(&self, c: &Communicator) -> usize {
        let pieces = if self.is_divided() { c.n_ranks } else { 1 };
        (SLOT_BYTES / self.what.dtype.bytes() / pieces).min(self.what.count - self.at)
    }

    fn write(&self, c: &Communicator) {
        let (n, width) = (self.chunk(c), self.what.dtype.bytes());
        if self.what.kind == Kind::Broadcast && self.what.root != c.rank {
            return;
        }
        for piece in 0..if self.is_divided() { c.n_ranks } else { 1 } {
            let from = (self.send + (piece * self.what.count + self.at) * width) as *const u8;
            let to = c.shared.slot(c.rank).wrapping_add(piece * n * width);
            // SAFETY: the caller of the operation keeps its operands valid; the slot is this rank's until it says so.
            unsafe { std::ptr::copy_nonoverlapping(from, to, n * width) };
        }
    }

    fn read(&self, c: &Communicator) {
        let (n, width) = (self.chunk(c), self.what.dtype.bytes());
        let own = if self.is_divided() { c.rank * n * width } else { 0 };
        let slot = |rank: usize| c.shared.slot(rank).wrapping_add(own).cast_const();
        let to = |rank: usize| (self.recv + (rank * self.what.count + self.at) * width) as *mut u8;
        // SAFETY: as in `write`; slots are not written before this rank has read them.
        let copy = |rank: usize, to: *mut u8| unsafe { std::ptr::copy_nonoverlapping(slot(rank), to, n * width) };
        match self.what.kind {
            Kind::AllGather | Kind::AlltoAll => c.ranks().for_each(|rank| copy(rank, to(rank))),
            Kind::Broadcast => copy(self.what.root, to(0)),
            Kind::Reduce if self.what.root != c.rank => {}
            Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce => {
                let sources: Vec<*const u8> = c.ranks().map(slot).collect();
                // SAFETY: as above.
                unsafe { reduce(self.what.dtype, self.what.reduction, &sources, to(0), n) };
            }
            Kind::Message => unreachable!("messages are transfers"),
        }
    }
}
