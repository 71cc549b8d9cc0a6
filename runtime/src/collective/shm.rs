//! The operations, over a shared segment.
//!
//! All ranks move through the same numbered *phases*. Arriving at phase `p` publishes what a rank wrote before it;
//! nobody passes `p` before everybody has arrived. Each rank owns two halves of a staging buffer and two posts.
//!
//! Invariants:
//! - C-1: half and post `p % 2` of a rank are written only by that rank, between its arrivals at `p - 1` and `p`.
//! - C-2: they are read by others only between their own arrivals at `p` and `p + 1`.
//! - C-3: therefore nobody reads what is being written: the writer of phase `p + 2` has passed phase `p + 1`, at which
//!   all readers of phase `p` had arrived.
//! - C-4: a shared tensor is touched by peers only between the first and the second phase of an operation to which its
//!   owner lent it by `&mut`, and each element then by one rank.
//! - C-5: the number of phases of an operation follows from its descriptor, and descriptors are compared at its first.
#![allow(unsafe_code)] // Bytes that other ranks write are read through raw pointers; C-1 to C-4 keep them apart.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::descriptor::{Descriptor, ElementType, OpKind};
use super::futex::Waited;
use super::layout::STAGING_BYTES;
use super::segment::Segment;
use super::{Collective, CollectiveError};

/// Floats of one half of a staging buffer.
const STAGING_LEN: usize = STAGING_BYTES as usize / 4;
/// Up to this length every rank sums everything itself: one phase instead of two.
const FLAT_LEN: usize = 2048;
/// Floats that are summed at a time, so that the running sum stays in the L1 cache.
const BLOCK_LEN: usize = 2048;

/// One rank of a group on one machine.
#[derive(Debug)]
pub struct ShmCollective {
    segment: Arc<Segment>,
    rank: u32,
    /// The phase at which this rank has last arrived; wraps like the counter.
    phase: u32,
    sequence: u64,
    arena_used: u64,
    n_spins: u32,
}

/// A tensor in the shared segment: operations on it need no copies. Its room is given back with the segment.
#[derive(Debug)]
pub struct SharedTensor {
    segment: Arc<Segment>,
    at: u64,
    len: usize,
}

impl Deref for SharedTensor {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `alloc` gave this range to this tensor alone; peers touch it only during an operation (C-4), which
        // holds the tensor by `&mut`, so this borrow is not alive then; a failed one leaves the tensor empty. Every bit
        // pattern is a float.
        unsafe { std::slice::from_raw_parts(self.segment.floats(self.at, self.len), self.len) }
    }
}

impl DerefMut for SharedTensor {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, and the borrow is unique because the tensor cannot be cloned.
        unsafe { std::slice::from_raw_parts_mut(self.segment.floats(self.at, self.len), self.len) }
    }
}

impl ShmCollective {
    /// Becomes `rank` of the group of `segment`. A rank is taken once in the life of a segment, also if its holder dies.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`], [`CollectiveError::RankTaken`].
    pub fn join(segment: Arc<Segment>, rank: u32) -> Result<ShmCollective, CollectiveError> {
        if segment.slot(rank)?.taken.swap(1, Ordering::AcqRel) != 0 {
            return Err(CollectiveError::RankTaken { rank });
        }
        // With fewer cores than ranks whoever spins keeps the awaited rank from running.
        let n_cores = std::thread::available_parallelism().map_or(1, usize::from);
        let n_spins = if segment.size() as usize <= n_cores { 4000 } else { 20 };
        Ok(ShmCollective { segment, rank, phase: 0, sequence: 0, arena_used: 0, n_spins })
    }

    /// The segment, to abort the group or read progress from another thread.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// A tensor of `len` zeros in this rank's part of the segment.
    ///
    /// # Errors
    /// [`CollectiveError::ArenaFull`].
    pub fn alloc(&mut self, len: usize) -> Result<SharedTensor, CollectiveError> {
        let layout = self.segment.layout();
        let free_bytes = layout.arena_bytes - self.arena_used;
        // Whole cache lines, so that no two tensors share one.
        let wanted_bytes = (len as u64).saturating_mul(4).checked_next_multiple_of(64).unwrap_or(u64::MAX);
        if wanted_bytes > free_bytes {
            return Err(CollectiveError::ArenaFull { wanted_bytes, free_bytes });
        }
        let at = layout.arena_at(self.rank) + self.arena_used;
        self.arena_used += wanted_bytes;
        Ok(SharedTensor { segment: self.segment.clone(), at, len })
    }

    /// [`Collective::all_reduce`] of tensors that lie in the segment: every rank sums a part of all and writes it to all.
    ///
    /// # Shapes
    /// `tensor: [L]`, the same `L` at every rank.
    ///
    /// # Errors
    /// As every operation of [`Collective`]; [`CollectiveError::Invalid`] if a peer names memory outside its arena. The
    /// tensor is empty afterwards, because peers that have not noticed yet may still write to it.
    ///
    /// # Panics
    /// If the tensor lies in another segment.
    pub fn all_reduce_shared(&mut self, tensor: &mut SharedTensor) -> Result<(), CollectiveError> {
        assert!(Arc::ptr_eq(&self.segment, &tensor.segment), "a tensor of another group");
        let (at, len) = (tensor.at, tensor.len);
        let outcome = self.operation(OpKind::AllReduceShared, len, at, |this| {
            let tensors = this.peer_tensors(len)?;
            let part = part(len, this.rank, this.size());
            let mut sum = [0.0f32; BLOCK_LEN];
            for lo in part.clone().step_by(BLOCK_LEN) {
                let sum = &mut sum[..BLOCK_LEN.min(part.end - lo)];
                let byte = 4 * lo as u64;
                // SAFETY: C-4: between the phases this rank alone touches `part` of every tensor.
                unsafe {
                    this.segment.load(tensors[0] + byte, sum);
                    tensors[1..].iter().for_each(|at| this.segment.add(at + byte, sum));
                    tensors.iter().for_each(|at| this.segment.store(at + byte, sum));
                }
            }
            this.advance()
        });
        if outcome.is_err() {
            tensor.len = 0;
        }
        outcome
    }

    /// Where the peers' tensors lie, each checked to be inside its owner's arena.
    fn peer_tensors(&self, len: usize) -> Result<Vec<u64>, CollectiveError> {
        let layout = *self.segment.layout();
        let half = (self.phase & 1) as usize;
        (0..layout.size)
            .map(|rank| {
                let at = self.segment.slot(rank)?.posts[half].tensor_at.load(Ordering::Relaxed);
                let arena = layout.arena_at(rank)..layout.arena_at(rank + 1);
                let end = at.saturating_add(4 * len as u64);
                if at < arena.start || end > arena.end || !at.is_multiple_of(64) {
                    return Err(CollectiveError::Invalid {
                        field: "a tensor's offset",
                        expected: arena.start,
                        found: at,
                    });
                }
                Ok(at)
            })
            .collect()
    }

    /// Runs one operation: announces it, compares announcements at the first phase, runs the rest. `body` starts after
    /// the first phase. Any error aborts the group.
    fn operation(
        &mut self,
        kind: OpKind,
        len: usize,
        tensor_at: u64,
        body: impl FnOnce(&mut ShmCollective) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let outcome = self.enter(kind, len, tensor_at).and_then(|()| body(self));
        match &outcome {
            Ok(()) => self.segment.slot(self.rank)?.finished.store(self.sequence, Ordering::Release),
            Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => self.segment.abort(&format!("rank {}: {error}", self.rank)),
        }
        outcome
    }

    fn enter(&mut self, kind: OpKind, len: usize, tensor_at: u64) -> Result<(), CollectiveError> {
        self.sequence += 1;
        let own = Descriptor { kind, n_elements: len as u64, dtype: ElementType::F32, sequence: self.sequence };
        let slot = self.segment.slot(self.rank)?;
        slot.entered.store(self.sequence, Ordering::Release);
        let post = &slot.posts[self.next_half() as usize];
        for (word, value) in post.descriptor.iter().zip(own.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        post.tensor_at.store(tensor_at, Ordering::Relaxed);
        // A peer that saw the disagreement first aborts the group while this rank may still be waiting. All posts of
        // the phase may be there all the same, and then the disagreement says more than the abort.
        match self.advance() {
            Err(aborted) => Err(self.compare_posts(own, true).err().unwrap_or(aborted)),
            Ok(()) => self.compare_posts(own, false),
        }
    }

    /// Compares what all ranks announced for the phase; every rank reports the same pair. After an abort a rank may
    /// not have announced this operation, or be half-way through it: `is_partial` passes over such posts, which their
    /// sequence number and hash give away.
    fn compare_posts(&self, own: Descriptor, is_partial: bool) -> Result<(), CollectiveError> {
        let half = (self.phase & 1) as usize;
        let own_words = own.encode();
        let read = |rank: u32| -> Result<[u64; 5], CollectiveError> {
            let post = &self.segment.slot(rank)?.posts[half];
            Ok([0, 1, 2, 3, 4].map(|i| post.descriptor[i].load(Ordering::Relaxed)))
        };
        let is_whole = |words: [u64; 5]| {
            let descriptor = Descriptor::decode(words);
            descriptor.sequence == own.sequence && descriptor.encode() == words
        };
        let mut all_equal = true;
        for rank in 0..self.size() {
            all_equal &= read(rank)?[4] == own_words[4];
        }
        if all_equal {
            return Ok(());
        }
        let first = read(0)?;
        for rank in 1..self.size() {
            let other = read(rank)?;
            if other != first && (!is_partial || (is_whole(first) && is_whole(other))) {
                let (a, b) = (Descriptor::decode(first), Descriptor::decode(other));
                return Err(CollectiveError::Mismatch { rank_a: 0, a, rank_b: rank, b });
            }
        }
        Ok(())
    }

    /// Arrives at the next phase and waits until everybody has.
    fn advance(&mut self) -> Result<(), CollectiveError> {
        if let Some(aborted) = self.segment.aborted() {
            return Err(aborted);
        }
        self.phase = self.phase.wrapping_add(1);
        self.segment.slot(self.rank)?.arrived.advance();
        let is_aborted = || self.segment.aborted().is_some();
        for rank in (0..self.size()).filter(|rank| *rank != self.rank) {
            let waited = self.segment.slot(rank)?.arrived.wait(self.phase, self.n_spins, is_aborted);
            if waited == Waited::Aborted {
                let reason = "reason not recorded".to_owned();
                return Err(self.segment.aborted().unwrap_or(CollectiveError::Aborted { reason }));
            }
        }
        Ok(())
    }

    /// The half that this rank may write now (C-1).
    fn next_half(&self) -> u32 {
        self.phase.wrapping_add(1) & 1
    }

    /// Writes to this rank's staging for the next phase, `at` floats into it. Does nothing once the group is aborted:
    /// a rank that an abort sent home early does not know who still reads that half.
    fn stage(&self, at: usize, values: &[f32]) {
        assert!(at + values.len() <= STAGING_LEN, "staging overrun");
        if self.segment.aborted().is_some() {
            return;
        }
        let base = self.segment.layout().staging_at(self.rank, self.next_half());
        // SAFETY: C-1 and C-3: nobody else touches this half now.
        unsafe { self.segment.store(base + 4 * at as u64, values) }
    }

    /// Reads what `rank` staged for this phase, `at` floats into it.
    fn staged(&self, rank: u32, at: usize, to: &mut [f32]) {
        assert!(at + to.len() <= STAGING_LEN, "staging overrun");
        let base = self.segment.layout().staging_at(rank, self.phase & 1);
        // SAFETY: C-2 and C-3: its owner does not write this half before this rank arrives at the next phase.
        unsafe { self.segment.load(base + 4 * at as u64, to) }
    }

    /// Sum over ranks, in order, of what they staged for this phase, `at` floats into it.
    fn sum_staged(&self, at: usize, to: &mut [f32]) {
        assert!(at + to.len() <= STAGING_LEN, "staging overrun");
        for (i, block) in to.chunks_mut(BLOCK_LEN).enumerate() {
            let at = at + i * BLOCK_LEN;
            self.staged(0, at, block);
            for rank in 1..self.size() {
                let base = self.segment.layout().staging_at(rank, self.phase & 1);
                // SAFETY: as in `staged`.
                unsafe { self.segment.add(base + 4 * at as u64, block) }
            }
        }
    }

    /// Aborts the group because this rank's arguments do not fit; its peers would wait for ever otherwise.
    fn refuse(&self, error: CollectiveError) -> Result<(), CollectiveError> {
        if let Some(aborted) = self.segment.aborted() {
            return Err(aborted);
        }
        self.segment.abort(&format!("rank {}: {error}", self.rank));
        Err(error)
    }
}

impl Drop for ShmCollective {
    /// A rank that panics takes its group down with it; its peers would wait for ever otherwise.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.segment.abort(&format!("rank {} panicked", self.rank));
        }
    }
}

impl Collective for ShmCollective {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.segment.size()
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let len = values.len();
        if len <= FLAT_LEN {
            self.stage(0, values);
            return self.operation(OpKind::AllReduce, len, 0, |this| {
                this.sum_staged(0, values);
                Ok(())
            });
        }
        let (rank, size) = (self.rank, self.size());
        self.stage(0, &values[..len.min(STAGING_LEN)]);
        self.operation(OpKind::AllReduce, len, 0, |this| {
            let mut start = 0;
            while start < len {
                let chunk = &mut values[start..len.min(start + STAGING_LEN)];
                if start > 0 {
                    this.stage(0, chunk);
                    this.advance()?;
                }
                let own = part(chunk.len(), rank, size);
                this.sum_staged(own.start, &mut chunk[own.clone()]);
                this.stage(own.start, &chunk[own]);
                this.advance()?;
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let theirs = part(chunk.len(), peer, size);
                    this.staged(peer, theirs.start, &mut chunk[theirs]);
                }
                start += chunk.len();
            }
            Ok(())
        })
    }

    fn reduce_scatter(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), CollectiveError> {
        let (rank, size, len) = (self.rank as usize, self.size() as usize, output.len());
        if input.len() != size * len {
            let operation = "reduce_scatter";
            return self.refuse(CollectiveError::Length { operation, expected: size * len, found: input.len() });
        }
        let chunk_len = STAGING_LEN / size;
        let stage = |this: &ShmCollective, start: usize| {
            let n = chunk_len.min(len - start);
            (0..size).for_each(|peer| this.stage(peer * chunk_len, &input[peer * len + start..][..n]));
        };
        stage(self, 0);
        self.operation(OpKind::ReduceScatter, len, 0, |this| {
            for (i, chunk) in output.chunks_mut(chunk_len).enumerate() {
                if i > 0 {
                    stage(this, i * chunk_len);
                    this.advance()?;
                }
                this.sum_staged(rank * chunk_len, chunk);
            }
            Ok(())
        })
    }

    fn all_gather(&mut self, input: &[f32], output: &mut [f32]) -> Result<(), CollectiveError> {
        let (size, len) = (self.size(), input.len());
        if output.len() != size as usize * len {
            let (operation, expected) = ("all_gather", size as usize * len);
            return self.refuse(CollectiveError::Length { operation, expected, found: output.len() });
        }
        self.stage(0, &input[..len.min(STAGING_LEN)]);
        self.operation(OpKind::AllGather, len, 0, |this| {
            for (i, chunk) in input.chunks(STAGING_LEN).enumerate() {
                if i > 0 {
                    this.stage(0, chunk);
                    this.advance()?;
                }
                for peer in 0..size {
                    let to = peer as usize * len + i * STAGING_LEN;
                    this.staged(peer, 0, &mut output[to..to + chunk.len()]);
                }
            }
            Ok(())
        })
    }

    fn broadcast(&mut self, values: &mut [f32], root: u32) -> Result<(), CollectiveError> {
        if root >= self.size() {
            return self.refuse(CollectiveError::NoSuchRank { rank: root, size: self.size() });
        }
        let is_root = self.rank == root;
        if is_root {
            self.stage(0, &values[..values.len().min(STAGING_LEN)]);
        }
        self.operation(OpKind::Broadcast { root }, values.len(), 0, |this| {
            for (i, chunk) in values.chunks_mut(STAGING_LEN).enumerate() {
                if i > 0 {
                    if is_root {
                        this.stage(0, chunk);
                    }
                    this.advance()?;
                }
                if !is_root {
                    this.staged(root, 0, chunk);
                }
            }
            Ok(())
        })
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.operation(OpKind::Barrier, 0, 0, |_| Ok(()))
    }
}

/// The part of `len` elements that `rank` sums: whole cache lines, the last part possibly shorter.
fn part(len: usize, rank: u32, size: u32) -> std::ops::Range<usize> {
    let each = len.div_ceil(size as usize).next_multiple_of(16);
    let start = (rank as usize * each).min(len);
    start..(start + each).min(len)
}
