//! Pipeline schedules: the order in which each stage runs the forwards and backwards of its microbatches.
//!
//! Legend: `p` stages, `m` microbatches, `v` chunks of layers a stage holds. Chunk `c` of stage `s` is *part* `c p + s`
//! of the model, so that a microbatch visits the parts in ascending order going forward, descending going back.
//!
//! Sources: GPipe, Huang et al. 2018 (arXiv:1811.06965); 1F1B and interleaved 1F1B, Narayanan et al. 2021, §2.2
//! (arXiv:2104.04473); ZB-H1, Qi et al. 2023, §2.3 (arXiv:2401.10241).
//!
//! Invariants, for every kind and all `p, m >= 1`:
//! - `PIPELINE-1` every `(chunk, microbatch)` goes forward once and back once, and on a stage that splits its backwards
//!   every input gradient is followed by its weight gradient.
//! - `PIPELINE-2` per chunk, forwards, backwards and weight gradients each come in ascending order of microbatch:
//!   gradients are summed in the same order under every schedule.
//! - `PIPELINE-3` the orders of all stages together are free of deadlock, even if a send completes only when it is
//!   received, provided that the sender continues meanwhile.
//! - `PIPELINE-4` no stage holds more microbatches than [`ScheduleKind::max_in_flight`].
//!
//! With a single stage, every kind is plain accumulation: `F0 B0 F1 B1 …`.

mod gpipe;
mod interleaved;
mod messages;
mod one_f_one_b;
mod timeline;
mod transfers;
mod zero_bubble;

pub use messages::{Message, message_order};
pub use timeline::{Timeline, WorkTimes, timeline};
pub use transfers::{Action, Payload, Transfer, actions};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forwards, then all backwards: the smallest program, the most memory.
    #[serde(rename = "gpipe")]
    GPipe,
    /// The fewest microbatches in flight that keep the pipeline full.
    #[default]
    #[serde(rename = "1f1b")]
    OneF1B,
    /// 1F1B over several chunks of layers for each stage: divides the bubble by their number, with more transfers.
    #[serde(rename = "interleaved")]
    Interleaved {
        /// Chunks of layers that each stage holds; at least 1.
        chunks: usize,
    },
    /// ZB-H1: 1F1B that fills bubbles with weight gradients, in the memory of 1F1B's first stage.
    #[serde(rename = "zero_bubble")]
    ZeroBubble,
}

/// What a slot computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// Activations.
    Forward,
    /// Gradients of input and weights together.
    Backward,
    /// Gradient of the input only.
    BackwardInput,
    /// Gradients of the weights only; no other stage waits for them.
    BackwardWeight,
}

/// One piece of work of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// Which of the stage's chunks of layers.
    pub chunk: u32,
    /// Which microbatch of the step.
    pub microbatch: u32,
    /// What to compute.
    pub work: Work,
}

impl ScheduleKind {
    /// Chunks of layers that each stage holds.
    pub const fn n_chunks(self) -> usize {
        match self {
            ScheduleKind::Interleaved { chunks } => chunks,
            _ => 1,
        }
    }

    /// Maximum number of `(chunk, microbatch)` pairs whose activations `stage` holds at once: forward done, backward not
    /// yet complete.
    ///
    /// # Panics As [`order`].
    pub fn max_in_flight(self, n_stages: usize, stage: usize, n_microbatches: usize) -> usize {
        assert_sizes(self, n_stages, stage, n_microbatches);
        if n_stages == 1 {
            return self.n_chunks();
        }
        match self {
            ScheduleKind::GPipe => n_microbatches,
            ScheduleKind::OneF1B | ScheduleKind::Interleaved { chunks: 1 } => (n_stages - stage).min(n_microbatches),
            ScheduleKind::Interleaved { chunks } => {
                (interleaved::n_warmup(n_stages, stage, n_microbatches, chunks) + 1).min(chunks * n_microbatches)
            }
            ScheduleKind::ZeroBubble => n_stages.min(n_microbatches),
        }
    }

    /// Messages from one chunk to the next that a sender must be able to have in flight, if receivers take each message
    /// only when they need it: with fewer, stages that send to each other around the ring would deadlock. One is enough,
    /// except for several chunks with a number of microbatches that is not a multiple of the stages.
    pub const fn messages_in_flight(self, n_stages: usize, n_microbatches: usize) -> usize {
        if self.n_chunks() > 1 && !n_microbatches.is_multiple_of(n_stages) { n_stages } else { 1 }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScheduleKind::GPipe => f.write_str("gpipe"),
            ScheduleKind::OneF1B => f.write_str("1f1b"),
            ScheduleKind::Interleaved { chunks } => write!(f, "interleaved over {chunks} chunks"),
            ScheduleKind::ZeroBubble => f.write_str("zero_bubble"),
        }
    }
}

/// The work of `stage` in execution order.
///
/// ```
/// use phalanx_strategies::pipeline::{ScheduleKind, Work, order};
///
/// let last = order(ScheduleKind::OneF1B, 4, 3, 2);
///
/// assert_eq!(last.iter().map(|s| s.microbatch).collect::<Vec<_>>(), [0, 0, 1, 1]);
/// assert_eq!(last[1].work, Work::Backward);
/// ```
///
/// # Panics If `n_stages`, `n_microbatches` or the number of chunks is 0, or `stage` is not below `n_stages`.
pub fn order(kind: ScheduleKind, n_stages: usize, stage: usize, n_microbatches: usize) -> Vec<Slot> {
    assert_sizes(kind, n_stages, stage, n_microbatches);
    if n_stages == 1 {
        return accumulation(kind.n_chunks(), n_microbatches);
    }
    match kind {
        ScheduleKind::GPipe => gpipe::order(n_microbatches),
        // The interleaved order warms up twice as long, which a single chunk does not need.
        ScheduleKind::OneF1B | ScheduleKind::Interleaved { chunks: 1 } => {
            one_f_one_b::order(n_stages, stage, n_microbatches)
        }
        ScheduleKind::Interleaved { chunks } => interleaved::order(n_stages, stage, n_microbatches, chunks),
        ScheduleKind::ZeroBubble => zero_bubble::order(n_stages, stage, n_microbatches),
    }
}

fn assert_sizes(kind: ScheduleKind, n_stages: usize, stage: usize, n_microbatches: usize) {
    assert!(n_microbatches > 0, "a step has at least one microbatch");
    assert!(kind.n_chunks() > 0, "a stage holds at least one chunk of layers");
    assert!(stage < n_stages, "stage {stage} of {n_stages} stages");
}

/// Microbatch after microbatch through all chunks and back.
fn accumulation(n_chunks: usize, n_microbatches: usize) -> Vec<Slot> {
    let there_and_back = |microbatch| {
        let forward = (0..n_chunks).map(move |chunk| slot(Work::Forward, chunk, microbatch));
        forward.chain((0..n_chunks).rev().map(move |chunk| slot(Work::Backward, chunk, microbatch)))
    };
    (0..n_microbatches).flat_map(there_and_back).collect()
}

fn slot(work: Work, chunk: usize, microbatch: usize) -> Slot {
    Slot { chunk: chunk as u32, microbatch: microbatch as u32, work }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod transfers_tests;
