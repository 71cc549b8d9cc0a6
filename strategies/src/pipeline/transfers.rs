//! The actions of a stage: its order of work, with the receives that it needs and the sends that others need.
//!
//! On each stream (from one stage to another) both sides number transfers in the order in which the *sender* produces
//! them. The receiver may need them in another order: with two stages and several chunks, activations and gradients share
//! a stream. So a stage may start a receive before it needs the result, ahead of one that it needs at once.
//!
//! A sender reclaims its buffer once it receives a message that the receiver sent after using the buffer's contents. The
//! send has completed by then, so reclaiming never waits and cannot deadlock. (Waiting for the last send but one instead
//! deadlocks interleaved pipelines whose groups are longer than the pipeline.)

use super::{ScheduleKind, Slot, Work, order};
use std::collections::{BTreeMap, BTreeSet};

/// What one stage sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payload {
    /// Output of a chunk going forward.
    Activation,
    /// Gradient of that output, going back.
    Gradient,
}

/// One transfer; sender and receiver describe it by the same value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transfer {
    /// Stage that sends.
    pub from: u32,
    /// Stage that receives.
    pub to: u32,
    /// Number on the stream from `from` to `to`, from 0 in each step.
    pub sequence: u32,
    /// What is sent.
    pub payload: Payload,
    /// Chunk of the receiver that needs it.
    pub chunk: u32,
    /// Microbatch.
    pub microbatch: u32,
}

/// What a stage does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Starts to receive; does not block.
    Receive(Transfer),
    /// Waits for a receive.
    Arrived(Transfer),
    /// Runs a slot.
    Run(Slot),
    /// Starts to send the result of the preceding work; does not block.
    Send(Transfer),
    /// Reclaims the buffer of a send.
    Sent(Transfer),
}

/// The actions of `stage`: its [`order`], with transfers.
///
/// # Panics As [`order`].
pub fn actions(kind: ScheduleKind, n_stages: usize, stage: usize, n_microbatches: usize) -> Vec<Action> {
    let mut inbox = Inbox::new(kind, n_stages, stage, n_microbatches);
    let mut receipts = receipts(kind, n_stages, stage, n_microbatches);
    let mut in_flight: BTreeSet<Transfer> = BTreeSet::new();
    let mut actions = Vec::new();
    let sends = sends(kind, n_stages, stage, n_microbatches);
    for (slot, send) in order(kind, n_stages, stage, n_microbatches).into_iter().zip(sends) {
        if let Some(needed) = inbox.needed_by(&slot) {
            actions.extend(inbox.receive_up_to(&needed).map(Action::Receive));
            actions.push(Action::Arrived(needed));
            for received in receipts.remove(&needed).unwrap_or_default() {
                in_flight.remove(&received);
                actions.push(Action::Sent(received));
            }
        }
        actions.push(Action::Run(slot));
        in_flight.extend(send);
        actions.extend(send.map(Action::Send));
    }
    actions.extend(in_flight.into_iter().map(Action::Sent));
    actions
}

/// For each transfer to `stage`, the transfers from `stage` that its sender has used before it.
fn receipts(
    kind: ScheduleKind,
    n_stages: usize,
    stage: usize,
    n_microbatches: usize,
) -> BTreeMap<Transfer, Vec<Transfer>> {
    let mut receipts = BTreeMap::new();
    for peer in neighbours(n_stages, stage) {
        let inbox = Inbox::new(kind, n_stages, peer, n_microbatches);
        let mut used = Vec::new();
        let sends = sends(kind, n_stages, peer, n_microbatches);
        for (slot, send) in order(kind, n_stages, peer, n_microbatches).into_iter().zip(sends) {
            used.extend(inbox.needed_by(&slot).filter(|t| t.from as usize == stage));
            if let Some(send) = send.filter(|t| t.to as usize == stage) {
                receipts.insert(send, std::mem::take(&mut used));
            }
        }
    }
    receipts
}

/// The stages that a stage has transfers with; a single one if there are two stages.
fn neighbours(n_stages: usize, stage: usize) -> BTreeSet<usize> {
    [(stage + 1) % n_stages, (stage + n_stages - 1) % n_stages].into()
}

/// The transfer that each slot of a stage sends, if any.
fn sends(kind: ScheduleKind, n_stages: usize, stage: usize, n_microbatches: usize) -> Vec<Option<Transfer>> {
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    let transfer = |slot: Slot| {
        let (payload, part) = next_part(kind, n_stages, stage, &slot)?;
        let (to, chunk) = ((part % n_stages) as u32, (part / n_stages) as u32);
        let number = numbers.entry(to).or_default();
        let sequence = std::mem::replace(number, *number + 1);
        Some(Transfer { from: stage as u32, to, sequence, payload, chunk, microbatch: slot.microbatch })
    };
    order(kind, n_stages, stage, n_microbatches).into_iter().map(transfer).collect()
}

/// The payload that a slot produces for another stage, and the part of the model that needs it.
fn next_part(kind: ScheduleKind, n_stages: usize, stage: usize, slot: &Slot) -> Option<(Payload, usize)> {
    let part = slot.chunk as usize * n_stages + stage;
    let (payload, next) = match slot.work {
        Work::Forward => (Payload::Activation, part + 1),
        Work::Backward | Work::BackwardInput => (Payload::Gradient, part.checked_sub(1)?),
        Work::BackwardWeight => return None,
    };
    // With a single stage the next part is local.
    (n_stages > 1 && next < n_stages * kind.n_chunks()).then_some((payload, next))
}

/// Transfers to a stage.
struct Inbox {
    /// Transfers of each sender that are not received yet, in the sender's order.
    streams: BTreeMap<u32, std::iter::Peekable<std::vec::IntoIter<Transfer>>>,
    by_need: BTreeMap<(Payload, u32, u32), Transfer>,
}

impl Inbox {
    fn new(kind: ScheduleKind, n_stages: usize, stage: usize, n_microbatches: usize) -> Inbox {
        let to_us = |from: usize| {
            let all = sends(kind, n_stages, from, n_microbatches).into_iter().flatten();
            all.filter(|t| t.to as usize == stage).collect::<Vec<Transfer>>()
        };
        let streams = neighbours(n_stages, stage).into_iter().map(|from| (from as u32, to_us(from)));
        let streams: BTreeMap<u32, Vec<Transfer>> = streams.collect();
        let by_need = streams.values().flatten().map(|t| ((t.payload, t.chunk, t.microbatch), *t)).collect();
        Inbox { streams: streams.into_iter().map(|(from, ts)| (from, ts.into_iter().peekable())).collect(), by_need }
    }

    fn needed_by(&self, slot: &Slot) -> Option<Transfer> {
        let payload = match slot.work {
            Work::Forward => Payload::Activation,
            Work::Backward | Work::BackwardInput => Payload::Gradient,
            Work::BackwardWeight => return None,
        };
        self.by_need.get(&(payload, slot.chunk, slot.microbatch)).copied()
    }

    /// Takes `needed` and all transfers that its sender sends before it.
    fn receive_up_to(&mut self, needed: &Transfer) -> impl Iterator<Item = Transfer> {
        let stream = self.streams.get_mut(&needed.from);
        let sequence = needed.sequence;
        stream.into_iter().flat_map(move |s| std::iter::from_fn(move || s.next_if(|t| t.sequence <= sequence)))
    }
}
