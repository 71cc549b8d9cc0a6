//! Asynchrony: delays awaits so that collectives overlap with computation, and numbers the collectives of each stream.
//! Results do not change.
//!
//! - A sender continues while its message is sent: the await moves down to a later message of its stream, so that two
//!   stages that send to each other do not wait for each other.
//! - A sum of gradients overlaps the rest of the backward pass: its await moves down to the first use of the sum, or to the
//!   second later sum of its group, which bounds the number of gradients kept for it.

use crate::program::{Collective, CollectiveKind, Instr, Op, Program, Stream, op};
use std::collections::{BTreeMap, VecDeque};

/// Sums of gradients of one group that may be in flight at once.
const SUMS_IN_FLIGHT: usize = 2;

/// Delays awaits, then numbers all collectives. Up to `messages` messages of a stream may be in flight at once; see
/// [`crate::pipeline::ScheduleKind::messages_in_flight`].
pub fn overlap(program: &mut Program, messages: usize) {
    let instrs = std::mem::take(&mut program.instrs);
    let mut delayed: BTreeMap<Stream, VecDeque<Instr>> = BTreeMap::new();
    for instr in instrs {
        release(program, &mut delayed, &instr, messages);
        match instr.op {
            Op::Await(op::Await(c)) if may_wait(&c) => delayed.entry(c.stream()).or_default().push_back(instr),
            _ => program.instrs.push(instr),
        }
    }
    program.instrs.extend(delayed.into_values().flatten());
    number(program);
}

fn may_wait(c: &Collective) -> bool {
    matches!(c.kind, CollectiveKind::Send { .. } | CollectiveKind::ReduceScatter | CollectiveKind::AllReduce)
}

/// Appends the awaits that cannot be delayed further.
fn release(program: &mut Program, delayed: &mut BTreeMap<Stream, VecDeque<Instr>>, instr: &Instr, messages: usize) {
    let touched = |i: &Instr| instr.reads.iter().chain(&instr.writes).any(|v| i.reads.contains(v));
    for (stream, awaits) in delayed.iter_mut() {
        // Awaits of one stream stay in order.
        let last = awaits.iter().rposition(touched).map_or(0, |i| i + 1);
        program.instrs.extend(awaits.drain(..last));
        let begins = matches!(instr.op, Op::Start(op::Start(c)) if c.stream() == *stream);
        let room = if stream.peer.is_some() { messages } else { SUMS_IN_FLIGHT };
        if begins && awaits.len() >= room {
            program.instrs.extend(awaits.pop_front());
        }
    }
}

/// Numbers the collectives of each stream in program order; an await gets the number of its start.
fn number(program: &mut Program) {
    let mut next: BTreeMap<Stream, u32> = BTreeMap::new();
    let mut awaited: BTreeMap<Stream, VecDeque<(Vec<crate::program::ValueId>, Collective)>> = BTreeMap::new();
    for instr in &mut program.instrs {
        match &mut instr.op {
            Op::Start(op::Start(c)) => {
                let sequence = next.entry(c.stream()).or_default();
                c.sequence = *sequence;
                *sequence += 1;
                awaited.entry(c.stream()).or_default().push_back((instr.writes.clone(), *c));
            }
            Op::Await(op::Await(c)) => {
                let open = awaited.entry(c.stream()).or_default();
                let at = open.iter().position(|(results, _)| *results == instr.reads).unwrap_or(0);
                if let Some((_, started)) = open.remove(at) {
                    *c = started;
                }
            }
            _ => {}
        }
    }
}
