//! What a stage does, transfers included: its order of work with the receives it needs and the sends that others need.
//!
//! On each stream (from one stage to another) both sides name transfers in the order in which the *sender* produces
//! them. That is not always the order in which the receiver needs them: with two stages and several chunks, activations
//! and gradients share a stream. So a receive may be started before it is needed, ahead of one that is.
//!
//! A sender takes its buffer back once it has something from the receiver that the receiver sent after it had used what
//! it received: the wait is over by then, so that taking buffers back can never close a circle. (Waiting for the last
//! send but one instead deadlocks interleaved pipelines whose groups are longer than the pipeline.)

use super::{ScheduleKind, Slot, Work, order};
use std::collections::{BTreeMap, BTreeSet};

/// What is handed from stage to stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payload {
    /// Output of a chunk going forward.
    Activation,
    /// Gradient of that output, going back.
    Gradient,
}

/// One transfer, the same value on both of its sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Transfer {
    /// Stage that sends.
    pub from: u32,
    /// Stage that receives.
    pub to: u32,
    /// Number on the stream from `from` to `to`, from 0 in each step.
    pub sequence: u32,
    /// What.
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
    /// Needs what was received.
    Arrived(Transfer),
    /// Works.
    Run(Slot),
    /// Starts to send what the work before it has produced; does not block.
    Send(Transfer),
    /// Takes the buffer of a send back.
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

/// For each transfer to `stage`, those from it that the sender had used before.
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

/// The stages that a stage has transfers with; one, if there are only two.
fn neighbours(n_stages: usize, stage: usize) -> BTreeSet<usize> {
    [(stage + 1) % n_stages, (stage + n_stages - 1) % n_stages].into()
}

/// For each slot of a stage what it sends, if anything.
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

/// What a slot produces for another stage, and the part of the model that needs it.
fn next_part(kind: ScheduleKind, n_stages: usize, stage: usize, slot: &Slot) -> Option<(Payload, usize)> {
    let part = slot.chunk as usize * n_stages + stage;
    let (payload, next) = match slot.work {
        Work::Forward => (Payload::Activation, part + 1),
        Work::Backward | Work::BackwardInput => (Payload::Gradient, part.checked_sub(1)?),
        Work::BackwardWeight => return None,
    };
    // With one stage the next part is at home.
    (n_stages > 1 && next < n_stages * kind.n_chunks()).then_some((payload, next))
}

/// What will be sent to a stage.
struct Inbox {
    /// Of each sender, in its order; those received already are taken off the front.
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

    /// Takes what has to be received so that `needed` can be: what its sender sends before it, and itself.
    fn receive_up_to(&mut self, needed: &Transfer) -> impl Iterator<Item = Transfer> {
        let stream = self.streams.get_mut(&needed.from);
        let sequence = needed.sequence;
        stream.into_iter().flat_map(move |s| std::iter::from_fn(move || s.next_if(|t| t.sequence <= sequence)))
    }
}
