//! Thousands of ranks in seconds.

use super::*;
use crate::pipeline::{ScheduleKind, Work, order};
use std::time::Instant;

const LAYERS: u32 = 10;

/// pp x dp x tp ranks, tp innermost. Each stage runs 1F1B with two tensor-parallel sums a layer each way and, at the
/// end, one data-parallel reduction a layer. `marked` makes all traces differ.
fn mesh(pp: u32, dp: u32, tp: u32, n_microbatches: u32, marked: bool) -> WorldTraces {
    let mut world = WorldTraces::new();
    let rank = |s: u32, d: u32, t: u32| Rank((s * dp + d) * tp + t);
    let mut steps: Vec<Vec<Step>> = (0..pp).map(|s| stage_steps(pp, s, n_microbatches)).collect();
    for s in 0..pp {
        let shared = world.trace(std::mem::take(&mut steps[s as usize]));
        for d in 0..dp {
            for t in 0..tp {
                let groups = vec![
                    world.group((0..pp).map(|s| rank(s, d, t)).collect()),
                    world.group((0..dp).map(|d| rank(s, d, t)).collect()),
                    world.group((0..tp).map(|t| rank(s, d, t)).collect()),
                ];
                let trace = if marked {
                    let mark = Step::Compute { name: "mark", microbatch: Some(rank(s, d, t).0), cost: Duration::ZERO };
                    let own = [vec![mark], world.steps(shared).to_vec()].concat();
                    world.trace(own)
                } else {
                    shared
                };
                world.rank(trace, groups);
            }
        }
    }
    world
}

fn stage_steps(pp: u32, stage: u32, n_microbatches: u32) -> Vec<Step> {
    let (mut sent, mut received, mut summed) = ([0; 2], [0; 2], 0);
    let mut steps = Vec::new();
    let next = |counter: &mut u32| std::mem::replace(counter, *counter + 1);
    for slot in order(ScheduleKind::OneF1B, pp as usize, stage as usize, n_microbatches as usize) {
        let way = usize::from(slot.work != Work::Forward);
        let (before, after) =
            if way == 0 { (stage.checked_sub(1), stage + 1) } else { (Some(stage + 1), stage.wrapping_sub(1)) };
        if let Some(from) = before.filter(|from| *from < pp) {
            steps.extend(both(on(0, next(&mut received[way]), Kind::Recv { from, channel: 0 }, 1 << 20)));
        }
        for _ in 0..2 * LAYERS {
            steps.push(compute(MICRO * 100));
            steps.extend(both(all_reduce(2, next(&mut summed), 1 << 20)));
        }
        if after < pp {
            steps.push(Step::Start(on(0, next(&mut sent[way]), Kind::Send { to: after, channel: 0 }, 1 << 20)));
        }
    }
    let sends: Vec<Step> = steps
        .iter()
        .filter_map(|s| match s {
            Step::Start(p) if matches!(p.collective.kind, Kind::Send { .. }) => Some(Step::Await(p.collective)),
            _ => None,
        })
        .collect();
    steps.extend(sends);
    for layer in 0..LAYERS {
        steps.extend(both(on(1, layer, Kind::ReduceScatter, 1 << 24)));
    }
    steps
}

#[test]
fn four_thousand_ranks_form_a_class_for_each_stage_and_take_seconds() {
    let began = Instant::now();
    let world = mesh(8, 64, 8, 32, false);
    let node = |rank| rank / 8;
    let duration = |post: &Post, _: &[u32]| Duration::from_nanos(post.size_bytes() / 100);

    let timeline = world.simulate(&Links { mover: Mover::Links, node: &node, duration: &duration }, false).unwrap();

    assert_eq!((world.size(), world.n_traces(), timeline.representatives().len()), (4096, 8, 8));
    let seconds = began.elapsed().as_secs_f64();
    assert!(seconds < 5.0, "took {seconds} s");
}

#[test]
fn ranks_that_all_differ_take_seconds_too() {
    let began = Instant::now();
    let world = mesh(4, 32, 8, 8, true);

    assert_eq!(world.n_traces(), 1024 + 4);
    assert_eq!(world.verify(), Ok(()));
    let seconds = began.elapsed().as_secs_f64();
    assert!(seconds < 10.0, "took {seconds} s");
}
