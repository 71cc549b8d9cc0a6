//! The invariants of the module, and the papers' claims about bubbles.

use super::timeline::run;
use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const UNIT: WorkTimes = WorkTimes { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, transfer: 0.0 };

fn kinds() -> impl Strategy<Value = ScheduleKind> {
    prop_oneof![
        Just(ScheduleKind::GPipe),
        Just(ScheduleKind::OneF1B),
        (1usize..5).prop_map(|chunks| ScheduleKind::Interleaved { chunks }),
        Just(ScheduleKind::ZeroBubble),
    ]
}

/// `F0 F1 B0 …`; `I` and `W` are the halves of a split backward. Chunks above 0 are primed.
fn text(order: &[Slot]) -> String {
    let one = |s: &Slot| {
        let work = match s.work {
            Work::Forward => 'F',
            Work::Backward => 'B',
            Work::BackwardInput => 'I',
            Work::BackwardWeight => 'W',
        };
        format!("{work}{}{}", s.microbatch, "'".repeat(s.chunk as usize))
    };
    order.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Maximum number of pairs whose forward is done and whose backward is not complete.
fn peak_in_flight(order: &[Slot]) -> usize {
    let mut held = 0usize;
    let mut peak = 0;
    for slot in order {
        match slot.work {
            Work::Forward => held += 1,
            Work::Backward | Work::BackwardWeight => held -= 1,
            Work::BackwardInput => {}
        }
        peak = peak.max(held);
    }
    peak
}

/// Idle time of the busiest stage: what the papers call the bubble.
fn bubble(kind: ScheduleKind, n_stages: usize, n_microbatches: usize, times: &WorkTimes) -> f64 {
    let work = times.forward + times.backward_input + times.backward_weight;
    timeline(kind, n_stages, n_microbatches, times).makespan() - n_microbatches as f64 * work
}

#[test]
fn gpipe_runs_all_forwards_first() {
    assert_eq!(text(&order(ScheduleKind::GPipe, 2, 0, 3)), "F0 F1 F2 B0 B1 B2");
}

#[test]
fn one_f_one_b_is_the_published_order() {
    let kind = ScheduleKind::OneF1B;

    assert_eq!(text(&order(kind, 4, 0, 8)), "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7");
    assert_eq!(text(&order(kind, 4, 2, 8)), "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7");
    assert_eq!(text(&order(kind, 4, 3, 3)), "F0 B0 F1 B1 F2 B2");
}

// The second order is the beginning of device 1 in figure 4 of the paper.
#[test]
fn interleaved_takes_groups_through_chunks() {
    let kind = ScheduleKind::Interleaved { chunks: 2 };

    assert_eq!(text(&order(kind, 2, 0, 2)), "F0 F1 F0' F1' B0' B1' B0 B1");
    let first = "F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2' F5' B3' F6' B0 F7' B1";
    assert!(text(&order(kind, 4, 0, 8)).starts_with(first));
    assert_eq!(text(&order(kind, 2, 1, 4)), "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3");
}

#[test]
fn zero_bubble_lets_weight_gradients_trail_by_the_stage() {
    let kind = ScheduleKind::ZeroBubble;

    assert_eq!(text(&order(kind, 3, 0, 4)), "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
    assert_eq!(text(&order(kind, 3, 2, 4)), "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
}

#[test]
fn one_stage_is_plain_accumulation() {
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble] {
        assert_eq!(text(&order(kind, 1, 0, 3)), "F0 B0 F1 B1 F2 B2", "{kind:?}");
    }
    let interleaved = ScheduleKind::Interleaved { chunks: 2 };
    assert_eq!(text(&order(interleaved, 1, 0, 2)), "F0 F0' B0' B0 F1 F1' B1' B1");
}

// A group at the end that is shorter than the pipeline deadlocks, so the schedule uses groups of nearly equal size.
#[test]
fn short_group_at_the_end_would_deadlock() {
    let (p, m, v) = (8, 10, 2);
    let with_short_group = |stage: usize| {
        let of = |first: usize, size| (0..v).flat_map(move |c| (first..first + size).map(move |i| (c, i)));
        let travel: Vec<(usize, usize)> = of(0, p).chain(of(p, m - p)).collect();
        let n_warmup = 2 * (p - 1 - stage) + (v - 1) * p;
        let forward = |k: usize| travel.get(k).map(|(c, i)| slot(Work::Forward, *c, *i));
        let steady = travel
            .iter()
            .enumerate()
            .flat_map(|(k, (c, i))| forward(n_warmup + k).into_iter().chain([slot(Work::Backward, v - 1 - c, *i)]));
        (0..n_warmup.min(travel.len())).filter_map(forward).chain(steady).collect::<Vec<_>>()
    };
    let orders: Vec<Vec<Slot>> = (0..p).map(with_short_group).collect();

    assert_eq!(run(&orders, v, m, &UNIT), None);
}

// Narayanan et al. 2021, §2.2.1: both have a bubble of (p - 1)(tf + tb).
#[test]
fn gpipe_and_1f1b_have_the_published_bubble() {
    let times = WorkTimes { forward: 1.0, backward_input: 1.25, backward_weight: 0.75, transfer: 0.0 };
    for (p, m) in [(2, 2), (4, 4), (4, 16), (8, 24), (3, 5)] {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneF1B] {
            assert_eq!(bubble(kind, p, m, &times), (p - 1) as f64 * 3.0, "{kind:?} p={p} m={m}");
        }
    }
}

// Narayanan et al. 2021, §2.2.2: (p - 1)(tf + tb) / v. Ours holds for all m >= p, not only multiples.
#[test]
fn interleaving_divides_the_bubble_by_the_chunks() {
    for (p, m, chunks) in [(4, 8, 2), (4, 8, 4), (8, 16, 3), (4, 7, 2), (8, 15, 4), (5, 23, 2)] {
        let kind = ScheduleKind::Interleaved { chunks };
        let times = WorkTimes { forward: chunks as f64, backward_input: chunks as f64, ..UNIT };
        let times = WorkTimes { backward_weight: 0.0, ..times };
        assert_eq!(bubble(kind, p, m, &times), (p - 1) as f64 * 2.0, "p={p} m={m} v={chunks}");
    }
}

// Qi et al. 2023, table 2: (p - 1)(tf + tb - tw), with tb the input gradient alone; a third of 1F1B's when all are
// equal.
#[test]
fn zero_bubble_has_the_published_bubble() {
    for (p, m) in [(2, 4), (4, 8), (4, 12), (8, 16), (16, 32)] {
        assert_eq!(bubble(ScheduleKind::ZeroBubble, p, m, &UNIT), (p - 1) as f64, "p={p} m={m}");
        assert_eq!(bubble(ScheduleKind::OneF1B, p, m, &UNIT), 3.0 * (p - 1) as f64, "p={p} m={m}");
    }
}

#[test]
fn transfers_between_neighbours_lengthen_the_pipeline() {
    let times = WorkTimes { transfer: 0.5, ..UNIT };

    let there_and_back = timeline(ScheduleKind::OneF1B, 4, 1, &times);

    assert_eq!(there_and_back.makespan(), 4.0 * 3.0 + 2.0 * 3.0 * 0.5);
    assert_eq!(timeline(ScheduleKind::OneF1B, 1, 5, &times).makespan(), 15.0);
}

// PIPELINE-3, PIPELINE-4 exhaustively for all small pipelines; the random tests below visit only some of them.
#[test]
fn every_small_pipeline_runs_to_its_end_within_its_memory() {
    for p in 1..=8 {
        for m in 1..=26 {
            let interleaved = (1..=4).map(|chunks| ScheduleKind::Interleaved { chunks });
            let others = [ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble];
            for kind in interleaved.chain(others) {
                let orders: Vec<Vec<Slot>> = (0..p).map(|s| order(kind, p, s, m)).collect();
                assert!(run(&orders, kind.n_chunks(), m, &UNIT).is_some(), "{kind:?} p={p} m={m} deadlocks");
                for (s, order) in orders.iter().enumerate() {
                    assert_eq!(peak_in_flight(order), kind.max_in_flight(p, s, m), "{kind:?} p={p} m={m} s={s}");
                }
            }
        }
    }
}

proptest! {
    // PIPELINE-1
    #[test]
    fn every_piece_of_work_is_done_once(kind in kinds(), p in 1usize..12, m in 1usize..40, at in 0usize..12) {
        let order = order(kind, p, at % p, m);

        let of = |works: &[Work]| {
            let some = order.iter().filter(|s| works.contains(&s.work));
            some.map(|s| (s.chunk, s.microbatch)).collect::<Vec<_>>()
        };
        let chunks = 0..kind.n_chunks() as u32;
        let all: BTreeSet<(u32, u32)> = chunks.flat_map(|c| (0..m as u32).map(move |i| (c, i))).collect();
        let input = [Work::Backward, Work::BackwardInput];
        let weight = [Work::Backward, Work::BackwardWeight];
        for works in [&[Work::Forward][..], &input, &weight] {
            let done = of(works);
            prop_assert_eq!(done.len(), all.len());
            prop_assert_eq!(done.into_iter().collect::<BTreeSet<_>>(), all.clone());
        }
    }

    // PIPELINE-2
    #[test]
    fn microbatches_of_a_chunk_come_in_order(kind in kinds(), p in 1usize..12, m in 1usize..40, at in 0usize..12) {
        let order = order(kind, p, at % p, m);

        for chunk in 0..kind.n_chunks() as u32 {
            for work in [Work::Forward, Work::Backward, Work::BackwardInput, Work::BackwardWeight] {
                let some = order.iter().filter(|s| s.chunk == chunk && s.work == work);
                prop_assert!(some.map(|s| s.microbatch).is_sorted());
            }
        }
    }

    // PIPELINE-3
    #[test]
    fn orders_of_all_stages_never_deadlock(kind in kinds(), p in 1usize..24, m in 1usize..64) {
        let orders: Vec<Vec<Slot>> = (0..p).map(|s| order(kind, p, s, m)).collect();

        prop_assert!(run(&orders, kind.n_chunks(), m, &UNIT).is_some());
    }

    // PIPELINE-4, Narayanan et al. 2021, §2.2.1, and Qi et al. 2023, §2.3
    #[test]
    fn one_f_one_b_and_zero_bubble_hold_as_much_as_published(p in 2usize..16, m in 1usize..64, at in 0usize..16) {
        let stage = at % p;

        prop_assert!(peak_in_flight(&order(ScheduleKind::OneF1B, p, stage, m)) <= p - stage);
        prop_assert!(peak_in_flight(&order(ScheduleKind::ZeroBubble, p, stage, m)) <= p);
    }

    #[test]
    fn no_schedule_is_faster_than_its_work(kind in kinds(), p in 1usize..10, m in 1usize..30) {
        let timeline = timeline(kind, p, m, &UNIT);

        for stage in 0..p {
            prop_assert!(timeline.idle(stage) > -1e-9);
        }
    }
}
