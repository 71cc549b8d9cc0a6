//! Pipelines with their transfers, run by the cross-rank simulator.

use super::*;
use crate::program::DType;
use crate::world::{Collective, GroupSlot, Kind, Links, Mover, Post, Rank, Step, Tensor, WorldTraces};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

const UNIT: Duration = Duration::from_micros(1);

fn post(transfer: &Transfer, stage: u32) -> Post {
    let kind = if transfer.from == stage {
        Kind::Send { to: transfer.to, channel: 0 }
    } else {
        Kind::Recv { from: transfer.from, channel: 0 }
    };
    let collective = Collective { kind, group: GroupSlot(0), sequence: transfer.sequence, unit: 1 };
    // The size encodes the payload, so a mix-up between sender and receiver shows as different descriptors.
    let n_elements = 2 * (u64::from(transfer.microbatch) * 100 + u64::from(transfer.chunk));
    let n_elements = n_elements + u64::from(transfer.payload == Payload::Gradient);
    Post { collective, tensors: vec![Tensor { n_elements, dtype: DType::F32 }] }
}

/// A world with one rank per stage; every slot takes one unit, a whole backward two.
fn world(kind: ScheduleKind, n_stages: u32, n_microbatches: usize) -> WorldTraces {
    world_with(kind, n_stages, n_microbatches, false)
}

/// `sent_last` moves all reclaims of buffers to the end.
fn world_with(kind: ScheduleKind, n_stages: u32, n_microbatches: usize, sent_last: bool) -> WorldTraces {
    let mut world = WorldTraces::new();
    let group = world.group((0..n_stages).map(Rank).collect());
    for stage in 0..n_stages {
        let step = |action: Action| match action {
            Action::Receive(t) | Action::Send(t) => Step::Start(post(&t, stage)),
            Action::Arrived(t) | Action::Sent(t) => Step::Await(post(&t, stage).collective),
            Action::Run(slot) => {
                let cost = if slot.work == Work::Backward { UNIT * 2 } else { UNIT };
                Step::Compute { name: "work", microbatch: Some(slot.microbatch), cost }
            }
        };
        let mut actions = actions(kind, n_stages as usize, stage as usize, n_microbatches);
        if sent_last {
            actions.sort_by_key(|a| matches!(a, Action::Sent(_)));
        }
        let trace = world.trace(actions.into_iter().map(step).collect());
        world.rank(trace, vec![group]);
    }
    world
}

fn kinds() -> impl Strategy<Value = ScheduleKind> {
    prop_oneof![
        Just(ScheduleKind::GPipe),
        Just(ScheduleKind::OneF1B),
        (1usize..5).prop_map(|chunks| ScheduleKind::Interleaved { chunks }),
        Just(ScheduleKind::ZeroBubble),
    ]
}

#[test]
fn every_small_pipeline_passes_the_cross_rank_check() {
    for p in 1..=6 {
        for m in 1..=14 {
            let interleaved = (1..=3).map(|chunks| ScheduleKind::Interleaved { chunks });
            for kind in interleaved.chain([ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble]) {
                assert_eq!(world(kind, p, m).verify(), Ok(()), "{kind:?} p={p} m={m}");
            }
        }
    }
}

#[test]
fn transfers_that_take_no_time_leave_the_published_bubble() {
    let at_once = |_: &Post, _: &[u32]| Duration::ZERO;
    let links = Links { mover: Mover::Links, node: &|_| 0, duration: &at_once };
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble] {
        let bubble = if kind == ScheduleKind::ZeroBubble { 3 } else { 9 };

        let timeline = world(kind, 4, 12).simulate(&links, false).unwrap();

        assert_eq!(timeline.makespan, UNIT * (36 + bubble), "{kind:?}");
    }
}

#[test]
fn two_stages_with_chunks_receive_in_the_order_of_the_sender() {
    let kind = ScheduleKind::Interleaved { chunks: 2 };

    let received = actions(kind, 2, 0, 4).into_iter().filter_map(|a| match a {
        Action::Receive(t) => Some(t.payload),
        _ => None,
    });

    // Stage 1 sends the first gradient before the activations of the second group.
    use Payload::{Activation as A, Gradient as G};
    assert_eq!(received.collect::<Vec<_>>(), [A, A, G, G, A, G, A, G, G, G, G, G][..].to_vec());
}

proptest! {
    #[test]
    fn operands_arrive_before_their_slot_runs(kind in kinds(), p in 1usize..8, m in 1usize..30, at in 0usize..8) {
        let (stage, last) = (at % p, p * kind.n_chunks() - 1);
        let mut here = BTreeSet::new();

        for action in actions(kind, p, stage, m) {
            match action {
                Action::Arrived(t) => {
                    prop_assert!(here.insert((t.payload, t.chunk, t.microbatch)));
                }
                Action::Run(Slot { chunk, microbatch, work }) => {
                    let part = chunk as usize * p + stage;
                    let needs = match work {
                        Work::Forward if part > 0 => Some(Payload::Activation),
                        Work::Backward | Work::BackwardInput if part < last => Some(Payload::Gradient),
                        _ => None,
                    };
                    if let Some(payload) = needs.filter(|_| p > 1) {
                        prop_assert!(here.contains(&(payload, chunk, microbatch)));
                    }
                }
                _ => {}
            }
        }
    }

    // A buffer is held no longer than the activations of its microbatch, except for the last gradients.
    #[test]
    fn every_send_buffer_is_reclaimed(kind in kinds(), p in 2usize..8, m in 1usize..30, at in 0usize..8) {
        let (stage, mut in_flight, mut peak) = (at % p, BTreeSet::new(), 0);

        for action in actions(kind, p, stage, m) {
            match action {
                Action::Send(t) => prop_assert!(in_flight.insert(t)),
                Action::Sent(t) => prop_assert!(in_flight.remove(&t)),
                _ => {}
            }
            peak = peak.max(in_flight.len());
        }

        prop_assert!(in_flight.is_empty());
        prop_assert!(peak <= kind.max_in_flight(p, 0, m) + p.min(m) * kind.n_chunks());
    }

    // Reclaiming a buffer never waits: with all reclaims at the end, the times are the same.
    #[test]
    fn reclaiming_a_buffer_never_waits(kind in kinds(), p in 2u32..7, m in 1usize..20) {
        let links = Links { mover: Mover::Links, node: &|_| 0, duration: &|_, _| UNIT };
        let exposed = |world: &WorldTraces| {
            let timeline = world.simulate(&links, false).unwrap();
            (0..p).map(|r| timeline.rank(Rank(r)).exposed).collect::<Vec<_>>()
        };
        let eager = world(kind, p, m);

        let late = world_with(kind, p, m, true);

        prop_assert_eq!(exposed(&eager), exposed(&late));
    }
}
