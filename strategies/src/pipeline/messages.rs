//! The order in which all stages start their messages.

use super::{ScheduleKind, Work, WorkTimes, timeline};

/// Work of equal length, and messages that take no time.
const EQUAL: WorkTimes = WorkTimes { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, transfer: 0.0 };

/// A message between two consecutive parts of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// `2 c` for the activations of part `c`, `2 c + 1` for their gradients.
    pub channel: u32,
    /// Microbatch that it belongs to.
    pub microbatch: u32,
}

/// All messages of a step, in the order in which their senders have made them if all work takes equally long.
///
/// A message that depends on another one comes after it. So every stage can start its messages in this order: a send where
/// its operands are made, and a receive before the later messages.
///
/// # Panics As [`super::order`].
pub fn message_order(kind: ScheduleKind, n_stages: usize, n_microbatches: usize) -> Vec<Message> {
    let n_parts = n_stages * kind.n_chunks();
    if n_stages == 1 {
        return Vec::new();
    }
    let mut made = Vec::new();
    for (stage, slots) in timeline(kind, n_stages, n_microbatches, &EQUAL).stages.iter().enumerate() {
        for (slot, _, end) in slots {
            let part = slot.chunk as usize * n_stages + stage;
            let channel = match slot.work {
                Work::Forward => (part + 1 < n_parts).then_some(2 * part),
                Work::Backward | Work::BackwardInput => part.checked_sub(1).map(|before| 2 * before + 1),
                Work::BackwardWeight => None,
            };
            let message = |channel| Message { channel: channel as u32, microbatch: slot.microbatch };
            made.extend(channel.map(|channel| (*end, stage, message(channel))));
        }
    }
    made.sort_by(|(a, stage_a, _), (b, stage_b, _)| a.total_cmp(b).then(stage_a.cmp(stage_b)));
    made.into_iter().map(|(_, _, message)| message).collect()
}
